"""Erasures: requests, their steps, what came of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from unlearnd.digests import Digest
from unlearnd.ledger.connection import Ledger, many, stamp
from unlearnd.ledger.dockets import Entry
from unlearnd.ledger.log import append
from unlearnd.ledger.points import Holding, select_many


@dataclass(frozen=True)
class Request:
    """One user (by handle) or one point (by dataset and position) to erase; of an order its entry says what."""

    id: str
    erasure_id: str
    handle: bytes | None
    dataset: str | None
    position: int | None
    leaf: int
    """The leaf that says it was received."""
    commitment: str | None
    nonce: bytes | None
    """None once it was handed out, or for a point."""
    outcome: Mapping[str, Any] | None
    """None until the points are marked; complete once the erasure's influence is removed."""


@dataclass(frozen=True)
class Erasure:
    """Requests carried out together."""

    id: str
    received_at: str
    marked_at: str | None
    influence_removed_at: str | None
    rebuilt_at: str | None
    touched: tuple[tuple[int, int], ...]
    """(dataset id, shard) pairs to clean."""


@dataclass(frozen=True)
class ObjectVersion:
    """A version of an object that an erasure set out to destroy."""

    name: str
    version: str
    destroyed_at: str | None
    kept: str | None
    """Why it is still there; None where it is gone, or nobody has looked again yet."""


@dataclass(frozen=True)
class Marking:
    """All that one transaction changes when points are marked erased."""

    dropped: Sequence[tuple[int, bytes, int]]
    """(segment id, positions erased but still in its object, live points left)."""
    roots: Sequence[tuple[int, int, int, Digest]]
    """(dataset id, shard, slice, new root)."""
    gone: Sequence[Holding]
    shrunk: Sequence[tuple[Holding, int, bytes]]
    """(holding, its new first position, its new positions)."""
    shredded: Sequence[bytes]
    """Handles of users whose key is destroyed."""
    outcomes: Mapping[str, Mapping[str, Any]]
    """By request id."""
    touched: Sequence[tuple[int, int]]
    leaves: Sequence[bytes]
    """What the log says of the new roots."""
    retired: Sequence[int] = ()
    """Models that are never built again."""
    emptied: Sequence[int] = ()
    """Datasets that lose everything: all holdings, and the keys of users who have points in no other."""


_ERASURE = "SELECT id, received_at, marked_at, influence_removed_at, rebuilt_at, touched FROM erasure"
_OLDEST_FIRST = "ORDER BY received_at, (SELECT min(leaf) FROM request WHERE erasure_id = erasure.id)"
_REQUEST = "SELECT id, erasure_id, handle, dataset, position, leaf, commitment, nonce, outcome FROM request"


def begin(connection: Connection, erasure_id: str, entries: Sequence[Entry], now: datetime) -> None:
    """Record within a transaction that requests are carried out together from now on."""
    connection.exec_driver_sql(
        "INSERT INTO erasure (id, received_at, touched) VALUES (?, ?, '[]')", (erasure_id, stamp(now))
    )
    many(
        connection,
        "INSERT INTO request (id, erasure_id, number, handle, dataset, position, leaf, commitment, nonce) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (e.id, erasure_id, n, e.handle, e.dataset, e.position, e.leaf, e.commitment, e.nonce)
            for n, e in enumerate(entries)
        ],
    )
    many(connection, "UPDATE docket SET nonce = NULL WHERE id = ?", [(entry.id,) for entry in entries])


def overtaken(connection: Connection, alive: set[bytes]) -> bool:
    """Say whether one of the users that had data just now has none any more: another process came first."""
    keys = select_many(connection, "SELECT handle FROM users WHERE key IS NOT NULL AND handle", alive)
    return len(alive) > len(list(keys))


def erasure_by_id(ledger: Ledger, erasure_id: str) -> Erasure:
    """Return an erasure that is known to exist."""
    with ledger.read() as connection:
        return _erasure(connection.exec_driver_sql(f"{_ERASURE} WHERE id = ?", (erasure_id,)).one())


def unfinished_erasures(ledger: Ledger) -> list[Erasure]:
    """Return the erasures that were recorded and whose influence is not known to be removed, oldest first."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(f"{_ERASURE} WHERE influence_removed_at IS NULL {_OLDEST_FIRST}")
        return [_erasure(row) for row in rows]


def erasures_to_rebuild(ledger: Ledger) -> list[Erasure]:
    """Return the erasures after which no build has ended yet."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(
            f"{_ERASURE} WHERE influence_removed_at IS NOT NULL AND rebuilt_at IS NULL {_OLDEST_FIRST}"
        )
        return [_erasure(row) for row in rows]


