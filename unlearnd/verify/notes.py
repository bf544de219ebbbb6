"""C2SP signed notes, and what is written in them: tree heads (C2SP checkpoints) and witness cosignatures.

A note is text, an empty line, and signature lines `— name base64`. Lines by unknown keys are ignored, whatever
they hold; a line that names a known key and does not verify condemns the note. Specifications:
c2sp.org/signed-note, c2sp.org/tlog-checkpoint, c2sp.org/tlog-cosignature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unlearnd.errors import FormatError, SignatureError
from unlearnd.verify.ed25519 import check_public_key, is_signed
from unlearnd.verify.hashes import sha256
from unlearnd.verify.texts import is_hex, read_base64, read_decimal, show_base64
from unlearnd.verify.trees import EMPTY_ROOT, HASH_BYTES
from unlearnd.verify.values import Value

ED25519 = 0x01
COSIGNATURE = 0x04
MAX_NOTE = 500_000
MAX_SIGNATURES = 100
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="


class NoteKey(Value):
    """A public key that signs notes under a name."""

    name: str
    algorithm: int
    public: bytes

    @property
    def id(self) -> bytes:
        """The four bytes that name the key in a signature line."""
        return sha256(self.name.encode() + b"\n" + bytes([self.algorithm]) + self.public).digest()[:4]

    @property
    def vkey(self) -> str:
        """The key as one word of text."""
        return f"{self.name}+{self.id.hex()}+{show_base64(bytes([self.algorithm]) + self.public)}"


class NoteSignature(Value):
    """One signature line."""

    name: str
    key_id: bytes
    signature: bytes

    @property
    def line(self) -> str:
        """The line as it stands in a note, with its end."""
        return f"— {self.name} {show_base64(self.key_id + self.signature)}\n"


class Note(Value):
    """A signed text. Reading one checks nothing."""

    text: str
    signatures: tuple[NoteSignature, ...]


class TreeHead(Value):
    """The state of a log that somebody signed."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()


class Cosignature(Value):
    """A witness saying: this was the largest tree of that log I had seen then, and consistent with all before."""

    key: NoteKey
    time: int
    """Seconds since 1970."""


def read_vkey(text: str, *, cosigner: bool = False) -> NoteKey:
    """Return the key of a C2SP vkey: an Ed25519 key of a log, or of a cosigner.

    Tools also hand out a witness's key in the form of a log's; asked for a cosigner, both forms are taken. The two
    never sign the same bytes, so nothing can be passed off as the other.
    """
    name, _, rest = text.partition("+")
    key_id, _, encoded = rest.partition("+")
    is_encoded = 1 <= len(encoded) <= 100 and not encoded.strip(_BASE64)
    if len(text) > 1000 or not _is_name(name) or not is_hex(key_id, 8) or not is_encoded:
        raise FormatError("a vkey is name+id+base64")
    if not name.isprintable():
        raise FormatError("the name in a vkey holds a character that cannot be printed")
    value = read_base64(encoded, f"the key of {name}")
    key = NoteKey(name, value[0], value[1:])
    if key.algorithm not in ((ED25519, COSIGNATURE) if cosigner else (ED25519,)):
        raise FormatError(f"the key of {name} is of type {key.algorithm}, which is not known here")
    if key.id.hex() != key_id:
        raise FormatError(f"the vkey of {name} says id {key_id}, its key has {key.id.hex()}")
    check_public_key(key.public)
    return NoteKey(name, COSIGNATURE, key.public) if cosigner else key


def read_note(data: bytes) -> Note:
    """Return text and signatures of a signed note."""
    if len(data) > MAX_NOTE:
        raise FormatError(f"the note is larger than {MAX_NOTE:,} bytes")
    try:
        whole = data.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError("the note is not UTF-8") from None
    if any(c < " " and c != "\n" for c in whole):
        raise FormatError("the note holds a control character")
    text, separator, lines = whole.rpartition("\n\n")
    if not separator or not lines.endswith("\n"):
        raise FormatError("the note has no signatures, or does not end with a line")
    listed = lines[:-1].split("\n")
    if len(listed) > MAX_SIGNATURES:
        raise FormatError(f"the note has more than {MAX_SIGNATURES} signatures")
    return Note(text + "\n", tuple(_read_signature(line) for line in listed))


