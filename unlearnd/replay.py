"""Train a step again and say what came out, leaving the store as it is.

A step is replayed from what its recipe names: the state before (the initial one, or the last checkpoint kept before it
in the chain), the rows behind the slice roots, the seed. Everything happens in memory; features are computed from the
rows, whatever is kept beside them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.checkpoints import encode_state, read_state
from unlearnd.digests import Digest
from unlearnd.errors import BackendError, DamagedStoreError, UnlearndError
from unlearnd.features import Sight
from unlearnd.hookspecs import Backend, Job, Points, State
from unlearnd.ledger import Ledger
from unlearnd.ledger.models import Checkpoint, Model
from unlearnd.ledger.points import Dataset
from unlearnd.recipes import epochs_at, step_seed
from unlearnd.slices import commitments, read_slices, root_of_commitments
from unlearnd.storage import Storage


@dataclass(frozen=True)
class ShardRows:
    """The live rows of a shard, slice after slice."""

    x: NDArray[Any]
    """What the backend sees of them."""
    y: NDArray[np.int64]
    ends: Sequence[int]
    """Where slice r ends; slice 1 begins at `ends[0]`, which is 0."""
    roots: Sequence[str]
    """The root over each slice's rows, computed from them."""


def draw(root: bytes, recipes: Iterable[str], count: int) -> list[str]:
    """Return `count` of the recipes, picked by the log's root: nobody chooses, and anybody can draw the same again."""

    def rank(recipe: str) -> bytes:
        return hashlib.sha256(b"unlearnd/replay/v1\n" + root + bytes.fromhex(recipe)).digest()

    return sorted(set(recipes), key=rank)[:count]


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the entries in which two environments differ, each with both values."""
    return [
        f"{name} ({recorded.get(name, 'none')} then, {here.get(name, 'none')} here)"
        for name in sorted({*recorded, *here})
        if recorded.get(name) != here.get(name)
    ]


def read_shard(
    ledger: Ledger, storage: Storage, dataset: Dataset, model: Model, shard: int, slices: int, sight: Sight
) -> ShardRows:
    """Return the rows of slices 1…`slices` of a shard as the model sees them, and what they are committed to."""
    found = read_slices(ledger, storage, dataset, shard)
    classes = {label: index for index, label in enumerate(model.spec.classes)}
    class_of = np.array([classes.get(label, -1) for label in dataset.labels], np.int64)
    ordered = [rows for slice_ in range(1, slices + 1) for rows in found.get(slice_, ())]
    counts = [sum(map(len, found.get(slice_, ()))) for slice_ in range(1, slices + 1)]
    x = np.concatenate([r.x for r in ordered]) if ordered else np.empty((0, *dataset.shape), dataset.dtype)
    labels = np.concatenate([r.label for r in ordered]) if ordered else np.empty(0, np.int32)
    roots = [
        root_of_commitments([c for rows in found.get(slice_, ()) for c in commitments(ledger, dataset, rows)])
        for slice_ in range(1, slices + 1)
    ]
    try:
        seen = sight.see(x)
    except UnlearndError:
        raise
    except Exception as error:
        raise BackendError(
            f"backend '{model.spec.backend}' failed at the features of shard {shard} of model '{model.name}': "
            f"{type(error).__name__}: {error}"
        ) from error
    return ShardRows(seen, class_of[labels], [0, *np.cumsum(counts).tolist()], roots)


def train_again(
    storage: Storage,
    backend: Backend,
    model: Model,
    shard: int,
    slice_: int,
    parent: tuple[int, Checkpoint | None],
    rows: ShardRows,
    sight: Sight,
    device: str,
) -> Digest:
    """Return the `tensors` digest that a step gives when it is trained again from `parent`.

    That is the last slice before it whose checkpoint is kept, and the checkpoint; or 0 and nothing.
    """
    spec = model.spec
    after, checkpoint = parent
    try:
        if checkpoint is not None:
            state: State = read_state(storage, checkpoint)
        else:
            state = sight.initial_state(step_seed(model.seed, shard, 0))
        for step in range(after + 1, slice_ + 1) if model.sliceable else (slice_,):
            begin, end = rows.ends[step - 1], rows.ends[step]
            # A slice without points passes the state on; a shard trained whole needs any points at all.
            if end and (begin != end or not model.sliceable):
                epochs = epochs_at(spec, step) if model.sliceable else spec.epochs
                job = Job(state, Points(rows.x[:end], rows.y[:end]), epochs, step_seed(model.seed, shard, step))
                state = backend.train(spec.settings, job, device, lambda count: None)
    except UnlearndError:
        raise
    except Exception as error:
        raise BackendError(
            f"backend '{backend.name}' failed at shard {shard}, slice {slice_} of model '{model.name}': "
            f"{type(error).__name__}: {error}"
        ) from error
    return encode_state(state).tensors


def check_committed(rows: ShardRows, roots: Sequence[str], shard: int, slice_: int) -> None:
    """Raise `DamagedStoreError` unless slices 1…`slice_` hold the rows that the log committed to."""
    for number, (now, logged) in enumerate(zip(rows.roots[:slice_], roots[:slice_], strict=True), start=1):
        if now != logged:
            raise DamagedStoreError(f"the rows of shard {shard}, slice {number} are not those the log committed to")
