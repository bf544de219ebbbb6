"""Take users or points out of everything, step by step, so that a kill at any moment loses nothing.

    1  requests recorded
    2  planned: which points, slices and checkpoints, at what cost (a dry run stops here)
    3  points marked erased, slice roots recomputed, user keys destroyed, in one transaction
    4  slice data rewritten without the points, old objects destroyed
    5  tainted checkpoints destroyed, and storage listed again to see that they are gone
    6  statement logged, tree head signed, receipt written
    7  build, now or later

From step 3 on nothing made from the points is served, because it has no recipe any more. Each step is durable
before the next begins and can be taken again; whoever comes next carries on with what another left undone.
"""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np

from unlearnd.build import cost_of
from unlearnd.checkpoints import destroy_all_but, standings
from unlearnd.digests import Digest, digest_of_json
from unlearnd.errors import BusyError
from unlearnd.ingest import destroy_leftovers
from unlearnd.keys import draw_id, draw_nonce
from unlearnd.leases import Clock, hold
from unlearnd.ledger import Ledger, erasures, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.erasures import Erasure, Marking, Request
from unlearnd.ledger.leases import build_lease, data_lease, ingest_lease
from unlearnd.ledger.points import Holding, Segment
from unlearnd.packing import Positions, pack, unpack
from unlearnd.slices import commitments, read_segment, rewrite_dropped, root_of_commitments
from unlearnd.statements import (
    ErasureStatement,
    checkpoints_destroyed,
    commit_to_user,
    erasure_done,
    live_set,
    replay_class,
    request_received,
    slices_sealed,
)
from unlearnd.steps import Step, reached
from unlearnd.storage import Kept, Storage, Version
from unlearnd.translog import Translog, issue_receipts, keep_detail

Target = bytes | tuple[str, int]
"""A user by handle, or a point by dataset and position."""


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
    """`user` or `point`."""
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
    """Samples to retrain."""
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
    planned = tuple(
        _plan_model(ledger, model, by_place)
        for model in models.models(ledger)
        if any(dataset_id == model.dataset_id for dataset_id, _, _ in by_place)
    )
    places = tuple(
        PlannedPlace(names[dataset_id], shard, slice_, count)
        for (dataset_id, shard, slice_), count in sorted(by_place.items())
    )
    found = sum(1 for pairs in doomed.values() if pairs)
    return ErasurePlan(found, len(doomed) - found, sum(by_place.values()), places, planned)


def record_requests(
    ledger: Ledger,
    targets: Sequence[Target],
    now: datetime,
    alive: Iterable[bytes] = (),
    named: Mapping[Target, str] | None = None,
) -> str | None:
    """Step 1: write down what was asked; return the erasure's id, or None when another process came first.

    `alive` are the users among them that had data when it was decided to ask; `named` has the user ids that
    receipts are to commit to. An id goes no further than the commitment.
    """
    erasure_id = draw_id()
    requests = []
    for target in targets:
        user = (named or {}).get(target)
        nonce = draw_nonce() if user is not None else None
        commitment = commit_to_user(nonce, user) if nonce is not None and user is not None else None
        handle, dataset, position = (target, None, None) if isinstance(target, bytes) else (None, *target)
        requests.append(Request(draw_id(), erasure_id, handle, dataset, position, 0, commitment, nonce, None))
    leaves = [
        request_received(request.id, erasure_id, "point" if request.handle is None else "user", stamp(now))
        for request in requests
    ]
    if not erasures.record_erasure(ledger, erasure_id, requests, alive, leaves, now):
        return None
    reached(Step.ERASE_RECORDED)
    return erasure_id


