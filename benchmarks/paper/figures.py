"""Numbers as the report says them: means with intervals, fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

# Student's t for 95 % and n - 1 degrees of freedom, by n.
_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 20: 2.093}


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval; 0 where there is one value only."""
    held = np.asarray(list(values), np.float64)
    if len(held) < 2:
        return float(held.mean()), 0.0
    t = _T.get(len(held)) or next((t for n, t in sorted(_T.items(), reverse=True) if n <= len(held)), 1.96)
    return float(held.mean()), float(t * held.std(ddof=1) / np.sqrt(len(held)))


def plus_minus(values: Iterable[float], digits: int = 1, unit: str = "") -> str:
    """Return values as `mean ± half-width of the 95 % interval`."""
    mean, half = mean_interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}{unit}"


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Return intercept, slope and R² of the line through points by least squares."""
    along, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(along, up, 1)
    left = ((up - intercept - slope * along) ** 2).sum()
    return float(intercept), float(slope), float(1 - left / ((up - up.mean()) ** 2).sum())
