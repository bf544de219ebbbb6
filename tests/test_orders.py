"""Orders beyond one person: a whole model or dataset goes, for good, and receipts, log and audit say so."""

import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import unlearnd
from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import NotFoundError, RefusedError
from unlearnd.evidence import receipt_named
from unlearnd.ledger import models, points
from unlearnd.steps import Step
from unlearnd.store import Store
from unlearnd.translog import trust
from unlearnd.verify import verify_receipt

TRANSFER = Path(__file__).parent / "backends" / "transfer.py"
STEPS = [
    Step.ERASE_RECORDED,
    Step.ERASE_MARKED,
    Step.ERASE_SWAPPED,
    Step.ERASE_DATA_DESTROYED,
    Step.ERASE_CHECKPOINTS_DESTROYED,
    Step.ERASE_REMOVED,
    Step.RECEIPT_WRITTEN,
]
ORDER = """
import os, runpy, signal, sys
from dataclasses import replace
import unlearnd
from unlearnd import steps
folder, kind, step, backend = sys.argv[1:5]
def watch(reached):
    if reached.name == step:
        os.kill(os.getpid(), signal.SIGKILL)
steps.watcher = watch
with unlearnd.open_store(folder) as store:
    store.plugins = replace(
        store.plugins,
        backends={**store.plugins.backends, "transfer": runpy.run_path(backend)["TransferBackend"]()},
    )
    store.erase_dataset("d") if kind == "dataset" else store.erase_model("t")
"""


def able(store: Store) -> Store:
    """Return a store that knows the backend on a frozen base."""
    backend = runpy.run_path(str(TRANSFER))["TransferBackend"]()
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, "transfer": backend})
    return store


@pytest.fixture
def store(new_store: Callable[..., Store], people: Any, add: Any, fit: Any, tmp_path: Path) -> Store:
    """A store with a plain model `m` and one on a base, `t`, on dataset `d`; and `other` on dataset `e`."""
    made = able(new_store())
    rows = people(features=4)
    add(made, rows)
    fit(made)
    save_file(
        {"weight": np.random.default_rng(7).normal(size=(4, 6)).astype(np.float32)}, tmp_path / "base.safetensors"
    )
    settings = {"base": str(tmp_path / "base.safetensors"), "base_public": True}
    made.train("t", dataset="d", backend="transfer", epochs=1, seed=5, settings=settings)
    few = rows.only([f"u{n}" for n in range(6)])
    made.ingest("e", few.x, user=few.user, label=few.y, shards=1, slices=2, classes=3)
    made.train("other", dataset="e", backend="linear", epochs=1, seed=5)
    return made


def check_proven(store: Store, request: str, asked: str) -> dict[str, Any]:
    report = audit(store, replay="all")
    assert report.failed == (), [c.sentence for c in report.checks if c.id in report.failed]
    assert report.level in (4, 5), list(report.lines())
    detail = store.translog.shelf.read(f"evidence/detail/{receipt_named(store, request).detail}.json")
    checked = verify_receipt(store.receipt(request), trust(store.translog), detail=detail, now=store.clock())
    assert checked.failed == ()
    assert checked.about["asked"] == asked
    return dict(json.loads(detail))


def objects_below(store: Store, folder: str) -> list[str]:
    return sorted(store.storage.list(folder))


def test_a_model_is_destroyed_whole_and_its_neighbours_keep_every_bit(
    store: Store, digests: Any, check_no_orphans: Any
) -> None:
    before, had = digests(store), len(store.checkpoints("t"))
    assert objects_below(store, "bases")
    assert any(name.endswith(".features") for name in objects_below(store, "data/d"))
    erased = store.erase_model("t")
    (outcome,) = erased.outcomes
    assert (outcome.asked, outcome.found, outcome.points) == ("model", True, 0)
    assert (outcome.retired, len(outcome.checkpoints)) == (("t",), had)
    assert objects_below(store, "checkpoints/t") == objects_below(store, "bases") == []
    assert not any(name.endswith(".features") for name in objects_below(store, "data/d"))
    assert digests(store) == before
    assert dict(store.status().retired).keys() == {"t"}
    assert {model.name for model in store.status().models} == {"m", "other"}
    detail = check_proven(store, outcome.request, "model")
    assert {entry[0] for entry in detail["models"]} == {"t"}
    assert {(entry[2], entry[3]) for entry in detail["serving"]} == {(0, "")}
    check_no_orphans(store.folder)


