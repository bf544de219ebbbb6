"""Enter into a ledger from a backup what the log says happened since: only what a log can tell of each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from unlearnd.ledger import dockets
from unlearnd.ledger.connection import Ledger, many
from unlearnd.ledger.dockets import Entry, Transition
from unlearnd.ledger.restrictions import Stood, as_json


@dataclass(frozen=True)
class LaterErasure:
    """An erasure that was carried out after the backup."""

    id: str
    received_at: str
    removed_at: str
    rebuilt_at: str | None
    touched: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class LaterRequest:
    """What came of a request that was carried out after the backup."""

    entry: Entry
    erasure_id: str
    number: int
    outcome: Mapping[str, Any]
    leaf: int
    detail: str
    key_id: str | None
    suppressed: bool


@dataclass(frozen=True)
class LaterHold:
    """A hold that took points out of training, before the backup or after it, and what has become of it."""

    id: str
    request_id: str
    handle: bytes
    restricted_at: str
    """Empty where the backup's ledger has it."""
    taken: tuple[Stood, ...]
    returned_at: str | None = None
    returned: tuple[Stood, ...] = ()


def enter_policies(connection: Connection, kept: Iterable[tuple[str, str, Mapping[str, Any], int, str]]) -> None:
    """Enter policies that leaves name: (digest, name, body, leaf, since)."""
    for digest, name, body, leaf, since in kept:
        connection.exec_driver_sql("DELETE FROM policy WHERE digest = ?", (digest,))
        connection.exec_driver_sql(
            "INSERT INTO policy (digest, name, body, leaf, since) VALUES (?, ?, ?, ?, ?)",
            (digest, name, json.dumps(body), leaf, since),
        )


def enter_closed(connection: Connection, closed: Sequence[tuple[Entry, str]], actor: str) -> None:
    """Enter requests that are closed, as they stand, with why; those known already only change their state."""
    before = dockets.by_ids(connection, [entry.id for entry, _ in closed])
    dockets.enter(connection, [entry for entry, _ in closed if entry.id not in before])
    steps: list[tuple[str, Transition]] = []
    for entry, why in closed:
        old = before.get(entry.id)
        action = {"completed": "complete", "withdrawn": "withdraw", "duplicate": "duplicate"}.get(entry.state, "refuse")
        if old is None:
            steps.append((entry.id, Transition(0, entry.received_at, "receive", "", "received", actor, "", "")))
        else:
            connection.exec_driver_sql(
                "UPDATE docket SET state = ?, closed_at = ?, nonce = NULL, moves = ?, due_at = ? WHERE id = ?",
                (entry.state, entry.closed_at, entry.moves, entry.due_at, entry.id),
            )
        stood, at = old.state if old else "received", entry.closed_at or ""
        steps.append((entry.id, Transition(entry.moves - 1, at, action, stood, entry.state, actor, why, "")))
    dockets.note(connection, steps)


def enter_erasures(connection: Connection, done: Sequence[LaterErasure], requests: Sequence[LaterRequest]) -> None:
    """Enter erasures that were carried out, their requests and receipts; what is known already is completed."""
    many(
        connection,
        "INSERT INTO erasure (id, received_at, marked_at, influence_removed_at, rebuilt_at, touched) "
        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET marked_at = excluded.marked_at, "
        "influence_removed_at = excluded.influence_removed_at, rebuilt_at = excluded.rebuilt_at",
        [
            (e.id, e.received_at, e.removed_at, e.removed_at, e.rebuilt_at, json.dumps(sorted(map(list, e.touched))))
            for e in done
        ],
    )
    many(
        connection,
        "INSERT INTO request (id, erasure_id, number, handle, dataset, position, leaf, commitment, outcome) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, nonce = NULL",
        [
            (
                *(r.entry.id, r.erasure_id, r.number, r.entry.handle, r.entry.dataset, r.entry.position),
                *(r.entry.leaf, r.entry.commitment, json.dumps(r.outcome)),
            )
            for r in requests
        ],
    )
    many(
        connection,
        "INSERT INTO receipt (request_id, leaf, detail, key_id) VALUES (?, ?, ?, ?)",
        [(r.entry.id, r.leaf, r.detail, r.key_id) for r in requests],
    )
    for request in requests:
        if request.suppressed and request.entry.handle is not None:
            dockets.suppress(connection, [request.entry.handle], request.entry.closed_at or "")


