"""Accuracy between an erasure and its rebuild: clean prefixes answer, and nothing has been trained again yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import digits, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_interval, plus_minus, setup_of, short, where
from benchmarks.paper.trial import MLP, store_with

TITLE = "Beyond the paper: accuracy while nothing is rebuilt yet"
FIGURES = ""
ALONE = False
REQUESTS = (0, 1, 2, 5, 8, 18, 30, 50, 75, 100)


def cells(quick: bool) -> list[dict[str, Any]]:
    what = [
        {"data": purchase(), "points": 10_000 if quick else 65_000, "epochs": 2 if quick else 5},
        {"data": digits(), "points": 6000 if quick else 60_000, "epochs": 4 if quick else 6},
    ]
    cut = {"shards": 20, "slices": 5 if quick else 50}
    return [{**one, **cut, "seed": seed} for seed in range(1 if quick else 3) for one in what]


def measure(data: str, points: int, epochs: int, shards: int, slices: int, seed: int) -> dict[str, Any]:
    held = load(data).flat().first(points)
    leaving = np.random.Generator(np.random.PCG64(seed)).permutation(len(held.x))[: REQUESTS[-1]].tolist()
    right: dict[str, list[float]] = {"vote": [], "mean": []}
    abstaining, behind, receipts = [], [], []
    with store_with(held, shards, slices, seed) as store:
        store.train("m", dataset="d", backend="mlp", epochs=epochs, seed=seed, settings=MLP)
        for before, now in zip((0, *REQUESTS), REQUESTS, strict=False):
            if now > before:
                begin = time.perf_counter()
                store.erase(leaving[before:now], build=False)
                receipts.append(time.perf_counter() - begin)
            for rule, found in right.items():
                evaluation = store.evaluate("m", held.x_test, label=held.y_test, aggregate=rule)
                found.append(100 * evaluation.top1)
            abstaining.append(evaluation.abstaining)
            behind.append(store.status().models[0].degraded)
        store.build()
        rebuilt = 100 * store.evaluate("m", held.x_test, label=held.y_test, aggregate="mean").top1
        scratch = store.builds("m")[0].seconds
    counts = {"requests": list(REQUESTS), "abstaining": abstaining, "degraded": behind}
    return {**counts, **right, "rebuilt": rebuilt, "receipt_seconds": receipts, "scratch_seconds": scratch}


def findings(cells: Sequence[Cell]) -> Findings:
    claims, tables, sizes = [], [], []
    for data in distinct(cells, "data"):
        group = where(cells, data=data)
        drops = [[cell["mean"][0] - right for right in cell["mean"]] for cell in group]
        by_k = dict(zip(group[0]["requests"], zip(*drops, strict=True), strict=True))
        mean, _ = mean_interval(by_k[8])
        later = f"{plus_minus(by_k[18], 2)} after 18, {plus_minus(by_k[100], 2)} after 100"
        ours = f"{plus_minus(by_k[8], 2)} points after 8 erasures, {later}"
        claims.append(
            Claim(
                f"Erased at once, rebuilt later: less than a point lost after 8 erasures ({short(title_of(data))})",
                "–",
                ours,
                mean < 1,
            )
        )
        short_of = [k for k, values in by_k.items() if mean_interval(values)[0] >= 2]
        worst = max(k for k in by_k if k < min(short_of, default=1 + max(by_k)))
        claims.append(
            Claim(
                f"… and less than 2 points after K = 18 ({short(title_of(data))})",
                "–",
                f"below 2 points up to K = {worst}",
                worst >= 18,
            )
        )
        timed = all("receipt_seconds" in cell.results for cell in group)
        rows = []
        for at, k in enumerate(group[0]["requests"]):
            columns = [[cell[name][at] for cell in group] for name in ("mean", "vote")]
            counts = [np.mean([cell[name][at] for cell in group]) for name in ("degraded", "abstaining")]
            took = plus_minus([cell["receipt_seconds"][at - 1] for cell in group], 2) if timed and k else "–"
            words = (*(plus_minus(column, 2) for column in columns), *(f"{count:.1f}" for count in counts), took)
            rows.append([k, *words])
        rebuilt = plus_minus([cell["rebuilt"] for cell in group], 2)
        rows.append([f"{REQUESTS[-1]}, rebuilt", rebuilt, "", "0", "0", ""])
        columns = ("erased", "mean", "vote", "constituents set back", "abstaining", "receipt after, s")
        tables.append(Table(f"{title_of(data)}: accuracy in percent", columns, rows))
        sizes.append(f"{setup_of(group)}.")
        if timed:
            scratch = plus_minus([cell["scratch_seconds"] for cell in group], 1)
            sizes[-1] += f" Training all took {scratch} s; a receipt is for those erased since the row above."
    return Findings(claims, tables, sizes)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    names = distinct(cells, "data")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, data in zip(panels, names, strict=True):
        group = where(cells, data=data)
        for colour, rule in enumerate(("mean", "vote")):
            bars = [mean_interval(column) for column in zip(*(cell[rule] for cell in group), strict=True)]
            panel.errorbar(
                group[0]["requests"],
                [m for m, _ in bars],
                [h for _, h in bars],
                fmt="o-",
                ms=3,
                capsize=2,
                color=COLOURS[4 * colour],
                label=rule,
            )
        panel.axhline(
            np.mean([cell["rebuilt"] for cell in group]), color=COLOURS[2], lw=1, ls="--", label="rebuilt (mean)"
        )
        panel.set(xlabel="erased, nothing rebuilt, K", ylabel="accuracy, % (95 % intervals)")
        panel.set_title(short(title_of(data)), fontsize=9)
    panels[0].legend(fontsize=7)
