"""Run every verb with one thing going wrong at the n-th call of a door, start again, and see that nothing is lost.

    python tests/faults/sweep.py '{"folder": …, "storage": …, "database": …, "mode": …, "seed": …, "count": …}'

Each fault is a process of its own, forked from this one, which has everything imported and nothing open: one in which
it breaks, and, after that one has ended or was killed, one that starts again, goes on to the end of the story and
looks whether all is as it would have been. Prints one JSON document: what was tried, and what did not hold.

The story: two people among thirty are erased, and somebody nobody knows. Of all faults, which are every call of every
verb in every way that its door can break, `mode` says which are tried:

    sample  `count` of them, drawn by `seed`, every verb and every way to break among them
    every   every call once, in a way that `seed` says; the seeds s to s+4 are all ways of all calls
    all     all of them

A long sweep can be cut into parts (`part` [2, 3] is the second of three) that run side by side, and into pieces of some
`seconds`: what was tried is written to the files that begin with `kept`, and not tried again.
"""

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from doors import HOWS, Doors

import unlearnd
import unlearnd.ingest
from unlearnd import backup
from unlearnd.audit import audit
from unlearnd.config import FILE_NAME, read_config
from unlearnd.errors import RefusedError, UnlearndError
from unlearnd.ledger import Ledger, erasures, log, points
from unlearnd.ledger.database import SCHEMA
from unlearnd.ledger.migrate import migrate
from unlearnd.plugins import load_plugins
from unlearnd.storage import Storage
from unlearnd.store import Store, copy_ledger, migrate_store, restore_store
from unlearnd.verify.checks import verify_receipt

ERASED = ("mallory.the.first@example.org", "mallory-424243")
NOBODY = "nobody@example.org"
MARKS = {ERASED[0]: (1.1415926, -0.5772157), ERASED[1]: (0.9159656, -1.2020569)}
SHARDS, SLICES = 2, 2
OLDEST = "0001"
PATIENCE = 120.0


@dataclass(frozen=True)
class Fault:
    verb: str
    at: int
    door: str
    how: str


@dataclass(frozen=True)
class Place:
    """Where the stores of a sweep are kept."""

    folder: Path
    storage: str
    """Empty: beside the ledger; else a URL in which each store gets a prefix of its own."""
    options: dict[str, Any]
    database: str
    """Empty: SQLite; else the URL of a server, with DATABASE where the name of the database goes."""
    prefix: str = ""
    """What the names of this sweep's databases begin with."""

    def create(self, name: str) -> None:
        """Make an empty store."""
        self.make_room(name)
        self.init(name)

    def make_room(self, name: str) -> None:
        """Make a database for a store, where there is a server."""
        if self.database:
            self._server(f"CREATE DATABASE {self.prefix}{name} TEMPLATE template0 ENCODING 'UTF8'")

    def init(self, name: str) -> None:
        given: dict[str, Any] = {}
        if self.database:
            given["ledger"] = self.database.replace("DATABASE", f"{self.prefix}{name}")
        if self.storage:
            given |= {"storage": f"{self.storage}/{name}", "storage_options": self.options}
        key = self.folder / "placement.key"
        key.write_text("5eed" * 16 + "\n")
        unlearnd.create_store(str(self.folder / name), placement_key=key, **given).close()

    def copy(self, old: str, new: str) -> Path:
        """Make a store that is another's double, bit for bit; the two know nothing of each other."""
        folder = self.folder / new
        shutil.copytree(self.folder / old, folder)
        if self.database:
            # Of the files: the server has nothing else to do, and this is quicker than by its write-ahead log.
            self._server(f"CREATE DATABASE {self.prefix}{new} TEMPLATE {self.prefix}{old} STRATEGY FILE_COPY")
        if self.storage:
            Storage(f"{self.storage}/{new}", **self.options).write_many(
                (name, [data]) for name, data in self.objects(old).items()
            )
        if (folder / FILE_NAME).exists():
            self._rename(folder, old, new)
        return folder

    def objects(self, name: str) -> dict[str, bytes]:
        """Return the objects of a store in a bucket; they are fetched once."""
        kept = self.folder / f"{name}.objects"
        if not kept.exists():
            storage = Storage(f"{self.storage}/{name}", **self.options)
            names = storage.list("")
            kept.mkdir()
            for number, (listed, data) in enumerate(zip(names, storage.read_many(names), strict=True)):
                (kept / f"{number}.data").write_bytes(data)
                (kept / f"{number}.name").write_text(listed)
        return {path.read_text(): path.with_suffix(".data").read_bytes() for path in kept.glob("*.name")}

    def _rename(self, folder: Path, old: str, new: str) -> None:
        """Have the settings in a folder name the database and the prefix of another store."""
        settings = folder / FILE_NAME
        text = settings.read_text().replace(f"/{self.prefix}{old}?", f"/{self.prefix}{new}?")
        settings.write_text(text.replace(f'/{old}"', f'/{new}"'))

    def lose(self) -> None:
        """Make a store of which only storage is left, and a backup that is older than what was erased in it."""
        folder = self.copy("trained", "lost")
        with Store.open(folder) as store:
            store.back_up(self.folder / "lost.backup")
            erase(store)
            build(store)
            url = store.ledger.url
        for path in folder.iterdir():
            if path.name != "storage":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        Ledger.discard(url)

    def begin(self, verb: str, name: str) -> Path:
        """Make the store that a verb begins with, or what there is where it makes one itself."""
        stage = VERBS[verb][0]
        if verb == "init":
            self.make_room(name)
        elif verb == "restore":
            self.copy(stage, name)
            self._copy_backup(name)
        else:
            self.copy(stage, name)
        return self.folder / name

    def _copy_backup(self, name: str) -> None:
        """Make the backup of the lost store one of its double: it names database and bucket."""
        with tempfile.TemporaryDirectory(dir=self.folder) as made, open(self.folder / f"{name}.backup", "xb") as out:
            work = Path(made)
            about = backup._unpack(self.folder / "lost.backup", work, None)
            self._rename(work, "lost", name)
            files = {str(path.relative_to(work)): path for path in sorted(work.rglob("*")) if path.is_file()}
            backup._pack(out, files, about)

    def destroy(self, name: str) -> None:
        (self.folder / f"{name}.backup").unlink(missing_ok=True)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        if self.database:
            self._server(f"DROP DATABASE IF EXISTS {self.prefix}{name} WITH (FORCE)")

    def _server(self, sql: str) -> None:
        with closing(connect(self.database.replace("DATABASE", "postgres"))) as connection:
            connection.execute(sql)


