"""Bring a ledger from a backup up to the log as it has gone on since, before anything is served from it.

The log is append-only, so what a backup lacks of it is appended, and nothing is decided anew: an erasure that has a
receipt is carried out again on the older ledger, to the same slice roots. Whose points they were, the older ledger
knows itself once it is told where in their slices they stood. User keys are destroyed, holdings go, slice data that
still holds the points is rewritten, checkpoints made from them are destroyed, and every root is computed from the rows
there are and held against the log. Holds that were set or lifted since are set or lifted again, in the same way.

What the log cannot bring back is lost, and said: points and models that came after the backup (of those the log has
only digests), and requests that came in since and were not carried out (of those it does not know whose they are). A
leaf `restored` lists it, so that log, ledger and storage say the same again and whoever audits sees what happened.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from unlearnd.bases import destroy_unnamed
from unlearnd.checkpoints import destroy_all_but, standings
from unlearnd.clocks import day_of
from unlearnd.digests import Digest, digest_of
from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError
from unlearnd.keys import draw_id, draw_nonce
from unlearnd.ledger import Ledger, dockets, erasures, features, log, models, points, restrictions
from unlearnd.ledger import rollforward as entering
from unlearnd.ledger.connection import moment_from, stamp
from unlearnd.ledger.dockets import Entry
from unlearnd.ledger.erasures import Marking
from unlearnd.ledger.points import Dataset, Holding, NewSegment, Segment
from unlearnd.ledger.rollforward import LaterErasure, LaterHold, LaterRequest
from unlearnd.logcopy import Later
from unlearnd.packing import Positions, pack, unpack
from unlearnd.policy import Policy
from unlearnd.requests import policy_of
from unlearnd.since import Gone, Moves, Place, Since, find_moves, read_since
from unlearnd.slices import compute_roots, folder_of, rewrite_dropped
from unlearnd.statements import checkpoints_destroyed, request_closed, slices_sealed, store_restored
from unlearnd.storage import Storage, key_in_slot, opened
from unlearnd.tensors import read_tensors
from unlearnd.translog import (
    Translog,
    apply_key_leaf,
    detail_path,
    read_detail,
    receipt_path,
    replace_missing_keys,
    trust,
)
from unlearnd.verify.receipts import Detail
from unlearnd.verify.receipts import read_detail as parse_detail
from unlearnd.verify.trust import check_head, read_head, read_trust

ACTOR = "restore"
MAX_DETAIL = 2**30
_RECEIPT = re.compile(r"evidence/receipts/([0-9a-f]{32})\.receipt\.json")
Lost = tuple[str, ...] | tuple[str, str, int, int]


@dataclass(frozen=True)
class Rolled:
    """What happened after a backup, and what became of it."""

    leaves: int = 0
    """Leaves of the log that the backup lacked."""
    erased: tuple[str, ...] = ()
    """Requests that were carried out again."""
    points: int = 0
    """Points that they took out of the backup's ledger."""
    lost: tuple[Lost, ...] = ()
    """("slice", dataset, shard, slice), ("dataset", name), ("model", name), ("request", id): not brought back."""
    rotated: tuple[str, ...] = ()
    """Roles whose key was changed after the backup, and which have a new one now."""


