"""5. Erasing one user, from request to outcome without build, at ten times the points and slices of equal size."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lines import Line
from unlearnd.store import Store

_FULL, _QUICK = 1_000_000, 100_000


def run(quick: bool) -> list[Line]:
    """Erase users one by one, in turns, from a store and from one ten times its size, both with a model."""
    small = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory() as folder:
        stores = [_make(Path(folder) / str(times), small * times, 20 * times) for times in (1, 10)]
        took: list[list[float]] = [[], []]
        for user in range(1, 16):
            for place, store in enumerate(stores):
                begun = time.perf_counter()
                outcome = store.erase([user], build=False).outcomes[0]
                took[place].append(time.perf_counter() - begun)
                assert outcome.points == 10
        for store in stores:
            store.close()
    few, many = (statistics.median(times) for times in took)
    ratio = many / few
    detail: dict[str, float | str] = {"small, ms": 1000 * few, "ten times, ms": 1000 * many, "points": small}
    return [Line("5 erase at ten times the points / once", ratio, "≤ 1.5", ratio <= 1.5, detail)]


def _make(folder: Path, count: int, shards: int) -> Store:
    """Fill a store and train a model on it for a token number of epochs: there must be checkpoints to destroy."""
    generator = np.random.Generator(np.random.PCG64(5))
    x = generator.random((count, 32), dtype=np.float32)
    store = Store.create(folder)
    store.ingest(
        "points", x, label=generator.integers(0, 10, count), user=generator.permutation(count) // 10, shards=shards,
        slices=50 if count >= _FULL else 5,
    )  # fmt: skip
    store.train("model", dataset="points", backend="linear", epochs=0.001, seed=1)
    return store
