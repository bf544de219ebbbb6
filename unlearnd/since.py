"""What the leaves after a backup say, and which points of the older ledger the erasures and holds among them moved.

Leaves name no points: a receipt has commitments, made with keys and content that are destroyed. But the copy of the log
has where in their slices points stood that were erased or held, and the older ledger has those slices as they were:
rank by rank, change after change, it can tell itself which of its points went, and whose they were.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unlearnd.errors import FormatError, RefusedError
from unlearnd.ledger import Ledger, dockets, points, restrictions
from unlearnd.ledger import rollforward as entering
from unlearnd.ledger.points import Holding
from unlearnd.logcopy import Later
from unlearnd.packing import Positions, unpack
from unlearnd.verify.receipts import Detail
from unlearnd.verify.statements import read_statement

Place = tuple[str, int, int]
"""Dataset, shard, slice."""


@dataclass
class Since:
    """What the leaves after a backup say."""

    datasets: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    roots: dict[Place, tuple[str, int]] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str], tuple[int, int, str] | None] = field(default_factory=dict)
    """By model and recipe: shard, slice and file where it was built last, None where destroyed."""
    destroyed_by: dict[tuple[str, str], str] = field(default_factory=dict)
    policies: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    due: dict[str, str] = field(default_factory=dict)
    paused: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Requests whose clock stands still: until when, empty where they wait for identity, since when, and why."""
    resumed: set[str] = field(default_factory=set)
    """Requests whose clock goes on: a hold that the backup knows of is lifted."""
    closed: dict[str, tuple[str, str]] = field(default_factory=dict)
    receipts: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    rebuilt: dict[str, str] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    keys: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    holds: list["HoldLeaf"] = field(default_factory=list)
    """What holds took out of training and returned, in the order of the log."""


@dataclass(frozen=True)
class HoldLeaf:
    """A leaf by which a hold took points out of training, or returned them."""

    leaf: int
    request: str
    returned: bool
    at: str
    slices: Sequence[tuple[str, int, int, int, str, str]]
    """(dataset, shard, slice, points, root before, root after)."""


@dataclass
class _Rows:
    """The points of one slice that the backup's ledger has, in order, and whose each is."""

    positions: Positions
    owners: list[bytes]

    def take(self, ranks: Sequence[int]) -> dict[bytes, list[int]]:
        """Return the positions at these ranks by owner; ranks beyond the end are of points that came later."""
        found: dict[bytes, list[int]] = {}
        for rank in ranks:
            if rank < len(self.positions):
                found.setdefault(self.owners[rank], []).append(int(self.positions[rank]))
        return found

    def without(self, positions: Iterable[int]) -> "_Rows":
        keep = ~np.isin(self.positions, np.array([*positions], np.int64))
        return _Rows(self.positions[keep], [o for o, kept in zip(self.owners, keep.tolist(), strict=True) if kept])

    def of(self, owner: bytes) -> list[int]:
        """Return the positions that are somebody's."""
        return [int(p) for p, whose in zip(self.positions, self.owners, strict=True) if whose == owner]

    def together(self, positions: Sequence[int], owner: bytes) -> "_Rows":
        """Return the rows with these of one owner in their places among them."""
        every = np.concatenate([self.positions, np.array(positions, np.int64)])
        order = np.argsort(every, kind="stable")
        owners = [*self.owners, *[owner] * len(positions)]
        return _Rows(every[order], [owners[number] for number in order.tolist()])


Gone = Mapping[str, Mapping[Place, Mapping[bytes, Sequence[int]]]]
"""By request: the positions that it took out of each slice, by owner."""


@dataclass
class Moves:
    """What later erasures and holds did to the points of the older ledger."""

    gone: dict[str, dict[Place, dict[bytes, list[int]]]] = field(default_factory=dict)
    held: dict[str, dict[Place, list[int]]] = field(default_factory=dict)
    """By request: the positions that are out of training now because it is on hold."""
    handles: dict[str, bytes] = field(default_factory=dict)
    """By request: whose points its hold is on."""


@dataclass(frozen=True)
class _Move:
    """One change of one slice."""

    cause: str
    """The erasure, or the leaf of a hold."""
    leaf: int
    before: str
    after: str
    ranks: dict[str, list[int]]
    """By request: where the points stood that an erasure took."""
    hold: HoldLeaf | None = None


def read_since(leaves: Sequence[bytes], begin: int) -> Since:
    since = Since()
    for index, leaf in enumerate(leaves, begin):
        try:
            statement = read_statement(leaf)
        except FormatError:
            continue  # whoever replays the log reports it
        _take(since, index, statement.kind, statement.predicate)
    return since


