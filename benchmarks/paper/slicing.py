"""Accuracy by the number of slices and epochs, with as much training in all: slicing must not cost accuracy.

One shard as large as one of twenty. With R slices every step trains 2e′/(R + 1) epochs (equation 1 of the paper), so
that all R train as many samples; a smaller last slice or a fraction of an epoch is trained too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import digits, is_here, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_interval, plain_ticks, plus_minus, seeds_of, short, where
from benchmarks.paper.trial import MLP, erase_and_build, store_with

TITLE = "Slicing"
FIGURES = "figure 5"
ALONE = False
SLICES = (1, 2, 4, 8, 16, 32, 48)
EPOCHS = (1, 3, 8, 20)
SHARD = (130_000 // 20, 60_000 // 20)
"""How large one of twenty shards is in `sharding`: of shopping baskets, and of digits."""
TOLERANCE = 0.5
"""Points of accuracy from which on we call it a cost."""


def cells(quick: bool) -> list[dict[str, Any]]:
    what = [{"data": purchase(), "points": SHARD[0]}, {"data": digits(), "points": SHARD[1]}]
    what += [{"data": "svhn", "points": SHARD[1]}] if is_here("svhn") else []
    if quick:
        what, slices, epochs, seeds = [{"data": digits(), "points": 1000}], (1, 4, 16), [2, 10], 2
    else:
        slices, epochs, seeds = SLICES, list(EPOCHS), 5
    plain = [{"slices": r, "schedule": "uniform"} for r in slices]
    late = [{"slices": r, "schedule": "equal-work"} for r in slices if r >= 16]
    return [
        {**one, "epochs": epochs, **how, "seed": seed}
        for seed in range(seeds)
        for one in what
        for how in [*plain, *late]
    ]


def measure(data: str, points: int, epochs: list[int], slices: int, schedule: str, seed: int) -> dict[str, Any]:
    held = load(data).flat().first(points)
    right, samples = [], []
    with store_with(held, 1, slices, seed) as store:
        for length in epochs:
            how: dict[str, Any] = {"backend": "mlp", "settings": MLP, "schedule": schedule}
            built = store.train(f"m{length}", dataset="d", epochs=length, seed=seed, **how)
            samples.append(built.samples)
            evaluation = store.evaluate(f"m{length}", held.x_test, label=held.y_test, aggregate="mean")
            right.append(100 * evaluation.top1)
        leaving = np.random.Generator(np.random.PCG64(seed)).integers(len(held.x))
        erasure = erase_and_build(store, [int(leaving)], [f"m{epochs[-1]}"])
    return {"accuracy": right, "samples": samples, "erasures": [erasure]}


def findings(cells: Sequence[Cell]) -> Findings:
    claims: list[Claim] = []
    tables = []
    for data in distinct(cells, "data"):
        of_data = where(cells, data=data)
        plain, late = _differences(of_data, "uniform"), _differences(of_data, "equal-work")
        if plain:
            claims += _claims(data, of_data, plain, late)
        tables.append(_table(data, of_data))
    sized = {c["data"]: c["points"] for c in cells}
    sizes = [
        f"{title_of(d)}: {n:,} points{', the size of one of 20 shards' * (n in SHARD)}; {seeds_of(cells)}."
        for d, n in sized.items()
    ]
    sizes.append("A perceptron with one hidden layer of 128, batches of 32. Differences are taken seed by seed.")
    return Findings(claims, tables, sizes)


def _claims(
    data: str, cells: Sequence[Cell], plain: dict[int, list[list[float]]], late: dict[int, list[list[float]]]
) -> list[Claim]:
    title, epochs = short(title_of(data)), cells[0]["epochs"]
    whole = where(cells, slices=1, schedule="uniform")
    means = [float(np.mean(column)) for column in zip(*(cell["accuracy"] for cell in whole), strict=True)]
    best = int(np.argmax(means))

    def costs_most(found: dict[int, list[list[float]]], at: int) -> tuple[str, bool]:
        worst = min(found, key=lambda r: mean_interval(found[r][at])[0])
        mean, half = mean_interval(found[worst][at])
        says = f"R = {worst} is worst: {mean:+.2f} ± {half:.2f} points against R = 1 at e′ = {epochs[at]}"
        return says, mean > -TOLERANCE

    note = f"We call more than {TOLERANCE} points a cost."
    paper = "no degradation (figure 5)"
    ours, holds = costs_most(plain, -1)
    what = f"Slicing costs no accuracy once epochs are recalibrated ({title})"
    claims = [Claim(what, paper, ours, holds, "" if holds else note)]
    if best < len(epochs) - 1:
        ours, holds = costs_most(plain, best)
        note = f"Without slices, accuracy on this data is best at e′ = {epochs[best]}; that early, slices cost."
        what = f"… also at the number of epochs that is best for R = 1 ({title})"
        claims.append(Claim(what, paper, ours, holds, "" if holds else note))
    most = max(plain)
    early, last = mean_interval(plain[most][0]), mean_interval(plain[most][-1])
    ours = f"R = {most} at e′ = {epochs[0]}: {early[0]:+.2f} ± {early[1]:.2f} points; at e′ = {epochs[-1]}: "
    ours += f"{last[0]:+.2f} ± {last[1]:.2f}"
    paper = "more slices are worse at few epochs, then converge"
    holds = early[0] < last[0] and early[0] + early[1] < 0
    claims.append(Claim(f"With few epochs, many slices are worse ({title})", paper, ours, holds))
    if late:
        ours, holds = costs_most(late, -1)
        what = f"Beyond the paper: `equal-work` epochs (∝ 1/r) cost no accuracy ({title})"
        note = f"We call more than {TOLERANCE} points a cost."
        claims.append(Claim(what, "–", ours, holds, "" if holds else note))
    return claims


def _differences(cells: Sequence[Cell], schedule: str) -> dict[int, list[list[float]]]:
    """Return for each R > 1, by epochs, the difference to R = 1 of every seed."""
    found: dict[int, list[list[float]]] = {}
    for r in distinct(cells, "slices"):
        pairs = []
        for cell in where(cells, slices=r, schedule=schedule):
            whole = where(cells, slices=1, schedule="uniform", seed=cell["seed"])
            if r > 1 and whole:
                pairs.append([a - b for a, b in zip(cell["accuracy"], whole[0]["accuracy"], strict=True)])
        if pairs:
            found[r] = [list(column) for column in zip(*pairs, strict=True)]
    return found


def _table(data: str, cells: Sequence[Cell]) -> Table:
    epochs = cells[0]["epochs"]
    rows = []
    for schedule in distinct(cells, "schedule"):
        for r in distinct(cells, "slices"):
            found = where(cells, slices=r, schedule=schedule)
            if found:
                columns = zip(*(cell["accuracy"] for cell in found), strict=True)
                rows.append(
                    [
                        r,
                        schedule,
                        *(plus_minus(column, 2) for column in columns),
                        int(np.mean([c["samples"][-1] for c in found])),
                    ]
                )
    names = ["R", "epochs of a step", *(f"e′ = {e}" for e in epochs), f"samples at e′ = {epochs[-1]}"]
    return Table(f"{title_of(data)}: accuracy in percent", names, rows)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    names = distinct(cells, "data")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, data in zip(panels, names, strict=True):
        of_data = where(cells, data=data, schedule="uniform")
        for colour, r in enumerate(distinct(of_data, "slices")):
            found = where(of_data, slices=r)
            bars = [mean_interval(column) for column in zip(*(cell["accuracy"] for cell in found), strict=True)]
            epochs = found[0]["epochs"]
            # Beside each other, so that intervals can be told apart.
            panel.errorbar(
                [e * 1.03 ** (colour - 3) for e in epochs],
                [m for m, _ in bars],
                [h for _, h in bars],
                fmt="o-",
                ms=3,
                lw=1,
                capsize=2,
                color=COLOURS[colour % len(COLOURS)],
                label=f"R = {r}",
            )
        panel.set(xlabel="epochs without slicing, e′", ylabel="accuracy, % (95 % intervals)")
        plain_ticks(panel, of_data[0]["epochs"])
        panel.set_title(short(title_of(data)), fontsize=9)
    panels[0].legend(fontsize=7)
