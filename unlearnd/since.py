"""What the leaves after a backup say, and which points of the older ledger the erasures among them took.

Leaves name no points: a receipt has commitments, made with keys and content that are destroyed. But the copy of the log
has where in their slices erased points stood, and the older ledger has those slices as they were: rank by rank, change
after change, it can tell itself which of its points went, and whose they were.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unlearnd.errors import FormatError, RefusedError
from unlearnd.ledger import Ledger, points
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
    paused: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Requests whose clock stands still: until when, empty where they wait for identity, and since when."""
    closed: dict[str, tuple[str, str]] = field(default_factory=dict)
    receipts: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    rebuilt: dict[str, str] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    keys: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    held: int = 0
    """How often a hold took points out of training, or returned them."""


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

    def without(self, ranks: Iterable[int]) -> "_Rows":
        out = {rank for rank in ranks if rank < len(self.positions)}
        keep = np.array([rank not in out for rank in range(len(self.positions))], bool)
        return _Rows(self.positions[keep], [o for o, kept in zip(self.owners, keep.tolist(), strict=True) if kept])


Gone = Mapping[str, Mapping[Place, Mapping[bytes, Sequence[int]]]]
"""By request: the positions that it took out of each slice, by owner."""


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
    elif kind == "paused":
        since.paused[said["requestId"]] = (said["until"], said["at"])
    elif kind == "refused":
        since.closed[said["requestId"]] = (said["reason"], said["at"])
        since.paused.pop(said["requestId"], None)
    elif kind in ("restricted", "returned"):
        since.held += 1
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


def find_gone(ledger: Ledger, later: Later, since: Since, details: Mapping[str, Detail]) -> Gone:
    """Work out which points of the older ledger each later erasure took: by where in their slices they stood."""
    marked = entering.marked_erasures(ledger)
    moves: dict[Place, list[tuple[str, str, str, dict[str, list[int]]]]] = {}
    for request, detail in details.items():
        erasure = since.receipts[request][1]["erasureId"]
        places = later.places.get(request, ())
        if len(places) != len(detail.erased):
            raise RefusedError(
                f"the copy of the log does not say where the points of request {request} stood, so that its erasure "
                "cannot be carried out again: restore a newer backup"
            )
        if erasure in marked:
            continue  # the backup's ledger had come that far itself
        for number, (dataset, shard, slice_, _, before, after) in enumerate(detail.slices):
            listed = moves.setdefault((dataset, shard, slice_), [])
            if not listed or listed[-1][0] != erasure:
                listed.append((erasure, before, after, {}))
            listed[-1][3][request] = [rank for here, rank in places if here == number]
    gone: dict[str, dict[Place, dict[bytes, list[int]]]] = {}
    rows = _rows_of(ledger, {place[0] for place in moves})
    for place, listed in moves.items():
        dataset = points.find_dataset(ledger, place[0])
        there = rows.get(place)
        if dataset is None or there is None:
            continue
        root = points.roots_of(ledger, dataset.id, place[1]).get(place[1:], "")
        for _, _, _, by_request in _in_order(listed, root):
            for request, ranks in by_request.items():
                gone.setdefault(request, {})[place] = there.take(ranks)
            there = there.without(rank for ranks in by_request.values() for rank in ranks)
    return gone


def _in_order(moves: Sequence[tuple[str, str, str, Any]], root: str) -> Iterable[tuple[str, str, str, Any]]:
    """Return the changes of a slice as they followed each other: two erasures at once may have ended the other way."""
    left = list(moves)
    while left:
        following = next((move for move in left if move[1] == root), left[0])
        left.remove(following)
        root = following[2]
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
