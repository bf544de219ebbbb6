"""audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.show import counting, print_json
from unlearnd.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from unlearnd.audit import AuditReport
    from unlearnd.shadows import MembershipReport


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
@click.option("--membership", metavar="MODEL", help="Instead, attack MODEL: does it give away rows that were erased?")
@click.option("--erased", metavar="FILE", help="With --membership: rows that were erased, from your own records.")
@click.option("--held-out", metavar="FILE", help="With --membership: rows like them that were never ingested.")
@click.option("--label", metavar="COL", help="With --membership: the column of the right answers in both files.")
@click.option("--shadows", type=click.IntRange(min=2), metavar="N", help="Shadow models to train.  [default: 16]")
@click.option("--device", metavar="NAME", help="With --membership: where to compute.")
@store_option
@click.pass_context
def audit(
    ctx: click.Context,
    replay: int | Literal["all"] | None,
    head: str | None,
    opening: str | None,
    trust: str | None,
    membership: str | None,
    erased: str | None,
    held_out: str | None,
    label: str | None,
    shadows: int | None,
    device: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Check the whole store: log, storage, data, lineage; with --replay by training again.

    Nothing is changed. Exits with 3 when a check fails. Without --head a rewritten history is not seen, without
    --opening not whether somebody's rows are left, without --replay not what models were really trained on.

    With --membership nothing of that is checked. Models like MODEL are trained in memory, and their answers compared
    with its own: exits with 3 when it tells the erased rows from rows it was never given.
    """
    if membership is not None:
        if erased is None or held_out is None or label is None:
            raise click.UsageError("--membership needs --erased FILE, --held-out FILE and --label COL")
        if replay or head or opening or trust:
            raise click.UsageError("--membership is a test by itself: run the audit of the store without it")
        with opened(folder) as store, counting("Trained", as_json, "shadow models") as count:
            found = store.attack_membership(
                membership,
                erased=erased,
                held_out=held_out,
                label=label,
                shadows=shadows or 16,
                device=device,
                on_shadow=count,
            )
        _print(ctx, found, as_json)
        return
    if erased or held_out or label or shadows or device:
        raise click.UsageError("--erased, --held-out, --label, --shadows and --device go with --membership MODEL")
    with opened(folder) as store:
        from unlearnd.audit import audit as audit_store  # heavy: numpy, safetensors

        report = audit_store(store, replay=replay, head=_read(head), opening=_read(opening), trust=_read(trust))
    _print(ctx, report, as_json)


def _print(ctx: click.Context, report: "AuditReport | MembershipReport", as_json: bool) -> None:
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