def begin_again(connection: Connection, erasure_id: str, ids: Sequence[str], at: str) -> None:
    """Enter an erasure that was begun and not ended, of requests that are known: whoever comes next carries it out."""
    found = dockets.by_ids(connection, ids)
    connection.exec_driver_sql(
        "INSERT INTO erasure (id, received_at, touched) VALUES (?, ?, '[]') ON CONFLICT (id) DO NOTHING",
        (erasure_id, at),
    )
    many(
        connection,
        "INSERT INTO request (id, erasure_id, number, handle, dataset, position, leaf, commitment, nonce) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        [
            (e.id, erasure_id, n, e.handle, e.dataset, e.position, e.leaf, e.commitment, e.nonce)
            for n, e in enumerate(found.values())
        ],
    )
    many(connection, "UPDATE docket SET state = 'executing', nonce = NULL WHERE id = ?", [(one,) for one in found])


def set_clocks(connection: Connection, due: Mapping[str, str], paused: Mapping[str, str]) -> None:
    """Enter when requests that are known are due now, and since when those wait that were asked who they are."""
    many(
        connection,
        "UPDATE docket SET due_at = ?, paused_at = NULL WHERE id = ?",
        [(at, request) for request, at in due.items()],
    )
    many(
        connection,
        "UPDATE docket SET state = 'awaiting_identity', paused_at = ? WHERE id = ?",
        [(at, request) for request, at in paused.items()],
    )


def enter_holds(
    connection: Connection, segments: Sequence[tuple[int, bytes, int]], holds: Sequence[LaterHold], at: str
) -> None:
    """Enter what is out of training now, as (segment id, positions held, live points), and which holds moved what."""
    many(
        connection,
        "UPDATE segment SET held = ?, live = ? WHERE id = ?",
        [(held or None, live, segment_id) for segment_id, held, live in segments],
    )
    many(
        connection,
        "INSERT INTO restriction (id, request_id, handle, restricted_at, taken, cleaned_at) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (h.id, h.request_id, h.handle, h.restricted_at, json.dumps(as_json(h.taken)), at)
            for h in holds
            if h.restricted_at
        ],
    )
    many(
        connection,
        "UPDATE restriction SET returned_at = ?, returned = ?, cleaned_at = ? WHERE id = ?",
        [(h.returned_at, json.dumps(as_json(h.returned)), at, h.id) for h in holds if h.returned_at is not None],
    )


def enter_held(connection: Connection, held: Sequence[Entry], actor: str) -> None:
    """Enter requests that are on hold, as they stand; those known already are put on hold."""
    before = dockets.by_ids(connection, [entry.id for entry in held])
    dockets.enter(connection, [entry for entry in held if entry.id not in before])
    steps: list[tuple[str, Transition]] = []
    for entry in held:
        old = before.get(entry.id)
        if old is None:
            steps.append((entry.id, Transition(0, entry.received_at, "receive", "", "received", actor, "", "")))
        stood, at, why = old.state if old else "received", entry.paused_at or "", entry.hold_basis or ""
        steps.append((entry.id, Transition(entry.moves - 1, at, "hold", stood, "on_hold", actor, why, "")))
    many(
        connection,
        "UPDATE docket SET state = 'on_hold', paused_at = ?, resume_state = ?, hold_basis = ?, hold_approver = ?, "
        "hold_review = ?, moves = ? WHERE id = ?",
        [
            (e.paused_at, e.resume_state, e.hold_basis, e.hold_approver, e.hold_review, e.moves, e.id)
            for e in held
            if e.id in before
        ],
    )
    dockets.note(connection, steps)


def lift_holds(connection: Connection, lifted: Sequence[Entry], actor: str, at: str) -> None:
    """Enter that requests the ledger has on hold are on hold no more: each goes on where it was."""
    many(
        connection,
        "UPDATE docket SET state = ?, paused_at = NULL, resume_state = NULL, hold_basis = NULL, hold_approver = NULL, "
        "hold_review = NULL, moves = ? WHERE id = ?",
        [(entry.resume_state or "received", entry.moves + 1, entry.id) for entry in lifted],
    )
    steps = [
        (e.id, Transition(e.moves, at, "release", "on_hold", e.resume_state or "received", actor, "", ""))
        for e in lifted
    ]
    dockets.note(connection, steps)


def set_roots(connection: Connection, roots: Iterable[tuple[int, int, int, str]]) -> None:
    """Enter slice roots: (dataset id, shard, slice, root)."""
    many(
        connection,
        "INSERT INTO slice (dataset_id, shard, slice, root) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (dataset_id, shard, slice) DO UPDATE SET root = excluded.root",
        roots,
    )


def seal_generation(connection: Connection, dataset_id: int, number: int, at: str) -> None:
    """Close a run of slices to new points."""
    connection.exec_driver_sql(
        "UPDATE generation SET sealed_at = ? WHERE dataset_id = ? AND number = ? AND sealed_at IS NULL",
        (at, dataset_id, number),
    )


def marked_erasures(ledger: Ledger) -> set[str]:
    """Return the erasures whose points were marked already."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT id FROM erasure WHERE marked_at IS NOT NULL")
        return {row[0] for row in rows}
