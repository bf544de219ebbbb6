"""Datasets, slices, and who holds which points where.

The bulk paths take and give whole columns through the driver; no object is made per point or per row.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from unlearnd.digests import Digest
from unlearnd.errors import BusyError, NotFoundError
from unlearnd.ledger.connection import Ledger, copy_in, in_postgres, many, stamp
from unlearnd.ledger.log import append
from unlearnd.packing import unpack_flat

_MANY = 500


@dataclass(frozen=True)
class Dataset:
    """A dataset: its layout, which the first ingest fixed, and what its points look like."""

    id: int
    name: str
    unit: str
    placement: str
    shards: int
    dtype: str
    shape: tuple[int, ...]
    columns: tuple[str, ...] | None
    label_kind: str
    labels: tuple[int | str, ...]
    labels_declared: bool
    groups: tuple[str, ...]
    points: int
    version: int
    layout: Mapping[str, Any] | None = None
    """Where each group goes, frozen when the dataset was made; None where places do not depend on groups."""


@dataclass(frozen=True)
class Generation:
    """Slices `first_slice` … `first_slice + slices - 1` of every shard, filled together."""

    number: int
    first_slice: int
    slices: int
    sealed: bool

    @property
    def last_slice(self) -> int:
        return self.first_slice + self.slices - 1


@dataclass(frozen=True)
class Segment:
    """Some points of one slice, as one object in storage."""

    id: int
    dataset_id: int
    shard: int
    slice: int
    first: int
    path: str
    digest: Digest
    rows: int
    dropped: bytes
    live: int
    held: bytes
    """Positions of users on hold; often none."""
    key: bytes | None
    """What opens the object, wrapped; None: it is not encrypted."""


@dataclass(frozen=True)
class NewSegment:
    """A segment that has been written and is not in the ledger yet."""

    shard: int
    slice: int
    first: int
    path: str
    digest: Digest
    rows: int
    key: bytes | None


@dataclass(frozen=True)
class Holding:
    """What a user has in one slice."""

    handle: bytes
    dataset_id: int
    shard: int
    slice: int
    first: int
    positions: bytes


@dataclass(frozen=True)
class Users:
    """Handles in ascending order, each with a fresh key for whoever is new, and their holdings."""

    keys: Sequence[tuple[bytes, bytes]]
    holdings: Sequence[tuple[bytes, int, int, int, bytes]]
    """(handle, shard, slice, first, positions)."""


@dataclass(frozen=True)
class Ingest:
    """Everything an ingest wants in the ledger, apart from its users."""

    id: str
    before: Dataset | None
    """The dataset as it was when placing began; None when this ingest creates it."""
    after: Dataset
    """The dataset as it will be; its `id` and `version` are the ledger's to say."""
    generation: Generation
    segments: Sequence[NewSegment]


_DATASET = (
    "SELECT id, name, unit, placement, shards, dtype, shape, columns, label_kind, labels, labels_declared, "
    '"groups", points, version, layout FROM dataset'
)
# A handle met before keeps its key; one that was erased comes back as a new user with a new key.
_MET_BEFORE = "ON CONFLICT (handle) DO UPDATE SET key = excluded.key, erased_at = NULL WHERE users.key IS NULL"
_SEGMENT = "SELECT id, dataset_id, shard, slice, first, path, digest, rows, dropped, live, held, key FROM segment"


def datasets(ledger: Ledger) -> list[Dataset]:
    """Return all datasets by name."""
    with ledger.read() as connection:
        found = [_dataset(row) for row in connection.exec_driver_sql(_DATASET)]
    # Sorted here: how a database sorts text depends on how it was set up.
    return sorted(found, key=lambda dataset: dataset.name)


def find_dataset(ledger: Ledger, name: str) -> Dataset | None:
    """Return the dataset of that name, or None where there is none."""
    with ledger.read() as connection:
        row = connection.exec_driver_sql(f"{_DATASET} WHERE name = ?", (name,)).one_or_none()
    return _dataset(row) if row else None


