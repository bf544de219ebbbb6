"""Measure the cells that are missing, two at a time, and write down each as soon as it is done.

Workers are fresh processes with one thread each. An experiment that measures time has the machine to itself: its cells
run one after the other. A cell that fails is told and left out; the others go on, and the run ends with exit code 1.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.paper.cells import find_cell, forget_cells, read_experiment, save_cell, save_experiment
from benchmarks.paper.experiment import Cell, Settings, experiment
from benchmarks.paper.machine import Watch, describe_machine

_console = Console(stderr=True)


def run(names: Sequence[str], *, quick: bool, out: Path, work: Path, jobs: int, fresh: bool, command: str) -> int:
    """Measure what is missing of these experiments and save each as `out`/data/NAME.json; return how many cells failed.

    `work` is where finished cells are kept between runs.
    """
    if fresh:
        for name in names:
            forget_cells(work, name)
            # Else, of an experiment that fails as a whole, the report would show what an earlier run found.
            for path in (out / "data" / f"{name}.json", out / f"{name}.svg"):
                path.unlink(missing_ok=True)
    failed = 0
    if jobs:
        # Workers inherit this: numeric libraries read it when they are loaded.
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ProcessPoolExecutor(max(1, jobs), get_context("spawn"), _begin_worker) as pool:
        for at, name in enumerate(names, 1):
            what = f"{at}/{len(names)} {name}"
            failed += _run_one(pool, name, what, quick, out, work, jobs, command)
    return failed


def _run_one(
    pool: ProcessPoolExecutor, name: str, told: str, quick: bool, out: Path, work: Path, jobs: int, command: str
) -> int:
    what = experiment(name)
    wanted = what.cells(quick)
    missing = [settings for settings in wanted if find_cell(work, name, settings) is None]
    about = {"title": what.TITLE, "quick": quick, "command": f"{command} --only {name}", "machine": describe_machine()}
    document = out / "data" / f"{name}.json"
    # Of a run that goes on, also how its earlier parts went.
    earlier = read_experiment(document)[0] if document.exists() and len(missing) < len(wanted) else {}
    unknown = {"seconds": 0.0, "others": None} if len(missing) < len(wanted) else None
    watch = Watch(earlier.get("watch") or unknown)

    def save() -> None:
        found = [cell for settings in wanted if (cell := find_cell(work, name, settings)) is not None]
        if found:
            went = watch.so_far() if missing else earlier.get("watch")
            save_experiment(document, name, {**about, "watch": went}, found)

    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console, disable=not _console.is_terminal) as progress:
        task = progress.add_task(told, total=len(wanted), completed=len(wanted) - len(missing))
        for settings, outcome in _measured(pool, name, missing, min(1, jobs) if what.ALONE else jobs):
            progress.advance(task)
            if isinstance(outcome, BaseException):
                failed += 1
                _console.print(f"{name} {_brief(settings)}: {type(outcome).__name__}: {outcome}", style="red")
                continue
            save_cell(work, name, outcome)
            if not _console.is_terminal:
                _console.print(f"{told} {_brief(settings)}: {outcome.seconds:.1f} s", highlight=False, soft_wrap=True)
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
    begin, cpu = time.perf_counter(), _cpu()
    results = experiment(name).measure(**settings)
    return Cell(settings, results, time.perf_counter() - begin, _cpu() - cpu)


def _cpu() -> float:
    """Return CPU seconds of this process and of what it started and waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def _brief(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
