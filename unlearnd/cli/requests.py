"""requests: receive, list, show, every step of their lives, due, run and expire."""

import csv
import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unlearnd.cli.evidence import write_openings
from unlearnd.cli.options import building, opened, store_option
from unlearnd.cli.policies import read_date
from unlearnd.cli.recipients import print_tellings, tellings_json
from unlearnd.cli.show import build_json, counted, note, print_json, print_table, trained_sentence, watching
from unlearnd.errors import InputError, UnlearndError
from unlearnd.verify.command import read_file

if TYPE_CHECKING:
    from unlearnd.intake import RowResult
    from unlearnd.ledger.dockets import Entry
    from unlearnd.requests import Deadline, Duty

F = TypeVar("F", bound=Callable[..., Any])
by = click.option("--by", "actor", default="operator", show_default=True, metavar="NAME", help="Who decides this.")


@click.group()
def requests() -> None:
    """The life of requests: receive them, decide, hold, extend, refuse, carry out.

    `unlearnd erase --user U` does all of it in one step. A REQUEST is an id, or the beginning of one.
    """


@requests.command()
@click.option("--user", "users", multiple=True, metavar="U", help="Whose data it is about; repeat it.")
@click.option("--point", "points", multiple=True, metavar="ID", help="A single point, as dataset:position; repeat it.")
@click.option("--dataset", metavar="D", help="A whole dataset, as an order of an authority may be.")
@click.option("--model", metavar="M", help="A whole model, likewise.")
@click.option("--file", "listing", metavar="F", help="A CSV of requests with a column user; - for standard input.")
@click.option("--policy", metavar="NAME", help="Whose rules count; by default the store's.")
@click.option("--received", metavar="DATE", help="The day it came in, if that was before today.")
@click.option("--due", metavar="DATE", help="The day it names itself, as an order does.")
@click.option("--ground", metavar="CODE", help="What it rests on: one of the policy's grounds.")
@click.option(
    "--requester",
    type=click.Choice(["user", "agent", "parent", "authority", "operator"]),
    default="user",
    show_default=True,
    help="Who asks, which need not be the user.",
)
@click.option("--identity", metavar="CODE", default="", help="How identity was checked, like account_login.")
@click.option("--openings", metavar="DIR", help="Write each user's opening there: private files.")
@click.option("--run", "run_now", is_flag=True, help="With --file: approve what can be, and carry it out at once.")
@click.option("--results", metavar="F", help="With --file: write what became of each row there, as CSV.")
@by
@store_option
def receive(
    users: tuple[str, ...],
    points: tuple[str, ...],
    dataset: str | None,
    model: str | None,
    listing: str | None,
    policy: str | None,
    received: str | None,
    due: str | None,
    ground: str | None,
    requester: str,
    identity: str,
    openings: str | None,
    run_now: bool,
    results: str | None,
    actor: str,
    folder: str | None,
    as_json: bool,
) -> None:
    """Record requests that came in, without carrying them out.

    A file may have the columns user, received, due, ground, requester and identity. Give the same file again after
    a stop: rows that were recorded are not recorded twice.
    """
    if listing and (users or points or dataset or model or received or due or ground or identity or openings):
        raise click.UsageError("with --file, everything about a request is in the file")
    if not listing and (run_now or results):
        raise click.UsageError("--run and --results go with --file")
    if not listing and not users and not points and not dataset and not model:
        raise click.UsageError("no request: give --user, --point, --dataset, --model or --file")
    with opened(folder) as store:
        if listing is None:
            entries = store.receive(
                users,
                points=points,
                dataset=dataset,
                model=model,
                policy=policy,
                received=read_date(received) if received else None,
                due=read_date(due) if due else None,
                ground=ground,
                requester=requester,
                identity=identity,
                actor=actor,
                hand_out=lambda found: (
                    write_openings(openings, {k: v.as_bytes() for k, v in found.items()}) if openings else None
                ),
            )
            duties = [store.duty_to_tell(entry, "received") for entry in entries]
            if as_json:
                print_json([{**_entry_json(e), "tell": _duty_json(d)} for e, d in zip(entries, duties, strict=True)])
            else:
                _print_entries(entries)
                _say_duty(next(filter(None, duties), None))
            return
        rows, source = _read_rows(listing)
        found = store.receive_rows(rows, source=source, policy=policy, approve=run_now, actor=actor)
        erased = store.run_requests(actor=actor) if run_now else None
        if erased is not None:
            states = {entry.id: entry.state for entry in store.requests()}
            found = [_now(result, states) for result in found]
    if results:
        _write_results(results, found)
    if as_json:
        print_json({"rows": [asdict(result) for result in found]})
    else:
        _print_results(found)
    if any(result.request is None for result in found):
        raise InputError(f"{counted(sum(r.request is None for r in found), 'row')} could not be used; the others were")
    if erased is not None:
        erased.check_destroyed()
        erased.check_finished()


