"""The life of requests: entries, their transitions, and the policies they came under.

`unlearnd.requests` says which transitions there are; here they become rows. Everything that changes takes a connection
of a transaction that writes, so that a transition, its row and its leaf are one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection

from unlearnd.errors import RefusedError
from unlearnd.ledger.connection import Ledger, many
from unlearnd.ledger.log import append

Transaction = Connection
"""What those who never speak SQL hand on."""
CLOSED = ("completed", "refused", "withdrawn", "duplicate")
"""The states in which a request rests."""
UNDER_WAY = ("executing", "failed")
"""The states from which there is no way back."""
_MANY = 500


@dataclass(frozen=True)
class Entry:
    """One request and how it stands. Holds no user id."""

    id: str
    leaf: int
    asked: str
    """`user`, `point`, `dataset` or `model`."""
    handle: bytes | None
    dataset: str | None
    position: int | None
    model: str | None
    state: str
    policy: str
    """Empty for requests older than policies."""
    policy_digest: str
    ground: str
    requester: str
    """Who asked, as a role: `user`, `agent`, `parent`, `authority` or `operator`."""
    identity: str
    """How identity was checked, as a code; empty when it was not."""
    received_at: str
    due_at: str
    acknowledge_by: str | None
    acknowledged_at: str | None
    extended: bool
    paused_at: str | None
    paused_days: int
    resume_state: str | None
    """Where a hold goes back to when it is released."""
    hold_basis: str | None
    hold_approver: str | None
    hold_review: str | None
    duplicate_of: str | None
    reference: bytes | None
    commitment: str | None
    nonce: bytes | None
    """None once it is being carried out, or where no user was named."""
    closed_at: str | None
    moves: int
    """How many transitions it has been through."""

    @property
    def target(self) -> Any:
        """What is to be erased: a handle, a point, or the name of a dataset or model with its kind."""
        if self.asked == "user":
            return self.handle
        return (self.dataset, self.position) if self.asked == "point" else (self.asked, self.dataset or self.model)

    @property
    def open(self) -> bool:
        """Whether an answer is still owed."""
        return self.state not in CLOSED


@dataclass(frozen=True)
class Moved:
    """A transition of one request."""

    entry: Entry
    """As it was before."""
    action: str
    after: str
    at: str
    actor: str
    why: str = ""
    cite: str = ""
    changes: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Transition:
    """A transition as it was recorded."""

    number: int
    at: str
    action: str
    before: str
    after: str
    actor: str
    why: str
    cite: str


@dataclass(frozen=True)
class KeptPolicy:
    """A policy as it was when it was applied."""

    digest: str
    name: str
    body: Mapping[str, Any]
    leaf: int
    since: str


_COLUMNS = tuple(field.name for field in fields(Entry))
_BLOBS = tuple(_COLUMNS.index(name) for name in ("handle", "reference", "nonce"))
_EXTENDED = _COLUMNS.index("extended")
_ENTRY = f"SELECT {', '.join(_COLUMNS)} FROM docket"


def keep_policy(connection: Connection, name: str, digest: str, body: Mapping[str, Any], leaf: bytes, at: str) -> None:
    """Keep a policy and log it, unless the newest of its name is the same already."""
    sql = "SELECT digest FROM policy WHERE name = ? ORDER BY leaf DESC LIMIT 1"
    newest = connection.exec_driver_sql(sql, (name,)).scalar()
    if newest == digest:
        return
    index = append(connection, [leaf])
    # One that was changed and changed back is the same row again, in force from the later leaf.
    connection.exec_driver_sql("DELETE FROM policy WHERE digest = ?", (digest,))
    connection.exec_driver_sql(
        "INSERT INTO policy (digest, name, body, leaf, since) VALUES (?, ?, ?, ?, ?)",
        (digest, name, json.dumps(body), index, at),
    )


def kept_policies(ledger: Ledger) -> list[KeptPolicy]:
    """Return every policy that was ever applied, in the order of the log."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT digest, name, body, leaf, since FROM policy ORDER BY leaf")
        return [KeptPolicy(row[0], row[1], json.loads(row[2]), row[3], row[4]) for row in rows]


def policy_body(connection: Connection, digest: str) -> str:
    """Return what a policy that was applied says, as JSON."""
    sql = "SELECT body FROM policy WHERE digest = ?"
    return str(connection.exec_driver_sql(sql, (digest,)).scalar_one())


