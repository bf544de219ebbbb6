"""backup, restore."""

import os
from pathlib import Path

import click

from unlearnd.cli.options import as_json, opened, store_option
from unlearnd.cli.show import counted, print_json
from unlearnd.errors import InputError, NotFoundError


@click.command()
@click.argument("file")
@store_option
def backup(file: str, folder: str | None, as_json: bool) -> None:
    """Write ledger, keys and settings to a new file, as of one moment; others may go on meanwhile.

    Slices, checkpoints and receipts are not in it. With UNLEARND_BACKUP_PASSPHRASE it is encrypted. Make one after
    every ingest and every new model: what came later than a backup, no backup brings back.

    It is the one command that takes a ledger that is older than its storage, as after putting a dump of the database
    back: `unlearnd restore` carries out on the backup what was erased since.
    """
    with opened(folder, may_be_behind=True) as store:
        made, behind = store.back_up(file, _passphrase()), store.behind
    if as_json:
        about = {"file": file, "size": made.size, "root": made.root, "encrypted": made.encrypted}
        print_json({**about, "behind": behind})
        return
    click.echo(f"Backed up ledger (a log of {made.size:,} leaves), keys and settings to {file}.")
    if behind:
        click.echo(
            f"The ledger lacks the last {behind} leaves of the log: put the file in place with `restore`.", err=True
        )
    if not made.encrypted:
        click.echo("It holds the store's keys and is not encrypted: keep it as safe as them.", err=True)


@click.command()
@click.argument("file")
@click.argument("directory")
@click.option("--log", metavar="EXPORT", help="An exported log, where it is newer than the copy in storage.")
@click.option("--head", metavar="FILE", help="The newest tree head that anybody kept: the log must go on from it.")
@click.option("--ledger", metavar="URL", help="The database to put the ledger into, if not where it was.")
@click.option("--accept-losses", is_flag=True, help="Give up what came after the backup and no log brings back.")
@as_json
def restore(
    file: str,
    directory: str,
    log: str | None,
    head: str | None,
    ledger: str | None,
    accept_losses: bool,
    as_json: bool,
) -> None:
    """Put a backup into DIRECTORY, where the storage is and no store.

    Erasures that came after the backup are carried out again on it before anything is in place.
    """
    from unlearnd.store import restore_store  # heavy: sqlmodel

    made, since = restore_store(
        file, directory, _passphrase(), head=_read(head), log=log, ledger=ledger, accept_losses=accept_losses
    )
    if as_json:
        about = {"storeId": made.store_id, "size": made.size, "root": made.root, "madeAt": made.made_at}
        later = {"leaves": since.leaves, "erased": list(since.erased), "points": since.points}
        print_json({**about, "since": {**later, "lost": [list(one) for one in since.lost]}, "newKeys": since.rotated})
        return
    click.echo(f"Restored the store of {made.made_at} into {directory}, with a log of {made.size} leaves.")
    if since.leaves:
        click.echo(
            f"Since then the log had {since.leaves} more. Carried out again: {counted(len(since.erased), 'erasure')}, "
            f"which took {counted(since.points, 'point')} out."
        )
    for kind, *which in since.lost:
        click.echo(f"Not brought back: {kind} {' '.join(map(str, which))}.", err=True)
    for role in since.rotated:
        click.echo(f"The {role} key was changed after the backup and is not in it: a new one was made.", err=True)
    if since.rotated:
        click.echo(f"Publish {directory}/keys/trust.json anew.", err=True)
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
