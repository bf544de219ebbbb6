"""Read safetensors that somebody else may have written: what a header says is held against its size first."""

from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from unlearnd.errors import DamagedStoreError

MOST_HEADER = 16 << 20
"""Bytes of a header that are read at most: room for a hundred thousand tensors."""


def read_tensors(data: bytes, name: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an object; raise `DamagedStoreError` before anything is made of a header that lies."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise DamagedStoreError(f"{name} cannot be read: its header is longer than the object")
    if length > MOST_HEADER:
        raise DamagedStoreError(f"{name} cannot be read: its header has {length:,} bytes, more than {MOST_HEADER:,}")
    try:
        # Checks every offset against the bytes that are there, so what it makes is no larger than they are.
        read: dict[str, NDArray[Any]] = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DamagedStoreError(f"{name} cannot be read: {error}") from None
    return read
