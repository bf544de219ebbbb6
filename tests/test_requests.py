"""The life of requests: one table of transitions, deadlines that move as the law says, holds that restrict."""

import csv
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError
from unlearnd.ledger import dockets, log, points
from unlearnd.requests import OPEN, TRANSITIONS
from unlearnd.steps import Step
from unlearnd.store import Store
from unlearnd.translog import trust
from unlearnd.verify import verify_receipt

MONDAY = datetime(2026, 6, 1, 9, tzinfo=UTC)


class Hands:
    """A clock whose hands a test moves."""

    def __init__(self, now: datetime = MONDAY) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def store(new_store: Callable[..., Store], hands: Hands, people: Any, add: Any, fit: Any) -> Store:
    made = new_store(policy="gdpr", clock=hands)
    add(made, people())
    fit(made)
    return made


def leaves_of(store: Store, kind: str) -> list[dict[str, Any]]:
    size, _ = log.size_and_root(store.ledger)
    said = [json.loads(leaf) for leaf in log.leaves(store.ledger, 0, size)]
    return [leaf["predicate"] for leaf in said if leaf["predicateType"] == f"https://unlearnd.dev/{kind}/v1"]


def check_audit(store: Store) -> None:
    report = audit(store, replay="all")
    assert report.failed == (), [c.sentence for c in report.checks if c.id in report.failed]
    assert report.level == 5, list(report.lines())


def path_of(store: Store, request: str) -> list[str]:
    return [step.action for step in store.transitions(request)]


# The table.


def test_every_state_can_be_left_or_rests_and_executing_is_the_point_of_no_return() -> None:
    leads = {state for rule in TRANSITIONS.values() for state in rule.before if rule.after}
    reached = {rule.after for rule in TRANSITIONS.values()} - {"", "resume"}
    assert reached - leads == set(dockets.CLOSED)
    stoppable = {state for action in ("refuse", "withdraw", "hold") for state in TRANSITIONS[action].before}
    assert stoppable == {*OPEN, "on_hold"}
    after_execution = {rule.after for rule in TRANSITIONS.values() if set(rule.before) & {"executing", "failed"}}
    assert after_execution == {"executing", "failed", "completed"}


@pytest.mark.parametrize("action", ["approve", "hold", "release", "extend", "refuse", "withdraw", "verify_identity"])
@pytest.mark.parametrize("state", ["completed", "refused", "withdrawn", "duplicate", "executing"])
def test_what_the_table_does_not_know_is_refused_and_changes_nothing(
    store: Store, cut_off_at: Any, action: str, state: str
) -> None:
    (entry,) = store.receive(["u1"])
    if state == "refused":
        store.refuse(entry.id, reason="excessive")
    elif state == "withdrawn":
        store.withdraw(entry.id)
    elif state == "duplicate":
        (entry,) = store.receive(["u1"])
    else:
        store.approve(entry.id)
        if state == "completed":
            store.run_requests(build=False)
        else:
            cut_off_at(Step.ERASE_RECORDED, lambda: store.run_requests(build=False))
    before = (store.request(entry.id), store.transitions(entry.id))
    assert before[0].state == state
    given: dict[str, dict[str, Any]] = {
        "hold": {"basis": "legal_claims", "approver": "ann", "review": date(2026, 7, 1)},
        "extend": {"reason": "complexity"},
        "refuse": {"reason": "excessive"},
        "verify_identity": {"how": "account_login"},
    }
    with pytest.raises(RefusedError, match="no way back" if state == "executing" else "closed"):
        getattr(store, action)(entry.id, **given.get(action, {}))
    assert (store.request(entry.id), store.transitions(entry.id)) == before


