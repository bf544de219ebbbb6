"""Slice data on storage: write it, read it, rewrite it without the erased, and sum it up in a root.

A slice is one or more segments, each a safetensors object of columns: `x`, `label` (code), `position` and
`owner` (the user's keyed handle), with `group` where the dataset has groups. Rows are in ingestion order.
What is erased disappears in two moves: first the ledger lists the positions as dropped and readers leave
them out; then the object is written anew without them and the old one destroyed.

Where a model trains on features of a frozen base, those of a segment lie beside it as an object of their own, with
labels and positions. They are somebody's data like the rows they were made from, and go the same way.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as save_tensors

from unlearnd.digests import Digest, digest_of
from unlearnd.errors import DamagedStoreError, NotFoundError
from unlearnd.ledger import Ledger, backups, features, points
from unlearnd.ledger.features import Kept
from unlearnd.ledger.points import Dataset, NewSegment, Segment
from unlearnd.merkle import root_of
from unlearnd.packing import Positions, unpack
from unlearnd.steps import Step, reached
from unlearnd.storage import Record, Storage, opened
from unlearnd.tensors import read_tensors


@dataclass(frozen=True)
class Rows:
    """Points as columns, in ingestion order."""

    x: NDArray[Any]
    label: NDArray[np.int32]
    position: Positions
    owner: NDArray[np.uint8]
    group: NDArray[np.int32] | None

    def __len__(self) -> int:
        return len(self.position)

    def keep(self, wanted: NDArray[np.bool_]) -> "Rows":
        """Return only the rows wanted."""
        group = None if self.group is None else self.group[wanted]
        return Rows(self.x[wanted], self.label[wanted], self.position[wanted], self.owner[wanted], group)


@dataclass(frozen=True)
class FeatureRows:
    """What a frozen base makes of points, with all else that training needs of them, in ingestion order."""

    x: NDArray[np.float32]
    label: NDArray[np.int32]
    position: Positions

    def __len__(self) -> int:
        return len(self.position)

    def keep(self, wanted: NDArray[np.bool_]) -> "FeatureRows":
        """Return only the rows wanted."""
        return FeatureRows(self.x[wanted], self.label[wanted], self.position[wanted])


def folder_of(dataset: str, shard: int, slice_: int) -> str:
    """Return the folder of a slice's segments."""
    return f"data/{dataset}/{shard:04d}/{slice_:04d}"


def encode_segment(rows: Rows) -> bytes:
    """Return the bytes of a segment; equal rows are equal bytes."""
    columns = {"x": rows.x, "label": rows.label, "position": rows.position, "owner": rows.owner}
    if rows.group is not None:
        columns["group"] = rows.group
    return bytes(save_tensors(columns))


def sealed(storage: Storage, path: str, encoded: bytes, backups_: Sequence[bytes] = ()) -> tuple[bytes, bytes | None]:
    """Return a segment as it goes to storage, and the wrapped key that opens it, where the store encrypts.

    `backups_` are the public keys of those that can open it, too.
    """
    return storage.vault.seal(path, [encoded], backups_) if storage.vault else (encoded, None)


def read_segment(storage: Storage, segment: Segment) -> Rows:
    """Return all rows of a segment, dropped ones too, after checking its digest. Its data lease must be held."""
    try:
        data = storage.read(segment.path)
    except NotFoundError as error:
        raise lacking(error, f"shard {segment.shard}") from None
    return _decode(storage, segment, data)


def lacking(error: NotFoundError, where: str) -> DamagedStoreError:
    """Return what to do about slice data that is missing."""
    return DamagedStoreError(
        f"the ledger lists slice data that storage lacks: {error}; restore that object from a backup of the storage. "
        f"Models trained on it answer as before, but {where} can be neither built nor erased from until it is back; "
        "what was asked for meanwhile is carried out then"
    )


def _decode(storage: Storage, segment: Segment, data: bytes) -> Rows:
    if digest_of(data) != segment.digest:
        raise DamagedStoreError(
            f"{segment.path} is not what the ledger recorded: its digest differs; restore that object from a backup of "
            "the storage, and what was asked for meanwhile is carried out then"
        )
    columns = read_tensors(opened(storage.vault, segment.path, data, segment.key), segment.path)
    try:
        return Rows(columns["x"], columns["label"], columns["position"], columns["owner"], columns.get("group"))
    except KeyError as lacking:
        raise DamagedStoreError(f"{segment.path} cannot be read: it has no {lacking}") from None


