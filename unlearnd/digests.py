"""Hashes, and the numbers drawn from them.

One place decides how values become bytes before they are hashed, so that two parts of the program never
disagree about an address or a seed. Everything here is pure and needs only the standard library.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import NewType

Digest = NewType("Digest", str)
"""A SHA-256 in lower-case hexadecimal."""

# Made once: `json.dumps` with options makes an encoder every time.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """Return the SHA-256 of `data`."""
    return Digest(hashlib.sha256(data).hexdigest())


def canonical_json(value: object) -> bytes:
    """Return the one encoding of a JSON value that we hash: sorted keys, no spaces, UTF-8, no NaN."""
    return _ENCODER.encode(value).encode()


def digest_of_json(value: object) -> Digest:
    """Return the digest of a JSON value's canonical encoding."""
    return digest_of(canonical_json(value))


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed that depends on `seed` and `parts` alone.

    This is where every random stream begins: (model seed, shard, slice, epoch, purpose). A stream is never
    seeded from data or from a position in another stream, so taking a point out moves no other draw.
    """
    payload = canonical_json([seed, *parts])
    return int.from_bytes(hashlib.sha256(b"unlearnd/seed/v1\n" + payload).digest()[:8], "big") >> 1


def digest_of_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes | memoryview]]) -> Digest:
    """Return the digest of named tensors given as (name, dtype, shape, little-endian bytes).

    The order they come in does not matter. This is what a replay is compared by: equal states have equal
    digests however their file was written.
    """
    whole = hashlib.sha256(b"unlearnd/tensors/v1\n")
    for name, dtype, shape, data in sorted(tensors, key=lambda tensor: tensor[0]):
        whole.update(canonical_json([name, dtype, list(shape), len(data)]) + b"\n")
        whole.update(data)
    return Digest(whole.hexdigest())
