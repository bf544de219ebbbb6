"""How things are printed: tables and sentences for people, JSON for scripts, progress on standard error."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from unlearnd.build import BuildPlan, Watch
    from unlearnd.ledger.models import Build


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    listed = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    numbers = [bool(listed) and all(row[i][:1].isdigit() for row in listed) for i in range(len(columns))]
    for name, number in zip(columns, numbers, strict=True):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in listed:
        table.add_row(*row)
    # A pipe has no width to keep to; in a narrow terminal lines wrap, so that nothing is left out.
    Console(file=sys.stdout, highlight=False, width=400).print(table, crop=False, overflow="ignore")


def note(text: str) -> None:
    """Say something that is not the result."""
    click.echo(text, err=True)


def counted(count: int, noun: str) -> str:
    """Return `1 point`, `2 points`, `1,234 points`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def times(less: float) -> str:
    """Return a factor as a person would say it."""
    return f"{less:,.0f}×" if less >= 10 else f"{less:.1f}×"


def trained_sentence(builds: "Sequence[Build]", verb: str) -> str:
    """Return what builds cost, against training everything."""
    samples, scratch = sum(b.samples for b in builds), sum(b.from_scratch for b in builds)
    seconds = sum(b.seconds for b in builds)
    if damaged := sum(b.damaged for b in builds):
        verb = f"{counted(damaged, 'checkpoint')} damaged, or made from such, put away and made anew. {verb}"
    if not sum(b.checkpoints for b in builds):
        return "Nothing to train: every checkpoint is there."
    less = f" ({times(scratch / samples)} less than from scratch)" if 0 < samples < scratch else ""
    made = counted(sum(b.checkpoints for b in builds), "checkpoint")
    return f"{verb} {samples:,} of {scratch:,} samples{less} in {seconds:.1f} s; {made} saved."


def build_json(build: "Build") -> dict[str, Any]:
    """Return a build for a script."""
    return asdict(build)


@contextmanager
def watching(quiet: bool) -> "Iterator[Watch]":
    """Show how a build goes on standard error, where somebody looks at it."""
    from unlearnd.build import Watch

    if quiet or not sys.stderr.isatty():
        yield Watch()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield _bars(bar)


def _bars(bar: Any) -> "Watch":
    from unlearnd.build import Watch

    class Bars(Watch):
        """Draws two bars per model: samples trained, and checkpoints made."""

        def planned(self, model: str, plan: "BuildPlan") -> None:
            shards = len(plan.missing)
            self._samples = bar.add_task(f"{model}: samples", total=plan.samples, rate="")
            self._steps = bar.add_task(f"{counted(shards, 'shard')}, slices", total=plan.steps, rate="")

        def progressed(self, progress: Any) -> None:
            bar.advance(self._samples, progress.samples)
            bar.advance(self._steps, progress.steps)
            speed = bar.tasks[self._samples].speed
            if speed:
                bar.update(self._samples, rate=f"{speed:,.0f} samples/s")
            bar.update(self._steps, rate=f"slice {progress.slice}")

    return Bars()


@contextmanager
def counting(what: str, quiet: bool, unit: str = "points") -> "Iterator[Any]":
    """Yield a function to call with a number of rows, or of other units, as they go by."""
    if quiet or not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn(what + " {task.completed:,.0f} " + unit),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda rows: bar.advance(task, rows)