def test_a_request_goes_its_way_from_received_to_a_receipt_that_verifies(store: Store, hands: Hands) -> None:
    (entry,) = store.receive(["u1"], ground="consent_withdrawn", requester="agent")
    assert (entry.state, entry.policy) == ("received", "gdpr")
    assert (entry.requester, entry.ground) == ("agent", "consent_withdrawn")
    assert entry.due_at == "2026-07-01T21:59:00Z"
    hands.pass_days(1)
    store.acknowledge(entry.id, actor="ben")
    store.verify_identity(entry.id, "account_login")
    store.approve(entry.id, actor="ann")
    hands.pass_days(2)
    done = store.run_requests()
    assert [outcome.request for outcome in done.outcomes] == [entry.id]
    assert done.outcomes[0].points > 0
    assert done.builds
    assert path_of(store, entry.id) == ["receive", "acknowledge", "verify", "approve", "execute", "complete"]
    assert [step.actor for step in store.transitions(entry.id)][1:4:2] == ["ben", "ann"]
    report = verify_receipt(store.receipt(entry.id), trust(store.translog), now=hands())
    assert report.failed == ()
    check_audit(store)


def test_erase_in_one_step_goes_through_the_same_table(store: Store) -> None:
    (outcome,) = store.erase(["u1"]).outcomes
    assert path_of(store, outcome.request) == ["receive", "verify", "approve", "execute", "complete"]
    entry = store.request(outcome.request)
    assert (entry.state, entry.requester, entry.nonce) == ("completed", "operator", None)
    assert store.erase(["u1"]).again == {outcome.request}


def test_erase_carries_out_the_request_that_is_open_already(store: Store, hands: Hands) -> None:
    (entry,) = store.receive(["u1"])
    store.ask_identity(entry.id)
    hands.pass_days(10)
    (outcome,) = store.erase(["u1"]).outcomes
    assert outcome.request == entry.id
    assert path_of(store, entry.id) == ["receive", "ask_identity", "verify", "approve", "execute", "complete"]
    # Ten days that the clock stood still are in the receipt's deadline; the log says so too.
    assert store.request(entry.id).due_at == "2026-07-13T21:59:00Z"
    check_audit(store)


def test_a_second_request_of_the_same_user_is_a_duplicate(store: Store) -> None:
    first, second, other = (*store.receive(["u1"]), *store.receive(["u1", "u2"]))
    assert (second.state, second.duplicate_of, other.state) == ("duplicate", first.id, "received")
    assert [leaf["reason"] for leaf in leaves_of(store, "refused")] == ["duplicate"]
    store.withdraw(first.id)
    assert store.receive(["u1"])[0].state == "received"


def test_nobodys_id_or_proof_has_a_place_in_the_ledger(store: Store, files_holding: Any) -> None:
    store.receive(["somebody@example.org"], identity="account_login")
    with pytest.raises(InputError, match="is a code"):
        store.receive(["u1"], identity="passport 123 456")
    assert files_holding(store.folder, b"somebody@example.org") == []


# Clocks.


def test_identity_stops_the_clock_under_the_gdpr_and_not_in_california(
    store: Store, new_store: Any, hands: Hands
) -> None:
    california = new_store("ca", policy="ccpa", clock=hands)
    (here,), (there,) = store.receive(["u1"]), california.receive(["u1"])
    store.ask_identity(here.id)
    california.ask_identity(there.id)
    hands.pass_days(40)
    assert store.deadlines() == []
    assert [d.what for d in california.deadlines(timedelta(days=30))] == ["acknowledge", "answer"]
    assert store.verify_identity(here.id, "account_login").due_at == "2026-08-10T21:59:00Z"
    assert california.verify_identity(there.id, "account_login").due_at == there.due_at
    check_audit(store)


def test_one_extension_in_time_and_for_a_reason_that_the_policy_knows(store: Store, hands: Hands) -> None:
    first, second = store.receive(["u1", "u2"])
    with pytest.raises(InputError, match="complexity, number_of_requests"):
        store.extend(first.id, reason="laziness")
    assert store.extend(first.id, reason="complexity").due_at == "2026-09-01T21:59:00Z"
    with pytest.raises(RefusedError, match="once is all there is"):
        store.extend(first.id, reason="complexity")
    hands.pass_days(31)
    with pytest.raises(RefusedError, match="too late"):
        store.extend(second.id, reason="complexity")
    late = [deadline for deadline in store.deadlines() if deadline.late]
    assert [deadline.entry.id for deadline in late] == [second.id]


def test_a_policy_without_extension_extends_nothing(new_store: Any, hands: Hands) -> None:
    store = new_store(policy="quebec_law25", clock=hands)
    (entry,) = store.receive(["u1"])
    with pytest.raises(RefusedError, match="knows no extension"):
        store.extend(entry.id, reason="complexity")


