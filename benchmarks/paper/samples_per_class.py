"""Accuracy by the number of points per class: why many shards hurt where points are few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.paper.data import digits, is_here, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_interval, plain_ticks, plus_minus, short, values_of, where
from benchmarks.paper.trial import accuracy, erase_and_build, store_with

TITLE = "Points per class"
FIGURES = "figure 15"
ALONE = False
STEPS = 4000
"""Batches that every model is trained on, whatever it is trained on: few points must not mean little training."""


def cells(quick: bool) -> list[dict[str, Any]]:
    what = {
        "location30": (3, 6, 12, 25, 50, 100),
        digits(): (5, 15, 50, 150, 500, 2000),
        "cifar_100": (5, 20, 100, 500),
    }
    given = {name: sizes for name, sizes in what.items() if is_here(name)}
    return [
        {"data": name, "per_class": n, "steps": STEPS // (8 if quick else 1), "seed": seed}
        for seed in range(2 if quick else 3)
        for name, sizes in given.items()
        for n in (sizes[::2] if quick else sizes)
    ]


def measure(data: str, per_class: int, steps: int, seed: int) -> dict[str, Any]:
    held = load(data).flat()
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(held.x))
    chosen = np.concatenate([order[held.y[order] == label][:per_class] for label in range(held.classes)])
    part = held.rows(chosen)
    epochs = steps * 16 / len(part.x)
    with store_with(part, 1, 1, seed) as store:
        built = store.train(
            "m", dataset="d", backend="mlp", epochs=epochs, seed=seed, settings={"batch_size": 16, "lr": 0.01}
        )
        found = {"points": len(part.x), "samples": built.samples, "sisa": accuracy(store, "m", part)}
        return {**found, "erasures": [erase_and_build(store, [0])]}


def findings(cells: Sequence[Cell]) -> Findings:
    claims, tables = [], []
    for data in distinct(cells, "data"):
        group = where(cells, data=data)
        sizes = sorted(distinct(group, "per_class"))
        means = [mean_interval(values_of(where(group, per_class=n), "sisa", "mean"))[0] for n in sizes]
        ours = ", ".join(f"{m:.1f} % at {n}" for n, m in zip(sizes, means, strict=True))
        rising = all(b > a for a, b in pairwise(means))
        claims.append(
            Claim(
                f"More points per class, more accuracy ({short(title_of(data))})",
                "accuracy rises (figure 15)",
                ours,
                rising,
            )
        )
        top5 = "mean_top5" in group[0]["sisa"]
        rows = []
        for n in sizes:
            found = where(group, per_class=n)
            rows.append(
                [
                    n,
                    int(np.mean(values_of(found, "points"))),
                    plus_minus(values_of(found, "sisa", "mean"), 1),
                    *([plus_minus(values_of(found, "sisa", "mean_top5"), 1)] if top5 else []),
                ]
            )
        tables.append(
            Table(
                f"{title_of(data)}: accuracy of one constituent in percent",
                ("per class, at most", "points", "top-1", *(["top-5"] if top5 else [])),
                rows,
            )
        )
    seeds, steps = len(distinct(cells, "seed")), cells[0]["steps"]
    note = f"S = R = 1, one hidden layer of 128, {steps:,} batches of 16 whatever the number of points, {seeds} seeds."
    return Findings(claims, tables, (note,))


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panel = figure.subplots()
    for colour, data in enumerate(distinct(cells, "data")):
        group = where(cells, data=data)
        sizes = sorted(distinct(group, "per_class"))
        bars = [mean_interval(values_of(where(group, per_class=n), "sisa", "mean")) for n in sizes]
        panel.errorbar(
            sizes,
            [m for m, _ in bars],
            [h for _, h in bars],
            fmt="o-",
            ms=3,
            capsize=2,
            color=COLOURS[colour],
            label=short(title_of(data)),
        )
    panel.set(xlabel="points per class", ylabel="accuracy, % (95 % intervals)")
    plain_ticks(panel, distinct(cells, "per_class"))
    panel.legend(fontsize=7)