def roll_forward(
    translog: Translog,
    later: Later,
    export: Storage | None,
    policies: Callable[[str], Policy | None],
    now: datetime,
    accept: bool,
    slot_key: bytes | None = None,
) -> Rolled:
    """Catch up with the log; refuse, with nothing changed in storage, what would lose something, unless that is fine.

    The ledger is a copy that nobody uses yet: killed, this begins anew. `export` is where documents and receipts are
    that storage lacks. `slot_key` opens what an encrypted store has rewritten since the backup.
    """
    ledger, begin = translog.ledger, log.size_now(translog.ledger)
    since = read_since(later.leaves, begin)
    _append(translog, later, since)
    _fetch_documents(translog, export, since)
    details = {request: _detail_of(translog, said) for request, (_, said) in since.receipts.items()}
    moves = find_moves(ledger, later, since, details)
    gone = moves.gone
    _hold(ledger, later, since, moves, now)
    _mark(ledger, since, details, gone, now)
    _enter_requests(translog, since, details, moves, later, policies, now)
    lost, orphans = _match_storage(ledger, translog.storage, now, slot_key)
    unread = bool(lost) and translog.storage.vault is not None
    lost += _roots(ledger, translog.storage, since, now)
    known = {dataset.name for dataset in points.datasets(ledger)}
    lost += [("dataset", name) for name in since.datasets if name not in known]
    there = {model.name for model in models.models(ledger, retired=True)}
    lost += [("model", name) for name in since.models if name not in there]
    lost += [("request", request) for request in _open_requests(ledger, since)]
    # A slice of which an object is lost has another root, too.
    lost = list(dict.fromkeys(lost))
    # Features and unfinished objects are nobody's loss: a build makes the ones anew, and nobody finishes the others.
    data = [name for name in orphans if name.endswith(".safetensors")]
    if (lost or data) and not accept:
        raise RefusedError(_sentence(lost, data, sealed=unread))
    rotated = replace_missing_keys(translog, stamp(now))
    _conclude(translog, since, lost, begin if later.leaves or lost else None, now)
    _clean(ledger, translog.storage, orphans, now)
    taken = sum(len(mine) for places in gone.values() for by in places.values() for mine in by.values())
    return Rolled(len(later.leaves), tuple(since.receipts), taken, tuple(lost), rotated)


def check_covers(translog: Translog, later: Later, head: bytes | None) -> None:
    """Raise unless the log that can be caught up with has all that storage and a tree head somebody kept show."""
    ledger = translog.ledger
    begin = log.size_now(ledger)
    size = max(begin, later.size)
    if head is not None and (kept := read_head(head)[1].size) > size:
        raise RefusedError(
            f"the tree head kept is of a log with {kept} leaves, and of this one there are {size}: what happened in "
            "between would be lost, and the log would contradict what is signed; restore a newer backup, or give the "
            "exported log with --log"
        )
    stated = {entry.request_id for entry in log.receipt_entries(ledger)} | read_since(
        later.leaves, begin
    ).receipts.keys()
    shown = {found[1] for name in translog.shelf.list("evidence/receipts") if (found := _RECEIPT.fullmatch(name))}
    if since := shown - stated:
        raise RefusedError(
            f"{len(since)} requests were carried out after this backup was made: there are receipts for them, the "
            f"first for {min(since)}, and neither the backup's log nor a copy of it has them; give the exported log "
            "with --log, or restore a newer backup"
        )


def _append(translog: Translog, later: Later, since: Since) -> None:
    """Append what the ledger lacks, and see that the whole is what was signed: history is never rewritten."""
    ledger = translog.ledger
    if not later.size:
        return
    with ledger.write() as connection:
        log.append(connection, later.leaves)
        for index, said in since.keys:
            apply_key_leaf(connection, index, said)
    note, head = read_head(later.note.encode())
    check_head(note, head, read_trust(trust(translog)))
    if log.root_of_first(ledger, head.size) != head.root:
        raise RefusedError(
            f"the backup's log and that of the tree head of {head.size} leaves are not one log: what both should begin "
            "with differs; this backup is of another history, and nothing is put in place"
        )
    log.keep_head(ledger, head.size, later.note)


def _fetch_documents(translog: Translog, export: Storage | None, since: Since) -> None:
    """Bring documents and receipts into storage that only the exported log has."""
    if export is None:
        return
    wanted = {detail_path(digest): f"detail/{digest}.json" for digest in since.documents}
    wanted |= {receipt_path(request): f"receipts/{request}.receipt.json" for request in since.receipts}
    there = {*translog.shelf.list("evidence/detail"), *translog.shelf.list("evidence/receipts")}
    for name, exported in wanted.items():
        if name not in there:
            try:
                translog.shelf.create_new(name, export.read(exported))
            except NotFoundError:
                continue  # whoever needs it says so


def _detail_of(translog: Translog, said: Mapping[str, Any]) -> Detail:
    try:
        return parse_detail(read_detail(translog, said["detail"]["digest"]["sha256"]), MAX_DETAIL)
    except NotFoundError as error:
        raise RefusedError(
            f"the erasure of request {said['requestId']} cannot be carried out again: {error}; give the exported log, "
            "which has it, with --log"
        ) from None


