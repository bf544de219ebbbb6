"""The Merkle tree of RFC 6962, section 2.1: pure hashing, no storage."""

import hashlib
from collections.abc import Callable, Iterable

EMPTY_ROOT = hashlib.sha256().digest()

Node = Callable[[int, int], bytes]
"""Returns the hash of the perfect subtree `index` at `level`; level 0 are the leaf hashes."""


def root_of(leaves: Iterable[bytes]) -> bytes:
    """Return the tree's root over `leaves` in the order given."""
    sha256 = hashlib.sha256
    nodes = [sha256(b"\x00" + leaf).digest() for leaf in leaves]
    if not nodes:
        return EMPTY_ROOT
    # Level by level; a last one without a neighbour goes up as it is. That is the tree of the RFC, in fewer steps.
    while len(nodes) > 1:
        in_turn = iter(nodes)
        level = [sha256(b"\x01" + left + right).digest() for left, right in zip(in_turn, in_turn, strict=False)]
        nodes = [*level, nodes[-1]] if len(nodes) % 2 else level
    return nodes[0]


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def grow(size: int, hashes: Iterable[bytes], node: Node) -> list[tuple[int, int, bytes]]:
    """Return the perfect subtrees that leaves with these hashes complete in a tree of `size`: (level, index, hash)."""
    made: dict[tuple[int, int], bytes] = {}
    for index, hashed in enumerate(hashes, start=size):
        level, place = 0, index
        made[0, index] = hashed
        while place % 2:
            left = made.get((level, place - 1)) or node(level, place - 1)
            level, place, hashed = level + 1, place // 2, node_hash(left, hashed)
            made[level, place] = hashed
    return [(level, index, hashed) for (level, index), hashed in made.items()]


def root_at(size: int, node: Node) -> bytes:
    """Return the root of the first `size` leaves."""
    return _range_root(0, size, node) if size else EMPTY_ROOT


def prove_inclusion(index: int, size: int, node: Node) -> list[bytes]:
    """Return the audit path of leaf `index` in the tree of `size` (RFC 6962, section 2.1.1)."""
    return _path(index, 0, size, node)


def prove_consistency(old: int, new: int, node: Node) -> list[bytes]:
    """Return the proof that the tree of `old` leaves is a prefix of that of `new` (RFC 6962, section 2.1.2)."""
    return _subproof(old, 0, new, True, node) if 0 < old < new else []


def _range_root(begin: int, end: int, node: Node) -> bytes:
    count = end - begin
    if count & (count - 1) == 0:
        level = count.bit_length() - 1
        return node(level, begin >> level)
    split = begin + (1 << ((count - 1).bit_length() - 1))
    return node_hash(_range_root(begin, split, node), _range_root(split, end, node))


def _path(index: int, begin: int, end: int, node: Node) -> list[bytes]:
    if end - begin == 1:
        return []
    split = begin + (1 << ((end - begin - 1).bit_length() - 1))
    if index < split:
        return [*_path(index, begin, split, node), _range_root(split, end, node)]
    return [*_path(index, split, end, node), _range_root(begin, split, node)]


def _subproof(old: int, begin: int, end: int, whole: bool, node: Node) -> list[bytes]:
    if old == end:
        return [] if whole else [_range_root(begin, end, node)]
    split = begin + (1 << ((end - begin - 1).bit_length() - 1))
    if old <= split:
        return [*_subproof(old, begin, split, whole, node), _range_root(split, end, node)]
    return [*_subproof(old, split, end, False, node), _range_root(begin, split, node)]
