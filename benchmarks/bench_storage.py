"""What storage costs a build: 100 shards, 20 slices, in a bucket of a real S3 server, and encrypted, to local files.

How much of a build is storage depends on how long a state is trained for. What is judged is the paper's own training of
Purchase: its 250,000 points of 600 binary columns, its network, and what its authors' scripts train with, plain SGD in
batches of 16 for 20 epochs. Beside it, to show where that ends, stands one less than half as long with states twice as
large: batches of 32 for 10 epochs, momentum in the states. The server shares this machine's cores with the training.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import Line, seconds_in_turns
from benchmarks.seaweed import running
from unlearnd.store import Store

MOST = 1.3


@dataclass(frozen=True)
class Training:
    model: str
    epochs: float
    settings: dict[str, Any]
    judged: bool = False


_SGD = {"batch_size": 16, "lr": 0.001, "momentum": 0.0}
PAPER = Training("as-in-the-paper", 20, {"hidden": [128], "activation": "tanh", **_SGD}, judged=True)
SHORT = Training("short", 10, {"hidden": [128]})
SEALING = Training("sealing", 0.001, {"hidden": [128]})


def run(quick: bool) -> list[Line]:
    """Build the paper's Purchase shape cut into S = 100, R = 20; every state is saved."""
    shards, slices, rows, repeats = (20, 10, 20_000, 2) if quick else (100, 20, 250_000, 2)
    generator = np.random.Generator(np.random.PCG64(3))
    x = (generator.random((rows, 600), dtype=np.float32) < 0.1).astype(np.uint8)
    y = (x[:, :300].sum(axis=1) > x[:, 300:].sum(axis=1)).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "weed").mkdir()
        with running(top / "weed") as server:
            os.environ.update(server.environment)
            url = f"s3://{server.bucket(versioned=True)}/bench"
            stores = [
                Store.create(top / "near"),
                Store.create(top / "far", storage=url, storage_options=server.options),
                Store.create(top / "sealed", encrypt="file"),
            ]
            for store in stores:
                store.ingest("baskets", x, label=y, user=np.arange(rows) // 10, shards=shards, slices=slices)
                # The first build of a dataset also commits to every row, wherever it is kept: not compared.
                _build(store, SEALING, SEALING.model)
            lines = [line for training in (PAPER, SHORT) for line in _compare(stores, training, repeats)]
            for store in stores:
                store.close()
    return lines


def _compare(stores: list[Store], training: Training, repeats: int) -> list[Line]:
    numbers = count()
    works = [lambda store=store: _build(store, training, f"{training.model}-{next(numbers)}") for store in stores]
    near, far, sealed = seconds_in_turns(repeats, *works, warm_up=False)
    saved = stores[0].checkpoints(f"{training.model}-0")
    shards = max(checkpoint.shard for checkpoint in saved)
    detail: dict[str, float | str] = {
        "local files, s": near,
        "SeaweedFS, s": far,
        "encrypted local files, s": sealed,
        "checkpoints": len(saved),
        "megabytes written": sum(checkpoint.size for checkpoint in saved) / 1e6,
    }
    cut = f"S = {shards}, R = {len(saved) // shards}, {training.model}"
    bar, holds = (f"≤ {MOST}", far / near <= MOST) if training.judged else ("", None)
    return [
        Line(f"S3 / local files, {cut}", far / near, bar, holds, detail),
        Line(f"encrypted / plain, local files, {cut}", sealed / near, "", None),
    ]


def _build(store: Store, training: Training, name: str) -> None:
    how: dict[str, Any] = {"epochs": training.epochs, "seed": 1, "settings": training.settings}
    store.train(name, dataset="baskets", backend="mlp", **how)