def _hold(ledger: Ledger, later: Later, since: Since, moves: Moves, now: datetime) -> None:
    """Keep out of training what holds keep out of it now, and note what they moved and where it stood."""
    out: dict[tuple[str, int, int], list[int]] = {}
    for places in moves.held.values():
        for place, positions in places.items():
            out.setdefault(place, []).extend(positions)
    changed: list[tuple[int, bytes, int]] = []
    for dataset in points.datasets(ledger):
        for shard in range(1, dataset.shards + 1):
            for segment, end in _until(points.segments_of(ledger, dataset.id, shard), dataset.points):
                mine = np.array(out.get((dataset.name, shard, segment.slice), []), np.int64)
                held = np.sort(mine[(mine >= segment.first) & (mine < end)])
                if not np.array_equal(held, unpack(segment.held)):
                    live = segment.rows - len(np.union1d(unpack(segment.dropped), held))
                    changed.append((segment.id, pack(held) if len(held) else b"", live))
    stood = {(place, was, is_): (place, was, is_, at) for place, was, is_, at in later.holds}
    kept = {r.request_id: r for r in restrictions.all_restrictions(ledger) if r.in_force}
    rows: dict[str, list[LaterHold]] = {
        request: [LaterHold(r.id, request, r.handle, "", r.taken)] for request, r in kept.items()
    }
    for leaf in since.holds:
        if leaf.request not in moves.handles:
            continue  # on slices that came after the backup, which are lost
        changes = [((d, k, s), was, is_) for d, k, s, _, was, is_ in leaf.slices]
        moved = tuple(stood.get(change) or (*change, ()) for change in changes)
        mine_ = rows.setdefault(leaf.request, [])
        # A long list is cut into several leaves, and is one hold.
        if not leaf.returned and not (mine_ and mine_[-1].returned_at is None and mine_[-1].restricted_at == leaf.at):
            mine_.append(LaterHold(draw_id(), leaf.request, moves.handles[leaf.request], leaf.at, ()))
        last = mine_[-1]
        mine_[-1] = (
            replace(last, returned_at=leaf.at, returned=(*last.returned, *moved))
            if leaf.returned
            else replace(last, taken=(*last.taken, *moved))
        )
    with ledger.write() as connection:
        entering.enter_holds(connection, changed, [one for listed in rows.values() for one in listed], stamp(now))


def _until(segments: Sequence[Segment], points_: int) -> Iterator[tuple[Segment, int]]:
    """Yield segments with the position at which the next one of their slice begins."""
    for segment in segments:
        firsts = [s.first for s in segments if s.slice == segment.slice and s.first > segment.first]
        yield segment, min(firsts, default=points_)


def _mark(ledger: Ledger, since: Since, details: Mapping[str, Detail], gone: Gone, now: datetime) -> None:
    """Take the points out of the ledger, destroy the keys, retire models: as the erasures did."""
    by_place: dict[Place, list[int]] = {}
    handles: set[bytes] = set()
    for_good: set[bytes] = set()
    for request, places in gone.items():
        whole = since.receipts[request][1]["asked"] in ("user", "dataset")
        for place, by_owner in places.items():
            by_place.setdefault(place, []).extend(p for mine in by_owner.values() for p in mine)
            handles |= by_owner.keys()
            for_good |= by_owner.keys() if whole else set()
    retired = {
        entry[0]
        for request, detail in details.items()
        if since.receipts[request][1]["asked"] in ("dataset", "model")
        for entry in detail.models
    }
    ids = [m.id for m in models.models(ledger, retired=True) if m.name in retired and m.retired_at is None]
    take_out(ledger, by_place, handles, for_good, ids, now)


