"""Pack ascending positions into few bytes, and back, many lists at once.

A list is stored as its first value and the gaps after it, each as a variable-length integer (LEB128: seven
bits a byte, low bits first). Ten positions scattered over ten million take about thirty bytes. Everything
works on whole columns: the cost is per list at most, never per position.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def pack(positions: Positions) -> bytes:
    """Return one ascending list packed."""
    return pack_many(positions, np.array([0, len(positions)]))[0] if len(positions) else b""


def unpack(packed: bytes) -> Positions:
    """Return the ascending list that `pack` made `packed` from."""
    return unpack_many([packed])[0]


def pack_many(positions: Positions, bounds: NDArray[np.int64]) -> list[bytes]:
    """Pack the non-empty lists `positions[bounds[i]:bounds[i + 1]]`, each ascending."""
    gaps = np.diff(positions, prepend=0).astype(np.uint64)
    starts = bounds[:-1]
    gaps[starts] = positions[starts].astype(np.uint64)
    widths = np.ones(len(gaps), np.int64)
    for bits in range(7, 64, 7):
        widths += (gaps >> np.uint64(bits)) != 0
    ends = np.cumsum(widths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    begins = ends - widths
    for byte in range(int(widths.max(initial=0))):
        has = widths > byte
        value = (gaps[has] >> np.uint64(7 * byte)) & np.uint64(0x7F)
        more = (widths[has] > byte + 1).astype(np.uint64) << np.uint64(7)
        out[begins[has] + byte] = (value | more).astype(np.uint8)
    blob = out.tobytes()
    edges = np.concatenate([begins[starts], ends[-1:]]).tolist()
    return [blob[edges[i] : edges[i + 1]] for i in range(len(starts))]


def unpack_many(packed: Sequence[bytes]) -> list[Positions]:
    """Return the lists that were packed."""
    flat, bounds = unpack_flat(packed)
    return [flat[bounds[i] : bounds[i + 1]] for i in range(len(packed))]


def unpack_flat(packed: Sequence[bytes]) -> tuple[Positions, NDArray[np.int64]]:
    """Return all lists end to end, and where each begins and ends."""
    data = np.frombuffer(b"".join(packed), np.uint8)
    last = np.flatnonzero(data < 0x80)
    begins = np.concatenate([[0], last[:-1] + 1]).astype(np.int64) if len(last) else last
    widths = last - begins + 1
    gaps = np.zeros(len(last), np.uint64)
    for byte in range(int(widths.max(initial=0))):
        has = widths > byte
        low = (data[begins[has] + byte] & 0x7F).astype(np.uint64)
        gaps[has] |= low << np.uint64(7 * byte)
    edges = np.cumsum([0, *map(len, packed)])
    bounds = np.searchsorted(begins, edges).astype(np.int64)
    running = np.cumsum(gaps.astype(np.int64))
    # A cumulative sum over everything, less what had gathered before each list began.
    before = np.concatenate([[0], running])[bounds[:-1]]
    flat = running - np.repeat(before, np.diff(bounds))
    return flat, bounds
