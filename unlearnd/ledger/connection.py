"""Open a ledger and run transactions on it.

The same ledger in a file of SQLite or in PostgreSQL: what differs is in `sqlite` and `postgres`. Transactions that
write come one after the other, so each sees all that the one before it did and none fails because another was quicker.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from unlearnd.errors import DamagedStoreError, InputError, RefusedError
from unlearnd.ledger.database import ASIDE, BULK, HOW, LEASES, READ, SCHEMA, WRITE, WRITERS, Database
from unlearnd.ledger.postgres import PostgreSQL
from unlearnd.ledger.sqlite import SQLite

__all__ = [
    "LEASES",
    "MOVED",
    "MOVING",
    "Ledger",
    "copy_in",
    "drop_tables",
    "hold_rows",
    "in_postgres",
    "make_tables",
    "many",
    "moment_from",
    "stamp",
]

MOVING, MOVED = "moving", "moved"
"""Stand in the place of the schema's number while a move is not finished: in the new ledger, and in what is left."""


def stamp(now: datetime) -> str:
    """Return a moment as it is stored: UTC, to the second."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_from(stamped: str) -> datetime:
    """Return a stored moment as a time."""
    return datetime.strptime(stamped, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def many(connection: Connection, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Run a statement once per row, in the driver; no rows, nothing done."""
    listed = list(rows)
    if listed:
        connection.exec_driver_sql(sql, listed)


def in_postgres(connection: Connection) -> bool:
    """Say whether a ledger is in PostgreSQL, for the few statements that only it has a better way for."""
    return connection.dialect.name == PostgreSQL.kind


def hold_rows(connection: Connection, otherwise: str = "") -> str:
    """Return what makes a SELECT keep others from changing its rows until the transaction ends.

    SQLite needs nothing: there, nobody else writes. `otherwise` says what to do about rows that are held already.
    """
    return f" FOR UPDATE {otherwise}" if in_postgres(connection) else ""


