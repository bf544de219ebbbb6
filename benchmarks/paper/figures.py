"""Numbers as the report says them: means with intervals, fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import title_of
from benchmarks.paper.experiment import Cell

COLOURS = ("#0b3c5d", "#328cc1", "#3a9d5d", "#d9a21b", "#c8553d", "#7b4b94", "#888888")
# Student's t for 95 % and n - 1 degrees of freedom, by n.
_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 20: 2.093}


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval; 0 where there is one value only."""
    held = np.asarray(list(values), np.float64)
    if len(held) < 2:
        return float(held.mean()), 0.0
    t = _T.get(len(held)) or next((t for n, t in sorted(_T.items(), reverse=True) if n <= len(held)), 1.96)
    return float(held.mean()), float(t * held.std(ddof=1) / np.sqrt(len(held)))


def plus_minus(values: Iterable[float], digits: int = 1, unit: str = "", sign: str = "") -> str:
    """Return values as `mean ± half-width of the 95 % interval`, and one value alone as it is."""
    held = list(values)
    mean, half = mean_interval(held)
    return f"{mean:{sign}.{digits}f}{f' ± {half:.{digits}f}' if len(held) > 1 else ''}{unit}"


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Return intercept, slope and R² of the line through points by least squares."""
    along, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(along, up, 1)
    left = ((up - intercept - slope * along) ** 2).sum()
    return float(intercept), float(slope), float(1 - left / ((up - up.mean()) ** 2).sum())


def where(cells: Sequence[Cell], **settings: Any) -> list[Cell]:
    """Return the cells with these settings."""
    return [cell for cell in cells if all(cell.settings.get(name) == value for name, value in settings.items())]


def distinct(cells: Sequence[Cell], name: str) -> list[Any]:
    """Return the values that a setting has, in the order in which they first come."""
    return list(dict.fromkeys(cell.settings[name] for cell in cells if name in cell.settings))


def values_of(cells: Sequence[Cell], *path: str) -> list[float]:
    """Return one figure of each cell, named by the way to it: `values_of(cells, "sisa", "mean")`."""
    found = []
    for cell in cells:
        value: Any = cell.results
        for name in path:
            value = value[name]
        found.append(float(value))
    return found


def apart(
    cells: Sequence[Cell], this: tuple[str, ...], other: tuple[str, ...], others: Sequence[Cell] | None = None
) -> list[float]:
    """Return, seed by seed, one figure less another: of the same cell, or of the one among `others` with its seed."""
    pairs = [(cell, cell) for cell in cells]
    if others is not None:
        pairs = [(cell, found[0]) for cell in cells if (found := where(others, seed=cell.settings["seed"]))]
    return [values_of([a], *this)[0] - values_of([b], *other)[0] for a, b in pairs]


def plain_ticks(panel: Any, values: Iterable[float]) -> None:
    """Mark these values on a logarithmic axis, as the numbers that they are and no others."""
    marked = sorted(set(values))
    panel.set_xscale("log")
    panel.set_xticks(marked, [f"{value:,.0f}" for value in marked])
    panel.minorticks_off()


def short(title: str) -> str:
    """Return a title without what stands in brackets; what is SYNTHETIC goes on saying so."""
    return title.split(" (")[0]


def seeds_of(cells: Sequence[Cell]) -> str:
    """Return with how many seeds cells were measured, and what a seed decides."""
    seeds = len(distinct(cells, "seed"))
    return f"{seeds} seeds (placement and weights)" if seeds > 1 else "one seed"


def setup_of(cells: Sequence[Cell]) -> str:
    """Return what cells of one data set have in common: data, points, S, R, e′ and how many seeds."""
    given = cells[0].settings
    words = [f"{given['points']:,} points"] if "points" in given else []
    for name, sign in (("shards", "S"), ("slices", "R"), ("epochs", "e′")):
        if len({str(cell.settings.get(name)) for cell in cells}) == 1 and isinstance(given.get(name), int):
            words.append(f"{sign} = {given[name]}")
    words += [seeds_of(cells)] if distinct(cells, "seed") else []
    return f"{title_of(given['data'])}: {', '.join(words)}"