def requests_of(ledger: Ledger, erasure_id: str) -> list[Request]:
    """Return the requests of an erasure in the order they were given."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(f"{_REQUEST} WHERE erasure_id = ? ORDER BY number", (erasure_id,))
        return [_request(row) for row in rows]


def requests_by_ids(ledger: Ledger, ids: Sequence[str]) -> dict[str, Request]:
    """Return requests that are, or were, being carried out, by their ids."""
    found: dict[str, Request] = {}
    with ledger.read() as connection:
        for start in range(0, len(ids), 500):
            some = tuple(ids[start : start + 500])
            marks = ",".join("?" * len(some))
            rows = connection.exec_driver_sql(f"{_REQUEST} WHERE id IN ({marks})", some)
            found |= {request.id: request for request in map(_request, rows)}
    return found


def all_requests(ledger: Ledger) -> list[Request]:
    """Return every request in the order they were received."""
    with ledger.read() as connection:
        return [_request(row) for row in connection.exec_driver_sql(f"{_REQUEST} ORDER BY leaf, id")]


def last_requests(
    ledger: Ledger, handles: Iterable[bytes], points: Iterable[tuple[str, int] | tuple[str, str]]
) -> dict[bytes | tuple[str, int] | tuple[str, str], Request]:
    """Return the newest request about each user or point that has one."""
    newest: dict[bytes | tuple[str, int] | tuple[str, str], Request] = {}
    with ledger.read() as connection:
        for found in map(_request, select_many(connection, f"{_REQUEST} WHERE handle", handles)):
            assert found.handle is not None
            before = newest.get(found.handle)
            if before is None or before.leaf < found.leaf:
                newest[bytes(found.handle)] = found
        for point in points:
            row = connection.exec_driver_sql(
                f"{_REQUEST} WHERE dataset = ? AND position = ? ORDER BY leaf DESC LIMIT 1", point
            ).one_or_none()
            if row:
                newest[point] = _request(row)
    return newest


def mark_erased(ledger: Ledger, erasure_id: str, marking: Marking, now: datetime) -> bool:
    """Take the points out of the training set: from here on nothing made from them is served.

    Change nothing and return False when an ingest has given one of the users new points meanwhile.
    """
    with ledger.write() as connection:
        shredded = set(marking.shredded)
        held = select_many(connection, "SELECT count(*) FROM holding WHERE handle", shredded)
        if sum(row[0] for row in held) > sum(holding.handle in shredded for holding in marking.gone):
            return False
        append(connection, marking.leaves)
        many(
            connection,
            "UPDATE segment SET dropped = ?, live = ? WHERE id = ?",
            [(dropped, live, segment_id) for segment_id, dropped, live in marking.dropped],
        )
        many(
            connection,
            "UPDATE slice SET root = ? WHERE dataset_id = ? AND shard = ? AND slice = ?",
            [(root, dataset_id, shard, slice_) for dataset_id, shard, slice_, root in marking.roots],
        )
        for dataset_id in marking.emptied:
            # In the database, where the users of a dataset need not fit into memory. Who has points elsewhere stays.
            connection.exec_driver_sql(
                "UPDATE users SET key = NULL, erased_at = ? "
                "WHERE handle IN (SELECT handle FROM holding WHERE dataset_id = ?) "
                "AND NOT EXISTS "
                "(SELECT 1 FROM holding WHERE holding.handle = users.handle AND holding.dataset_id <> ?)",
                (stamp(now), dataset_id, dataset_id),
            )
            connection.exec_driver_sql("DELETE FROM holding WHERE dataset_id = ?", (dataset_id,))
        place = "handle = ? AND dataset_id = ? AND shard = ? AND slice = ? AND first = ?"
        many(
            connection,
            f"DELETE FROM holding WHERE {place}",
            [(h.handle, h.dataset_id, h.shard, h.slice, h.first) for h in marking.gone],
        )
        many(
            connection,
            f"UPDATE holding SET first = ?, positions = ? WHERE {place}",
            [
                (first, positions, h.handle, h.dataset_id, h.shard, h.slice, h.first)
                for h, first, positions in marking.shrunk
            ],
        )
        many(
            connection,
            "UPDATE users SET key = NULL, erased_at = ? WHERE handle = ?",
            [(stamp(now), handle) for handle in marking.shredded],
        )
        many(
            connection,
            "UPDATE request SET outcome = ? WHERE id = ?",
            [(json.dumps(outcome), request_id) for request_id, outcome in marking.outcomes.items()],
        )
        connection.exec_driver_sql(
            "UPDATE erasure SET marked_at = ?, touched = ? WHERE id = ?",
            (stamp(now), json.dumps(sorted(marking.touched)), erasure_id),
        )
        many(
            connection,
            "UPDATE dataset SET version = version + 1 WHERE id = ?",
            [(dataset_id,) for dataset_id in sorted({dataset_id for dataset_id, _ in marking.touched})],
        )
        for model_id in marking.retired:
            connection.exec_driver_sql("UPDATE model SET retired_at = ? WHERE id = ?", (stamp(now), model_id))
            connection.exec_driver_sql(
                "UPDATE dataset SET version = version + 1 WHERE id = (SELECT dataset_id FROM model WHERE id = ?)",
                (model_id,),
            )
    return True


def doom_versions(ledger: Ledger, erasure_id: str, versions: Iterable[tuple[str, str]]) -> None:
    """Write down which versions of objects (name and version) are about to be destroyed."""
    rows = [(erasure_id, name, version) for name, version in versions]
    if rows:
        with ledger.write() as connection:
            many(
                connection,
                "INSERT INTO version (erasure_id, name, version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                rows,
            )


def versions_destroyed(
    ledger: Ledger,
    erasure_id: str,
    gone: Iterable[tuple[str, str]],
    kept: Iterable[tuple[str, str, str]],
    now: datetime,
) -> None:
    """Write down which versions are gone, and which are still there and why."""
    which = "WHERE erasure_id = ? AND name = ? AND version = ?"
    with ledger.write() as connection:
        many(
            connection,
            f"UPDATE version SET destroyed_at = ?, kept = NULL {which}",
            [(stamp(now), erasure_id, name, version) for name, version in gone],
        )
        many(
            connection,
            f"UPDATE version SET kept = ? {which} AND destroyed_at IS NULL",
            [(why, erasure_id, name, version) for name, version, why in kept],
        )


def versions_of(ledger: Ledger, erasure_id: str) -> list[ObjectVersion]:
    """Return what became of the versions of objects that an erasure set out to destroy."""
    sql = "SELECT name, version, destroyed_at, kept FROM version WHERE erasure_id = ? ORDER BY name, version"
    with ledger.read() as connection:
        return [ObjectVersion(**row._mapping) for row in connection.exec_driver_sql(sql, (erasure_id,))]


def influence_removed(
    ledger: Ledger,
    erasure_id: str,
    outcomes: Mapping[str, Mapping[str, Any]],
    leaves: Sequence[bytes],
    receipts: Mapping[str, tuple[bytes, Digest]],
    now: datetime,
    complete: Callable[[Connection, Sequence[str], datetime], None],
) -> None:
    """Record that nothing made from the erased points is left: complete outcomes, and each request's statement.

    `receipts` has by request the statement and the digest of its detail. The nonces go: they were for the users.
    `complete` records in the same transaction that the requests are closed.
    """
    with ledger.write() as connection:
        append(connection, leaves)
        first = append(connection, [payload for payload, _ in receipts.values()])
        many(
            connection,
            "INSERT INTO receipt (request_id, leaf, detail) VALUES (?, ?, ?)",
            [(request_id, first + n, detail) for n, (request_id, (_, detail)) in enumerate(receipts.items())],
        )
        many(
            connection,
            "UPDATE request SET outcome = ?, nonce = NULL WHERE id = ?",
            [(json.dumps(outcome), request_id) for request_id, outcome in outcomes.items()],
        )
        connection.exec_driver_sql(
            "UPDATE erasure SET influence_removed_at = ? WHERE id = ? AND influence_removed_at IS NULL",
            (stamp(now), erasure_id),
        )
        complete(connection, list(receipts), now)


def rebuilt(ledger: Ledger, erasure_ids: Iterable[str], leaves: Sequence[bytes], now: datetime) -> None:
    """Record that every model was back at full strength after these erasures."""
    with ledger.write() as connection:
        append(connection, leaves)
        many(
            connection,
            "UPDATE erasure SET rebuilt_at = ? WHERE id = ? AND rebuilt_at IS NULL",
            [(stamp(now), erasure_id) for erasure_id in erasure_ids],
        )


def _erasure(row: Any) -> Erasure:
    pairs = tuple((pair[0], pair[1]) for pair in json.loads(row.touched))
    return Erasure(**{**row._mapping, "touched": pairs})


def _request(row: Any) -> Request:
    return Request(**{**row._mapping, "outcome": json.loads(row.outcome) if row.outcome else None})
