"""Users with many points: all of them in one place, or each somewhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import best, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, mean_interval, plain_ticks, plus_minus, setup_of, short, values_of, where
from benchmarks.paper.trial import MLP, accuracy, erase_and_build, planned, store_with

TITLE = "Beyond the paper: users with many points"
FIGURES = ""
ALONE = False


def cells(quick: bool) -> list[dict[str, Any]]:
    size = {
        "points": 10_000 if quick else 65_000,
        "epochs": 2 if quick else 4,
        "shards": 20,
        "slices": 5 if quick else 50,
    }
    data = best("baskets600", "digits")
    return [
        {"data": data, **size, "unit": unit, "seed": seed}
        for seed in range(1 if quick else 3)
        for unit in ("user", "point")
    ]


def measure(data: str, points: int, epochs: int, shards: int, slices: int, unit: str, seed: int) -> dict[str, Any]:
    held = load(data).flat().first(points)
    # Digits have no owners: there, everybody has ten.
    owner = held.user if len(np.unique(held.user)) < len(held.x) else np.arange(len(held.x)) % (len(held.x) // 10)
    random = np.random.Generator(np.random.PCG64(seed))
    people, counts = np.unique(owner, return_counts=True)
    leaving = random.permutation(people)[:60].tolist()
    with store_with(held, shards, slices, seed, user=owner, unit=unit) as store:
        store.train("m", dataset="d", backend="mlp", epochs=epochs, seed=seed, settings=MLP)
        first = accuracy(store, "m", held)
        shares = planned(store, [[person] for person in leaving])
        erasures = [erase_and_build(store, [person]) for person in leaving[:5]]
    held_by = dict(zip(people.tolist(), counts.tolist(), strict=True))
    return {
        "sisa": first,
        "shares": shares,
        "owned": [held_by[person] for person in leaving],
        "people": len(people),
        "erasures": erasures,
    }


def findings(cells: Sequence[Cell]) -> Findings:
    together, scattered = (where(cells, unit=unit) for unit in ("user", "point"))
    claims, rows = [], []
    for unit, group in (("all in one place", together), ("each somewhere else", scattered)):
        if group:
            took = [one["build_seconds"] for cell in group for one in cell["erasures"]]
            receipt = [one["receipt_seconds"] for cell in group for one in cell["erasures"]]
            shares = [share for cell in group for share in cell["shares"]]
            rows.append(
                (
                    unit,
                    f"{100 * np.mean(shares):.2f} %",
                    f"{1 / np.mean(shares):.1f}×",
                    plus_minus(took, 2, " s"),
                    plus_minus(receipt, 2, " s"),
                    plus_minus(values_of(group, "sisa", "mean"), 2),
                )
            )
    if together and scattered:
        pairs = [(a, b[0]) for a in together if (b := where(scattered, seed=a["seed"]))]
        gain, half = mean_interval([np.mean(b["shares"]) / np.mean(a["shares"]) for a, b in pairs])
        owned = np.mean([n for cell in together for n in cell["owned"]])
        title = short(title_of(cells[0]["data"]))
        ours = f"{gain:.1f} ± {half:.1f}× less to train again, with {owned:.0f} points each on average"
        claims.append(
            Claim(
                f"One place for all of a user's points makes erasing them cheap ({title})", "–", ours, gain - half > 1
            )
        )
        lost, wide = mean_interval([a["sisa"]["mean"] - b["sisa"]["mean"] for a, b in pairs])
        claims.append(
            Claim(f"… at no cost in accuracy ({title})", "–", f"{lost:+.2f} ± {wide:.2f} points", lost > -0.5)
        )
    sizes = [
        f"{setup_of(cells)}; {cells[0]['people']:,} users, of whom 60 were planned and 5 erased, one by one, per cell."
    ]
    columns = (
        "a user's points",
        "share of all samples, one user",
        "speed-up",
        "build took",
        "receipt after",
        "accuracy, %",
    )
    return Findings(claims, [Table("Erasing one user", columns, rows)], sizes)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panel = figure.subplots()
    for unit, label, colour in (("user", "in one place", 0), ("point", "scattered", 4)):
        group = where(cells, unit=unit)
        x = [n for cell in group for n in cell["owned"]]
        panel.plot(
            x,
            [100 * share for cell in group for share in cell["shares"]],
            "o",
            ms=3,
            alpha=0.6,
            color=COLOURS[colour],
            label=label,
        )
    panel.set(xlabel="points of the user", ylabel="share of all samples retrained, %", ylim=(0, None))
    most = max(n for cell in cells for n in cell["owned"])
    plain_ticks(panel, [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n <= most])
    panel.legend(fontsize=7)
