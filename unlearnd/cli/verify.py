"""`unlearnd verify`: check a receipt offline, with what an auditor brings along."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from unlearnd.errors import InputError, NotFoundError, UnlearndError

_MAX_FILE = 2**30


@click.command()
@click.argument("receipt", metavar="RECEIPT")
@click.option("--trust", metavar="FILE", required=True, help="The operator's published trust file.")
@click.option("--head", metavar="OLDER", help="A tree head of the log, kept from earlier.")
@click.option("--log", "log", metavar="DIR", help="An exported log (unlearnd log export).")
@click.option("--policy", metavar="FILE", help="A C2SP tlog-policy naming the witnesses to believe.")
@click.option("--opening", metavar="FILE", help="What the user was given, to see whose receipt it is.")
@click.option("--detail", metavar="FILE", help="The detail document; else it is looked for in the exported log.")
@click.option("--at", metavar="MOMENT", help="Judge deadlines as of this moment (2026-01-31T12:00:00Z) and not now.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(
    receipt: str,
    trust: str,
    head: str | None,
    log: str | None,
    policy: str | None,
    opening: str | None,
    detail: str | None,
    at: str | None,
    as_json: bool,
) -> None:
    """Check a receipt, and say how far it can be relied on.

    Needs the receipt and the trust file alone: no store, no network. Every other file lets more be checked.
    Exits with 3 when a check fails.
    """
    from unlearnd.verify import LocalFolder, verify_receipt

    report = verify_receipt(
        read_file(receipt),
        read_file(trust),
        now=_moment(at),
        older_head=read_file(head) if head else None,
        policy=read_file(policy) if policy else None,
        export=LocalFolder(find_folder(log)) if log else None,
        opening=read_file(opening) if opening else None,
        detail=read_file(detail) if detail else None,
    )
    if as_json:
        import json

        click.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(report.lines()))
    click.get_current_context().exit(report.exit_code)


def read_file(name: str) -> bytes:
    """Return the bytes of a file that the command line names; `-` is standard input."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(_MAX_FILE)
        with Path(name).open("rb") as file:
            return file.read(_MAX_FILE)
    except FileNotFoundError:
        raise NotFoundError(f"no file {name}") from None
    except OSError as error:
        raise InputError(f"the file {name} cannot be read: {error.strerror}") from None


def find_folder(name: str) -> Path:
    """Return a folder that the command line names."""
    if not Path(name).is_dir():
        raise NotFoundError(f"no folder {name}")
    return Path(name)


def _moment(at: str | None) -> datetime:
    if at is None:
        return datetime.now(UTC)
    from unlearnd.verify.texts import read_moment

    try:
        return read_moment(at, "--at")
    except UnlearndError as error:
        raise InputError(str(error)) from None
