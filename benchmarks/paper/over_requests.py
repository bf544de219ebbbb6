"""What a batch of K requests trains again, K from 1 to 500: drawn at random as in the paper, at its sizes, and exactly.

Nothing is trained here. That erasures in a store train what these figures say is measured by `sharding` and `both`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, plain_ticks, where
from unlearnd.costs import at_once, even_scheme, expected_batch, simulate

TITLE = "What a batch costs, by the number of requests"
FIGURES = "figures 11 and 12"
ALONE = False
SIZES = {"Purchase": 250_000, "SVHN": 604_833}
REQUESTS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
SHARDS, SLICES = (1, 2, 5, 10, 20, 50, 100), (1, 2, 4, 8, 16, 32, 48)
BOTH = 20
"""Slices in figure 11."""


def cells(quick: bool) -> list[dict[str, Any]]:
    forms = [(s, BOTH) for s in SHARDS] + [(s, 1) for s in SHARDS] + [(1, r) for r in SLICES if r > 1]
    trials = 20 if quick else 100
    return [{"simulate": name, "shards": s, "slices": r, "trials": trials} for name in SIZES for s, r in forms]


def measure(simulate: str, shards: int, slices: int, trials: int) -> dict[str, Any]:
    """Return by K the share of all samples that a batch trains again: its mean over draws, the error of that, exact."""
    scheme = even_scheme(SIZES[simulate], shards, slices)
    found: dict[str, Any] = {"requests": list(REQUESTS), "mean": [], "error": [], "exact": []}
    for k in REQUESTS:
        drawn = _draw(scheme, k, trials)
        found["mean"].append(drawn.mean / scheme.from_scratch)
        found["error"].append(drawn.error / scheme.from_scratch)
        found["exact"].append(expected_batch(scheme, k) / scheme.from_scratch)
    return found


def _draw(scheme: Any, requests: int, trials: int) -> Any:
    return simulate(scheme, at_once(requests, trials), seed=requests)


def findings(cells: Sequence[Cell]) -> Findings:
    claims, tables = [], []
    for name in distinct(cells, "simulate"):
        of_data = where(cells, simulate=name)
        tables.append(_table(name, of_data))
        claims += _claims(name, of_data)
    if cells:
        worst = max(abs(m - e) for cell in cells for m, e in zip(cell["mean"], cell["exact"], strict=True))
        ours = f"{len(cells)} configurations, K = 1 … 500: at most {100 * worst:.1f} points of 100 % apart"
        what = "The simulation agrees with the exact expectation (within 5 points)"
        claims.append(Claim(what, "100 repeats, no formula for both", ours, worst < 0.05))
    trials = cells[0]["trials"] if cells else 0
    sizes = [
        f"The paper's sizes ({', '.join(f'{name} {size:,}' for name, size in SIZES.items())}), shards and slices of "
        f"equal size, requests drawn evenly, {trials} times for every K. Nothing was trained for this.",
    ]
    return Findings(claims, tables, sizes)


def _share(cells: Sequence[Cell], shards: int, slices: int, requests: int) -> float | None:
    found = where(cells, shards=shards, slices=slices)
    return 100 * float(found[0]["mean"][REQUESTS.index(requests)]) if found else None


def _claims(name: str, cells: Sequence[Cell]) -> list[Claim]:
    claims = []
    paper = "noticeably better below some number of requests, then as the baseline (figures 11 and 12)"
    for what, shards, slices in (
        (f"Shards and slices save while requests are few, then cost as much as batch K ({name})", 20, BOTH),
        (f"… shards alone ({name})", 20, 1),
        (f"… slices alone ({name})", 1, 16),
    ):
        few, some, many = (_share(cells, shards, slices, k) for k in (1, 20, 500))
        if few is not None and some is not None and many is not None:
            ours = (
                f"S = {shards}, R = {slices}: {few:.1f} % of all samples for K = 1, {some:.1f} % for K = 20, "
                f"{many:.1f} % for K = 500"
            )
            claims.append(Claim(what, paper, ours, few < 80 and many > 95 and few < some < many))
    return claims


def _table(name: str, cells: Sequence[Cell]) -> Table:
    rows = [
        (cell["shards"], cell["slices"], *(f"{100 * share:.1f} %" for share in cell["mean"]))
        for cell in sorted(cells, key=lambda cell: (cell["slices"], cell["shards"]))
    ]
    columns = ("S", "R", *(f"K = {k}" for k in REQUESTS))
    return Table(f"{name}, {SIZES[name]:,} points: share of all samples trained again", columns, rows)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panels = figure.subplots(1, 4)
    kinds = (
        ("SVHN", f"figure 11, SVHN, R = {BOTH}", "S", lambda cell: cell["slices"] == BOTH),
        ("Purchase", f"figure 11, Purchase, R = {BOTH}", "S", lambda cell: cell["slices"] == BOTH),
        ("Purchase", "figure 12, Purchase, R = 1", "S", lambda cell: cell["slices"] == 1),
        ("Purchase", "figure 12, Purchase, S = 1", "R", lambda cell: cell["shards"] == 1 and cell["slices"] != BOTH),
    )
    for panel, (name, title, sign, belongs) in zip(panels, kinds, strict=True):
        lines = [cell for cell in where(cells, simulate=name) if belongs(cell)]
        for cell, colour in zip(lines, COLOURS, strict=False):
            count = cell["shards" if sign == "S" else "slices"]
            means, errors = ([100 * value for value in cell[what]] for what in ("mean", "error"))
            panel.errorbar(cell["requests"], means, [2 * e for e in errors], fmt="o-", ms=2, lw=1, capsize=1,
                           color=colour, label=f"{sign} = {count}")  # fmt: skip
        # Slices alone save a third at most, which a logarithmic axis would hide.
        panel.set(yscale="log" if sign == "S" else "linear", xlabel="requests in a batch, K")
        plain_ticks(panel, (1, 5, 20, 100, 500))
        panel.set_title(title, fontsize=8)
        panel.legend(fontsize=6)
    panels[0].set_ylabel("share trained again, %")
