"""Decide which shard and slice each point trains in.

Placement is a pure function of the user (or the point itself), the layout and the placement key, so whoever
holds them can recompute it and check that an erasure touched the right shards. It never looks at other
points, at counts or at the order of arrival: that is what lets a store that never met a user agree with one
that met and erased them.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, order=True)
class Place:
    """Where a point trains. Shards count from 1 to S, slices from 1 to R."""

    shard: int
    slice: int


def numbers_of_users(users: Iterable[str], key: bytes) -> Numbers:
    """Return each user's keyed number: HMAC-SHA256 of the id, the first 64 bits."""
    # One HMAC per distinct user, never per point.
    digests = b"".join([hmac.digest(key, user.encode(), "sha256")[:8] for user in users])
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def numbers_of_points(x: NDArray[np.generic], labels: Sequence[str], owners: Numbers, key: bytes) -> Numbers:
    """Return each point's own keyed number, from its owner's number and its content alone.

    Equal points of one user share a number. The content is folded in with a keyed universal hash (a sum of
    64-bit words times key-derived odd numbers), because one HMAC per point would be per-row Python.
    """
    if not len(x):
        return np.empty(0, np.uint64)
    rows = np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    padded = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    words = padded.view("<u8")
    stream = hashlib.shake_256(b"unlearnd/point/v1\n" + key).digest(8 * words.shape[1])
    odd = np.frombuffer(stream, "<u8") | np.uint64(1)
    content = (words * odd).sum(axis=1, dtype=np.uint64)
    distinct, codes = np.unique(np.asarray(labels), return_inverse=True)
    named = numbers_of_users([f"label {name}" for name in distinct], key)
    return _mix(_mix(owners ^ _mix(content)) ^ named[codes])


def place(numbers: Numbers, shards: int, slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return shards and slices for keyed numbers, spread evenly: the rule `uniform`."""
    count = np.uint64(shards)
    # Divide before the second remainder. Two remainders of the same number move together when the counts
    # share a factor: places nobody can land in.
    shard = numbers % count
    slice_ = numbers // count % np.uint64(slices)
    return shard.astype(np.int64) + 1, slice_.astype(np.int64) + 1


def _mix(numbers: Numbers) -> Numbers:
    """Spread 64-bit numbers so that every output bit depends on every input bit (splitmix64's finaliser)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