def take_out(
    ledger: Ledger,
    by_place: Mapping[Place, Sequence[int]],
    handles: Iterable[bytes],
    for_good: set[bytes],
    retired: Sequence[int],
    now: datetime,
) -> None:
    """Take points out of holdings and segments; users `for_good` who have none left lose their key."""
    datasets = {dataset.name: dataset for dataset in points.datasets(ledger)}
    out = {(datasets[name].id, shard, slice_): np.unique(p) for (name, shard, slice_), p in by_place.items() if p}
    whole: list[Holding] = []
    shrunk: list[tuple[Holding, int, bytes]] = []
    left: set[bytes] = set()
    for holding in points.holdings_of(ledger, list(handles)):
        going = out.get((holding.dataset_id, holding.shard, holding.slice))
        mine = unpack(holding.positions)
        staying = mine if going is None else np.setdiff1d(mine, going)
        if len(staying):
            left.add(holding.handle)
        if not len(staying):
            whole.append(holding)
        elif len(staying) < len(mine):
            shrunk.append((holding, int(staying[0]), pack(staying)))
    dropped: list[tuple[int, bytes, int]] = []
    for (dataset_id, shard, slice_), positions in out.items():
        segments = points.segments_of(ledger, dataset_id, shard, slice_)
        which = np.searchsorted([segment.first for segment in segments], positions, side="right") - 1
        for number in np.unique(which).tolist():
            dropped.append(_drop(segments[number], positions[which == number]))
    touched = sorted({(dataset_id, shard) for dataset_id, shard, _ in out})
    marking = Marking(dropped, [], whole, shrunk, sorted(for_good - left), {}, touched, [], list(retired))
    if not erasures.mark_erased(ledger, "", marking, now):
        raise DamagedStoreError("the backup's ledger lists points of somebody who was erased, and not all were found")


def _drop(segment: Segment, positions: Positions) -> tuple[int, bytes, int]:
    together = np.union1d(unpack(segment.dropped), positions)
    return segment.id, pack(together), segment.rows - len(np.union1d(together, unpack(segment.held)))


def _enter_requests(
    translog: Translog,
    since: Since,
    details: Mapping[str, Detail],
    moved: Moves,
    later: Later,
    policies: Callable[[str], Policy | None],
    now: datetime,
) -> None:
    """Enter the requests and erasures that the log has and the ledger has not, or not that far."""
    ledger = translog.ledger
    bodies = {digest: policies(name) for digest, (name, _, _) in since.policies.items()}
    found = {digest: policy for digest, policy in bodies.items() if policy is not None and policy.digest == digest}
    names = {digest: name for digest, (name, _, _) in since.policies.items()}
    kept_here = {kept.digest: kept.name for kept in dockets.kept_policies(ledger)}
    names |= kept_here
    known = found.keys() | kept_here.keys()
    entries = {entry.id: entry for entry in dockets.entries(ledger)}
    there = set(translog.shelf.list("evidence/receipts"))
    closed: list[tuple[Entry, str]] = []
    carried: list[LaterRequest] = []
    numbers: dict[str, int] = {}
    for request, (leaf, said) in since.receipts.items():
        entry = entries.get(request) or _entry(since.requests[request], names, known, request)
        at = said["influenceRemovedAt"]
        moves = entry.moves + 1 if request in entries else 2
        target = _target(said, details[request], moved.gone.get(request, {}))
        entry = _but(entry, state="completed", closed_at=at, nonce=None, moves=moves, commitment=said["userCommitment"])
        entry = entry if request in entries else _but(entry, **target)
        closed.append((entry, ""))
        number = numbers[said["erasureId"]] = numbers.get(said["erasureId"], -1) + 1
        policy = found.get(entry.policy_digest)
        key_id = _key_of(translog, request) if receipt_path(request) in there else None
        outcome = _outcome(details[request], said, later.places.get(request, ()))
        suppressed = entry.handle is not None and (policy is None or policy.records.suppression_list)
        detail = said["detail"]["digest"]["sha256"]
        carried.append(LaterRequest(entry, said["erasureId"], number, outcome, leaf, detail, key_id, suppressed))
    for request, (reason, at) in since.closed.items():
        state = reason if reason in ("duplicate", "withdrawn") else "refused"
        fresh = request not in entries
        entry = _entry(since.requests[request], names, known, request) if fresh else entries[request]
        moves = 2 if fresh else entry.moves + 1
        closed.append((_but(entry, state=state, closed_at=at, nonce=None, moves=moves), reason))
    still_open = entries.keys() - since.receipts.keys() - since.closed.keys()
    due = {request: at for request, at in since.due.items() if request in still_open}
    paused = {request: at for request, (until, at, _) in since.paused.items() if request in still_open and not until}
    held: list[Entry] = []
    for request, (until, at, why) in since.paused.items():
        if until and (request in still_open or request in moved.handles):
            entry = entries.get(request) or _entry(since.requests[request], names, known, request)
            rules = found.get(entry.policy_digest) or policy_of(ledger, entry)
            review = day_of(rules, moment_from(until))
            held.append(_held(entry, str(review), at, why, entry.handle or moved.handles.get(request)))
    lifted = [entries[request] for request in still_open & (since.resumed | paused.keys())]
    begun: dict[str, list[str]] = {}
    for request, erasure in since.begun.items():
        if request in entries and request not in since.receipts:
            begun.setdefault(erasure, []).append(request)
    with ledger.write() as connection:
        kept = [(d, names[d], p.as_json(), since.policies[d][1], since.policies[d][2]) for d, p in found.items()]
        entering.enter_policies(connection, kept)
        entering.enter_closed(connection, closed, ACTOR)
        entering.enter_erasures(connection, _erasures(ledger, since, details), carried)
        entering.lift_holds(connection, [entry for entry in lifted if entry.state == "on_hold"], ACTOR, stamp(now))
        entering.set_clocks(connection, due, paused)
        entering.enter_held(connection, held, ACTOR)
        for erasure, ids in begun.items():
            entering.begin_again(connection, erasure, ids, stamp(now))


