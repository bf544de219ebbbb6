"""Take users or points out of everything, step by step, so that a kill at any moment loses nothing.

    1  requests recorded
    2  planned: which points, slices and checkpoints, at what cost (a dry run stops here)
    3  points marked erased, slice roots recomputed, user keys destroyed, in one transaction
    4  slice data rewritten without the points, old objects destroyed
    5  tainted checkpoints destroyed, and storage listed again to see that they are gone; of a model that an order is
       about, or that was trained on a dataset an order is about, all of them
    6  statement logged, tree head signed, receipt written
    7  build, now or later

From step 3 on nothing made from the points is served, because it has no recipe any more. Each step is durable
before the next begins and can be taken again; whoever comes next carries on with what another left undone.
"""

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any

import numpy as np

from unlearnd.build import cost_of
from unlearnd.checkpoints import destroy_all_but, standings
from unlearnd.digests import Digest, digest_of_json
from unlearnd.errors import BusyError, RefusedError
from unlearnd.ingest import destroy_leftovers
from unlearnd.keys import draw_id
from unlearnd.leases import Clock, SteadyClock, hold
from unlearnd.ledger import Ledger, dockets, erasures, models, points
from unlearnd.ledger.connection import moment_from, stamp
from unlearnd.ledger.dockets import Entry
from unlearnd.ledger.erasures import Erasure, Marking, ObjectVersion, Request
from unlearnd.ledger.leases import build_lease, data_lease, ingest_lease
from unlearnd.ledger.log import append
from unlearnd.ledger.points import Dataset, Holding, Segment
from unlearnd.packing import Positions, pack, unpack
from unlearnd.policy import DEFAULT, Policy, load_policy
from unlearnd.receipts import Detail
from unlearnd.requests import OPEN, Asked, advance, complete, draft, enter_drafts, note_retry
from unlearnd.slices import commitments, out_of_use, read_segment, rewrite_dropped, root_of_commitments
from unlearnd.statements import (
    ErasureStatement,
    checkpoints_destroyed,
    erasure_begun,
    erasure_done,
    live_set,
    replay_class,
    slices_sealed,
)
from unlearnd.steps import Step, reached
from unlearnd.storage import CIPHER, Kept, Record, Storage, Version
from unlearnd.translog import Translog, issue_receipts, keep_detail, keep_details, newest_moment

Target = bytes | tuple[str, int] | tuple[str, str]
"""A user by handle, a point by dataset and position, or what an order is about: ("dataset" or "model", name)."""
Tidy = Callable[[Sequence[models.Model], Record], None]
"""Destroys what else models that are retired leave behind."""


@dataclass(frozen=True)
class Touched:
    """A slice that lost points."""

    dataset: str
    shard: int
    slice: int
    points: int
    root_before: Digest | None
    """None when the slice was not sealed yet: no model had seen it."""
    root_after: Digest | None


@dataclass(frozen=True)
class Destroyed:
    """A checkpoint that was destroyed because it had seen an erased point."""

    model: str
    shard: int
    slice: int
    recipe: Digest
    file: Digest
    tensors: Digest


@dataclass(frozen=True)
class Outcome:
    """What came of one request, as its receipt says it. Holds no user id."""

    request: str
    erasure: str
    asked: str
    """`user`, `point`, `dataset` or `model`."""
    found: bool
    points: int
    erased_root: Digest | None
    """The Merkle root over the sorted commitments of the erased points; None when nothing was found."""
    slices: tuple[Touched, ...]
    checkpoints: tuple[Destroyed, ...]
    """Destroyed because they had seen one of these points."""
    kept: tuple[Kept, ...]
    """Versions of objects that held such points, or were made from them, and that storage did not let go."""
    received_at: str
    influence_removed_at: str | None
    rebuilt_at: str | None
    retired: tuple[str, ...] = ()
    """Models that an order had destroyed for good."""


@dataclass(frozen=True)
class PlannedPlace:
    """Points to erase in one slice."""

    dataset: str
    shard: int
    slice: int
    points: int


@dataclass(frozen=True)
class PlannedModel:
    """What an erasure means for one model."""

    model: str
    shards: tuple[int, ...]
    checkpoints: int
    """Checkpoints to destroy."""
    samples: int
    """Samples to retrain; none of a model that is destroyed for good."""
    from_scratch: int
    """Samples that retraining all would take."""


