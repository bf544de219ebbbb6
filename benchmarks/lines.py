"""A line of a benchmark, and how two things are measured side by side.

The machine may be busy with other things, so a line is a ratio of two measurements taken in turns in one run,
never a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    name: str
    ratio: float
    bar: str
    """What the ratio should be, as text; empty when the line only reports."""
    holds: bool | None
    """Whether it is; None when the line only reports."""
    detail: dict[str, float | str] = field(default_factory=dict)


def seconds_in_turns(repeats: int, *works: Callable[[], object], warm_up: bool = True) -> list[float]:
    """Run the works in turns, once unmeasured unless they are warm, then `repeats` times; return the best seconds."""
    best = [float("inf")] * len(works)
    for turn in range(0 if warm_up else 1, repeats + 1):
        for place, work in enumerate(works):
            begin = time.perf_counter()
            work()
            took = time.perf_counter() - begin
            if turn:
                best[place] = min(best[place], took)
    return best
