"""A ledger in a file of SQLite.

Used so that nothing deleted stays readable: `secure_delete` overwrites freed bytes, and a scrub empties the
write-ahead log, which would otherwise keep old pages. Writers take the lock when they begin, so a transaction never
fails half-way because another one was quicker.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError

from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.ledger.database import HOW, READ

_BUSY_SECONDS = 60
_ROOM = 1 << 18
"""Bytes that SQLite needs beside a ledger to begin with: an index of its write-ahead log, and some pages of that."""
_DISK = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
"""Errors that are the disk's, or the folder's, and not the file's."""


class SQLite:
    """A file."""

    kind = "sqlite"
    time: str | None = None
    remnants: tuple[str, ...] = ()

    def __init__(self, url: URL) -> None:
        assert url.database
        self.path = Path(url.database)
        self.place = str(self.path)
        self.engine = create_engine(url, connect_args={"timeout": _BUSY_SECONDS}, hide_parameters=True)
        event.listen(self.engine, "connect", _connect)
        event.listen(self.engine, "begin", _begin)

    def reserve(self, again: bool = False) -> None:
        try:
            self.path.touch(mode=0o600, exist_ok=again)
        except FileExistsError:
            raise RefusedError(f"there is a file at {self.path} already; a ledger is never overwritten") from None
        except OSError as error:
            raise StorageError(f"the ledger {self.path} cannot be made: {error.strerror}") from None

    def settle(self, connection: Connection) -> None:
        """Nothing to do: the file is ours."""

    def guards(self) -> tuple[str, ...]:
        return tuple(
            f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
            for table in ("leaf", "node")
            for verb in ("UPDATE", "DELETE")
        )

    def check(self) -> str:
        path = self.path
        if not path.exists():
            raise NotFoundError(f"there is no ledger at {path}")
        if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            raise StorageError(f"the ledger {path} or its folder cannot be written to")
        try:
            # Read-only: what is not ours must not be changed by a mere look at it.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.Error as error:
            raise self._unreadable(error) from None
        if row is None:
            raise DamagedStoreError(f"{path} is not a ledger, or damaged: it has no schema")
        return str(row[0])

    def tables(self) -> Sequence[str]:
        if not self.path.exists() or not self.path.stat().st_size:
            return []
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
                return [row[0] for row in rows]
        except sqlite3.Error as error:
            raise self._unreadable(error) from None

    def discard(self) -> None:
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.path}{ending}").unlink(missing_ok=True)

    def back_up(self, target: Path) -> None:
        target.touch(mode=0o600, exist_ok=False)
        try:
            with closing(sqlite3.connect(self.path)) as ledger, closing(sqlite3.connect(target)) as copy:
                # All pages in one go: one moment, whoever writes meanwhile.
                ledger.backup(copy)
        except sqlite3.Error as error:
            raise StorageError(f"the ledger {self.path} cannot be copied: {self._said(error)}") from None
        with target.open("rb") as file:
            os.fsync(file.fileno())

    def take_turn(self, connection: Connection, among: str) -> None:
        """Nothing to do: whoever writes took the lock when it began."""

    def scrub(self, connect: Callable[[], AbstractContextManager[Connection]], patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            with connect() as connection:
                # The waiting is done here: SQLite's own would hold the writers up for all of it.
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
                row = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
                connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * _BUSY_SECONDS}")
            if row[0] == 0:
                return
            if time.monotonic() > deadline:
                raise StorageError("the ledger's write-ahead log cannot be emptied: another process keeps reading it")
            time.sleep(0.05)

    def refusal(self, error: DBAPIError) -> UnlearndError:
        if isinstance(error, OperationalError) and "no such table" in str(error.orig):
            return StorageError(f"the ledger cannot be used: {error.orig}; if it was moved, open the store again")
        if isinstance(error, OperationalError):
            return StorageError(f"the ledger cannot be used: {self._said(error.orig)}")
        return DamagedStoreError(f"the ledger refused a change: {error.orig}")

    def _unreadable(self, error: sqlite3.Error) -> UnlearndError:
        """Return why a file cannot be read as a ledger: a disk that fails is not yet a file that is damaged."""
        if _code(error) in _DISK:
            return StorageError(f"the ledger {self.path} cannot be used: {self._said(error)}")
        return DamagedStoreError(f"{self.path} is not a ledger, or damaged: {error}")

    def _said(self, error: BaseException | None) -> str:
        """Return what SQLite said; without room for its files beside the ledger it says little."""
        if _code(error) in _DISK:
            disk = os.statvfs(self.path.parent)
            if _code(error) == sqlite3.SQLITE_FULL or disk.f_bavail * disk.f_frsize < _ROOM:
                return "the disk is full"
        return str(error)


def _code(error: BaseException | None) -> int:
    """Return the kind of an error of SQLite, without what it adds to it; 0 where it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _connect(dbapi_connection: Any, _record: Any) -> None:
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


def _begin(connection: Connection) -> None:
    how = connection.get_execution_options().get(HOW)
    if how is not None:
        connection.exec_driver_sql("BEGIN" if how == READ else "BEGIN IMMEDIATE")