@dataclass(frozen=True)
class ErasurePlan:
    """What an erasure would do."""

    found: int
    not_found: int
    points: int
    places: tuple[PlannedPlace, ...]
    models: tuple[PlannedModel, ...]


def plan_erasure(ledger: Ledger, targets: Sequence[Target]) -> ErasurePlan:
    """Return what erasing these would do; change nothing."""
    doomed = _doomed(ledger, targets)
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    by_place: dict[tuple[int, int, int], int] = {}
    for holding, positions in (pair for pairs in doomed.values() for pair in pairs):
        place = (holding.dataset_id, holding.shard, holding.slice)
        by_place[place] = by_place.get(place, 0) + len(positions)
    whole = _whole(ledger, targets)
    for dataset in whole.values():
        by_place |= _places_of(ledger, dataset)
    retired = _to_retire(ledger, targets)
    planned = tuple(
        _plan_retirement(ledger, model) if model in retired else _plan_model(ledger, model, by_place)
        for model in models.models(ledger)
        if model in retired or any(dataset_id == model.dataset_id for dataset_id, _, _ in by_place)
    )
    places = tuple(
        PlannedPlace(names[dataset_id], shard, slice_, count)
        for (dataset_id, shard, slice_), count in sorted(by_place.items())
    )
    filled = {dataset_id for dataset_id, _, _ in by_place}
    found = sum(
        bool(pairs or (is_order(target) and retired) or (target in whole and whole[target].id in filled))
        for target, pairs in doomed.items()
    )
    return ErasurePlan(found, len(doomed) - found, sum(by_place.values()), places, planned)


def record_requests(
    ledger: Ledger,
    targets: Sequence[Target],
    now: datetime,
    alive: Iterable[bytes] = (),
    named: Mapping[Target, str] | None = None,
    policy: Policy | None = None,
    actor: str = "operator",
) -> str | None:
    """Step 1: write down what was asked, received and decided at once; return the erasure's id.

    `alive` are the users among them that had data when it was decided to ask; `named` has the user ids that
    receipts are to commit to. An id goes no further than the commitment. A target whose request is open already is
    not asked about again: that request is carried out. Return None when another process came first.
    """
    erasure_id, rules = draw_id(), policy or load_policy(DEFAULT)
    asked = {target: Asked(target, (named or {}).get(target), requester="operator") for target in targets}
    drafts = {target: draft(one, rules, now) for target, one in asked.items()}
    at = stamp(now)
    with ledger.write() as connection:
        handles = [target for target in targets if isinstance(target, bytes)]
        waiting: dict[Target, Entry] = dict(dockets.open_by_handles(connection, handles).items())
        waiting |= {t: e for t, e in dockets.open_of_others(connection).items() if t in drafts}
        if any(entry.state not in OPEN for entry in waiting.values()) or erasures.overtaken(connection, set(alive)):
            return None
        path = ("verify", "approve", "execute")
        fresh = [drafts[target] for target in targets if target not in waiting]
        # As they are here, nonce and all: the entry loses it, the request being carried out has it.
        entered = enter_drafts(connection, fresh, rules, path, actor, at, erasure_id) if fresh else []
        by_target = {entry.target: entry for entry in entered}
        advance(connection, list(waiting.values()), ("verify", "approve", "execute"), now, actor)
        append(connection, erasure_begun(erasure_id, [entry.id for entry in waiting.values()], at))
        erasures.begin(connection, erasure_id, [by_target.get(t) or waiting[t] for t in targets], now)
    return _recorded(erasure_id)


def begin_erasure(ledger: Ledger, request_ids: Sequence[str], now: datetime, actor: str) -> str | None:
    """Step 1 for requests that were approved: from here there is no way back. None when one no longer is."""
    erasure_id = draw_id()
    with ledger.write() as connection:
        found = dockets.by_ids(connection, request_ids)
        if any(found[request_id].state != "approved" for request_id in request_ids):
            return None
        entries = [found[request_id] for request_id in request_ids]
        advance(connection, entries, ("execute",), now, actor)
        append(connection, erasure_begun(erasure_id, request_ids, stamp(now)))
        erasures.begin(connection, erasure_id, entries, now)
    return _recorded(erasure_id)


def _recorded(erasure_id: str) -> str:
    reached(Step.ERASE_RECORDED)
    return erasure_id