@requests.command(name="list")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only requests in this state; repeat it.")
@click.option("--open", "only_open", is_flag=True, help="Only those to which an answer is still owed.")
@store_option
def listed(states: tuple[str, ...], only_open: bool, folder: str | None, as_json: bool) -> None:
    """List requests, in the order they came in."""
    from unlearnd.requests import TRANSITIONS  # heavy: pydantic

    known = sorted({rule.after for rule in TRANSITIONS.values()} - {"", "resume"})
    for state in states:
        if state not in known:
            raise click.UsageError(f"no state '{state}'; there are: {', '.join(known)}")
    with opened(folder) as store:
        found = [entry for entry in store.requests(states or None) if entry.open or not only_open]
    if as_json:
        print_json([_entry_json(entry) for entry in found])
    elif not found:
        click.echo("No request.")
    else:
        _print_entries(found)


@requests.command()
@click.argument("request")
@store_option
def show(request: str, folder: str | None, as_json: bool) -> None:
    """Show a request and all it went through."""
    with opened(folder) as store:
        entry, steps, told = store.request(request), store.transitions(request), store.tellings(request)
    if as_json:
        whole = {"transitions": [asdict(step) for step in steps], "recipients": tellings_json(told)}
        print_json({**_entry_json(entry), **whole})
        return
    for name, value in _entry_json(entry).items():
        if value not in (None, "", False):
            click.echo(f"{name.replace('_', ' '):<18} {value}")
    print_table(
        ("#", "at", "action", "state", "by", "why", "source"),
        [(s.number + 1, s.at, s.action, s.after, s.actor, s.why, s.cite) for s in steps],
    )
    if told:
        click.echo("Recipients of models that this concerns:")
        print_tellings(told)


_TOLD_OF = {"extend": "extended", "refuse": "refused"}
"""What the person may have to be told after a step."""


def _step(name: str, text: str, *options: Any) -> Callable[[Callable[..., "Entry"]], click.Command]:
    """Make a command that takes one request one step on."""

    def make(work: Callable[..., "Entry"]) -> click.Command:
        def run(request: str, actor: str, folder: str | None, as_json: bool, **given: Any) -> None:
            with opened(folder) as store:
                entry = work(store, request, actor, **given)
                duty = store.duty_to_tell(entry, _TOLD_OF[name]) if name in _TOLD_OF else None
            if as_json:
                print_json({**_entry_json(entry), "tell": _duty_json(duty)})
            else:
                click.echo(f"Request {entry.id[:12]} is {entry.state.replace('_', ' ')}; {_due_sentence(entry)}.")
                _say_duty(duty)

        command: Callable[..., None] = run
        for option in options:
            command = option(command)
        command = click.argument("request")(by(store_option(command)))
        return requests.command(name=name, help=text)(command)

    return make


@_step("acknowledge", "Record that the requester was told that the request has come in.")
def acknowledge(store: Any, request: str, actor: str) -> "Entry":
    found: Entry = store.acknowledge(request, actor=actor)
    return found


@_step(
    "identity",
    "Record how identity was checked, as a code; or, with --ask, that the requester was asked.",
    click.option("--checked", metavar="CODE", help="How, like account_login or id_document_seen. Never the proof."),
    click.option("--ask", is_flag=True, help="The requester was asked; the clock stands still if the policy says so."),
)
def identity(store: Any, request: str, actor: str, checked: str | None, ask: bool) -> "Entry":
    if ask == bool(checked):
        raise click.UsageError("give --checked CODE or --ask")
    found: Entry = (
        store.ask_identity(request, actor=actor) if ask else store.verify_identity(request, checked, actor=actor)
    )
    return found


@_step(
    "approve",
    "Decide that a request is to be carried out.",
    click.option("--identity", "how", metavar="CODE", help="How identity was checked, if it is said only now."),
)
def approve(store: Any, request: str, actor: str, how: str | None) -> "Entry":
    found: Entry = store.approve(request, identity=how, actor=actor)
    return found


@_step(
    "hold",
    "Stop a request; the user's data is neither trained on nor erased until it is released.",
    click.option("--basis", required=True, metavar="CODE", help="One of the policy's exemptions."),
    click.option("--approver", required=True, metavar="NAME", help="Who answers for it."),
    click.option("--review", required=True, metavar="DATE", help="When somebody looks at it again."),
)
def hold(store: Any, request: str, actor: str, basis: str, approver: str, review: str) -> "Entry":
    found: Entry = store.hold(request, basis=basis, approver=approver, review=read_date(review), actor=actor)
    return found


