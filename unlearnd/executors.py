"""Run build tasks: here, one after the other, or in fresh child processes.

The bits do not depend on it: a task opens the store by itself, and what it trains is a function of recipes. A
child gets its task as one line of JSON on standard input and answers in lines of JSON; it ends when its
input closes, so it never outlives a parent that was killed. Its numeric libraries are pinned to one thread
before they load.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from unlearnd import errors
from unlearnd.errors import BackendError, UnlearndError
from unlearnd.hookspecs import Progress, Task

Work = Callable[[Task, Callable[[Progress], None]], None]
Report = Callable[[Progress], None]

ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}


def run_serial(tasks: Sequence[Task], work: Work, report: Report, workers: int) -> None:
    """Run the tasks in this process, one after the other."""
    for task in tasks:
        work(task, report)


def run_processes(
    tasks: Sequence[Task], work: Work, report: Report, workers: int, *, python: Sequence[str] = (sys.executable,)
) -> None:
    """Run the tasks in up to `workers` fresh processes at a time.

    `python` is the command that runs Python, here or, behind that of a scheduler, elsewhere: as long as it passes
    input and output through and ends when its input closes.
    """
    waiting = list(tasks)
    failures: list[UnlearndError] = []
    children: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def attend() -> None:
        while True:
            with lock:
                if failures or not waiting:
                    return
                task = waiting.pop(0)
                child = _start(python)
                children.append(child)
            failure = _follow(child, task, report, lock)
            if failure is not None:
                with lock:
                    failures.append(failure)

    threads = [threading.Thread(target=attend, name="build worker") for _ in range(min(workers, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        for child in children:
            child.terminate()
        raise
    if failures:
        raise failures[0]


def write_task(task: Task) -> str:
    """Return a task as the line a worker reads."""
    return json.dumps(asdict(task))


def read_task(line: str) -> Task:
    """Return the task in a worker's first line of input."""
    given = json.loads(line)
    return Task(**{**given, "shards": tuple(given["shards"])})


def _start(python: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python, "-m", "unlearnd.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
        # A Ctrl-C at the terminal is for the parent, which then ends its children.
        start_new_session=True,
    )


def _follow(child: subprocess.Popen[str], task: Task, report: Report, lock: threading.Lock) -> UnlearndError | None:
    """Give a child its task, pass on what it says, and return what went wrong, if anything did."""
    assert child.stdin is not None
    assert child.stdout is not None
    said: UnlearndError | None = None
    with child:
        try:
            child.stdin.write(write_task(task) + "\n")
            child.stdin.flush()
            said = _listen(child.stdout, report, lock)
        except BrokenPipeError:
            pass
        finally:
            if child.poll() is None and said is None:
                child.wait()
    if said is not None or child.returncode == 0:
        return said
    how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    return BackendError(f"a build worker ended with {how}; `unlearnd build` goes on where it stopped")


def _listen(lines: IO[str], report: Report, lock: threading.Lock) -> UnlearndError | None:
    for line in lines:
        word = json.loads(line)
        if "error" in word:
            kind: type[UnlearndError] = getattr(errors, word["error"], UnlearndError)
            return kind(word["message"])
        if "done" in word:
            return None
        with lock:
            report(Progress(**word))
    return None
