"""Check Merkle trees: RFC 6962 hashing, RFC 9162 proofs.

Only checking: whoever keeps the log makes the proofs. A proof must have exactly the length the sizes ask for; a
longer one is refused like a wrong one. Consistency from the empty tree proves nothing and is refused here; a
witness, for whom size 0 means "never seen", deals with it before it asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unlearnd.errors import InclusionError
from unlearnd.verify.hashes import sha256

HASH_BYTES = 32
EMPTY_ROOT = sha256(b"").digest()
MAX_SIZE = 2**63 - 1


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash under which `leaf` stands in a tree."""
    return sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the node above `left` and `right`."""
    return sha256(b"\x01" + left + right).digest()


class Growing:
    """A tree that leaves are added to one by one; its root can be asked for at any size."""

    def __init__(self) -> None:
        self.size = 0
        # Roots of the perfect subtrees, one for each bit set in the size, the largest first.
        self._perfect: list[bytes] = []

    def add(self, hashed: bytes) -> None:
        """Add one leaf by its leaf hash."""
        merges = self.size
        while merges & 1:
            hashed = node_hash(self._perfect.pop(), hashed)
            merges >>= 1
        self._perfect.append(hashed)
        self.size += 1

    def root(self) -> bytes:
        """Return the root over the leaves added so far."""
        if not self._perfect:
            return EMPTY_ROOT
        root = self._perfect[-1]
        for left in reversed(self._perfect[:-1]):
            root = node_hash(left, root)
        return root


def root_of_leaves(leaves: Iterable[bytes]) -> bytes:
    """Return the root of the tree over `leaves`, in the order given."""
    tree = Growing()
    for leaf in leaves:
        tree.add(leaf_hash(leaf))
    return tree.root()


def check_inclusion(index: int, size: int, hashed: bytes, path: Sequence[bytes], root: bytes) -> None:
    """Raise InclusionError unless the leaf hash `hashed` is number `index` of the tree (`size`, `root`)."""
    if not 0 <= index < size <= MAX_SIZE:
        raise InclusionError(f"there is no leaf {index} in a tree of {size}")
    _check_hashes([hashed, root, *path])
    # RFC 9162, section 2.1.3.2, with its names.
    fn, sn, r = index, size - 1, hashed
    for p in path:
        if sn == 0:
            raise InclusionError(f"the path of leaf {index} in a tree of {size} is too long")
        if fn & 1 or fn == sn:
            r = node_hash(p, r)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = node_hash(r, p)
        fn, sn = fn >> 1, sn >> 1
    if sn:
        raise InclusionError(f"the path of leaf {index} in a tree of {size} is too short")
    if r != root:
        raise InclusionError(f"the path of leaf {index} does not lead to the root of the tree of {size}")


def check_consistency(old_size: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]) -> None:
    """Raise InclusionError unless the tree (`old_size`, `old_root`) is the beginning of (`size`, `root`)."""
    if not 0 < old_size <= size <= MAX_SIZE:
        raise InclusionError(f"no proof leads from a tree of {old_size} to one of {size}")
    _check_hashes([old_root, root, *proof])
    if old_size == size:
        if proof:
            raise InclusionError("a proof between trees of the same size is empty")
        if old_root != root:
            raise InclusionError(f"there are two different trees of {size}")
        return
    if not proof:
        raise InclusionError(f"an empty proof cannot lead from a tree of {old_size} to one of {size}")
    # RFC 9162, section 2.1.4.2, with its names.
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_root)
    fn, sn = old_size - 1, size - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = path[0]
    for c in path[1:]:
        if sn == 0:
            raise InclusionError(f"the proof from a tree of {old_size} to one of {size} is too long")
        if fn & 1 or fn == sn:
            fr, sr = node_hash(c, fr), node_hash(c, sr)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = node_hash(sr, c)
        fn, sn = fn >> 1, sn >> 1
    if sn:
        raise InclusionError(f"the proof from a tree of {old_size} to one of {size} is too short")
    if fr != old_root or sr != root:
        raise InclusionError(f"the tree of {old_size} is not the beginning of the tree of {size}")


def _check_hashes(hashes: Iterable[bytes]) -> None:
    if any(len(value) != HASH_BYTES for value in hashes):
        raise InclusionError(f"a hash is {HASH_BYTES} bytes")