def carry_out(
    translog: Translog,
    plugins: Mapping[str, str],
    erasure_id: str,
    clock: Clock,
    tidy: Tidy = lambda retired, record: None,
) -> None:
    """Steps 3 to 6, beginning with the first that is not done; `plugins` are the versions a receipt names."""
    ledger, storage = translog.ledger, translog.storage
    record = _Record(ledger, erasure_id, clock)
    with hold(ledger, [f"erasure/{erasure_id}"], clock):
        erasure = erasures.erasure_by_id(ledger, erasure_id)
        if erasure.influence_removed_at is not None:
            return
        if isinstance(clock, SteadyClock):
            # Another process may have begun it, before the clock was set back.
            clock.not_before(moment_from(erasure.marked_at or erasure.received_at))
            clock.not_before(newest_moment(ledger))
        note_retry(ledger, [request.id for request in erasures.requests_of(ledger, erasure_id)], clock())
        if erasure.marked_at is None:
            _mark(ledger, storage, erasure, clock)
            erasure = erasures.erasure_by_id(ledger, erasure_id)
            reached(Step.ERASE_MARKED)
        for dataset_id, shard in erasure.touched:
            dataset = points.dataset_by_id(ledger, dataset_id)
            with hold(ledger, [data_lease(dataset.name, shard)], clock):
                rewrite_dropped(ledger, storage, dataset, shard, clock(), record)
        _destroy_leftovers(ledger, storage, clock, record)
        reached(Step.ERASE_DATA_DESTROYED)
        retired = _retired_by(ledger, erasure_id)
        # Models retired by others too: what they were made from must not outlive this, whoever is quicker.
        places = [
            (model, shard)
            for dataset_id, shard in erasure.touched
            for model in models.models(ledger, dataset_id, retired=True)
            if model not in retired
            if model.retired_at is None or models.checkpoints_of(ledger, model.id, shard)
        ]
        for model, shard in (*places, *((m, s) for m in retired for s in range(1, m.spec.shards + 1))):
            with hold(ledger, [build_lease(model.name, shard)], clock, preempt=True):
                _destroy_tainted(ledger, storage, model, shard, erasure_id, clock(), record)
            reached(Step.ERASE_CHECKPOINTS_DESTROYED)
        if retired:
            tidy(retired, record)
        # Before the claim is made: the ledger's own files must not keep the destroyed keys either.
        ledger.scrub()
        _settle(ledger, storage, erasure_id, clock())
        _conclude(translog, plugins, erasure_id, clock())
        reached(Step.ERASE_REMOVED)
    issue_receipts(translog)


def outcome_of(ledger: Ledger, request: Request) -> Outcome:
    """Return what came of a request that was carried out."""
    return outcomes_of(ledger, [request])[0]


def outcomes_of(ledger: Ledger, requests: Sequence[Request]) -> list[Outcome]:
    """Return what came of requests that were carried out, in their order."""
    done = {one: erasures.erasure_by_id(ledger, one) for one in {request.erasure_id for request in requests}}
    with ledger.read() as connection:
        entries = dockets.by_ids(connection, [request.id for request in requests])
    return [_outcome(request, entries[request.id], done[request.erasure_id]) for request in requests]


def _outcome(request: Request, entry: Entry, erasure: Erasure) -> Outcome:
    stored = request.outcome or {}
    return Outcome(
        request=request.id,
        erasure=erasure.id,
        asked=entry.asked,
        found=bool(stored["checkpoints"] if entry.asked == "model" else stored["points"]),
        points=stored["points"],
        erased_root=stored["erased_root"],
        slices=tuple(Touched(**touched) for touched in stored["slices"]),
        checkpoints=tuple(Destroyed(**destroyed) for destroyed in stored["checkpoints"]),
        kept=tuple(Kept(*one) for one in stored.get("kept", ())),
        received_at=entry.received_at,
        influence_removed_at=erasure.influence_removed_at,
        rebuilt_at=erasure.rebuilt_at,
        retired=tuple(stored.get("retired", ())),
    )


_MOST_LISTED = 1000
"""A leaf that is about more shards than this is about all of them: it would not hold their numbers."""


def live_sets(
    translog: Translog, concerned: Iterable[tuple[models.Model, Sequence[int]]], now: datetime
) -> list[bytes]:
    """Return the leaves that list every checkpoint in force of these shards; their documents are durable already."""
    leaves = []
    for model, shards in concerned:
        covered = shards if len(shards) <= _MOST_LISTED else shards_of(model)
        entries = [
            (c.shard, c.slice, c.recipe, c.file, c.tensors, c.path, c.size)
            for standing in standings(translog.ledger, model, covered)
            for c in standing.chain
        ]
        leaf, detail = live_set(model.name, None if len(covered) == model.spec.shards else covered, entries, stamp(now))
        keep_detail(translog, detail)
        leaves.append(leaf)
    return leaves


