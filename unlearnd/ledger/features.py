"""Features kept beside slice data: which object holds those of which segment.

A row lives as long as its segment's object and goes with it. The digest goes then, too: it could test a guess.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unlearnd.digests import Digest
from unlearnd.errors import BusyError
from unlearnd.ledger.connection import Ledger, hold_rows, many
from unlearnd.ledger.leases import data_lease
from unlearnd.ledger.points import Dataset


@dataclass(frozen=True)
class Kept:
    """The features of a segment's points under one key, as one object in storage."""

    segment_id: int
    key: str
    """Names all that features depend on but the points."""
    path: str
    digest: Digest


def kept_features(ledger: Ledger, dataset_id: int, shard: int) -> list[Kept]:
    """Return what is kept of a shard, of segments that were replaced and not destroyed yet, too."""
    sql = (
        "SELECT feature.segment_id, feature.key, feature.path, feature.digest FROM feature "
        "JOIN segment ON segment.id = feature.segment_id WHERE segment.dataset_id = ? AND segment.shard = ? "
        "ORDER BY feature.segment_id, feature.key"
    )
    with ledger.read() as connection:
        return [Kept(*row) for row in connection.exec_driver_sql(sql, (dataset_id, shard))]


def enter_features(ledger: Ledger, dataset: Dataset, shard: int, written: Sequence[Kept], lease_holder: str) -> None:
    """Enter features whose bytes are durable. The writer must still hold the data lease of the shard: an erasure that
    took it over sweeps the folder, and must not be followed by what was made from the rows before it."""
    with ledger.write() as connection:
        sql = f"SELECT holder FROM lease WHERE name = ?{hold_rows(connection)}"
        holder = connection.exec_driver_sql(sql, (data_lease(dataset.name, shard),)).scalar()
        if holder != lease_holder:
            raise BusyError(f"another process took over the data of shard {shard} of '{dataset.name}'")
        many(
            connection,
            "INSERT INTO feature (segment_id, key, path, digest) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (segment_id, key) DO UPDATE SET path = excluded.path, digest = excluded.digest",
            [(kept.segment_id, kept.key, kept.path, kept.digest) for kept in written],
        )


def forget_features(ledger: Ledger, unneeded: Iterable[Kept]) -> None:
    """Forget features that nobody needs any more; their objects are swept away afterwards."""
    with ledger.write() as connection:
        many(
            connection,
            "DELETE FROM feature WHERE segment_id = ? AND key = ?",
            [(kept.segment_id, kept.key) for kept in unneeded],
        )


def of_segments(kept: Iterable[Kept], segment_ids: Iterable[int]) -> list[Kept]:
    """Return those of some segments."""
    wanted = set(segment_ids)
    return [one for one in kept if one.segment_id in wanted]
