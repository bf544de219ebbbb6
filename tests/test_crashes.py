"""Kill -9 at every durable step, run the same thing again, and everything ends as if nothing had happened.

The journey below takes points in twice, trains a plain model and one on a frozen base, holds a request and lets it go,
erases two users and one nobody
knows, and builds. A real child
process kills itself at a step; a fresh one runs the journey again. The steps come from `unlearnd.steps.Step`,
so a step that is added is killed at, too.
"""

import json
import os
import re
import runpy
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import unlearnd
from unlearnd.errors import BackendError
from unlearnd.steps import Step

ERASED = ("mallory.the.first@example.org", "mallory-424243")
NOBODY = "nobody@example.org"
# Two features that nobody else has, as they lie in a file.
MARKS = {ERASED[0]: (1.1415926, -0.5772157), ERASED[1]: (0.9159656, -1.2020569)}
SHARDS, SLICES, LATER = 3, 3, 2

JOURNEY = """
import json, os, runpy, signal, sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
import unlearnd, unlearnd.ingest
from unlearnd import steps

folder, step, hit, users, early, late = *sys.argv[1:3], int(sys.argv[3]), *map(json.loads, sys.argv[4:7])
backend, base = runpy.run_path(sys.argv[7])["TransferBackend"](), sys.argv[8]
unlearnd.ingest.BUFFER_BYTES = 1  # so that slice data is written in several goes
counts = Counter()

def watch(reached):
    counts[reached.name] += 1
    if reached.name == step and counts[step] == hit:
        os.kill(os.getpid(), signal.SIGKILL)

steps.watcher = watch
with unlearnd.open_store(folder) as store:
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, "transfer": backend})
    options = dict(user="user", label="label")
    if not store.status().datasets:
        store.ingest("d", early, shards=3, slices=3, **options)
    store.train("m", dataset="d", backend="linear", epochs=2, seed=5, settings={"batch_size": 8})
    settings = {"batch_size": 8, "base": base, "base_public": True}
    store.train("t", dataset="d", backend="transfer", epochs=2, seed=5, settings=settings)
    if store.status().datasets[0].slices == 3:
        store.ingest("d", late, slices=2, **options)
    store.build()
    # Somebody else's request is held, and withdrawn: their points leave training and return.
    (held,) = [entry for entry in store.requests() if entry.requester == "agent"] or store.receive(
        ["u1"], requester="agent"
    )
    if held.state == "received":
        review = store.clock().date() + timedelta(days=30)
        held = store.hold(held.id, basis="legal_claims", approver="ann", review=review)
    if held.state == "on_hold":
        store.withdraw(held.id)
    store.build()
    erased = store.erase(users)
    store.build()
    print(json.dumps({"counts": counts, "outcomes": [[o.request, o.points] for o in erased.outcomes]}))
"""

# Moving a ledger is a journey of its own: tests/test_move.py kills it at each of its steps.
JOURNEY_STEPS = [step for step in Step if not step.name.startswith("LEDGER_")]
SEVERAL_TIMES = [
    Step.INGEST_OPENED,
    Step.INGEST_SEGMENTS,
    Step.INGEST_STAGED,
    Step.INGEST_COMMITTED,
    Step.BUILD_ROOTS,
    Step.BUILD_FEATURES_WRITTEN,
    Step.BUILD_FEATURES_ENTERED,
    Step.BUILD_WRITTEN,
    Step.BUILD_ENTERED,
    Step.BUILD_COUNTED,
    Step.ERASE_REWRITTEN,
    Step.ERASE_FEATURES_REWRITTEN,
    Step.ERASE_SWAPPED,
    Step.ERASE_CHECKPOINTS_DESTROYED,
]
TRANSFER = Path(__file__).parent / "backends" / "transfer.py"
WEIGHT = np.random.default_rng(7).normal(size=(4, 6)).astype(np.float32)
ON_BASE = {"dataset": "d", "backend": "transfer", "epochs": 2, "seed": 5}