def dataset_named(ledger: Ledger, name: str) -> Dataset:
    """Return the dataset of that name or raise `NotFoundError`."""
    found = find_dataset(ledger, name)
    if found is None:
        names = ", ".join(dataset.name for dataset in datasets(ledger)) or "none"
        raise NotFoundError(f"no dataset '{name}'; there are: {names}")
    return found


def dataset_by_id(ledger: Ledger, dataset_id: int) -> Dataset:
    """Return a dataset that is known to exist."""
    with ledger.read() as connection:
        return _dataset(connection.exec_driver_sql(f"{_DATASET} WHERE id = ?", (dataset_id,)).one())


def version_of(ledger: Ledger, dataset_id: int) -> int:
    """Return the number that counts up whenever what may be served could have changed."""
    return int(ledger.peek("SELECT version FROM dataset WHERE id = ?", dataset_id))


def generations(ledger: Ledger, dataset_id: int) -> list[Generation]:
    """Return the runs of slices in order."""
    sql = "SELECT number, first_slice, slices, sealed_at FROM generation WHERE dataset_id = ? ORDER BY number"
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(sql, (dataset_id,))
        return [Generation(row[0], row[1], row[2], row[3] is not None) for row in rows]


def sealed_slices(ledger: Ledger, dataset_id: int) -> int:
    """Return how many slices of each shard are closed to new points: those there is something to train on."""
    return max((g.last_slice for g in generations(ledger, dataset_id) if g.sealed), default=0)


def open_ingest(ledger: Ledger, ingest_id: str, dataset: str, now: datetime) -> None:
    """Announce an ingest, so that what it leaves in storage can be found if it dies."""
    with ledger.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO ingest (id, dataset, opened_at, points) VALUES (?, ?, ?, 0)",
            (ingest_id, dataset, stamp(now)),
        )


def unfinished_ingests(ledger: Ledger, dataset: str) -> list[str]:
    """Return the ids of ingests into `dataset` that were announced and never committed."""
    sql = "SELECT id FROM ingest WHERE dataset = ? AND committed_at IS NULL"
    with ledger.read() as connection:
        return [row[0] for row in connection.exec_driver_sql(sql, (dataset,))]


def datasets_left_over(ledger: Ledger) -> list[str]:
    """Return the names of datasets into which an ingest was announced and never committed."""
    sql = "SELECT DISTINCT dataset FROM ingest WHERE committed_at IS NULL"
    with ledger.read() as connection:
        return [row[0] for row in connection.exec_driver_sql(sql)]


def forget_ingest(ledger: Ledger, ingest_id: str) -> None:
    """Take back the announcement of an ingest that left nothing."""
    with ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM ingest WHERE id = ? AND committed_at IS NULL", (ingest_id,))


def commit_ingest(
    ledger: Ledger, ingest: Ingest, users: Iterable[Users], leaves: Sequence[bytes], now: datetime
) -> Dataset:
    """Enter an ingest in one transaction; `users` comes in portions so that memory stays small."""
    with ledger.load() as connection:
        reserved = _load_users(connection, ingest, users) if in_postgres(connection) else None
        ledger.take_turn(connection)
        append(connection, leaves)
        dataset_id = _enter_dataset(connection, ingest, reserved, now)
        connection.exec_driver_sql(
            "INSERT INTO generation (dataset_id, number, first_slice, slices) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            (dataset_id, ingest.generation.number, ingest.generation.first_slice, ingest.generation.slices),
        )
        many(
            connection,
            "INSERT INTO segment (dataset_id, shard, slice, first, path, digest, rows, dropped, live, key) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (dataset_id, s.shard, s.slice, s.first, s.path, s.digest, s.rows, b"", s.rows, s.key)
                for s in ingest.segments
            ],
        )
        if reserved is not None:
            connection.exec_driver_sql(f"INSERT INTO users (handle, key) SELECT handle, key FROM arrived {_MET_BEFORE}")
        for portion in users if reserved is None else ():
            many(connection, f"INSERT INTO users (handle, key) VALUES (?, ?) {_MET_BEFORE}", portion.keys)
            many(
                connection,
                f"INSERT INTO holding (dataset_id, handle, shard, slice, first, positions) "
                f"VALUES ({dataset_id:d}, ?, ?, ?, ?, ?)",
                portion.holdings,
            )
        connection.exec_driver_sql(
            "UPDATE ingest SET committed_at = ?, points = ? WHERE id = ?",
            (stamp(now), sum(segment.rows for segment in ingest.segments), ingest.id),
        )
    return dataset_by_id(ledger, dataset_id)


