"""What storage costs a build: 100 shards, 20 slices, in a bucket of a real S3 server, and encrypted, to local files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lines import Line, seconds_in_turns
from benchmarks.seaweed import running
from unlearnd.store import Store


def run(quick: bool) -> list[Line]:
    """Build the paper's Purchase shape (600 binary features) cut into S = 100, R = 20; every state is saved."""
    shards, slices, rows, repeats = (20, 10, 20_000, 2) if quick else (100, 20, 200_000, 1)
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
            turns = [0] * len(stores)

            def build(place: int) -> None:
                turns[place] += 1
                stores[place].train(
                    f"model-{turns[place]}",
                    dataset="baskets",
                    backend="mlp",
                    epochs=10,
                    seed=1,
                    settings={"hidden": [128]},
                )

            near, far, sealed = seconds_in_turns(repeats, lambda: build(0), lambda: build(1), lambda: build(2))
            size = sum(checkpoint.size for checkpoint in stores[0].checkpoints("model-1"))
            for store in stores:
                store.close()
    detail: dict[str, float | str] = {
        "local files, s": near,
        "SeaweedFS, s": far,
        "encrypted local files, s": sealed,
        "checkpoints": shards * slices,
        "megabytes written": size / 1e6,
    }
    return [
        Line(f"S3 / local files, S = {shards}, R = {slices}", far / near, "≤ 1.3", far / near <= 1.3, detail),
        Line("encrypted / plain, local files", sealed / near, "", None),
    ]
