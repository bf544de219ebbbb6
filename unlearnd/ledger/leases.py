"""Leases: who may write what, for how long.

A lease has a holder and runs out unless renewed, so a dead worker blocks nobody for long. Somebody with a
better claim (an erasure against a build) marks a lease as wanted; its holder sees that when renewing and lets
go at its next chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unlearnd.ledger.connection import Ledger, many


def ingest_lease(dataset: str) -> str:
    """Return the name of the lease without which nobody adds points to a dataset or seals it."""
    return f"ingest/{dataset}"


def data_lease(dataset: str, shard: int) -> str:
    """Return the name of the lease without which nobody changes a shard's slices or their roots."""
    return f"data/{dataset}/{shard}"


def build_lease(model: str, shard: int) -> str:
    """Return the name of the lease without which nobody writes or destroys checkpoints of a shard."""
    return f"build/{model}/{shard}"


@dataclass(frozen=True)
class Lease:
    """A lease as somebody holds it."""

    name: str
    holder: str
    expires: float


def take(
    ledger: Ledger, names: Sequence[str], holder: str, expires: float, now: float, free: Sequence[str]
) -> list[Lease]:
    """Take all of `names` or none; return those in the way (nothing when taken).

    A lease can be had when nobody holds it, when it ran out, or when its holder is in `free`: known dead.
    """
    with ledger.write() as connection:
        marks = ",".join("?" * len(names))
        rows = connection.exec_driver_sql(
            f"SELECT name, holder, expires FROM lease WHERE name IN ({marks})", tuple(names)
        )
        held = [Lease(*row) for row in rows]
        blocking = [lease for lease in held if lease.expires > now and lease.holder not in (holder, *free)]
        if not blocking:
            many(
                connection,
                "INSERT INTO lease (name, holder, expires, wanted) VALUES (?, ?, ?, 0) ON CONFLICT (name) "
                "DO UPDATE SET holder = excluded.holder, expires = excluded.expires, wanted = 0",
                [(name, holder, expires) for name in names],
            )
        return blocking


def want(ledger: Ledger, names: Sequence[str]) -> None:
    """Ask the holders of `names` to let go."""
    with ledger.write() as connection:
        many(connection, "UPDATE lease SET wanted = 1 WHERE name = ?", [(name,) for name in names])


def renew(ledger: Ledger, holder: str, expires: float) -> tuple[set[str], bool]:
    """Extend all leases of `holder`; return which it still has, and whether somebody wants one of them."""
    with ledger.write() as connection:
        connection.exec_driver_sql("UPDATE lease SET expires = ? WHERE holder = ?", (expires, holder))
    return look(ledger, holder)


def look(ledger: Ledger, holder: str) -> tuple[set[str], bool]:
    """Return which leases `holder` has, and whether somebody wants one of them."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT name, wanted FROM lease WHERE holder = ?", (holder,)).all()
    return {row[0] for row in rows}, any(row[1] for row in rows)


def drop(ledger: Ledger, holder: str) -> None:
    """Give back all leases of `holder`."""
    with ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM lease WHERE holder = ?", (holder,))
