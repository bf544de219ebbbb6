"""Where shards are trained: `processes` with 2 workers against `serial`, and `ray` once warm against `processes`.

Needs two cores that are otherwise idle. Every build trains the same model anew; the bits are compared, too.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lines import Line, seconds_in_turns
from unlearnd.store import Store

_SHARDS, _SLICES, _WORKERS = 8, 3, 2


def run(quick: bool) -> list[Line]:
    """Train with every executor in turns."""
    points, epochs, repeats = (24_000, 300, 1) if quick else (24_000, 500, 3)
    with tempfile.TemporaryDirectory() as folder:
        store = _make(Path(folder) / "store", points)
        numbers = itertools.count()
        digests = set()

        def train(executor: str, workers: int) -> None:
            name = f"m{next(numbers)}"
            store.train(
                name, dataset="points", backend="linear", epochs=epochs, seed=1, executor=executor, workers=workers
            )
            digests.add(tuple(checkpoint.tensors for checkpoint in store.checkpoints(name)))

        works = [lambda: train("serial", 1), lambda: train("processes", _WORKERS)]
        begun, started = time.perf_counter(), 0.0
        if "ray" in store.plugins.executors:
            _start_ray()
            started = time.perf_counter() - begun
            works.append(lambda: train("ray", _WORKERS))
        took = seconds_in_turns(repeats, *works)
        store.close()
    assert len(digests) == 1, "executors train different bits"
    return _lines(took, started)


def _lines(took: list[float], started: float) -> list[Line]:
    serial, processes, *ray = took
    gain = serial / processes
    cores = len(os.sched_getaffinity(0))
    detail: dict[str, float | str] = {"serial, s": serial, "processes, s": processes, "cores": cores}
    lines = [Line("executors, 2 processes against serial", gain, "≥ 1.7", gain >= 1.7, detail)]
    if not ray:
        return lines
    ratio = ray[0] / processes
    about: dict[str, float | str] = {"ray, s": ray[0], "processes, s": processes, "start of Ray, s": started}
    return [*lines, Line("executors, time on warm Ray / processes", ratio, "≤ 1.15", ratio <= 1.15, about)]


def _start_ray() -> None:
    """Start a Ray of this machine, which ends with this process."""
    from unlearnd_ray.cluster import connect
    from unlearnd_ray.settings import RaySettings

    connect(RaySettings())


def _make(folder: Path, points: int) -> Store:
    generator = np.random.default_rng(7)
    x = generator.random((points, 128), dtype=np.float32)
    store = Store.create(folder)
    labels = generator.integers(0, 10, points)
    store.ingest("points", x, user=np.arange(points) // 4, label=labels, shards=_SHARDS, slices=_SLICES)
    return store