@_step("release", "Lift a hold; the request goes on with the time it had left.")
def release(store: Any, request: str, actor: str) -> "Entry":
    found: Entry = store.release(request, actor=actor)
    return found


@_step(
    "extend",
    "Take the one extension that the policy knows, in time.",
    click.option("--reason", required=True, metavar="CODE", help="One of the policy's reasons."),
)
def extend(store: Any, request: str, actor: str, reason: str) -> "Entry":
    found: Entry = store.extend(request, reason=reason, actor=actor)
    return found


@_step(
    "refuse",
    "Close a request without an erasure.",
    click.option("--reason", required=True, metavar="CODE", help="One of the policy's reasons."),
)
def refuse(store: Any, request: str, actor: str, reason: str) -> "Entry":
    found: Entry = store.refuse(request, reason=reason, actor=actor)
    return found


@_step("withdraw", "Close a request because whoever made it no longer wants it.")
def withdraw(store: Any, request: str, actor: str) -> "Entry":
    found: Entry = store.withdraw(request, actor=actor)
    return found


@requests.command()
@click.option("--user", required=True, metavar="U", help="Who must not be erased yet.")
@click.option("--basis", metavar="CODE", help="One of the policy's exemptions.")
@click.option("--until", metavar="DATE", help="The day until which it counts.")
@click.option("--lift", is_flag=True, help="Take the user off the list.")
@store_option
def exempt(user: str, basis: str | None, until: str | None, lift: bool, folder: str | None, as_json: bool) -> None:
    """Put a user on the list of those whose requests are held when they come, as for an open claim at law."""
    from datetime import date

    if lift == bool(basis and until):
        raise click.UsageError("give --basis and --until, or --lift")
    day = date.max if until is None else read_date(until)
    with opened(folder) as store:
        store.exempt(user, basis=None if lift else basis, until=day)
    if as_json:
        print_json({"basis": None if lift else basis, "until": None if lift else str(day)})
    else:
        click.echo("Taken off the list." if lift else f"Requests of this user are held until {day}, on {basis}.")


@requests.command()
@click.option("--within", default="7d", show_default=True, metavar="TIME", help="How far to look ahead, like 7d, 12h.")
@store_option
def due(within: str, folder: str | None, as_json: bool) -> None:
    """Show what is owed soon; exit with 1 when something is late."""
    span = read_span(within)
    with opened(folder) as store:
        found = store.deadlines(span)
    late = sum(deadline.late for deadline in found)
    if as_json:
        print_json(
            [
                {
                    **{"request": d.entry.id, "what": d.what, "by": d.by, "late": d.late, "state": d.entry.state},
                    "counts_as": d.counts_as or None,
                }
                for d in found
            ]
        )
    elif found:
        print_table(
            ("request", "owed", "by", "", "state", "policy"),
            [(d.entry.id[:12], d.what, d.by, _lateness(d), d.entry.state, d.entry.policy) for d in found],
        )
    else:
        click.echo(f"Nothing is owed within {within}.")
    if late:
        note(f"unlearnd: {counted(late, 'request')} late")
        click.get_current_context().exit(1)


@requests.command()
@click.option("--within", metavar="TIME", help="Only what is due within this time, like 7d.")
@click.option("--no-build", is_flag=True, help="Do not rebuild now, whatever the policy says.")
@building
@by
@store_option
def run(
    within: str | None,
    no_build: bool,
    workers: int | None,
    executor: str | None,
    device: str | None,
    actor: str,
    folder: str | None,
    as_json: bool,
) -> None:
    """Carry out every approved request, together, and rebuild when the policy says so."""
    span = read_span(within) if within else None
    with opened(folder) as store, watching(as_json) as watch:
        done = store.run_requests(
            within=span,
            build=False if no_build else None,
            actor=actor,
            workers=workers,
            executor=executor,
            device=device,
            watch=watch,
        )
        first = store.request(done.outcomes[0].request) if done.outcomes else None
        duty = store.duty_to_tell(first, "completed") if first else None
    if as_json:
        print_json(
            {
                "outcomes": [asdict(outcome) for outcome in done.outcomes],
                "builds": [build_json(one) for one in done.builds],
                "held": list(done.held),
            }
        )
    else:
        lost = sum(outcome.points for outcome in done.outcomes)
        click.echo(f"Carried out {counted(len(done.outcomes), 'request')}: {counted(lost, 'point')} erased.")
        if done.builds:
            click.echo(trained_sentence(done.builds, "Retrained"))
        _say_duty(duty)
    if done.held:
        note(f"{counted(len(done.held), 'request')} put on hold by a plugin: see `unlearnd requests list`.")
    done.check_destroyed()
    done.check_finished()