def test_a_retired_model_cannot_be_asked_trained_or_declared_again(store: Store, people: Any) -> None:
    served, rows = store.model("m"), people(features=4)
    served.predict(rows.x)
    store.erase_model("m")
    for work in (
        lambda: served.predict(rows.x),
        lambda: store.model("m"),
        lambda: list(store.predict("m", rows.x)),
        lambda: store.build(["m"]),
        lambda: store.train("m", dataset="d", backend="linear"),
        lambda: store.train("m", dataset="e", backend="linear"),
    ):
        with pytest.raises(RefusedError, match=r"'m' was destroyed by an order on .* is retired"):
            work()
    assert [build.model for build in store.build()] == ["other", "t"]
    # Erasures and new data go on beside it.
    store.erase(["u3"])
    assert store.status().to_rebuild == 0
    check_proven(store, store.receipts()[-1].request_id, "user")


def test_an_order_given_again_is_the_same_order(store: Store) -> None:
    first = store.erase_model("m").outcomes[0]
    again = store.erase_model("m")
    assert again.outcomes[0].request == first.request
    assert again.again == {first.request}
    whole = store.erase_dataset("d").outcomes[0]
    assert store.erase_dataset("d").outcomes[0].request == whole.request
    assert len(store.receipts()) == 2
    with pytest.raises(NotFoundError, match="no model 'nothing'; there are: other"):
        store.erase_model("nothing")


def test_a_dataset_is_destroyed_with_its_models_and_the_keys_nobody_needs(
    store: Store, people: Any, digests: Any, check_no_orphans: Any, files_holding: Any
) -> None:
    rows, before = people(features=4), digests(store, "other")
    (outcome,) = store.erase_dataset("d").outcomes
    assert (outcome.asked, outcome.points) == ("dataset", len(rows))
    assert set(outcome.retired) == {"m", "t"}
    for folder in ("data/d", "checkpoints/m", "checkpoints/t", "bases"):
        assert objects_below(store, folder) == []
    for row in rows.without([f"u{n}" for n in range(6)]).x:
        assert files_holding(store.folder, row.tobytes()) == []
    stays, goes = store.keys.handles(["u1"]), store.keys.handles(["u20"])
    assert points.user_keys(store.ledger, stays).keys() == set(stays)
    assert points.user_keys(store.ledger, goes) == {}
    assert digests(store, "other") == before
    assert [where.dataset for where in store.where_user("u1")] == ["e"]
    assert store.status().to_rebuild == 0
    check_proven(store, outcome.request, "dataset")
    check_no_orphans(store.folder)
    for work in (
        lambda: store.ingest("d", rows.x, user=rows.user, label=rows.y),
        lambda: store.train("new", dataset="d", backend="linear"),
    ):
        with pytest.raises(RefusedError, match="dataset 'd' was destroyed by an order"):
            work()
    # Who is erased afterwards is found where they still are, and nowhere else.
    store.erase(["u1", "u20"])
    check_proven(store, outcome.request, "dataset")


def test_a_hold_outranks_an_order_and_so_does_the_list_of_exemptions(store: Store) -> None:
    (entry,) = store.receive(["u7"])
    review = store.clock().date() + timedelta(days=20)
    store.hold(entry.id, basis="legal_claims", approver="ann", review=review)
    with pytest.raises(RefusedError, match="1 users whose requests are on hold"):
        store.erase_dataset("d")
    store.withdraw(entry.id)
    store.exempt("u9", basis="legal_claims", until=review)
    erased = store.erase_dataset("d")
    assert erased.outcomes == ()
    assert [store.request(one).state for one in erased.held] == ["on_hold"]
    assert store.where_user("u9")
    store.exempt("u9", basis=None, until=review)
    store.release(erased.held[0])
    (outcome,) = store.erase_dataset("d").outcomes
    assert outcome.request == erased.held[0]
    check_proven(store, outcome.request, "dataset")


