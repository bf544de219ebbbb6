"""Backups that were made of an encrypted store: for whom erasures leave a way to open what they rewrite.

A row has a public key. The private half is in the file of that backup, and nowhere else.
"""

import json
from dataclasses import dataclass

from unlearnd.ledger.connection import Ledger

KEPT = 32
"""For how many backups slots are made, the newest; each costs 67 bytes and 45 µs for every object rewritten."""


@dataclass(frozen=True)
class Made:
    """A backup, as far as the store remembers it."""

    id: str
    public: bytes


def enter(ledger: Ledger, made: Made, at: str) -> None:
    """Remember a backup that is about to be made, and forget those that are too many."""
    with ledger.write() as connection:
        known = connection.exec_driver_sql("SELECT id, points FROM dataset").all()
        counts = json.dumps({str(dataset): points for dataset, points in known})
        connection.exec_driver_sql(
            "INSERT INTO backup (id, public, points, made_at) VALUES (?, ?, ?, ?)", (made.id, made.public, counts, at)
        )
        connection.exec_driver_sql(
            "DELETE FROM backup WHERE id NOT IN (SELECT id FROM backup ORDER BY made_at DESC, id LIMIT ?)", (KEPT,)
        )


def forget(ledger: Ledger, made: Made) -> None:
    """Forget a backup that came to nothing."""
    with ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM backup WHERE id = ?", (made.id,))


def having(ledger: Ledger, dataset_id: int, position: int) -> list[bytes]:
    """Return the public keys of the backups that have the segment that begins at this position, oldest first.

    One that is older than the points must not be able to open them: it never was, and whoever looks for what to destroy
    after an erasure would not think of it.
    """
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT public, points FROM backup ORDER BY made_at, id").all()
    return [bytes(public) for public, counts in rows if position < json.loads(counts).get(str(dataset_id), 0)]
