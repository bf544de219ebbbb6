"""backup, restore."""

import os
from pathlib import Path

import click

from unlearnd.cli.options import as_json, opened, store_option
from unlearnd.cli.show import print_json
from unlearnd.errors import InputError, NotFoundError


@click.command()
@click.argument("file")
@store_option
def backup(file: str, folder: str | None, as_json: bool) -> None:
    """Write ledger, keys and settings to a new file, as of one moment; others may go on meanwhile.

    Slices, checkpoints and receipts are not in it. With UNLEARND_BACKUP_PASSPHRASE it is encrypted. Make one after
    every erasure: a backup that is older than the last erasure is not restored.
    """
    with opened(folder) as store:
        made = store.back_up(file, _passphrase())
    if as_json:
        print_json({"file": file, "size": made.size, "root": made.root, "encrypted": made.encrypted})
        return
    click.echo(f"Backed up ledger (a log of {made.size:,} leaves), keys and settings to {file}.")
    if not made.encrypted:
        click.echo("It holds the store's keys and is not encrypted: keep it as safe as them.", err=True)


@click.command()
@click.argument("file")
@click.argument("directory")
@click.option("--head", metavar="FILE", help="The newest tree head that anybody kept: the backup must be as new.")
@as_json
def restore(file: str, directory: str, head: str | None, as_json: bool) -> None:
    """Put a backup into DIRECTORY, where the storage is and no store; refuse one that erasures have overtaken."""
    from unlearnd.store import restore_store  # heavy: sqlmodel

    made = restore_store(file, directory, _passphrase(), head=_read(head))
    if as_json:
        print_json({"storeId": made.store_id, "size": made.size, "root": made.root, "madeAt": made.made_at})
        return
    click.echo(f"Restored the store of {made.made_at} into {directory}, with a log of {made.size} leaves.")
    click.echo("`unlearnd audit` says whether storage is as the ledger has it; `unlearnd build` makes what is missing.")


def _passphrase() -> bytes | None:
    given = os.environ.get("UNLEARND_BACKUP_PASSPHRASE")
    return given.encode() if given else None


def _read(name: str | None) -> bytes | None:
    if name is None:
        return None
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no file {name}") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
