"""Knowing who leaves: uniform placement against the paper's Algorithm 1 and against slices ordered by risk.

Requests are drawn as the priors say. What they train again is counted in plans, one request at a time and in batches,
and accuracy is measured for each group by itself: whether those who leave most are served worse must be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import is_here, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_interval, plus_minus, setup_of, short, values_of, where
from benchmarks.paper.trial import MLP, erase_and_build, planned, store_with

TITLE = "Knowing who leaves"
FIGURES = "figures 9 and 10"
ALONE = False
WAYS = {
    "uniform": ("uniform", "uniform"),
    "Algorithm 1": ("aware-algorithm-1", "uniform"),
    "risk-ordered slices": ("aware", "uniform"),
    "risk-ordered, equal-work": ("aware", "equal-work"),
}
"""Placement and schedule by what the report calls them."""
RATES = (3e-6, 6e-6, 3e-5)
"""The paper's erasure probabilities, least first."""
LEAVING = {
    "online_retail": ("UK", "elsewhere", "DE, FR, IE"),
    "adult": ("50 and over", "30 to 49", "under 30"),
    "synthetic_groups": ("c1", "c3", "c2"),
}
"""Groups of each data set, least likely to leave first."""


def cells(quick: bool) -> list[dict[str, Any]]:
    names = [name for name in ("online_retail", "adult") if is_here(name)] or ["synthetic_groups"]
    cut = {"online_retail": (10, 20), "adult": (20, 20), "synthetic_groups": (20, 50)}
    return [
        {
            "data": name,
            "way": way,
            "shards": cut[name][0],
            "slices": cut[name][1],
            "epochs": 3 if quick else 6,
            "seed": seed,
        }
        for seed in range(2 if quick else 5)
        for name in names[-1:] + names[:-1]
        for way in (list(WAYS)[:3] if quick else WAYS)
        if not (quick and name == "adult" and len(names) > 1)
    ]


def measure(data: str, way: str, shards: int, slices: int, epochs: int, seed: int) -> dict[str, Any]:
    held = load(data)
    assert held.group is not None
    assert held.group_test is not None
    placement, schedule = WAYS[way]
    chance = dict(zip(LEAVING[data], RATES, strict=True))
    share = {name: float((held.group == name).mean()) for name in chance}
    layout: dict[str, Any] = {"group": held.group, "placement": placement}
    if placement != "uniform":
        layout["risk"] = {name: (chance[name], share[name]) for name in chance}
    # One point in, one person out: everybody asks with the probability of their group.
    people, first = np.unique(held.user, return_index=True)
    weight = np.array([chance[name] for name in held.group[first]])
    random = np.random.Generator(np.random.PCG64(1000 + seed))
    draws = {
        k: [random.choice(people, k, replace=False, p=weight / weight.sum()).tolist() for _ in range(n)]
        for k, n in ((1, 100), (18, 15))
    }
    with store_with(held, shards, slices, seed, user=held.user, **layout) as store:
        store.train("m", dataset="d", backend="mlp", epochs=epochs, seed=seed, schedule=schedule, settings=MLP)
        rule = {"label": held.y_test, "aggregate": "mean"}
        groups = store.evaluate_groups("m", held.x_test, group=held.group_test, **rule)
        found = {
            "accuracy": 100 * store.evaluate("m", held.x_test, **rule).top1,
            "vote": 100 * store.evaluate("m", held.x_test, label=held.y_test, aggregate="vote").top1,
            "groups": {name: 100 * one.top1 for name, one in groups.items()},
            "one": float(np.mean(planned(store, draws[1]))),
            "batch": float(np.mean(planned(store, draws[18]))),
            "erasures": [erase_and_build(store, draws[18][0])],
        }
    return found


def findings(cells: Sequence[Cell]) -> Findings:
    claims: list[Claim] = []
    tables, sizes = [], []
    for data in distinct(cells, "data"):
        group = where(cells, data=data)
        if where(group, way="uniform"):
            claims += _claims(data, group)
            tables.append(_table(data, group))
        sizes.append(
            f"{setup_of(group)}; groups "
            + ", ".join(f"{name} ({rate:g})" for name, rate in zip(LEAVING[data], RATES, strict=True))
            + ", with the paper's erasure probabilities."
        )
    sizes.append("Requests are people drawn by these probabilities: 100 alone, 15 batches of 18, the same everywhere.")
    return Findings(claims, tables, sizes)


def _gain(cells: Sequence[Cell], way: str, what: str) -> list[float]:
    """Return, seed by seed, how much less a way trains again than uniform placement does."""
    return [
        base[0][what] / cell[what]
        for cell in where(cells, way=way)
        if (base := where(cells, way="uniform", seed=cell["seed"]))
    ]


def _loss(cells: Sequence[Cell], way: str, group: str | None = None) -> list[float]:
    """Return, seed by seed, the points of accuracy that a way gains or loses against uniform placement."""

    def right(cell: Cell) -> float:
        return float(cell["accuracy"] if group is None else cell["groups"][group])

    return [
        right(cell) - right(base[0])
        for cell in where(cells, way=way)
        if (base := where(cells, way="uniform", seed=cell["seed"]))
    ]