def _erasures(ledger: Ledger, since: Since, details: Mapping[str, Detail]) -> list[LaterErasure]:
    ids = {dataset.name: dataset.id for dataset in points.datasets(ledger)}
    found: dict[str, LaterErasure] = {}
    touched: dict[str, set[tuple[int, int]]] = {}
    for request, (_, said) in since.receipts.items():
        erasure = said["erasureId"]
        places = touched.setdefault(erasure, set())
        places |= {(ids[entry[0]], entry[1]) for entry in details[request].slices if entry[0] in ids}
        received = min(said["request"]["receivedAt"], found[erasure].received_at if erasure in found else "9")
        rebuilt = since.rebuilt.get(erasure)
        found[erasure] = LaterErasure(erasure, received, said["influenceRemovedAt"], rebuilt, sorted(places))
    return list(found.values())


def _entry(said: Mapping[str, Any], names: Mapping[str, str], known: Iterable[str], request: str) -> Entry:
    """Return a request as far as its leaf tells."""
    named = said.get("policy", "")
    digest = named if named in set(known) else ""
    return Entry(
        id=request,
        leaf=said["leaf"],
        asked=said["kind"],
        state="received",
        policy=names.get(named, ""),
        policy_digest=digest,
        ground="",
        requester="operator",
        identity="",
        received_at=said["receivedAt"],
        due_at=said["dueAt"],
        extended=False,
        paused_days=0,
        moves=1,
        **dict.fromkeys(
            (
                *("handle", "dataset", "position", "model", "acknowledge_by", "acknowledged_at", "paused_at"),
                *("resume_state", "hold_basis", "hold_approver", "hold_review", "duplicate_of", "reference"),
                *("commitment", "nonce", "closed_at"),
            )
        ),
    )


def _held(entry: Entry, review: str, at: str, why: str, handle: bytes | None) -> Entry:
    """Return a request as it is on hold; who approved that, no log says."""
    resumed = entry.resume_state if entry.state == "on_hold" else entry.state
    hold = {"hold_basis": why, "hold_approver": ACTOR, "hold_review": review, "paused_at": entry.paused_at or at}
    if entry.handle is None and handle is not None:
        # What its receipt was to commit to went with the ledger. In its place something that nobody can open.
        hold["commitment"] = draw_nonce().hex()
    return _but(entry, state="on_hold", resume_state=resumed, handle=handle, moves=entry.moves + 1, **hold)


def _but(entry: Entry, **changes: Any) -> Entry:
    return Entry(**{**entry.__dict__, **changes})


