"""Have a build's tasks done by Ray, hear how they go, and begin again what was lost.

What travels is text: the store's settings and a task one way, words of progress the other. Points and states never
do; a worker reads and writes storage and ledger itself. Settings hold no secret and keys stay where they are, so
nothing in Ray's object store or its logs is worth stealing. A task that is lost with its worker or its node is
begun again wherever there is room, and goes on at the last checkpoint that was entered.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unlearnd import errors
from unlearnd.config import Config, read_config
from unlearnd.errors import BackendError, UnlearndError
from unlearnd.executors import ONE_THREAD
from unlearnd.hookspecs import Progress, Task
from unlearnd_ray.cluster import Room, check_reach, connect
from unlearnd_ray.far import work_far
from unlearnd_ray.settings import RaySettings, check_settings

_LOOK_EVERY = 0.5


@dataclass(frozen=True)
class _Try:
    """A task, and how often it was lost."""

    task: Task
    lost: int = 0


def drive(tasks: Sequence[Task], report: Callable[[Progress], None], workers: int) -> None:
    """Run every task to its end; raise what the first failing one raised."""
    folder = Path(tasks[0].store)
    config = read_config(folder).seen_from(folder)
    settings = check_settings(config.executor_options)
    ray = connect(settings)
    check_reach(ray, config)
    room = Room(ray, settings)
    start = _starter(ray, config, settings)
    waiting = deque(_Try(task) for task in _cut(tasks, settings))
    most = workers if workers > 1 else len(waiting)
    running: dict[Any, _Try] = {}
    try:
        while waiting or running:
            room.check()
            while waiting and len(running) < most:
                attempt = waiting.popleft()
                running[start(attempt.task)] = attempt
            for stream in _ready(ray, list(running)):
                ended = _hear(ray, stream, running[stream], settings.retries, report)
                if ended is not None:
                    del running[stream]
                    waiting.extendleft(ended)
    except BaseException:
        for stream in running:
            # What is entered stays; a slice half trained is trained again.
            ray.cancel(stream, force=True)
        raise


def _starter(ray: Any, config: Config, settings: RaySettings) -> Callable[[Task], Any]:
    """Return the function that hands a task to Ray and returns the stream of what it says."""
    said = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus, "resources": settings.resources}
    # Ray's own retries would mix the words of two attempts into one stream.
    far = ray.remote(num_returns="streaming", max_retries=0, runtime_env={"env_vars": ONE_THREAD}, **said)(work_far)
    about = asdict(config)

    def start(task: Task) -> Any:
        return far.remote(json.dumps({"config": about, "task": asdict(task)}))

    return start


def _cut(tasks: Sequence[Task], settings: RaySettings) -> list[Task]:
    """Return tasks of as many shards as are to be built together, in the order in which they were given."""
    found = []
    for task in tasks:
        # Ray shows a task the GPUs that it was given and no others, counted from 0.
        device = "cuda" if settings.num_gpus and task.device.startswith("cuda:") else task.device
        for first in range(0, len(task.shards), settings.shards):
            found.append(replace(task, shards=task.shards[first : first + settings.shards], device=device))
    return found


def _ready(ray: Any, streams: list[Any]) -> list[Any]:
    """Wait for a while until something was said; return all streams that have something to say."""
    first, _ = ray.wait(streams, num_returns=1, timeout=_LOOK_EVERY, fetch_local=False)
    if not first:
        return []
    ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
    return list(ready)


def _hear(ray: Any, stream: Any, attempt: _Try, retries: int, report: Callable[[Progress], None]) -> list[_Try] | None:
    """Pass on what a task says. Return None while it goes on, and once it has ended what is to be done again."""
    try:
        said = json.loads(ray.get(next(stream)))
    except ray.exceptions.RayTaskError as error:
        cause = " ".join(str(error.cause).split())
        raise BackendError(f"a build task on Ray failed: {type(error.cause).__name__}: {cause}") from error
    except (ray.exceptions.RayError, StopIteration) as error:
        if attempt.lost >= retries:
            often = f"{attempt.lost + 1} times, the last time " if attempt.lost else ""
            raise BackendError(
                f"a build task on Ray was lost {often}with {type(error).__name__}; `unlearnd build` goes on where it "
                "stopped"
            ) from error
        return [_Try(attempt.task, attempt.lost + 1)]
    for word in said["progress"]:
        report(Progress(**word))
    if "error" in said:
        kind: type[UnlearndError] = getattr(errors, said["error"], UnlearndError)
        raise kind(said["message"])
    return [] if "done" in said else None
