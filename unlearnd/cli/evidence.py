"""receipt, log, keys."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.show import counted, print_json, print_table
from unlearnd.errors import InputError, StorageError, VerificationError


@click.group()
def receipt() -> None:
    """Receipts of erasures: list, show, export."""


@receipt.command("list")
@store_option
def list_receipts(folder: str | None, as_json: bool) -> None:
    """List every receipt of the store."""
    with opened(folder) as store:
        found = store.receipts()
    if as_json:
        print_json([{"request": r.request_id, "leaf": r.leaf, "detail": r.detail, "key": r.key_id} for r in found])
    elif not found:
        click.echo("No receipt yet.")
    else:
        print_table(("request", "leaf", "signed by"), [(r.request_id, r.leaf, (r.key_id or "")[:16]) for r in found])


@receipt.command("show")
@click.argument("request")
@store_option
def show_receipt(request: str, folder: str | None, as_json: bool) -> None:
    """Print what a receipt says, or with --json the receipt itself."""
    with opened(folder) as store:
        data = store.receipt(request)
    if as_json:
        click.echo(data.decode())
        return
    from unlearnd.dossier import predicate_of

    said = predicate_of(data)
    for name in ("requestId", "asked", "found", "influenceRemovedAt", "replay"):
        click.echo(f"{name}: {said[name]}")
    click.echo(f"received: {said['request']['receivedAt']}, due {said['request']['dueAt']}")
    click.echo(f"erased: {counted(said['erased']['points'], 'point')}")
    click.echo(f"checkpoints destroyed: {said['checkpoints']['destroyed']['count']:,}")
    click.echo(f"to train again: {said['samples']['retrain']:,} of {said['samples']['fromScratch']:,} samples")


@receipt.command("export")
@click.argument("request")
@click.option("-o", "--out", required=True, metavar="DIR", help="A new folder for the evidence.")
@store_option
def export_receipt(request: str, out: str, folder: str | None, as_json: bool) -> None:
    """Write the evidence pack of a receipt: for the person, or for an authority."""
    with opened(folder) as store:
        names = store.export_receipt(request, out)
    if as_json:
        print_json({"folder": out, "files": names})
    else:
        click.echo(f"Wrote {counted(len(names), 'file')} to {out}; summary.html is for people.")


@click.group()
def log() -> None:
    """The transparency log: its head, proofs, export."""


@log.command("head")
@store_option
def log_head(folder: str | None, as_json: bool) -> None:
    """Print the newest signed tree head."""
    with opened(folder) as store:
        size, note = store.log_head()
    print_json({"size": size, "note": note}) if as_json else click.echo(note, nl=False)


@log.command("prove")
@click.argument("index", type=int)
@store_option
def log_prove(index: int, folder: str | None, as_json: bool) -> None:
    """Print a proof that leaf INDEX is in the log."""
    with opened(folder) as store:
        proof = store.log_proof(index)
    print_json({"index": index, "proof": proof}) if as_json else click.echo(proof, nl=False)


@log.command("consistency")
@click.argument("old", type=int)
@click.argument("new", type=int, required=False)
@store_option
def log_consistency(old: int, new: int | None, folder: str | None, as_json: bool) -> None:
    """Print the proof that the log of OLD leaves is a prefix of that of NEW, or of the newest."""
    with opened(folder) as store:
        size, path = store.log_consistency(old, new)
    if as_json:
        print_json({"old": old, "new": size, "path": path})
    else:
        for line in path:
            click.echo(line)


@log.command("export")
@click.argument("target", metavar="DIR|URL")
@store_option
def log_export(target: str, folder: str | None, as_json: bool) -> None:
    """Write the whole log with its documents and receipts to a folder that an auditor can take away."""
    with opened(folder) as store:
        size = store.export_log(target)
    if as_json:
        print_json({"target": target, "leaves": size})
    else:
        click.echo(f"Exported {size:,} leaves to {target}.")


@log.command("cosigned")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@store_option
def log_cosigned(file: IO[str], folder: str | None, as_json: bool) -> None:
    """Take in a tree head that witnesses have cosigned (- for standard input): receipts then carry it."""
    try:
        note = file.read()
    except UnicodeDecodeError:
        raise InputError("this is not a tree head: it is not UTF-8 text") from None
    with opened(folder) as store:
        count = store.keep_cosignatures(note)
    if as_json:
        print_json({"receipts": count})
    else:
        click.echo(f"Kept the cosigned tree head, and wrote {counted(count, 'receipt')} anew with it.")


@click.group()
def keys() -> None:
    """The keys that sign: list, rotate, revoke."""


@keys.command("list")
@store_option
def list_keys(folder: str | None, as_json: bool) -> None:
    """List the keys that sign or signed for this store."""
    with opened(folder) as store:
        found = store.signing_keys()
    if as_json:
        print_json([{"keyId": k.key_id, "role": k.role, "since": k.since, "until": k.until} for k in found])
    else:
        rows = [(k.role, k.key_id, k.since, "in use" if k.until is None else f"{k.until:,}") for k in found]
        print_table(("role", "key", "since leaf", "until leaf"), rows)


@keys.command("rotate")
@click.argument("role", type=click.Choice(["log", "receipt"]))
@store_option
def rotate_key(role: str, folder: str | None, as_json: bool) -> None:
    """Put a new key in the place of the one in use; publish trust.json again afterwards."""
    with opened(folder) as store:
        new = store.rotate_key(role)
    if as_json:
        print_json({"keyId": new.key_id, "role": role, "since": new.since})
    else:
        click.echo(f"New {role} key {new.key_id} counts from leaf {new.since}; publish keys/trust.json again.")


@keys.command("witness")
@click.argument("key", metavar="VKEY")
@click.option("--quorum", type=int, default=1, show_default=True, metavar="N", help="How many witnesses must cosign.")
@store_option
def add_witness(key: str, quorum: int, folder: str | None, as_json: bool) -> None:
    """Name a witness in trust.json by its C2SP verifier key; publish the file again afterwards."""
    from unlearnd.verify.notes import read_vkey

    try:
        read_vkey(key, cosigner=True)
    except VerificationError as error:
        raise InputError(str(error)) from None
    with opened(folder) as store:
        store.add_witness(key, quorum)
    if as_json:
        print_json({"witness": key, "quorum": quorum})
    else:
        click.echo(f"Named the witness; a receipt needs {counted(quorum, 'cosignature')}. Publish keys/trust.json.")


@keys.command("revoke")
@click.argument("key_id", metavar="KEY")
@click.option("--since", type=int, required=True, metavar="INDEX", help="The first leaf at which it does not count.")
@store_option
def revoke_key(key_id: str, since: int, folder: str | None, as_json: bool) -> None:
    """Say that a key that is no longer in use does not count from leaf INDEX on."""
    with opened(folder) as store:
        store.revoke_key(key_id, since)
    if as_json:
        print_json({"keyId": key_id, "since": since})
    else:
        click.echo(f"Key {key_id} does not count from leaf {since} on; publish keys/trust.json again.")


def write_openings(folder: str, openings: Mapping[str, bytes]) -> None:
    """Write each opening to a private file of its own."""
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for request_id, data in openings.items():
            path = Path(folder) / f"{request_id}.opening.json"
            if path.exists() and path.read_bytes() == data:
                continue
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(data)
    except OSError as error:
        raise StorageError(f"the openings cannot be written to {folder}: {error.strerror}") from error
