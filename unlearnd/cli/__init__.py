"""The command line: parse, call the store, print.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 refused or failed with
one clear sentence, 2 wrong usage, 3 a verification did not hold. Nothing heavy is imported before a command
runs, so `unlearnd --help` is quick.
"""

from typing import Any

import click

from unlearnd import __version__
from unlearnd.cli.data import ingest, init, where
from unlearnd.cli.demo import demo
from unlearnd.cli.erase import erase
from unlearnd.cli.models import build, checkpoints, evaluate, predict, train
from unlearnd.cli.status import migrate, plugins, status
from unlearnd.errors import UnlearndError


class Commands(click.Group):
    """Turns our errors into a line and an exit code; bugs keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UnlearndError as error:
            click.echo(f"unlearnd: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("unlearnd: stopped; nothing is lost, run the command again to go on", err=True)
            ctx.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="unlearnd")
@click.option("--store", metavar="DIR", help="The store; else UNLEARND_STORE, else the nearest folder with one.")
@click.pass_context
def main(ctx: click.Context, store: str | None) -> None:
    """Train models so that a person can be taken out again exactly, and take them out on request."""
    ctx.obj = store


for command in (
    *(demo, init, ingest, train, build, predict, evaluate, erase, where, status, checkpoints, plugins, migrate),
):
    main.add_command(command)