def write_people(folder: Path, rows: Any) -> tuple[list[str], list[str]]:
    """Write people as CSV files: two to begin with and two for later."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), 4)):
        path = folder / f"part{number}.csv"
        lines = ["user,label," + ",".join(f"f{i}" for i in range(rows.x.shape[1]))]
        lines += [f"{rows.user[i]},{rows.y[i]}," + ",".join(repr(float(v)) for v in rows.x[i]) for i in part]
        path.write_text("\n".join(lines) + "\n")
        files.append(str(path))
    return files[:2], files[2:]


@pytest.fixture
def crowd(people: Callable[..., Any]) -> Any:
    """Return people, two of whom will be erased: their rows are easy to recognise, early ones and late ones."""
    rows = people(30, 96, features=4)
    for number, user in enumerate(ERASED):
        mine = [3 + number, 20 + number, 50 + number, 80 + number]
        rows = type(rows)(rows.x, rows.y, rows.user.astype("U40"))
        rows.user[mine] = user
        rows.x[mine, :2] = MARKS[user]
    return rows


@pytest.fixture(scope="session")
def uninterrupted() -> dict[str, Any]:
    """What the journey ends in when nobody interrupts it; filled by whoever needs it first."""
    return {}


@pytest.fixture
def journey(
    tmp_path: Path,
    crowd: Any,
    new_store: Callable[..., Any],
    run_python: Callable[..., str],
    digests: Callable[..., Any],
    uninterrupted: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """Run the journey in a child process, killed at a step or to its end."""
    early, late = write_people(tmp_path / "given", crowd)
    base = tmp_path / "given" / "base.safetensors"
    save_file({"weight": WEIGHT}, base)

    def run(folder: Path, step: str = "", hit: int = 0) -> dict[str, Any] | None:
        code = -signal.SIGKILL if step else 0
        users = json.dumps([*ERASED, NOBODY])
        out = run_python(
            JOURNEY, folder, step, hit, users, json.dumps(early), json.dumps(late), TRANSFER, base, code=code
        )
        return None if step else json.loads(out)

    if not uninterrupted:
        template = tmp_path_factory.mktemp("template") / "store"
        new_store("empty").close()
        shutil.copytree(tmp_path / "empty", template)
        whole = tmp_path / "whole"
        shutil.copytree(template, whole)
        told = run(whole)
        with unlearnd.open_store(str(whole)) as store:
            uninterrupted.update(told, digests=digests(store), on_base=digests(store, "t"), template=template)
    return run


def start_store(folder: Path, uninterrupted: dict[str, Any]) -> Path:
    """Return an empty store in `folder` with the keys that all journeys share."""
    shutil.copytree(uninterrupted["template"], folder)
    return folder


def check_ended_well(
    folder: Path,
    told: dict[str, Any],
    lost: Any,
    uninterrupted: dict[str, Any],
    digests: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    files_holding: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    """Check that a journey ended as the uninterrupted one, with nothing half done and nothing left over."""
    with unlearnd.open_store(str(folder)) as store:
        assert digests(store) == uninterrupted["digests"]
        assert digests(store, "t") == uninterrupted["on_base"]
        status = store.status()
        assert (status.unfinished, status.to_rebuild) == (0, 0)
        for model in status.models:
            assert model.samples_missing == 0
            assert model.prefixes == (SLICES + LATER,) * SHARDS
        assert [store.where_user(user) for user in ERASED] == [[], []]
    check_no_orphans(folder)
    # Nobody was taken in twice, and every request has one outcome, the same as without interruption.
    assert [points for _, points in told["outcomes"]] == [points for _, points in uninterrupted["outcomes"]]
    requests = ask_ledger(folder, "SELECT handle, count(*), count(outcome) FROM request GROUP BY handle")
    assert [(count, done) for _, count, done in requests] == [(1, 1)] * 3
    assert ask_ledger(folder, "SELECT count(*) FROM ingest WHERE committed_at IS NULL") == [(0,)]
    assert ask_ledger(folder, "SELECT count(*) FROM segment WHERE length(dropped) > 0") == [(0,)]
    for user in (*ERASED, NOBODY):
        assert files_holding(folder, user.encode()) == []
    for mark in MARKS.values():
        assert files_holding(folder, np.asarray(mark, np.float32).tobytes()) == []
    seen = runpy.run_path(str(TRANSFER))["TransferBackend"]().features({}, {"weight": WEIGHT}, lost.x, "cpu")
    for row in seen:
        assert files_holding(folder, row.tobytes()) == []


def test_the_journey_reaches_every_step(journey: Callable[..., Any], uninterrupted: dict[str, Any]) -> None:
    counts = Counter(uninterrupted["counts"])
    assert set(counts) == {step.name for step in JOURNEY_STEPS}
    assert all(counts[step.name] >= 2 for step in SEVERAL_TIMES)


def test_every_step_is_named_at_exactly_one_place_in_the_code() -> None:
    package = Path(unlearnd.__file__).parent
    source = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    named = Counter(re.findall(r"\breached\(Step\.([A-Z_]+)\)", source))
    assert named == {step.name: 1 for step in Step}


def test_the_uninterrupted_journey_equals_a_store_never_given_the_erased(
    crowd: Any,
    journey: Callable[..., Any],
    uninterrupted: dict[str, Any],
    new_store: Callable[..., Any],
    tmp_path: Path,
    digests: Callable[..., Any],
) -> None:
    # Parts are cut before people are taken out: what came early comes early here, too.
    parts = [crowd[part] for part in np.array_split(np.arange(len(crowd)), 4)]
    store = new_store("never")
    backend = runpy.run_path(str(TRANSFER))["TransferBackend"]()
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, "transfer": backend})
    for number, part in enumerate(parts):
        rows = part.without(ERASED)
        if number == 2:
            store.train("m", dataset="d", backend="linear", epochs=2, seed=5, settings={"batch_size": 8})
            settings = {"batch_size": 8, "base": str(tmp_path / "given" / "base.safetensors"), "base_public": True}
            store.train("t", **ON_BASE, settings=settings)
        slices = SLICES if number < 2 else LATER
        store.ingest("d", rows.x, user=rows.user, label=rows.y, shards=SHARDS, slices=slices)
    store.build()
    assert digests(store) == uninterrupted["digests"]
    assert digests(store, "t") == uninterrupted["on_base"]


@pytest.mark.parametrize(
    ("step", "hit"),
    [*((step, 1) for step in JOURNEY_STEPS), *((step, 2) for step in SEVERAL_TIMES), (Step.BUILD_ENTERED, 9)],
    ids=lambda value: value.name if isinstance(value, Step) else str(value),
)
def test_killed_at_a_step_and_run_again_it_ends_the_same(
    step: Step,
    hit: int,
    tmp_path: Path,
    crowd: Any,
    journey: Callable[..., Any],
    uninterrupted: dict[str, Any],
    digests: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    files_holding: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    folder = start_store(tmp_path / "killed", uninterrupted)
    journey(folder, step.name, hit)
    check_ended_well(
        folder, journey(folder), crowd.only(ERASED), uninterrupted, digests, ask_ledger, files_holding, check_no_orphans
    )


@pytest.mark.parametrize(
    "step",
    [Step.INGEST_STAGED, Step.INGEST_COMMITTED, Step.BUILD_ENTERED, Step.ERASE_MARKED, Step.ERASE_REMOVED],
    ids=lambda step: step.name,
)
def test_killed_with_its_ledger_in_postgresql_it_ends_with_the_bits_it_has_in_sqlite(
    step: Step,
    crowd: Any,
    postgres: Any,
    new_store: Callable[..., Any],
    journey: Callable[..., Any],
    uninterrupted: dict[str, Any],
    digests: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    files_holding: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    schema = f"killed_{step.name.lower()}"
    folder = new_store("killed", ledger=postgres.url(schema)).folder
    journey(folder, step.name, 1)
    check_ended_well(
        folder, journey(folder), crowd.only(ERASED), uninterrupted, digests, ask_ledger, files_holding, check_no_orphans
    )
    postgres.run(f"DROP SCHEMA {schema} CASCADE")


def test_killed_again_and_again_it_ends_the_same(
    tmp_path: Path,
    crowd: Any,
    journey: Callable[..., Any],
    uninterrupted: dict[str, Any],
    digests: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    files_holding: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    folder = start_store(tmp_path / "killed", uninterrupted)
    for step in (
        Step.INGEST_STAGED,
        Step.BUILD_WRITTEN,
        Step.INGEST_SEGMENTS,
        Step.BUILD_ROOTS,
        Step.ERASE_MARKED,
        Step.ERASE_REWRITTEN,
        Step.ERASE_SWAPPED,
        Step.ERASE_CHECKPOINTS_DESTROYED,
        Step.BUILD_ENTERED,
    ):
        journey(folder, step.name, 1)
    check_ended_well(
        folder, journey(folder), crowd.only(ERASED), uninterrupted, digests, ask_ledger, files_holding, check_no_orphans
    )


def test_from_the_moment_points_are_marked_nothing_made_from_them_is_served(
    tmp_path: Path,
    crowd: Any,
    journey: Callable[..., Any],
    uninterrupted: dict[str, Any],
    ask_ledger: Callable[..., Any],
) -> None:
    folder = start_store(tmp_path / "killed", uninterrupted)
    journey(folder, Step.ERASE_MARKED.name, 1)
    with unlearnd.open_store(str(folder)) as store:
        assert store.status().unfinished == 1
        (touched,) = ask_ledger(folder, "SELECT touched FROM erasure")
        shards = {shard for _, shard in json.loads(touched[0])}
        prefixes = dict(enumerate(store.status().models[0].prefixes, start=1))
        assert shards
        for shard, prefix in prefixes.items():
            assert (prefix < SLICES + LATER) == (shard in shards)
        store.model("m").predict(crowd.x)


KILLED_WHILE_WRITING = """
import os, signal, sys, unlearnd
store = unlearnd.open_store(sys.argv[1])
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # what is written has its temporary name still
{}
"""


@pytest.mark.parametrize(
    "work",
    [
        "store.ingest('d', sys.argv[2], user='user', label='label', shards=1, slices=2)",
        "store.train('m', dataset='d', backend='linear', epochs=2, seed=5)",
        "store.erase(['u1'])",
    ],
    ids=["ingest", "train", "erase"],
)
def test_killed_in_the_middle_of_writing_nothing_stays_that_a_later_erasure_would_miss(
    work: str,
    tmp_path: Path,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    run_python: Callable[..., str],
    files_holding: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, store = people(10, 30), new_store()
    path = tmp_path / "rows.npz"
    np.savez(path, x=rows.x, label=rows.y, user=rows.user)
    options = {"user": "user", "label": "label", "shards": 1, "slices": 2}
    if "ingest" not in work:
        store.ingest("d", path, **options)
    if "erase" in work:
        store.train("m", dataset="d", backend="linear", epochs=2, seed=5)
    run_python(KILLED_WHILE_WRITING.format(work), store.folder, path, code=-signal.SIGKILL)
    if "ingest" in work:
        store.ingest("d", path, **options)
    store.train("m", dataset="d", backend="linear", epochs=2, seed=5)
    if "erase" not in work:
        check_no_orphans(store.folder)
    store.erase(["u1"])
    check_no_orphans(store.folder)
    # Everybody else goes, too, one slice after the other; no row of theirs may lie in a file that was forgotten.
    others = sorted(set(rows.user.tolist()) - {"u1"})
    store.erase(others)
    for row in rows.x:
        assert files_holding(store.folder, row.tobytes()) == []


SLOW = """
import sys, unlearnd
with unlearnd.open_store(sys.argv[1]) as store:
    store.train("m", dataset="d", backend="linear", epochs=3000, seed=5, executor="processes", workers=2)