def _claims(data: str, cells: Sequence[Cell]) -> list[Claim]:
    title, claims = short(title_of(data)), []
    likeliest = LEAVING[data][-1]
    if where(cells, way="Algorithm 1"):
        gain, half = mean_interval(_gain(cells, "Algorithm 1", "one"))
        batch = plus_minus(_gain(cells, "Algorithm 1", "batch"), 2)
        ours = f"{gain:.2f} ± {half:.2f}× less than uniform for one request, {batch}× for a batch of 18"
        note = "" if gain - half > 1 else _why_nothing_saved(cells, gain + half)
        claims.append(
            Claim(
                f"Algorithm 1 trains less again than uniform shards ({title})",
                "fewer points in expectation (figure 10)",
                ours,
                gain - half > 1,
                note,
            )
        )
        loss, half = mean_interval(_loss(cells, "Algorithm 1"))
        theirs = plus_minus(_loss(cells, "Algorithm 1", likeliest), 2)
        ours = f"{loss:+.2f} ± {half:.2f} points; for those who leave most ({likeliest}) {theirs}"
        costs = loss + half < 0
        note = (
            ""
            if costs
            else "No cost can be told from chance here. "
            + ("We weigh unequal shards by size, the paper does not; whether that is why was not tried.")
        )
        if costs and loss <= -2:
            note = "It costs more here than the paper found."
        what, paper = f"Algorithm 1 costs about a point of accuracy ({title})", "94.4 % against 95.7 % (-1.3)"
        claims.append(Claim(what, paper, ours, costs and loss > -2, note))
    if where(cells, way="risk-ordered slices"):
        gain, half = mean_interval(_gain(cells, "risk-ordered slices", "one"))
        batch = plus_minus(_gain(cells, "risk-ordered slices", "batch"), 2)
        ours = f"{gain:.2f} ± {half:.2f}× for one request, {batch}× for a batch of 18"
        claims.append(
            Claim(
                f"Beyond the paper: slices ordered by risk train less again than uniform ({title})",
                "–",
                ours,
                gain - half > 1,
            )
        )
        loss, half = mean_interval(_loss(cells, "risk-ordered slices"))
        leavers, wide = mean_interval(_loss(cells, "risk-ordered slices", likeliest))
        ours = f"all: {loss:+.2f} ± {half:.2f} points; those who leave most ({likeliest}): {leavers:+.2f} ± {wide:.2f}"
        claims.append(Claim(f"… and cost no group more than a point ({title})", "–", ours, leavers > -1 and loss > -1))
    return claims


def _why_nothing_saved(cells: Sequence[Cell], at_most: float) -> str:
    """Say what is known of why Algorithm 1 saved nothing, and whether slices ordered by risk did."""
    said = "It trains more than uniform shards do" if at_most < 1 else "No saving can be told from chance"
    said += ": shards of those who leave most are small, and the others are larger for it."
    if where(cells, way="risk-ordered slices"):
        gain, half = mean_interval(_gain(cells, "risk-ordered slices", "one"))
        said += f" Slices ordered by risk {'do save' if gain - half > 1 else 'do not save either'}."
    return said


def _table(data: str, cells: Sequence[Cell]) -> Table:
    names = LEAVING[data]
    rows = []
    for way in distinct(cells, "way"):
        found = where(cells, way=way)
        row = [
            way,
            plus_minus(_gain(cells, way, "one"), 2, "×"),
            plus_minus(_gain(cells, way, "batch"), 2, "×"),
            plus_minus(values_of(found, "accuracy"), 2),
        ]
        rows.append([*row, *(plus_minus(values_of(found, "groups", name), 2) for name in names)])
    return Table(
        f"{title_of(data)}: saved against uniform, and accuracy in percent",
        ("placement", "one request", "batch of 18", "all", *names),
        rows,
    )


def draw(cells: Sequence[Cell], figure: Any) -> None:
    names = distinct(cells, "data")
    panels = figure.subplots(1, 2 * len(names), squeeze=False)[0]
    for at, data in enumerate(names):
        group = where(cells, data=data)
        ways = distinct(group, "way")
        gains = [mean_interval(_gain(group, way, "one")) for way in ways]
        panels[2 * at].barh(ways, [m for m, _ in gains], xerr=[h for _, h in gains], color=COLOURS[1], height=0.6)
        panels[2 * at].set(xlabel="less than uniform, one request, ×")
        losses = [mean_interval(_loss(group, way, LEAVING[data][-1])) for way in ways]
        panels[2 * at + 1].barh(ways, [m for m, _ in losses], xerr=[h for _, h in losses], color=COLOURS[4], height=0.6)
        panels[2 * at + 1].set(xlabel=f"points for “{LEAVING[data][-1]}”")
        for panel in panels[2 * at : 2 * at + 2]:
            panel.set_title(short(title_of(data)), fontsize=9)
            panel.tick_params(labelsize=7)
        panels[2 * at + 1].set_yticklabels([])
    for panel in panels[2::2]:
        panel.set_yticklabels([])
