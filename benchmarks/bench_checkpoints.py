"""3. What it costs to save every slice: a build that saves all states against the same build that saves none."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lines import Line, seconds_in_turns
from unlearnd.build import _fill_roots, _Group, seal
from unlearnd.leases import hold
from unlearnd.ledger import models, points
from unlearnd.ledger.leases import build_lease
from unlearnd.store import Store


class _Unsaved(_Group):
    """Trains the same steps and throws the states away."""

    def _enter(self, trained: object) -> None:
        pass


def run(quick: bool) -> list[Line]:
    """Train the paper's Purchase shape: 600 binary features, 20 shards, 50 slices, 20 epochs, batch 32."""
    rows, slices, repeats = (40_000, 12, 3) if quick else (130_000, 50, 6)
    generator = np.random.Generator(np.random.PCG64(3))
    x = (generator.random((rows, 600), dtype=np.float32) < 0.1).astype(np.uint8)
    y = (x[:, :300].sum(axis=1) > x[:, 300:].sum(axis=1)).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "store") as store:
        store.ingest("baskets", x, label=y, user=np.arange(rows) // 10, shards=20, slices=slices)
        seal(store.ledger, points.dataset_named(store.ledger, "baskets"), store.clock)
        turn = 0

        def build(kind: type[_Group]) -> None:
            nonlocal turn
            turn += 1
            settings = {"hidden": [128], "batch_size": 32}
            name = f"model-{turn}"
            model = store.declare(name, dataset="baskets", backend="mlp", epochs=20, settings=settings, seed=1)
            dataset = points.dataset_by_id(store.ledger, model.dataset_id)
            shards = range(1, 21)
            _fill_roots(store.ledger, store.storage, dataset, shards, store.clock)
            names = [build_lease(name, shard) for shard in shards]
            with hold(store.ledger, names, store.clock) as held:
                kind(
                    store.ledger,
                    store.storage,
                    store.plugins.backend("mlp"),
                    models.model_named(store.ledger, name),
                    dataset,
                    tuple(shards),
                    "cpu",
                    held,
                    store.clock,
                    lambda progress: None,
                ).build()

        saved, unsaved = seconds_in_turns(repeats, lambda: build(_Group), lambda: build(_Unsaved))
    ratio = saved / unsaved
    detail: dict[str, float | str] = {"all saved, s": saved, "none saved, s": unsaved, "checkpoints": 20 * slices}
    return [Line("3 all slices saved / none saved", ratio, "≤ 1.05", ratio <= 1.05, detail)]
