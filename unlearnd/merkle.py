"""The Merkle tree of RFC 6962, section 2.1: pure hashing, no storage."""

import hashlib
from collections.abc import Iterable

EMPTY_ROOT = hashlib.sha256().digest()


def root_of(leaves: Iterable[bytes]) -> bytes:
    """Return the tree's root over `leaves` in the order given."""
    sha256 = hashlib.sha256
    # Perfect subtrees by height, tallest first: at most one of each, as the bits of the count.
    peaks: list[tuple[int, bytes]] = []
    for leaf in leaves:
        height, node = 0, sha256(b"\x00" + leaf).digest()
        while peaks and peaks[-1][0] == height:
            node = sha256(b"\x01" + peaks.pop()[1] + node).digest()
            height += 1
        peaks.append((height, node))
    if not peaks:
        return EMPTY_ROOT
    root = peaks.pop()[1]
    while peaks:
        root = sha256(b"\x01" + peaks.pop()[1] + root).digest()
    return root
