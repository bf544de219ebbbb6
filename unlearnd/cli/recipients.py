"""recipients add, list, end, tell, record."""

from typing import TYPE_CHECKING, Any

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.policies import read_date
from unlearnd.cli.show import counted, note, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from unlearnd.ledger.recipients import Recipient
    from unlearnd.recipients import Telling


@click.group()
def recipients() -> None:
    """Who was given which model, and telling them of erasures.

    A RECIPIENT is an id, or the beginning of one.
    """


@recipients.command()
@click.argument("name")
@click.option("--model", required=True, metavar="M", help="Which model they were given.")
@click.option("--given", metavar="DATE", help="The day they were given it; today unless given.")
@store_option
def add(name: str, model: str, given: str | None, folder: str | None, as_json: bool) -> None:
    """Record that NAME was given a model. Name an organisation, or use a code: not a person."""
    with opened(folder) as store:
        found = store.add_recipient(name, model=model, given=read_date(given) if given else None)
    if as_json:
        print_json(recipient_json(found))
    else:
        click.echo(f"Recipient {found.id[:12]} has had the model '{found.model}' since {found.given_at[:10]}.")


@recipients.command(name="list")
@store_option
def listed(folder: str | None, as_json: bool) -> None:
    """List who was given which model, and who is still to be told of an erasure."""
    with opened(folder) as store:
        found, tellings = store.recipients(), store.tellings()
    owed = {one.id: sum(t.owed and t.recipient.id == one.id for t in tellings) for one in found}
    if as_json:
        print_json([{**recipient_json(one), "owed": owed[one.id]} for one in found])
    elif not found:
        click.echo("Nobody was given a model, as far as is recorded.")
    else:
        print_table(
            ("recipient", "name", "model", "given", "until", "to be told of"),
            [(o.id[:12], o.name, o.model, o.given_at[:10], (o.ended_at or "")[:10], owed[o.id]) for o in found],
        )


@recipients.command()
@click.argument("recipient")
@store_option
def end(recipient: str, folder: str | None, as_json: bool) -> None:
    """Record that a recipient no longer has the model; of later erasures they need not be told."""
    with opened(folder) as store:
        found = store.end_recipient(recipient)
    if as_json:
        print_json(recipient_json(found))
    else:
        click.echo(f"Recipient {found.id[:12]} has not had the model '{found.model}' since {found.ended_at}.")


@recipients.command()
@store_option
def tell(folder: str | None, as_json: bool) -> None:
    """Have every recipient told of the erasures they must be told of; exit with 1 when one could not be."""
    with opened(folder) as store:
        found = store.tell_recipients()
        where = store.folder / "notices"
    if as_json:
        print_json(tellings_json(found))
    elif found:
        print_tellings(found)
    else:
        click.echo("Nobody is to be told.")
    written = sum(telling.outcome == "written" for telling in found)
    if written:
        note(
            f"{counted(written, 'notice')} written to {where} and not sent: deliver them, then "
            "`unlearnd recipients record` it."
        )
    left = sum(telling.owed for telling in found)
    if left:
        note(f"unlearnd: {counted(left, 'recipient')} could not be told; it is tried again the next time")
        click.get_current_context().exit(1)


@recipients.command()
@click.argument("recipient")
@click.argument("request")
@click.option(
    "--outcome",
    required=True,
    type=click.Choice(["sent", "acknowledged", "impossible", "disproportionate"]),
    help="What came of telling them.",
)
@click.option("--by", "actor", default="operator", show_default=True, metavar="NAME", help="Who says so.")
@store_option
def record(recipient: str, request: str, outcome: str, actor: str, folder: str | None, as_json: bool) -> None:
    """Record what came of telling a RECIPIENT of the erasure that carried out a REQUEST."""
    with opened(folder) as store:
        found = store.record_notice(recipient, request, outcome, actor=actor)
    if as_json:
        print_json(tellings_json([found]))
    else:
        click.echo(f"Recipient {found.recipient.id[:12]}: {found.outcome}.")


def recipient_json(one: "Recipient") -> dict[str, Any]:
    return {"id": one.id, "name": one.name, "model": one.model, "given_at": one.given_at, "ended_at": one.ended_at}


def tellings_json(found: "Iterable[Telling]") -> list[dict[str, Any]]:
    """Return who must be or was told, for a script."""
    return [
        {
            "recipient": t.recipient.id,
            "name": t.recipient.name,
            "model": t.recipient.model,
            "erasure": t.erasure,
            "requests": list(t.requests),
            "outcome": t.outcome or None,
            "by": t.reason or None,
            "at": t.at or None,
        }
        for t in found
    ]


def print_tellings(found: "Iterable[Telling]") -> None:
    """Print who must be or was told."""
    print_table(
        ("recipient", "name", "model", "requests", "outcome", "by", "at"),
        [
            (
                t.recipient.id[:12],
                t.recipient.name,
                t.recipient.model,
                " ".join(request[:12] for request in t.requests[:3]) + (" …" if len(t.requests) > 3 else ""),
                t.outcome or "to be told",
                t.reason,
                t.at,
            )
            for t in found
        ],
    )
