"""Holds on data: whose points are out of training without being erased, and where they stood."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from unlearnd.digests import Digest
from unlearnd.ledger.connection import Ledger, many, stamp
from unlearnd.ledger.log import append

Stood = tuple[tuple[str, int, int], str, str, tuple[tuple[int, bytes], ...]]
"""A slice (dataset, shard, slice), its root before and after, and the rank and commitment of each point moved."""


@dataclass(frozen=True)
class Restriction:
    """The points of one user out of training, or returned to it."""

    id: str
    request_id: str
    handle: bytes
    taken: tuple[Stood, ...]
    returned: tuple[Stood, ...]
    in_force: bool
    cleaned: bool
    """Whether the checkpoints that no longer fit have been destroyed."""

    @property
    def unsettled(self) -> frozenset[tuple[str, int]]:
        """Datasets and shards whose checkpoints are still to be looked through."""
        return frozenset() if self.cleaned else frozenset(place[:2] for place, *_ in (*self.taken, *self.returned))


@dataclass(frozen=True)
class Change:
    """All that one transaction changes when points leave training, or return to it."""

    segments: Sequence[tuple[int, bytes, int]]
    """(segment id, positions held, live points)."""
    roots: Sequence[tuple[int, int, int, Digest]]
    """(dataset id, shard, slice, new root)."""
    stood: Sequence[Stood]
    leaves: Sequence[bytes]


_RESTRICTION = (
    "SELECT id, request_id, handle, taken, returned_at, returned, cleaned_at FROM restriction "
    "ORDER BY restricted_at, id"
)


def all_restrictions(ledger: Ledger) -> list[Restriction]:
    """Return every restriction there ever was, oldest first."""
    with ledger.read() as connection:
        return [_restriction(row) for row in connection.exec_driver_sql(_RESTRICTION)]


def enter_restriction(
    ledger: Ledger, restriction_id: str, request_id: str, handle: bytes, change: Change, now: datetime
) -> None:
    """Take a user's points out of training: from here on nothing made from them is served."""
    with ledger.write() as connection:
        _apply(connection, change)
        connection.exec_driver_sql(
            "INSERT INTO restriction (id, request_id, handle, restricted_at, taken) VALUES (?, ?, ?, ?, ?)",
            (restriction_id, request_id, handle, stamp(now), json.dumps(as_json(change.stood))),
        )


def enter_return(ledger: Ledger, restriction_id: str, change: Change, now: datetime) -> None:
    """Put a user's points back."""
    with ledger.write() as connection:
        _apply(connection, change)
        connection.exec_driver_sql(
            "UPDATE restriction SET returned_at = ?, returned = ?, cleaned_at = NULL WHERE id = ?",
            (stamp(now), json.dumps(as_json(change.stood)), restriction_id),
        )


def cleaned(ledger: Ledger, restriction_ids: Iterable[str], now: datetime) -> None:
    """Record that no checkpoint is left that does not fit the slices any more."""
    with ledger.write() as connection:
        many(
            connection,
            "UPDATE restriction SET cleaned_at = ? WHERE id = ?",
            [(stamp(now), restriction_id) for restriction_id in restriction_ids],
        )


def _apply(connection: Any, change: Change) -> None:
    append(connection, change.leaves)
    many(
        connection,
        "UPDATE segment SET held = ?, live = ? WHERE id = ?",
        [(held or None, live, segment_id) for segment_id, held, live in change.segments],
    )
    many(
        connection,
        "UPDATE slice SET root = ? WHERE dataset_id = ? AND shard = ? AND slice = ?",
        [(root, dataset_id, shard, slice_) for dataset_id, shard, slice_, root in change.roots],
    )
    many(
        connection,
        "UPDATE dataset SET version = version + 1 WHERE id IN (SELECT dataset_id FROM segment WHERE id = ?)",
        [(segment_id,) for segment_id, _, _ in change.segments],
    )


def as_json(stood: Iterable[Stood]) -> list[Any]:
    """Return where points stood as a ledger and the copy of its log have it."""
    return [[*place, before, after, [[rank, c.hex()] for rank, c in points]] for place, before, after, points in stood]


def from_json(listed: Iterable[Any]) -> list[Stood]:
    """Return where points stood, of what `as_json` made of it."""
    return [
        ((dataset, shard, slice_), before, after, tuple((rank, bytes.fromhex(c)) for rank, c in points))
        for dataset, shard, slice_, before, after, points in listed
    ]


def _restriction(row: Any) -> Restriction:
    return Restriction(
        id=row.id,
        request_id=row.request_id,
        handle=bytes(row.handle),
        taken=tuple(from_json(json.loads(row.taken))),
        returned=tuple(from_json(json.loads(row.returned or "[]"))),
        in_force=row.returned_at is None,
        cleaned=row.cleaned_at is not None,
    )
