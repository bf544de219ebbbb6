"""ledger."""

from pathlib import Path

import click

from unlearnd.cli.options import store_named, store_option
from unlearnd.cli.show import counted, print_json
from unlearnd.config import find_store


@click.group()
def ledger() -> None:
    """Where the ledger is kept."""


@ledger.command()
@click.option("--to", "url", required=True, metavar="URL", help="The database to move to: nothing may be there yet.")
@store_option
def copy(url: str, folder: str | None, as_json: bool) -> None:
    """Move the ledger to another database; log, receipts and digests stay as they are.

    Everything is copied and compared, unlearnd.toml is changed, and the old ledger is destroyed: it has the keys of
    every user. Nobody else may be at work. Killed anywhere, the same command goes on.
    """
    from unlearnd.store import copy_ledger  # heavy: sqlmodel, numpy

    moved = copy_ledger(store_named(folder) or find_store(Path.cwd()), url)
    if as_json:
        print_json({"tables": moved.tables, "rows": moved.rows, "leaves": moved.leaves, "root": moved.root})
    else:
        click.echo(
            f"Moved the ledger: {counted(moved.rows, 'row')} in {moved.tables} tables, a log of "
            f"{moved.leaves:,} leaves with the root it had. The old one is destroyed."
        )
