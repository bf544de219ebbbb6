"""4. Ingest against a plain copy of the same bytes plus a raw `executemany` of one row per point.

The rows hold what the ledger must answer: whose point it is and where it trains, found by user.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lines import Line
from unlearnd.store import Store


def run(quick: bool) -> list[Line]:
    """Ingest 1 (and 10) million points of 32 features, ten a user, users in random order."""
    return [line for millions in ((1,) if quick else (1, 10)) for line in _measure(millions, repeats=1 if quick else 2)]


def _measure(millions: int, repeats: int) -> list[Line]:
    count, shards, slices = millions * 1_000_000, 20, 50
    generator = np.random.Generator(np.random.PCG64(4))
    x = generator.random((count, 32), dtype=np.float32)
    y = generator.integers(0, 10, count)
    user = generator.permutation(count) // 10
    ours, theirs, size = float("inf"), float("inf"), 0.0
    for _ in range(repeats if millions == 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            os.sync()
            with Store.create(Path(folder) / "store") as store:
                begun = time.perf_counter()
                store.ingest("points", x, label=y, user=user, shards=shards, slices=slices)
                ours = min(ours, time.perf_counter() - begun)
                store.ledger.scrub()
            size = (Path(folder) / "store" / "ledger.sqlite").stat().st_size / count
        with tempfile.TemporaryDirectory() as folder:
            os.sync()
            begun = time.perf_counter()
            _copy(Path(folder) / "copy", x, y, user)
            _insert(Path(folder) / "points.sqlite", user, shards, slices)
            theirs = min(theirs, time.perf_counter() - begun)
    ratio, name = ours / theirs, f"{millions} M points"
    detail: dict[str, float | str] = {"ours, s": ours, "copy + rows, s": theirs, "points/s": count / ours}
    return [
        Line(f"4 ingest of {name} / copy and raw rows", ratio, "≤ 1.0", ratio <= 1.0, detail),
        Line(f"4 ledger bytes per point, {name}", size, "≤ 16", size <= 16, {}),
    ]


def _copy(path: Path, *columns: np.ndarray) -> None:  # type: ignore[type-arg]
    with open(path, "wb") as file:
        for column in columns:
            file.write(np.ascontiguousarray(column).data)
        file.flush()
        os.fsync(file.fileno())


def _insert(path: Path, user: np.ndarray, shards: int, slices: int) -> None:  # type: ignore[type-arg]
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE point (id INTEGER PRIMARY KEY, user INTEGER, shard INTEGER, slice INTEGER)")
    database.execute("CREATE INDEX point_user ON point (user)")
    shard, slice_ = (user % shards).tolist(), (user // shards % slices).tolist()
    with database:
        database.executemany(
            "INSERT INTO point VALUES (?, ?, ?, ?)", zip(range(len(user)), user.tolist(), shard, slice_, strict=True)
        )
    database.close()