def out_of_use(segment: Segment) -> Positions:
    """Return the positions in a segment that nothing is trained on: erased, or of users on hold."""
    if not segment.held:
        return unpack(segment.dropped)
    return np.union1d(unpack(segment.dropped), unpack(segment.held))


def read_live(storage: Storage, segment: Segment) -> Rows:
    """Return the live rows of a segment; raise `NotFoundError` where an erasure may have rewritten it since."""
    return _live(segment, _decode(storage, segment, storage.read(segment.path)))


def _live(segment: Segment, rows: Rows) -> Rows:
    return rows.keep(~np.isin(rows.position, out_of_use(segment))) if segment.dropped or segment.held else rows


def features_path(segment: str, key: str) -> str:
    """Return the name of the object beside a segment that keeps its features under a key."""
    return f"{segment.removesuffix('.safetensors')}.{key[:16]}.features"


def encode_features(rows: FeatureRows) -> bytes:
    """Return the bytes of kept features; equal rows are equal bytes."""
    return bytes(save_tensors({"x": rows.x, "label": rows.label, "position": rows.position}))


def read_features(storage: Storage, kept: Kept) -> FeatureRows | None:
    """Return kept features; None where they are gone or not what was recorded: they can be computed anew."""
    try:
        data = storage.read(kept.path)
        if digest_of(data) != kept.digest:
            return None
        columns = read_tensors(data, kept.path)
        return FeatureRows(columns["x"], columns["label"], columns["position"])
    except (NotFoundError, DamagedStoreError, KeyError):
        return None


def read_slice(ledger: Ledger, storage: Storage, dataset: Dataset, shard: int, slice_: int) -> list[Rows]:
    """Return the live rows of one slice, segment by segment, in ingestion order."""
    return list(read_slices(ledger, storage, dataset, shard, slice_).get(slice_, []))


def read_slices(
    ledger: Ledger, storage: Storage, dataset: Dataset, shard: int, only: int | None = None
) -> Mapping[int, Sequence[Rows]]:
    """Return the live rows of a shard's slices; slices without points are left out."""
    while True:
        segments = points.segments_of(ledger, dataset.id, shard, only)
        found: dict[int, list[Rows]] = {}
        try:
            for segment, data in zip(segments, storage.read_many([s.path for s in segments]), strict=True):
                found.setdefault(segment.slice, []).append(_live(segment, _decode(storage, segment, data)))
        except NotFoundError as error:
            # An erasure may have rewritten a segment since the ledger was read; then look again.
            if points.segments_of(ledger, dataset.id, shard, only) == segments:
                raise lacking(error, f"shard {shard} of dataset '{dataset.name}'") from None
            continue
        return found


def compute_roots(
    ledger: Ledger, storage: Storage, dataset: Dataset, shard: int, slices: Sequence[int]
) -> dict[int, Digest]:
    """Return the roots of slices of one shard, from their live rows and their users' keys."""
    return {
        slice_: root_of_commitments(
            [
                commitment
                for rows in read_slice(ledger, storage, dataset, shard, slice_)
                for commitment in commitments(ledger, dataset, rows)
            ]
        )
        for slice_ in slices
    }


def root_of_commitments(commitments: Sequence[bytes]) -> Digest:
    """Return the Merkle root over point commitments in ingestion order."""
    return Digest(root_of(commitments).hex())


def commitments(ledger: Ledger, dataset: Dataset, rows: Rows) -> list[bytes]:
    """Return each row's commitment: HMAC-SHA256(user key, dataset ‖ position ‖ digest of its content).

    Once a user's key is destroyed, what was committed to can no longer be tested against a guess.
    """
    if not len(rows):
        return []
    owners = rows.owner.tobytes()
    width = rows.owner.shape[1]
    handles = [owners[i : i + width] for i in range(0, len(owners), width)]
    keys = points.user_keys(ledger, set(handles))
    missing = set(handles) - keys.keys()
    if missing:
        raise DamagedStoreError(f"{len(missing)} users of dataset '{dataset.name}' have points but no key")
    labels = [json.dumps(label).encode() for label in dataset.labels]
    prefix = f"unlearnd/point/v1\n{dataset.name}\n".encode()
    groups = [0] * len(rows) if rows.group is None else rows.group.tolist()
    features = np.ascontiguousarray(rows.x).reshape(len(rows), -1).view(np.uint8)
    size, data = features.shape[1], features.tobytes()
    positions = rows.position.astype(">i8").tobytes()
    sha256, hmac_of = hashlib.sha256, hmac.digest
    return [
        hmac_of(
            keys[handle],
            prefix
            + positions[8 * i : 8 * i + 8]
            + sha256(b"%d\n%b\n%b" % (group, labels[label], data[size * i : size * i + size])).digest(),
            "sha256",
        )
        for i, (handle, label, group) in enumerate(zip(handles, rows.label.tolist(), groups, strict=True))
    ]