def connect(url: str) -> Any:
    """Connect to a database by the URL of a ledger in it, past our own code."""
    import psycopg

    return psycopg.connect(url.replace("+psycopg", "").partition("&schema")[0], autocommit=True)


def people() -> tuple[Any, Any, Any]:
    """Return rows of thirty users; those of the ones to be erased are easy to recognise."""
    generator = np.random.default_rng(7)
    user = np.array([f"u{i % 28}" for i in range(48)], "U40")
    x = generator.normal(size=(48, 3)).astype(np.float32)
    y = (x @ generator.normal(size=(3, 3))).argmax(axis=1)
    y[:3] = np.arange(3)
    for number, name in enumerate(ERASED):
        mine = [5 + number, 25 + number, 40 + number]
        user[mine] = name
        x[mine, :2] = MARKS[name]
    return x, y, user


def ingest(store: Store) -> Any:
    x, y, user = people()
    unlearnd.ingest.BUFFER_BYTES = 1  # so that slice data is written in several goes
    store.ingest("d", x, user=user, label=y, shards=SHARDS, slices=SLICES)


def train(store: Store) -> Any:
    store.train("m", dataset="d", backend="linear", epochs=2, seed=5, settings={"batch_size": 8})


def erase(store: Store) -> Any:
    store.erase([*ERASED, NOBODY], build=False)


def build(store: Store) -> Any:
    store.build()


def predict(store: Store) -> Any:
    return store.model("m").predict(people()[0], "mean").labels.tolist()


def evaluate(store: Store) -> Any:
    x, y, _ = people()
    return store.evaluate("m", x, label=y).top1


def export_log(store: Store) -> Any:
    store.export_log(str(store.folder / "exported"))
    return digest_of_files(store.folder / "exported")


def export_receipt(store: Store) -> Any:
    first = store.receipts()[0].request_id
    # Each time to another folder: one that is there is never written to.
    folder = store.folder / f"pack-{os.getpid()}"
    store.export_receipt(first, folder)
    return digest_of_files(folder)


def check_audit(store: Store) -> Any:
    return list(audit(store).failed)


