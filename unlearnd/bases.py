"""Frozen public base models: taken in once, named by digest, kept in storage.

A base is somebody else's file, given by path or URI when a model is declared. The model's specification names it by
the digest of its bytes, never by where it came from, and a copy stays in storage, so that builds and replays need the
original no more. What a base has learnt no erasure here can reach: whoever gives one must say that it is public, and
a checkpoint of this store is refused whatever they say.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from unlearnd.checkpoints import encode_state
from unlearnd.digests import Digest, digest_of
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError
from unlearnd.hookspecs import State
from unlearnd.ledger import Ledger, models
from unlearnd.storage import Storage
from unlearnd.storage.elsewhere import read_elsewhere

FOLDER = "bases"
MOST_BYTES = 32 << 30
MOST_HEADER = 16 << 20
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Offer:
    """A base that somebody gave, read and looked at, not kept yet."""

    digest: Digest
    data: bytes
    tensors: State

    def keep(self, storage: Storage) -> None:
        """Copy the base into storage, unless it is there."""
        if storage.sizes(FOLDER).get(path_of(self.digest)) != len(self.data):
            storage.write(path_of(self.digest), self.data)


def path_of(digest: str) -> str:
    """Return the name of a base in storage."""
    return f"{FOLDER}/{digest}.safetensors"


def base_of(settings: Mapping[str, Any]) -> Digest | None:
    """Return the digest of the base that a model's settings name; None when it stands on none."""
    digest = settings.get("base")
    return Digest(digest) if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None


def take_offer(ledger: Ledger, storage: Storage, given: Mapping[str, object]) -> Offer | None:
    """Read the base that settings as a person gave them name by path, URI, or the digest of one that is kept.

    Raise `RefusedError` unless they also say that it is public, or when it is a checkpoint of this store.
    """
    where = given.get("base")
    if where is None:
        return None
    if not isinstance(where, str) or not where:
        raise InputError(f"the setting 'base' is a path or URI of a safetensors file, not {where!r}")
    if given.get("base_public") is not True:
        raise RefusedError(
            f"the base {where} is refused: what it learnt from people no erasure here can take out again; "
            "if it was trained on public data alone, say so with base_public=true"
        )
    data = _read_kept(storage, where) if _DIGEST.fullmatch(where) else _read_foreign(where)
    tensors = _tensors_of(data, f"the base {where}")
    digest = digest_of(data)
    if models.is_checkpoint(ledger, digest, encode_state(tensors).tensors):
        raise RefusedError(
            f"the base {where} is a checkpoint of this store, so it is made from people's data and cannot be public"
        )
    return Offer(digest, data, tensors)


def read_base(storage: Storage, digest: Digest) -> State:
    """Return the tensors of a base that is kept, after checking that it still is what the digest names."""
    try:
        data = storage.read(path_of(digest))
    except NotFoundError:
        raise DamagedStoreError(
            f"{path_of(digest)} is missing: restore it, or run the `unlearnd train` that declared the model once more"
        ) from None
    if digest_of(data) != digest:
        raise DamagedStoreError(f"{path_of(digest)} is not what its name says: its digest differs")
    return _tensors_of(data, path_of(digest))


def destroy_unnamed(ledger: Ledger, storage: Storage) -> None:
    """Destroy bases that no model names: what a killed declaration left. The lease `bases` must be held."""
    named = {path_of(digest) for model in models.models(ledger) if (digest := base_of(model.spec.settings))}
    storage.destroy(set(storage.list(FOLDER)) - named)


def _read_kept(storage: Storage, digest: str) -> bytes:
    try:
        data = storage.read(path_of(digest))
    except NotFoundError:
        raise NotFoundError(f"this store keeps no base {digest}; give the path or URI of the file") from None
    if digest_of(data) != digest:
        raise DamagedStoreError(f"{path_of(digest)} is not what its name says: its digest differs")
    return data


def _read_foreign(where: str) -> bytes:
    """Return the bytes of a safetensors file, having looked at its beginning before reading the rest."""
    if where.lower().endswith(_PICKLES):
        raise InputError(_pickled(where))

    def look(start: bytes) -> None:
        if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
            raise InputError(_pickled(where))
        # The first eight bytes say how long the header is, and whoever wrote the file may have said anything.
        length = int.from_bytes(start[:8], "little")
        if len(start) < 10 or not 2 <= length <= MOST_HEADER or start[8:9] != b"{":
            raise InputError(f"the base {where} is not a safetensors file")

    return read_elsewhere(where, "base", MOST_BYTES, look)


def _tensors_of(data: bytes, what: str) -> State:
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise InputError(f"{what} is not a safetensors file: {' '.join(str(error).split())}") from None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{what} has tensors of a type that cannot be used; save it as float32") from None
    if not tensors:
        raise InputError(f"{what} has no tensors in it")
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise InputError(f"{what} has values in '{name}' that are not finite numbers")
    return tensors


def _pickled(where: str) -> str:
    return f"the base {where} is a pickle, which may run code when it is opened: save it as safetensors"
