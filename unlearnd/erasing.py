"""Erase: from what was asked for to outcomes, with the rebuild that the policy wants.

`erasure` carries out what is recorded, step by step and safe from crashes. Here requests come to be recorded: in one
step, out of the queue of approved ones, or as an order about a whole dataset or model. Whatever a killed process
left undone is carried to its end first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from unlearnd import requests
from unlearnd.build import Watch
from unlearnd.erasure import (
    ErasurePlan,
    Outcome,
    Target,
    begin_erasure,
    carry_out,
    is_order,
    outcome_of,
    outcomes_of,
    record_requests,
)
from unlearnd.erasure import (
    plan_erasure as plan,
)
from unlearnd.errors import InputError, StorageError, UnlearndError
from unlearnd.ledger import dockets, erasures, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.models import Build
from unlearnd.opened import Opened
from unlearnd.policy import Policy
from unlearnd.restriction import settle
from unlearnd.retirement import destroy_unneeded
from unlearnd.targets import Opening, openings_of, order_about, targets_of, user_id
from unlearnd.training import how_to_build, note_rebuilt, rebuild
from unlearnd.translog import check_signers, issue_receipts, sign_head
from unlearnd.vetoes import check_nobody_held, held_points, hold_vetoed, holds_on


@dataclass(frozen=True)
class Erased:
    """What an erase did: one outcome per user or point, in the order asked, and the builds that followed."""

    outcomes: tuple[Outcome, ...]
    builds: tuple[Build, ...]
    again: frozenset[str]
    """The requests among the outcomes that had been carried out before."""
    held: tuple[str, ...]
    """Requests that were not carried out, because they are on hold."""
    openings: Mapping[str, "Opening"]
    """By request: what proves to whom a receipt belongs. For that user alone; the store keeps none of it."""
    stuck: UnlearndError | None = None
    """What keeps an erasure of others from its end, which was begun before; this was carried out all the same."""

    def check_finished(self) -> None:
        """Raise what keeps an erasure of others from its end."""
        if self.stuck is not None:
            raise type(self.stuck)(
                f"what was asked for is done, but an erasure that was begun before is not: {self.stuck}"
            ) from self.stuck

    def check_destroyed(self) -> None:
        """Raise `StorageError` where storage did not let go something that was to be destroyed."""
        kept = {(one.name, one.version): one for outcome in self.outcomes for one in outcome.kept}
        if kept:
            first = next(iter(kept.values()))
            raise StorageError(
                f"nothing made from the data is in service, but {len(kept)} versions of objects could not be "
                f"destroyed, and the receipts say so; the first is {first.name}: {first.why}"
            )


def plan_erasure(
    store: Opened,
    users: Iterable[str | int],
    points: Iterable[str],
    *,
    dataset: str | None,
    model: str | None,
) -> ErasurePlan:
    """Return what erasing these, or a whole dataset or model, would do; change nothing."""
    orders = [] if dataset is None else [order_about(store, "dataset", dataset)]
    orders += [] if model is None else [order_about(store, "model", model)]
    if len(orders) + bool(users or points) > 1:
        raise InputError("a whole dataset or model is erased by itself")
    return plan(store.ledger, orders or targets_of(store, users, points))


def erase(
    store: Opened,
    users: Iterable[str | int],
    *,
    points: Iterable[str],
    policy: str | None,
    build: bool | None,
    executor: str | None,
    workers: int | None,
    device: str | None,
    watch: Watch | None,
    hand_out: Callable[[Mapping[str, Opening]], None],
) -> Erased:
    """Erase users, or single points given as `dataset:position`, from every dataset and model."""
    given = [user_id(user) for user in ([users] if isinstance(users, str | int) else users)]
    targets = targets_of(store, given, points)
    named: dict[Target, str] = dict(zip(store.keys.handles(given), given, strict=True))
    rules = store.policy(policy)
    how = how_to_build(store, executor, workers, device)
    if build is not False and device is not None:
        for backend in {model.spec.backend for model in models.models(store.ledger)}:
            store.plugins.backend(backend).environment(device)
    # What cannot be signed is not begun: the statement of an erasure must follow it at once.
    check_signers(store.translog)
    openings = openings_of(store, named)
    hand_out(openings)
    new, waiting, held, recorded, stuck = _record(store, targets, named, rules)
    if recorded:
        openings |= openings_of(store, named)
        hand_out(openings)
        _carry_out(store, recorded)
    builds = rebuild(store, rules, build, how, watch)
    if waiting and stuck is not None:
        raise stuck
    done = [target for target in targets if target not in held]
    outcomes = _outcomes(store, done)
    known = [outcome.request for target, outcome in zip(done, outcomes, strict=True) if target not in new]
    return Erased(outcomes, tuple(builds), frozenset(known), tuple(held.values()), openings, stuck)


def erase_whole(store: Opened, kind: str, name: str, policy: str | None, actor: str) -> Erased:
    """Carry out an order about a dataset or a model in one step; one that was carried out gives its outcome."""
    target, rules = order_about(store, kind, name), store.policy(policy)
    check_signers(store.translog)
    while True:
        stuck = _finish(store)
        before = dockets.order_about(store.ledger, kind, name)
        if before is not None:
            done = erasures.requests_by_ids(store.ledger, [before.id])[before.id]
            if stuck is not None and done.outcome is None:
                raise stuck
            return Erased((outcome_of(store.ledger, done),), (), frozenset([before.id]), (), {})
        if kind == "dataset":
            check_nobody_held(store, name)
        held = holds_on(store, [target], {}, rules)
        if held:
            return Erased((), (), frozenset(), tuple(held.values()), {})
        recorded = record_requests(store.ledger, [target], store.clock(), policy=rules, actor=actor)
        if recorded:
            break
        if stuck is not None:
            raise stuck
    _carry_out(store, recorded)
    note_rebuilt(store, [])
    sign_head(store.translog)
    (request,) = erasures.requests_of(store.ledger, recorded)
    return Erased((outcome_of(store.ledger, request),), (), frozenset(), (), {}, stuck)


def run_requests(
    store: Opened,
    *,
    within: timedelta | None,
    build: bool | None,
    actor: str,
    executor: str | None,
    workers: int | None,
    device: str | None,
    watch: Watch | None,
) -> Erased:
    """Carry out what is approved, together, and rebuild where the store's policy says so."""
    how = how_to_build(store, executor, workers, device)
    check_signers(store.translog)
    done: list[str] = []
    while True:
        stuck = _finish(store)
        limit = None if within is None else stamp(store.clock() + within)
        ready = [e for e in dockets.entries(store.ledger, ("approved",)) if limit is None or e.due_at <= limit]
        # A hold on a user is one on every point of theirs: requests about such a point wait for its release.
        stopped = held_points(store, [entry.target for entry in ready])
        waiting = [entry.id for entry in ready if entry.target in stopped]
        held = [*waiting, *hold_vetoed(store, [entry for entry in ready if entry.id not in waiting])]
        free = [entry for entry in ready if entry.id not in held]
        # Orders come last and each by itself: what people asked for waits for no order that is refused.
        lots = [[entry.id for entry in free if not is_order(entry.target)]]
        lots += [[entry.id] for entry in free if is_order(entry.target)]
        begun = [lot for lot in lots if lot and _begin(store, lot, actor)]
        done += [request_id for lot in begun for request_id in lot]
        if len(begun) == sum(map(bool, lots)):
            break
    builds = rebuild(store, store.policy(), build, how, watch)
    carried = erasures.requests_by_ids(store.ledger, done)
    outcomes = outcomes_of(store.ledger, [carried[request_id] for request_id in done])
    return Erased(tuple(outcomes), tuple(builds), frozenset(), tuple(held), {}, stuck)


