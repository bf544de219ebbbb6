"""Constituents' states as safetensors on storage.

A checkpoint file holds the state and nothing else, so equal states are equal bytes; where it came from is in
the ledger. It is named by its recipe. Two digests are kept: `file`, which storage is checked against, and
`tensors`, which a replay is checked against.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as save_tensors

from unlearnd.digests import Digest, digest_of, digest_of_tensors
from unlearnd.errors import DamagedStoreError, NotFoundError
from unlearnd.hookspecs import State
from unlearnd.ledger import Ledger, models, points
from unlearnd.ledger.models import Checkpoint, Model
from unlearnd.recipes import recipes
from unlearnd.storage import Pieces, Record, Storage, Vault, opened
from unlearnd.tensors import read_tensors

_FEW = 8
_ANEW = "restore it from a backup, or train it anew from the one before it with `unlearnd build`"


@dataclass(frozen=True)
class Saved:
    """A state as the pieces of a file, with its digests."""

    pieces: Pieces
    size: int
    file: Digest
    tensors: Digest


@dataclass(frozen=True)
class Standing:
    """How far a constituent is clean: which of its recipes have a checkpoint, derived and stored nowhere."""

    shard: int
    recipes: tuple[Digest, ...]
    """recipe(k, 0) … as far as the slices have roots."""
    roots: tuple[Digest, ...]
    """The roots those are made from: of slice 1 on."""
    slices: int
    """How many slices the shard has that are closed to new points."""
    prefix: int
    """Slices 1…prefix are in the checkpoint below; 0 when there is none."""
    checkpoint: Checkpoint | None
    chain: tuple[Checkpoint, ...]
    """Every checkpoint of the clean prefix, first to last."""

    @property
    def complete(self) -> bool:
        return self.prefix == self.slices

    def clean_before(self, slice_: int) -> int:
        """Return how long the prefix is when slice `slice_` changes: up to the last checkpoint before it."""
        return max((checkpoint.slice for checkpoint in self.chain if checkpoint.slice < slice_), default=0)


def standings(ledger: Ledger, model: Model, shards: Iterable[int] | None = None) -> list[Standing]:
    """Return for each shard the longest prefix of its recipes that exists, as far as their checkpoints are kept.

    Whatever was made from a slice that has changed since has no recipe here, and so is never found; nor is anything of
    a model that is retired.
    """
    slices = points.sealed_slices(ledger, model.dataset_id)
    wanted = list(shards) if shards is not None else list(range(1, model.spec.shards + 1))
    # A few shards are asked for one by one, so that they cost the same however many others there are.
    asked: Sequence[int | None] = wanted if len(wanted) <= _FEW else [None]
    roots = {place: root for one in asked for place, root in points.roots_of(ledger, model.dataset_id, one).items()}
    existing = {
        (c.shard, c.slice, c.recipe): c for one in asked for c in models.checkpoints_of(ledger, model.id, one, True)
    }
    found = []
    for shard in wanted:
        known = []
        for slice_ in range(1, slices + 1):
            if (shard, slice_) not in roots:
                break
            known.append(roots[shard, slice_])
        names = recipes(model.spec, model.seed, shard, known, model.sliceable)
        chain: list[Checkpoint] = []
        if model.sliceable:
            for step in filter(model.keeps, range(1, len(names))):
                checkpoint = existing.get((shard, step, names[step]))
                if checkpoint is None:
                    break
                chain.append(checkpoint)
            prefix = chain[-1].slice if chain else 0
        else:
            # Trained whole: there is a checkpoint of everything, or there is none.
            whole = existing.get((shard, slices, names[-1])) if len(names) > slices else None
            chain = [whole] if whole else []
            prefix = slices if whole else 0
        found.append(
            Standing(shard, tuple(names), tuple(known), slices, prefix, chain[-1] if chain else None, tuple(chain))
        )
    return found


def folder_of(model: str, shard: int) -> str:
    """Return the folder of a constituent's checkpoints."""
    return f"checkpoints/{model}/{shard:04d}"


def path_of(model: str, shard: int, recipe: Digest) -> str:
    """Return the name of a checkpoint in storage."""
    return f"{folder_of(model, shard)}/{recipe}.safetensors"


def encode_state(state: State) -> Saved:
    """Return a state as the pieces of a safetensors file: no metadata, whose order safetensors does not fix.

    The pieces are views of the state, not copies: this runs beside the training, and what it spends holding
    the interpreter, training waits for.
    """
    tensors = {name: _plain(value) for name, value in state.items()}
    form = tuple((name, value.dtype.str, value.shape) for name, value in tensors.items())
    views: dict[str, memoryview] = {name: value.reshape(-1).view(np.uint8).data for name, value in tensors.items()}
    header, order = _header_of(form)
    pieces: Pieces = [header, *(views[name] for name in order)]
    file = hashlib.sha256()
    for piece in pieces:
        file.update(piece)
    digest = digest_of_tensors((name, dtype, shape, views[name]) for name, dtype, shape in form)
    return Saved(pieces, sum(map(len, pieces)), Digest(file.hexdigest()), digest)


def _plain(value: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it lies in a file: without gaps, little-endian."""
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


@lru_cache(maxsize=16)
def _header_of(form: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return how safetensors begins a file of tensors of that form, and the order in which it puts them."""
    whole: bytes = save_tensors({name: np.zeros(shape, dtype) for name, dtype, shape in form})
    begin = 8 + int.from_bytes(whole[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(whole[8:begin]).items()}
    return whole[:begin], tuple(sorted(places, key=lambda name: (*places[name], name)))


def read_state(storage: Storage, checkpoint: Checkpoint) -> State:
    """Return the state of a checkpoint after checking that storage holds what the ledger recorded."""
    return read_states(storage, [checkpoint])[0]


def read_states(storage: Storage, checkpoints: Sequence[Checkpoint]) -> list[State]:
    """Return the states of checkpoints, in order, after checking each; over a network they are fetched together."""
    states: list[State] = []
    try:
        for data in storage.read_many([checkpoint.path for checkpoint in checkpoints]):
            states.append(_decode(storage, checkpoints[len(states)], data))
    except NotFoundError:
        raise DamagedStoreError(
            f"the ledger lists {checkpoints[len(states)].path}, which storage lacks; {_ANEW}"
        ) from None
    return states


def _decode(storage: Storage, checkpoint: Checkpoint, data: bytes) -> State:
    if digest_of(data) != checkpoint.file:
        raise DamagedStoreError(f"{checkpoint.path} is not what the ledger recorded: its digest differs; {_ANEW}")
    return read_tensors(opened(storage.vault, checkpoint.path, data, checkpoint.key), checkpoint.path)


def seal_state(vault: Vault, path: str, saved: Saved) -> tuple[str, Saved, bytes]:
    """Return a state encrypted, the name it is kept under, and the wrapped key that opens it.

    The name is drawn: two builders of one recipe encrypt under two keys, and must not overwrite each other.
    """
    name = vault.draw_name(path.removesuffix(".safetensors"))
    data, key = vault.seal(name, saved.pieces)
    return name, Saved([data], len(data), digest_of(data), saved.tensors), key


def destroy_all_but(storage: Storage, model: str, shard: int, keep: Iterable[str], record: Record | None = None) -> int:
    """Destroy every object in a constituent's folder that is not to be kept; return how many there were.

    Going by what storage lists, and not by what the ledger remembers, also finds what a killed builder left.
    """
    doomed = set(storage.list(folder_of(model, shard))) - set(keep)
    storage.destroy(doomed, record)
    return len(doomed)