def write_note(note: Note) -> bytes:
    """Return the bytes of a note."""
    return f"{note.text}\n{''.join(s.line for s in note.signatures)}".encode()


def check_note(note: Note, keys: Sequence[NoteKey]) -> tuple[NoteKey, ...]:
    """Return those of the `keys` that signed the note; raise SignatureError when none did, or one does not fit."""
    signers = []
    for key, signature in _by_known_keys(note, keys):
        if not is_signed(key.public, signature, note.text.encode()):
            raise SignatureError(f"the signature of {key.name} does not fit the text")
        signers.append(key)
    if not signers:
        raise SignatureError("the note is signed by none of the keys given")
    return tuple(signers)


def check_cosignatures(note: Note, witnesses: Sequence[NoteKey]) -> tuple[Cosignature, ...]:
    """Return the cosignatures of the `witnesses` on a note, each witness once; raise SignatureError for a false one."""
    found = []
    for key, signature in _by_known_keys(note, witnesses):
        time = cosignature_time(signature)
        if not is_signed(key.public, signature[8:], cosigned_message(note.text, time)):
            raise SignatureError(f"the cosignature of {key.name} does not fit the text")
        found.append(Cosignature(key, time))
    return tuple(found)


def cosignature_time(signature: bytes) -> int:
    """Return the time that a cosignature carries in front of its Ed25519 signature."""
    if len(signature) != 72:
        raise SignatureError("a cosignature is a time and an Ed25519 signature, 72 bytes")
    time = int.from_bytes(signature[:8], "big")
    if not 0 < time < 2**63:
        raise SignatureError("a cosignature has a time of its own")
    return time


def cosigned_message(text: str, time: int) -> bytes:
    """Return the bytes that a witness signs for a tree head's text."""
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def read_tree_head(text: str) -> TreeHead:
    """Return the tree head that a note's text states."""
    lines = text.split("\n")
    if len(lines) < 4 or lines.pop() != "":
        raise FormatError("a tree head has three lines: origin, size, root")
    origin, size, root, *extensions = lines
    if not origin:
        raise FormatError("the tree head names no origin")
    if not all(extensions):
        raise FormatError("the tree head has an empty line")
    head = TreeHead(
        origin, read_decimal(size, "the size of the tree head"), read_base64(root, "the root"), tuple(extensions)
    )
    if len(head.root) != HASH_BYTES:
        raise FormatError(f"the root of the tree head is {len(head.root)} bytes, not {HASH_BYTES}")
    if head.size == 0 and head.root != EMPTY_ROOT:
        raise FormatError("the tree head is of size 0 and does not have the root of the empty tree")
    return head


def _read_signature(line: str) -> NoteSignature:
    if not line.startswith("— "):
        raise FormatError("a signature line begins with — and a space")
    name, space, encoded = line[2:].partition(" ")
    if not space or not _is_name(name):
        raise FormatError("a signature line is — name base64, and a name has no spaces or +")
    value = read_base64(encoded, "a signature")
    if len(value) < 5:
        raise FormatError("a signature line has a key id of four bytes and a signature")
    return NoteSignature(name, value[:4], value[4:])


def _by_known_keys(note: Note, keys: Sequence[NoteKey]) -> Iterable[tuple[NoteKey, bytes]]:
    seen: set[tuple[str, bytes]] = set()
    for line in note.signatures:
        known = [key for key in keys if key.name == line.name and key.id == line.key_id]
        if not known or (line.name, line.key_id) in seen:
            continue
        if len(known) > 1:
            raise SignatureError(f"two keys of {line.name} have the same id")
        seen.add((line.name, line.key_id))
        yield known[0], line.signature


def _is_name(text: str) -> bool:
    return bool(text) and "+" not in text and not any(map(str.isspace, text))
