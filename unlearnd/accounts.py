"""Account for every change of a slice: before less after is exactly what receipts say was erased.

The log has a root for every state a slice was in, the receipts' details have the commitments that went, and the ledger
remembers where in the slice they stood. Put back in their places between the rows that are there now, they must give
the root before, and so on back to the day the slice was sealed. The places need not be believed: wrong ones give
another root.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unlearnd.agreement import name_of
from unlearnd.history import Change, History, Slice
from unlearnd.ledger.restrictions import Restriction
from unlearnd.verify.receipts import Detail
from unlearnd.verify.reports import Result
from unlearnd.verify.statements import is_count
from unlearnd.verify.trees import root_of_leaves

Finding = tuple[Result, str]


@dataclass(frozen=True)
class Claim:
    """What one receipt says it took out of one slice."""

    request: str
    erasure: str
    points: int
    places: tuple[tuple[int, bytes], ...] | None
    """The rank in the slice and the commitment of each point; None when the ledger does not say."""


Claims = Mapping[tuple[Slice, str, str], Sequence[Claim]]
"""By slice, root before and root after."""


def read_claims(history: History, details: Mapping[str, Detail], outcomes: Mapping[str, Mapping[str, Any]]) -> Claims:
    """Return who says to have changed which slice; `outcomes` are the ledger's, by request."""
    claims: dict[tuple[Slice, str, str], list[Claim]] = {}
    for request, detail in details.items():
        erasure = history.receipts[request][1].erasure_id
        stood = _places(detail, outcomes.get(request, {}).get("places"))
        for number, (dataset, shard, slice_, count, before, after) in enumerate(detail.slices):
            if before:
                claim = Claim(request, erasure, count, stood[number] if stood is not None else None)
                claims.setdefault(((dataset, shard, slice_), before, after), []).append(claim)
    return claims


def false_claims(history: History, claims: Claims) -> Iterator[str]:
    """Yield what receipts say about slices and the log does not."""
    changes = {(place, change.before.root, change.after.root) for place, change in history.changes()}
    for (place, before, after), listed in claims.items():
        if (place, before, after) not in changes:
            yield f"request {listed[0].request} says that {name_of(place)} went from root to root, the log does not"


def is_changing(history: History, claims: Claims, dataset: str, shard: int) -> bool:
    """Say whether an erasure has changed slices of a shard, and not ended yet."""
    return bool(history.open) and any(
        place[:2] == (dataset, shard) and (place, change.before.root, change.after.root) not in claims
        for place, change in history.changes()
    )


def account_for(
    history: History, claims: Claims, place: Slice, now: Sequence[bytes], held: Sequence[Restriction] = ()
) -> Finding | None:
    """Go back through the changes of a slice from the commitments it has now; return what does not add up.

    `held` are the ledger's notes of which points holds took out of training and returned, and where they stood.
    """
    roots = history.slices[place]
    if root_of_leaves(now).hex() != roots[-1].root or len(now) != roots[-1].points:
        said = f"which do not give its root over {roots[-1].points} in the log"
        return Result.FAIL, f"{name_of(place)} holds {len(now)} rows, {said}"
    for before, after in zip(reversed(roots[:-1]), reversed(roots[1:]), strict=True):
        change = Change(after.leaf, before, after)
        listed = claims.get((place, before.root, after.root), [])
        if not listed and (place, before.root, after.root) in history.restricted:
            moved = held_by_change(held, place, before.root, after.root)
            back = None if moved is None else move_back(now, moved, after.points - before.points)
            if back is None or root_of_leaves(back).hex() != before.root:
                return Result.FAIL, f"{name_of(place)} changed at leaf {change.leaf} by a hold that does not explain it"
            now = back
            continue
        finding = _weigh(history, place, change, listed)
        if finding:
            return finding
        whole = put_back(now, [stood for claim in listed for stood in claim.places or ()])
        if whole is None or root_of_leaves(whole).hex() != before.root:
            what = "is not what it is now and the points that receipts name"
            return Result.FAIL, f"{name_of(place)} before leaf {change.leaf} {what}"
        now = whole
    return None


def held_by_change(
    held: Sequence[Restriction], place: Slice, before: str, after: str
) -> tuple[tuple[int, bytes], ...] | None:
    """Return rank and commitment of the points that a hold moved in a slice; None when the ledger does not say."""
    for restriction in held:
        for where, was, became, stood in (*restriction.taken, *restriction.returned):
            if (where, was, became) == (place, before, after):
                return stood
    return None


def move_back(now: Sequence[bytes], moved: Sequence[tuple[int, bytes]], grown: int) -> list[bytes] | None:
    """Return a slice as it was before a hold took points out or, where it has `grown`, returned them."""
    if grown <= 0:
        return put_back(now, moved) if len(moved) == -grown else None
    at = dict(moved)
    if len(at) != grown or any(rank >= len(now) or now[rank] != commitment for rank, commitment in moved):
        return None
    return [commitment for rank, commitment in enumerate(now) if rank not in at]


def put_back(now: Sequence[bytes], places: Sequence[tuple[int, bytes]]) -> list[bytes] | None:
    """Return a list that has each of `places` at its rank and `now` in between; None when that cannot be."""
    whole = len(now) + len(places)
    at = dict(places)
    if len(at) != len(places) or any(not 0 <= rank < whole for rank in at):
        return None
    rest = iter(now)
    return [at[rank] if rank in at else next(rest) for rank in range(whole)]


def _weigh(history: History, place: Slice, change: Change, claims: Sequence[Claim]) -> Finding | None:
    """Return why the points that a change took out cannot be put back, or are not enough to explain it."""
    what = f"{name_of(place)} changed at leaf {change.leaf}"
    if not claims and history.open:
        return Result.NOT_CHECKED, f"{what}, by an erasure that has not ended: try again later"
    if not claims:
        return Result.FAIL, f"{what}, and no receipt says why"
    if len({claim.erasure for claim in claims}) > 1:
        return Result.FAIL, f"{what}, and two erasures say to have done it"
    lost = sum(claim.points for claim in claims)
    if change.before.points - lost != change.after.points:
        counts = f"from {change.before.points} points to {change.after.points}"
        return Result.FAIL, f"{what} {counts}, and receipts account for {lost}"
    if any(claim.places is None for claim in claims):
        lacking = "the ledger does not say where the erased points stood, only their number was compared"
        return Result.NOT_CHECKED, f"{what}, and {lacking}"
    return None


def _places(detail: Detail, given: Any) -> list[tuple[tuple[int, bytes], ...]] | None:
    """Return by slice of a detail where its erased points stood, as the ledger remembers; None when it does not."""
    if not isinstance(given, list) or len(given) != len(detail.erased):
        return None
    places: list[list[tuple[int, bytes]]] = [[] for _ in detail.slices]
    for pair, commitment in zip(given, detail.erased, strict=True):
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(is_count, pair)) and pair[0] < len(places)):
            return None
        places[pair[0]].append((pair[1], bytes.fromhex(commitment)))
    if [len(listed) for listed in places] != [entry[3] for entry in detail.slices]:
        return None
    return [tuple(listed) for listed in places]