def carry_out(translog: Translog, plugins: Mapping[str, str], erasure_id: str, clock: Clock) -> None:
    """Steps 3 to 6, beginning with the first that is not done; `plugins` are the versions a receipt names."""
    ledger, storage = translog.ledger, translog.storage
    record = _Record(ledger, erasure_id, clock)
    with hold(ledger, [f"erasure/{erasure_id}"], clock):
        erasure = erasures.erasure_by_id(ledger, erasure_id)
        if erasure.influence_removed_at is not None:
            return
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
        for dataset_id, shard in erasure.touched:
            for model in models.models(ledger, dataset_id):
                with hold(ledger, [build_lease(model.name, shard)], clock, preempt=True):
                    _destroy_tainted(ledger, storage, model, shard, erasure_id, clock(), record)
                reached(Step.ERASE_CHECKPOINTS_DESTROYED)
        # Before the claim is made: the ledger's own files must not keep the destroyed keys either.
        ledger.scrub()
        _settle(ledger, storage, erasure_id, clock())
        _conclude(translog, plugins, erasure_id, clock())
        reached(Step.ERASE_REMOVED)
    issue_receipts(translog)


def outcome_of(ledger: Ledger, request: Request) -> Outcome:
    """Return what came of a request that was carried out."""
    erasure = erasures.erasure_by_id(ledger, request.erasure_id)
    stored = request.outcome or {}
    return Outcome(
        request=request.id,
        erasure=erasure.id,
        asked="user" if request.handle is not None else "point",
        found=stored["points"] > 0,
        points=stored["points"],
        erased_root=stored["erased_root"],
        slices=tuple(Touched(**touched) for touched in stored["slices"]),
        checkpoints=tuple(Destroyed(**destroyed) for destroyed in stored["checkpoints"]),
        kept=tuple(Kept(*entry) for entry in stored.get("kept", ())),
        received_at=erasure.received_at,
        influence_removed_at=erasure.influence_removed_at,
        rebuilt_at=erasure.rebuilt_at,
    )


def live_sets(translog: Translog, concerned: Iterable[models.Model], now: datetime) -> list[bytes]:
    """Return the leaves that list every checkpoint in force of these models; their documents are durable already."""
    leaves = []
    for model in concerned:
        entries = [
            (c.shard, c.slice, c.recipe, c.file, c.tensors, c.path, c.size)
            for standing in standings(translog.ledger, model)
            for c in standing.chain
        ]
        leaf, detail = live_set(model.name, entries, stamp(now))
        keep_detail(translog, detail)
        leaves.append(leaf)
    return leaves


def _conclude(translog: Translog, plugins: Mapping[str, str], erasure_id: str, now: datetime) -> None:
    """Record that no influence is left: the outcomes, what is in service now, and a statement for each request."""
    ledger = translog.ledger
    erasure = erasures.erasure_by_id(ledger, erasure_id)
    destroyed = models.destroyed_by(ledger, erasure_id)
    touched = {dataset_id for dataset_id, _ in erasure.touched}
    concerned = [model for model in models.models(ledger) if model.dataset_id in touched]
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    versions = erasures.versions_of(ledger, erasure_id)
    outcomes: dict[str, dict[str, Any]] = {}
    receipts: dict[str, tuple[bytes, Digest]] = {}
    for request in erasures.requests_of(ledger, erasure_id):
        assert request.outcome is not None
        erased = request.outcome["erased"]
        slices = request.outcome["slices"]
        seen = _seen_by(destroyed, slices)
        lost = {(entry["dataset"], entry["shard"]) for entry in slices}
        mine = [model for model in concerned if names[model.dataset_id] in {dataset for dataset, _ in lost}]
        objects = [one for one in versions if _belongs(one.name, lost, [model.name for model in mine])]
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
                asked="point" if request.handle is None else "user",
                request_leaf=request.leaf,
                received_at=erasure.received_at,
                influence_removed_at=stamp(now),
                user_commitment=request.commitment,
                erased=erased,
                slices=[
                    (e["dataset"], e["shard"], e["slice"], e["points"], e["root_before"] or "", e["root_after"] or "")
                    for e in slices
                ],
                destroyed=[(c["model"], c["shard"], c["slice"], c["recipe"], c["file"], c["tensors"]) for c in seen],
                serving=[entry for model in mine for entry in _serving(ledger, model)],
                models=[_model_entry(ledger, model, names[model.dataset_id], lost) for model in mine],
                plugins=plugins,
                version=translog.software,
                gone=[(one.name, one.version) for one in objects if one.destroyed_at],
                kept=[(one.name, one.version, one.kept) for one in objects if one.kept],
            )
        )
        keep_detail(translog, detail)
        receipts[request.id] = (payload, detail.digest)
    leaves = live_sets(translog, concerned, now)
    erasures.influence_removed(ledger, erasure_id, outcomes, leaves, receipts, now)