def _take(since: Since, index: int, kind: str, said: Mapping[str, Any]) -> None:
    if kind == "key":
        since.keys.append((index, said))
    elif kind == "dataset":
        since.datasets.append(said["dataset"])
    elif kind == "slices":
        for shard, slice_, root, count in said["roots"]:
            since.roots[said["dataset"], shard, slice_] = (root, count)
    elif kind == "model":
        since.models += [said["model"]] if said["model"] not in since.models else []
    elif kind == "built":
        for shard, slice_, recipe, _, _, file, *_ in said["checkpoints"]:
            since.checkpoints[said["model"], recipe] = (shard, slice_, file)
    elif kind == "destroyed":
        for _, _, recipe, _ in said["checkpoints"]:
            since.checkpoints[said["model"], recipe] = None
            since.destroyed_by[said["model"], recipe] = said["erasureId"]
    elif kind == "liveset":
        since.documents.append(said["detail"])
    elif kind == "policy":
        since.policies[said["digest"]] = (said["policy"], index, said["at"])
    elif kind == "request":
        since.requests[said["requestId"]] = {**said, "leaf": index}
        if said["erasureId"]:
            since.begun[said["requestId"]] = said["erasureId"]
    elif kind == "begun":
        since.begun |= dict.fromkeys(said["requests"], said["erasureId"])
    elif kind in ("extended", "resumed"):
        since.due[said["requestId"]] = said["dueAt"]
        if kind == "resumed":
            since.paused.pop(said["requestId"], None)
            since.resumed.add(said["requestId"])
    elif kind == "paused":
        since.paused[said["requestId"]] = (said["until"], said["at"], said["reason"])
        since.resumed.discard(said["requestId"])
    elif kind == "refused":
        since.closed[said["requestId"]] = (said["reason"], said["at"])
        since.paused.pop(said["requestId"], None)
    elif kind in ("restricted", "returned"):
        since.holds.append(HoldLeaf(index, said["requestId"], kind == "returned", said["at"], said["slices"]))
    elif kind == "erasure":
        since.receipts[said["requestId"]] = (index, said)
        since.documents.append(said["detail"]["digest"]["sha256"])
    elif kind == "rebuilt":
        since.rebuilt[said["erasureId"]] = said["at"]
    elif kind == "restored":
        _take_restored(since, said)


def _take_restored(since: Since, said: Mapping[str, Any]) -> None:
    """An earlier restore gave things up: they are not lost a second time."""
    for what, *which in said["lost"]:
        if what == "slice":
            since.roots.pop(tuple(which), None)
        elif what == "dataset" and which[0] in since.datasets:
            since.datasets.remove(which[0])
        elif what == "model" and which[0] in since.models:
            since.models.remove(which[0])
        elif what == "request":
            since.begun.pop(which[0], None)


def find_moves(ledger: Ledger, later: Later, since: Since, details: Mapping[str, Detail]) -> Moves:
    """Work out which points each later erasure took, and each hold moved: by where in their slices they stood."""
    listed = _moves(later, since, details, entering.marked_erasures(ledger))
    known = {entry.id: entry.handle for entry in dockets.entries(ledger) if entry.handle is not None}
    moves = Moves(handles={one.request: known[one.request] for one in since.holds if one.request in known})
    found = _Replay(moves, {(place, was, is_): stood for place, was, is_, stood in later.holds})
    rows = _rows_of(ledger, {place[0] for place in listed})
    _held_before(ledger, found)
    # Where a hold changed a root it is known at which ranks, and so whose they are; then of everywhere else, too.
    for place in sorted(listed, key=lambda place: (all(not move.before for move in listed[place]), place)):
        dataset = points.find_dataset(ledger, place[0])
        there = rows.get(place)
        if dataset is None or there is None:
            continue
        root = points.roots_of(ledger, dataset.id, place[1]).get(place[1:], "")
        for move in _in_order(listed[place], root):
            there = found.move(place, there, move)
    _check_owners(since, moves.gone)
    return moves


def _moves(later: Later, since: Since, details: Mapping[str, Detail], marked: set[str]) -> dict[Place, list[_Move]]:
    """Return how every slice changed, in the order of the log."""
    listed: dict[Place, dict[str, _Move]] = {}
    for request, detail in details.items():
        leaf, said = since.receipts[request]
        erasure = said["erasureId"]
        places = later.places.get(request, ())
        if len(places) != len(detail.erased):
            raise RefusedError(
                f"the copy of the log does not say where the points of request {request} stood, so that its erasure "
                "cannot be carried out again: restore a newer backup"
            )
        if erasure in marked:
            continue  # the backup's ledger had come that far itself
        for number, (dataset, shard, slice_, _, before, after) in enumerate(detail.slices):
            here = listed.setdefault((dataset, shard, slice_), {})
            move = here.setdefault(erasure, _Move(erasure, leaf, before, after, {}))
            move.ranks[request] = [rank for where, rank in places if where == number]
    for hold in since.holds:
        for dataset, shard, slice_, _, before, after in hold.slices:
            cause = f"leaf {hold.leaf}"
            listed.setdefault((dataset, shard, slice_), {})[cause] = _Move(cause, hold.leaf, before, after, {}, hold)
    return {place: sorted(here.values(), key=lambda move: move.leaf) for place, here in listed.items()}


