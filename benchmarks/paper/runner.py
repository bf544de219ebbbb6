"""Measure the cells that are missing, two at a time, and write down each as soon as it is done.

Workers are fresh processes with one thread each. An experiment that measures time has the machine to itself: its cells
run one after the other. A cell that fails is told and left out; the others go on, and the run ends with exit code 1.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.paper.cells import find_cell, forget_cells, read_experiment, save_cell, save_experiment
from benchmarks.paper.experiment import Cell, Settings, experiment

_console = Console(stderr=True)


def run(names: Sequence[str], *, quick: bool, out: Path, work: Path, jobs: int, fresh: bool, command: str) -> int:
    """Measure what is missing of these experiments and save each as `out`/data/NAME.json; return how many cells failed.

    `work` is where finished cells are kept between runs.
    """
    if fresh:
        for name in names:
            forget_cells(work, name)
    failed = 0
    if jobs:
        # Workers inherit this: numeric libraries read it when they are loaded.
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ProcessPoolExecutor(max(1, jobs), get_context("spawn"), _begin_worker) as pool:
        for name in names:
            failed += _run_one(pool, name, quick, out, work, jobs, command)
    return failed


def _run_one(pool: ProcessPoolExecutor, name: str, quick: bool, out: Path, work: Path, jobs: int, command: str) -> int:
    what = experiment(name)
    wanted = what.cells(quick)
    missing = [settings for settings in wanted if find_cell(work, name, settings) is None]
    about = {"title": what.TITLE, "quick": quick, "command": f"{command} --only {name}", "machine": _machine()}
    document = out / "data" / f"{name}.json"
    # Of a run that goes on, also the load of its earlier parts.
    loads = [read_experiment(document)[0].get("load")] if document.exists() and len(missing) < len(wanted) else []
    loads = [load for load in loads if load is not None]

    def save() -> None:
        found = [cell for settings in wanted if (cell := find_cell(work, name, settings)) is not None]
        if found:
            now = [os.getloadavg()[1]] if missing or not loads else []
            save_experiment(document, name, {**about, "load": max(loads + now)}, found)

    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console, disable=not _console.is_terminal) as progress:
        task = progress.add_task(name, total=len(wanted), completed=len(wanted) - len(missing))
        for settings, outcome in _measured(pool, name, missing, min(1, jobs) if what.ALONE else jobs):
            progress.advance(task)
            if isinstance(outcome, BaseException):
                failed += 1
                _console.print(f"{name} {_brief(settings)}: {type(outcome).__name__}: {outcome}", style="red")
                continue
            save_cell(work, name, outcome)
            if not _console.is_terminal:
                _console.print(f"{name} {_brief(settings)}: {outcome.seconds:.1f} s", highlight=False, soft_wrap=True)
            save()
    save()
    return failed


def _measured(pool: ProcessPoolExecutor, name: str, missing: Sequence[Settings], at_once: int) -> Any:
    """Yield (settings, what was found or what went wrong) as cells end, at most `at_once` running; 0 runs them here."""
    if at_once == 0:
        yield from ((settings, measure(name, settings)) for settings in missing)
        return
    waiting = list(reversed(missing))
    running: dict[Future[Cell], Settings] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            settings = waiting.pop()
            running[pool.submit(measure, name, settings)] = settings
        done = next(as_completed(running))
        settings = running.pop(done)
        problem = done.exception()
        if isinstance(problem, BrokenProcessPool):
            raise SystemExit(
                f"a worker died while it measured {name} {_brief(settings)}; run again to go on from there"
            )
        yield settings, problem or done.result()


def _begin_worker() -> None:
    """Let Ctrl-C end a worker without a word: what it was measuring is measured again by the next run.

    So it is when the run was killed: a worker that went on would measure for nobody, and slow down the next run.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    run = parent_process()
    if run is not None:
        run.join()
        os._exit(1)


def measure(name: str, settings: Settings) -> Cell:
    """Measure one cell, in this process."""
    begin = time.perf_counter()
    results = experiment(name).measure(**settings)
    return Cell(settings, results, time.perf_counter() - begin)


def _brief(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _machine() -> dict[str, Any]:
    names = ("unlearnd", "unlearnd-torch", "torch", "numpy")
    versions = {name: version(name) for name in names}
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": sys.version.split()[0], **versions}
