"""The executor `ray`: a build's shards are trained on a Ray cluster, one Ray task each."""

from collections.abc import Callable, Sequence

from unlearnd import hookimpl
from unlearnd.hookspecs import Executor, Progress, Task

__all__ = ["run_ray"]


@hookimpl
def register_executors(register: Callable[[str, Executor], None]) -> None:
    register("ray", run_ray)


def run_ray(
    tasks: Sequence[Task],
    work: Callable[[Task, Callable[[Progress], None]], None],
    report: Callable[[Progress], None],
    workers: int,
) -> None:
    """Run the tasks on a Ray cluster; more than one worker is the most that run at a time."""
    from unlearnd_ray.driving import drive  # heavy: ray, pydantic

    drive(tasks, report, workers)
