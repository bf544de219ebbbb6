"""A clock that goes back: leases still run out, and nothing is dated before what it follows."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from unlearnd.audit import audit
from unlearnd.erasure import carry_out, record_requests
from unlearnd.errors import BusyError
from unlearnd.leases import SteadyClock, hold
from unlearnd.ledger import Ledger, erasures, leases, log
from unlearnd.statements import moment_of
from unlearnd.steps import Step
from unlearnd.store import Store

pytestmark = pytest.mark.both_databases

LATER = datetime(2031, 5, 4, 12, 0, 45, tzinfo=UTC)
EARLIER = datetime(2031, 5, 2, 9, 30, tzinfo=UTC)


@pytest.fixture
def ledger(ledger_url: Callable[[str], str]) -> Iterator[Ledger]:
    made = Ledger.create(ledger_url("ledger"))
    yield made
    made.close()


def test_a_lease_given_before_the_clock_went_back_lasts_no_longer_than_one_given_now(ledger: Ledger) -> None:
    leases.take(ledger, ["a"], "dead", 90_030, 90_000, [])
    # A day earlier all of a sudden.
    assert leases.take(ledger, ["a"], "me", 3_630, 3_600, []) != []
    assert leases.take(ledger, ["a"], "me", 3_659, 3_629, []) != []
    assert leases.take(ledger, ["a"], "me", 3_660, 3_630, []) == []


def test_a_living_holder_keeps_its_lease_when_the_clock_goes_back(ledger: Ledger) -> None:
    leases.take(ledger, ["a"], "alive", 90_030, 90_000, [])
    assert leases.take(ledger, ["a"], "me", 3_630, 3_600, []) != []
    # It renews every few seconds, by the clock as it is now.
    assert leases.renew(ledger, "alive", 3_635) == ({"a"}, False)
    assert leases.take(ledger, ["a"], "me", 3_660, 3_630, []) != []


def test_whoever_holds_a_lease_goes_by_the_clock_as_it_is_and_not_as_the_log_has_it(
    ledger: Ledger, database: str
) -> None:
    clock = SteadyClock(lambda: EARLIER)
    clock.not_before(LATER)
    assert clock() == LATER
    with hold(ledger, ["a"], clock) as held, pytest.raises(BusyError), hold(ledger, ["a"], clock, patience=0):
        pass
    with hold(ledger, ["a"], clock) as held:
        (lease,) = leases.all_leases(ledger)
        assert lease.holder == held.holder
        # PostgreSQL has a clock that all machines share; a file has only ours.
        expected = EARLIER.timestamp() if database == "sqlite" else time.time()
        assert lease.expires == pytest.approx(expected + 30, abs=20)


def moments(store: Any) -> list[datetime]:
    size = log.size_and_root(store.ledger)[0]
    return [moment for leaf in log.leaves(store.ledger, 0, size) if (moment := moment_of(leaf)) is not None]


def test_a_receipt_is_never_dated_before_a_leaf_it_follows(
    new_store: Callable[..., Any], people: Callable[..., Any], add: Callable[..., Any], fit: Any, tmp_path: Path
) -> None:
    store = new_store(clock=lambda: LATER)
    add(store, people(), shards=2, slices=2)
    fit(store)
    store.close()
    # Somebody sets the machine's clock right, or wrong: two days back.
    with Store.open(store.folder, clock=lambda: EARLIER) as back:
        done = back.erase(["u1"])
        back.ingest("d", people(5, 10).x, user=people(5, 10).user, label=people(5, 10).y)
        told = moments(back)
        assert told == sorted(told)
        assert audit(back).level == 4
    outcome = done.outcomes[0]
    assert outcome.received_at <= outcome.influence_removed_at <= outcome.rebuilt_at
    # Once the clock has caught up, time goes on.
    with Store.open(store.folder, clock=lambda: LATER + timedelta(days=1)) as on:
        on.erase(["u2"])
        assert moments(on)[-1] == (LATER + timedelta(days=1)).replace(second=0)
        assert audit(on).level == 4


def test_an_erasure_begun_before_the_clock_went_back_does_not_end_before_it_began(
    new_store: Callable[..., Any],
    people: Callable[..., Any],
    add: Callable[..., Any],
    cut_off_at: Callable[..., None],
) -> None:
    store = new_store(clock=lambda: LATER)
    add(store, people(), shards=2, slices=2)
    asked = record_requests(store.ledger, store.keys.handles(["u1"]), store.clock())
    assert asked is not None
    cut_off_at(Step.ERASE_MARKED, lambda: carry_out(store.translog, {}, asked, store.clock))
    with Store.open(store.folder, clock=lambda: EARLIER) as back:
        assert back.finish_erasures() == 1
        found = erasures.erasure_by_id(back.ledger, asked)
    assert found.received_at <= found.marked_at <= found.influence_removed_at
    assert found.influence_removed_at == "2031-05-04T12:00:45Z"
