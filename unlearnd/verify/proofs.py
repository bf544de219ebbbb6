"""C2SP tlog-proofs: index, path and tree head of one leaf, as text (c2sp.org/tlog-proof)."""

from __future__ import annotations

from unlearnd.errors import FormatError
from unlearnd.verify.notes import MAX_NOTE
from unlearnd.verify.texts import read_base64, read_decimal
from unlearnd.verify.trees import HASH_BYTES
from unlearnd.verify.values import Value

MAX_PATH = 63
_FIRST_LINE = "c2sp.org/tlog-proof@v1"


class Proof(Value):
    """Where a leaf stands in a tree. Reading one checks nothing."""

    index: int
    path: tuple[bytes, ...]
    note: bytes
    """The signed tree head, not looked into."""
    extra: bytes | None = None
    """Not signed by anybody, not used."""


def read_proof(data: bytes) -> Proof:
    """Return the parts of a tlog-proof."""
    if len(data) > 2 * MAX_NOTE:
        raise FormatError(f"the proof is larger than {2 * MAX_NOTE:,} bytes")
    front, separator, note = data.partition(b"\n\n")
    if not separator:
        raise FormatError("the proof has no tree head")
    try:
        lines = front.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise FormatError("the proof is not text") from None
    if lines.pop(0) != _FIRST_LINE:
        raise FormatError(f"the proof does not begin with {_FIRST_LINE}")
    extra = None
    if lines and lines[0].startswith("extra "):
        extra = read_base64(lines.pop(0)[len("extra ") :], "the extra line of the proof")
    if not lines or not lines[0].startswith("index "):
        raise FormatError("the proof has no index")
    index = read_decimal(lines.pop(0)[len("index ") :], "the index of the proof")
    return Proof(index, read_hashes(lines), note, extra)


def read_hashes(lines: list[str]) -> tuple[bytes, ...]:
    """Return the hashes of the lines of a proof, one in each."""
    if len(lines) > MAX_PATH:
        raise FormatError(f"the proof has more than {MAX_PATH} hashes")
    hashes = tuple(read_base64(line, "a hash of the proof") for line in lines)
    if any(len(value) != HASH_BYTES for value in hashes):
        raise FormatError(f"a hash of the proof is not {HASH_BYTES} bytes")
    return hashes
