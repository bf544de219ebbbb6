"""Move a ledger from one database to another, or copy it, all of it or nothing.

Everything is copied in one transaction of the new database while the old one's writers wait, and compared row by
row. Then the old ledger ends, in the transaction that kept its writers waiting: whoever still has it open finds no
tables and can neither write what would be lost nor answer from what has changed elsewhere. Killed anywhere, the same
move run again goes on; until it is finished, the new one cannot be opened.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Float, Integer, LargeBinary, Table

from unlearnd.errors import DamagedStoreError, RefusedError
from unlearnd.ledger import log
from unlearnd.ledger.connection import (
    MOVED,
    MOVING,
    Ledger,
    copy_in,
    drop_tables,
    in_postgres,
    make_tables,
    many,
)
from unlearnd.ledger.database import SCHEMA
from unlearnd.steps import Step, reached

_AT_A_TIME = 20_000
_LEFT_OUT = {"lease"}
"""Nobody is at work while a ledger moves."""


@dataclass(frozen=True)
class Moved:
    """What was moved."""

    tables: int
    rows: int
    leaves: int
    root: str


def move(here: str, there: str) -> Moved:
    """Copy the ledger at `here` to `there`, where nothing is, and end it here. `finish` makes the new one usable."""
    with closing(Ledger(here)) as source, closing(Ledger(there)) as target:
        if source.schema() == MOVED:
            if target.schema() != MOVING:
                raise DamagedStoreError(f"the ledger was moved from {source.place}, but not to {target.place}")
            return _measured(target)
        found = target.schema() if target.tables() else None
        if found not in (None, MOVING):
            raise RefusedError(f"there are tables in {target.place} already, and a ledger is never overwritten")
        if found is None:
            target.reserve(again=True)
        with source.write() as old:
            with target.write() as new:
                drop_tables(target, new)
                target.make_room(new)
                make_tables(target, new, MOVING)
                new.exec_driver_sql("CREATE TABLE moving (source VARCHAR NOT NULL)")
                new.exec_driver_sql("INSERT INTO moving VALUES (?)", (here,))
                for table in _tables():
                    _copy(old, new, table)
                _check_same_log(old, new)
            reached(Step.LEDGER_COPIED)
            drop_tables(source, old, but=("alembic_version",))
            old.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (MOVED,))
        reached(Step.LEDGER_ENDED)
        return _measured(target)


def copy(source: Ledger, target_file: Path) -> None:
    """Copy a ledger as of one moment to a new file of SQLite, its owner's alone, while others write."""
    if source.copy_file(target_file):
        return
    with closing(Ledger(f"sqlite:///{target_file}")) as target:
        target.reserve()
        with source.read() as old, target.write() as new:
            target.make_room(new)
            make_tables(target, new, SCHEMA)
            for table in _tables():
                _copy(old, new, table)
            _check_same_log(old, new)
        # Nothing of it may be in a second file: the one is the copy.
        target.scrub()


def is_unfinished(url: str) -> bool:
    """Say whether a move to `url` was begun and not finished."""
    with closing(Ledger(url)) as ledger:
        return ledger.schema() == MOVING


def finish(url: str) -> Moved:
    """Destroy what is left of the ledger that was moved to `url`, and let this one be opened."""
    with closing(Ledger(url)) as ledger:
        source = str(ledger.peek("SELECT source FROM moving"))
        Ledger.discard(source)
        reached(Step.LEDGER_DISCARDED)
        with ledger.write() as connection:
            connection.exec_driver_sql("DROP TABLE moving")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (SCHEMA,))
        return _measured(ledger)


def _tables() -> list[Table]:
    from unlearnd.ledger.tables import METADATA  # slow to import, and needed only here

    return [table for table in METADATA.sorted_tables if table.name not in _LEFT_OUT]


def _copy(old: Connection, new: Connection, table: Table) -> None:
    """Copy one table, and read it again to see that it is the same."""
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    given, count = 0, 0
    for rows in _read(old, table, columns):
        if in_postgres(new):
            copy_in(new, f"{table.name} ({columns})", [_type(column.type) for column in table.columns], rows)
        else:
            marks = ",".join("?" * len(table.columns))
            many(new, f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", rows)
        given, count = given + _sum(rows), count + len(rows)
    taken = 0
    for rows in _read(new, table, columns):
        taken, count = taken + _sum(rows), count - len(rows)
    if given != taken or count:
        raise DamagedStoreError(f"the copy of the table '{table.name}' differs from the table; nothing was changed")
    serial = [column.name for column in table.primary_key.columns if isinstance(column.type, Integer)]
    if in_postgres(new) and len(serial) == 1:
        new.exec_driver_sql(
            f"SELECT setval(pg_get_serial_sequence('{table.name}', '{serial[0]}'), max({serial[0]})) FROM {table.name} "
            f"HAVING max({serial[0]}) > 0 AND pg_get_serial_sequence('{table.name}', '{serial[0]}') IS NOT NULL"
        )


def _read(connection: Connection, table: Table, columns: str) -> Iterator[list[tuple[Any, ...]]]:
    """Yield all rows, some at a time, with the same values from every database."""
    switches = [place for place, column in enumerate(table.columns) if isinstance(column.type, Boolean)]
    order = ", ".join(f'"{column.name}"' for column in table.primary_key.columns)
    found = connection.exec_driver_sql(
        f"SELECT {columns} FROM {table.name} ORDER BY {order}", execution_options={"stream_results": True}
    )
    while rows := found.fetchmany(_AT_A_TIME):
        yield [tuple(row) if not switches else _switched(row, switches) for row in rows]


def _switched(row: Iterable[Any], switches: Sequence[int]) -> tuple[Any, ...]:
    return tuple(bool(value) if place in switches else value for place, value in enumerate(row))


def _sum(rows: Iterable[tuple[Any, ...]]) -> int:
    """Return a sum over rows that does not depend on their order, which databases see differently."""
    return sum(int.from_bytes(hashlib.sha256(repr(row).encode()).digest()) for row in rows)


def _type(kind: Any) -> str:
    if isinstance(kind, BigInteger):
        return "int8"
    if isinstance(kind, Integer):
        return "int4"
    if isinstance(kind, Boolean):
        return "bool"
    if isinstance(kind, Float):
        return "float8"
    return "bytea" if isinstance(kind, LargeBinary) else "text"


def _check_same_log(old: Connection, new: Connection) -> None:
    if log.root_of(old) != log.root_of(new):
        raise DamagedStoreError("the copied log has another root; nothing was changed")


def _measured(ledger: Ledger) -> Moved:
    with ledger.read() as connection:
        size, root = log.root_of(connection)
        counts = [connection.exec_driver_sql(f"SELECT count(*) FROM {t.name}").scalar_one() for t in _tables()]
    return Moved(len(counts), sum(counts), size, root.hex())