def _serving(ledger: Ledger, model: models.Model) -> list[tuple[str, int, int, str]]:
    return [
        (model.name, s.shard, s.prefix, s.checkpoint.recipe if s.checkpoint else "") for s in standings(ledger, model)
    ]


def _model_entry(
    ledger: Ledger, model: models.Model, dataset: str, lost: set[tuple[str, int]]
) -> tuple[str, str, str, str, int, int]:
    """Return what a receipt says about a model: how much the shards that lost points must train again."""
    counts = points.counts_of(ledger, model.dataset_id)
    retrain = scratch = 0
    for standing in standings(ledger, model):
        whole = cost_of(model.spec, model.sliceable, counts, standing.shard, standing.slices, 0)
        scratch += whole
        if (dataset, standing.shard) in lost:
            retrain += cost_of(model.spec, model.sliceable, counts, standing.shard, standing.slices, standing.prefix)
    spec = digest_of_json(model.spec.as_json())
    return model.name, dataset, spec, replay_class(model.deterministic), retrain, scratch


def _doomed(ledger: Ledger, targets: Sequence[Target]) -> dict[Target, list[tuple[Holding, Positions]]]:
    """Return for each target the holdings it touches and the positions to go; a point goes only once."""
    found: dict[Target, list[tuple[Holding, Positions]]] = {target: [] for target in targets}
    handles = [target for target in targets if isinstance(target, bytes)]
    for holding in points.holdings_of(ledger, handles):
        found[holding.handle].append((holding, unpack(holding.positions)))
    for target in targets:
        if isinstance(target, bytes):
            continue
        dataset = points.find_dataset(ledger, target[0])
        at = points.holding_at(ledger, dataset.id, target[1]) if dataset else None
        if at is not None and at.handle not in found:
            found[target].append((at, np.array([target[1]], np.int64)))
    return found


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
            keep = min(standing.prefix, first[shard] - 1)
            samples += cost_of(model.spec, model.sliceable, counts, shard, standing.slices, keep)
            checkpoints += sum(1 for c in standing.chain if c.slice >= first[shard])
    return PlannedModel(model.name, tuple(sorted(first)), checkpoints, samples, scratch)


def _mark(ledger: Ledger, storage: Storage, erasure: Erasure, clock: Clock) -> None:
    """Step 3, under the leases of all shards concerned."""
    requests = erasures.requests_of(ledger, erasure.id)
    targets: list[Target] = [_target(request) for request in requests]
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    while True:
        shards = _shards(_doomed(ledger, targets))
        leases = [data_lease(names[dataset_id], shard) for dataset_id, shard in sorted(shards)]
        with hold(ledger, leases or [f"erasure/{erasure.id}/nothing"], clock):
            doomed = _doomed(ledger, targets)
            if not _shards(doomed) <= shards:
                continue
            now = clock()
            marking = _marking(ledger, storage, requests, doomed, now)
            if erasures.mark_erased(ledger, erasure.id, marking, now):
                return


