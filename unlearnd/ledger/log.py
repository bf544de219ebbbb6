"""The log's tables: leaves, hashes of perfect subtrees, tree heads, keys, receipts.

`append` runs inside the transaction of the event it records, so that what happened and what the log says can
never part. A tree head is signed only after that transaction is durable.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from unlearnd.ledger.connection import Ledger, many
from unlearnd.merkle import Node, grow, leaf_hash, prove_consistency, prove_inclusion, root_at

Transaction = Connection
"""What those who never speak SQL hand on."""


@dataclass(frozen=True)
class SigningKey:
    """A public key that signs for this store, and the indexes at which it counts: since ≤ index < until."""

    key_id: str
    role: str
    public: bytes
    since: int
    until: int | None


@dataclass(frozen=True)
class ReceiptEntry:
    """Where a receipt's statement is in the log."""

    request_id: str
    leaf: int
    detail: str
    key_id: str | None


def append(connection: Connection, payloads: Sequence[bytes]) -> int:
    """Append leaves within a transaction that writes; return the index of the first."""
    size = size_of(connection)
    if payloads:
        many(
            connection,
            "INSERT INTO leaf (number, body) VALUES (?, ?)",
            [(size + place, payload) for place, payload in enumerate(payloads)],
        )
        grown = grow(size, map(leaf_hash, payloads), _node(connection))
        many(connection, "INSERT INTO node (level, number, hash) VALUES (?, ?, ?)", grown)
    return size


def size_of(connection: Connection) -> int:
    """Return the number of leaves."""
    return int(connection.exec_driver_sql("SELECT coalesce(max(number) + 1, 0) FROM leaf").scalar_one())


def append_alone(ledger: Ledger, payloads: Sequence[bytes]) -> int:
    """Append leaves that record nothing else in the ledger; return the index of the first."""
    with ledger.write() as connection:
        return append(connection, payloads)


def size_and_root(ledger: Ledger) -> tuple[int, bytes]:
    """Return how many leaves are durable, and their root."""
    with ledger.read() as connection:
        return root_of(connection)


def root_of(connection: Connection) -> tuple[int, bytes]:
    """Return how many leaves a transaction sees, and their root."""
    size = size_of(connection)
    return size, root_at(size, _node(connection))


def root_of_first(ledger: Ledger, size: int) -> bytes:
    """Return the root of the first `size` leaves."""
    with ledger.read() as connection:
        return root_at(size, _node(connection))


def leaves(ledger: Ledger, begin: int, end: int) -> list[bytes]:
    """Return the leaves `begin` … `end - 1`."""
    sql = "SELECT body FROM leaf WHERE number >= ? AND number < ? ORDER BY number"
    with ledger.read() as connection:
        return [bytes(row[0]) for row in connection.exec_driver_sql(sql, (begin, end))]


def size_now(ledger: Ledger) -> int:
    """Return how many leaves are durable, by the shortest way."""
    return int(ledger.peek("SELECT coalesce(max(number) + 1, 0) FROM leaf"))


def last_leaf(ledger: Ledger) -> bytes | None:
    """Return the newest leaf; None while there is none."""
    body = ledger.peek("SELECT body FROM leaf ORDER BY number DESC LIMIT 1")
    return None if body is None else bytes(body)


def hashes(ledger: Ledger, level: int, begin: int, end: int) -> list[bytes]:
    """Return the hashes of perfect subtrees at a level."""
    sql = "SELECT hash FROM node WHERE level = ? AND number >= ? AND number < ? ORDER BY number"
    with ledger.read() as connection:
        return [bytes(row[0]) for row in connection.exec_driver_sql(sql, (level, begin, end))]


def inclusion(ledger: Ledger, index: int, size: int) -> list[bytes]:
    """Return the audit path of a leaf."""
    with ledger.read() as connection:
        return prove_inclusion(index, size, _node(connection))


def consistency(ledger: Ledger, old: int, new: int) -> list[bytes]:
    """Return the proof that the log of `old` leaves is a prefix of that of `new`."""
    with ledger.read() as connection:
        return prove_consistency(old, new, _node(connection))


def keep_head(ledger: Ledger, size: int, note: str) -> None:
    """Keep a signed tree head; one that was signed again for the same size replaces it."""
    with ledger.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO tree_head (size, note) VALUES (?, ?) ON CONFLICT (size) DO UPDATE SET note = excluded.note",
            (size, note),
        )


def newest_head(ledger: Ledger) -> tuple[int, str] | None:
    """Return the newest signed tree head and its size."""
    with ledger.read() as connection:
        row = connection.exec_driver_sql("SELECT size, note FROM tree_head ORDER BY size DESC LIMIT 1").one_or_none()
    return (row[0], row[1]) if row else None


