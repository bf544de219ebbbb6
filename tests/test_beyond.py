"""What people ask for beyond training and erasing, with the ledger in PostgreSQL and the bytes in a bucket."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.seaweed import Seaweed
from unlearnd.audit import audit
from unlearnd.store import Store
from unlearnd.translog import trust
from unlearnd.verify import verify_receipt

MONDAY = datetime(2026, 6, 1, 9, tzinfo=UTC)
TRANSFER = Path(__file__).parent / "backends" / "transfer.py"


@pytest.fixture
def database() -> str:
    return "postgresql"


@pytest.fixture
def bucket(seaweed: Seaweed) -> str:
    return seaweed.bucket(versioned=True)


@pytest.fixture
def far(new_store: Callable[..., Store], seaweed: Seaweed, bucket: str) -> Callable[..., Store]:
    """Make stores in one bucket and one database."""

    def make(name: str = "far", **options: Any) -> Store:
        return new_store(name, storage=f"s3://{bucket}/{name}", storage_options=seaweed.options, **options)

    return make


def check(store: Store, *requests: str) -> None:
    """Check that the whole store holds together, and receipts for whoever has nothing else."""
    report = audit(store)
    assert report.failed == (), [c.sentence for c in report.checks if c.id in report.failed]
    details = {entry.request_id: entry.detail for entry in store.receipts()}
    for request in requests:
        detail = store.translog.shelf.read(f"evidence/detail/{details[request]}.json")
        checked = verify_receipt(store.receipt(request), trust(store.translog), detail=detail, now=store.clock())
        assert checked.failed == ()


def names_in(seaweed: Seaweed, bucket: str, prefix: str) -> list[str]:
    """Return what the bucket keeps below a prefix, in any version."""
    return [found["Key"] for found in seaweed.versions(bucket, prefix)]


def test_the_life_of_requests(far: Any, people: Any, add: Any, fit: Any, digests: Any) -> None:
    now = [MONDAY]
    store = far(policy="gdpr", clock=lambda: now[0])
    rows = people()
    add(store, rows)
    fit(store)
    first, second, third = store.receive(["u1", "u2", "u3"], ground="consent_withdrawn")
    again = store.receive(["u1"])[0]
    assert again.duplicate_of == first.id
    for entry in (first, second, third):
        store.approve(entry.id, identity="account_login")
    store.hold(second.id, basis="legal_claims", approver="ann", review=date(2026, 7, 1))
    store.extend(third.id, reason="complexity")
    now[0] += timedelta(days=3)
    done = store.run_requests(build=True)
    assert {outcome.request for outcome in done.outcomes} == {first.id, third.id}
    assert store.where_user("u2")
    now[0] += timedelta(days=3)
    store.release(second.id)
    (last,) = store.run_requests(build=True).outcomes
    never = far("never")
    add(never, rows.without(["u1", "u2", "u3"]))
    fit(never)
    assert digests(store) == digests(never)
    assert store.request(second.id).state == "completed"
    results = store.receive_rows([{"user": f"u{n}"} for n in range(4, 9)], source="file")
    assert [(row.state, row.problem) for row in results] == [("received", "")] * 5
    assert store.receive_rows([{"user": f"u{n}"} for n in range(4, 9)], source="file") == results
    assert [deadline.entry.id for deadline in store.deadlines(timedelta(days=90))]
    check(store, first.id, third.id, last.request)


def test_orders_destroy_a_model_and_then_a_dataset(
    far: Any, people: Any, add: Any, fit: Any, seaweed: Seaweed, bucket: str
) -> None:
    store = far()
    add(store, people())
    fit(store)
    store.train("other", dataset="d", backend="linear", epochs=1, seed=5)
    (model,) = store.erase_model("m").outcomes
    assert names_in(seaweed, bucket, "far/checkpoints/m/") == []
    assert len(store.checkpoints("other")) == 12
    (whole,) = store.erase_dataset("d").outcomes
    assert (whole.points, whole.retired) == (120, ("other",))
    assert names_in(seaweed, bucket, "far/checkpoints/") == names_in(seaweed, bucket, "far/data/") == []
    check(store, model.request, whole.request)


def test_recipients_are_told_once(far: Any, people: Any, add: Any, fit: Any) -> None:
    store = far()
    add(store, people())
    fit(store)
    whom = store.add_recipient("Acme Ltd", model="m")
    (outcome,) = store.erase(["u1"]).outcomes
    (told,) = store.tell_recipients()
    assert (told.recipient.id, told.outcome, told.requests) == (whom.id, "written", (outcome.request,))
    assert store.tell_recipients() == []
    assert store.record_notice(whom.id, outcome.request, "acknowledged", actor="ann").outcome == "acknowledged"
    assert dict(store.report(date.today() - timedelta(days=1)).notices) == {"acknowledged": 1}


def test_thinned_checkpoints_of_people_placed_by_risk(
    far: Any, people: Any, add: Any, fit: Any, digests: Any, seaweed: Seaweed, bucket: str
) -> None:
    rows = people(60, 180)
    risk = {"here": (0.02, 0.7), "there": (0.3, 0.3)}

    def fill(store: Store, given: Any) -> None:
        group = np.array(["there" if int(user[1:]) % 3 == 0 else "here" for user in given.user])
        add(store, given, shards=2, slices=6, placement="aware", group=group, risk=risk)
        fit(store, keep=2)

    store, never = far(), far("never")
    fill(store, rows)
    assert len(names_in(seaweed, bucket, "far/checkpoints/m/")) == len(store.checkpoints("m")) == 4
    (outcome, _) = store.erase(["u3", "u4"]).outcomes
    fill(never, rows.without(["u3", "u4"]))
    assert digests(store) == digests(never)
    assert len(names_in(seaweed, bucket, "far/checkpoints/m/")) == 4
    check(store, outcome.request)


def test_features_on_a_public_base_are_kept_and_erased_in_the_bucket(
    far: Any, people: Any, add: Any, digests: Any, seaweed: Seaweed, bucket: str, tmp_path: Path
) -> None:
    rows = people(features=4)
    weight = np.random.default_rng(7).normal(size=(4, 6)).astype(np.float32)
    save_file({"weight": weight}, tmp_path / "base.safetensors")
    settings = {"base": str(tmp_path / "base.safetensors"), "base_public": True}

    def fill(name: str, given: Any) -> tuple[Store, Any]:
        backend, store = runpy.run_path(str(TRANSFER))["TransferBackend"](), far(name)
        store.plugins = replace(store.plugins, backends={**store.plugins.backends, "transfer": backend})
        add(store, given)
        store.train("m", dataset="d", backend="transfer", epochs=1, seed=5, settings=settings)
        return store, backend

    store, backend = fill("far", rows)
    kept = [name for name in names_in(seaweed, bucket, "far/data/") if name.endswith(".features")]
    assert kept
    computed = backend.rows_seen
    (outcome,) = store.erase(["u3"]).outcomes
    assert backend.rows_seen == computed
    left = [name for name in names_in(seaweed, bucket, "far/data/") if name.endswith(".features")]
    assert len(left) == len(kept)
    assert left != kept
    never, _ = fill("never", rows.without(["u3"]))
    assert digests(store) == digests(never)
    check(store, outcome.request)