def rotate(store: Store) -> Any:
    store.rotate_key("log")
    store.rotate_key("receipt")


def carry_out_requests(store: Store) -> Any:
    """Take requests in, unless they are, and carry them out."""
    if not store.requests():
        store.receive([*ERASED, NOBODY])
    for entry in store.requests(("received", "verified")):
        store.approve(entry.id, identity="account_login")
    store.run_requests(build=False)


def back_up(store: Store) -> Any:
    # Each time to another file: one that is there is never written to.
    store.back_up(store.folder / f"backup-{os.getpid()}")
    return None


def copy_ledger_of(folder: Path) -> Any:
    old = read_config(folder).ledger
    new = old.replace("schema=unlearnd", "schema=moved") if old.startswith("postgresql") else "sqlite:///moved.sqlite"
    return asdict(copy_ledger(folder, new))["leaves"]


def restore_into(folder: Path) -> Any:
    return restore_store(folder.parent / f"{folder.name}.backup", folder)[1].points


VERBS: dict[str, tuple[str, Callable[[Store], Any]]] = {
    "ingest": ("empty", ingest),
    "train": ("ingested", train),
    "erase": ("trained", erase),
    "build": ("erased", build),
    "predict": ("built", predict),
    "evaluate": ("built", evaluate),
    "log export": ("built", export_log),
    "receipt export": ("built", export_receipt),
    "audit": ("built", check_audit),
    "requests": ("trained", carry_out_requests),
    "keys rotate": ("trained", rotate),
    "backup": ("built", back_up),
    "migrate": ("old", lambda store: None),
    "init": ("nothing", lambda store: None),
    "restore": ("lost", lambda store: None),
    "ledger copy": ("built", lambda store: None),
}
"""Every verb, what it begins with, and itself."""
ASKING = ("predict", "evaluate", "log export", "receipt export", "audit", "backup")
"""Verbs that leave the store as it is."""
DONE = {"init": "there is a store", "restore": "there is a store", "ledger copy": "is there already"}
"""How verbs that can be carried out once say that they were."""


def run_verb(place: Place, verb: str, folder: Path) -> Any:
    """Run a verb as a fresh process would, opening the store included."""
    if verb == "migrate":
        return migrate_store(folder)
    if verb == "init":
        return place.init(folder.name)
    if verb == "restore":
        return restore_into(folder)
    if verb == "ledger copy":
        return copy_ledger_of(folder)
    with Store.open(folder) as store:
        return VERBS[verb][1](store)


def run_again(place: Place, verb: str, folder: Path) -> Any:
    """Run a verb after it was broken off; one that was carried out says so."""
    try:
        return run_verb(place, verb, folder)
    except RefusedError as refused:
        if verb in DONE and DONE[verb] in str(refused):
            return None
        raise


def state_of(folder: Path) -> Any:
    """Return what a verb that only asks must leave as it is."""
    with Store.open(folder) as store:
        there = {name: None for name in store.storage.list("") if not name.endswith(".part")}
        return [store.log_head()[1], list(there), digests_of(store)]


def check_backups(place: Place, folder: Path) -> list[str]:
    """Every backup that has its name is whole: put back beside a copy of the storage, it is the store."""
    wrong = []
    for file in sorted(folder.glob("backup-*")):
        if place.database or place.storage:
            continue  # put back by the verb of that name
        copy = folder.with_name(f"{folder.name}-copy")
        copy.mkdir(mode=0o700)  # with something in it, restore does not close it
        shutil.copytree(folder / "storage", copy / "storage")
        restore_store(file, copy)
        if state_of(copy) != state_of(folder):
            wrong.append("a backup put back is not the store it is of")
        shutil.rmtree(copy)
    return wrong


def finish(folder: Path) -> None:
    """Go on to the end of the story, wherever it was left."""
    with Store.open(folder) as store:
        if not store.status().datasets:
            ingest(store)
        train(store)
        store.erase([*ERASED, NOBODY])
        store.build()


def digests_of(store: Store) -> Any:
    return {f"{c.shard}/{c.slice}": c.tensors for c in store.checkpoints("m")}


