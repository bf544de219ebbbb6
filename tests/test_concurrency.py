"""Several processes at one store: erasers, builders, whoever answers, and whoever was killed.

Other processes are real ones. Where a test needs two of them at one exact moment, it stops this process at a
step and does there what the other would do.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd import build, erasure, slices, steps
from unlearnd.errors import BusyError
from unlearnd.leases import hold
from unlearnd.ledger import points
from unlearnd.ledger.leases import build_lease, data_lease
from unlearnd.steps import Step
from unlearnd.storage import Storage

READY = """
import sys, unlearnd
store = unlearnd.open_store(sys.argv[1])
store.plugins.backend("linear")
print("ready", flush=True)
sys.stdin.readline()
"""
ERASE = READY + "print([outcome.points for outcome in store.erase(sys.argv[2:], build=False).outcomes])"
ERASE_AND_BUILD = READY + "print([outcome.points for outcome in store.erase(sys.argv[2:]).outcomes])"
BUILD = READY + "print(sum(build.checkpoints for build in store.build()))"
ADD = """
import numpy
rows = numpy.load(sys.argv[2])
for part in numpy.array_split(numpy.arange(len(rows["x"])), 8):
    store.ingest("d", rows["x"][part], user=rows["user"][part], label=rows["y"][part], readmit=True)
print("added")
"""
HOLD = """
import sys, unlearnd
from unlearnd.leases import hold
with unlearnd.open_store(sys.argv[1]) as store, hold(store.ledger, sys.argv[2:], store.clock):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def at_once(start_python: Callable[..., Any]) -> Callable[..., list[str]]:
    """Run scripts in processes that all begin at the same moment; return what each printed at last."""

    def run(*scripts: tuple[Any, ...]) -> list[str]:
        children = [start_python(*script) for script in scripts]
        for child in children:
            assert child.stdout.readline() == "ready\n", child.communicate()
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        told = []
        for child in children:
            out, err = child.communicate(timeout=100)
            assert child.returncode == 0, err
            told.append(out.strip())
        return told

    return run


@pytest.fixture
def pair(people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]) -> Callable[..., Any]:
    """Make a store given everybody and one never given some, both untrained."""

    def make(rows: Any, **options: Any) -> tuple[Any, Callable[..., Any]]:
        met = new_store("met")
        add(met, rows, **options)

        def never(users: list[str], **training: Any) -> Any:
            store = new_store("never")
            add(store, rows.without(users), **options)
            store.train("m", dataset="d", backend="linear", seed=8, **training)
            return store

        return met, never

    return make


@pytest.mark.both_databases
def test_two_processes_erase_different_users_of_one_shard_at_once(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    users_at: Callable[..., list[str]],
    at_once: Callable[..., list[str]],
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows = people(60, 240)
    met, never = pair(rows, shards=2)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=2)
    here = users_at(met, rows, 1, [1, 2, 3, 4])
    one, other = here[0:8], here[8:16]
    told = at_once((ERASE_AND_BUILD, met.folder, *one), (ERASE_AND_BUILD, met.folder, *other))
    assert told == [str([len(rows.only([user])) for user in users]) for users in (one, other)]
    met.build()
    assert digests(met) == digests(never([*one, *other], epochs=2))
    assert (met.status().unfinished, met.status().to_rebuild) == (0, 0)
    check_no_orphans(met.folder)


def test_one_user_erased_by_two_processes_at_once_has_an_outcome_that_tells_of_their_points(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    watch_steps: Callable[..., None],
) -> None:
    rows = people()
    met, _ = pair(rows)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=2)

    told: list[str | None] = []

    def another_process_asks_for_the_same(step: Step) -> None:
        if step is Step.ERASE_RECORDED:
            steps.watcher = None
            # It had looked before this one recorded anything; recording, it is told to look again.
            told.append(erasure.record_requests(met.ledger, met.keys.handles(["u3"]), met.clock()))

    watch_steps(another_process_asks_for_the_same)
    assert met.erase(["u3"]).outcomes[0].points == len(rows.only(["u3"]))
    assert told == [None]
    assert met.finish_erasures() == 0
    assert met.erase(["u3"]).outcomes[0].points == len(rows.only(["u3"]))