"""


def workers_of(pid: int) -> list[int]:
    """Return the ids of a process's children that are workers of a build; servers that other tests use are not."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if b"unlearnd.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


def test_workers_end_with_the_parent_that_was_killed_and_a_build_goes_on_where_they_stopped(
    tmp_path: Path,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    start_python: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    store, reference = new_store("killed"), new_store("whole")
    for each in (store, reference):
        add(each, people(20, 60), shards=2, slices=6)
    reference.train("m", dataset="d", backend="linear", epochs=3000, seed=5)
    child = start_python(SLOW, store.folder)
    wait_for(lambda: ask_ledger(store.folder, "SELECT 1 FROM checkpoint"))
    workers = wait_for(lambda: workers_of(child.pid))
    child.kill()
    child.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10)
    saved = ask_ledger(store.folder, "SELECT count(*) FROM checkpoint")[0][0]
    (build,) = store.build()
    assert saved < 12
    assert build.checkpoints == 12 - saved
    assert digests(store) == digests(reference)
    check_no_orphans(store.folder)


def test_a_worker_that_was_killed_is_reported_and_a_build_goes_on_where_it_stopped(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    store = new_store()
    add(store, people(20, 60), shards=2, slices=6)

    class KillOne(unlearnd.store.Watch):
        killed = False

        def progressed(self, progress: Any) -> None:
            if progress.steps and not self.killed:
                self.killed = True
                os.kill(workers_of(os.getpid())[0], signal.SIGKILL)

    options = {"dataset": "d", "backend": "linear", "epochs": 3000, "seed": 5}
    with pytest.raises(BackendError, match="SIGKILL"):
        store.train("m", **options, executor="processes", workers=2, watch=KillOne())
    store.train("m", **options)
    assert store.status().models[0].prefixes == (6, 6)
    check_no_orphans(store.folder)
