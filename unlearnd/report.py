"""What became of requests in a span of days: how many, how fast, what was late, and who was told.

Counts and codes alone: no request id, no handle, no name of anybody who asked, decided or was told. Days are those of
UTC, the first and the last included.
"""

import csv
import html
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from unlearnd.dossier import NOTHING_FROM_OUTSIDE
from unlearnd.errors import InputError
from unlearnd.ledger import Ledger, dockets
from unlearnd.ledger.connection import moment_from, stamp
from unlearnd.ledger.dockets import CLOSED, Entry
from unlearnd.recipients import tellings

ALL = "all"
_STYLE = (
    "body{font:15px/1.45 Georgia,serif;max-width:60em;margin:2em auto;padding:0 1em;color:#111}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.6em}table{border-collapse:collapse;width:100%;margin:.6em 0}"
    "th,td{border-top:1px solid #999;padding:.3em .5em;text-align:right}th:first-child,td:first-child{text-align:left}"
    "tr{break-inside:avoid}@page{margin:18mm}@media print{body{margin:0;max-width:none;font-size:11pt}}"
)


@dataclass(frozen=True)
class PolicyReport:
    """What became of the requests under one policy, or under all."""

    policy: str
    received: int
    completed: int
    refused: int
    withdrawn: int
    duplicate: int
    on_time: int
    """Of those completed or refused: by the day they were due."""
    late: int
    extended: int
    """Extensions taken in the span."""
    held: int
    """Holds begun in the span."""
    open: int
    """Open at the end of the span."""
    overdue: int
    """Of those: due before the end."""
    median_days: float | None
    """From received to completed; None when none was completed."""
    slowest_tenth_days: float | None
    """Nine in ten took no longer."""
    longest_days: float | None


@dataclass(frozen=True)
class RequestReport:
    """What became of requests from one day to another."""

    first: date
    last: date
    policies: tuple[PolicyReport, ...]
    """By name; the last is all of them together."""
    states: Mapping[str, int]
    """How many requests stood in each state at the end of the span."""
    asked: Mapping[str, int]
    """What the requests received were about: `user`, `point`, `dataset`, `model`."""
    reasons: Mapping[tuple[str, str], int]
    """By action (`refuse`, `hold`, `extend`) and code."""
    notices: Mapping[str, int]
    """Recipients to be told of erasures in the span, by outcome; `owed` where nothing came of it yet."""


def report_on(ledger: Ledger, first: date, last: date, now: datetime) -> RequestReport:
    """Return what became of requests from the beginning of a day to the end of another, or to now if that is sooner."""
    if last < first:
        raise InputError(f"a report from {first} to {last} has no days")
    begin, end = _midnight(first), min(_midnight(last + timedelta(days=1)), stamp(now + timedelta(seconds=1)))
    entries = {entry.id: entry for entry in dockets.entries(ledger)}
    state: dict[str, str] = {}
    moves: dict[str, list[tuple[str, str, str]]] = {}
    for request_id, step in dockets.transitions_between(ledger, "", end):
        state[request_id] = step.after
        if step.at >= begin:
            moves.setdefault(request_id, []).append((step.action, step.after, step.why))
    within = {request_id for request_id, entry in entries.items() if begin <= entry.received_at < end}
    # What was received on a day before it was written down counts on that day, and is there by now.
    known = state.keys() | within
    names = sorted({entries[request_id].policy or "none" for request_id in known})
    rows = [_summed(name, entries, state, moves, within, begin, end) for name in (*names, ALL)]
    codes = Counter(
        (action, why)
        for listed in moves.values()
        for action, _, why in listed
        if action in ("refuse", "hold", "extend") and why
    )
    told = Counter(
        "owed" if telling.owed else telling.outcome
        for telling in tellings(ledger)
        if any(begin <= (entries[request].closed_at or "") < end for request in telling.requests)
    )
    return RequestReport(
        first,
        last,
        tuple(rows),
        dict(sorted(Counter(state.values()).items())),
        dict(sorted(Counter(entries[request_id].asked for request_id in within).items())),
        dict(sorted(codes.items())),
        dict(sorted(told.items())),
    )


