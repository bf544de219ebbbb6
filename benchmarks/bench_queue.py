"""10,000 erasures received and carried out in one run, against as many one by one, each with its rebuild.

Everybody gets a receipt either way. One by one is too slow to be done 10,000 times, so a sample is: its first and last
hundred are reported, to show whether the cost of one changes while they go on.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lines import Line
from unlearnd.store import Store

_SHARDS, _SLICES = 20, 10


def run(quick: bool) -> list[Line]:
    """Erase half of all users, who have five points each, from a dataset with one model."""
    users, sample = (1_000, 100) if quick else (10_000, 200)
    with tempfile.TemporaryDirectory() as folder:
        with _make(Path(folder) / "queued", 2 * users) as store:
            rows = [{"user": str(user), "identity": "account"} for user in range(users)]
            begun = time.perf_counter()
            entered = store.receive_rows(rows, source="benchmark", approve=True)
            received = time.perf_counter() - begun
            carried = store.run_requests(build=True)
            queued = time.perf_counter() - begun
            receipts = len(store.receipts())
            assert len(entered) == len(carried.outcomes) == receipts == users, "a request was lost"
            retrained = sum(build.samples for build in carried.builds)
        took: list[float] = []
        with _make(Path(folder) / "single", 2 * users) as store:
            alone = 0
            for user in range(sample):
                begun = time.perf_counter()
                erased = store.erase([user], build=True)
                took.append(time.perf_counter() - begun)
                alone += sum(build.samples for build in erased.builds)
            assert len(store.receipts()) == sample, "a request was lost"
    each = sum(took) / sample
    gain = each * users / queued
    part = max(sample // 4, 1)
    detail: dict[str, float | str] = {
        f"{users:,} in one run, s": queued,
        "of which receiving and approving, s": received,
        "in one run, erasures/s": users / queued,
        "in one run, samples retrained": float(retrained),
        f"one by one, measured on {sample} of them, erasures/s": 1 / each,
        f"one by one, first {part}, ms each": 1000 * sum(took[:part]) / part,
        f"one by one, last {part}, ms each": 1000 * sum(took[-part:]) / part,
        "one by one, samples retrained each": alone / sample,
    }
    name = f"{users:,} erasures one by one / in one run, the former extrapolated from {sample}"
    return [Line(name, gain, "", None, detail)]


def _make(folder: Path, users: int) -> Store:
    generator = np.random.default_rng(11)
    count = 5 * users
    x = generator.random((count, 16), dtype=np.float32)
    store = Store.create(folder)
    store.ingest(
        "points", x, user=generator.permutation(count) // 5, label=generator.integers(0, 4, count), shards=_SHARDS,
        slices=_SLICES,
    )  # fmt: skip
    store.train("model", dataset="points", backend="linear", epochs=1, seed=1)
    return store
