"""The command line: parse, call the store, print.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 refused or failed with
one clear sentence, 2 wrong usage, 3 a verification did not hold. A command's module is imported when the
command is asked for, and nothing heavy before it runs: `unlearnd --help` and `unlearnd verify` are quick.
"""

from importlib import import_module
from typing import Any

import click

from unlearnd import __version__
from unlearnd.errors import STOPPED, UnlearndError

MODULES = {
    "audit": "audit",
    "backup": "backup",
    "build": "models",
    "checkpoints": "models",
    "demo": "demo",
    "erase": "erase",
    "evaluate": "models",
    "ingest": "data",
    "init": "data",
    "keys": "evidence",
    "ledger": "ledger",
    "log": "evidence",
    "migrate": "status",
    "plan": "plan",
    "plugins": "status",
    "policies": "policies",
    "predict": "models",
    "receipt": "evidence",
    "recipients": "recipients",
    "report": "report",
    "requests": "requests",
    "restore": "backup",
    "status": "status",
    "train": "models",
    "verify": "verify",
    "where": "data",
    "witness": "witness",
}
"""Every command, and the module of this package that has it."""


class Commands(click.Group):
    """Turns our errors into a line and an exit code; bugs keep their traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command: click.Command = getattr(import_module(f"unlearnd.cli.{MODULES[cmd_name]}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UnlearndError as error:
            click.echo(f"unlearnd: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo(f"unlearnd: {STOPPED}", err=True)
            ctx.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="unlearnd")
@click.option("--store", metavar="DIR", help="The store; else UNLEARND_STORE, else the nearest folder with one.")
@click.pass_context
def main(ctx: click.Context, store: str | None) -> None:
    """Train models so that a person can be taken out again exactly, and take them out on request."""
    ctx.obj = store
