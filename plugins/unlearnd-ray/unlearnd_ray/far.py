"""The other end: a task at work in a process of Ray's, somewhere in the cluster.

Ray keeps such a process for the tasks that follow, so libraries are loaded once. The work is done in a thread of
its own and the process's main thread tells how it goes, a few times a second.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

from unlearnd.config import Config
from unlearnd.errors import UnlearndError
from unlearnd.hookspecs import Progress, Task

_SAY_EVERY = 0.2

_Words = queue.SimpleQueue[Progress | BaseException | None]
"""Progress; at the end None, or what went wrong."""


def work_far(sheet: str) -> Iterator[str]:
    """Carry out the task on a sheet, and say how it goes as lines of JSON; the last has `done` or `error`."""
    words: _Words = queue.SimpleQueue()
    threading.Thread(target=_work, args=(sheet, words), name="build", daemon=True).start()
    while True:
        progress, ended, end = _gather(words)
        said: dict[str, object] = {"progress": [asdict(word) for word in progress]}
        if isinstance(end, UnlearndError):
            said |= {"error": type(end).__name__, "message": str(end)}
        elif end is not None:
            raise end
        elif ended:
            said["done"] = True
        yield json.dumps(said)
        if ended:
            return


def _work(sheet: str, words: _Words) -> None:
    from unlearnd.worker import work  # heavy

    given = json.loads(sheet)
    try:
        task = Task(**{**given["task"], "shards": tuple(given["task"]["shards"])})
        work(Config(**given["config"]), task, words.put)
    except BaseException as failure:
        words.put(failure)
    else:
        words.put(None)


def _gather(words: _Words) -> tuple[list[Progress], bool, BaseException | None]:
    """Return what is said in a moment, added up by shard and slice; whether it is the end; what went wrong."""
    told: dict[tuple[int, int], Progress] = {}
    word = words.get()
    until = time.monotonic() + _SAY_EVERY
    while isinstance(word, Progress):
        before = told.get((word.shard, word.slice), Progress(word.shard, word.slice, 0))
        told[word.shard, word.slice] = Progress(
            word.shard, word.slice, before.samples + word.samples, before.steps + word.steps
        )
        try:
            word = words.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return list(told.values()), False, None
    return list(told.values()), True, word