def test_a_day_before_today_counts_from_then_and_a_day_to_come_is_refused(store: Store) -> None:
    (entry,) = store.receive(["u1"], received=date(2026, 5, 20))
    assert (entry.received_at[:10], entry.due_at[:10]) == ("2026-05-20", "2026-06-22")
    with pytest.raises(InputError, match="not over yet"):
        store.receive(["u2"], received=date(2026, 6, 2))


def test_an_order_names_its_own_day_and_nobody_else_does(store: Store) -> None:
    (entry,) = store.receive(["u1"], policy="authority_order", due=date(2026, 8, 30), requester="authority")
    assert entry.due_at == "2026-08-30T23:59:00Z"
    with pytest.raises(InputError, match="no request names the day"):
        store.receive(["u2"], due=date(2026, 8, 30))


def test_identity_must_be_known_where_the_policy_wants_it(new_store: Any, hands: Hands) -> None:
    store = new_store(policy="ccpa", clock=hands)
    (entry,) = store.receive(["u1"])
    with pytest.raises(RefusedError, match="who asks"):
        store.approve(entry.id)
    # As when the command was cut off between the two: the same command then goes on.
    store.verify_identity(entry.id, "email_link")
    with pytest.raises(RefusedError, match="cannot be verified now"):
        store.approve(entry.id, identity="passport_seen")
    assert store.approve(entry.id, identity="email_link").state == "approved"


# Refusing.


def test_a_refusal_names_a_reason_with_its_source_and_is_in_the_log(store: Store, hands: Hands) -> None:
    (entry,) = store.receive(["u1"])
    with pytest.raises(InputError, match="knows no reason to refuse 'whim'"):
        store.refuse(entry.id, reason="whim")
    closed = store.refuse(entry.id, reason="exempt_legal_claims")
    assert (closed.state, closed.open, closed.nonce) == ("refused", False, None)
    assert store.transitions(entry.id)[-1].cite == "GDPR Art. 17(3)(e)"
    assert leaves_of(store, "refused")[0]["reason"] == "exempt_legal_claims"
    assert store.where_user("u1")
    hands.pass_days(100)
    check_audit(store)


# Holds.


def hold(store: Store, request: str, review: date = date(2026, 7, 15)) -> None:
    store.hold(request, basis="legal_claims", approver="ann", review=review)


@pytest.mark.both_databases
def test_a_hold_takes_the_data_out_of_training_and_a_release_puts_the_same_bits_back(
    store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, place_of: Any
) -> None:
    before, rows = digests(store), people()
    shard, slice_ = place_of(store, "u1")
    (entry,) = store.receive(["u1"])
    hold(store, entry.id)
    # Nothing made from the data is left to answer, and yet it is all there.
    assert all(key[0] != shard or key[1] < slice_ for key in digests(store))
    assert place_of(store, "u1") == (shard, slice_)
    assert points.user_keys(store.ledger, store.keys.handles(["u1"]))
    check_audit(store)
    store.build()
    never = new_store("never")
    add(never, rows.without(["u1"]))
    fit(never)
    assert digests(store) == digests(never)
    check_audit(store)
    store.release(entry.id)
    assert all(key[0] != shard or key[1] < slice_ for key in digests(store))
    store.build()
    assert digests(store) == before
    check_audit(store)


def test_a_held_user_is_not_erased_and_after_release_exactly(
    store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, hands: Hands
) -> None:
    (entry,) = store.receive(["u1"])
    store.approve(entry.id)
    hold(store, entry.id)
    erased = store.erase(["u1", "u2"])
    assert (erased.held, len(erased.outcomes)) == ((entry.id,), 1)
    assert store.where_user("u1")
    store.run_requests()
    assert store.where_user("u1")
    hands.pass_days(5)
    assert store.release(entry.id).state == "approved"
    store.run_requests()
    assert store.where_user("u1") == []
    never = new_store("never")
    add(never, people().without(["u1", "u2"]))
    fit(never)
    assert digests(store) == digests(never)
    check_audit(store)


