"""A ledger in a schema of a PostgreSQL database.

Whoever writes first takes the store's one advisory lock, so transactions that append to the log come one after the
other, as in SQLite; leases have their own short transactions beside that. Readers see one moment and wait for nobody.
A password is never part of the URL: libpq finds it in PGPASSWORD, a pgpass file or a service file.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError

from unlearnd.errors import (
    BusyError,
    DamagedStoreError,
    InputError,
    NotFoundError,
    RefusedError,
    StorageError,
    UnlearndError,
)
from unlearnd.ledger.database import ASIDE, BULK, HOW, READ, WRITE, WRITERS

DEFAULT_SCHEMA = "unlearnd"
SCRUBBED = ("users", "holding", "segment", "slice", "request", "lease")
"""The tables that an erasure takes rows or values out of."""

_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_SESSION = (
    "SET search_path TO {schema}; "
    # Nobody waits for ever, and nobody who vanished in the middle of something keeps others waiting for ever.
    "SET lock_timeout TO '60s'; SET idle_in_transaction_session_timeout TO '60s'; "
    # What is committed is durable, even where the server is set up to say so too early.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)
_BEGIN = {
    READ: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    # A transaction that waits for its turn must see what the one before it did: a moment per statement.
    WRITE: "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
    BULK: "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
    ASIDE: "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
}
_REFUSE_CHANGE = (
    "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the log is append-only'; END $$"
)


# https://www.postgresql.org/docs/current/errcodes-appendix.html
_RAISED = "P0001"
_NO_TABLE = "42P01"
_LOCK_TIMEOUT = "55P03"
_CUT = ("57P01", "57P02", "57P03", "25P03")  # shut down, crashed, starting up, idle for too long in a transaction


class PostgreSQL:
    """A schema of a database."""

    kind = "postgresql"
    time: str | None = "SELECT extract(epoch FROM clock_timestamp())"
    remnants: tuple[str, ...] = ("ledger-dead-rows", "ledger-write-ahead-log", "ledger-replicas")

    def __init__(self, url: URL) -> None:
        query = dict(url.query)
        schema = query.pop("schema", DEFAULT_SCHEMA)
        if url.password is not None or {"password", "sslpassword"} & query.keys():
            raise InputError(
                "a ledger's URL is written to unlearnd.toml and must hold no password: leave it out, and give it in "
                "the environment (PGPASSWORD) or in a pgpass or service file"
            )
        if not isinstance(schema, str) or not _NAME.fullmatch(schema):
            raise InputError("the schema of a ledger is a name of a to z, 0 to 9 and _, such as ?schema=digits")
        try:
            import psycopg  # noqa: F401  (optional: only ledgers in PostgreSQL need it)
        except ImportError:
            raise InputError("a ledger in PostgreSQL needs psycopg: pip install 'unlearnd[postgres]'") from None
        self.schema = schema
        self.place = f"schema '{schema}' of the database '{url.database or 'that libpq is set to'}'"
        self.engine = create_engine(
            url.set(drivername="postgresql+psycopg", query=query),
            # We say BEGIN ourselves, and so know how: the driver must not.
            isolation_level="AUTOCOMMIT",
            connect_args={"application_name": "unlearnd", "client_encoding": "utf8"}
            | ({} if "connect_timeout" in query else {"connect_timeout": 10}),
            hide_parameters=True,
        )
        event.listen(self.engine, "connect", self._connect)
        event.listen(self.engine, "begin", self._begin)
        event.listen(self.engine, "before_cursor_execute", _translate, retval=True)

    def reserve(self, again: bool = False) -> None:
        """Nothing to do before the first connection."""

    def settle(self, connection: Connection) -> None:
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        if encoding != "UTF8":
            raise RefusedError(f"the database keeps text as {encoding}; a ledger needs one made with ENCODING 'UTF8'")
        if not self._has_schema(connection):
            connection.exec_driver_sql(f"CREATE SCHEMA {self.schema}")
        if self._tables(connection):
            raise RefusedError(
                f"there are tables in {self.place} already, and a ledger is never overwritten; "
                "one database can hold several stores, each in a schema of its own: name another with ?schema=NAME"
            )

    def guards(self) -> tuple[str, ...]:
        return guards()

    def check(self) -> str:
        try:
            with self.engine.connect() as connection:
                if connection.exec_driver_sql("SELECT to_regclass('alembic_version')").scalar() is None:
                    raise NotFoundError(f"there is no ledger in {self.place}")
                found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        except DBAPIError as error:
            raise self.refusal(error) from None
        finally:
            self.engine.dispose()
        if found is None:
            raise DamagedStoreError(f"what is in {self.place} is not a ledger, or damaged: it has no schema number")
        return str(found)

    def tables(self) -> Sequence[str]:
        try:
            with self.engine.connect() as connection:
                return self._tables(connection)
        except DBAPIError as error:
            raise self.refusal(error) from None
        finally:
            self.engine.dispose()

    def discard(self) -> None:
        try:
            with self.engine.execution_options(**{HOW: WRITE}).begin() as connection:
                for table in self._tables(connection):
                    connection.exec_driver_sql(f'DROP TABLE IF EXISTS "{table}" CASCADE')
                connection.exec_driver_sql("DROP FUNCTION IF EXISTS refuse_change() CASCADE")
        except DBAPIError as error:
            raise self.refusal(error) from None
        finally:
            self.engine.dispose()

    def take_turn(self, connection: Connection, among: str) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_number(f'unlearnd/{among}/{self.schema}')})")

    def scrub(self, connect: Callable[[], AbstractContextManager[Connection]], patience: float) -> None:
        with connect() as connection:
            # Outside any transaction. Rows that an old reader may still see stay until the next time.
            connection.exec_driver_sql(f"VACUUM (SKIP_LOCKED false) {', '.join(SCRUBBED)}")

    def refusal(self, error: DBAPIError) -> UnlearndError:
        code = getattr(error.orig, "sqlstate", None)
        if code == _LOCK_TIMEOUT:
            return BusyError("the ledger is busy: another process has been writing for a minute; try again")
        if error.connection_invalidated or isinstance(error, InterfaceError) or code in _CUT:
            return StorageError(
                "the ledger cannot be used: the connection to the database was cut; "
                "what was not committed is undone, run the command again"
            )
        if code == _NO_TABLE:
            said = _said(error.orig)
            return StorageError(f"the ledger cannot be used: {said}; if it was moved, open the store again")
        if code == _RAISED or isinstance(error, IntegrityError):
            return DamagedStoreError(f"the ledger refused a change: {_said(error.orig)}")
        return StorageError(f"the ledger cannot be used: {_said(error.orig)}")

    def _connect(self, dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.execute(_SESSION.format(schema=self.schema))

    def _begin(self, connection: Connection) -> None:
        how = connection.get_execution_options().get(HOW)
        if how is not None:
            connection.exec_driver_sql(_BEGIN[how])
            if how == WRITE:
                self.take_turn(connection, WRITERS)

    def _has_schema(self, connection: Connection) -> bool:
        sql = "SELECT count(*) FROM pg_namespace WHERE nspname = ?"
        return bool(connection.exec_driver_sql(sql, (self.schema,)).scalar_one())

    def _tables(self, connection: Connection) -> Sequence[str]:
        sql = (
            "SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
            "WHERE nspname = ? AND relkind IN ('r', 'p', 'v', 'm', 'f') ORDER BY relname"
        )
        return [row[0] for row in connection.exec_driver_sql(sql, (self.schema,))]


def guards() -> tuple[str, ...]:
    """Return the statements that make the log append-only."""
    return (
        _REFUSE_CHANGE,
        *(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
            for table in ("leaf", "node")
        ),
    )


def _translate(
    _connection: Connection, _cursor: Any, statement: str, parameters: Any, context: Any, _many: bool
) -> tuple[str, Any]:
    """Turn the ledger's SQL, which marks values with `?`, into the driver's."""
    if context is None or context.compiled is None:
        statement = _marked(statement)
    return statement, parameters


@lru_cache(maxsize=64)
def _number(name: str) -> int:
    """Return the number of an advisory lock: PostgreSQL knows them by nothing else."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


@lru_cache(maxsize=2048)
def _marked(statement: str) -> str:
    return statement.replace("%", "%%").replace("?", "%s")


def _said(error: BaseException | None) -> str:
    """Return the first line of what server or driver said: the lines after it may hold values."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    text = (str(primary or error or "no reason given").strip().splitlines() or ["no reason given"])[0]
    return text.removeprefix("connection failed: ")