def _marking(
    ledger: Ledger,
    storage: Storage,
    requests: Sequence[Request],
    doomed: Mapping[Target, Sequence[tuple[Holding, Positions]]],
    now: datetime,
) -> Marking:
    """Work out what step 3 changes: read the slices concerned once, and sum up what stays and what goes."""
    gone: list[Holding] = []
    shrunk: list[tuple[Holding, int, bytes]] = []
    by_place: dict[tuple[int, int, int], list[tuple[Target, Positions]]] = {}
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
    dropped: list[tuple[int, bytes, int]] = []
    roots: list[tuple[int, int, int, Digest]] = []
    slices: dict[Target, list[Touched]] = {target: [] for target in doomed}
    erased: dict[Target, list[tuple[bytes, int, int]]] = {target: [] for target in doomed}
    sealed: dict[str, list[tuple[int, int, Digest, int]]] = {}
    for (dataset_id, shard, slice_), lots in sorted(by_place.items()):
        dataset = points.dataset_by_id(ledger, dataset_id)
        before = points.roots_of(ledger, dataset_id, shard).get((shard, slice_))
        going = np.concatenate([positions for _, positions in lots])
        staying: list[bytes] = []
        committed: dict[int, tuple[bytes, int]] = {}
        ahead = 0
        for segment in points.segments_of(ledger, dataset_id, shard, slice_):
            rows = read_segment(storage, segment)
            out = np.isin(rows.position, going)
            live = ~np.isin(rows.position, unpack(segment.dropped))
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
        for target, positions in lots:
            here = len(slices[target])
            erased[target].extend((*committed[position], here) for position in positions.tolist())
            slices[target].append(Touched(dataset.name, shard, slice_, len(positions), before, after))
    outcomes: dict[str, dict[str, Any]] = {}
    for request in requests:
        target = _target(request)
        gone_here = sorted(erased[target])
        root = root_of_commitments([commitment for commitment, _, _ in gone_here]) if gone_here else None
        outcomes[request.id] = {
            "points": len(gone_here),
            "erased_root": root,
            "erased": [commitment.hex() for commitment, _, _ in gone_here],
            # Where each stood, as [slice of the list below, rank in it]: with this an audit can put them back and
            # see that the slice had the root it had. Nobody need believe it, and it is in no receipt.
            "places": [[here, rank] for _, rank, here in gone_here],
            "slices": [asdict(touched) for touched in slices[target]],
        }
    shredded = [request.handle for request in requests if request.handle is not None]
    touched = sorted(_shards(doomed))
    leaves = [leaf for name, entries in sealed.items() for leaf in slices_sealed(name, entries, stamp(now))]
    return Marking(dropped, roots, gone, shrunk, shredded, outcomes, touched, leaves)


def _drop(segment: Segment, positions: Positions) -> tuple[int, bytes, int]:
    together = np.union1d(unpack(segment.dropped), positions)
    return segment.id, pack(together), segment.rows - len(together)


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


def _seen_by(destroyed: Sequence[Mapping[str, Any]], slices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return those destroyed checkpoints that had seen one of these slices."""
    return [
        {name: value for name, value in checkpoint.items() if name != "dataset"}
        for checkpoint in destroyed
        if any(
            (lost["dataset"], lost["shard"]) == (checkpoint["dataset"], checkpoint["shard"])
            and lost["slice"] <= checkpoint["slice"]
            for lost in slices
        )
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


def _belongs(name: str, lost: set[tuple[str, int]], concerned: Iterable[str]) -> bool:
    """Say whether an object is of a shard that lost points, or of a constituent trained on it."""
    kind, owner, shard = name.split("/")[:3]
    if kind == "data":
        return (owner, int(shard)) in lost
    return owner in concerned and int(shard) in {number for _, number in lost}


def _shards(doomed: Mapping[Target, Sequence[tuple[Holding, Positions]]]) -> set[tuple[int, int]]:
    return {(holding.dataset_id, holding.shard) for pairs in doomed.values() for holding, _ in pairs}


def _target(request: Request) -> Target:
    if request.handle is not None:
        return request.handle
    assert request.dataset is not None
    assert request.position is not None
    return request.dataset, request.position