def test_an_order_waits_and_is_run_like_every_request_each_by_itself(store: Store) -> None:
    orders = store.receive(model="t", requester="authority") + store.receive(dataset="e", requester="authority")
    (user,) = store.receive(["u2"], identity="account_login")
    (double,) = store.receive(model="t")
    assert double.state == "duplicate"
    for entry in (*orders, user):
        store.approve(entry.id)
    done = store.run_requests()
    assert {outcome.request for outcome in done.outcomes} == {entry.id for entry in (*orders, user)}
    assert len({outcome.erasure for outcome in done.outcomes}) == 3
    assert [o.asked for o in done.outcomes] == ["user", "model", "dataset"]
    for outcome in done.outcomes:
        check_proven(store, outcome.request, outcome.asked)


def test_a_model_that_was_never_built_is_retired_with_a_receipt_that_nothing_was_found(store: Store) -> None:
    store.declare("bare", dataset="d", backend="linear")
    (outcome,) = store.erase_model("bare").outcomes
    assert (outcome.found, outcome.retired) == (False, ("bare",))
    check_proven(store, outcome.request, "model")
    with pytest.raises(RefusedError, match="is retired"):
        store.build(["bare"])


def test_a_dry_run_of_an_order_says_what_would_go_and_changes_nothing(store: Store) -> None:
    had = len(store.checkpoints("m")) + len(store.checkpoints("t"))
    plan = store.plan_erasure(dataset="d")
    assert (plan.points, sum(m.checkpoints for m in plan.models), sum(m.samples for m in plan.models)) == (120, had, 0)
    assert {m.model for m in store.plan_erasure(model="t").models} == {"t"}
    assert store.requests() == []
    assert len(store.checkpoints("m")) + len(store.checkpoints("t")) == had


@pytest.mark.parametrize(
    ("kind", "step"),
    # No data is rewritten for a model.
    [(kind, step) for kind in ("model", "dataset") for step in STEPS if (kind, step) != ("model", Step.ERASE_SWAPPED)],
    ids=lambda value: value.name if isinstance(value, Step) else value,
)
def test_an_order_killed_at_a_step_is_carried_to_its_end_by_whoever_comes_next(
    store: Store, run_python: Callable[..., str], check_no_orphans: Any, kind: str, step: Step
) -> None:
    folder = store.folder
    store.close()
    run_python(ORDER, folder, kind, step.name, TRANSFER, code=-signal.SIGKILL)
    with unlearnd.open_store(str(folder)) as after:
        able(after)
        report = audit(after)
        assert report.failed == (), [c.sentence for c in report.checks if c.id in report.failed]
        after.build(["other"])
        (entry,) = after.requests()
        assert entry.state == "completed"
        (outcome,) = (after.erase_dataset("d") if kind == "dataset" else after.erase_model("t")).outcomes
        assert outcome.request == entry.id
        check_proven(after, entry.id, kind)
    check_no_orphans(folder)


def test_a_builder_at_work_on_a_model_stops_when_an_order_destroys_it(
    store: Store, cut_off_at: Any, watch_steps: Any
) -> None:
    store.declare("late", dataset="d", backend="linear")
    done = []

    def strike(step: Step) -> None:
        if step is Step.BUILD_ENTERED and not done:
            done.append(step)
            watch_steps(lambda step: None)
            with unlearnd.open_store(str(store.folder)) as other:
                cut_off_at(Step.ERASE_MARKED, lambda: other.erase_model("late"))

    watch_steps(strike)
    with pytest.raises(RefusedError, match="'late' was destroyed by an order"):
        store.build(["late"])
    assert done
    store.finish_erasures()
    assert models.checkpoints_of(store.ledger, models.model_named(store.ledger, "late").id) == []
    check_proven(store, store.receipts()[-1].request_id, "model")


def test_an_audit_sees_a_destroyed_model_put_back_into_service(store: Store) -> None:
    store.erase_model("m")
    with store.ledger.write() as connection:
        connection.exec_driver_sql("UPDATE model SET retired_at = NULL WHERE name = 'm'")
    report = audit(store)
    assert report.failed == ("D2",)
    assert "is in service again" in next(c.sentence for c in report.checks if c.id == "D2")


