"""How each cost grows with points, users, shards and slices: the exponent of a power law, fitted to three sizes.

0 means that it does not matter, 1 that twice as much costs twice as much. One thing grows at a time, by four and by
sixteen; the others stay. Training itself is left out (a token number of epochs): it grows with the samples trained,
which `unlearnd plan` counts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lines import Line
from unlearnd.store import Store

TIMES = (1, 4, 16)
COSTS = ("ingest", "build", "look up a user", "erase a user", "status", "ledger bytes", "storage bytes")
_BAR = 1.2
_BESIDE = 0.01
"""Seconds below which a fit says nothing."""


@dataclass(frozen=True)
class Size:
    points: int
    users: int
    shards: int
    slices: int


def run(quick: bool) -> list[Line]:
    """Grow one thing after the other and fit."""
    base = Size(10_000, 1_000, 5, 5) if quick else Size(50_000, 5_000, 10, 10)
    lines = []
    for what in ("points", "users", "shards", "slices"):
        sizes = [_grown(base, what, times) for times in TIMES]
        costs = _measure_in_turns(sizes, 2 if quick else 3)
        for cost in COSTS:
            lines.append(_line(cost, what, [found[cost] for found in costs], sizes))
    return lines


def _grown(base: Size, what: str, times: int) -> Size:
    if what == "users":
        # As many points in all sizes, and at least one for everybody.
        return replace(base, points=base.users * TIMES[-1], users=base.users * times)
    return replace(base, **{what: getattr(base, what) * times})


def _line(cost: str, what: str, values: list[float], sizes: list[Size]) -> Line:
    grown = [float(getattr(size, what)) for size in sizes]
    exponent = float(np.polyfit(np.log(grown), np.log(values), 1)[0])
    unit = "" if cost.endswith("bytes") else ", ms"
    detail: dict[str, float | str] = {
        f"{what} {int(n):,}{unit}": value * (1 if cost.endswith("bytes") else 1000)
        for n, value in zip(grown, values, strict=True)
    }
    # Nothing may grow faster than what it is given, where it takes long enough to tell.
    telling = cost.endswith("bytes") or values[-1] > _BESIDE
    holds = exponent <= _BAR if telling else None
    return Line(f"growth of {cost} with {what}, exponent", exponent, f"≤ {_BAR}" if telling else "", holds, detail)


def _measure_in_turns(sizes: list[Size], turns: int) -> list[dict[str, float]]:
    """Return the least of what each cost was at each size; sizes take turns."""
    best: list[dict[str, float]] = [{} for _ in sizes]
    for _ in range(turns):
        for place, size in enumerate(sizes):
            for cost, value in _measure(size).items():
                best[place][cost] = min(value, best[place].get(cost, value))
    return best


def _measure(size: Size) -> dict[str, float]:
    generator = np.random.default_rng(3)
    x = generator.random((size.points, 8), dtype=np.float32)
    label = generator.integers(0, 4, size.points)
    user = generator.permutation(size.points) % size.users
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "store"
        with Store.create(home) as store:
            layout = {"classes": 4, "shards": size.shards, "slices": size.slices}
            found["ingest"] = _seconds(lambda: store.ingest("d", x, user=user, label=label, **layout))
            found["build"] = _seconds(lambda: store.train("m", dataset="d", backend="linear", epochs=0.001, seed=1))
            found["look up a user"] = min(_seconds(partial(store.where_user, str(one))) for one in range(5))
            found["status"] = min(_seconds(store.status) for _ in range(3))
            stored = [path for path in (home / "storage").rglob("*") if path.is_file()]
            found["storage bytes"] = sum(path.stat().st_size for path in stored)
            found["erase a user"] = min(_seconds(partial(store.erase, [str(one)], build=False)) for one in range(3))
        # Closed, it has no journal beside it.
        found["ledger bytes"] = (home / "ledger.sqlite").stat().st_size
    return found


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