@dataclass
class _Replay:
    """Carries changes of slices out on the rows there were."""

    moves: Moves
    stood: Mapping[tuple[Place, str, str], Sequence[tuple[int, bytes]]]
    """By slice, root before and root after: the rank and commitment of each point that a hold moved."""

    def move(self, place: Place, there: _Rows, move: _Move) -> _Rows:
        """Return the rows of a slice after a change."""
        if move.hold is None:
            taken = {request: there.take(ranks) for request, ranks in move.ranks.items()}
            for request, by_owner in taken.items():
                self.moves.gone.setdefault(request, {})[place] = by_owner
            return there.without(p for by_owner in taken.values() for mine in by_owner.values() for p in mine)
        request = move.hold.request
        out = self.moves.held.setdefault(request, {})
        if move.hold.returned:
            back = out.pop(place, [])
            return there.together(back, self.moves.handles[request]) if back else there
        owner = self._owner(place, there, move, request)
        out[place] = there.of(owner)
        return there.without(out[place])

    def _owner(self, place: Place, there: _Rows, move: _Move, request: str) -> bytes:
        """Return whose points a hold took out."""
        ranks = [rank for rank, _ in self.stood.get((place, move.before, move.after), ())]
        owners = set(there.take(ranks))
        if request in self.moves.handles:
            owners.add(self.moves.handles[request])
        if len(owners) != 1:
            raise RefusedError(
                f"request {request} was put on hold after this backup was made, and neither the backup nor the copy "
                "of the log says on whose data: restore a newer backup, or give the exported log with --log"
            )
        return self.moves.handles.setdefault(request, next(iter(owners)))


def _held_before(ledger: Ledger, found: _Replay) -> None:
    """Enter what holds keep out of training already in the older ledger."""
    names = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    for restriction in restrictions.all_restrictions(ledger):
        if restriction.in_force:
            found.moves.handles.setdefault(restriction.request_id, restriction.handle)
            out = found.moves.held.setdefault(restriction.request_id, {})
            for holding in points.holdings_of(ledger, [restriction.handle]):
                place = (names[holding.dataset_id], holding.shard, holding.slice)
                out[place] = sorted([*out.get(place, []), *unpack(holding.positions).tolist()])


def _check_owners(since: Since, gone: Gone) -> None:
    """Raise where what a user's erasure took is not of one user: then the places are not of this ledger's slices."""
    for request, places in gone.items():
        owners = {owner for by_owner in places.values() for owner in by_owner}
        if since.receipts[request][1]["asked"] == "user" and len(owners) > 1:
            raise RefusedError(
                f"the erasure of request {request} cannot be carried out again: where its points stood are points of "
                f"{len(owners)} users in this backup; restore a newer one"
            )


def _in_order(moves: Sequence[_Move], root: str) -> Iterable[_Move]:
    """Return the changes of a slice as they followed each other: two erasures at once may have ended the other way."""
    left = list(moves)
    while left:
        following = next((move for move in left if move.before == root), left[0])
        left.remove(following)
        root = following.after
        yield following


def _rows_of(ledger: Ledger, names: Iterable[str]) -> dict[Place, _Rows]:
    """Return for every slice of these datasets the points in use, in the order they are trained on."""
    found: dict[Place, _Rows] = {}
    for name in names:
        dataset = points.find_dataset(ledger, name)
        if dataset is None:
            continue
        by_place: dict[tuple[int, int], list[Holding]] = {}
        for holding in points.holdings_in(ledger, dataset.id):
            by_place.setdefault((holding.shard, holding.slice), []).append(holding)
        for (shard, slice_), held in by_place.items():
            lists = [unpack(holding.positions) for holding in held]
            every = np.concatenate(lists)
            whose = np.repeat(np.arange(len(held)), [len(some) for some in lists])
            kept = [unpack(s.held) for s in points.segments_of(ledger, dataset.id, shard, slice_) if s.held]
            order = np.argsort(every, kind="stable")
            order = order[~np.isin(every[order], np.concatenate(kept))] if kept else order
            owners = [held[number].handle for number in whose[order].tolist()]
            found[name, shard, slice_] = _Rows(every[order], owners)
    return found