# The command.


def run(store: Store, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["--store", str(store.folder), *arguments])


def test_without_a_terminal_an_order_needs_yes(store: Store) -> None:
    for option, name in (("--model", "m"), ("--dataset", "e")):
        refused = run(store, "erase", option, name)
        assert refused.exit_code == 1
        assert refused.stderr.strip().endswith("cannot be undone, and nobody is there to ask: pass --yes")
        planned = run(store, "erase", option, name, "--dry-run")
        assert planned.exit_code == 0
        assert planned.stdout.startswith("Would destroy 12 checkpoints." if name == "m" else "Would erase ")
    assert store.requests() == []
    done = run(store, "erase", "--model", "m", "--yes")
    assert done.exit_code == 0
    assert done.stdout.startswith("Destroyed the model 'm': 12 checkpoints. Request ")
    assert "was destroyed already, on" in run(store, "erase", "--model", "m", "--yes").stdout
    told = json.loads(run(store, "erase", "--dataset", "e", "--yes", "--json").stdout)
    assert (told["outcomes"][0]["asked"], told["outcomes"][0]["retired"]) == ("dataset", ["other"])
    assert "Destroyed by orders and retired: m (" in run(store, "status").stdout
    asked = run(store, "predict", "m", str(store.folder / "nothing.csv"))
    assert (asked.exit_code, asked.stderr.count("\n")) == (1, 1)
    assert "is retired" in asked.stderr
    missing = run(store, "erase", "--model", "nothing", "--yes")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)


def test_an_order_is_given_alone(store: Store) -> None:
    for extra in (["--user", "u1"], ["--dataset", "d"], ["--point", "d:1"]):
        assert run(store, "erase", "--model", "m", "--yes", *extra).exit_code == 2
    assert run(store, "erase", "--user", "u1", "--yes").exit_code == 2


@pytest.mark.parametrize(("typed", "code"), [("m", 0), ("t", 1), ("", 1), ("y", 1)])
def test_on_a_terminal_the_name_must_be_typed(store: Store, typed: str, code: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unlearnd", "--store", str(store.folder), "erase", "--model", "m"]
    child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.write(ours, f"{typed}\n".encode())
    out, err = child.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == code, err
    assert "It cannot be undone." in err
    assert ("Destroyed the model 'm'" in out) is (code == 0)
    assert bool(store.checkpoints("m")) is (code == 1)


@pytest.mark.both_databases
def test_a_dataset_of_many_users_is_erased_without_listing_who_holds_what(new_store: Callable[..., Store]) -> None:
    """What grows is what the receipt lists, a commitment and a place for each point, and nothing for each user."""
    store, many = new_store(), 5_000
    users = [f"u{number}" for number in range(many)]
    store.ingest("d", np.zeros((many, 1), np.float32), user=users, label=np.arange(many) % 2, shards=4, slices=5)
    # Somebody has points elsewhere, too, and keeps the key.
    store.ingest("e", np.zeros((4, 1), np.float32), user=["u1", "u1", "x", "y"], label=[0, 1, 0, 1], shards=1, slices=1)
    tracemalloc.start()
    try:
        (outcome,) = store.erase_dataset("d").outcomes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcome.points == many
    assert peak / many < 900, "with holdings and users in memory it is 1,800"
    assert [len(page) for page in points.users_of(store.ledger, 1)] == []
    alive = points.user_keys(store.ledger, store.keys.handles(["u0", "u1", "u4999", "x"]))
    assert alive.keys() == set(store.keys.handles(["u1", "x"]))
    assert audit(store).failed == ()


@pytest.mark.both_databases
def test_the_users_of_a_dataset_come_a_page_at_a_time(new_store: Callable[..., Store]) -> None:
    store = new_store()
    users = [f"u{number % 25}" for number in range(40)]
    store.ingest("d", np.zeros((40, 1), np.float32), user=users, label=np.arange(40) % 2, shards=2, slices=2)
    pages = list(points.users_of(store.ledger, 1, most=10))
    assert [len(page) for page in pages] == [10, 10, 5]
    assert {handle for page in pages for handle in page} == set(store.keys.handles(users))