def enter(connection: Connection, entries: Sequence[Entry]) -> None:
    """Enter new requests."""
    marks = ", ".join("?" * len(_COLUMNS))
    many(
        connection,
        f"INSERT INTO docket ({', '.join(_COLUMNS)}) VALUES ({marks})",
        [tuple(getattr(entry, name) for name in _COLUMNS) for entry in entries],
    )


def move(connection: Connection, moves: Sequence[Moved]) -> None:
    """Record transitions, each of another request: its new state, what else changes, and a row that says so."""
    by_columns: dict[tuple[str, ...], list[Moved]] = {}
    for one in moves:
        by_columns.setdefault(tuple(sorted(one.changes or {})), []).append(one)
    for columns, alike in by_columns.items():
        sets = "".join(f", {name} = ?" for name in columns)
        many(
            connection,
            f"UPDATE docket SET state = ?, moves = ?{sets} WHERE id = ?",
            [
                (one.after, one.entry.moves + 1, *((one.changes or {})[name] for name in columns), one.entry.id)
                for one in alike
            ],
        )
    note(
        connection,
        [
            (
                one.entry.id,
                Transition(
                    one.entry.moves, one.at, one.action, one.entry.state, one.after, one.actor, one.why, one.cite
                ),
            )
            for one in moves
        ],
    )


def note(connection: Connection, steps: Iterable[tuple[str, Transition]]) -> None:
    """Write the rows of transitions, each with the request it is of."""
    many(
        connection,
        "INSERT INTO transition (request_id, number, at, action, before, after, actor, why, cite) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(request_id, s.number, s.at, s.action, s.before, s.after, s.actor, s.why, s.cite) for request_id, s in steps],
    )


def entries(ledger: Ledger, states: Sequence[str] | None = None) -> list[Entry]:
    """Return all requests, or those in some states, in the order they were received."""
    with ledger.read() as connection:
        if states is None:
            return [_entry(row) for row in connection.exec_driver_sql(f"{_ENTRY} ORDER BY leaf")]
        marks = ",".join("?" * len(states))
        rows = connection.exec_driver_sql(f"{_ENTRY} WHERE state IN ({marks}) ORDER BY leaf", tuple(states))
        return [_entry(row) for row in rows]


def open_entries(ledger: Ledger) -> list[Entry]:
    """Return the requests to which an answer is still owed, the first due first."""
    with ledger.read() as connection:
        marks = ",".join("?" * len(CLOSED))
        rows = connection.exec_driver_sql(f"{_ENTRY} WHERE state NOT IN ({marks}) ORDER BY due_at, leaf", CLOSED)
        return [_entry(row) for row in rows]


def by_ids(connection: Connection, ids: Sequence[str]) -> dict[str, Entry]:
    """Return requests by their ids; those that are not there are left out."""
    return {entry.id: entry for entry in _select_many(connection, "id", ids)}


def by_references(connection: Connection, references: Sequence[bytes]) -> dict[bytes, Entry]:
    """Return requests by what they were given with; those that are not there are left out."""
    return {entry.reference or b"": entry for entry in _select_many(connection, "reference", references)}


def open_by_handles(connection: Connection, handles: Sequence[bytes]) -> dict[bytes, Entry]:
    """Return the open request of each user that has one."""
    return {entry.handle or b"": entry for entry in _select_many(connection, "handle", handles) if entry.open}


def open_of_others(connection: Connection) -> dict[Any, Entry]:
    """Return the open requests that are not about users, by their targets."""
    marks = ",".join("?" * len(CLOSED))
    rows = connection.exec_driver_sql(f"{_ENTRY} WHERE handle IS NULL AND state NOT IN ({marks})", CLOSED)
    return {entry.target: entry for entry in map(_entry, rows)}


def order_about(ledger: Ledger, kind: str, name: str) -> Entry | None:
    """Return the newest order to destroy a dataset or a model that was carried out or is being; None without one."""
    column = "dataset" if kind == "dataset" else "model"
    marks = ",".join("?" * (len(UNDER_WAY) + 1))
    sql = f"{_ENTRY} WHERE asked = ? AND {column} = ? AND state IN ({marks}) ORDER BY leaf DESC LIMIT 1"
    with ledger.read() as connection:
        row = connection.exec_driver_sql(sql, (kind, name, "completed", *UNDER_WAY)).one_or_none()
    return _entry(row) if row else None