@requests.command()
@click.option("--dry-run", is_flag=True, help="Only say which.")
@store_option
def expire(dry_run: bool, folder: str | None, as_json: bool) -> None:
    """Take away what ties closed requests to a person, once their policy's keeping time is over.

    Ids, states, dates and receipts stay, and so does the log: they hold no personal data.
    """
    with opened(folder) as store:
        found = store.expire_requests(dry_run=dry_run)
    if as_json:
        print_json({"requests": [entry.id for entry in found], "dry_run": dry_run})
    else:
        done = "would be untied" if dry_run else "untied"
        click.echo(f"{counted(len(found), 'request')} past the keeping time {done}.")


def read_span(text: str) -> timedelta:
    """Return a length of time given like 7d or 12h."""
    found = re.fullmatch(r"(\d{1,4})([dh])", text)
    if not found:
        raise InputError(f"'{text}' is not a length of time: write it as 7d or 12h")
    return timedelta(days=int(found[1])) if found[2] == "d" else timedelta(hours=int(found[1]))


def _read_rows(name: str) -> tuple[list[dict[str, str]], str]:
    """Return the rows of a CSV of requests, and a name for the whole by which it is known when given again."""
    from unlearnd.intake import COLUMNS  # heavy: pydantic

    data = read_file(name)
    try:
        text = data.decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="")
        columns = reader.fieldnames or ()
        if "user" not in columns or set(columns) - set(COLUMNS):
            # Without a header line the first person would pass for a column: say how many, not which.
            raise InputError(f"{name} needs a header line with user, and of {', '.join(COLUMNS[1:])} what there is")
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8 text") from None
    except csv.Error:
        raise InputError(f"{name} is not a well-formed CSV file") from None
    if not rows:
        raise InputError(f"{name} lists nobody")
    return rows, hashlib.sha256(data).hexdigest()


def _now(result: "RowResult", states: dict[str, str]) -> "RowResult":
    from dataclasses import replace

    return result if result.request is None else replace(result, state=states[result.request])


def _write_results(name: str, results: "list[RowResult]") -> None:
    try:
        with click.open_file(name, "w", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["row", "request", "state", "due", "duplicate_of", "problem"])
            writer.writeheader()
            writer.writerows(asdict(result) for result in results)
    except OSError as error:
        raise UnlearndError(f"{name} cannot be written: {error.strerror}") from None


def _print_results(results: "list[RowResult]") -> None:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.state] = counts.get(result.state, 0) + 1
    click.echo(f"{counted(len(results), 'row')}: " + ", ".join(f"{n:,} {state}" for state, n in counts.items()) + ".")
    bad = [result for result in results if result.request is None]
    if bad:
        print_table(("row", "problem"), [(r.row, r.problem) for r in bad[:20]])


def _entry_json(entry: "Entry") -> dict[str, Any]:
    shown = {k: v for k, v in asdict(entry).items() if k not in ("handle", "reference", "nonce", "commitment", "moves")}
    return {**shown, "paused": entry.paused_at is not None}


def _print_entries(entries: "list[Entry]") -> None:
    print_table(
        ("request", "asked", "state", "policy", "received", "due", "requester"),
        [(e.id[:12], e.asked, e.state, e.policy, e.received_at, _due(e), e.requester) for e in entries],
    )


def _lateness(deadline: "Deadline") -> str:
    if deadline.counts_as:
        return f"LATE: counts as {deadline.counts_as}"
    return "LATE" if deadline.late else ""


def _duty_json(duty: "Duty | None") -> dict[str, Any] | None:
    return None if duty is None else asdict(duty)


def _say_duty(duty: "Duty | None") -> None:
    if duty is not None:
        state = f", stating {', '.join(code.replace('_', ' ') for code in duty.state)}" if duty.state else ""
        note(f"Tell the person that it was {duty.of}{state} ({duty.cite}).")


def _due(entry: "Entry") -> str:
    if not entry.open:
        return "closed"
    if entry.hold_review:
        return f"held, review {entry.hold_review}"
    return "clock stands still" if entry.paused_at else entry.due_at


def _due_sentence(entry: "Entry") -> str:
    if not entry.open:
        return "it is closed"
    if entry.hold_review:
        return f"it is looked at again by {entry.hold_review}"
    return "its clock stands still" if entry.paused_at else f"it is due {entry.due_at}"
