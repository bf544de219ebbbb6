"""Open a ledger and run transactions on it.

SQLite is used so that nothing deleted stays readable: `secure_delete` overwrites freed bytes, and `scrub`
empties the write-ahead log, which would otherwise keep old pages. Writers take the lock when they begin, so a
transaction never fails half-way because another one was quicker.
"""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlmodel import SQLModel

from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.ledger.tables import SCHEMA, TRIGGERS

_BUSY_SECONDS = 60


def stamp(now: datetime) -> str:
    """Return a moment as it is stored: UTC, to the second."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def many(connection: Connection, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Run a statement once per row, in the driver; no rows, nothing done."""
    listed = list(rows)
    if listed:
        connection.exec_driver_sql(sql, listed)


class Ledger:
    """An open ledger. Close it when done."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise InputError(f"the ledger URL cannot be used: {error}") from None
        if parsed.drivername != "sqlite" or not parsed.database:
            raise InputError("this release keeps its ledger in SQLite: give a URL that begins with sqlite:///")
        self._path = Path(parsed.database)
        self._engine = create_engine(parsed, connect_args={"timeout": _BUSY_SECONDS}, hide_parameters=True)
        _prepare_sqlite(self._engine)
        self._writer = self._engine.execution_options(unlearnd_write=True)
        self._peeker = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    @classmethod
    def create(cls, url: str) -> "Ledger":
        """Make an empty ledger at `url`."""
        ledger = cls(url)
        try:
            ledger._path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            raise RefusedError(f"there is a file at {ledger._path} already; a ledger is never overwritten") from None
        except OSError as error:
            raise StorageError(f"the ledger {ledger._path} cannot be made: {error.strerror}") from None
        with ledger.write() as connection:
            SQLModel.metadata.create_all(connection)
            for trigger in TRIGGERS:
                connection.exec_driver_sql(trigger)
            connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
            connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (SCHEMA,))
        return ledger

    @classmethod
    def open(cls, url: str) -> "Ledger":
        """Open the ledger at `url`; raise when there is none or when it has another schema."""
        found = cls.check(url)
        ledger = cls(url)
        if found != SCHEMA:
            raise DamagedStoreError(
                f"the ledger has schema {found}, this release needs {SCHEMA}: run `unlearnd migrate`"
            )
        return ledger

    @classmethod
    def check(cls, url: str) -> str:
        """Return the schema of the ledger at `url`; raise when there is none, or something else."""
        path = cls(url)._path
        if not path.exists():
            raise NotFoundError(f"there is no ledger at {path}")
        if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            raise StorageError(f"the ledger {path} or its folder cannot be written to")
        try:
            # Read-only: what is not ours must not be changed by a mere look at it.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.Error as error:
            raise DamagedStoreError(f"{path} is not a ledger, or damaged: {error}") from None
        if row is None:
            raise DamagedStoreError(f"{path} is not a ledger, or damaged: it has no schema")
        return str(row[0])

    @classmethod
    def discard(cls, url: str) -> None:
        """Remove a ledger that was just made and will not be used."""
        path = cls(url)._path
        for ending in ("", "-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Run one transaction that writes: all of it or nothing."""
        with _translated(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Run queries that see one moment of the ledger."""
        with _translated(), self._engine.begin() as connection:
            yield connection

    def peek(self, sql: str, *values: Any) -> Any:
        """Return one value by the shortest way: for what is asked before every answer."""
        with _translated(), self._peeker.connect() as connection:
            return connection.exec_driver_sql(sql, values).scalar()

    def scrub(self, patience: float = 10.0) -> None:
        """Make what was deleted unreadable in the database's files."""
        deadline = time.monotonic() + patience
        while True:
            with _translated(), self._peeker.connect() as connection:
                # The waiting is done here: SQLite's own would hold the writers up for all of it.
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
                row = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
                connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * _BUSY_SECONDS}")
            if row[0] == 0:
                return
            if time.monotonic() > deadline:
                raise StorageError("the ledger's write-ahead log cannot be emptied: another process keeps reading it")
            time.sleep(0.05)


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(dbapi_connection: Any, _record: Any) -> None:
        # The driver's own BEGIN comes too late and never takes the write lock: we say it ourselves.
        dbapi_connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "secure_delete=ON",
            "foreign_keys=ON",
            "temp_store=MEMORY",
        ):
            dbapi_connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("unlearnd_write") else "BEGIN")


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the database raises into our errors, without the values it was given."""
    try:
        yield
    except OperationalError as error:
        raise StorageError(f"the ledger cannot be used: {error.orig}") from None
    except DBAPIError as error:
        raise DamagedStoreError(f"the ledger refused a change: {error.orig}") from None