def copy_in(connection: Connection, into: str, types: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Load rows by PostgreSQL's COPY; `into` is a table with its columns in brackets."""
    raw: Any = connection.connection.driver_connection
    with raw.cursor() as cursor, cursor.copy(f"COPY {into} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


def make_tables(ledger: "Ledger", connection: Connection, schema: str) -> None:
    """Make all tables of a new ledger, and say which schema they are."""
    from unlearnd.ledger.tables import METADATA  # slow to import, and needed only to make and destroy

    METADATA.create_all(connection)
    for guard in ledger.guards():
        connection.exec_driver_sql(guard)
    connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
    connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (schema,))


def drop_tables(ledger: "Ledger", connection: Connection, but: Sequence[str] = ()) -> None:
    """Destroy every table of a ledger, within a transaction."""
    from unlearnd.ledger.tables import METADATA  # slow to import, and needed only to make and destroy

    known = [table.name for table in reversed(METADATA.sorted_tables)]
    for table in [*known, "moving", "alembic_version"]:
        if table not in but:
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {table}")
    if in_postgres(connection):
        connection.exec_driver_sql("DROP FUNCTION IF EXISTS refuse_change()")


class Ledger:
    """An open ledger. Close it when done."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._database = _database(url)
        engine = self._database.engine
        self._reader, self._writer, self._loader, self._sider = (
            engine.execution_options(**{HOW: how}) for how in (READ, WRITE, BULK, ASIDE)
        )

    @classmethod
    def create(cls, url: str) -> "Ledger":
        """Make an empty ledger at `url`."""
        ledger = cls(url)
        ledger._database.reserve()
        with ledger.write() as connection:
            ledger.make_room(connection)
            make_tables(ledger, connection, SCHEMA)
        return ledger

    @classmethod
    def open(cls, url: str) -> "Ledger":
        """Open the ledger at `url`; raise when there is none or when it has another schema."""
        found = cls.check(url)
        ledger = cls(url)
        if found in (MOVING, MOVED):
            raise RefusedError("the ledger is being moved to another database: run `unlearnd ledger copy` again")
        if found != SCHEMA:
            raise DamagedStoreError(
                f"the ledger has schema {found}, this release needs {SCHEMA}: run `unlearnd migrate`"
            )
        return ledger

    @classmethod
    def check(cls, url: str) -> str:
        """Return the schema of the ledger at `url`; raise when there is none, or something else."""
        return _database(url).check()

    @classmethod
    def discard(cls, url: str) -> None:
        """Remove a ledger that was just made and will not be used."""
        _database(url).discard()

    @property
    def place(self) -> str:
        """Where it is, for a sentence."""
        return self._database.place

    def schema(self) -> str:
        """Return its schema's number; raise where there is no ledger."""
        return self._database.check()

    def tables(self) -> Sequence[str]:
        """Return the names of all tables, whosever they are; none where nothing is there at all."""
        return self._database.tables()

    def guards(self) -> tuple[str, ...]:
        """Return the statements that make the log append-only."""
        return self._database.guards()

    def reserve(self, again: bool = False) -> None:
        """Make room for a new ledger before anything is written; with `again`, what was reserved before will do."""
        self._database.reserve(again)

    def make_room(self, connection: Connection) -> None:
        """Make room for a new ledger's tables in the transaction that makes them; refuse where there is something."""
        self._database.settle(connection)

    @property
    def remnants(self) -> tuple[str, ...]:
        """What deleted rows may still be found in after a scrub, as a receipt says it."""
        return self._database.remnants

    def close(self) -> None:
        """Let go of the database."""
        self._database.engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Run one transaction that writes: all of it or nothing, and no other at the same time."""
        with self._translated(), _begun(self._writer) as connection:
            yield connection

    @contextmanager
    def load(self) -> Iterator[Connection]:
        """Run one transaction that writes much of its own first and calls `take_turn` before the rest."""
        with self._translated(), _begun(self._loader) as connection:
            yield connection

    @contextmanager
    def write_aside(self) -> Iterator[Connection]:
        """Run one short transaction about leases alone: it waits for no writer and appends nothing."""
        with self._translated(), _begun(self._sider) as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Run queries that see one moment of the ledger."""
        with self._translated(), _begun(self._reader) as connection:
            yield connection

    def take_turn(self, connection: Connection, among: str = WRITERS) -> None:
        """Wait until no other writer (or taker of leases) is before this transaction, and keep the rest waiting."""
        self._database.take_turn(connection, among)

    def peek(self, sql: str, *values: Any) -> Any:
        """Return one value by the shortest way: for what is asked before every answer."""
        with self._translated():
            try:
                with self._database.engine.connect() as connection:
                    return connection.exec_driver_sql(sql, values).scalar()
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            # The server went away and came back while nothing was asked: ask again, by a new connection.
            with self._database.engine.connect() as connection:
                return connection.exec_driver_sql(sql, values).scalar()

    def time(self, here: float) -> float:
        """Return the time by the database's own clock, which all who use it share; `here` where it has none."""
        sql = self._database.time
        return float(self.peek(sql)) if sql else here

    def copy_file(self, target: Path) -> bool:
        """Copy a ledger that is a file, as of one moment, to a new one; False where it is none."""
        if isinstance(self._database, SQLite):
            self._database.back_up(target)
            return True
        return False

    def scrub(self, patience: float = 10.0) -> None:
        """Make what was deleted unreadable, as far as the database can; see `remnants`."""
        with self._translated():
            try:
                self._database.scrub(self._database.engine.connect, patience)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                self._database.scrub(self._database.engine.connect, patience)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what the database raises into our errors, without the values it was given."""
        try:
            yield
        except DBAPIError as error:
            raise self._database.refusal(error) from None


def _database(url: str) -> Database:
    try:
        parsed = make_url(url)
    except ArgumentError:
        # Not the URL itself, nor SQLAlchemy's words about it: there may be a password in it.
        raise InputError("the ledger URL cannot be used: it is not of the form name://place") from None
    if parsed.drivername == "sqlite" and parsed.database:
        return SQLite(parsed)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return PostgreSQL(parsed)
    raise InputError(
        "a ledger is in SQLite or PostgreSQL: give a URL that begins with sqlite:/// or postgresql+psycopg://"
    )


@contextmanager
def _begun(engine: Engine) -> Iterator[Connection]:
    connection = engine.connect()
    try:
        try:
            transaction = connection.begin()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            # The server went away and came back while this connection lay idle: nothing had begun on it.
            connection.close()
            connection = engine.connect()
            transaction = connection.begin()
        with transaction:
            yield connection
    finally:
        connection.close()