def finish_erasures(store: Opened) -> int:
    """Carry on with erasures that a killed process left undone; return how many there were."""
    count = len(erasures.unfinished_erasures(store.ledger))
    stuck = _finish(store)
    if stuck is not None:
        raise stuck
    return count


def _finish(store: Opened) -> UnlearndError | None:
    """Carry on with every erasure left undone; return what the first that cannot go on is stuck at.

    One that needs what is missing keeps nobody else waiting: what others ask for is recorded, and carried out.
    """
    stuck: UnlearndError | None = None
    settle(store.ledger, store.storage, store.clock)
    for left in erasures.unfinished_erasures(store.ledger):
        try:
            _carry_out(store, left.id)
        except UnlearndError as error:
            stuck = stuck or error
    issue_receipts(store.translog)
    return stuck


def _begin(store: Opened, ids: Sequence[str], actor: str) -> bool:
    """Carry out approved requests together; False when one of them no longer is."""
    with store.ledger.read() as connection:
        entries = dockets.by_ids(connection, ids)
    for entry in entries.values():
        if entry.asked == "dataset":
            check_nobody_held(store, str(entry.dataset))
    begun = begin_erasure(store.ledger, ids, store.clock(), actor)
    if begun:
        _carry_out(store, begun)
    return begun is not None