def _summed(
    name: str,
    entries: Mapping[str, Entry],
    state: Mapping[str, str],
    moves: Mapping[str, Sequence[tuple[str, str, str]]],
    within: set[str],
    begin: str,
    end: str,
) -> PolicyReport:
    mine = [entry for entry in entries.values() if name in (ALL, entry.policy or "none")]
    actions = Counter(action for entry in mine for action, _, _ in moves.get(entry.id, ()))
    closed = [e for e in mine if e.closed_at is not None and begin <= e.closed_at < end]
    ended = Counter(entry.state for entry in closed)
    answered = [entry for entry in closed if entry.state in ("completed", "refused")]
    on_time = sum((entry.closed_at or "") <= entry.due_at for entry in answered)
    waiting = [entry for entry in mine if state.get(entry.id, CLOSED[0]) not in CLOSED]
    # A clock that stands still has no day.
    overdue = [entry for entry in waiting if entry.due_at < end and entry.paused_at is None]
    took = sorted(_days(entry) for entry in closed if entry.state == "completed")
    return PolicyReport(
        policy=name,
        received=sum(entry.id in within for entry in mine),
        **{kind: ended[kind] for kind in ("completed", "refused", "withdrawn", "duplicate")},
        on_time=on_time,
        late=len(answered) - on_time,
        extended=actions["extend"],
        held=actions["hold"],
        open=len(waiting),
        overdue=len(overdue),
        median_days=_at(took, 0.5),
        slowest_tenth_days=_at(took, 0.9),
        longest_days=_at(took, 1.0),
    )


def tables_of(report: RequestReport) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str | int, ...]]]]:
    """Yield each table for people: its title, columns and rows; those without rows are left out."""
    counts = ("received", "completed", "refused", "withdrawn", "duplicate", "open", "overdue")
    rows: list[tuple[str | int, ...]] = [(p.policy, *(getattr(p, c) for c in counts)) for p in report.policies]
    yield "Requests by policy", ("policy", *counts), rows
    kept = ("on_time", "late", "extended", "held")
    spans = ("median_days", "slowest_tenth_days", "longest_days")
    yield (
        "Deadlines, and days from received to completed",
        ("policy", "on time", "late", "extended", "held", "median", "nine in ten within", "longest"),
        [(p.policy, *(getattr(p, c) for c in kept), *(_shown(getattr(p, c)) for c in spans)) for p in report.policies],
    )
    for title, column, listed in (
        ("States at the end", "state", report.states),
        ("What was asked", "asked", report.asked),
        ("Recipients told", "outcome", report.notices),
    ):
        if listed:
            yield title, (column, "count"), [(name.replace("_", " "), count) for name, count in listed.items()]
    if report.reasons:
        reasons: list[tuple[str | int, ...]] = [(f"{a}: {why}", count) for (a, why), count in report.reasons.items()]
        yield "Reasons", ("reason", "count"), reasons


def as_csv(report: RequestReport) -> str:
    """Return the report as lines of section, name, measure and value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("section", "name", "measure", "value"))
    writer.writerow(("span", "", "first", report.first))
    writer.writerow(("span", "", "last", report.last))
    for one in report.policies:
        for measure, value in vars(one).items():
            if measure != "policy":
                writer.writerow(("policy", one.policy, measure, "" if value is None else value))
    for section, listed in (("state", report.states), ("asked", report.asked), ("notice", report.notices)):
        writer.writerows((section, name, "count", count) for name, count in listed.items())
    writer.writerows((action, why, "count", count) for (action, why), count in report.reasons.items())
    return out.getvalue()


def as_html(report: RequestReport) -> str:
    """Return the report as one page that needs nothing from outside, has no script, and prints well."""
    parts = []
    for title, columns, rows in tables_of(report):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(_cell(c))}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    title = f"Requests to erase, {report.first} to {report.last}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{NOTHING_FROM_OUTSIDE}<title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>Counts and codes, and nobody's data. Days are those of UTC, the first and the last included.</p>"
        f"{''.join(parts)}</body></html>\n"
    )


def _midnight(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"


def _days(entry: Entry) -> float:
    assert entry.closed_at is not None
    return (moment_from(entry.closed_at) - moment_from(entry.received_at)).total_seconds() / 86400


def _at(took: Sequence[float], share: float) -> float | None:
    """Return what a share of them did not exceed."""
    return round(took[max(0, math.ceil(share * len(took)) - 1)], 2) if took else None


def _shown(days: float | None) -> str:
    return "–" if days is None else f"{days:.1f}"


def _cell(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value:,}"