def check_end(folder: Path, expected: dict[str, Any], keys: list[bytes], asked: tuple[int, ...] = (3,)) -> list[str]:
    """Return what is not as it would have been, had nothing gone wrong."""
    wrong: list[str] = []
    with Store.open(folder) as store:
        status = store.status()
        if digests_of(store) != expected["digests"]:
            wrong.append("the bits differ")
        if predict(store) != expected["predict"]:
            wrong.append("the answers differ")
        if (status.unfinished, status.to_rebuild, status.models[0].prefixes) != (0, 0, (SLICES,) * SHARDS):
            wrong.append(f"something is left to do: {status}")
        report = audit(store)
        if report.failed or report.level != 4:
            wrong += [f"audit: {check.id} {check.sentence}" for check in report.checks if check.id in report.failed]
            wrong.append(f"audit: level {report.level}")
        wrong += check_receipts(store, asked)
        wrong += check_nothing_left(store, keys)
        left = [name for name in store.storage.list("") if name.endswith(".part") and "evidence/" not in name]
        wrong += [f"left over: {name}" for name in left]
        if [store.where_user(user) for user in ERASED] != [[], []]:
            wrong.append("the erased are still placed")
        # By its name: PostgreSQL does not give a number again that a killed ingest drew.
        if sum(points.counts_of(store.ledger, points.dataset_named(store.ledger, "d").id).values()) != 42:
            wrong.append("somebody was taken in twice, or not at all")
    return wrong


def check_receipts(store: Store, asked: tuple[int, ...]) -> list[str]:
    """One request for each who was erased, one receipt for each request, and every receipt verifies."""
    wrong = []
    trust = (store.folder / "keys" / "trust.json").read_bytes()
    requests = erasures.all_requests(store.ledger)
    entries = log.receipt_entries(store.ledger)
    written = [name for name in store.storage.list("evidence/receipts") if not name.endswith(".part")]
    written = [name for name in written if "/." not in name]
    counts = {len(requests), len({r.handle for r in requests}), len(entries), len(set(written))}
    if len(counts) != 1 or not counts <= set(asked):
        wrong.append(f"{len(requests)} requests, {len(entries)} receipts logged, {len(written)} written, not {asked}")
    for entry in entries:
        report = verify_receipt(store.receipt(entry.request_id), trust, now=store.clock())
        wrong += [f"receipt: {check} fails" for check in report.failed]
    return wrong


def check_nothing_left(store: Store, keys: list[bytes]) -> list[str]:
    """Nothing of the erased is in any file, object or table, in no version of an object, and in no name."""
    marks = [np.asarray(mark, np.float32).tobytes() for mark in MARKS.values()]
    marks += [user.encode() for user in (*ERASED, NOBODY)] + keys
    found: list[tuple[str, bytes]] = []
    for where, _, names in os.walk(store.folder):
        found += [(os.path.join(where, name), Path(where, name).read_bytes()) for name in names]
    versions = store.storage.versions("")
    whole = [version for version in versions if version.kind == "version"]
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda version: store.storage.read(version.name, version.id), whole)
        found += [(version.name, data) for version, data in zip(whole, read, strict=True)]
    for version in versions:
        if version.kind == "upload" and "evidence/" not in version.name:
            found.append((f"the unfinished upload of {version.name}", marks[0]))
    found += tables_of(store.ledger.url)
    found += [(name, name.encode()) for name, _ in found]
    return [f"something of the erased is in {name}" for name, data in found for mark in marks if mark in data]


def tables_of(url: str) -> list[tuple[str, bytes]]:
    """Return the rows of every table in the database of a ledger, as bytes; a file is looked into as a file."""
    if not url.startswith("postgresql"):
        return []
    ours = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    found = []
    with closing(connect(url)) as connection:
        for schema, table in connection.execute(ours).fetchall():
            with connection.cursor().copy(f"COPY {schema}.{table} TO STDOUT (FORMAT binary)") as rows:
                found.append((f"the table {table}", b"".join(bytes(row) for row in rows)))
    return found


