"""The executor `ray`: a build's shards are trained on a Ray cluster, one Ray task each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unlearnd import hookimpl
from unlearnd.hookspecs import Executor, Progress, Task

__all__ = ["run_ray"]


class RayExecutor:
    """Runs tasks on a Ray cluster."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise `InputError` unless `[executor]` says what Ray can be told."""
        from unlearnd_ray.settings import check_settings  # heavy: pydantic

        check_settings(settings)

    def __call__(
        self,
        tasks: Sequence[Task],
        work: Callable[[Task, Callable[[Progress], None]], None],
        report: Callable[[Progress], None],
        workers: int,
    ) -> None:
        """Run the tasks on a Ray cluster; more than one worker is the most that run at a time."""
        from unlearnd_ray.driving import drive  # heavy: ray, pydantic

        drive(tasks, report, workers)


run_ray = RayExecutor()


@hookimpl
def register_executors(register: Callable[[str, Executor], None]) -> None:
    register("ray", run_ray)