def test_others_are_erased_from_the_slice_of_somebody_on_hold(
    store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, users_at: Any, place_of: Any
) -> None:
    rows = people()
    shard, slice_ = place_of(store, "u1")
    neighbours = [user for user in users_at(store, rows, shard, [slice_]) if user != "u1"]
    (entry,) = store.receive(["u1"])
    hold(store, entry.id)
    store.erase(neighbours)
    check_audit(store)
    store.release(entry.id)
    store.build()
    never = new_store("never")
    add(never, rows.without(neighbours))
    fit(never)
    assert digests(store) == digests(never)
    check_audit(store)


@pytest.mark.both_databases
def test_a_point_of_somebody_on_hold_is_not_erased_until_the_hold_is_lifted(store: Store) -> None:
    point, other = (f"d:{store.where_user(user)[0].positions[0]}" for user in ("u1", "u2"))
    (entry,) = store.receive(["u1"])
    hold(store, entry.id)
    erased = store.erase([], points=[point, other])
    assert (erased.held, len(erased.outcomes)) == ((entry.id,), 1)
    assert (bool(store.where_point(point)), store.where_point(other)) == (True, [])
    # Nor by a request of its own, which waits.
    (waiting,) = store.receive([], points=[point])
    store.approve(waiting.id)
    assert store.run_requests().held == (waiting.id,)
    assert store.request(waiting.id).state == "approved"
    check_audit(store)
    store.release(entry.id)
    assert len(store.run_requests().outcomes) == 1
    assert store.where_point(point) == []
    check_audit(store)


@pytest.mark.both_databases
def test_a_withdrawn_hold_puts_the_data_back(store: Store, digests: Any) -> None:
    before = digests(store)
    (entry,) = store.receive(["u1"])
    hold(store, entry.id)
    store.withdraw(entry.id)
    store.build()
    assert digests(store) == before
    check_audit(store)


@pytest.mark.parametrize("step", [Step.REQUEST_MOVED, Step.HOLD_MARKED, Step.HOLD_CLEANED])
def test_a_hold_that_was_cut_off_is_brought_to_its_end(
    store: Store, cut_off_at: Any, digests: Any, place_of: Any, step: Step
) -> None:
    before, (shard, slice_) = digests(store), place_of(store, "u1")
    (entry,) = store.receive(["u1"])
    cut_off_at(step, lambda: hold(store, entry.id))
    store.finish_erasures()
    assert all(key[0] != shard or key[1] < slice_ for key in digests(store))
    check_audit(store)
    cut_off_at(step, lambda: store.release(entry.id))
    store.build()
    assert digests(store) == before
    check_audit(store)


def test_a_hold_needs_a_basis_and_a_review_that_the_policy_allows(store: Store, hands: Hands) -> None:
    (entry,) = store.receive(["u1"])
    with pytest.raises(InputError, match="knows no exemption 'because'"):
        store.hold(entry.id, basis="because", approver="ann", review=date(2026, 7, 1))
    for review in (date(2026, 6, 1), date(2026, 12, 1)):
        with pytest.raises(InputError, match="by 2026-08-30"):
            hold(store, entry.id, review)
    hold(store, entry.id, date(2026, 6, 20))
    hands.pass_days(18)
    assert [(d.what, d.late) for d in store.deadlines(timedelta(days=7))] == [("review", False)]
    hold(store, entry.id, date(2026, 9, 1))
    hands.pass_days(80)
    assert [(d.what, d.late) for d in store.deadlines()] == [("review", True)]
    report = audit(store)
    assert report.failed == ("L2",)
    # Looked at too late is late for ever: the log says so to whoever reads it.
    store.release(entry.id)


def test_a_held_users_new_rows_are_left_out(store: Store, people: Any, add: Any) -> None:
    (entry,) = store.receive(["u1"])
    hold(store, entry.id)
    rows = people().only(["u1", "u2"])
    added = add(store, rows, slices=1, readmit=True)
    assert (added.left_out, added.points) == (len(rows.only(["u1"])), len(rows.only(["u2"])))


# The suppression list.


def test_an_erased_users_rows_do_not_come_back_by_accident(store: Store, people: Any, add: Any) -> None:
    rows = people()
    store.erase(["u1", "never-seen"])
    added = add(store, rows.only(["u1", "u2"]), slices=1)
    assert added.left_out == len(rows.only(["u1"]))
    assert store.where_user("u1") == []
    with pytest.raises(RefusedError, match="erased for good"):
        add(store, rows.only(["u1"]), slices=1)
    assert add(store, rows.only(["u1"]), slices=1, readmit=True).left_out == 0
    assert store.where_user("u1")
    check_audit_after_build(store)