def seal(ledger: Ledger, dataset_id: int, now: datetime) -> bool:
    """Close the newest slices to further points; say whether there was anything to close."""
    with ledger.write() as connection:
        changed = connection.exec_driver_sql(
            "UPDATE generation SET sealed_at = ? WHERE dataset_id = ? AND sealed_at IS NULL",
            (stamp(now), dataset_id),
        )
        return changed.rowcount > 0


def segments_of(ledger: Ledger, dataset_id: int, shard: int, slice_: int | None = None) -> list[Segment]:
    """Return the segments in force of a shard, or of one slice of it, in the order they are read."""
    sql = f"{_SEGMENT} WHERE dataset_id = ? AND shard = ? AND replaced_at IS NULL"
    values: tuple[int, ...] = (dataset_id, shard)
    if slice_ is not None:
        sql, values = f"{sql} AND slice = ?", (*values, slice_)
    with ledger.read() as connection:
        return [_segment(row) for row in connection.exec_driver_sql(f"{sql} ORDER BY slice, first", values)]


def counts_of(ledger: Ledger, dataset_id: int) -> dict[tuple[int, int], int]:
    """Return how many live points each (shard, slice) has; places without any are left out."""
    sql = (
        "SELECT shard, slice, CAST(SUM(live) AS BIGINT) FROM segment "
        "WHERE dataset_id = ? AND replaced_at IS NULL GROUP BY shard, slice"
    )
    with ledger.read() as connection:
        return {(row[0], row[1]): row[2] for row in connection.exec_driver_sql(sql, (dataset_id,))}


def roots_of(ledger: Ledger, dataset_id: int, shard: int | None = None) -> dict[tuple[int, int], Digest]:
    """Return the roots of all slices that have one, or of one shard's."""
    sql = "SELECT shard, slice, root FROM slice WHERE dataset_id = ?"
    values: tuple[int, ...] = (dataset_id,)
    if shard is not None:
        sql, values = f"{sql} AND shard = ?", (dataset_id, shard)
    with ledger.read() as connection:
        return {(row[0], row[1]): Digest(row[2]) for row in connection.exec_driver_sql(sql, values)}


def enter_roots(ledger: Ledger, dataset_id: int, shard: int, roots: dict[int, Digest], leaves: Sequence[bytes]) -> None:
    """Record the roots of slices that had none."""
    with ledger.write() as connection:
        append(connection, leaves)
        many(
            connection,
            "INSERT INTO slice (dataset_id, shard, slice, root) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [(dataset_id, shard, slice_, root) for slice_, root in roots.items()],
        )


