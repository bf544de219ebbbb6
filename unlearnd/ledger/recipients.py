"""Who was given which model, and what came of telling them of erasures."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from unlearnd.ledger.connection import Ledger, stamp


@dataclass(frozen=True)
class Recipient:
    """Somebody who was given a model."""

    id: str
    name: str
    model: str
    given_at: str
    ended_at: str | None
    """When they no longer had it; None: they have it."""


@dataclass(frozen=True)
class Notice:
    """What came of telling a recipient of an erasure."""

    erasure_id: str
    recipient_id: str
    outcome: str
    reason: str
    """Which plugin did it, or who says so, as a code or a name."""
    at: str


_RECIPIENT = "SELECT id, name, model, given_at, ended_at FROM recipient"


def recipients(ledger: Ledger) -> list[Recipient]:
    """Return everybody who was ever given a model, by model and name."""
    with ledger.read() as connection:
        found = [Recipient(*row) for row in connection.exec_driver_sql(_RECIPIENT)]
    # Sorted here: how a database sorts text depends on how it was set up.
    return sorted(found, key=lambda one: (one.model, one.name, one.given_at, one.id))


def enter_recipient(ledger: Ledger, recipient: Recipient) -> Recipient:
    """Record that somebody was given a model; where they have it already, return what is recorded."""
    same = f"{_RECIPIENT} WHERE name = ? AND model = ? AND ended_at IS NULL"
    with ledger.write() as connection:
        known = connection.exec_driver_sql(same, (recipient.name, recipient.model)).one_or_none()
        if known is not None:
            return Recipient(*known)
        connection.exec_driver_sql(
            "INSERT INTO recipient (id, name, model, given_at) VALUES (?, ?, ?, ?)",
            (recipient.id, recipient.name, recipient.model, recipient.given_at),
        )
    return recipient


def end_recipient(ledger: Ledger, recipient_id: str, now: datetime) -> None:
    """Record that somebody no longer has a model."""
    with ledger.write() as connection:
        connection.exec_driver_sql(
            "UPDATE recipient SET ended_at = ? WHERE id = ? AND ended_at IS NULL", (stamp(now), recipient_id)
        )


def notices(ledger: Ledger) -> list[Notice]:
    """Return what came of every telling."""
    sql = "SELECT erasure_id, recipient_id, outcome, reason, at FROM notice ORDER BY at, erasure_id, recipient_id"
    with ledger.read() as connection:
        return [Notice(*row) for row in connection.exec_driver_sql(sql)]


def enter_notices(ledger: Ledger, told: Sequence[Notice]) -> None:
    """Record what came of telling; a later outcome takes the place of an earlier one."""
    with ledger.write() as connection:
        for one in told:
            connection.exec_driver_sql(
                "INSERT INTO notice (erasure_id, recipient_id, outcome, reason, at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (erasure_id, recipient_id) DO UPDATE SET outcome = excluded.outcome, "
                "reason = excluded.reason, at = excluded.at",
                (one.erasure_id, one.recipient_id, one.outcome, one.reason, one.at),
            )