def check_audit_after_build(store: Store) -> None:
    store.build()
    check_audit(store)


def test_left_out_rows_leave_no_label_behind(store: Store, people: Any) -> None:
    store.erase(["u1"])
    x = np.zeros((2, 5), np.float32)
    with pytest.raises(RefusedError, match="erased for good"):
        store.ingest("other", x, user=["u1", "u1"], label=["secret", "secret"])
    store.ingest("other", x, user=["u1", "u9"], label=["secret", "plain"])
    assert points.dataset_named(store.ledger, "other").labels == ("plain",)


# The list of those who must not be erased yet, and other plugins' vetoes.


def test_a_request_of_somebody_on_the_list_is_held_when_it_would_be_carried_out(store: Store, hands: Hands) -> None:
    store.exempt("u1", basis="legal_claims", until=date(2026, 6, 20))
    erased = store.erase(["u1", "u2"])
    assert [outcome.found for outcome in erased.outcomes] == [True]
    (held,) = erased.held
    entry = store.request(held)
    assert (entry.state, entry.hold_basis, entry.hold_approver) == ("on_hold", "legal_claims", "plugin default")
    assert entry.hold_review == "2026-06-20"
    hands.pass_days(19)
    store.release(held)
    store.approve(held)
    assert [outcome.request for outcome in store.run_requests().outcomes] == [held]
    check_audit(store)


def test_a_queued_request_of_somebody_on_the_list_is_held_by_run(store: Store) -> None:
    (entry,) = store.receive(["u1"])
    store.approve(entry.id)
    store.exempt("u1", basis="legal_claims", until=date(2030, 6, 20))
    assert store.run_requests().held == (entry.id,)
    # No longer than the policy lets a hold go unseen.
    assert store.request(entry.id).hold_review == "2026-08-30"
    store.exempt("u1", basis=None, until=date.max)
    store.release(entry.id)
    assert len(store.run_requests().outcomes) == 1
    with pytest.raises(InputError, match="knows no exemption"):
        store.exempt("u1", basis="whim", until=date(2026, 6, 20))


def test_a_list_that_cannot_be_read_stops_everything(store: Store, files_holding: Any) -> None:
    store.exempt("user-seventeen", basis="legal_claims", until=date(2026, 6, 20))
    assert files_holding(store.folder, b"user-seventeen") == []
    (store.folder / "exemptions.csv").write_text("nonsense\n1,2\n")
    with pytest.raises(DamagedStoreError, match="mend it first"):
        store.erase(["u2"])
    assert store.where_user("u2")


# Erased now, built later.


def own_policy(store: Store, build: str) -> None:
    folder = store.folder / "policies"
    folder.mkdir(exist_ok=True)
    (folder / "ours.yaml").write_text(
        "apiVersion: unlearnd.policy/v1\nid: ours\nversion: '1'\nextends: gdpr\ntitle: Ours\nnot_legal_advice: true\n"
        f"law: {{name: 'our law', reviewed_on: 2026-11-16}}\nbuild: {build}\n"
    )


def test_build_when_constituents_are_degraded(store: Store, people: Any, users_at: Any) -> None:
    own_policy(store, "{when: degraded, constituents: 2}")
    rows = people()
    first, second = (users_at(store, rows, shard, [2])[0] for shard in (1, 2))
    assert store.erase([first], policy="ours").builds == ()
    assert store.status().models[0].degraded == 1
    assert store.erase([second], policy="ours").builds
    assert store.status().models[0].degraded == 0


def test_build_on_a_schedule_and_before_the_deadline(store: Store, hands: Hands) -> None:
    for build, days in (("{when: schedule, every_days: 7}", 7), ("{when: deadline, margin_days: 5}", 26)):
        own_policy(store, build)
        user = f"u{days}"
        assert store.erase([user], policy="ours").builds == ()
        hands.pass_days(days - 1)
        assert store.erase([user], policy="ours").builds == ()
        hands.pass_days(1)
        assert store.erase([user], policy="ours").builds
        assert store.status().to_rebuild == 0


