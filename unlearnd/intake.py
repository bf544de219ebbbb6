"""Many requests in one call: every row with a result of its own, and given twice recorded once.

Rows are recorded some at a time, each lot in one transaction. Whoever is stopped in the middle gives the same rows
again: each is known by a keyed reference made of the source and its number, so what was recorded is only looked up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import islice

from unlearnd.errors import InputError, UnlearndError
from unlearnd.keys import Keys
from unlearnd.leases import Clock
from unlearnd.ledger import Ledger
from unlearnd.ledger.dockets import Entry
from unlearnd.policy import Policy
from unlearnd.requests import Asked, draft, receive_drafts

COLUMNS = ("user", "received", "due", "ground", "requester", "identity")
LOT = 1000


@dataclass(frozen=True)
class RowResult:
    """What became of one row."""

    row: int
    """From 1."""
    request: str | None
    """None where the row cannot be used."""
    state: str
    """Where the request stands, or `unusable`."""
    due: str | None
    duplicate_of: str | None
    problem: str
    """Why a row cannot be used; holds nothing of what is in it."""


def receive_rows(
    ledger: Ledger,
    keys: Keys,
    rows: Iterable[Mapping[str, str]],
    source: str,
    policy: Policy,
    clock: Clock,
    actor: str,
    approve: bool,
    on_progress: Callable[[int], None],
) -> list[RowResult]:
    """Record a request for every row that can be used; return what became of each, in order."""
    results: list[RowResult] = []
    for lot in _lots(enumerate(rows, start=1)):
        now = clock()
        drafts: list[tuple[int, Entry]] = []
        bad: dict[int, str] = {}
        for number, row in lot:
            try:
                drafts.append((number, draft(_asked(keys, row, source, number), policy, now)))
            except UnlearndError as error:
                bad[number] = str(error)
        usable = [entry for _, entry in drafts]
        entries = receive_drafts(ledger, usable, policy, now, actor, approve=approve) if usable else []
        found = {number: entry for (number, _), entry in zip(drafts, entries, strict=True)}
        for number, _ in lot:
            entry = found.get(number)
            if entry is None:
                results.append(RowResult(number, None, "unusable", None, None, bad[number]))
            else:
                results.append(RowResult(number, entry.id, entry.state, entry.due_at, entry.duplicate_of, ""))
        on_progress(len(lot))
    return results


def _lots(rows: Iterator[tuple[int, Mapping[str, str]]]) -> Iterator[list[tuple[int, Mapping[str, str]]]]:
    while lot := list(islice(rows, LOT)):
        yield lot


def _asked(keys: Keys, row: Mapping[str, str], source: str, number: int) -> Asked:
    user = (row.get("user") or "").strip()
    if not user:
        raise InputError("the row names no user")
    handle, reference = keys.handles([user, f"unlearnd/row\n{source}\n{number}"])
    return Asked(
        target=handle,
        user=user,
        received=_day(row.get("received"), "received"),
        due=_day(row.get("due"), "due"),
        ground=row.get("ground") or None,
        requester=row.get("requester") or "user",
        identity=row.get("identity") or "",
        reference=reference,
    )


def _day(text: str | None, column: str) -> date | None:
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InputError(f"the row has no day in its column {column}: write it as 2026-01-31") from None