def rewrite_dropped(
    ledger: Ledger, storage: Storage, dataset: Dataset, shard: int, now: datetime, record: Record | None = None
) -> None:
    """Write the segments of a shard that hold erased points anew without them, and destroy the old objects."""
    dropped = points.dropped_segments(ledger, dataset.id, shard)
    # A killed try may have half sent objects under the names that are written again below: they go while unknown.
    for slice_ in {segment.slice for segment in dropped}:
        sweep(ledger, storage, dataset, shard, slice_, record)
    kept = features.kept_features(ledger, dataset.id, shard)
    for segment in dropped:
        rows = read_segment(storage, segment)
        # Who is on hold is not trained on, and stays.
        rows = rows.keep(~np.isin(rows.position, unpack(segment.dropped)))
        new, carried, folder = None, [], folder_of(dataset.name, shard, segment.slice)
        if len(rows):
            encoded = encode_segment(rows)
            # Named by content: what another erasure of the slice writes can never be taken for this.
            path = f"{folder}/{segment.first:012d}-{digest_of(encoded)[:16]}.safetensors"
            # Whoever restores a backup that has the points still has them afterwards, but for those that are erased.
            able = backups.having(ledger, dataset.id, segment.first) if storage.vault else ()
            data, key = sealed(storage, path, encoded, able)
            storage.write(path, data)
            new = NewSegment(shard, segment.slice, segment.first, path, digest_of(data), len(rows), key)
        reached(Step.ERASE_REWRITTEN)
        if new is not None:
            mine = features.of_segments(kept, [segment.id])
            carried = [one for old in mine if (one := _carry_over(storage, old, rows.position, new.path))]
        reached(Step.ERASE_FEATURES_REWRITTEN)
        points.swap_segment(ledger, segment, new, now, carried)
        reached(Step.ERASE_SWAPPED)
    replaced = points.replaced_segments(ledger, dataset.id, shard)
    storage.destroy((segment.path for segment in replaced), record)
    storage.destroy((one.path for one in features.of_segments(kept, (segment.id for segment in replaced))), record)
    for slice_ in {segment.slice for segment in replaced}:
        sweep(ledger, storage, dataset, shard, slice_, record)
    points.segments_destroyed(ledger, replaced, now)


def sweep(ledger: Ledger, storage: Storage, dataset: Dataset, shard: int, slice_: int, record: Record | None) -> None:
    """Destroy what killed erasures and builds wrote into a slice's folder and never entered; an ingest's objects stay.

    The data lease of the shard must be held.
    """
    # The order matters. An ingest announces itself, writes, commits: what it has written by the first look is either
    # still announced at the second, or known at the third. Any other order would destroy what is committed in between.
    there = storage.list(folder_of(dataset.name, shard, slice_))
    ingests = [f"-{ingest_id[:16]}." for ingest_id in points.unfinished_ingests(ledger, dataset.name)]
    segments = {segment.id: segment.path for segment in points.segments_of(ledger, dataset.id, shard, slice_)}
    kept = features.of_segments(features.kept_features(ledger, dataset.id, shard), segments)
    known = {*segments.values(), *(one.path for one in kept)}
    left = [path for path in there if path not in known and not any(mark in path for mark in ingests)]
    storage.destroy(left, record)


def _carry_over(storage: Storage, old: Kept, staying: Positions, segment: str) -> tuple[str, str, Digest] | None:
    """Write kept features anew beside a rewritten segment: no row's depend on another row, so they stay the same bits.

    None where they cannot be used any more; a build computes them anew then.
    """
    rows = read_features(storage, old)
    if rows is None or not np.isin(staying, rows.position).all():
        return None
    data = encode_features(rows.keep(np.isin(rows.position, staying)))
    path = features_path(segment, old.key)
    storage.write(path, data)
    return old.key, path, digest_of(data)