def test_build_when_accuracy_on_held_out_points_falls(store: Store, people: Any) -> None:
    rows = people()
    np.savez(store.folder / "held-out.npz", x=rows.x, y=rows.y)
    own_policy(store, "{when: accuracy, floor: 0.0, held_out: {file: held-out.npz, label: y}}")
    assert store.erase(["u1"], policy="ours").builds == ()
    own_policy(store, "{when: accuracy, floor: 1.0, held_out: {file: held-out.npz, label: y}}")
    assert store.erase(["u1"], policy="ours").builds


def test_erase_with_or_without_a_build_whatever_the_policy_says(store: Store) -> None:
    assert store.erase(["u1"], build=False).builds == ()
    own_policy(store, "{when: deadline, margin_days: 1}")
    assert store.erase(["u2"], policy="ours", build=True).builds


# Policies in evidence.


def test_the_policy_is_in_request_and_receipt_and_a_change_of_it_is_a_leaf(store: Store, hands: Hands) -> None:
    (first,) = store.erase(["u1"]).outcomes
    (second,) = store.erase(["u2"], policy="ccpa").outcomes
    said = [leaf["policy"] for leaf in leaves_of(store, "erasure")]
    assert said == [{"name": n, "digest": store.policy(n).digest} for n in ("gdpr", "ccpa")]
    assert [leaf["policy"] for leaf in leaves_of(store, "policy")] == ["gdpr", "ccpa"]
    own = store.folder / "policies"
    own.mkdir()
    text = (
        "apiVersion: unlearnd.policy/v1\nid: ours\nversion: '1'\nextends: gdpr\ntitle: Ours\nnot_legal_advice: true\n"
        "law: {name: 'our law', reviewed_on: 2026-11-16}\n"
    )
    for more in ("", "build: {when: deadline, margin_days: 2}\n", "", ""):
        (own / "ours.yaml").write_text(text + more)
        store.receive([f"x{len(leaves_of(store, 'request'))}"], policy="ours")
    logged = [leaf["digest"] for leaf in leaves_of(store, "policy") if leaf["policy"] == "ours"]
    assert len(logged) == 3
    assert logged[0] == logged[2] != logged[1]
    assert first.request != second.request
    check_audit(store)


# Many.


def rows_of(users: list[str], **more: str) -> list[dict[str, str]]:
    return [{"user": user, **more} for user in users]


def test_every_row_of_a_bulk_has_its_own_result_and_given_again_nothing_is_recorded_twice(store: Store) -> None:
    rows = [
        *rows_of(["u1", "u2", "u1", "nobody"]),
        {"user": ""},
        {"user": "u3", "received": "yesterday"},
        {"user": "u4", "requester": "neighbour"},
        {"user": "u5", "received": "2026-05-20", "requester": "parent", "identity": "id_document_seen"},
    ]
    results = store.receive_rows(rows, source="file")
    assert [result.state for result in results] == [
        *("received", "received", "duplicate", "received", "unusable", "unusable", "unusable", "received"),
    ]
    assert results[2].duplicate_of == results[0].request
    assert all("neighbour" in r.problem or "u4" not in r.problem for r in results)
    again = store.receive_rows(rows, source="file")
    assert [r.request for r in again] == [r.request for r in results]
    assert len(store.requests()) == 5
    store.approve(results[0].request or "")
    store.run_requests()
    assert store.receive_rows(rows, source="file")[0].state == "completed"


def test_a_bulk_that_was_cut_off_goes_on_where_it_stopped(
    store: Store, cut_off_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unlearnd.intake.LOT", 5)
    rows = rows_of([f"u{n}" for n in range(12)])
    cut_off_at(Step.REQUEST_MOVED, lambda: store.receive_rows(rows, source="file"))
    assert len(store.requests()) == 5
    results = store.receive_rows(rows, source="file", approve=True)
    assert len({r.request for r in results}) == len(store.requests()) == 12
    # Those that were recorded before, without approval, are approved now that somebody says so.
    assert [entry.state for entry in store.requests()].count("approved") == 12


# Commands.


class Shell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, code: int = 0, input: str | None = None) -> Any:
        result = CliRunner().invoke(main, ["--store", str(self.folder), *arguments], input=input)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments and code == 0 else result.output