def test_an_eraser_and_a_builder_at_once(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    at_once: Callable[..., list[str]],
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows = people(60, 240)
    met, never = pair(rows, slices=6)
    met.declare("m", dataset="d", backend="linear", seed=8, epochs=300)
    users = [f"u{number}" for number in range(0, 12)]
    at_once((BUILD, met.folder), (ERASE, met.folder, *users[:6]), (ERASE, met.folder, *users[6:]))
    met.build()
    assert digests(met) == digests(never(users, epochs=300))
    assert len(digests(met)) == 3 * 6
    check_no_orphans(met.folder)


def test_two_builders_at_once_make_every_checkpoint_once(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    at_once: Callable[..., list[str]],
    digests: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    met, never = pair(people(60, 240), slices=6)
    met.declare("m", dataset="d", backend="linear", seed=8, epochs=100)
    told = at_once((BUILD, met.folder), (BUILD, met.folder))
    assert sum(map(int, told)) == 3 * 6
    assert ask_ledger(met.folder, "SELECT count(*), count(DISTINCT recipe) FROM checkpoint") == [(18, 18)]
    assert digests(met) == digests(never([], epochs=100))
    check_no_orphans(met.folder)


@pytest.mark.both_databases
def test_erasing_while_another_process_adds_points_of_the_same_people(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    at_once: Callable[..., list[str]],
    tmp_path: Path,
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, more = people(40, 120), people(40, 400, seed=5)
    met, _ = pair(rows)
    np.savez(tmp_path / "more.npz", x=more.x, y=more.y, user=more.user)
    users = [f"u{number}" for number in range(0, 40, 2)]
    erase_often = READY + "[store.erase([user], build=False) for user in sys.argv[2:]]; print('erased')"
    at_once((erase_often, met.folder, *users), (READY + ADD, met.folder, tmp_path / "more.npz"))
    # Whoever was added after their erasure is a new user; everybody is somewhere or nowhere, and all can be trained.
    met.train("m", dataset="d", backend="linear", seed=8, epochs=1)
    met.erase(users)
    assert met.status().datasets[0].points == len(rows.without(users)) + len(more.without(users))
    check_no_orphans(met.folder)


@pytest.mark.both_databases
def test_points_added_at_the_very_moment_their_user_is_erased_do_not_lose_their_key(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    add: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = people()
    met, _ = pair(rows)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=1)
    read, added = erasure.read_segment, []

    def read_while_another_process_adds(*arguments: Any) -> Any:
        # The eraser has looked up who holds what; now somebody else commits more points of the same user.
        if not added:
            added.append(True)
            with unlearnd.open_store(str(met.folder)) as other:
                add(other, rows.only(["u3"]), slices=1)
        return read(*arguments)

    monkeypatch.setattr(erasure, "read_segment", read_while_another_process_adds)
    met.erase(["u3"])
    monkeypatch.undo()
    # Either way round is right: erased with the rest, or a new user's. What must not be is points without a key.
    met.build()
    assert met.status().models[0].samples_missing == 0
    met.erase(["u3"])
    assert met.where_user("u3") == []
    assert met.status().datasets[0].points == len(rows.without(["u3"]))


@pytest.mark.parametrize("moment", ["before it looks", "storage listed", "ingests asked for", "ledger asked"])
def test_points_committed_at_the_very_moment_an_erasure_sweeps_their_slice_stay(
    new_store: Callable[..., Any],
    people: Callable[..., Any],
    add: Callable[..., Any],
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ingest has written and not committed; the sweep looks three times, and it commits between any two."""
    store, rows = new_store(), people(20, 60)
    add(store, rows, shards=1, slices=1)
    staged, go_on = threading.Event(), threading.Event()

    def wait(step: Step) -> None:
        if step is Step.INGEST_STAGED:
            staged.set()
            assert go_on.wait(60)

    def ingest() -> None:
        with unlearnd.open_store(str(store.folder)) as other:
            add(other, people(20, 60, seed=2), shards=None, slices=None)

    steps.watcher = wait
    adding = threading.Thread(target=ingest)
    adding.start()

    def commit() -> None:
        go_on.set()
        adding.join(60)
        assert not adding.is_alive()

    def after(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def look(*arguments: Any) -> Any:
            found = real(*arguments)
            commit()
            return found

        monkeypatch.setattr(owner, name, look)

    try:
        assert staged.wait(60)
        # Something that no ledger knows, so that the sweep has work.
        store.storage.write("data/d/0001/0001/000000000000-leftover.safetensors", b"left by a killed erasure")
        if moment == "before it looks":
            commit()
        elif moment == "storage listed":
            after(store.storage, "list")
        else:
            after(points, "unfinished_ingests" if moment == "ingests asked for" else "segments_of")
        slices.sweep(store.ledger, store.storage, points.dataset_named(store.ledger, "d"), 1, 1, None)
    finally:
        go_on.set()
        adding.join(60)
        steps.watcher = None
    monkeypatch.undo()
    assert not [name for name in store.storage.list("data") if "leftover" in name]
    dataset = points.dataset_named(store.ledger, "d")
    assert sum(map(len, slices.read_slice(store.ledger, store.storage, dataset, 1, 1))) == 120


@pytest.mark.both_databases
def test_two_erasures_of_one_slice_both_cut_off_lose_nothing(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    users_at: Callable[..., list[str]],
    cut_off_at: Callable[..., None],
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows = people()
    met, never = pair(rows, slices=2)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=2)
    one, other = users_at(met, rows, 1, [2])[:2]

    def carry_out(user: str) -> None:
        # As a process does that had looked for unfinished erasures before the other one began.
        asked = erasure.record_requests(met.ledger, met.keys.handles([user]), met.clock())
        erasure.carry_out(met.translog, {}, asked, met.clock)

    cut_off_at(Step.ERASE_DATA_DESTROYED, lambda: carry_out(one))
    cut_off_at(Step.ERASE_MARKED, lambda: carry_out(other))
    met.build()
    assert met.status().unfinished == 0
    assert digests(met) == digests(never([one, other], epochs=2))
    check_no_orphans(met.folder)


@pytest.mark.both_databases
def test_a_builder_that_slept_through_an_erasure_leaves_nothing_it_made_from_the_erased(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    users_at: Callable[..., list[str]],
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = people()
    met, never = pair(rows)
    met.declare("m", dataset="d", backend="linear", seed=8, epochs=2)
    user = users_at(met, rows, 1, [1])[0]
    write, slept = Storage.write_many, []

    def write_after_a_long_sleep(self: Storage, objects: Any) -> None:
        # The machine was suspended just before the first state was saved: the lease ran out, another process took it,
        # erased somebody the state was made from, and swept the folder. Then the builder wakes up and writes.
        if not slept:
            slept.append(True)
            with met.ledger.write() as connection:
                connection.exec_driver_sql("UPDATE lease SET expires = 0")
            with unlearnd.open_store(str(met.folder)) as other:
                other.erase([user], build=False)
        write(self, objects)

    monkeypatch.setattr(Storage, "write_many", write_after_a_long_sleep)
    met.build()
    assert slept
    assert digests(met) == digests(never([user], epochs=2))
    check_no_orphans(met.folder)


def test_slices_closed_by_another_builder_after_roots_were_computed_are_built_too(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = new_store()
    add(store, people(), shards=2, slices=2)
    fit(store)
    more = people(10, 30, seed=4)
    add(store, more, shards=None, slices=1)
    fill, closed = build._fill_roots, []

    def fill_and_be_overtaken(*given: Any) -> None:
        fill(*given)
        if not closed:
            closed.append(True)
            with unlearnd.open_store(str(store.folder)) as other:
                add(other, more, shards=None, slices=1)
                points.seal(other.ledger, given[2].id, other.clock())

    monkeypatch.setattr(build, "_fill_roots", fill_and_be_overtaken)
    store.build()
    assert closed
    (model,) = store.status().models
    assert (model.samples_missing, model.prefixes) == (0, (4, 4))


@pytest.mark.both_databases
def test_a_served_model_sees_an_erasure_by_another_process_before_its_next_answer(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    users_at: Callable[..., list[str]],
    run_python: Callable[..., str],
    digests: Callable[..., Any],
) -> None:
    rows = people()
    met, _ = pair(rows)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=2)
    served = met.model("m")
    before = served.predict(rows.x, "mean").scores
    user = users_at(met, rows, 2, [1])[0]
    erase = "import sys, unlearnd; unlearnd.open_store(sys.argv[1]).erase(sys.argv[2:], build=False)"
    run_python(erase, met.folder, user)
    after = served.predict(rows.x, "mean").scores
    assert not np.array_equal(before, after)
    assert served.evaluate(rows.x, rows.y).abstaining == 1
    # What it answers is what somebody who looks for the first time is answered.
    with unlearnd.open_store(str(met.folder)) as fresh:
        np.testing.assert_array_equal(fresh.model("m").predict(rows.x, "mean").scores, after)
    run_python("import sys, unlearnd; unlearnd.open_store(sys.argv[1]).build()", met.folder)
    assert served.evaluate(rows.x, rows.y).abstaining == 0


def test_answers_never_fail_while_others_erase_and_build(
    people: Callable[..., Any], pair: Callable[..., Any], start_python: Callable[..., Any]
) -> None:
    rows = people()
    met, _ = pair(rows)
    met.train("m", dataset="d", backend="linear", seed=8, epochs=2)
    served = met.model("m")
    script = """
import sys, unlearnd
with unlearnd.open_store(sys.argv[1]) as store:
    for user in sys.argv[2:]:
        store.erase([user])
"""
    child = start_python(script, met.folder, *(f"u{number}" for number in range(12)))
    answers = 0
    while child.poll() is None:
        assert len(served.predict(rows.x).labels) == len(rows)
        answers += 1
    assert child.returncode == 0, child.communicate()
    assert answers > 10


@pytest.mark.both_databases
def test_the_lease_of_a_killed_process_is_taken_over_at_once(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    start_python: Callable[..., Any],
    ask_ledger: Callable[..., Any],
) -> None:
    met, _ = pair(people())
    names = [data_lease("d", 1), build_lease("m", 2)]
    child = start_python(HOLD, met.folder, *names)
    assert child.stdout.readline() == "held\n"
    os.kill(child.pid, signal.SIGKILL)
    # Nobody has waited for it yet: it is listed still, as a zombie.
    assert len(ask_ledger(met.folder, "SELECT name FROM lease")) == 2
    begun = time.monotonic()
    with hold(met.ledger, names, met.clock, patience=20):
        assert time.monotonic() - begun < 5
    child.wait()
    assert ask_ledger(met.folder, "SELECT name FROM lease") == []


def test_a_lease_that_a_living_process_holds_is_not_taken_and_the_message_names_it(
    people: Callable[..., Any], pair: Callable[..., Any], start_python: Callable[..., Any]
) -> None:
    met, _ = pair(people())
    child = start_python(HOLD, met.folder, data_lease("d", 1))
    assert child.stdout.readline() == "held\n"
    with (
        pytest.raises(BusyError, match=rf"process {child.pid} on \S+ is at work on data/d/1; try again") as caught,
        hold(met.ledger, [data_lease("d", 1), data_lease("d", 2)], met.clock, patience=0.2),
    ):
        pytest.fail("two processes hold one lease")
    assert caught.value.exit_code == 1
    # All or none: the one that was free was not kept.
    with hold(met.ledger, [data_lease("d", 2)], met.clock, patience=0):
        pass
    child.stdin.write("done\n")
    child.stdin.flush()
    child.wait()
    with hold(met.ledger, [data_lease("d", 1)], met.clock, patience=5):
        pass


@pytest.mark.both_databases
def test_a_builder_whose_lease_is_wanted_lets_go(
    people: Callable[..., Any],
    pair: Callable[..., Any],
    start_python: Callable[..., Any],
    ask_ledger: Callable[..., Any],
) -> None:
    met, _ = pair(people(60, 240), shards=1, slices=6)
    met.declare("m", dataset="d", backend="linear", seed=8, epochs=3000)
    child = start_python(BUILD, met.folder)
    child.stdin.write("go\n")
    child.stdin.flush()
    end = time.monotonic() + 30
    while not ask_ledger(met.folder, "SELECT 1 FROM lease WHERE name = 'build/m/1'"):
        assert time.monotonic() < end
        time.sleep(0.02)
    begun = time.monotonic()
    with hold(met.ledger, [build_lease("m", 1)], met.clock, preempt=True, patience=30):
        waited = time.monotonic() - begun
        assert child.poll() is None
    assert waited < 3
    child.kill()
