"""What a model sees of its points: the points themselves, or what a frozen base makes of them.

Features of a segment are computed once and kept beside it, under a key that names all they depend on: backend and
version, settings, base, environment. Every epoch, and every later build, reads those instead of the rows. They are
made from single rows, never from their company, so it makes no difference to a bit whether they were kept, computed
anew, or carried over by an erasure that took other rows away.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.bases import base_of, read_base
from unlearnd.digests import Digest, digest_of, digest_of_json
from unlearnd.errors import BackendError, BusyError, NotFoundError
from unlearnd.hookspecs import Backend, FeatureBackend, State
from unlearnd.leases import Clock, Preempted, hold
from unlearnd.ledger import Ledger, points
from unlearnd.ledger.features import Kept, enter_features, kept_features, of_segments
from unlearnd.ledger.leases import data_lease
from unlearnd.ledger.points import Dataset, Segment
from unlearnd.recipes import Spec
from unlearnd.slices import (
    FeatureRows,
    Rows,
    encode_features,
    features_path,
    lacking,
    out_of_use,
    read_features,
    read_live,
    read_slices,
    sweep,
)
from unlearnd.steps import Step, reached
from unlearnd.storage import Overlooked, Pieces, Storage

ROWS_AT_A_TIME = 1024


def pass_on() -> None:
    """Nobody minds how long it takes."""


class Sight:
    """How a model's backend sees points, on one device."""

    def __init__(self, storage: Storage, backend: Backend, spec: Spec, device: str, base: State | None = None) -> None:
        self._storage, self._backend, self._spec, self._device = storage, backend, spec, device
        self._given = base
        able = isinstance(backend, FeatureBackend)
        own = backend.features_key(spec.settings) if able else None  # type: ignore[attr-defined]
        self._own: str | None = own

    @property
    def on_features(self) -> bool:
        """Whether the backend trains on features; else it is given the points as they are."""
        return self._own is not None

    @cached_property
    def key(self) -> Digest:
        """All that features depend on but the points. Bits may differ between environments, so those are in it."""
        backend, spec = self._backend, self._spec
        named = [backend.name, backend.version, self._own, base_of(spec.settings), list(spec.shape), spec.dtype]
        return digest_of_json(["unlearnd/features/v1", *named, dict(backend.environment(self._device))])

    @cached_property
    def _base(self) -> State | None:
        if self._given is not None:
            return self._given
        digest = base_of(self._spec.settings)
        return None if digest is None else read_base(self._storage, digest)

    def initial_state(self, seed: int) -> State:
        """Return a constituent's state before slice 1."""
        spec = self._spec
        if not self.on_features:
            return self._backend.initial_state(spec.settings, spec.shape, len(spec.classes), seed)
        return self._able.initial_state_on(spec.settings, self._base, spec.shape, len(spec.classes), seed)

    def see(self, x: NDArray[Any], between: Callable[[], None] = pass_on) -> NDArray[Any]:
        """Return what the backend is to be given for these points; `between` is called every so many rows."""
        if not self.on_features:
            return x
        parts = []
        # One empty part where there are no rows: its shape is that of features all the same.
        for begin in range(0, len(x), ROWS_AT_A_TIME) or (0,):
            between()
            rows = np.ascontiguousarray(x[begin : begin + ROWS_AT_A_TIME])
            part = self._able.features(self._spec.settings, self._base, rows, self._device)
            if not isinstance(part, np.ndarray) or part.dtype != np.float32 or len(part) != len(rows):
                raise BackendError(
                    f"backend '{self._backend.name}' must give one float32 array of features for each of {len(rows)} "
                    "points, and did not"
                )
            parts.append(np.ascontiguousarray(part))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def _able(self) -> FeatureBackend:
        assert isinstance(self._backend, FeatureBackend)
        return self._backend


def read_seen(
    ledger: Ledger,
    storage: Storage,
    dataset: Dataset,
    shard: int,
    sight: Sight,
    clock: Clock,
    between: Callable[[], None],
) -> Mapping[int, Sequence[Rows | FeatureRows]]:
    """Return what a model sees of the live rows of a shard's slices; what had to be computed for it is kept."""
    if not sight.on_features:
        return read_slices(ledger, storage, dataset, shard)
    while True:
        segments = points.segments_of(ledger, dataset.id, shard)
        kept = {one.segment_id: one for one in kept_features(ledger, dataset.id, shard) if one.key == sight.key}
        fresh: list[tuple[Segment, FeatureRows]] = []
        found: dict[int, list[FeatureRows]] = {}
        try:
            for segment in segments:
                between()
                rows = _read_kept(storage, segment, kept.get(segment.id))
                if rows is None:
                    live = read_live(storage, segment)
                    rows = FeatureRows(sight.see(live.x, between), live.label, live.position)
                    fresh.append((segment, rows))
                found.setdefault(segment.slice, []).append(rows)
        except NotFoundError as error:
            # An erasure may have rewritten a segment since the ledger was read; then look again.
            if points.segments_of(ledger, dataset.id, shard) == segments:
                raise lacking(error, f"shard {shard} of dataset '{dataset.name}'") from None
            continue
        if fresh:
            _keep(ledger, storage, dataset, shard, sight.key, fresh, clock)
        return found


def _read_kept(storage: Storage, segment: Segment, kept: Kept | None) -> FeatureRows | None:
    rows = None if kept is None else read_features(storage, kept)
    if rows is None or len(rows) != segment.rows:
        return None
    return rows.keep(~np.isin(rows.position, out_of_use(segment))) if segment.dropped or segment.held else rows


def _keep(
    ledger: Ledger,
    storage: Storage,
    dataset: Dataset,
    shard: int,
    key: Digest,
    fresh: Sequence[tuple[Segment, FeatureRows]],
    clock: Clock,
) -> None:
    """Make features durable, then known: of segments that hold the same rows still, and while nobody may change them.

    An erasure rewrites slice data under the same lease. So it finds what is here in the ledger, or it finds what a
    killed build left in the folder that it sweeps; and what it has cleaned is not written to any more.
    """
    if storage.vault:
        # Features are as personal as what they were made of, and would lie there unencrypted: compute them each time.
        return
    with hold(ledger, [data_lease(dataset.name, shard)], clock) as held:
        current = set(points.segments_of(ledger, dataset.id, shard))
        # Of all rows or of none: what was computed while somebody was on hold lacks theirs.
        lasting = [(s, rows) for s, rows in fresh if s in current and not s.dropped and not s.held]
        for slice_ in {segment.slice for segment, _ in lasting}:
            sweep(ledger, storage, dataset, shard, slice_, Overlooked())
        # What is known and could not be used is not written over: a bucket would keep the old version.
        unusable = of_segments(kept_features(ledger, dataset.id, shard), (segment.id for segment, _ in lasting))
        storage.destroy((one.path for one in unusable if one.key == key), Overlooked())
        written: list[Kept] = []

        def objects() -> Iterator[tuple[str, Pieces]]:
            for segment, rows in lasting:
                data, path = encode_features(rows), features_path(segment.path, key)
                written.append(Kept(segment.id, key, path, digest_of(data)))
                yield path, [data]

        held.check()
        storage.write_many(objects())
        reached(Step.BUILD_FEATURES_WRITTEN)
        try:
            enter_features(ledger, dataset, shard, written, held.holder)
        except BusyError as taken_over:
            # Whoever took over may have swept already; what was just written must not stay.
            storage.destroy(one.path for one in written)
            raise Preempted(str(taken_over)) from None
    reached(Step.BUILD_FEATURES_ENTERED)