@pytest.fixture
def shell(new_store: Any, people: Any, add: Any, fit: Any) -> Shell:
    made = new_store(policy="gdpr")
    add(made, people())
    fit(made)
    return Shell(made.folder)


def test_an_officers_day(shell: Shell, tmp_path: Path) -> None:
    (entry,) = shell("requests", "receive", "--user", "u1", "--requester", "agent", "--json")
    request = entry["id"]
    assert "handle" not in entry
    assert "received" in shell("requests", "list", "--open")
    assert "received" in shell("requests", "acknowledge", request, "--by", "ben")
    assert "verified" in shell("requests", "identity", request, "--checked", "account_login")
    assert "approved" in shell("requests", "approve", request[:10])
    review = str(datetime.now(UTC).date() + timedelta(days=30))
    held = shell("requests", "hold", request, "--basis", "legal_claims", "--approver", "ann", "--review", review)
    assert f"looked at again by {review}" in held
    refused = shell("erase", "--user", "u1", code=1)
    assert "1 request on hold and not carried out" in refused
    assert "Carried out 0 requests" in shell("requests", "run")
    assert "approved" in shell("requests", "release", request)
    assert "Nothing is owed" in shell("requests", "due", "--within", "7d")
    assert "answer" in shell("requests", "due", "--within", "60d")
    assert "extended" in str(shell("requests", "show", request, "--json"))
    assert "Carried out 1 request:" in shell("requests", "run")
    shown = shell("requests", "show", request)
    assert "complete" in shown
    assert "account_login" in shown
    assert shell("audit", "--json")["failed"] == []


def test_due_exits_with_1_when_something_is_late(new_store: Any) -> None:
    hands = Hands()
    store = new_store(policy="gdpr", clock=hands)
    store.receive(["u1"])
    hands.pass_days(40)
    shell = Shell(store.folder)
    assert "late" in shell("requests", "due", code=1)


def test_wrong_usage_gets_one_sentence(shell: Shell, tmp_path: Path) -> None:
    assert "no request begins with 'zzz'" in shell("requests", "show", "zzz", code=1)
    assert "is not a length of time" in shell("requests", "due", "--within", "soon", code=1)
    assert "no state 'done'" in shell("requests", "list", "--state", "done", code=2)
    shell("requests", "receive", code=2)
    shell("requests", "identity", "x", code=2)
    (tmp_path / "headless.csv").write_text("u1\nu2\n")
    said = shell("requests", "receive", "--file", str(tmp_path / "headless.csv"), code=1)
    assert "needs a header line" in said
    assert "u1" not in said.replace(str(tmp_path), "")
    assert "no file" in shell("requests", "receive", "--file", str(tmp_path / "none.csv"), code=1)


def test_a_csv_of_requests_is_received_and_carried_out_in_one_call(shell: Shell, tmp_path: Path) -> None:
    file, results = tmp_path / "asked.csv", tmp_path / "results.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["user", "identity"])
        writer.writerows([[f"u{n}", "account_login"] for n in range(10)] + [["u1", ""], ["ghost", ""]])
    said = shell("requests", "receive", "--file", str(file), "--run", "--results", str(results))
    assert "12 rows: 11 completed, 1 duplicate." in said
    with results.open(newline="") as back:
        assert [row["state"] for row in csv.DictReader(back)].count("completed") == 11
    assert len(shell("receipt", "list", "--json")) == 11
    # Given again: nothing is asked twice.
    shell("requests", "receive", "--file", str(file), "--run")
    assert len(shell("receipt", "list", "--json")) == 11
    assert shell("audit", "--json")["failed"] == []


def test_no_request_by_that_name(store: Store) -> None:
    store.receive(["u1"])
    with pytest.raises(NotFoundError, match="no request begins"):
        store.request("nothing")
    with pytest.raises(NotFoundError, match="no request begins"):
        store.request("")


# What policies say is carried out.


