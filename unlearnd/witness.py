"""Watch over somebody else's log: remember the largest tree head seen, cosign only what extends it.

A witness keeps one small file. It cosigns a tree head when the log signed it and the tree it saw last is the
beginning of the new one (c2sp.org/tlog-witness), so a log that shows two histories cannot get both cosigned. The
file is replaced before a cosignature is handed out, under a lock: a witness that forgets can be made to
contradict itself.
"""

import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from unlearnd.errors import FormatError, InclusionError, InputError, NotFoundError, RefusedError
from unlearnd.verify.exports import Folder, read_checkpoint, read_leaves
from unlearnd.verify.notes import (
    COSIGNATURE,
    ED25519,
    MAX_NOTE,
    Note,
    NoteKey,
    NoteSignature,
    TreeHead,
    check_note,
    cosigned_message,
    read_note,
    read_tree_head,
    write_note,
)
from unlearnd.verify.proofs import read_hashes
from unlearnd.verify.statements import Fields, read_json
from unlearnd.verify.texts import read_base64, read_decimal
from unlearnd.verify.trees import EMPTY_ROOT, Growing, check_consistency, leaf_hash

MAX_STATE = 50_000_000
STATE_TYPE = "application/vnd.unlearnd.witness.v1+json"
_PRIVATE = "PRIVATE+KEY+"


@dataclass(frozen=True, repr=False)
class WitnessKey:
    """A witness's name and secret. Not shown when printed."""

    name: str
    seed: bytes

    @property
    def public(self) -> NoteKey:
        """The key that others check cosignatures with."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        raw = Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()
        return NoteKey(self.name, COSIGNATURE, raw)

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature over `message`."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)


@dataclass(frozen=True)
class Update:
    """A tree head to be cosigned, and the proof that it extends the one before."""

    note: bytes
    old: int | None = None
    """The size that the proof starts from; None for whatever the witness saw last."""
    proof: tuple[bytes, ...] | None = None


def create_key(name: str, path: Path) -> NoteKey:
    """Write a fresh witness key to `path`, readable by its owner alone, and return its public half."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not name or "+" in name or any(c.isspace() or not c.isprintable() for c in name):
        raise InputError("a witness's name has no spaces and no +; a domain name does well")
    key = WitnessKey(name, Ed25519PrivateKey.generate().private_bytes_raw())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise RefusedError(f"there is a file {path} already; a key is never overwritten") from None
    except OSError as error:
        raise InputError(f"no key can be written to {path}: {error.strerror}") from None
    with os.fdopen(handle, "w") as file:
        secret = b64encode(bytes([COSIGNATURE]) + key.seed).decode()
        file.write(f"{_PRIVATE}{name}+{key.public.id.hex()}+{secret}\n")
        file.flush()
        os.fsync(file.fileno())
    return key.public


def read_key(text: str) -> WitnessKey:
    """Return the key of a private key in the form of C2SP's signer keys, `PRIVATE+KEY+name+id+base64`."""
    parts = text.strip().removeprefix(_PRIVATE).split("+", 2)
    if not text.startswith(_PRIVATE) or len(parts) != 3:
        raise InputError("the key file does not hold PRIVATE+KEY+name+id+base64")
    name, key_id, encoded = parts
    try:
        value = read_base64(encoded, "the private key")
    except FormatError as error:
        raise InputError(str(error)) from None
    if len(value) != 33 or value[0] not in (ED25519, COSIGNATURE):
        raise InputError("the key file does not hold an Ed25519 key")
    key = WitnessKey(name, value[1:])
    # Go's tools write a key of a cosigner like one of a log; its id then follows the type it says.
    if NoteKey(name, value[0], key.public.public).id.hex() != key_id:
        raise InputError("the id in the key file is not that of the key")
    return key


def read_update(body: bytes) -> Update:
    """Return the parts of an add-checkpoint request of c2sp.org/tlog-witness, or a tree head on its own."""
    if not body.startswith(b"old "):
        return Update(body)
    front, separator, note = body.partition(b"\n\n")
    if not separator:
        raise FormatError("the request has no tree head")
    old, proof = read_proof_lines(front)
    return Update(note, old, proof)


def read_proof_lines(text: bytes) -> tuple[int | None, tuple[bytes, ...]]:
    """Return old size and hashes of a consistency proof: perhaps a line `old N`, then a hash in base64 per line."""
    if len(text) > MAX_NOTE:
        raise FormatError("the proof is too large")
    try:
        lines = text.decode("ascii").rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise FormatError("the proof is not text") from None
    old = read_decimal(lines.pop(0)[4:], "the old size") if lines[0].startswith("old ") else None
    return old, read_hashes([line for line in lines if line])


