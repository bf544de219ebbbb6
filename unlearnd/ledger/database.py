"""What a ledger asks of the database it is kept in.

Nearly all of the ledger is one SQL that every database understands, with `?` for a value. The rest is here: how to
connect and begin, where a ledger is and whether there is one, and what must be done so that nothing deleted stays.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from unlearnd.errors import UnlearndError

SCHEMA = "0007"
"""The newest migration; a store whose `alembic_version` differs is not opened."""

READ, WRITE, BULK, ASIDE = "read", "write", "bulk", "aside"
"""How a transaction begins: to read one moment, to write in turn, to load much and then wait for its turn, or to
change leases, which waits for nobody."""

WRITERS, LEASES = "ledger", "leases"
"""Among whom a transaction waits for its turn: all who write, or all who take leases."""

HOW = "unlearnd"
"""The execution option that says so; without it a statement runs by itself."""


class Database(Protocol):
    """Where a ledger is kept."""

    kind: str
    """Its name in SQLAlchemy."""
    place: str
    """How a sentence names it."""
    engine: Engine
    time: str | None
    """The query for the time in seconds by its own clock; None where it has none."""
    remnants: tuple[str, ...]
    """What deleted rows may still be found in when a scrub is done, as a receipt says it."""

    def reserve(self, again: bool = False) -> None:
        """Make room for a new ledger before the first connection; refuse where there is something.

        With `again`, room that was made before and not used will do.
        """

    def settle(self, connection: Connection) -> None:
        """Make room within the transaction that makes the tables; refuse where there is something."""

    def guards(self) -> tuple[str, ...]:
        """Return the statements that make the log append-only."""

    def check(self) -> str:
        """Return the schema's number; raise where there is no ledger, or something else. Changes nothing."""

    def tables(self) -> Sequence[str]:
        """Return the names of all tables that are there, whosever they are. Changes nothing."""

    def discard(self) -> None:
        """Remove the ledger and all it left behind."""

    def take_turn(self, connection: Connection, among: str) -> None:
        """Wait until no other transaction of this kind goes on, and keep others waiting until this one ends."""

    def scrub(self, connect: Callable[[], AbstractContextManager[Connection]], patience: float) -> None:
        """Make what was deleted unreadable, as far as the database can."""

    def refusal(self, error: DBAPIError) -> UnlearndError:
        """Return what the driver raised as one of our errors, without the values it was given."""