def _target(said: Mapping[str, Any], detail: Detail, taken: Mapping[Place, Mapping[bytes, Sequence[int]]]) -> Any:
    """Return whose or what a request was about, as far as the older ledger knows."""
    if said["asked"] == "user":
        owners = {handle for by_owner in taken.values() for handle in by_owner}
        return {"handle": min(owners)} if len(owners) == 1 else {}
    if said["asked"] == "model":
        return {"model": detail.models[0][0] if detail.models else None}
    dataset = detail.slices[0][0] if detail.slices else None
    if said["asked"] == "dataset":
        return {"dataset": dataset}
    positions = [p for by_owner in taken.values() for mine in by_owner.values() for p in mine]
    return {"dataset": dataset, "position": positions[0] if positions else None}


def _outcome(detail: Detail, said: Mapping[str, Any], places: Sequence[Sequence[int]]) -> dict[str, Any]:
    slices = [
        {"dataset": d, "shard": s, "slice": r, "points": n, "root_before": b or None, "root_after": a or None}
        for d, s, r, n, b, a in detail.slices
    ]
    whole = {"retired": [entry[0] for entry in detail.models]} if said["asked"] in ("dataset", "model") else {}
    return {
        "points": len(detail.erased),
        "erased_root": said["erased"]["root"] if detail.erased else None,
        "places": [list(place) for place in places],
        "slices": slices,
        "checkpoints": [
            {"model": m, "shard": s, "slice": r, "recipe": recipe, "file": file, "tensors": tensors}
            for m, s, r, recipe, file, tensors in detail.destroyed
        ],
        "kept": [list(one) for one in detail.objects_kept],
        **whole,
    }


def _key_of(translog: Translog, request: str) -> str | None:
    """Return the key that signed a receipt that is there; None where it is to be written anew."""
    try:
        return str(json.loads(translog.shelf.read(receipt_path(request)))["envelope"]["signatures"][0]["keyid"])
    except (ValueError, LookupError, TypeError, NotFoundError):
        return None


def _open_requests(ledger: Ledger, since: Since) -> list[str]:
    """Return the requests that came in later and were neither carried out nor closed: whose they are, nobody knows."""
    with ledger.read() as connection:
        known = dockets.by_ids(connection, list(since.requests))
    return [request for request in since.requests if request not in known]


def _match_storage(
    ledger: Ledger, storage: Storage, now: datetime, slot_key: bytes | None
) -> tuple[list[Lost], list[str]]:
    """Have the ledger name the slice data that storage has; return what is lost of it, and objects nobody knows."""
    names = set(storage.list("data"))
    lost: list[Lost] = []
    known: set[str] = set()
    for dataset in points.datasets(ledger):
        rows = _every_position(ledger, dataset)
        for shard in range(1, dataset.shards + 1):
            for segment in points.segments_of(ledger, dataset.id, shard):
                if segment.path not in names:
                    lost += _replace(ledger, storage, dataset, segment, names, rows, now, slot_key)
        known |= points.all_segment_paths(ledger, dataset.id)
        for shard in range(1, dataset.shards + 1):
            known |= {kept.path for kept in features.kept_features(ledger, dataset.id, shard)}
    return lost, sorted(names - known)


def _every_position(ledger: Ledger, dataset: Dataset) -> dict[tuple[int, int], Positions]:
    lists: dict[tuple[int, int], list[Positions]] = {}
    for holding in points.holdings_in(ledger, dataset.id):
        lists.setdefault((holding.shard, holding.slice), []).append(unpack(holding.positions))
    return {place: np.sort(np.concatenate(some)) for place, some in lists.items()}


def _replace(
    ledger: Ledger,
    storage: Storage,
    dataset: Dataset,
    segment: Segment,
    names: set[str],
    rows: Mapping[tuple[int, int], Positions],
    now: datetime,
    slot_key: bytes | None,
) -> list[Lost]:
    """Put what an erasure wrote in the place of a segment that it rewrote; where there is none, the rows are lost."""
    place = (segment.shard, segment.slice)
    firsts = [s.first for s in points.segments_of(ledger, dataset.id, *place)]
    following = min((first for first in firsts if first > segment.first), default=dataset.points)
    inside = rows.get(place, np.array([], np.int64))
    expected = inside[(inside >= segment.first) & (inside < following)]
    new = None
    if len(expected):
        new = _rewritten(storage, dataset, segment, names, expected, slot_key)
    lost = new is None and len(expected) > 0
    if lost:
        handles = [h.handle for h in points.holdings_in(ledger, dataset.id) if (h.shard, h.slice) == place]
        take_out(ledger, {(dataset.name, *place): expected.tolist()}, handles, set(), [], now)
    points.swap_segment(ledger, segment, new, now)
    return [("slice", dataset.name, *place)] if lost else []


