"""Training time against the number of samples: the assumption that all costs counted in samples rest on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import best, digits, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import fit_line, mean_interval, short
from benchmarks.paper.trial import erase_and_build, new_store

TITLE = "Time is linear in samples"
FIGURES = "figure 3"
ALONE = True
TENTHS = range(1, 11)
LINEAR = 0.98
"""R² from which on we call it a line."""


def cells(quick: bool) -> list[dict[str, Any]]:
    repeats = 2 if quick else 5
    colours = best("svhn", "cifar_10", "cifar10_20k", "digits")
    what = [
        {"data": purchase(), "backend": "mlp", "points": 20_000 if quick else 60_000},
        {"data": digits(), "backend": "convnet", "points": 1000 if quick else 6000},
        {
            "data": colours,
            "backend": "wide_resnet" if colours != "digits" else "convnet",
            "points": 300 if quick else 1500,
        },
    ]
    return [{**one, "repeat": repeat} for repeat in range(repeats) for one in what]


def measure(data: str, backend: str, points: int, repeat: int) -> dict[str, Any]:
    """Train an epoch on 10, 20, … 100 % of the points, in a random order, and once unmeasured before."""
    held = load(data)
    settings: dict[str, Any] = {"batch_size": 32, **({"depth": 10, "width": 1} if backend == "wide_resnet" else {})}
    order = np.random.Generator(np.random.PCG64(repeat)).permutation(list(TENTHS)).tolist()
    seconds: dict[int, float] = {}
    cpu: dict[int, float] = {}
    samples: dict[int, int] = {}
    erasures = []
    with new_store(repeat) as store:
        for turn, tenth in enumerate([1, *order]):
            part = held.first(min(points, len(held.x)) * tenth // 10)
            name = f"d{turn}"
            # Nobody is in two of these datasets, so that whoever is erased is in one of them.
            owner = turn * 10_000_000 + np.arange(len(part.x))
            store.ingest(name, part.x, user=owner, label=part.y, classes=part.classes, shards=1, slices=1)
            begin = time.process_time()
            built = store.train(f"m{turn}", dataset=name, backend=backend, epochs=1, seed=repeat, settings=settings)
            cpu[tenth] = time.process_time() - begin
            seconds[tenth], samples[tenth] = built.seconds, built.samples
            if tenth == 10:
                erasures.append(erase_and_build(store, [int(owner[0])], [f"m{turn}"]))
    return {
        "samples": [samples[t] for t in TENTHS],
        "seconds": [seconds[t] for t in TENTHS],
        "cpu": [cpu[t] for t in TENTHS],
        "erasures": erasures,
    }


def findings(cells: Sequence[Cell]) -> Findings:
    claims, rows = [], []
    for (data, backend), group in _by_data(cells).items():
        x, y = _points(group)
        start, slope, fit = fit_line(x, y)
        wall = fit_line(*_points(group, "seconds"))[2]
        claims.append(
            Claim(
                f"Training time is linear in the number of samples ({short(title_of(data))}, `{backend}`)",
                "linear within error (figure 3; no figure given)",
                f"R² = {fit:.4f} (wall clock {wall:.4f}), 10 … 100 % of {max(x):,.0f} samples, {len(group)} repeats",
                fit >= LINEAR,
                _note(fit, wall),
            )
        )
        share = start / (start + slope * max(x))
        rows.append(
            (
                title_of(data),
                backend,
                max(x),
                f"{1e6 * slope:.1f}",
                f"{start:.3f}",
                f"{100 * share:.1f} %",
                f"{fit:.4f}",
            )
        )
    columns = ("data", "backend", "samples at 100 %", "CPU µs per sample", "CPU s at 0 samples", "of 100 %", "R²")
    sizes = (
        "One epoch, S = R = 1, batches of 32, one thread. CPU seconds: what else the machine was doing does not count.",
    )
    return Findings(claims, [Table("Least squares", columns, rows)], sizes)


def _note(fit: float, wall: float) -> str:
    """Say which clock the verdict is by, where the two disagree."""
    if fit < LINEAR:
        return f"We call it a line from R² = {LINEAR} on."
    if wall < LINEAR:
        return (
            f"The verdict is by CPU time. By the wall clock it is no line here (R² = {wall:.2f}); CPU time was chosen "
            "after the wall clock had been seen to be useless on a busy machine."
        )
    return ""


def draw(cells: Sequence[Cell], figure: Any) -> None:
    groups = _by_data(cells)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, ((data, backend), group) in zip(panels, groups.items(), strict=True):
        x, y = _points(group)
        start, slope, _ = fit_line(x, y)
        along = sorted(set(x))
        bars = [mean_interval([b for a, b in zip(x, y, strict=True) if a == n]) for n in along]
        panel.errorbar(along, [m for m, _ in bars], [h for _, h in bars], fmt="o", ms=3, capsize=2, color="#0b3c5d")
        panel.plot([0, max(x)], [start, start + slope * max(x)], color="#d9a21b", lw=1)
        panel.set(xlabel="samples trained on", ylabel="CPU seconds", xlim=(0, None), ylim=(0, None))
        panel.set_title(f"{short(title_of(data))}, {backend}", fontsize=9)


def _by_data(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["data"], cell["backend"]), []).append(cell)
    return groups


def _points(group: Sequence[Cell], clock: str = "cpu") -> tuple[list[float], list[float]]:
    x = [float(n) for cell in group for n in cell["samples"]]
    return x, [float(s) for cell in group for s in cell[clock]]
