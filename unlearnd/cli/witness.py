"""`unlearnd witness`: cosign the tree heads of somebody else's log."""

import time
from pathlib import Path

import click

from unlearnd.errors import InputError, VerificationError
from unlearnd.verify.command import open_export, read_file


@click.command()
@click.argument("tree_head", metavar="CHECKPOINT", required=False)
@click.option("--new-key", nargs=2, metavar="NAME FILE", help="Make a witness key, print its public half, and end.")
@click.option("--state", metavar="FILE", help="Where the last tree head of each log is kept.")
@click.option("--key", "key_file", metavar="FILE", help="The witness's private key.")
@click.option("--log-key", "log_keys", multiple=True, metavar="VKEY", help="The log's public key; may be given again.")
@click.option("--proof", metavar="FILE", help="A C2SP consistency proof from the last tree head seen.")
@click.option("--log", "log", metavar="DIR", help="An exported log, to compute that proof from.")
@click.option(
    "--out", "-o", default="-", metavar="FILE", help="Where the cosigned tree head goes; - is standard output."
)
def witness(
    tree_head: str | None,
    new_key: tuple[str, str] | None,
    state: str | None,
    key_file: str | None,
    log_keys: tuple[str, ...],
    proof: str | None,
    log: str | None,
    out: str,
) -> None:
    """Check that a log only grew since it was last seen, and cosign its tree head.

    CHECKPOINT is a signed tree head, or a whole add-checkpoint request of C2SP; - is standard input.
    """
    from unlearnd import witness as witnesses
    from unlearnd.verify.notes import read_vkey

    if new_key:
        click.echo(witnesses.create_key(new_key[0], Path(new_key[1])).vkey)
        return
    if not (tree_head and state and key_file and log_keys):
        raise click.UsageError("CHECKPOINT, --state, --key and --log-key are needed, or --new-key")
    try:
        known = [read_vkey(log_key) for log_key in log_keys]
    except VerificationError as error:
        raise InputError(f"--log-key: {error}") from None
    try:
        key = witnesses.read_key(read_file(key_file).decode())
    except UnicodeDecodeError:
        raise InputError(f"the key file {key_file} is not text") from None
    update = witnesses.read_update(read_file(tree_head))
    if proof:
        old, hashes = witnesses.read_proof_lines(read_file(proof))
        update = witnesses.Update(update.note, old, hashes)
    export = open_export(log) if log else None
    note = witnesses.cosign(Path(state), key, known, update, int(time.time()), export)
    try:
        with click.open_file(out, "wb") as file:
            file.write(note)
    except OSError as error:
        raise InputError(f"the tree head cannot be written to {out}: {error.strerror}") from None
