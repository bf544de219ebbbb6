"""Run every verb with one thing going wrong at the n-th call of a door, start again, and see that nothing is lost.

    python tests/faults/sweep.py '{"folder": …, "storage": …, "database": …, "seed": …, "count": …}'

Each fault is a process of its own, forked from this one, which has everything imported and nothing open: one in which
it breaks, and, after that one has ended or was killed, one that starts again, goes on to the end of the story and
looks whether all is as it would have been. Prints one JSON document: what was tried, and what did not hold.

The story: two people among thirty are erased, and somebody nobody knows. `count` faults are drawn by `seed`, every
verb and every way to break among them; with `count` 0 all of them are tried.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from doors import HOWS, Doors

import unlearnd
import unlearnd.ingest
from unlearnd.audit import audit
from unlearnd.config import FILE_NAME, read_config
from unlearnd.errors import UnlearndError
from unlearnd.ledger import Ledger, erasures, log, points
from unlearnd.ledger.database import SCHEMA
from unlearnd.ledger.migrate import migrate
from unlearnd.storage import Storage
from unlearnd.store import Store, migrate_store
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
        if self.database:
            self._server(f"CREATE DATABASE {self.prefix}{name} TEMPLATE template0 ENCODING 'UTF8'")
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
            self._server(f"CREATE DATABASE {self.prefix}{new} TEMPLATE {self.prefix}{old}")
        if self.storage:
            theirs, ours = (Storage(f"{self.storage}/{name}", **self.options) for name in (old, new))
            names = theirs.list("")
            ours.write_many((name, [data]) for name, data in zip(names, theirs.read_many(names), strict=True))
        settings = folder / FILE_NAME
        text = settings.read_text().replace(f"/{self.prefix}{old}?", f"/{self.prefix}{new}?")
        settings.write_text(text.replace(f'/{old}"', f'/{new}"'))
        return folder

    def destroy(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        if self.database:
            self._server(f"DROP DATABASE IF EXISTS {self.prefix}{name} WITH (FORCE)")

    def _server(self, sql: str) -> None:
        import psycopg

        url = self.database.replace("+psycopg", "").replace("DATABASE", "postgres").partition("&schema")[0]
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql)


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
    "migrate": ("old", lambda store: None),
}
"""Every verb, what it begins with, and itself."""


def run_verb(verb: str, folder: Path) -> Any:
    """Run a verb as a fresh process would, opening the store included."""
    if verb == "migrate":
        return migrate_store(folder)
    with Store.open(folder) as store:
        return VERBS[verb][1](store)


def finish(folder: Path) -> None:
    """Go on to the end of the story, wherever it was left."""
    with Store.open(folder) as store:
        if not store.status().datasets:
            ingest(store)
        train(store)
        store.erase([*ERASED, NOBODY])
        store.build()


def digests_of(folder: Path) -> Any:
    with Store.open(folder) as store:
        return {f"{c.shard}/{c.slice}": c.tensors for c in store.checkpoints("m")}


def check_end(folder: Path, expected: dict[str, Any], keys: list[bytes]) -> list[str]:
    """Return what is not as it would have been, had nothing gone wrong."""
    wrong: list[str] = []
    with Store.open(folder) as store:
        status = store.status()
        if digests_of(folder) != expected["digests"]:
            wrong.append("the bits differ")
        if predict(store) != expected["predict"]:
            wrong.append("the answers differ")
        if (status.unfinished, status.to_rebuild, status.models[0].prefixes) != (0, 0, (SLICES,) * SHARDS):
            wrong.append(f"something is left to do: {status}")
        report = audit(store)
        if report.failed or report.level != 4:
            wrong += [f"audit: {check.id} {check.sentence}" for check in report.checks if check.id in report.failed]
            wrong.append(f"audit: level {report.level}")
        wrong += check_receipts(store)
        wrong += check_nothing_left(store, keys)
        left = [name for name in store.storage.list("") if name.endswith(".part") and "evidence/" not in name]
        wrong += [f"left over: {name}" for name in left]
        if [store.where_user(user) for user in ERASED] != [[], []]:
            wrong.append("the erased are still placed")
        if sum(points.counts_of(store.ledger, 1).values()) != 42:
            wrong.append("somebody was taken in twice, or not at all")
    return wrong


def check_receipts(store: Store) -> list[str]:
    """One request for each who was erased, one receipt for each request, and every receipt verifies."""
    wrong = []
    trust = (store.folder / "keys" / "trust.json").read_bytes()
    requests = erasures.all_requests(store.ledger)
    entries = log.receipt_entries(store.ledger)
    written = [name for name in store.storage.list("evidence/receipts") if not name.endswith(".part")]
    written = [name for name in written if "/." not in name]
    if not len(requests) == len({r.handle for r in requests}) == len(entries) == len(set(written)) == 3:
        wrong.append(f"{len(requests)} requests, {len(entries)} receipts logged, {len(written)} written; 3 were asked")
    for entry in entries:
        report = verify_receipt(store.receipt(entry.request_id), trust, now=store.clock())
        wrong += [f"receipt: {check} fails" for check in report.failed]
    return wrong


def check_nothing_left(store: Store, keys: list[bytes]) -> list[str]:
    """Nothing of the erased is in any file or object, in no version of one, and in no name."""
    marks = [np.asarray(mark, np.float32).tobytes() for mark in MARKS.values()]
    marks += [user.encode() for user in (*ERASED, NOBODY)] + keys
    found: list[tuple[str, bytes]] = []
    for where, _, names in os.walk(store.folder):
        found += [(os.path.join(where, name), Path(where, name).read_bytes()) for name in names]
    for version in store.storage.versions(""):
        if version.kind == "version":
            found.append((version.name, store.storage.read(version.name, version.id)))
        elif version.kind == "upload" and "evidence/" not in version.name:
            found.append((f"the unfinished upload of {version.name}", marks[0]))
    return [f"something of the erased is in {name}" for name, data in found for mark in marks if mark in data]


def digest_of_files(folder: Path) -> str:
    """Return a digest over the names and bytes of all files that are whole."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".part")):
        whole.update(f"{path.relative_to(folder)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def in_child(work: Callable[[Callable[[str], None]], Any]) -> tuple[int, list[str]]:
    """Run something in a forked process; return how it ended and what it said. One that says `hanging` is killed."""
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
        if b"hanging\n" in said:
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
            run_verb(verb, place.copy(before, after))

        in_child_well(go)
    keys: list[bytes] = []
    if not place.database:
        with closing(sqlite3.connect(place.folder / "trained" / "ledger.sqlite")) as ledger:
            handles = in_child_well(lambda say: _handles(place.folder / "trained"))
            for handle in handles:
                keys += ledger.execute("SELECT key FROM users WHERE handle = ?", (bytes.fromhex(handle),)).fetchone()
    expected: dict[str, Any] = {"digests": in_child_well(lambda say: digests_of(place.folder / "built"))}
    for verb in ("predict", "evaluate", "log export", "receipt export", "audit"):

        def result(_say: Any, verb: str = verb) -> Any:
            return run_verb(verb, place.copy("built", "once"))

        expected[verb] = in_child_well(result)
        in_child_well(lambda say: place.destroy("once"))
    in_child_well(lambda say: _make_old(place))
    return expected, keys


def _handles(folder: Path) -> list[str]:
    with Store.open(folder) as store:
        return [handle.hex() for handle in store.keys.handles(ERASED)]


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

    def counted(_say: Any) -> list[str]:
        folder = place.copy(VERBS[verb][0], "counted")
        doors = Doors()
        doors.wrap()
        run_verb(verb, folder)
        return doors.calls

    calls: list[str] = in_child_well(counted)
    in_child_well(lambda say: place.destroy("counted"))
    return calls


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
        folder = place.copy(VERBS[fault.verb][0], name)
        doors = Doors(fault.at, fault.how, hanging=lambda: say("hanging"))
        doors.wrap()
        try:
            return run_verb(fault.verb, folder)
        finally:
            say(f"broke {doors.broke}")

    def start_again(_say: Any) -> list[str]:
        folder = place.folder / name
        wrong = []
        again = run_verb(fault.verb, folder) if fault.verb not in ("ingest", "train") else None
        if fault.verb in expected and again != expected[fault.verb]:
            wrong.append(f"{fault.verb} run again gives something else")
        if fault.verb == "migrate":
            with closing(Ledger.open(_ledger_of(folder))) as ledger:
                kept = log.leaves(ledger, 0, 9) == [b"first", b"second"]
                return [] if kept and migrate_store(folder) == (SCHEMA, SCHEMA) else ["the migration lost something"]
        finish(folder)
        return wrong + check_end(folder, expected, keys)

    ended, said = in_child(break_it)
    told = json.loads(said[-1]) if said and said[-1].startswith("{") else {}
    wrong = []
    if "bug" in told:
        wrong.append(f"it raised something that is not for people: {told['bug']}")
    # An audit may say that something is wrong: it was.
    believed = fault.verb in expected and (fault.verb, fault.how) != ("audit", "half")
    if believed and "result" in told and told["result"] != expected[fault.verb]:
        wrong.append(f"{fault.verb} went on with what it got, and gave something else")
    broke = ended == -signal.SIGKILL or "broke True" in said
    _, said = in_child(start_again)
    told_again = json.loads(said[-1]) if said else {"bug": "it said nothing"}
    wrong += told_again.get("result") or [
        f"started again: {told_again[kind]}" for kind in ("error", "bug") if kind in told_again
    ]
    with suppress(RuntimeError):
        in_child_well(lambda say: place.destroy(name))
    outcome = "killed" if ended == -signal.SIGKILL else "told" if "error" in told else "went on"
    return {**asdict(fault), "broke": broke, "outcome": outcome, "said": told.get("error"), "wrong": wrong}


def sweep(place: Place, count: int, seed: int, only: list[str], seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    if place.storage:
        import s3fs  # noqa: F401  (here, once, and not in every process anew)
    expected, keys = prepare(place)
    calls = {verb: count_calls(place, verb) for verb in VERBS if not only or verb in only}
    faults = [
        Fault(verb, at, door, how)
        for verb, doors in calls.items()
        for at, door in enumerate(doors)
        for how in HOWS[door]
    ]
    chosen = draw(faults, count or len(faults), seed)
    tried = []
    for number, fault in enumerate(chosen):
        if time.monotonic() - began > seconds:
            break
        tried.append(try_fault(place, fault, number, expected, keys))
        if tried[-1]["wrong"]:
            print(json.dumps(tried[-1]), file=sys.stderr, flush=True)
    return {
        "calls": {verb: len(doors) for verb, doors in calls.items()},
        "possible": len(faults),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "tried": tried,
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    where = Place(
        folder=Path(given["folder"]),
        storage=given.get("storage", ""),
        options=given.get("options", {}),
        database=given.get("database", ""),
        prefix=given.get("prefix", ""),
    )
    found = sweep(where, given["count"], given["seed"], given.get("only", []), given.get("seconds", 1e9))
    print(json.dumps(found))
