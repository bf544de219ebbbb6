"""Write signed notes, tree heads and proofs as C2SP specifies them: pure text.

A tree head is what C2SP calls a checkpoint. Whoever checks these has code of their own (`unlearnd.verify`), so
that a mistake here is found there.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence

ED25519 = b"\x01"
PROOF_HEADER = "c2sp.org/tlog-proof@v1"


def key_hash(name: str, public: bytes) -> bytes:
    """Return the four bytes that stand for a key in a note's signature lines."""
    return hashlib.sha256(name.encode() + b"\n" + ED25519 + public).digest()[:4]


def vkey(name: str, public: bytes) -> str:
    """Return a verifier key as text."""
    return f"{name}+{key_hash(name, public).hex()}+{_base64(ED25519 + public)}"


def head_text(origin: str, size: int, root: bytes) -> str:
    """Return what a tree head says: whose log, how many leaves, which root."""
    return f"{origin}\n{size}\n{_base64(root)}\n"


def sign_note(text: str, name: str, public: bytes, sign: Callable[[bytes], bytes]) -> str:
    """Return `text` as a note with one signature."""
    return f"{text}\n{signature_line(name, key_hash(name, public) + sign(text.encode()))}"


def signature_line(name: str, blob: bytes) -> str:
    """Return a signature as a note's last lines hold it."""
    return f"— {name} {_base64(blob)}\n"


def proof_text(index: int, path: Sequence[bytes], note: str) -> str:
    """Return a proof of inclusion under a tree head, as C2SP's tlog-proof."""
    lines = [PROOF_HEADER, f"index {index}", *map(_base64, path), "", note]
    return "\n".join(lines)


def tile_path(level: int | str, index: int, width: int) -> str:
    """Return the name of a tile of hashes (a level) or of entries ("entries"); `width` 256 is a full one."""
    parts = [f"{index % 1000:03d}"]
    while index >= 1000:
        index //= 1000
        parts.insert(0, f"x{index % 1000:03d}")
    ending = "" if width == 256 else f".p/{width}"
    return f"tile/{level}/{'/'.join(parts)}{ending}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
