"""Leases: who may write what, for how long.

A lease has a holder and runs out unless renewed, so a dead worker blocks nobody for long. Somebody with a
better claim (an erasure against a build) marks a lease as wanted; its holder sees that when renewing and lets
go at its next chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from unlearnd.ledger.connection import Ledger, hold_rows, in_postgres, many


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

    A lease can be had when nobody holds it, when it ran out, or when its holder is in `free`: known dead. One that
    would last longer than if it were taken now was given before the clock went back: it is cut to that, so that
    a dead holder blocks nobody for longer than ever; a living one renews it.
    """
    ordered, may = sorted(names), (holder, *free)
    marks, others = (",".join("?" * len(some)) for some in (ordered, may))
    asked = f"SELECT name, holder, expires FROM lease WHERE name IN ({marks}) ORDER BY name"
    while True:
        try:
            with ledger.write_aside() as connection:
                held = [Lease(*row) for row in connection.exec_driver_sql(asked, tuple(ordered))]
                blocking = [lease for lease in held if lease.expires > now and lease.holder not in may]
                if not blocking and in_postgres(connection):
                    # Rows that somebody is changing this moment are skipped: they cannot be had, whoever has them.
                    sql = f"{asked}{hold_rows(connection, 'SKIP LOCKED')}"
                    ours = {row[0] for row in connection.exec_driver_sql(sql, tuple(ordered))}
                    blocking = [lease for lease in held if lease.name not in ours]
                if blocking:
                    _cut(connection, blocking, expires)
                    return blocking
                # Everybody takes in the order of names, so nobody waits for somebody who waits for them.
                sql = (
                    "INSERT INTO lease (name, holder, expires, wanted) VALUES (?, ?, ?, FALSE) ON CONFLICT (name) "
                    "DO UPDATE SET holder = excluded.holder, expires = excluded.expires, wanted = FALSE "
                    f"WHERE lease.expires <= ? OR lease.holder IN ({others})"
                )
                taken = connection.exec_driver_sql(sql, [(name, holder, expires, now, *may) for name in ordered])
                if taken.rowcount == len(ordered):
                    return []
                raise _Overtaken
        except _Overtaken:
            continue


def want(ledger: Ledger, names: Sequence[str]) -> None:
    """Ask the holders of `names` to let go. One whose lease is being changed this moment must be asked again."""
    marks = ",".join("?" * len(names))
    with ledger.write_aside() as connection:
        sql = f"SELECT name FROM lease WHERE name IN ({marks}) ORDER BY name{hold_rows(connection, 'SKIP LOCKED')}"
        rows = connection.exec_driver_sql(sql, tuple(names)).all()
        many(connection, "UPDATE lease SET wanted = TRUE WHERE name = ?", [(row[0],) for row in rows])


def renew(ledger: Ledger, holder: str, expires: float) -> tuple[set[str], bool]:
    """Extend all leases of `holder`; return which it still has, and whether somebody wants one of them."""
    with ledger.write_aside() as connection:
        _hold_all_of(connection, holder)
        connection.exec_driver_sql("UPDATE lease SET expires = ? WHERE holder = ?", (expires, holder))
    return look(ledger, holder)


def look(ledger: Ledger, holder: str) -> tuple[set[str], bool]:
    """Return which leases `holder` has, and whether somebody wants one of them."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT name, wanted FROM lease WHERE holder = ?", (holder,)).all()
    return {row[0] for row in rows}, any(row[1] for row in rows)


def drop(ledger: Ledger, holder: str) -> None:
    """Give back all leases of `holder`."""
    with ledger.write_aside() as connection:
        _hold_all_of(connection, holder)
        connection.exec_driver_sql("DELETE FROM lease WHERE holder = ?", (holder,))


class _Overtaken(Exception):
    """Somebody entered one of the leases between looking and taking: undo, look again."""


def _cut(connection: Connection, blocking: Sequence[Lease], longest: float) -> None:
    many(
        connection,
        "UPDATE lease SET expires = ? WHERE name = ? AND holder = ? AND expires > ?",
        [(longest, lease.name, lease.holder, longest) for lease in blocking if lease.expires > longest],
    )


def _hold_all_of(connection: Connection, holder: str) -> None:
    """Hold on to a holder's rows in the order of names, as everybody does."""
    if in_postgres(connection):
        sql = f"SELECT name FROM lease WHERE holder = ? ORDER BY name{hold_rows(connection)}"
        connection.exec_driver_sql(sql, (holder,)).all()
