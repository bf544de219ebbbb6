"""SISA end to end against SISA as research code does it: training, unlearning K = 8 points, accuracy.

Both get the same rows in the same shards and slices, the same network, optimiser, batches and epochs, one thread, one
shard after the other. Ours includes what the other leaves out: the ledger, the log, checkpoints flushed to disk with
their digests, slice data rewritten, signed receipts. The baseline is in `benchmarks/baselines`.

    python -m benchmarks --only baseline [--quick]
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import sisa
from benchmarks.lines import Line
from unlearnd.placement import numbers_of_users, place
from unlearnd.store import Store

BASKETS = Path(__file__).parents[2] / "shared" / "data" / "baskets600.npz"
ERASED = 8
CLASSES = 2
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """What is learned from, and what is asked about."""

    name: str
    x: Array
    y: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class Compared:
    """Seconds and accuracies of both, and what the baseline's processes did."""

    trained: float
    unlearned: float
    accuracy: float
    accuracy_after: float
    their_training: sisa.Took
    their_unlearning: sisa.Took
    their_accuracy: float
    their_accuracy_after: float
    samples: int
    """What ours trained in all at first."""
    samples_again: int
    """What ours trained again after the erasure."""


def run(quick: bool) -> list[Line]:
    """Train, unlearn and compare."""
    plan = (
        sisa.Plan(5, 3, 5, 32, 128, CLASSES, 0.01, 0.9) if quick else sisa.Plan(20, 4, 6, 32, 128, CLASSES, 0.01, 0.9)
    )
    rows = read_rows(20_000 if quick else 130_000)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), rows, plan)
    what = f"{rows.name}, {len(rows.x):,} points, S = {plan.shards}, R = {plan.slices}"
    return [
        _line(f"baseline, training ({what})", found.trained, found.samples, found.their_training),
        _line(
            f"baseline, unlearning K = {ERASED} ({what})", found.unlearned, found.samples_again, found.their_unlearning
        ),
        *_accuracies(what, found),
    ]


def read_rows(points: int) -> Rows:
    """Return shopping baskets where the shared data is there, else synthetic ones of the same form."""
    if BASKETS.exists():
        with np.load(BASKETS, allow_pickle=False) as file:
            x, x_test = (np.unpackbits(file[f"x_bits_{part}"], axis=1, count=600) for part in ("train", "test"))
            return Rows("baskets", x[:points], file["y_train"][:points].astype(np.int64), x_test, file["y_test"])
    random = np.random.default_rng(11)
    x = (random.random((points + 10_000, 600)) < random.random(600) ** 3 / 2).astype(np.uint8)
    pull = x @ random.standard_normal(600)
    y = (pull + random.standard_normal(len(x)) > np.median(pull)).astype(np.int64)
    return Rows("synthetic baskets", x[:points], y[:points], x[points:], y[points:])


def compare(folder: Path, rows: Rows, plan: sisa.Plan) -> Compared:
    """Train and unlearn in a store, and by the baseline, one after the other."""
    erased = np.random.default_rng(3).choice(len(rows.x), ERASED, replace=False)
    settings = {
        "hidden": [plan.hidden],
        "batch_size": plan.batch,
        "lr": plan.lr,
        "momentum": plan.momentum,
        "standardize": "off",
    }
    people = np.arange(len(rows.x))
    # Each step trains 2e'/(R + 1) epochs, so this makes them whole, and equal to the baseline's.
    epochs = plan.epochs * (plan.slices + 1) / 2
    with Store.create(folder / "store") as store:
        store.ingest("rows", rows.x, user=people, label=rows.y, shards=plan.shards, slices=plan.slices)
        numbers = numbers_of_users(map(str, people.tolist()), store.keys.placement)
        shard, slice_ = place(numbers, plan.shards, plan.slices)
        begun = time.perf_counter()
        built = store.train(
            "ours", dataset="rows", backend="mlp", epochs=epochs, seed=1, settings=settings, executor="serial"
        )
        trained = time.perf_counter() - begun
        right = store.evaluate("ours", rows.x_test, label=rows.y_test, aggregate="vote").top1
        begun = time.perf_counter()
        again = store.erase(erased.tolist(), build=True, executor="serial")
        unlearned = time.perf_counter() - begun
        right_after = store.evaluate("ours", rows.x_test, label=rows.y_test, aggregate="vote").top1
    theirs = folder / "baseline"
    sisa.lay_down(theirs, plan, rows.x, rows.y, shard, slice_)
    their_training = sisa.train(theirs)
    their_right = sisa.accuracy(theirs, rows.x_test, rows.y_test)
    their_unlearning = sisa.unlearn(theirs, erased)
    their_right_after = sisa.accuracy(theirs, rows.x_test, rows.y_test)
    samples_again = sum(build.samples for build in again.builds)
    assert built.samples == their_training.samples, "the two train on different numbers of samples"
    assert samples_again == their_unlearning.samples, "the two retrain different numbers of samples"
    return Compared(
        trained, unlearned, right, right_after, their_training, their_unlearning, their_right, their_right_after,
        built.samples, samples_again,
    )  # fmt: skip


def _line(name: str, ours: float, samples: int, theirs: sisa.Took) -> Line:
    ratio = theirs.seconds / ours
    detail: dict[str, float | str] = {
        "ours, s": ours,
        "theirs, s": theirs.seconds,
        "theirs, training loops alone, s": theirs.loop,
        "times the training loops alone": theirs.loop / ours,
        "their processes": theirs.processes,
        "samples": f"{samples:,}",
    }
    return Line(name, ratio, "≥ 5", ratio >= 5, detail)


def _accuracies(what: str, found: Compared) -> list[Line]:
    lines = []
    for when, ours, theirs in (
        ("trained", found.accuracy, found.their_accuracy),
        ("unlearned", found.accuracy_after, found.their_accuracy_after),
    ):
        detail: dict[str, float | str] = {"ours by vote, %": 100 * ours, "theirs by vote, %": 100 * theirs}
        ratio = ours / theirs
        lines.append(Line(f"baseline, accuracy once {when} ({what})", ratio, "≥ 0.99", ratio >= 0.99, detail))
    return lines
