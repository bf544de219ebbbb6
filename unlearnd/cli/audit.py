"""audit."""

from pathlib import Path
from typing import Any, Literal

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.show import print_json
from unlearnd.errors import InputError, NotFoundError


class _Count(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number, or `all`."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["all"]:
        if value == "all":
            return "all"
        if isinstance(value, int) or (value.isascii() and value.isdigit() and int(value[:10]) > 0):
            return int(value)
        self.fail(f"{value!r} is neither a number of checkpoints nor all", param, ctx)


@click.command()
@click.option("--replay", type=_Count(), metavar="N|all", help="Train N checkpoints again, drawn by the log's root.")
@click.option("--head", metavar="FILE", help="A tree head kept from earlier: the log must begin with it.")
@click.option("--opening", metavar="FILE", help="What a user was given with a receipt: look for rows of theirs.")
@click.option("--trust", metavar="FILE", help="A trust file kept from earlier; else the store's own keys.")
@store_option
@click.pass_context
def audit(
    ctx: click.Context,
    replay: int | Literal["all"] | None,
    head: str | None,
    opening: str | None,
    trust: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Check the whole store: log, storage, data, lineage; with --replay by training again.

    Nothing is changed. Exits with 3 when a check fails. Without --head a rewritten history is not seen, without
    --opening not whether somebody's rows are left, without --replay not what models were really trained on.
    """
    with opened(folder) as store:
        from unlearnd.audit import audit as audit_store  # heavy: numpy, safetensors

        report = audit_store(store, replay=replay, head=_read(head), opening=_read(opening), trust=_read(trust))
    if as_json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            click.echo(line)
    ctx.exit(report.exit_code)


def _read(name: str | None) -> bytes | None:
    if name is None:
        return None
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no file {name}") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