def _record(
    store: Opened, targets: Sequence[Target], named: Mapping[Target, str], policy: Policy
) -> tuple[list[Target], set[Target], dict[Target, str], str | None, UnlearndError | None]:
    """Record a request for each target that is not erased yet.

    Return those; those whose request is recorded and stuck; those on hold; the erasure's id; and what is in the way of
    the stuck ones. Raise that where there is nothing else to do.
    """
    while True:
        # What others have begun about the same users is carried to its end first: its outcome is theirs.
        stuck = _finish(store)
        waiting = set() if stuck is None else _unfinished(store, targets)
        if stuck is not None and waiting.issuperset(targets):
            raise stuck
        new, alive = _not_erased_yet(store, [target for target in targets if target not in waiting])
        held = holds_on(store, new, named, policy)
        new = [target for target in new if target not in held]
        if not new:
            return [], waiting, held, None, stuck
        still = [handle for handle in alive if handle not in held]
        recorded = record_requests(store.ledger, new, store.clock(), still, named, policy)
        if recorded:
            return new, waiting, held, recorded, stuck


def _unfinished(store: Opened, targets: Sequence[Target]) -> set[Target]:
    """Return the targets whose erasure was begun and is not at its end."""
    begun = {erasure.id for erasure in erasures.unfinished_erasures(store.ledger)}
    handles = [target for target in targets if isinstance(target, bytes)]
    single = [target for target in targets if not isinstance(target, bytes)]
    asked = erasures.last_requests(store.ledger, handles, single)
    return {target for target in targets if target in asked and asked[target].erasure_id in begun}


def _not_erased_yet(store: Opened, targets: Sequence[Target]) -> tuple[list[Target], list[bytes]]:
    """Return the targets there is something to ask about, and the users among them that have data."""
    handles = [target for target in targets if isinstance(target, bytes)]
    single = [target for target in targets if not isinstance(target, bytes)]
    asked = erasures.last_requests(store.ledger, handles, single)
    alive = points.user_keys(store.ledger, handles).keys()
    # Positions are never given twice, so a point that was erased is gone for good.
    tried = [target for target in single if target in asked]
    outcomes = outcomes_of(store.ledger, [asked[target] for target in tried])
    in_vain = {target for target, outcome in zip(tried, outcomes, strict=True) if not outcome.found}
    new = [target for target in targets if target not in asked or target in alive or target in in_vain]
    return new, list(alive)


def _carry_out(store: Opened, erasure_id: str) -> None:
    """Carry out an erasure; what stops it is noted with its requests, which stay where there is no way back."""
    settle(store.ledger, store.storage, store.clock)
    try:
        carry_out(
            store.translog,
            _versions(store),
            erasure_id,
            store.clock,
            lambda retired, record: destroy_unneeded(
                store.ledger, store.storage, store.plugins, store.config.device, retired, store.clock, record
            ),
        )
    except UnlearndError as error:
        with suppress(UnlearndError):
            ids = [request.id for request in erasures.requests_of(store.ledger, erasure_id)]
            requests.note_failure(store.ledger, ids, type(error).__name__, store.clock())
        raise


def _outcomes(store: Opened, targets: Sequence[Target]) -> tuple[Outcome, ...]:
    handles = [target for target in targets if isinstance(target, bytes)]
    single = [target for target in targets if not isinstance(target, bytes)]
    asked = erasures.last_requests(store.ledger, handles, single)
    return tuple(outcomes_of(store.ledger, [asked[target] for target in targets]))


def _versions(store: Opened) -> dict[str, str]:
    """Return the distributions of installed plugins with their versions, as receipts name them."""
    return {plugin.distribution: plugin.version for plugin in store.plugins.installed}
