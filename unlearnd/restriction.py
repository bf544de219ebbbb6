"""Keep a held user's data out of training without erasing it, and put it back.

Which points are out is derived from the requests on hold, and nothing else: `settle` brings the two together and may be
run at any time, by anybody, again and again. Points that leave change their slices' roots exactly as an erasure does,
so nothing made from them has a recipe any more: models answer from their clean prefixes, and the checkpoints that no
longer fit are destroyed. But the rows stay in their segments and the user's key in the ledger. Put back in their places
they give the root there was before, so the next build makes the same checkpoints, bit for bit.
"""

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from unlearnd.checkpoints import destroy_all_but, standings
from unlearnd.digests import Digest
from unlearnd.keys import draw_id
from unlearnd.leases import Clock, hold
from unlearnd.ledger import Ledger, dockets, models, points, restrictions
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.leases import build_lease, data_lease
from unlearnd.ledger.restrictions import Change, Restriction, Stood
from unlearnd.packing import pack, unpack
from unlearnd.slices import commitments, read_segment, root_of_commitments
from unlearnd.statements import checkpoints_destroyed, points_restricted, slices_sealed
from unlearnd.steps import Step, reached
from unlearnd.storage import Storage

_NAME = "restriction"


def settle(ledger: Ledger, storage: Storage, clock: Clock) -> int:
    """Take the points of users on hold out of training, put back those of everybody else; return how many changed."""
    if not unsettled(ledger):
        return 0
    changed = 0
    with hold(ledger, [_NAME], clock):
        wanted = {entry.handle: entry.id for entry in dockets.entries(ledger, ("on_hold",)) if entry.handle is not None}
        there = {r.handle: r for r in restrictions.all_restrictions(ledger) if r.in_force}
        for handle in there.keys() - wanted.keys():
            _move(ledger, storage, there[handle], clock)
            changed += 1
        for handle in wanted.keys() - there.keys():
            assert handle is not None
            _move(ledger, storage, Restriction("", wanted[handle], handle, (), (), False, False), clock)
            changed += 1
        left = [r for r in restrictions.all_restrictions(ledger) if not r.cleaned]
        for name, shard in sorted({place for r in left for place in r.unsettled}):
            dataset = points.dataset_named(ledger, name)
            for model in models.models(ledger, dataset.id):
                with hold(ledger, [build_lease(model.name, shard)], clock, preempt=True):
                    _destroy_misfits(ledger, storage, model, shard, clock())
        restrictions.cleaned(ledger, [r.id for r in left], clock())
    return changed


def unsettled(ledger: Ledger) -> bool:
    """Say whether holds and training disagree, or somebody stopped half-way."""
    wanted = {entry.handle for entry in dockets.entries(ledger, ("on_hold",)) if entry.handle is not None}
    found = restrictions.all_restrictions(ledger)
    return wanted != {r.handle for r in found if r.in_force} or not all(r.cleaned for r in found)


def _move(ledger: Ledger, storage: Storage, restriction: Restriction, clock: Clock) -> None:
    """Take a user's points out, or put them back where the restriction is in force, under their shards' leases."""
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    while True:
        places = _places(ledger, restriction.handle)
        shards = sorted({(names[dataset_id], shard) for dataset_id, shard, _ in places})
        with hold(ledger, [data_lease(name, shard) for name, shard in shards] or [f"{_NAME}/nothing"], clock):
            if _places(ledger, restriction.handle) != places:
                continue
            now = clock()
            change = _change(ledger, storage, restriction, places, now)
            if restriction.in_force:
                restrictions.enter_return(ledger, restriction.id, change, now)
            else:
                restrictions.enter_restriction(
                    ledger, draw_id(), restriction.request_id, restriction.handle, change, now
                )
            reached(Step.HOLD_MARKED)
            return