def _conclude(translog: Translog, plugins: Mapping[str, str], erasure_id: str, now: datetime) -> None:
    """Record that no influence is left: the outcomes, what is in service now, and a statement for each request."""
    ledger = translog.ledger
    erasure = erasures.erasure_by_id(ledger, erasure_id)
    destroyed = models.destroyed_by(ledger, erasure_id)
    touched = {dataset_id for dataset_id, _ in erasure.touched}
    retired = _retired_by(ledger, erasure_id)
    lost_some = {checkpoint["model"] for checkpoint in destroyed}
    concerned = [
        model
        for model in models.models(ledger, retired=True)
        if model in retired or (model.dataset_id in touched and (model.retired_at is None or model.name in lost_some))
    ]
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    versions = erasures.versions_of(ledger, erasure_id)
    outcomes: dict[str, dict[str, Any]] = {}
    receipts: dict[str, tuple[bytes, Digest]] = {}
    details: list[Detail] = []
    requests = erasures.requests_of(ledger, erasure_id)
    with ledger.read() as connection:
        entries = dockets.by_ids(connection, [request.id for request in requests])
    changed = [(model, shards_of(model) if model in retired else _lost_by(erasure, model)) for model in concerned]
    accounts = {model.name: _Account(ledger, model, names[model.dataset_id], shards) for model, shards in changed}
    seen_by = cache(partial(_seen_by, destroyed))

    @cache
    def concerning(
        lost: frozenset[tuple[str, int]], whole: frozenset[str], mine: tuple[str, ...]
    ) -> list[ObjectVersion]:
        return [one for one in versions if _belongs(one.name, lost, mine, whole)]

    for request in requests:
        assert request.outcome is not None
        erased = request.outcome["erased"]
        slices = request.outcome["slices"]
        gone_whole = frozenset(request.outcome.get("retired", ()))
        # Who is carried out together shares most of what is said below: many requests, few places.
        seen = seen_by(frozenset((e["dataset"], e["shard"], e["slice"]) for e in slices), gone_whole)
        lost = frozenset((entry["dataset"], entry["shard"]) for entry in slices)
        lossy = {dataset for dataset, _ in lost}
        mine = [model for model in concerned if names[model.dataset_id] in lossy or model.name in gone_whole]
        objects = concerning(lost, gone_whole, tuple(model.name for model in mine))
        outcomes[request.id] = {
            **{name: value for name, value in request.outcome.items() if name != "erased"},
            "checkpoints": seen,
            "kept": [(one.name, one.version, one.kept) for one in objects if one.kept],
        }
        payload, detail = erasure_done(
            ErasureStatement(
                store_id=translog.store_id,
                request_id=request.id,
                erasure_id=erasure_id,
                asked=entries[request.id].asked,
                request_leaf=request.leaf,
                received_at=entries[request.id].received_at,
                due_at=entries[request.id].due_at,
                policy=(entries[request.id].policy, entries[request.id].policy_digest),
                influence_removed_at=stamp(now),
                user_commitment=request.commitment,
                erased=erased,
                slices=[
                    (e["dataset"], e["shard"], e["slice"], e["points"], e["root_before"] or "", e["root_after"] or "")
                    for e in slices
                ],
                destroyed=[(c["model"], c["shard"], c["slice"], c["recipe"], c["file"], c["tensors"]) for c in seen],
                serving=[entry for model in mine for entry in accounts[model.name].serving(lost)],
                models=[accounts[model.name].entry(lost) for model in mine],
                plugins=plugins,
                version=translog.software,
                gone=[(one.name, one.version) for one in objects if one.destroyed_at],
                kept=[(one.name, one.version, one.kept) for one in objects if one.kept],
                remnants=ledger.remnants,
                cipher=CIPHER if translog.storage.vault else None,
            )
        )
        details.append(detail)
        receipts[request.id] = (payload, detail.digest)
    keep_details(translog, details)
    leaves = live_sets(translog, changed, now)
    erasures.influence_removed(ledger, erasure_id, outcomes, leaves, receipts, now, complete)


def shards_of(model: models.Model) -> range:
    """Return the numbers of a model's shards."""
    return range(1, model.spec.shards + 1)


def _lost_by(erasure: Erasure, model: models.Model) -> list[int]:
    """Return the shards of a model that lost points to an erasure."""
    return sorted(shard for dataset_id, shard in erasure.touched if dataset_id == model.dataset_id)