def _rewritten(
    storage: Storage,
    dataset: Dataset,
    segment: Segment,
    names: set[str],
    expected: Positions,
    slot_key: bytes | None,
) -> NewSegment | None:
    """Return the object that has exactly the rows expected; an encrypted one can be read if it has a slot for us."""
    begins = f"{folder_of(dataset.name, segment.shard, segment.slice)}/{segment.first:012d}-"
    for name in sorted(names):
        if name.startswith(begins) and name.endswith(".safetensors"):
            data = storage.read(name)
            key = None
            if storage.vault is not None:
                key = key_in_slot(name, data, slot_key) if slot_key is not None else None
                if key is None:
                    continue
            found = read_tensors(opened(storage.vault, name, data, key), name).get("position")
            if found is not None and np.array_equal(found, expected):
                digest, count = digest_of(data), len(expected)
                return NewSegment(segment.shard, segment.slice, segment.first, name, digest, count, key)
    return None


def _roots(ledger: Ledger, storage: Storage, since: Since, now: datetime) -> list[Lost]:
    """Enter the slice roots that the log has, where the rows there are give them; return the slices that do not."""
    lost: list[Lost] = []
    good: list[tuple[int, int, int, str]] = []
    sealed: list[tuple[int, int]] = []
    for dataset in points.datasets(ledger):
        logged = {place[1:]: root for place, (root, _) in since.roots.items() if place[0] == dataset.name}
        last = points.generations(ledger, dataset.id)[-1].last_slice
        lost += [("slice", dataset.name, *place) for place in logged if place[1] > last]
        for generation in points.generations(ledger, dataset.id):
            mine = {p: r for p, r in logged.items() if generation.first_slice <= p[1] <= generation.last_slice}
            now_roots = _computed(ledger, storage, dataset, mine)
            wrong = [place for place, root in mine.items() if now_roots[place] != root]
            if generation.sealed:
                good += [(dataset.id, *place, now_roots[place]) for place in mine]
            elif mine and not wrong:
                good += [(dataset.id, *place, root) for place, root in mine.items()]
                sealed.append((dataset.id, generation.number))
            # Slices that took points after the backup, before they were closed, are open again: all of them.
            out = wrong if generation.sealed or not wrong else list(mine)
            lost += [("slice", dataset.name, *place) for place in out]
    with ledger.write() as connection:
        entering.set_roots(connection, good)
        for dataset_id, number in sealed:
            entering.seal_generation(connection, dataset_id, number, stamp(now))
    return lost


def _computed(
    ledger: Ledger, storage: Storage, dataset: Dataset, places: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Digest]:
    by_shard: dict[int, list[int]] = {}
    for shard, slice_ in places:
        by_shard.setdefault(shard, []).append(slice_)
    return {
        (shard, slice_): root
        for shard, slices in by_shard.items()
        for slice_, root in compute_roots(ledger, storage, dataset, shard, slices).items()
    }


