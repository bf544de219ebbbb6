"""What an experiment is, and what it gives to the report.

An experiment is a module of this package, named in `EXPERIMENTS`, with the names that `Experiment` lists. To add one,
write the module and put its name there; the runner, the report and the plots find the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

EXPERIMENTS = (
    "linear_time",
    "sharding",
    "slicing",
    "both",
    "over_requests",
    "complex_tasks",
    "aware",
    "samples_per_class",
    "storage",
    "degraded",
    "households",
    "baseline",
    "membership",
)
"""Modules, in the order of the report. One that needs something which is not there may return no cells."""

Settings = Mapping[str, Any]
"""What a cell measures: values that JSON has."""


@dataclass(frozen=True)
class Cell:
    """A cell that has been measured."""

    settings: Settings
    results: Mapping[str, Any]
    seconds: float
    cpu: float = 0.0
    """CPU seconds of the worker and of what it started; 0 where that was not measured."""

    def __getitem__(self, name: str) -> Any:
        """Return a setting or, where there is none of that name, a result."""
        return self.settings[name] if name in self.settings else self.results[name]


@dataclass(frozen=True)
class Claim:
    """A row of the table: what somebody says, what was found, and whether that agrees."""

    claim: str
    paper: str
    """What the paper has; `–` where it has nothing."""
    ours: str
    holds: bool | None
    """None where there is nothing to agree with."""
    note: str = ""
    """Where it does not hold, or holds only in part; on what data it was measured instead."""


@dataclass(frozen=True)
class Table:
    """Figures in full, below the claims."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Findings:
    """What the report shows of an experiment."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    sizes: Sequence[str] = field(default_factory=tuple)
    """Sentences on data, sizes and settings, and on how they differ from the paper's."""


class Experiment(Protocol):
    """The names that the module of an experiment has."""

    TITLE: str
    FIGURES: str
    """Where it is in the paper; empty where the paper has nothing of the kind."""
    ALONE: bool
    """Whether it measures time, so that no other cell may run beside it."""

    def cells(self, quick: bool) -> list[dict[str, Any]]:
        """Return the settings of every cell, in the order to run them."""

    def measure(self, **settings: Any) -> dict[str, Any]:
        """Measure a cell; runs in a worker process with one thread."""

    def findings(self, cells: Sequence[Cell]) -> Findings:
        """Return what the report says of cells, of which some may be missing yet."""

    def draw(self, cells: Sequence[Cell], figure: Any) -> None:
        """Draw on an empty matplotlib figure."""


def experiment(name: str) -> Experiment:
    """Return the experiment of that name."""
    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment '{name}'; there are: {', '.join(EXPERIMENTS)}")
    module: Any = importlib.import_module(f"benchmarks.paper.{name}")
    return module  # type: ignore[no-any-return]