def all_heads(ledger: Ledger) -> list[tuple[int, str]]:
    """Return every signed tree head kept, with its size, oldest first."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT size, note FROM tree_head ORDER BY size")
        return [(row[0], row[1]) for row in rows]


def signing_keys(ledger: Ledger, role: str | None = None) -> list[SigningKey]:
    """Return the keys that sign or signed for this store, oldest first."""
    sql = "SELECT key_id, role, public, since, until FROM signing_key"
    with ledger.read() as connection:
        found = [SigningKey(**row._mapping) for row in connection.exec_driver_sql(sql)]
    found.sort(key=lambda key: (key.since, key.key_id))
    return [key for key in found if role in (None, key.role)]


def add_key(connection: Connection, key: SigningKey) -> None:
    """Record a key within a transaction that also appends its leaf."""
    connection.exec_driver_sql(
        "INSERT INTO signing_key (key_id, role, public, since, until) VALUES (?, ?, ?, ?, ?)",
        (key.key_id, key.role, key.public, key.since, key.until),
    )


def end_keys_of(connection: Connection, role: str, until: int) -> None:
    """Record that the key of a role that counts now no longer does from `until` on."""
    connection.exec_driver_sql("UPDATE signing_key SET until = ? WHERE role = ? AND until IS NULL", (until, role))


def end_key(connection: Connection, key_id: str, until: int) -> None:
    """Record that a key no longer counts from `until` on."""
    connection.exec_driver_sql("UPDATE signing_key SET until = ? WHERE key_id = ?", (until, key_id))


def receipt_entries(ledger: Ledger) -> list[ReceiptEntry]:
    """Return where every receipt's statement is, in order."""
    sql = "SELECT request_id, leaf, detail, key_id FROM receipt ORDER BY leaf"
    with ledger.read() as connection:
        return [ReceiptEntry(**row._mapping) for row in connection.exec_driver_sql(sql)]


def outcomes_between(ledger: Ledger, begin: int, end: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests whose receipts are leaves `begin` … `end - 1`, each with what came of it."""
    sql = (
        "SELECT request.id, request.outcome FROM receipt JOIN request ON request.id = receipt.request_id "
        "WHERE receipt.leaf >= ? AND receipt.leaf < ? ORDER BY receipt.leaf"
    )
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(sql, (begin, end))
        return [(row[0], json.loads(row[1]) if row[1] else {}) for row in rows]


def unwritten_receipts(ledger: Ledger) -> list[ReceiptEntry]:
    """Return where the statements of receipts are that are not signed and durable yet, in order."""
    sql = "SELECT request_id, leaf, detail, key_id FROM receipt WHERE key_id IS NULL ORDER BY leaf"
    with ledger.read() as connection:
        return [ReceiptEntry(**row._mapping) for row in connection.exec_driver_sql(sql)]


def receipt_parts(
    ledger: Ledger, entries: Sequence[ReceiptEntry], size: int
) -> list[tuple[ReceiptEntry, bytes, list[bytes]]]:
    """Return for each receipt its statement and its audit path in the tree of `size` leaves."""
    sql = "SELECT body FROM leaf WHERE number = ?"
    with ledger.read() as connection:
        node = _nodes_near(connection, [entry.leaf for entry in entries])
        return [
            (
                entry,
                bytes(connection.exec_driver_sql(sql, (entry.leaf,)).scalar_one()),
                prove_inclusion(entry.leaf, size, node),
            )
            for entry in entries
        ]


def receipts_written(ledger: Ledger, written: Sequence[tuple[str, str]]) -> None:
    """Record which receipts are signed and durable, and by which key: (request, key id)."""
    with ledger.write() as connection:
        many(
            connection,
            "UPDATE receipt SET key_id = ? WHERE request_id = ?",
            [(key_id, request_id) for request_id, key_id in written],
        )


@contextmanager
def writing_receipt(ledger: Ledger, request_id: str, key_id: str) -> Iterator[bool]:
    """Record a receipt as durable once the block has written it; others who would write it wait, and are told False."""
    with ledger.write() as connection:
        changed = connection.exec_driver_sql(
            "UPDATE receipt SET key_id = ? WHERE request_id = ? AND key_id IS NULL", (key_id, request_id)
        )
        yield changed.rowcount == 1


def _node(connection: Connection) -> Node:
    def node(level: int, index: int) -> bytes:
        row = connection.exec_driver_sql("SELECT hash FROM node WHERE level = ? AND number = ?", (level, index))
        return bytes(row.scalar_one())

    return node


def _nodes_near(connection: Connection, leaves: Sequence[int]) -> Node:
    """Return a look-up for the audit paths of many leaves, which share most of their nodes: each is read once."""
    first, last = min(leaves, default=0), max(leaves, default=0)
    known: dict[tuple[int, int], bytes] = {}
    if last - first < 4 * len(leaves):
        # Side by side in the log, as receipts of one erasure are: level by level, rather than one by one.
        sql = "SELECT number, hash FROM node WHERE level = ? AND number >= ? AND number <= ?"
        for level in range((last - first + 1).bit_length() + 1):
            span = ((first >> level) - 1, (last >> level) + 1)
            rows = connection.exec_driver_sql(sql, (level, *span))
            known.update(((level, row[0]), bytes(row[1])) for row in rows)
    one = _node(connection)

    def node(level: int, index: int) -> bytes:
        if (level, index) not in known:
            known[level, index] = one(level, index)
        return known[level, index]

    return node
