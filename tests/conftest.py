"""What several test files share: made-up people, stores in `tmp_path`, and ways to look at what is on disk.

Everything is real: SQLite, files, child processes. Test modules cannot import each other (importlib mode), so
helpers come as fixtures.
"""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd import steps
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


@pytest.fixture
def people() -> Callable[..., People]:
    """Make people up."""
    return make_people


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Make stores that all share one placement key, and close them at the end."""
    key = tmp_path / "placement.key"
    key.write_text(PLACEMENT_KEY + "\n")
    made: list[Store] = []

    def make(name: str = "store", **options: Any) -> Store:
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
        there = {name for name in everything if not name.startswith("evidence/")}
        segments = ask_ledger(folder, "SELECT path FROM segment WHERE replaced_at IS NULL AND destroyed_at IS NULL")
        checkpoints = ask_ledger(folder, "SELECT path FROM checkpoint WHERE destroyed_at IS NULL")
        assert there == {path for (path,) in segments + checkpoints}
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
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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


@pytest.fixture
def run_python(start_python: Callable[..., "subprocess.Popen[str]"]) -> Callable[..., str]:
    """Run a script in a child process to its end; return what it printed, or fail with what it complained."""

    def run(script: str, *arguments: object, code: int = 0) -> str:
        child = start_python(script, *arguments)
        out, err = child.communicate(timeout=120)
        assert child.returncode == code, err
        return out

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