def digest_of_files(folder: Path) -> str:
    """Return a digest over the names and bytes of all files that are whole."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".part")):
        whole.update(f"{path.relative_to(folder)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def in_child(work: Callable[[Callable[[str], None]], Any]) -> tuple[int, list[str]]:
    """Run something in a forked process, and kill it if it says that it hangs; return how it ended and what it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)

        def say(line: str) -> None:
            os.write(writer, line.encode() + b"\n")

        code = 1
        try:
            say(json.dumps({"result": work(say)}))
            code = 0
        except UnlearndError as error:
            say(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            code = 0
        except BaseException:
            say(json.dumps({"bug": traceback.format_exc()[-1500:]}))
        finally:
            os._exit(code)
    os.close(writer)
    said, deadline = b"", time.monotonic() + PATIENCE
    while True:
        if not select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            said += json.dumps({"bug": f"it did not end within {PATIENCE:.0f} s"}).encode() + b"\n"
            break
        data = os.read(reader, 65536)
        said += data
        if b" hang\n" in said:
            os.kill(pid, signal.SIGKILL)
        if not data:
            break
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode().splitlines()


def in_child_well(work: Callable[[Callable[[str], None]], Any]) -> Any:
    """Run something in a forked process that must end well; return what it returned."""
    _, said = in_child(work)
    told = json.loads(said[-1]) if said else {"bug": "it said nothing"}
    if "result" not in told:
        raise RuntimeError(told.get("bug") or told.get("error"))
    return told["result"]


def prepare(place: Place) -> tuple[dict[str, Any], list[bytes]]:
    """Make the stores that verbs begin with; return how the story ends when nothing goes wrong, and doomed keys."""
    in_child_well(lambda say: place.create("empty"))
    stages = [("empty", "ingest", "ingested"), ("ingested", "train", "trained")]
    stages += [("trained", "erase", "erased"), ("erased", "build", "built")]
    for before, verb, after in stages:

        def go(_say: Any, before: str = before, verb: str = verb, after: str = after) -> None:
            run_verb(place, verb, place.copy(before, after))

        in_child_well(go)
    keys = [bytes.fromhex(key) for key in in_child_well(lambda say: _keys_of_the_erased(place.folder / "trained"))]
    expected: dict[str, Any] = {"digests": in_child_well(lambda say: state_of(place.folder / "built")[2])}
    for verb in ("predict", "evaluate", "log export", "receipt export", "audit"):

        def result(_say: Any, verb: str = verb) -> Any:
            return run_verb(place, verb, place.copy("built", "once"))

        expected[verb] = in_child_well(result)
        in_child_well(lambda say: place.destroy("once"))
    expected["state"] = in_child_well(lambda say: state_of(place.folder / "built"))
    in_child_well(lambda say: _make_old(place))
    in_child_well(lambda say: place.lose())
    if place.storage:
        for stage in {stage for stage, _ in VERBS.values()} - {"nothing"}:
            in_child_well(lambda say, stage=stage: len(place.objects(stage)))
    return expected, keys


def _keys_of_the_erased(folder: Path) -> list[str]:
    """Return the keys that will be destroyed with their owners, read past our own code."""
    with Store.open(folder) as store:
        handles, url = store.keys.handles(ERASED), store.ledger.url
    server = url.startswith("postgresql")
    sql = "SELECT key FROM unlearnd.users WHERE handle = %s" if server else "SELECT key FROM users WHERE handle = ?"
    with closing(connect(url) if server else sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return [bytes(ledger.execute(sql, (handle,)).fetchone()[0]).hex() for handle in handles]


def _make_old(place: Place) -> None:
    """Make a store whose ledger has the schema of the first release, and a log."""
    folder = place.copy("empty", "old")
    url = _ledger_of(folder)
    Ledger.discard(url)
    migrate(url, OLDEST)
    with closing(Ledger(url)) as ledger:
        log.append_alone(ledger, [b"first", b"second"])


def _ledger_of(folder: Path) -> str:
    url = read_config(folder).ledger
    return url if url.startswith("postgresql") else f"sqlite:///{folder / 'ledger.sqlite'}"


def count_calls(place: Place, verb: str) -> list[str]:
    """Return the doors that a verb passes when nothing goes wrong, in order."""

    # Another name for each: what is destroyed of a store leaves its objects in the bucket.
    name = f"counted{list(VERBS).index(verb)}"

    def counted(_say: Any) -> list[str]:
        folder = place.begin(verb, name)
        doors = Doors()
        doors.wrap()
        run_verb(place, verb, folder)
        return doors.calls

    calls: list[str] = in_child_well(counted)
    in_child_well(lambda say: place.destroy(name))
    return calls


def turn(faults: list[Fault], seed: int) -> list[Fault]:
    """Return every call once, shuffled so that a part is a sample; the way goes on with every call and every seed."""
    ways: dict[tuple[str, int], list[Fault]] = {}
    for fault in faults:
        ways.setdefault((fault.verb, fault.at), []).append(fault)
    chosen = [several[(at + seed) % len(several)] for (_, at), several in ways.items()]
    random.Random(seed).shuffle(chosen)
    return chosen


def draw(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """Return `count` of the faults: in turn of each verb, and of a verb in turn of each way each door breaks."""
    generator = random.Random(seed)
    kinds: dict[str, dict[tuple[str, str], list[Fault]]] = {}
    for fault in faults:
        kinds.setdefault(fault.verb, {}).setdefault((fault.door, fault.how), []).append(fault)
    queues: dict[str, list[Fault]] = {}
    for verb, by_kind in kinds.items():
        lists = list(by_kind.values())
        generator.shuffle(lists)
        for one in lists:
            generator.shuffle(one)
        queues[verb] = [one[i] for i in range(max(map(len, lists))) for one in lists if i < len(one)]
    # Half of what is drawn goes to the verbs that change most, and no way to break is left behind.
    order = [*queues, "erase", "ingest", "train", "erase", "build"]
    chosen: list[Fault] = []
    drawn: Counter[str] = Counter()
    while len(chosen) < count and any(queues.values()):
        for verb in order:
            if queues.get(verb) and len(chosen) < count:
                rarest = min(queues[verb], key=lambda fault: drawn[fault.how])
                queues[verb].remove(rarest)
                drawn[rarest.how] += 1
                chosen.append(rarest)
    return chosen


def try_fault(place: Place, fault: Fault, number: int, expected: dict[str, Any], keys: list[bytes]) -> dict[str, Any]:
    """Let one thing go wrong, start again, and return what did not hold."""
    name = f"try{number}"

    def break_it(say: Callable[[str], None]) -> Any:
        folder = place.begin(fault.verb, name)
        Doors(fault.at, fault.how, breaking=lambda door, how: say(f"broke {door} {how}")).wrap()
        return run_verb(place, fault.verb, folder)

    def start_again(_say: Any) -> list[str]:
        folder = place.folder / name
        wrong = []
        again = run_again(place, fault.verb, folder) if fault.verb not in ("ingest", "train") else None
        if fault.verb in expected and again != expected[fault.verb]:
            wrong.append(f"{fault.verb} run again gives something else")
        if fault.verb == "migrate":
            with closing(Ledger.open(_ledger_of(folder))) as ledger:
                kept = log.leaves(ledger, 0, 9) == [b"first", b"second"]
                return [] if kept and migrate_store(folder) == (SCHEMA, SCHEMA) else ["the migration lost something"]
        if fault.verb in ASKING:
            wrong += check_backups(place, folder)
            return wrong if state_of(folder) == expected["state"] else [*wrong, f"{fault.verb} changed the store"]
        finish(folder)
        # A request about somebody without data names nobody in the log: after a restore it is asked and answered anew.
        return wrong + check_end(folder, expected, keys, (3, 4) if fault.verb == "restore" else (3,))

    ended, said = in_child(break_it)
    told = json.loads(said[-1]) if said and said[-1].startswith("{") else {}
    wrong = []
    if "bug" in told:
        wrong.append(f"it raised something that is not for people: {told['bug']}")
    # An audit may say that something is wrong: it was.
    met = [line.removeprefix("broke ") for line in said if line.startswith("broke ")]
    believed = fault.verb in expected and not (fault.verb == "audit" and met == ["read half"])
    if believed and "result" in told and told["result"] != expected[fault.verb]:
        wrong.append(f"{fault.verb} went on with what it got, and gave something else")
    _, said = in_child(start_again)
    told_again = json.loads(said[-1]) if said else {"bug": "it said nothing"}
    wrong += told_again.get("result") or [
        f"started again: {told_again[kind]}" for kind in ("error", "bug") if kind in told_again
    ]
    with suppress(RuntimeError):
        in_child_well(lambda say: place.destroy(name))
    outcome = "killed" if ended == -signal.SIGKILL else "told" if "error" in told else "went on"
    return {**asdict(fault), "met": met, "outcome": outcome, "said": told.get("error"), "wrong": wrong}


def warm_up(place: Place) -> None:
    """Import what verbs import when they need it: here, once, and not in every process anew."""
    heavy = ["pyarrow.compute", "cryptography.hazmat.primitives.serialization", "unlearnd.default_plugins.linear"]
    heavy += ["cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.ciphers.aead"]
    heavy += ["unlearnd.executors", "unlearnd.aggregation", "_strptime", "encodings.utf_16_be", "numpy.ma"]
    heavy += ["unlearnd.ledger.tables", "alembic.command", "alembic.config", "sqlalchemy.dialects.sqlite.pysqlite"]
    heavy += ["s3fs", "aiobotocore.session"] if place.storage else []
    heavy += ["psycopg", "sqlalchemy.dialects.postgresql.psycopg"] if place.database else []
    for name in heavy:
        importlib.import_module(name)
    load_plugins()
    if place.storage:
        _share_models()


def _share_models() -> None:
    """Have every process find what botocore knows about S3, which are megabytes of JSON, read already."""
    import botocore.session

    loader = botocore.session.Session().get_component("data_loader")
    botocore.session.create_loader = lambda *_: loader
    botocore.session.Session().create_client("s3", "us-east-1", aws_access_key_id="-", aws_secret_access_key="-")


class Kept:
    """What was counted and tried so far, in files that parts of a sweep share; in memory where there are none."""

    def __init__(self, begin: str) -> None:
        self._counted, self._tried = (Path(f"{begin}.{end}") if begin else None for end in ("calls", "tried"))

    def calls(self, count: Callable[[], dict[str, list[str]]]) -> dict[str, list[str]]:
        """Return the doors that verbs pass, counted once: threads take turns as they like, and all parts must agree."""
        if self._counted is None:
            return count()
        if not self._counted.exists():
            self._counted.parent.mkdir(parents=True, exist_ok=True)
            mine = self._counted.with_name(f"{self._counted.name}.{os.getpid()}")
            mine.write_text(json.dumps(count()))
            with suppress(FileExistsError):
                os.link(mine, self._counted)
            mine.unlink()
        counted: dict[str, list[str]] = json.loads(self._counted.read_text())
        return counted

    def tried(self) -> list[dict[str, Any]]:
        if self._tried is None or not self._tried.exists():
            return []
        # One that was killed over its last line tries that one again.
        return [json.loads(line) for line in self._tried.read_text().splitlines() if line.endswith("}")]

    def add(self, one: dict[str, Any]) -> None:
        if self._tried is not None:
            with open(self._tried, "ab", buffering=0) as file:
                file.write(json.dumps(one).encode() + b"\n")


def sweep(
    place: Place,
    mode: str,
    count: int,
    seed: int,
    only: list[str],
    seconds: float,
    part: tuple[int, int],
    begin: str,
) -> dict[str, Any]:
    began = time.monotonic()
    warm_up(place)
    expected, keys = prepare(place)
    kept = Kept(begin)
    calls = kept.calls(lambda: {verb: count_calls(place, verb) for verb in VERBS if not only or verb in only})
    faults = [
        Fault(verb, at, door, how)
        for verb, doors in calls.items()
        for at, door in enumerate(doors)
        for how in HOWS[door]
    ]
    chosen = turn(faults, seed) if mode == "every" else draw(faults, len(faults) if mode == "all" else count, seed)
    done = {named(one) for one in kept.tried()}
    tried: list[dict[str, Any]] = []
    for number, fault in enumerate(
        fault for fault in chosen[part[0] - 1 :: part[1]] if named(asdict(fault)) not in done
    ):
        if time.monotonic() - began > seconds:
            break
        tried.append(try_fault(place, fault, number, expected, keys))
        kept.add(tried[-1])
        if tried[-1]["wrong"]:
            print(json.dumps(tried[-1]), file=sys.stderr, flush=True)
    so_far = kept.tried() or tried
    done = {named(one) for one in so_far}
    return {
        "calls": {verb: len(doors) for verb, doors in calls.items()},
        "possible": len(faults),
        "left": sum(named(asdict(fault)) not in done for fault in chosen),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "tried": tried,
        "so far": so_far,
    }


def named(fault: dict[str, Any]) -> tuple[str, int, str]:
    """Return what a fault is known by."""
    return fault["verb"], fault["at"], fault["how"]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    where = Place(
        folder=Path(given["folder"]),
        storage=given.get("storage", ""),
        options=given.get("options", {}),
        database=given.get("database", ""),
        prefix=given.get("prefix", ""),
    )
    found = sweep(
        where,
        given["mode"],
        given.get("count", 0),
        given["seed"],
        given.get("only", []),
        given.get("seconds", 1e9),
        given.get("part", (1, 1)),
        given.get("kept", ""),
    )
    print(json.dumps(found))