def check_not_destroyed(ledger: Ledger, dataset: str) -> None:
    """Raise `RefusedError` where an order had a dataset destroyed: its name stays taken."""
    order = order_about(ledger, "dataset", dataset)
    if order is not None:
        raise RefusedError(
            f"dataset '{dataset}' was destroyed by an order, request {order.id[:12]}: it takes no points and no model "
            "any more, and its name stays taken"
        )


def beginning_with(ledger: Ledger, prefix: str) -> list[Entry]:
    """Return the requests whose id begins so."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(f"{_ENTRY} WHERE substr(id, 1, ?) = ?", (len(prefix), prefix))
        return [_entry(row) for row in rows]


def transitions_of(ledger: Ledger, request_id: str) -> list[Transition]:
    """Return all a request went through, in order."""
    sql = (
        "SELECT number, at, action, before, after, actor, why, cite FROM transition "
        "WHERE request_id = ? ORDER BY number"
    )
    with ledger.read() as connection:
        return [Transition(*row) for row in connection.exec_driver_sql(sql, (request_id,))]


def transitions_between(ledger: Ledger, begin: str, end: str) -> list[tuple[str, Transition]]:
    """Return what happened to requests from one moment until before another."""
    sql = (
        "SELECT request_id, number, at, action, before, after, actor, why, cite FROM transition "
        "WHERE at >= ? AND at < ? ORDER BY at, request_id, number"
    )
    with ledger.read() as connection:
        return [(row[0], Transition(*row[1:])) for row in connection.exec_driver_sql(sql, (begin, end))]


def closed_and_tied(ledger: Ledger) -> list[Entry]:
    """Return the closed requests that still say who they are about, or who did what."""
    marks = ",".join("?" * len(CLOSED))
    with ledger.read() as connection:
        rows = connection.exec_driver_sql(f"{_ENTRY} WHERE state IN ({marks}) AND moves > 0 ORDER BY leaf", CLOSED)
        return [entry for entry in map(_entry, rows) if entry.closed_at is not None]


def untie(connection: Connection, ids: Sequence[str]) -> None:
    """Take away what ties closed requests to a person: handles, references, commitments, who decided what and why."""
    one = [(request_id,) for request_id in ids]
    many(connection, "DELETE FROM transition WHERE request_id = ?", one)
    many(
        connection,
        "UPDATE docket SET handle = NULL, reference = NULL, commitment = NULL, nonce = NULL, identity = '', "
        "hold_basis = NULL, hold_approver = NULL, hold_review = NULL, moves = 0 WHERE id = ?",
        one,
    )
    many(connection, "UPDATE request SET handle = NULL, commitment = NULL WHERE id = ?", one)


def suppress(connection: Connection, handles: Iterable[bytes], since: str) -> None:
    """Put users on the list of those whose data is not taken in again."""
    many(
        connection,
        "INSERT INTO suppressed (handle, since) VALUES (?, ?) ON CONFLICT (handle) DO NOTHING",
        [(handle, since) for handle in handles],
    )


def take_back(ledger: Ledger, handles: Iterable[bytes]) -> int:
    """Take users off the list; return how many were on it."""
    with ledger.write() as connection:
        before = connection.exec_driver_sql("SELECT count(*) FROM suppressed").scalar_one()
        many(connection, "DELETE FROM suppressed WHERE handle = ?", [(handle,) for handle in handles])
        return int(before - connection.exec_driver_sql("SELECT count(*) FROM suppressed").scalar_one())


def kept_out(ledger: Ledger, erased: bool = True) -> frozenset[bytes]:
    """Return the handles of all users whose data is not taken in: on hold and, with `erased`, erased for good."""
    with ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT handle FROM suppressed") if erased else ()
        listed = {bytes(row[0]) for row in rows}
        sql = "SELECT handle FROM docket WHERE state = 'on_hold' AND handle IS NOT NULL"
        return frozenset(listed | {bytes(row[0]) for row in connection.exec_driver_sql(sql)})


def _select_many(connection: Connection, column: str, wanted: Sequence[Any]) -> Iterator[Entry]:
    for start in range(0, len(wanted), _MANY):
        some = tuple(wanted[start : start + _MANY])
        marks = ",".join("?" * len(some))
        for row in connection.exec_driver_sql(f"{_ENTRY} WHERE {column} IN ({marks})", some):
            yield _entry(row)


def _entry(row: Any) -> Entry:
    values = list(row)
    for place in _BLOBS:
        if values[place] is not None:
            values[place] = bytes(values[place])
    values[_EXTENDED] = bool(values[_EXTENDED])
    return Entry(*values)