def cosign(
    state: Path, key: WitnessKey, log_keys: Sequence[NoteKey], update: Update, now: int, export: Folder | None = None
) -> bytes:
    """Check a tree head against the last one seen, remember it, and return it with the witness's cosignature.

    Raises NotFoundError for a log without a key, SignatureError, RefusedError when the proof starts from another
    size than the last one seen, and InclusionError when the log shown is not the one seen before.
    """
    note = read_note(update.note)
    head = read_tree_head(note.text)
    # (1) The log says so itself.
    own = [log_key for log_key in log_keys if log_key.name == head.origin]
    if not own:
        raise NotFoundError(f"no key was given for the log {head.origin!r}")
    check_note(note, own)
    with _locked(state):
        seen = read_state(state)
        last = _last(seen, head.origin)
        # (2) It is the same log as before, and not a shorter one.
        _check_extends(last, head, update, export)
        # (3) Remembered before anybody can hold the cosignature.
        _write_state(state, {**seen, head.origin: write_note(note).decode()})
    signed = key.sign(cosigned_message(note.text, now))
    public = key.public
    mine = NoteSignature(key.name, public.id, now.to_bytes(8, "big") + signed)
    others = tuple(s for s in note.signatures if (s.name, s.key_id) != (mine.name, mine.key_id))
    return write_note(Note(note.text, (*others, mine)))


def read_state(path: Path) -> Mapping[str, str]:
    """Return the last tree head seen of each log, as signed notes by origin."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"the witness's state {path} cannot be read: {error.strerror}") from None
    try:
        # Origins may be outside ASCII, so they are values here and not keys.
        fields = Fields(read_json(data, "the witness's state", MAX_STATE), "the witness's state")
        if fields.text("mediaType") != STATE_TYPE:
            raise FormatError("the witness's state is of another type")
        seen = {}
        for note in fields.texts("heads"):
            seen[read_tree_head(read_note(note.encode()).text).origin] = note
    except FormatError as error:
        # Going on without it would mean to forget: a human must look.
        raise InputError(f"{path} cannot be used: {error}") from None
    return seen


def _check_extends(last: TreeHead, head: TreeHead, update: Update, export: Folder | None) -> None:
    old = last.size if update.old is None else update.old
    if old > head.size and update.old is not None:
        raise FormatError(f"the proof starts from size {old}, and the tree head has size {head.size}")
    if old != last.size:
        raise RefusedError(f"the proof starts from size {old}, and the last tree head seen has size {last.size}")
    if head.size < last.size:
        raise InclusionError(f"the tree head has size {head.size}, and one of size {last.size} was seen before")
    if update.proof is not None or export is None:
        proof = update.proof or ()
        if last.size == 0:
            # The empty tree is the beginning of every tree: nothing to prove, and nothing accepted as proof.
            if proof:
                raise InclusionError("a proof from the empty tree is empty")
            return
        if not proof and head.size > last.size and update.proof is None:
            size = last.size
            raise RefusedError(f"a proof from size {size}, or the exported log, is needed: a tree head was seen before")
        check_consistency(last.size, head.size, last.root, head.root, proof)
        return
    _check_export(last, head, export)


def _check_export(last: TreeHead, head: TreeHead, export: Folder) -> None:
    # The folder's own tree head only says how its files are cut; the roots decide.
    size = read_tree_head(read_note(read_checkpoint(export)).text).size
    if size < head.size:
        raise RefusedError(f"the exported log has {size} leaves: one of at least {head.size} is needed")
    tree = Growing()
    for leaf in islice(read_leaves(export, size), head.size):
        if tree.size == last.size and tree.root() != last.root:
            break
        tree.add(leaf_hash(leaf))
    if tree.size != head.size or (tree.size == last.size and tree.root() != last.root):
        raise InclusionError(f"the exported log does not begin with the {last.size} leaves seen before")
    if tree.root() != head.root:
        raise InclusionError(f"the {head.size} leaves of the exported log do not hash to the root of the tree head")


def _last(seen: Mapping[str, str], origin: str) -> TreeHead:
    if origin not in seen:
        return TreeHead(origin, 0, EMPTY_ROOT)
    return read_tree_head(read_note(seen[origin].encode()).text)


def _write_state(path: Path, seen: Mapping[str, str]) -> None:
    document = {"mediaType": STATE_TYPE, "heads": [seen[origin] for origin in sorted(seen)]}
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InputError(f"the witness's state {path} cannot be written: {error.strerror}") from None


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Hold a lock beside the state, so that of two runs at once the second sees what the first remembered."""
    import fcntl  # not there on every system

    try:
        with state.with_name(state.name + ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise InputError(f"the witness's state {state} cannot be locked: {error.strerror}") from None