class _Account:
    """What receipts say about a model, worked out once for all of them; `changed` are the shards that any is about."""

    def __init__(self, ledger: Ledger, model: models.Model, dataset: str, changed: Iterable[int]) -> None:
        counts = points.counts_of(ledger, model.dataset_id)
        slices = points.sealed_slices(ledger, model.dataset_id)
        self._found = standings(ledger, model, changed)
        self._dataset, self._name, self._retired = dataset, model.name, model.retired_at is not None
        self._spec, self._replay = digest_of_json(model.spec.as_json()), replay_class(model.deterministic)
        self._scratch = sum(
            cost_of(model.spec, model.sliceable, counts, shard, slices, 0) for shard in shards_of(model)
        )
        self._rest = {
            s.shard: cost_of(model.spec, model.sliceable, counts, s.shard, s.slices, s.prefix) for s in self._found
        }

    def serving(self, lost: Set[tuple[str, int]]) -> list[tuple[str, int, int, str]]:
        """Return how far the constituents that lost points are in service; of a retired model, none of them is."""
        return [
            (self._name, s.shard, s.prefix, s.checkpoint.recipe if s.checkpoint else "")
            for s in self._found
            if self._retired or (self._dataset, s.shard) in lost
        ]

    def entry(self, lost: Set[tuple[str, int]]) -> tuple[str, str, str, str, int, int]:
        """Return how much the shards that lost points must train again, and what all of them would take."""
        again = sum(rest for shard, rest in self._rest.items() if (self._dataset, shard) in lost)
        return self._name, self._dataset, self._spec, self._replay, 0 if self._retired else again, self._scratch


def _doomed(ledger: Ledger, targets: Sequence[Target]) -> dict[Target, list[tuple[Holding, Positions]]]:
    """Return for each target the holdings it touches and the positions to go; a point goes only once.

    Of a whole dataset everything goes: who holds what in it is not listed, however many they are.
    """
    found: dict[Target, list[tuple[Holding, Positions]]] = {target: [] for target in targets}
    handles = [target for target in targets if isinstance(target, bytes)]
    for holding in points.holdings_of(ledger, handles):
        found[holding.handle].append((holding, unpack(holding.positions)))
    for target in targets:
        if isinstance(target, bytes) or isinstance(target[1], str):
            continue
        dataset = points.find_dataset(ledger, target[0])
        at = points.holding_at(ledger, dataset.id, target[1]) if dataset else None
        if at is not None and at.handle not in found:
            found[target].append((at, np.array([target[1]], np.int64)))
    return found


def _whole(ledger: Ledger, targets: Iterable[Target]) -> dict[Target, Dataset]:
    """Return the datasets that orders among the targets are about.

    An order is carried out alone: no user or point of another request has a part in it.
    """
    orders = [target for target in targets if is_order(target) and target[0] == "dataset"]
    return {target: points.dataset_named(ledger, str(target[1])) for target in orders}


def _places_of(ledger: Ledger, dataset: Dataset) -> dict[tuple[int, int, int], int]:
    """Return how many points each slice of a dataset has, of those that have any."""
    counts = points.counts_of(ledger, dataset.id)
    return {(dataset.id, shard, slice_): count for (shard, slice_), count in sorted(counts.items()) if count}


def is_order(target: Target) -> bool:
    """Say whether a target is a whole dataset or model."""
    return isinstance(target, tuple) and isinstance(target[1], str)


def _to_retire(ledger: Ledger, targets: Iterable[Target]) -> list[models.Model]:
    """Return the models in service that orders among the targets destroy for good."""
    datasets = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    return [
        model
        for model in models.models(ledger)
        if ("model", model.name) in targets or ("dataset", datasets[model.dataset_id]) in targets
    ]


def _retired_by(ledger: Ledger, erasure_id: str) -> list[models.Model]:
    """Return the models that an erasure, whose points are marked, destroys for good."""
    names = [
        name for one in erasures.requests_of(ledger, erasure_id) for name in (one.outcome or {}).get("retired", ())
    ]
    return [models.model_named(ledger, name) for name in names]


def _plan_retirement(ledger: Ledger, model: models.Model) -> PlannedModel:
    counts = points.counts_of(ledger, model.dataset_id)
    found = standings(ledger, model)
    scratch = sum(cost_of(model.spec, model.sliceable, counts, s.shard, s.slices, 0) for s in found)
    whole = len(models.checkpoints_of(ledger, model.id))
    return PlannedModel(model.name, tuple(s.shard for s in found), whole, 0, scratch)