def _places(ledger: Ledger, handle: bytes) -> dict[tuple[int, int, int], tuple[bytes, ...]]:
    """Return the slices a user has points in, with their positions as they are kept."""
    found: dict[tuple[int, int, int], list[bytes]] = {}
    for holding in points.holdings_of(ledger, [handle]):
        found.setdefault((holding.dataset_id, holding.shard, holding.slice), []).append(holding.positions)
    return {place: tuple(sorted(positions)) for place, positions in sorted(found.items())}


def _change(
    ledger: Ledger,
    storage: Storage,
    restriction: Restriction,
    places: dict[tuple[int, int, int], tuple[bytes, ...]],
    now: datetime,
) -> Change:
    """Work out what taking a user's points out, or putting them back, changes: each slice is read once."""
    returning = restriction.in_force
    segments: list[tuple[int, bytes, int]] = []
    roots: list[tuple[int, int, int, Digest]] = []
    stood: list[Stood] = []
    sealed: dict[str, list[tuple[int, int, Digest, int]]] = {}
    entries: list[tuple[str, int, int, int, str, str]] = []
    for (dataset_id, shard, slice_), packed in places.items():
        dataset = points.dataset_by_id(ledger, dataset_id)
        mine = np.concatenate([unpack(some) for some in packed])
        before = points.roots_of(ledger, dataset_id, shard).get((shard, slice_))
        staying: list[bytes] = []
        moved: list[tuple[int, bytes]] = []
        ahead = count = 0
        for segment in points.segments_of(ledger, dataset_id, shard, slice_):
            rows = read_segment(storage, segment)
            held = np.setdiff1d(unpack(segment.held), mine)
            dropped = unpack(segment.dropped)
            # As the slice is with the user's points in it: before they leave, or after they return.
            whole = rows.keep(~np.isin(rows.position, np.union1d(dropped, held)))
            out = np.isin(whole.position, mine)
            count += int(out.sum())
            if before is not None:
                all_of_it = commitments(ledger, dataset, whole)
                moved += [(ahead + rank, all_of_it[rank]) for rank in np.flatnonzero(out).tolist()]
                staying += (
                    all_of_it if returning else [c for c, gone in zip(all_of_it, out.tolist(), strict=True) if not gone]
                )
            ahead += len(whole)
            if out.any():
                now_held = held if returning else np.union1d(held, whole.position[out])
                live = len(whole) - (0 if returning else int(out.sum()))
                segments.append((segment.id, pack(now_held) if len(now_held) else b"", live))
        after = None if before is None else root_of_commitments(staying)
        if after is not None and before is not None:
            roots.append((dataset_id, shard, slice_, after))
            sealed.setdefault(dataset.name, []).append((shard, slice_, after, len(staying)))
            stood.append(((dataset.name, shard, slice_), before, after, tuple(moved)))
        else:
            stood.append(((dataset.name, shard, slice_), "", "", ()))
        entries.append((dataset.name, shard, slice_, count, before or "", after or ""))
    at = stamp(now)
    kind = "returned" if returning else "restricted"
    leaves = points_restricted(kind, restriction.request_id, entries, at)
    leaves += [leaf for name, listed in sealed.items() for leaf in slices_sealed(name, listed, at)]
    return Change(segments, roots, stood, leaves)


def _destroy_misfits(ledger: Ledger, storage: Storage, model: models.Model, shard: int, now: datetime) -> None:
    """Destroy the checkpoints of a constituent that its slices no longer lead to."""
    clean = {checkpoint.path for checkpoint in standings(ledger, model, [shard])[0].chain}
    misfits: Sequence[models.Checkpoint] = [
        c for c in models.checkpoints_of(ledger, model.id, shard) if c.path not in clean
    ]
    destroy_all_but(storage, model.name, shard, clean)
    # No erasure destroyed them: nobody is erased by a hold.
    leaves = checkpoints_destroyed(model.name, "", [(c.shard, c.slice, c.recipe, c.file) for c in misfits], stamp(now))
    models.checkpoints_destroyed(ledger, model.dataset_id, [c.id for c in misfits], None, leaves, now)
    reached(Step.HOLD_CLEANED)
