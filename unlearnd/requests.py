"""The life of a request: one table of transitions, and what each asks for.

    received ──▶ awaiting_identity ──▶ verified ──▶ approved ──▶ executing ──▶ completed
       every state up to approved may go to on_hold, refused or withdrawn; a second request of the same user
       is a duplicate; executing is the point of no return, and failed only waits to be tried again

Each transition is a row in the ledger with who took it and why, and a leaf of the log where an auditor needs it: when
a request came in and is due, was extended, stood still, went on, or was closed without an erasure. Who asks and whose
data it is are different roles. How identity was checked is kept as a code; there is no place for the proof.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import Any

from unlearnd.clocks import add_period, dates_of, day_of, end_of, noon_of
from unlearnd.errors import InputError, NotFoundError, RefusedError
from unlearnd.hookspecs import Petition
from unlearnd.keys import draw_id, draw_nonce
from unlearnd.ledger import Ledger, dockets
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.dockets import CLOSED, UNDER_WAY, Entry, Moved, Transaction, Transition
from unlearnd.ledger.log import append
from unlearnd.policy import DEFAULT, Policy, codes, load_policy, policy_from_json
from unlearnd.statements import (
    commit_to_user,
    policy_applied,
    request_closed,
    request_extended,
    request_paused,
    request_received,
    request_resumed,
)
from unlearnd.steps import Step, reached

OPEN = ("received", "awaiting_identity", "verified", "approved")
"""Where nothing is done yet, and everything can still be stopped."""
REQUESTERS = ("user", "agent", "parent", "authority", "operator")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,62}")
_ACTOR = re.compile(r"[^\x00-\x1f\x7f]{1,100}")


@dataclass(frozen=True)
class Rule:
    """One kind of transition."""

    action: str
    before: tuple[str, ...]
    after: str
    """Empty: the state stays as it is. `resume`: what it was before the hold."""
    leaf: str = ""
    """The kind of leaf it writes, where it writes one."""


TRANSITIONS: Mapping[str, Rule] = {
    rule.action: rule
    for rule in (
        Rule("receive", ("",), "received", "request"),
        Rule("duplicate", ("received",), "duplicate", "refused"),
        Rule("acknowledge", (*OPEN, "on_hold"), ""),
        Rule("ask_identity", ("received", "verified"), "awaiting_identity", "paused"),
        Rule("verify", ("received", "awaiting_identity"), "verified", "resumed"),
        Rule("approve", ("received", "verified"), "approved"),
        Rule("hold", (*OPEN, "on_hold"), "on_hold", "paused"),
        Rule("release", ("on_hold",), "resume", "resumed"),
        Rule("extend", OPEN, "", "extended"),
        Rule("refuse", (*OPEN, "on_hold"), "refused", "refused"),
        Rule("withdraw", (*OPEN, "on_hold"), "withdrawn", "refused"),
        Rule("execute", ("approved",), "executing"),
        Rule("fail", ("executing",), "failed"),
        Rule("retry", ("failed",), "executing"),
        Rule("complete", UNDER_WAY, "completed", "erasure"),
    )
}
"""Every way a request can go. Nothing else changes its state."""


@dataclass(frozen=True)
class Asked:
    """A request as it comes in."""

    target: Any
    """A handle, a point as (dataset, position), or ("dataset" or "model", name)."""
    user: str | None = None
    """Whose receipt it will be; goes no further than a commitment."""
    received: date | None = None
    """The day it came in, where that was before today."""
    due: date | None = None
    """The day it names itself, as an order does."""
    ground: str | None = None
    requester: str = "user"
    identity: str = ""
    reference: bytes | None = None


@dataclass(frozen=True)
class Deadline:
    """What is owed, and by when."""

    entry: Entry
    what: str
    """`answer`, `acknowledge`, `review` of a hold, `decide` (the last day to refuse), or `target` (the operator's)."""
    by: str
    late: bool
    """Never to decide, nor for a target: the answer is what is owed."""
    counts_as: str = ""
    """What the law takes a late answer for, and where it says so."""


@dataclass(frozen=True)
class Duty:
    """What the policy wants the person told after something was done."""

    of: str
    """`received`, `extended`, `refused` or `completed`."""
    state: tuple[str, ...]
    """What the notice must state."""
    cite: str


def kind_of(target: Any) -> str:
    """Return what a request is about."""
    if isinstance(target, bytes):
        return "user"
    return str(target[0]) if isinstance(target[1], str) else "point"


def draft(asked: Asked, policy: Policy, now: datetime) -> Entry:
    """Return the entry of a request that comes in now, due as the policy counts; not recorded yet."""
    if asked.requester not in REQUESTERS:
        raise InputError(f"who asks is one of {', '.join(REQUESTERS)}, not '{asked.requester}'")
    if asked.requester == "agent" and not policy.identity.authorised_agent:
        raise InputError(f"under policy '{policy.id}' nobody asks through an agent")
    grounds = policy.grounds()
    ground = asked.ground or grounds[0]
    if ground not in grounds:
        raise InputError(f"policy '{policy.id}' knows no ground '{ground}'; there are: {', '.join(grounds)}")
    if asked.identity:
        check_code("how identity was checked", asked.identity)
    today = day_of(policy, now)
    received = asked.received or today
    if received > today:
        raise InputError(f"a request cannot have been received on {received}: that day is not over yet")
    moment = now if received == today else noon_of(policy, received)
    dates = dates_of(policy, received)
    if asked.due is not None and not policy.clock.own_date:
        raise InputError(f"under policy '{policy.id}' no request names the day it is due")
    if asked.due is not None and asked.due < received:
        raise InputError(f"a request received on {received} cannot be due on {asked.due}")
    kind = kind_of(asked.target)
    nonce = draw_nonce() if asked.user is not None else None
    return Entry(
        id=draw_id(),
        leaf=-1,
        asked=kind,
        handle=asked.target if kind == "user" else None,
        dataset=None if kind == "user" else asked.target[0] if kind == "point" else None
        if kind == "model" else asked.target[1],
        position=asked.target[1] if kind == "point" else None,
        model=asked.target[1] if kind == "model" else None,
        state="",
        policy=policy.id,
        policy_digest=policy.digest,
        ground=ground,
        requester=asked.requester,
        identity=asked.identity,
        received_at=stamp(moment),
        due_at=stamp(end_of(policy, asked.due or dates.due)),
        acknowledge_by=stamp(end_of(policy, dates.acknowledge_by)) if dates.acknowledge_by else None,
        acknowledged_at=None,
        extended=False,
        paused_at=None,
        paused_days=0,
        resume_state=None,
        hold_basis=None,
        hold_approver=None,
        hold_review=None,
        duplicate_of=None,
        reference=asked.reference,
        commitment=commit_to_user(nonce, asked.user) if nonce is not None and asked.user is not None else None,
        nonce=nonce,
        closed_at=None,
        moves=0,
    )  # fmt: skip


def enter_drafts(
    connection: Transaction,
    drafts: Sequence[Entry],
    policy: Policy,
    path: Sequence[str],
    actor: str,
    at: str,
    erasure_id: str = "",
) -> list[Entry]:
    """Enter requests within a transaction and take each along `path`, actions after `receive`; return them as they are.

    `erasure_id` is known where they are carried out at once.
    """
    dockets.keep_policy(connection, policy.id, policy.digest, policy.as_json(), _policy_leaf(policy, at), at)
    first = append(
        connection,
        [request_received(e.id, erasure_id, e.asked, e.received_at, e.due_at, policy.digest) for e in drafts],
    )
    state, steps = "", []
    for action in ("receive", *path):
        rule = TRANSITIONS[action]
        assert state in rule.before
        steps.append((action, state, rule.after))
        state = rule.after
    ready = [replace(e, leaf=first + n, state=state, moves=len(steps)) for n, e in enumerate(drafts)]
    dockets.enter(connection, ready)
    taken = [Transition(number, at, *step, actor, "", "") for number, step in enumerate(steps)]
    dockets.note(connection, ((entry.id, step) for entry in ready for step in taken))
    return ready


def receive(
    ledger: Ledger, given: Sequence[Asked], policy: Policy, now: datetime, actor: str, *, approve: bool = False
) -> list[Entry]:
    """Record requests that came in, in one transaction; return each as it stands.

    One that was given before, by its reference, is returned as it is. A second request about somebody whose first is
    still open is a duplicate of it. With `approve`, those whose identity was checked, or need not be, are approved,
    also where they were given before without it.
    """
    return receive_drafts(ledger, [draft(asked, policy, now) for asked in given], policy, now, actor, approve=approve)


def receive_drafts(
    ledger: Ledger, drafts: Sequence[Entry], policy: Policy, now: datetime, actor: str, *, approve: bool = False
) -> list[Entry]:
    """Record requests that were drafted under a policy just now, as `receive` does."""
    at = stamp(now)
    check_actor(actor)
    with ledger.write() as connection:
        references = [entry.reference for entry in drafts if entry.reference is not None]
        known = dockets.by_references(connection, references) if references else {}
        open_ = dockets.open_by_handles(connection, [e.handle for e in drafts if e.handle is not None])
        others = dockets.open_of_others(connection)
        results: list[str] = []
        fresh: list[Entry] = []
        doubles: list[tuple[Entry, str]] = []
        for entry in drafts:
            before = known.get(entry.reference or b"")
            if before is not None:
                results.append(before.id)
                continue
            first = open_.get(entry.handle) if entry.handle is not None else others.get(entry.target)
            results.append(entry.id)
            if first is not None:
                doubles.append((replace(entry, duplicate_of=first.id, nonce=None, commitment=None), first.id))
            else:
                fresh.append(entry)
                if entry.handle is not None:
                    open_[entry.handle] = entry
                else:
                    others[entry.target] = entry
        waiting = [e for e in known.values() if e.state in ("received", "verified") and _identity_done(policy, e)]
        if approve and waiting:
            advance(connection, waiting, ("verify", "approve"), now, actor)
        sure = [e for e in fresh if approve and _identity_done(policy, e)]
        rest = [e for e in fresh if not (approve and _identity_done(policy, e))]
        for lot, path in ((sure, ("verify", "approve")), (rest, ())):
            if lot:
                enter_drafts(connection, lot, policy, path, actor, at)
        if doubles:
            entered = enter_drafts(connection, [e for e, _ in doubles], policy, (), actor, at)
            append(connection, [request_closed(e.id, "duplicate", at) for e in entered])
            dockets.move(
                connection,
                [
                    Moved(e, "duplicate", "duplicate", at, actor, "duplicate", changes={"closed_at": at})
                    for e in entered
                ],
            )
        found = dockets.by_ids(connection, results)
    _moved()
    return [found[request_id] for request_id in results]


def acknowledge(ledger: Ledger, request_id: str, now: datetime, actor: str) -> Entry:
    """Record that the requester was told that the request has come in."""
    return _change(ledger, request_id, "acknowledge", now, actor, lambda e, p: ({"acknowledged_at": stamp(now)}, []))


def ask_identity(ledger: Ledger, request_id: str, now: datetime, actor: str) -> Entry:
    """Record that the requester was asked who they are; the clock stands still where the policy says so."""

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        if not policy.pauses_for("awaiting_identity"):
            return {}, []
        _check_in_time(entry, now)
        return {"paused_at": stamp(now)}, [request_paused(entry.id, "awaiting_identity", "", stamp(now))]

    return _change(ledger, request_id, "ask_identity", now, actor, decide)


def verify(ledger: Ledger, request_id: str, how: str, now: datetime, actor: str) -> Entry:
    """Record how identity was checked; never the proof. A clock that stood still goes on."""
    check_code("how identity was checked", how)

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        changes, leaves = _resumed(entry, policy, now)
        return {"identity": how, **changes}, leaves

    return _change(ledger, request_id, "verify", now, actor, decide, why=how)


def approve(ledger: Ledger, request_id: str, now: datetime, actor: str) -> Entry:
    """Decide that a request is to be carried out."""

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        if entry.state == "received" and not _identity_done(policy, entry):
            raise RefusedError(
                f"request {entry.id[:12]} cannot be approved: policy '{policy.id}' wants to know who asks; "
                "say how identity was checked, with --identity"
            )
        return {}, []

    return _change(ledger, request_id, "approve", now, actor, decide)


def put_on_hold(
    ledger: Ledger, request_id: str, basis: str, approver: str, review: date, now: datetime, actor: str
) -> Entry:
    """Stop a request for a reason that the policy knows, until a day on which somebody looks again."""
    check_actor(approver)

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        _check_known(policy, "exemption", basis, codes(policy.exemptions))
        today = day_of(policy, now)
        latest = add_period(policy, today, policy.hold.max_review_interval)
        if not today < review <= latest:
            raise InputError(
                f"a hold is looked at again after today and by {latest}, as policy '{policy.id}' says; not on {review}"
            )
        if entry.paused_at is None:
            _check_in_time(entry, now)
        changes = {
            "hold_basis": basis,
            "hold_approver": approver,
            "hold_review": str(review),
            # A hold upon a hold, or while identity was asked for, goes on with the pause there is.
            "paused_at": entry.paused_at or stamp(now),
            "resume_state": entry.resume_state if entry.state == "on_hold" else entry.state,
        }
        return changes, [request_paused(entry.id, basis, stamp(end_of(policy, review)), stamp(now))]

    return _change(ledger, request_id, "hold", now, actor, decide, why=basis, cited=lambda p: p.exemptions)


def release(ledger: Ledger, request_id: str, now: datetime, actor: str) -> Entry:
    """Lift a hold: the request goes on where it was, with the time it had left."""

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        nothing = {"hold_basis": None, "hold_approver": None, "hold_review": None, "resume_state": None}
        if entry.resume_state == "awaiting_identity" and policy.pauses_for("awaiting_identity"):
            return nothing, [request_paused(entry.id, "awaiting_identity", "", stamp(now))]
        changes, leaves = _resumed(entry, policy, now)
        return {**nothing, **changes}, leaves

    return _change(ledger, request_id, "release", now, actor, decide)


def extend(ledger: Ledger, request_id: str, reason: str, now: datetime, actor: str) -> Entry:
    """Take the one extension that the policy knows, in time and for one of its reasons."""

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        extension = policy.clock.extension
        if extension is None:
            raise RefusedError(f"policy '{policy.id}' knows no extension")
        _check_known(policy, "reason to extend", reason, extension.reasons)
        if entry.extended:
            raise RefusedError(f"request {entry.id[:12]} was extended already, and once is all there is")
        if entry.paused_at is not None:
            raise RefusedError(f"the clock of request {entry.id[:12]} stands still: there is nothing to extend yet")
        dates = dates_of(policy, _received_day(entry, policy), entry.paused_days)
        assert dates.extend_by is not None
        assert dates.extended_due is not None
        if now > end_of(policy, dates.extend_by):
            raise RefusedError(f"the person had to be told of an extension by {dates.extend_by}: it is too late")
        due = stamp(end_of(policy, dates.extended_due))
        return {"extended": True, "due_at": due}, [request_extended(entry.id, due, stamp(now))]

    return _change(ledger, request_id, "extend", now, actor, decide, why=reason)


def refuse(ledger: Ledger, request_id: str, reason: str, now: datetime, actor: str) -> Entry:
    """Close a request without an erasure, for a reason that the policy knows."""

    def decide(entry: Entry, policy: Policy) -> tuple[dict[str, Any], list[bytes]]:
        _check_known(policy, "reason to refuse", reason, codes(policy.refusal.reasons))
        return {"closed_at": stamp(now), "nonce": None}, [request_closed(entry.id, reason, stamp(now))]

    return _change(ledger, request_id, "refuse", now, actor, decide, why=reason, cited=lambda p: p.refusal.reasons)


def withdraw(ledger: Ledger, request_id: str, now: datetime, actor: str) -> Entry:
    """Close a request because whoever made it no longer wants it."""
    closed = {"closed_at": stamp(now), "nonce": None}
    return _change(
        ledger,
        request_id,
        "withdraw",
        now,
        actor,
        lambda e, p: (closed, [request_closed(e.id, "withdrawn", stamp(now))]),
    )


def advance(
    connection: Transaction, entries: Sequence[Entry], actions: Sequence[str], now: datetime, actor: str
) -> None:
    """Take requests along these actions within a transaction, each as far as it is not there yet."""
    at = stamp(now)
    for action in actions:
        rule = TRANSITIONS[action]
        moves: list[Moved] = []
        leaves: list[bytes] = []
        for entry in dockets.by_ids(connection, [entry.id for entry in entries]).values():
            if entry.state in rule.before:
                changes: dict[str, Any] = {}
                if rule.leaf == "resumed" and entry.paused_at is not None:
                    policy = policy_of_digest(connection, entry.policy_digest) or load_policy(DEFAULT)
                    changes, said = _resumed(entry, policy, now)
                    leaves += said
                moves.append(Moved(entry, action, rule.after, at, actor, changes=changes))
        append(connection, leaves)
        dockets.move(connection, moves)


def complete(connection: Transaction, ids: Sequence[str], now: datetime) -> None:
    """Record within a transaction that requests were carried out, and put their users on the suppression list."""
    at = stamp(now)
    found = list(dockets.by_ids(connection, ids).values())
    dockets.move(
        connection,
        [Moved(e, "complete", "completed", at, "unlearnd", changes={"closed_at": at, "nonce": None}) for e in found],
    )
    kept = {digest: policy_of_digest(connection, digest) for digest in {e.policy_digest for e in found}}
    listed = [e for e in found if e.handle is not None and (p := kept[e.policy_digest]) and p.records.suppression_list]
    dockets.suppress(connection, [e.handle for e in listed if e.handle is not None], at)


def note_failure(ledger: Ledger, ids: Sequence[str], why: str, now: datetime) -> None:
    """Record that carrying requests out was broken off; they are tried again."""
    with ledger.write() as connection:
        found = [e for e in dockets.by_ids(connection, ids).values() if e.state == "executing"]
        dockets.move(connection, [Moved(e, "fail", "failed", stamp(now), "unlearnd", why) for e in found])


def note_retry(ledger: Ledger, ids: Sequence[str], now: datetime) -> None:
    """Record that requests that had failed are being carried out again."""
    with ledger.write() as connection:
        found = [e for e in dockets.by_ids(connection, ids).values() if e.state == "failed"]
        dockets.move(connection, [Moved(e, "retry", "executing", stamp(now), "unlearnd") for e in found])


def petition_of(entry: Entry | None, target: Any, policy: Policy) -> Petition:
    """Return what plugins are asked about: a request that waits, or one that is about to be made in one step."""
    if entry is not None:
        handle, name = (entry.handle or b"").hex(), entry.model or entry.dataset or ""
        return Petition(entry.id, entry.asked, handle, name, entry.policy, entry.ground)
    kind = kind_of(target)
    handle = target.hex() if kind == "user" else ""
    name = "" if kind == "user" else target[0] if kind == "point" else target[1]
    return Petition("", kind, handle, name, policy.id, policy.grounds()[0])


def last_review(ledger: Ledger, entry: Entry, now: datetime) -> date:
    """Return the last day on which a hold that begins now may be looked at again."""
    policy = policy_of(ledger, entry)
    return add_period(policy, day_of(policy, now), policy.hold.max_review_interval)


def entry_named(ledger: Ledger, prefix: str) -> Entry:
    """Return the one request whose id begins so."""
    found = dockets.beginning_with(ledger, prefix) if prefix else []
    if len(found) != 1:
        raise NotFoundError(f"{'no' if not found else 'more than one'} request begins with '{prefix}'")
    return found[0]


def deadlines(ledger: Ledger, now: datetime, within: timedelta) -> list[Deadline]:
    """Return what is owed within a time from now or late already, the first first."""
    limit, at = stamp(now + within), stamp(now)
    found: list[Deadline] = []
    open_ = dockets.open_entries(ledger)
    with ledger.read() as connection:
        rules = {digest: policy_of_digest(connection, digest) for digest in {entry.policy_digest for entry in open_}}
    for entry in open_:
        policy = rules[entry.policy_digest] or load_policy(DEFAULT)
        owed: list[tuple[str, str]] = []
        if entry.hold_review is not None:
            owed.append(("review", stamp(end_of(policy, date.fromisoformat(entry.hold_review)))))
        if entry.acknowledge_by is not None and entry.acknowledged_at is None:
            owed.append(("acknowledge", entry.acknowledge_by))
        if entry.paused_at is None:
            owed.append(("answer", entry.due_at))
            if entry.state in ("received", "awaiting_identity", "verified") and not policy.clock.own_date:
                dates = dates_of(policy, _received_day(entry, policy), entry.paused_days)
                # An extension moves the answer. What is to be refused must be refused as if there were none.
                decide = stamp(end_of(policy, dates.refuse_by))
                owed += [("decide", decide)] if decide < entry.due_at else []
        listed = [Deadline(entry, what, by, what != "decide" and by < at) for what, by in owed if by <= limit]
        silence = policy.clock.silence
        if silence is not None:
            said = f"{silence.means}, {silence.cite}"
            listed = [replace(one, counts_as=said) if one.what == "answer" and one.late else one for one in listed]
        # What the operator aims at, where nothing more pressing is said of the request.
        if not listed and entry.paused_at is None and entry.state in OPEN:
            aim = stamp(end_of(policy, dates_of(policy, _received_day(entry, policy), entry.paused_days).target))
            listed += [Deadline(entry, "target", aim, False)] if aim <= limit and aim < entry.due_at else []
        found += listed
    return sorted(found, key=lambda deadline: (deadline.by, deadline.entry.leaf))


def duty_to_tell(ledger: Ledger, entry: Entry, of: str) -> Duty | None:
    """Return what the person must be told once a request was `received`, `extended`, `refused` or `completed`."""
    policy = policy_of(ledger, entry)
    if of not in policy.notify.user.upon:
        return None
    return Duty(of, policy.refusal.must_state if of == "refused" else (), policy.notify.user.cite)


def expired(ledger: Ledger, now: datetime) -> list[Entry]:
    """Return the closed requests whose policy no longer wants the record that ties them to a person."""
    closed = dockets.closed_and_tied(ledger)
    with ledger.read() as connection:
        rules = {digest: policy_of_digest(connection, digest) for digest in {entry.policy_digest for entry in closed}}

    def is_over(entry: Entry) -> bool:
        policy = rules[entry.policy_digest] or load_policy(DEFAULT)
        day = day_of(policy, _moment(entry.closed_at or entry.received_at))
        return day_of(policy, now) > add_period(policy, day, policy.records.keep_request)

    return [entry for entry in closed if is_over(entry)]


def expire(ledger: Ledger, now: datetime) -> list[Entry]:
    """Take away what ties requests past their keeping time to a person; return those as they were.

    Id, state, dates and policy stay, and so do leaf and receipt, which hold no personal data: the log stays whole.
    """
    found = expired(ledger, now)
    if found:
        with ledger.write() as connection:
            dockets.untie(connection, [entry.id for entry in found])
        _moved()
    return found


def policy_of(ledger: Ledger, entry: Entry) -> Policy:
    """Return the policy of a request as it was when the request came in."""
    with ledger.read() as connection:
        return policy_of_digest(connection, entry.policy_digest) or load_policy(DEFAULT)


def policy_of_digest(connection: Transaction, digest: str) -> Policy | None:
    """Return a policy that was applied here; None for requests older than policies."""
    return _policy_from(dockets.policy_body(connection, digest)) if digest else None


@lru_cache(64)
def _policy_from(body: str) -> Policy:
    return policy_from_json(json.loads(body))


def check_code(what: str, code: str) -> None:
    """Raise unless a code is one: free text could hold somebody's data."""
    if not _CODE.fullmatch(code):
        raise InputError(f"{what} is a code like account_login, of small letters, digits and _")


def check_actor(name: str) -> None:
    """Raise unless somebody can be called that in the ledger."""
    if not _ACTOR.fullmatch(name):
        raise InputError("who does this is named by 1 to 100 characters in one line")


def _change(
    ledger: Ledger,
    request_id: str,
    action: str,
    now: datetime,
    actor: str,
    decide: Callable[[Entry, Policy], tuple[dict[str, Any], list[bytes]]],
    why: str = "",
    cited: Callable[[Policy], Iterable[Any]] = lambda policy: (),
) -> Entry:
    """Take one transition: refuse it where the table has none, else one transaction for entry, row and leaf."""
    check_actor(actor)
    rule = TRANSITIONS[action]
    with ledger.write() as connection:
        entry = dockets.by_ids(connection, [request_id])[request_id]
        if entry.state not in rule.before:
            raise RefusedError(_not_from(entry, action))
        policy = policy_of_digest(connection, entry.policy_digest) or load_policy(DEFAULT)
        changes, leaves = decide(entry, policy)
        append(connection, leaves)
        after = {"": entry.state, "resume": entry.resume_state or "received"}.get(rule.after, rule.after)
        cite = next((item.cite for item in cited(policy) if item.id == why), "")
        dockets.move(connection, [Moved(entry, action, after, stamp(now), actor, why, cite, changes)])
        changed = dockets.by_ids(connection, [request_id])[request_id]
    _moved()
    return changed


def _moved() -> None:
    reached(Step.REQUEST_MOVED)


def _not_from(entry: Entry, action: str) -> str:
    verb = {"hold": "put on hold", "withdraw": "withdrawn", "refuse": "refused", "release": "released",
            "extend": "extended", "approve": "approved", "verify": "verified", "acknowledge": "acknowledged",
            "ask_identity": "asked for identity"}[action]  # fmt: skip
    state = entry.state.replace("_", " ")
    if entry.state in UNDER_WAY:
        return f"request {entry.id[:12]} is {state}: from there is no way back, it cannot be {verb} any more"
    if entry.state in CLOSED:
        return f"request {entry.id[:12]} is {state}: it is closed and cannot be {verb}"
    return f"request {entry.id[:12]} is {state} and cannot be {verb} now"


def _resumed(entry: Entry, policy: Policy, now: datetime) -> tuple[dict[str, Any], list[bytes]]:
    """Return what changes when a clock that stood still goes on: the days it stood are added."""
    if entry.paused_at is None:
        return {}, []
    stood = max(0, (day_of(policy, now) - day_of(policy, _moment(entry.paused_at))).days)
    days = entry.paused_days + stood
    if policy.clock.own_date:
        due = _moment(entry.due_at) + timedelta(days=stood)
    else:
        dates = dates_of(policy, _received_day(entry, policy), days)
        due = end_of(policy, dates.extended_due if entry.extended and dates.extended_due else dates.due)
    at = stamp(due)
    return {"paused_at": None, "paused_days": days, "due_at": at}, [request_resumed(entry.id, at, stamp(now))]


def _check_in_time(entry: Entry, now: datetime) -> None:
    if stamp(now) > entry.due_at:
        raise RefusedError(f"request {entry.id[:12]} was due {entry.due_at}: it is late, and no clock can stand still")


def _check_known(policy: Policy, what: str, code: str, known: Sequence[str]) -> None:
    if code not in known:
        raise InputError(f"policy '{policy.id}' knows no {what} '{code}'; there are: {', '.join(known) or 'none'}")


def _identity_done(policy: Policy, entry: Entry) -> bool:
    return bool(entry.identity) or policy.identity.level in ("none", "reasonable_doubt_only") or entry.asked != "user"


def _received_day(entry: Entry, policy: Policy) -> date:
    return day_of(policy, _moment(entry.received_at))


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _policy_leaf(policy: Policy, at: str) -> bytes:
    return policy_applied(policy.id, policy.digest, at)
