"""report."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.policies import read_date
from unlearnd.cli.show import print_json, print_table
from unlearnd.errors import UnlearndError

if TYPE_CHECKING:
    from unlearnd.report import RequestReport


@click.command()
@click.option("--from", "first", required=True, metavar="DATE", help="The first day, in UTC.")
@click.option("--to", "last", metavar="DATE", help="The last day; today unless given.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "csv", "html"]),
    default="text",
    show_default=True,
    help="Tables for people, lines for a spreadsheet, or a page to print.",
)
@click.option("--output", metavar="F", help="Write it to this file instead.")
@store_option
def report(first: str, last: str | None, form: str, output: str | None, folder: str | None, as_json: bool) -> None:
    """Report what became of requests in a span of days: counts and codes, and nobody's data."""
    begin, end = read_date(first), read_date(last) if last else None
    with opened(folder) as store:
        found = store.report(begin, end)
    if as_json:
        print_json(_json(found))
        return
    from unlearnd.report import as_csv, as_html, tables_of  # heavy: pydantic

    if form == "text" and output is None:
        click.echo(f"Requests from {found.first} to {found.last}, days of UTC.")
        for title, columns, rows in tables_of(found):
            click.echo(f"\n{title}")
            print_table(columns, rows)
        return
    if form == "text":
        raise click.UsageError("--output goes with --format csv or html")
    text = as_csv(found) if form == "csv" else as_html(found)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with click.open_file(output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UnlearndError(f"{output} cannot be written: {error.strerror}") from None


def _json(found: "RequestReport") -> dict[str, Any]:
    return {
        "first": str(found.first),
        "last": str(found.last),
        "policies": [asdict(one) for one in found.policies],
        "states": dict(found.states),
        "asked": dict(found.asked),
        "reasons": [{"action": action, "code": code, "count": n} for (action, code), n in found.reasons.items()],
        "notices": dict(found.notices),
    }
