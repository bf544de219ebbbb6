"""`unlearnd verify`: check a receipt offline, with what an auditor brings along."""

from collections.abc import Callable
from typing import Any

import click

from unlearnd.verify.command import OPTIONS, show, verify_files


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for name, (metavar, told) in reversed(list(OPTIONS.items())):
        command = click.option(f"--{name}", metavar=metavar, required=name == "trust", help=told)(command)
    return command


@click.command()
@click.argument("receipt", metavar="RECEIPT")
@_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(as_json: bool, **files: Any) -> None:
    """Check a receipt, and say how far it can be relied on.

    Needs the receipt and the trust file alone: no store, no network. Every other file lets more be checked.
    Exits with 3 when a check fails.
    """
    report = verify_files(**files)
    click.echo(show(report, as_json))
    click.get_current_context().exit(report.exit_code)
