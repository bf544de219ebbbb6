"""Shards and slices together: what real erasures train and take, against the formulas and the simulation.

Time is compared with *batch K* (S = R = 1, everything trained again on whoever is left), measured in the same cell in
turns, so that a slower machine slows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import best, digits, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_interval, plain_ticks, setup_of, short, where
from benchmarks.paper.trial import MLP, accuracy, draws_of, erase_and_build, planned, store_with
from unlearnd.costs import at_once, even_scheme, exact_speedup, formula_speedup, simulate

TITLE = "Shards and slices together"
FIGURES = "figure 7, and the headline"
ALONE = True
GRID_SHARDS, GRID_SLICES = (1, 5, 20), (1, 10, 50)
REQUESTS = 8
HEADLINES = {
    "Purchase": (250_000, 8, 4.63),
    "SVHN": (604_833, 18, 2.45),
    "mini-ImageNet": (128_545, 4, 8.01),
    "ImageNet": (1_281_167, 39, 1.36),
}
"""Points, requests (0.003 % of them) and the speed-up that the paper gives, S = 20 and R = 50."""


def cells(quick: bool) -> list[dict[str, Any]]:
    simulated = [{"simulate": name, "trials": 500 if quick else 4000} for name in HEADLINES]
    grid = {"data": purchase(), "points": 20_000 if quick else 65_000, "epochs": 2 if quick else 4}
    shards, slices = ((1, 20), (1, 50)) if quick else (GRID_SHARDS, GRID_SLICES)
    real = [
        {**grid, "requests": REQUESTS, "shards": s, "slices": r, "batches": 2 if quick else 3}
        for s in shards
        for r in slices
    ]
    large = {"shards": 20, "slices": 50, "batches": 2 if quick else 6}
    second = best("svhn", digits())
    real += [
        {
            "data": purchase(),
            "points": 40_000 if quick else 130_000,
            "epochs": 2 if quick else 6,
            "requests": 8,
            **large,
        },
        {"data": second, "points": 10_000 if quick else 60_000, "epochs": 2 if quick else 6, "requests": 18, **large},
    ]
    return simulated + [{**one, "headline": one["points"] != grid["points"]} for one in real]


def measure(simulate: str = "", trials: int = 0, **real: Any) -> dict[str, Any]:
    return _simulate(simulate, trials) if simulate else _erase(**real)


def _simulate(name: str, trials: int) -> dict[str, Any]:
    points, requests, _ = HEADLINES[name]
    scheme = even_scheme(points, 20, 50)
    drawn = simulate(scheme, at_once(requests, trials), seed=7)
    left = scheme.from_scratch * (1 - requests / points)
    return {
        # The paper's figure for Purchase comes out with 0.003 % of its points, which is 7.5 requests and not 8.
        "formula": formula_speedup(points, 20, 50, 7.5 if name == "Purchase" else requests),
        "exact": exact_speedup(scheme, requests),
        "simulated": left / drawn.mean,
        "error": left / drawn.mean * drawn.error / drawn.mean,
    }


def _erase(
    data: str, points: int, epochs: int, requests: int, shards: int, slices: int, batches: int, headline: bool
) -> dict[str, Any]:
    held = load(data).flat().first(points)
    how: dict[str, Any] = {"backend": "mlp", "epochs": epochs, "seed": 1, "settings": MLP}
    random = np.random.Generator(np.random.PCG64(shards * 100 + slices))
    leaving = random.permutation(len(held.x))[: batches * requests].reshape(batches, requests).tolist()
    with store_with(held, 1, 1, 1) as alone, store_with(held, shards, slices, 1) as store:
        alone.train("m", dataset="d", **how)
        trained = store.train("m", dataset="d", **how)
        first = accuracy(store, "m", held)
        expected = planned(store, draws_of(random, len(held.x), requests, 100))
        erasures, scratch = [], []
        for number, batch in enumerate(leaving):
            # Batch K trains everything again; a few times are enough to know how long that takes.
            if number < 2:
                scratch.append(erase_and_build(alone, batch))
            erasures.append(erase_and_build(store, batch))
        return {
            "train_seconds": trained.seconds,
            "erasures": erasures,
            "batch_k": scratch,
            "expected_shares": expected,
            "sisa": first,
            "sisa_after": accuracy(store, "m", held),
            "batch_k_accuracy": accuracy(alone, "m", held),
            "simulated": _simulated_speedup(len(held.x), shards, slices, requests),
            "exact": exact_speedup(even_scheme(len(held.x), shards, slices), requests),
            "formula": formula_speedup(len(held.x), shards, slices, requests),
        }


def _simulated_speedup(points: int, shards: int, slices: int, requests: int) -> float:
    scheme = even_scheme(points, shards, slices)
    return scheme.from_scratch * (1 - requests / points) / simulate(scheme, at_once(requests, 2000), seed=7).mean


def findings(cells: Sequence[Cell]) -> Findings:
    claims = []
    for cell in cells:
        if "simulate" in cell.settings:
            claims.append(_simulated(cell))
    real = [cell for cell in cells if "simulate" not in cell.settings]
    for cell in real:
        if cell["headline"]:
            claims += _headline(cell)
    grid = [cell for cell in real if not cell["headline"]]
    if grid:
        claims += _grid(grid)
    columns = (
        "data",
        "S",
        "R",
        "K",
        "speed-up in samples, 100 draws",
        "simulated",
        "exact",
        "formula",
        "in CPU time, erased",
        "batch K took, s",
        "receipt after, s",
        "accuracy (batch K)",
    )
    rows = [_row(cell) for cell in real]
    tables = [Table("Erasures, against training everybody else again", columns, rows)] if rows else []
    simulated = [c for c in cells if "simulate" in c.settings]
    rows = [
        (
            c["simulate"],
            *HEADLINES[c["simulate"]],
            *(f"{c[k]:.2f}" for k in ("formula", "exact")),
            f"{c['simulated']:.2f} ± {2 * c['error']:.2f}",
        )
        for c in simulated
    ]
    columns = ("data", "points", "K", "published", "its formulas multiplied", "exact for a batch", "simulated")
    tables += [Table("The paper's headline points at full size, S = 20, R = 50", columns, rows)] if rows else []
    sizes = [
        f"{setup_of([c])}; {c['batches']} batches of {c['requests']} erased one after the other, one seed."
        for c in real
        if c["headline"]
    ]
    sizes += [f"Grid: {setup_of(grid)}; {c['batches']} batches of {c['requests']}." for c in grid[:1]]
    sizes.append("Batch K is unlearnd with S = R = 1, erased and built in turns with the other store, with one thread.")
    return Findings(claims, tables, sizes)


def _speedups(cell: Cell, clock: str = "build_cpu") -> tuple[float, float, float]:
    """Return how much less is trained again in samples (plans, then erasures), and in how much less time."""
    scratch, took = (float(np.mean([one[clock] for one in cell[side]])) for side in ("batch_k", "erasures"))
    real = float(np.mean([one["samples"] / one["from_scratch"] for one in cell["erasures"]]))
    return 1 / float(np.mean(cell["expected_shares"])), 1 / real, scratch / took


def _simulated(cell: Cell) -> Claim:
    name = cell["simulate"]
    points, requests, published = HEADLINES[name]
    close = abs(cell["simulated"] / published - 1)
    figures = [f"{cell[what]:.2f}×" for what in ("simulated", "exact", "formula")]
    ours = f"{figures[0]} simulated at full size, {figures[1]} exactly, {figures[2]} by its formulas"
    note = ""
    if close > 0.05:
        note = (
            f"The paper multiplies the batch formula for shards by the one-request formula for slices ({figures[2]}), "
            "which is too good where a shard is hit more than once; the exact value for the batch is the second figure."
        )
        if abs(cell["formula"] / published - 1) > 0.05:
            note = f"Its own formulas do not give what was published, but {cell['formula']:.2f}×."
    return Claim(
        f"{name}, K = {requests} of {points:,}: speed-up over training all again (within 5 %)",
        f"{published}×",
        ours,
        close <= 0.05,
        note,
    )


def _headline(cell: Cell) -> list[Claim]:
    samples, real, time = _speedups(cell)
    wall = _speedups(cell, "build_seconds")[2]
    published = {8: 4.63, 18: 2.45}[cell["requests"]]
    what = f"{short(title_of(cell['data']))}, {cell['points']:,} points, S = 20, R = 50, K = {cell['requests']}"
    receipts = [one["receipt_seconds"] for one in cell["erasures"]]
    asked = float(np.mean(receipts))
    scratch = float(np.median([one["build_seconds"] for one in cell["batch_k"]]))
    exact, left, whole = cell["exact"], cell["sisa_after"]["mean"], cell["batch_k_accuracy"]["mean"]
    return [
        Claim(
            f"Really erased, in samples ({what})",
            f"{published}×",
            f"{samples:.2f}× over 100 drawn batches, {real:.2f}× over {len(receipts)} erased; exact {exact:.2f}×",
            samples >= published,
            ""
            if samples >= published
            else f"The exact formula gives {exact:.2f}× here; the paper's product of two formulas is optimistic."
            if exact < published
            else f"On average over all batches it would be {exact:.2f}×; these were dearer.",
        ),
        Claim(
            f"Really erased, in time ({what})",
            f"{published}× (counted in samples)",
            f"{time:.2f}× in CPU time, {wall:.2f}× by the wall clock",
            time >= published,
        ),
        Claim(
            f"The price in accuracy ({what})",
            "less than 2 points",
            f"{whole - left:.2f} points ({left:.2f} % against {whole:.2f} % of batch K)",
            whole - left < 2,
        ),
        Claim(
            f"Beyond the paper: from request to receipt ({what})",
            "–",
            f"{asked:.2f} s; training all again took {scratch:.1f} s, {scratch / asked:.1f}× as long",
            asked < scratch,
        ),
    ]


def _grid(cells: Sequence[Cell]) -> list[Claim]:
    off = max(abs(_speedups(c)[0] / c["exact"] - 1) for c in cells)
    claims = [
        Claim(
            "Samples of drawn batches against the exact expectation, S × R grid (within 15 %)",
            "measured in samples only",
            f"{len(cells)} configurations, 100 draws each: at most {100 * off:.0f} % apart",
            off < 0.15,
        )
    ]
    sliced = [c for c in cells if c["slices"] > 1]
    pairs = [(c, base[0]) for c in sliced if (base := where(cells, shards=c["shards"], slices=1))]
    if pairs:
        gains = [_speedups(c)[0] / _speedups(base)[0] for c, base in pairs]
        ours = f"{min(gains):.2f}× to {max(gains):.2f}× less to train for R > 1 than for R = 1"
        claims.append(
            Claim(
                "Slicing always saves, by at most 1.5×", "1 … 1.5× (§ V)", ours, min(gains) > 0.99 and max(gains) <= 1.6
            )
        )
    # Of the very erasures that were timed, not of all that were drawn.
    ratio = {(c["shards"], c["slices"]): _speedups(c)[2] / _speedups(c)[1] for c in cells}
    (shards, slices), least = min(ratio.items(), key=lambda one: one[1])
    most = max(ratio.values())
    ours = f"CPU time is saved {least:.2f} to {most:.2f} times as much as samples; least at S = {shards}, R = {slices}"
    note = _where_time_goes(cells) if least < 0.9 else ""
    claims.append(
        Claim("Time follows samples: it shrinks as much as they do", "assumed (figure 3)", ours, least >= 0.9, note)
    )
    return claims


def _where_time_goes(cells: Sequence[Cell]) -> str:
    """Say what a sample and what a checkpoint costs, by least squares over all builds, and what that comes to."""
    builds = [one for cell in cells for side in ("batch_k", "erasures") for one in cell[side]]
    counts = np.array([(one["samples"], one["checkpoints"]) for one in builds], np.float64)
    took = np.array([one["build_cpu"] for one in builds])
    (sample, checkpoint), *_ = np.linalg.lstsq(counts, took, rcond=None)
    off = float(np.abs(counts @ (sample, checkpoint) / took - 1).mean())
    most = max(cells, key=lambda cell: cell["shards"] * cell["slices"])
    between = np.sum([one["samples"] for one in most["erasures"]]) / np.sum(
        [one["checkpoints"] for one in most["erasures"]]
    )
    return (
        f"A sample costs {1e6 * sample:.1f} µs of CPU and a checkpoint {1e3 * checkpoint:.1f} ms, whatever was trained "
        f"for it (least squares over {len(builds)} builds, {100 * off:.0f} % off on average). With S = "
        f"{most['shards']} and R = {most['slices']} there is a checkpoint for every {between:.0f} samples, which train "
        f"in {1e3 * sample * between:.1f} ms. `--keep` makes fewer."
    )


def _row(cell: Cell) -> tuple[Any, ...]:
    samples, _, time = _speedups(cell)
    receipts, half = mean_interval([one["receipt_seconds"] for one in cell["erasures"]])
    scratch = np.median([one["build_seconds"] for one in cell["batch_k"]])
    right = f"{cell['sisa_after']['mean']:.2f} % ({cell['batch_k_accuracy']['mean']:.2f} %)"
    counts = (short(title_of(cell["data"])), cell["shards"], cell["slices"], cell["requests"])
    return (
        *counts,
        f"{samples:.2f}×",
        f"{cell['simulated']:.2f}×" if "simulated" in cell.results else "–",
        f"{cell['exact']:.2f}×",
        f"{cell['formula']:.2f}×",
        f"{time:.2f}×",
        f"{scratch:.2f}",
        f"{receipts:.2f} ± {half:.2f}",
        right,
    )


def draw(cells: Sequence[Cell], figure: Any) -> None:
    grid = [cell for cell in cells if "simulate" not in cell.settings and not cell["headline"]]
    if not grid:
        return
    panels = figure.subplots(1, 2, sharey=True)
    for panel, index, title in ((panels[0], 0, "in samples (dashes: exact)"), (panels[1], 2, "in CPU time")):
        for colour, s in enumerate(distinct(grid, "shards")):
            row = sorted(where(grid, shards=s), key=lambda cell: cell["slices"])
            x = [cell["slices"] for cell in row]
            panel.plot(x, [_speedups(cell)[index] for cell in row], "o-", ms=3, color=COLOURS[colour], label=f"S = {s}")
            if index == 0:
                panel.plot(x, [cell["exact"] for cell in row], "--", lw=1, color=COLOURS[colour])
        panel.set(xlabel="slices, R", ylabel=f"speed-up over batch K, × (K = {grid[0]['requests']})")
        plain_ticks(panel, distinct(grid, "slices"))
        panel.set_title(f"{short(title_of(grid[0]['data']))}, {title}", fontsize=9)
        panel.legend(fontsize=7)