def test_due_lists_what_the_operator_aims_at_and_the_last_day_to_refuse_and_neither_is_late(
    store: Store, hands: Hands
) -> None:
    first, second = store.receive(["u1", "u2"])
    store.approve(second.id)
    assert store.deadlines(timedelta(days=7)) == []
    assert [(d.what, d.by, d.late) for d in store.deadlines(timedelta(days=15))] == [
        ("target", "2026-06-15T21:59:00Z", False)
    ] * 2
    hands.pass_days(20)
    assert {(d.what, d.late) for d in store.deadlines()} == {("target", False)}
    store.extend(first.id, reason="complexity")
    hands.pass_days(12)
    assert [(d.entry.id, d.what, d.late) for d in store.deadlines()] == [
        (first.id, "decide", False),
        (second.id, "answer", True),
    ]
    store.approve(first.id)
    assert "target" in {d.what for d in store.deadlines()}


def test_what_silence_counts_as_is_said_of_a_late_answer(new_store: Any, hands: Hands) -> None:
    store = new_store(policy="pipeda", clock=hands)
    store.receive(["u1"])
    hands.pass_days(29)
    assert [d.counts_as for d in store.deadlines(timedelta(days=7))] == [""]
    hands.pass_days(3)
    assert [d.counts_as for d in store.deadlines()] == ["refused, PIPEDA s. 8(5)"]
    assert "LATE: counts as refused, PIPEDA s. 8(5)" in Shell(store.folder)("requests", "due", code=1)


def test_commands_say_what_the_person_must_be_told(store: Store, hands: Hands) -> None:
    hands.now = datetime.now(UTC)
    shell = Shell(store.folder)
    (entry,) = shell("requests", "receive", "--user", "u1", "--json")
    assert entry["tell"]["of"] == "received"
    extended = shell("requests", "extend", entry["id"], "--reason", "complexity", "--json")
    assert extended["tell"] == {"of": "extended", "state": [], "cite": "GDPR Art. 12(3), 12(4)"}
    refused = shell("requests", "refuse", entry["id"], "--reason", "excessive")
    assert "was refused, stating reasons, complaint to authority, judicial remedy (GDPR Art. 12(3), 12(4))" in refused


def test_nobody_asks_through_an_agent_where_the_policy_has_none(new_store: Any, hands: Hands) -> None:
    store = new_store(clock=hands)
    (store.folder / "policies").mkdir()
    (store.folder / "policies" / "strict.yaml").write_text(
        "apiVersion: unlearnd.policy/v1\nid: strict\nversion: '1'\nextends: default\ntitle: Strict\n"
        "not_legal_advice: true\nlaw: {name: ours, reviewed_on: 2026-11-18}\nidentity: {authorised_agent: false}\n"
    )
    with pytest.raises(InputError, match="nobody asks through an agent"):
        store.receive(["u1"], policy="strict", requester="agent")
    assert store.receive(["u1"], policy="strict")


def test_what_ties_a_request_to_a_person_goes_when_its_keeping_time_is_over(
    store: Store, hands: Hands, people: Any, add: Any
) -> None:
    store.erase(["u1"])
    (refused,) = store.receive(["u2"], policy="ccpa")
    store.refuse(refused.id, reason="excessive", actor="ann")
    hands.pass_days(365 + 366)
    assert store.expire_requests() == []
    hands.pass_days(1)
    assert [e.id for e in store.expire_requests(dry_run=True)] == [refused.id]
    assert store.request(refused.id).handle is not None
    assert [e.id for e in store.expire_requests()] == [refused.id]
    gone = store.request(refused.id)
    assert (gone.handle, gone.commitment, gone.state, gone.policy) == (None, None, "refused", "ccpa")
    assert store.transitions(refused.id) == []
    hands.pass_days(366)
    (waiting,) = store.receive(["u3"])
    assert len(store.expire_requests()) == 1
    assert store.expire_requests() == []
    assert "0 requests past the keeping time untied" in Shell(store.folder)("requests", "expire")
    assert store.request(waiting.id).handle is not None
    # The receipt, the log and the suppression list stay, and what is asked again is a request of its own.
    assert len(store.receipts()) == 1
    rows = people()
    assert add(store, rows.only(["u1", "u2"]), slices=1).left_out == len(rows.only(["u1"]))
    (again,) = store.erase(["u1"]).outcomes
    assert not again.found
    assert len(store.receipts()) == 2
    check_audit_after_build(store)