def user_keys(ledger: Ledger, handles: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the keys of users that have one."""
    with ledger.read() as connection:
        return {
            row[0]: row[1]
            for row in select_many(connection, "SELECT handle, key FROM users WHERE handle", handles)
            if row[1] is not None
        }


def holdings_of(ledger: Ledger, handles: Iterable[bytes]) -> list[Holding]:
    """Return everything these users hold, in every dataset."""
    sql = "SELECT handle, dataset_id, shard, slice, first, positions FROM holding WHERE handle"
    with ledger.read() as connection:
        return [Holding(*row) for row in select_many(connection, sql, handles)]


def holdings_in(ledger: Ledger, dataset_id: int) -> list[Holding]:
    """Return everything that anybody holds in one dataset."""
    sql = "SELECT handle, dataset_id, shard, slice, first, positions FROM holding WHERE dataset_id = ?"
    with ledger.read() as connection:
        return [Holding(bytes(row[0]), *row[1:]) for row in connection.exec_driver_sql(sql, (dataset_id,))]


def users_of(ledger: Ledger, dataset_id: int, most: int = 10_000) -> Iterator[list[bytes]]:
    """Yield the handles of all users with points in a dataset, at most so many at a time."""
    sql = "SELECT DISTINCT handle FROM holding WHERE dataset_id = ? AND handle > ? ORDER BY handle LIMIT ?"
    last = b""
    while True:
        with ledger.read() as connection:
            page = [bytes(row[0]) for row in connection.exec_driver_sql(sql, (dataset_id, last, most))]
        if not page:
            return
        yield page
        last = page[-1]


def holding_at(ledger: Ledger, dataset_id: int, position: int) -> Holding | None:
    """Return the holding that has this point, or None. Reads the placements of the whole dataset."""
    sql = "SELECT handle, dataset_id, shard, slice, first, positions FROM holding WHERE dataset_id = ? AND first <= ?"
    with ledger.read() as connection:
        found = connection.exec_driver_sql(sql, (dataset_id, position), execution_options={"stream_results": True})
        while rows := found.fetchmany(100_000):
            flat, bounds = unpack_flat([row[5] for row in rows])
            hit = (flat == position).nonzero()[0]
            if len(hit):
                return Holding(*rows[int(bounds.searchsorted(hit[0], side="right")) - 1])
    return None


def swap_segment(
    ledger: Ledger,
    old: Segment,
    new: NewSegment | None,
    now: datetime,
    features: Sequence[tuple[str, str, Digest]] = (),
) -> None:
    """Put a rewritten segment in the place of one that still holds erased points.

    `features` are those of the new one that were carried over: (key, path, digest).
    """
    with ledger.write() as connection:
        changed = connection.exec_driver_sql(
            "UPDATE segment SET replaced_at = ?, dropped = ? WHERE id = ? AND replaced_at IS NULL",
            (stamp(now), b"", old.id),
        )
        if changed.rowcount and new is not None:
            connection.exec_driver_sql(
                "INSERT INTO segment (dataset_id, shard, slice, first, path, digest, rows, dropped, live, held, key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(old.dataset_id, new.shard, new.slice, new.first, new.path, new.digest, new.rows),
                    *(b"", old.live, old.held or None, new.key),
                ),
            )
            many(
                connection,
                "INSERT INTO feature (segment_id, key, path, digest) "
                "SELECT id, ?, ?, ? FROM segment WHERE path = ? AND replaced_at IS NULL",
                [(*one, new.path) for one in features],
            )


def dropped_segments(ledger: Ledger, dataset_id: int, shard: int) -> list[Segment]:
    """Return the segments of a shard that still hold erased points."""
    return [segment for segment in segments_of(ledger, dataset_id, shard) if segment.dropped]


def replaced_segments(ledger: Ledger, dataset_id: int, shard: int) -> list[Segment]:
    """Return the segments of a shard that were replaced and whose object is not known to be destroyed."""
    sql = f"{_SEGMENT} WHERE dataset_id = ? AND shard = ? AND replaced_at IS NOT NULL AND destroyed_at IS NULL"
    with ledger.read() as connection:
        return [_segment(row) for row in connection.exec_driver_sql(sql, (dataset_id, shard))]


def segments_destroyed(ledger: Ledger, segments: Iterable[Segment], now: datetime) -> None:
    """Record that the objects of these segments are gone. Their digests go too: they could test a guess."""
    segments = list(segments)
    with ledger.write() as connection:
        many(connection, "DELETE FROM feature WHERE segment_id = ?", [(segment.id,) for segment in segments])
        many(
            connection,
            "UPDATE segment SET destroyed_at = ?, digest = '', key = NULL WHERE id = ?",
            [(stamp(now), segment.id) for segment in segments],
        )


def all_segment_paths(ledger: Ledger, dataset_id: int) -> set[str]:
    """Return the names of all objects in force of a dataset."""
    sql = "SELECT path FROM segment WHERE dataset_id = ? AND destroyed_at IS NULL"
    with ledger.read() as connection:
        return {row[0] for row in connection.exec_driver_sql(sql, (dataset_id,))}


def _load_users(connection: Connection, ingest: Ingest, users: Iterable[Users]) -> int:
    """Load who holds what by COPY, before it is this transaction's turn: others write meanwhile, and see none of it.

    Return the dataset's id: for a new dataset, one that is reserved for it. Users wait in a table of their own,
    because which of them keep the keys they have can only be said when nobody else writes.
    """
    if ingest.before is None:
        drawn = connection.exec_driver_sql("SELECT nextval(pg_get_serial_sequence('dataset', 'id'))")
        dataset_id = int(drawn.scalar_one())
    else:
        dataset_id = ingest.before.id
    connection.exec_driver_sql("CREATE TEMP TABLE arrived (handle BYTEA, key BYTEA) ON COMMIT DROP")
    for portion in users:
        copy_in(connection, "arrived (handle, key)", ("bytea", "bytea"), portion.keys)
        copy_in(
            connection,
            "holding (dataset_id, handle, shard, slice, first, positions)",
            ("int4", "bytea", "int4", "int4", "int8", "bytea"),
            ((dataset_id, *held) for held in portion.holdings),
        )
    return dataset_id


def _enter_dataset(connection: Connection, ingest: Ingest, reserved: int | None, now: datetime) -> int:
    after, before = ingest.after, ingest.before
    lists = tuple(json.dumps(value) for value in (after.shape, after.columns, after.labels, after.groups))
    shape, columns, labels, groups = lists
    if before is None:
        created = connection.exec_driver_sql(
            "INSERT INTO dataset (id, name, unit, placement, shards, dtype, shape, columns, label_kind, "
            'labels, labels_declared, "groups", points, version, created_at, layout) '
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?) ON CONFLICT (name) DO NOTHING",
            (
                reserved,
                *(after.name, after.unit, after.placement, after.shards, after.dtype, shape, columns),
                *(after.label_kind, labels, after.labels_declared, groups, after.points, stamp(now)),
                None if after.layout is None else json.dumps(after.layout),
            ),
        )
        if created.rowcount == 0:
            raise BusyError(f"another process created the dataset '{after.name}' meanwhile; ingest again")
        row = connection.exec_driver_sql("SELECT id FROM dataset WHERE name = ?", (after.name,))
        return int(row.scalar_one())
    changed = connection.exec_driver_sql(
        'UPDATE dataset SET labels = ?, label_kind = ?, "groups" = ?, points = ?, version = version + 1 '
        "WHERE id = ? AND points = ?",
        (labels, after.label_kind, groups, after.points, before.id, before.points),
    )
    sealed = connection.exec_driver_sql(
        "SELECT count(*) FROM generation WHERE dataset_id = ? AND number = ? AND sealed_at IS NOT NULL",
        (before.id, ingest.generation.number),
    ).scalar_one()
    if changed.rowcount == 0 or sealed:
        raise BusyError(f"another process changed the dataset '{after.name}' meanwhile; ingest again")
    return before.id


def select_many(connection: Connection, sql: str, handles: Iterable[bytes]) -> Iterator[Any]:
    """Run a query that ends in a column of handles, for these handles, some at a time."""
    wanted = list(handles)
    for start in range(0, len(wanted), _MANY):
        some = wanted[start : start + _MANY]
        # All at once: to fetch row by row takes several times as long.
        yield from connection.exec_driver_sql(f"{sql} IN ({','.join('?' * len(some))})", tuple(some)).all()


def _dataset(row: Any) -> Dataset:
    columns = json.loads(row.columns)
    return Dataset(
        id=row.id,
        name=row.name,
        unit=row.unit,
        placement=row.placement,
        shards=row.shards,
        dtype=row.dtype,
        shape=tuple(json.loads(row.shape)),
        columns=None if columns is None else tuple(columns),
        label_kind=row.label_kind,
        labels=tuple(json.loads(row.labels)),
        labels_declared=bool(row.labels_declared),
        groups=tuple(json.loads(row.groups)),
        points=row.points,
        version=row.version,
        layout=None if row.layout is None else json.loads(row.layout),
    )


def _segment(row: Any) -> Segment:
    return Segment(**{**row._mapping, "dropped": bytes(row.dropped), "held": bytes(row.held or b"")})