def _conclude(translog: Translog, since: Since, lost: Sequence[Lost], size: int | None, now: datetime) -> None:
    """Log what is not brought back, and that checkpoints made since are gone: log and ledger say the same again."""
    ledger, at = translog.ledger, stamp(now)
    rows: dict[tuple[str, str], tuple[models.Model, models.Checkpoint]] = {
        (model.name, checkpoint.recipe): (model, checkpoint)
        for model in models.models(ledger, retired=True)
        for checkpoint in models.checkpoints_of(ledger, model.id)
    }
    ended: dict[str, list[tuple[int, int, str, str]]] = {}
    for (name, recipe), built in since.checkpoints.items():
        found = rows.get((name, recipe))
        if found is not None and (built is None or built[2] != found[1].file):
            by = since.destroyed_by.get((name, recipe)) or None if built is None else None
            models.checkpoints_destroyed(ledger, found[0].dataset_id, [found[1].id], by, [], now)
            found = None
        if built is not None and found is None:
            ended.setdefault(name, []).append((built[0], built[1], recipe, built[2]))
    leaves = [leaf for name, gone in ended.items() for leaf in checkpoints_destroyed(name, "", gone, at)]
    requests = [entry[1] for entry in lost if entry[0] == "request"]
    leaves += [request_closed(str(request), "lost", at) for request in requests]
    if size is not None:
        leaves += store_restored(size, lost, at)
    leaves += _new_roots(ledger, translog.storage, lost, at)
    names = {kept.digest: kept.name for kept in dockets.kept_policies(ledger)}
    closed = [_entry(since.requests[str(request)], names, names.keys(), str(request)) for request in requests]
    with ledger.write() as connection:
        log.append(connection, leaves)
        entering.enter_closed(
            connection, [(_but(e, state="refused", closed_at=at, moves=2), "lost") for e in closed], ACTOR
        )


def _new_roots(ledger: Ledger, storage: Storage, lost: Sequence[Lost], at: str) -> list[bytes]:
    """Return the leaves of the roots that slices begin anew with, where some of their rows are lost."""
    leaves: list[bytes] = []
    for dataset in points.datasets(ledger):
        sealed = points.sealed_slices(ledger, dataset.id)
        cut = {(int(e[2]), int(e[3])) for e in lost if e[0] == "slice" and e[1] == dataset.name and int(e[3]) <= sealed}
        roots = _computed(ledger, storage, dataset, sorted(cut))
        counts = points.counts_of(ledger, dataset.id)
        with ledger.write() as connection:
            entering.set_roots(connection, [(dataset.id, *place, root) for place, root in roots.items()])
        entries = [(*place, root, counts.get(place, 0)) for place, root in roots.items()]
        leaves += slices_sealed(dataset.name, entries, at)
    return leaves


def _clean(ledger: Ledger, storage: Storage, orphans: Sequence[str], now: datetime) -> None:
    """Destroy in storage what holds erased points or was made from them, and what no ledger knows."""
    storage.destroy(orphans)
    for dataset in points.datasets(ledger):
        for shard in range(1, dataset.shards + 1):
            rewrite_dropped(ledger, storage, dataset, shard, now)
    known = {model.name: model for model in models.models(ledger, retired=True)}
    strange = [name for name in storage.list("checkpoints") if name.split("/")[1] not in known]
    storage.destroy(strange)
    for model in known.values():
        for standing in standings(ledger, model):
            clean = {checkpoint.path for checkpoint in standing.chain}
            misfits = [c for c in models.checkpoints_of(ledger, model.id, standing.shard) if c.path not in clean]
            destroy_all_but(storage, model.name, standing.shard, clean)
            gone = [(c.shard, c.slice, c.recipe, c.file) for c in misfits]
            leaves = checkpoints_destroyed(model.name, "", gone, stamp(now))
            if misfits:
                models.checkpoints_destroyed(ledger, model.dataset_id, [c.id for c in misfits], None, leaves, now)
    destroy_unnamed(ledger, storage)
    ledger.scrub()


def _sentence(lost: Sequence[Lost], orphans: Sequence[str], sealed: bool) -> str:
    """Return what would be lost, so that a person can decide."""
    told = []
    for kind, what in (("dataset", "datasets"), ("model", "models"), ("slice", "slices"), ("request", "requests")):
        mine = [" ".join(map(str, entry[1:])) for entry in lost if entry[0] == kind]
        if mine:
            told.append(f"{len(mine)} {what} ({', '.join(mine[:3])}{', …' if len(mine) > 3 else ''})")
    if orphans:
        told.append(f"{len(orphans)} objects of slice data that it does not know (the first {orphans[0]})")
    keys = " (what was written since is encrypted under keys that this backup cannot open)" if sealed else ""
    return (
        f"the backup is older than {'; '.join(told)}, and no log brings these back{keys}; restore a newer backup, or "
        "give them up with --accept-losses: later erasures are carried out again in either case"
    )
