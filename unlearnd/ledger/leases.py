"""Leases: who may write what, for how long.

A lease has a holder and runs out unless renewed, so a dead worker blocks nobody for long. Somebody with a
better claim (an erasure against a build) marks a lease as wanted; its holder sees that when renewing and lets
go at its next chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from unlearnd.ledger.connection import LEASES, Ledger, hold_rows, in_postgres, many


def ingest_lease(dataset: str) -> str:
    """Return the name of the lease without which nobody adds points to a dataset or seals it."""
    return f"ingest/{dataset}"


def data_lease(dataset: str, shard: int) -> str:
    """Return the name of the lease without which nobody changes a shard's slices or their roots."""
    return f"data/{dataset}/{shard}"


def build_lease(model: str, shard: int) -> str:
    """Return the name of the lease without which nobody writes or destroys checkpoints of a shard."""
    return f"build/{model}/{shard}"


def telling_lease() -> str:
    """Return the name of the lease without which nobody tells recipients."""
    return "recipients"


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
    marks = ",".join("?" * len(names))
    asked = f"SELECT name, holder, expires FROM lease WHERE name IN ({marks}) ORDER BY name"
    with ledger.write_aside() as connection:
        # Takers come one after the other, so none waits for a row that another is about to enter.
        ledger.take_turn(connection, LEASES)
        # Rows that a holder is changing this moment are skipped: they cannot be had, and nobody waits for them.
        rows = connection.exec_driver_sql(asked + hold_rows(connection, "SKIP LOCKED"), tuple(names))
        held = [Lease(*row) for row in rows]
        blocking = [lease for lease in held if lease.expires > now and lease.holder not in (holder, *free)]
        if in_postgres(connection):
            ours = {lease.name for lease in held}
            rows = connection.exec_driver_sql(asked, tuple(names))
            blocking += [lease for lease in (Lease(*row) for row in rows) if lease.name not in ours]
        if blocking:
            _cut(connection, [lease for lease in held if lease in blocking], expires)
        else:
            many(
                connection,
                "INSERT INTO lease (name, holder, expires, wanted) VALUES (?, ?, ?, FALSE) ON CONFLICT (name) "
                "DO UPDATE SET holder = excluded.holder, expires = excluded.expires, wanted = FALSE",
                [(name, holder, expires) for name in names],
            )
        return blocking


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


def left_alone(ledger: Ledger, holder: str) -> int:
    """Return how many leases `holder` has that nobody wants: what is asked all the time while work goes on."""
    return int(ledger.peek("SELECT COUNT(*) FROM lease WHERE holder = ? AND NOT wanted", holder))


def all_leases(ledger: Ledger) -> list[Lease]:
    """Return every lease that was taken and not given back."""
    with ledger.read() as connection:
        return [Lease(*row) for row in connection.exec_driver_sql("SELECT name, holder, expires FROM lease")]


def drop(ledger: Ledger, holder: str) -> None:
    """Give back all leases of `holder`."""
    with ledger.write_aside() as connection:
        _hold_all_of(connection, holder)
        connection.exec_driver_sql("DELETE FROM lease WHERE holder = ?", (holder,))


def _cut(connection: Connection, blocking: Sequence[Lease], longest: float) -> None:
    many(
        connection,
        "UPDATE lease SET expires = ? WHERE name = ?",
        [(longest, lease.name) for lease in blocking if lease.expires > longest],
    )


def _hold_all_of(connection: Connection, holder: str) -> None:
    """Hold on to a holder's rows in the order of names, as everybody does."""
    if in_postgres(connection):
        sql = f"SELECT name FROM lease WHERE holder = ? ORDER BY name{hold_rows(connection)}"
        connection.exec_driver_sql(sql, (holder,)).all()
