"""SISA in unlearnd against SISA as research code does it: the same work, in one run, at equal accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines import sisa
from benchmarks.bench_baseline import ERASED, Rows, compare
from benchmarks.paper.data import load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import short

TITLE = "Against SISA as research code does it"
FIGURES = ""
ALONE = True
BAR = 5.0
CLOSE = 0.99
"""Of the other's accuracy, from which on we call them equal."""


def cells(quick: bool) -> list[dict[str, Any]]:
    points, shards, slices, epochs = (20_000, 5, 3, 5) if quick else (130_000, 20, 4, 6)
    return [{"data": purchase(), "points": points, "shards": shards, "slices": slices, "step_epochs": epochs}]


def measure(data: str, points: int, shards: int, slices: int, step_epochs: int) -> dict[str, Any]:
    """Train and unlearn with both, one after the other."""
    held = load(data).first(points)
    rows = Rows(data, held.x, held.y, held.x_test, held.y_test)
    plan = sisa.Plan(shards, slices, step_epochs, 32, 128, held.classes, 0.01, 0.9)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), rows, plan)
    theirs, again = found.their_training, found.their_unlearning
    return {
        "train": found.trained,
        "unlearn": found.unlearned,
        "their_train": theirs.seconds,
        "their_unlearn": again.seconds,
        "their_train_loops": theirs.loop,
        "their_unlearn_loops": again.loop,
        "processes": [theirs.processes, again.processes],
        "samples": [found.samples, found.samples_again],
        "accuracy": [found.accuracy, found.accuracy_after],
        "their_accuracy": [found.their_accuracy, found.their_accuracy_after],
    }


def findings(cells: Sequence[Cell]) -> Findings:
    claims, rows = [], []
    for cell in cells:
        what = f"{short(title_of(cell['data']))}, S = {cell['shards']}, R = {cell['slices']}"
        for place, (verb, did) in enumerate((("train", "Training"), ("unlearn", f"Unlearning K = {ERASED}"))):
            ours, theirs, loops = cell[verb], cell[f"their_{verb}"], cell[f"their_{verb}_loops"]
            right, other = cell["accuracy"][place], cell["their_accuracy"][place]
            ratio = theirs / ours
            holds = ratio >= BAR and right >= CLOSE * other
            note = (
                f"Of the other's {theirs:.0f} s, {loops:.0f} s are its training loops: {loops / ours:.1f}× of all that "
                "we take. The rest is starting processes, reading and saving."
            )
            claims.append(
                Claim(
                    f"{did} is at least {BAR:.0f} times as fast as research code, at equal accuracy ({what})",
                    "–",
                    f"{ratio:.1f}×; accuracy {100 * right:.2f} % against {100 * other:.2f} %",
                    holds,
                    note,
                )
            )
            rows.append((did, f"{cell['samples'][place]:,}", f"{ours:.1f}", f"{theirs:.1f}", f"{loops:.1f}",
                         cell["processes"][place], f"{100 * right:.2f} %", f"{100 * other:.2f} %"))  # fmt: skip
    columns = ("what", "samples", "unlearnd, s", "research code, s", "its loops alone, s", "its processes",
               "accuracy", "its accuracy")  # fmt: skip
    sizes = (
        "Both get the same rows in the same shards and slices, an MLP with 128 hidden units, SGD with momentum, "
        "batches of 32, the same epochs at every step, one thread, one shard after the other.",
        "The other uses a DataLoader without workers, a process for each shard and slice, and `torch.save`; it keeps "
        "no ledger, no log, no digests and no receipts, and rewrites no data. Ours does, and that is in its seconds.",
    )
    return Findings(claims, [Table("Seconds", columns, rows)], sizes)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panel = figure.subplots()
    for cell in cells[:1]:
        for place, verb in enumerate(("train", "unlearn")):
            loops = cell[f"their_{verb}_loops"]
            panel.barh(2.5 * place, cell[verb], color="#0b3c5d", label="unlearnd" if not place else None)
            panel.barh(2.5 * place + 1, loops, color="#d9a21b", label="research code: loops" if not place else None)
            panel.barh(2.5 * place + 1, cell[f"their_{verb}"] - loops, left=loops, color="#e8d5a3",
                       label="research code: the rest" if not place else None)  # fmt: skip
    panel.set_yticks([0.5, 3.0], ["training", f"unlearning\nK = {ERASED}"])
    panel.set(xlabel="seconds")
    panel.legend(fontsize=8)