def _plan_model(ledger: Ledger, model: models.Model, by_place: Mapping[tuple[int, int, int], int]) -> PlannedModel:
    counts = dict(points.counts_of(ledger, model.dataset_id))
    first: dict[int, int] = {}
    for (dataset_id, shard, slice_), count in by_place.items():
        if dataset_id == model.dataset_id:
            counts[shard, slice_] -= count
            first[shard] = min(slice_, first.get(shard, slice_))
    checkpoints = samples = scratch = 0
    for standing in standings(ledger, model):
        shard = standing.shard
        scratch += cost_of(model.spec, model.sliceable, counts, shard, standing.slices, 0)
        if shard in first:
            keep = standing.clean_before(first[shard])
            samples += cost_of(model.spec, model.sliceable, counts, shard, standing.slices, keep)
            checkpoints += sum(1 for c in standing.chain if c.slice >= first[shard])
    return PlannedModel(model.name, tuple(sorted(first)), checkpoints, samples, scratch)


def _mark(ledger: Ledger, storage: Storage, erasure: Erasure, clock: Clock) -> None:
    """Step 3, under the leases of all shards concerned."""
    requests = erasures.requests_of(ledger, erasure.id)
    with ledger.read() as connection:
        entries = dockets.by_ids(connection, [request.id for request in requests])
    asked: dict[str, Target] = {request.id: entries[request.id].target for request in requests}
    targets = list(asked.values())
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    whole = _whole(ledger, targets)
    while True:
        shards = _shards(ledger, _doomed(ledger, targets), whole)
        leases = [data_lease(names[dataset_id], shard) for dataset_id, shard in sorted(shards)]
        # Of a whole dataset nothing may be added, and no model declared on it, meanwhile.
        leases += [ingest_lease(dataset.name) for dataset in whole.values()]
        with hold(ledger, leases or [f"erasure/{erasure.id}/nothing"], clock):
            doomed = _doomed(ledger, targets)
            if not _shards(ledger, doomed, whole) <= shards:
                continue
            for dataset in whole.values():
                _check_nobody_held(ledger, dataset.name)
            _check_not_held(ledger, doomed)
            now = clock()
            marking = _marking(ledger, storage, asked, doomed, whole, now)
            if erasures.mark_erased(ledger, erasure.id, marking, now):
                return


def _marking(
    ledger: Ledger,
    storage: Storage,
    asked: Mapping[str, Target],
    doomed: Mapping[Target, Sequence[tuple[Holding, Positions]]],
    whole: Mapping[Target, Dataset],
    now: datetime,
) -> Marking:
    """Work out what step 3 changes: read the slices concerned once, and sum up what stays and what goes."""
    gone: list[Holding] = []
    shrunk: list[tuple[Holding, int, bytes]] = []
    by_place: dict[tuple[int, int, int], list[tuple[Target, Positions | None]]] = {}
    """What goes where, and for whom; None for all there is."""
    left: dict[tuple[bytes, int, int, int, int], Positions] = {}
    held: dict[tuple[bytes, int, int, int, int], Holding] = {}
    for target, pairs in doomed.items():
        for holding, positions in pairs:
            place = (holding.dataset_id, holding.shard, holding.slice)
            by_place.setdefault(place, []).append((target, positions))
            key = (holding.handle, *place, holding.first)
            held[key] = holding
            left[key] = np.setdiff1d(left.get(key, unpack(holding.positions)), positions)
    for key, positions in left.items():
        if len(positions):
            shrunk.append((held[key], int(positions[0]), pack(positions)))
        else:
            gone.append(held[key])
    for target, dataset in whole.items():
        by_place |= {place: [(target, None)] for place in _places_of(ledger, dataset)}
    dropped: list[tuple[int, bytes, int]] = []
    roots: list[tuple[int, int, int, Digest]] = []
    slices: dict[Target, list[Touched]] = {target: [] for target in doomed}
    erased: dict[Target, list[tuple[bytes, int, int]]] = {target: [] for target in doomed}
    sealed: dict[str, list[tuple[int, int, Digest, int]]] = {}
    for (dataset_id, shard, slice_), lots in sorted(by_place.items()):
        dataset = points.dataset_by_id(ledger, dataset_id)
        before = points.roots_of(ledger, dataset_id, shard).get((shard, slice_))
        going = np.concatenate([np.empty(0, np.int64), *(some for _, some in lots if some is not None)])
        all_of_it = any(some is None for _, some in lots)
        staying: list[bytes] = []
        committed: dict[int, tuple[bytes, int]] = {}
        ahead = 0
        for segment in points.segments_of(ledger, dataset_id, shard, slice_):
            rows = read_segment(storage, segment)
            out = np.full(len(rows), True) if all_of_it else np.isin(rows.position, going)
            live = ~np.isin(rows.position, out_of_use(segment))
            lost = rows.keep(out & live)
            ranks = (ahead + np.flatnonzero(out[live])).tolist()
            ahead += int(live.sum())
            marked = zip(commitments(ledger, dataset, lost), ranks, strict=True)
            committed.update(zip(lost.position.tolist(), marked, strict=True))
            if before is not None:
                staying.extend(commitments(ledger, dataset, rows.keep(live & ~out)))
            if len(lost):
                dropped.append(_drop(segment, lost.position))
        after = None if before is None else root_of_commitments(staying)
        if after is not None:
            roots.append((dataset_id, shard, slice_, after))
            sealed.setdefault(dataset.name, []).append((shard, slice_, after, len(staying)))
        for target, some in lots:
            here = len(slices[target])
            mine = list(committed) if some is None else some.tolist()
            erased[target].extend((*committed[position], here) for position in mine)
            slices[target].append(Touched(dataset.name, shard, slice_, len(mine), before, after))
    outcomes: dict[str, dict[str, Any]] = {}
    retired = _to_retire(ledger, asked.values())
    for request_id, target in asked.items():
        gone_here = sorted(erased[target])
        root = root_of_commitments([commitment for commitment, _, _ in gone_here]) if gone_here else None
        outcomes[request_id] = {
            "points": len(gone_here),
            "erased_root": root,
            "erased": [commitment.hex() for commitment, _, _ in gone_here],
            # Where each stood, as [slice of the list below, rank in it]: with this an audit can put them back and
            # see that the slice had the root it had. Nobody need believe it, and it is in no receipt.
            "places": [[here, rank] for _, rank, here in gone_here],
            "slices": [asdict(touched) for touched in slices[target]],
            **({"retired": [model.name for model in retired]} if is_order(target) else {}),
        }
    shredded = [target for target in asked.values() if isinstance(target, bytes)]
    touched = sorted(_shards(ledger, doomed, whole))
    leaves = [leaf for name, entries in sealed.items() for leaf in slices_sealed(name, entries, stamp(now))]
    ids = [model.id for model in retired]
    emptied = [dataset.id for dataset in whole.values()]
    return Marking(dropped, roots, gone, shrunk, shredded, outcomes, touched, leaves, ids, emptied)


def _check_nobody_held(ledger: Ledger, name: str) -> None:
    """Raise `RefusedError` where a hold keeps points of a dataset from being erased. Its data leases must be held."""
    dataset = points.dataset_named(ledger, name)
    segments = (s for shard in range(1, dataset.shards + 1) for s in points.segments_of(ledger, dataset.id, shard))
    if any(segment.held for segment in segments):
        raise RefusedError(
            f"dataset '{name}' is to be destroyed, and holds data of users whose requests are on hold: "
            "`unlearnd requests list --state on_hold` has them, and `unlearnd requests release` lifts a hold"
        )


def _check_not_held(ledger: Ledger, doomed: Mapping[Target, Sequence[tuple[Holding, Positions]]]) -> None:
    """Raise `RefusedError` where a hold was set on what is to be erased, after that was decided."""
    for target, pairs in doomed.items():
        for holding, positions in pairs if not isinstance(target, bytes) else ():
            segments = points.segments_of(ledger, holding.dataset_id, holding.shard, holding.slice)
            if any(segment.held and np.isin(positions, unpack(segment.held)).any() for segment in segments):
                raise RefusedError(
                    "a point is to be erased whose user is on hold: `unlearnd requests list --state on_hold` has the "
                    "request, and `unlearnd requests release` lifts a hold; it is erased then"
                )


def _drop(segment: Segment, positions: Positions) -> tuple[int, bytes, int]:
    together = np.union1d(unpack(segment.dropped), positions)
    return segment.id, pack(together), segment.rows - len(np.union1d(together, unpack(segment.held)))


def _destroy_tainted(
    ledger: Ledger,
    storage: Storage,
    model: models.Model,
    shard: int,
    erasure_id: str,
    now: datetime,
    record: "_Record",
) -> None:
    """Step 5 for one constituent: destroy all that is not on its clean prefix."""
    clean = {checkpoint.path for checkpoint in standings(ledger, model, [shard])[0].chain}
    tainted = [c for c in models.checkpoints_of(ledger, model.id, shard) if c.path not in clean]
    destroy_all_but(storage, model.name, shard, clean, record)
    gone = [(c.shard, c.slice, c.recipe, c.file) for c in tainted]
    leaves = checkpoints_destroyed(model.name, erasure_id, gone, stamp(now))
    ids = [c.id for c in tainted]
    models.checkpoints_destroyed(ledger, model.dataset_id, ids, erasure_id, leaves, now)


def _seen_by(
    destroyed: Sequence[Mapping[str, Any]], slices: frozenset[tuple[str, int, int]], whole: frozenset[str]
) -> list[dict[str, Any]]:
    """Return those destroyed checkpoints that had seen one of these slices, or are of a model that went whole."""
    first: dict[tuple[str, int], int] = {}
    for dataset, shard, slice_ in slices:
        first[dataset, shard] = min(slice_, first.get((dataset, shard), slice_))
    return [
        {name: value for name, value in checkpoint.items() if name != "dataset"}
        for checkpoint in destroyed
        if checkpoint["model"] in whole
        or first.get((checkpoint["dataset"], checkpoint["shard"]), checkpoint["slice"] + 1) <= checkpoint["slice"]
    ]


def _destroy_leftovers(ledger: Ledger, storage: Storage, clock: Clock, record: "_Record") -> None:
    """Destroy what killed ingests left in storage: the erased may be in it. A living ingest is left alone."""
    for name in points.datasets_left_over(ledger):
        try:
            with hold(ledger, [ingest_lease(name)], clock, patience=0):
                destroy_leftovers(ledger, storage, name, record)
        except BusyError:
            continue


class _Record:
    """Writes down in the ledger what becomes of versions of objects, before and after."""

    def __init__(self, ledger: Ledger, erasure_id: str, clock: Clock) -> None:
        self._ledger, self._erasure_id, self._clock = ledger, erasure_id, clock

    def doomed(self, versions: Sequence[Version]) -> None:
        erasures.doom_versions(self._ledger, self._erasure_id, [(one.name, one.id) for one in versions])

    def destroyed(self, versions: Sequence[Version], kept: Sequence[Kept]) -> None:
        gone = [(one.name, one.id) for one in versions]
        still = [(one.name, one.version, one.why) for one in kept]
        if gone or still:
            erasures.doom_versions(self._ledger, self._erasure_id, [(name, version) for name, version, _ in still])
            erasures.versions_destroyed(self._ledger, self._erasure_id, gone, still, self._clock())


def _settle(ledger: Ledger, storage: Storage, erasure_id: str, now: datetime) -> None:
    """Look again for versions of which a killed process did not get to say what became of them."""
    open_ones = {(v.name, v.version) for v in erasures.versions_of(ledger, erasure_id) if not v.destroyed_at}
    if open_ones:
        folders = {posixpath.dirname(name) for name, _ in open_ones}
        there = {(v.name, v.id) for folder in sorted(folders) for v in storage.versions(folder)}
        still = [(name, version, "it is still listed") for name, version in open_ones & there]
        known = {(v.name, v.version) for v in erasures.versions_of(ledger, erasure_id) if v.kept}
        still = [entry for entry in still if entry[:2] not in known]
        erasures.versions_destroyed(ledger, erasure_id, open_ones - there, still, now)


def _belongs(name: str, lost: frozenset[tuple[str, int]], concerned: Sequence[str], whole: frozenset[str]) -> bool:
    """Say whether an object is of a shard that lost points, a constituent trained on it, or a model gone whole."""
    kind, owner, shard = name.split("/")[:3]
    if kind == "data":
        return (owner, int(shard)) in lost
    return owner in whole or (owner in concerned and int(shard) in {number for _, number in lost})


def _shards(
    ledger: Ledger,
    doomed: Mapping[Target, Sequence[tuple[Holding, Positions]]],
    whole: Mapping[Target, Dataset],
) -> set[tuple[int, int]]:
    """Return the shards that lose points."""
    found = {(holding.dataset_id, holding.shard) for pairs in doomed.values() for holding, _ in pairs}
    return found | {place[:2] for dataset in whole.values() for place in _places_of(ledger, dataset)}
