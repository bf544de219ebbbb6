"""What a build asks of a backend before it trains: whether it can begin at all, and on which devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from unlearnd.default_plugins.linear import LinearBackend
from unlearnd.errors import BackendError, InputError, NotFoundError
from unlearnd.hookspecs import State, Task


class Tables(LinearBackend):
    """Takes tables of whole numbers only, has two devices, and in time a new setting."""

    name = "tables"
    seen: Sequence[str] = ()
    more: Mapping[str, object] = {}

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        known = {name: value for name, value in given.items() if name not in self.more}
        return {**super().settings(known), **self.more}

    def initial_state(self, settings: Mapping[str, Any], shape: tuple[int, ...], classes: int, seed: int) -> State:
        if len(shape) != 1:
            raise InputError(f"points of shape {shape} are no rows of a table")
        if shape[0] == 7:
            raise ZeroDivisionError("seven")
        return super().initial_state({k: v for k, v in settings.items() if k not in self.more}, shape, classes, seed)

    def train(self, settings: Mapping[str, Any], job: Any, device: str, on_progress: Any) -> State:
        return super().train({k: v for k, v in settings.items() if k not in self.more}, job, "cpu", on_progress)

    def environment(self, device: str) -> Mapping[str, str]:
        return super().environment("cpu")

    def devices(self, device: str) -> Sequence[str]:
        return ["one", "two"] if device == "auto" else [device]


@pytest.fixture
def tables() -> Tables:
    return Tables()


@pytest.fixture
def store(new_store: Callable[..., Any], tables: Tables) -> Any:
    """A store that knows `tables`, and an executor that tells what it is asked to run."""
    store = new_store()
    tasks: list[Task] = []

    def note(given: Sequence[Task], work: Any, report: Any, workers: int) -> None:
        tasks.extend(given)
        for task in given:
            work(task, report)

    store.plugins = replace(
        store.plugins,
        backends={**store.plugins.backends, "tables": tables},
        executors={**store.plugins.executors, "noting": note, "processes": note},
    )
    store.tasks = tasks
    return store


def test_workers_take_the_devices_of_a_backend_in_turn(store: Any, people: Any, add: Any, fit: Any) -> None:
    add(store, people(), shards=3)
    fit(store, "tables", executor="noting", workers=3)
    assert [task.device for task in store.tasks] == ["one", "two", "one"]
    store.tasks.clear()
    store.train("n", dataset="d", backend="tables", device="cpu", executor="noting", workers=2)
    assert {task.device for task in store.tasks} == {"cpu"}


def test_where_nobody_says_how_many_workers_every_device_gets_one(
    store: Any, people: Any, add: Any, fit: Any, digests: Any
) -> None:
    add(store, people(), shards=3)
    fit(store, "tables")
    assert [task.device for task in store.tasks] == ["one", "two"]
    assert sorted(shard for task in store.tasks for shard in task.shards) == [1, 2, 3]
    store.tasks.clear()
    store.train("n", dataset="d", backend="tables", executor="serial")
    assert store.tasks == []


def test_a_backend_without_a_word_about_devices_has_the_one_that_was_named(
    store: Any, people: Any, add: Any, fit: Any
) -> None:
    add(store, people())
    fit(store, "linear", executor="noting", workers=2, device="cpu")
    assert [task.device for task in store.tasks] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((2, 3), InputError, r"points of shape \(2, 3\) are no rows"),
        ((7,), BackendError, "backend 'tables' cannot begin: ZeroDivisionError: seven"),
    ],
)
def test_points_that_a_backend_cannot_take_leave_no_model_behind(
    shape: tuple[int, ...], error: type[Exception], message: str, store: Any
) -> None:
    store.ingest("d", np.zeros((6, *shape), np.float32), user=np.arange(6), label=np.arange(6) % 2, shards=1, slices=1)
    with pytest.raises(error, match=message):
        store.train("m", dataset="d", backend="tables")
    assert store.status().models == ()
    with pytest.raises(NotFoundError):
        store.seed_of("m")


def test_a_model_declared_before_its_backend_had_a_setting_is_the_same_model(
    store: Any, tables: Tables, people: Any, add: Any, fit: Any
) -> None:
    add(store, people())
    fit(store, "tables", settings={"lr": 0.2})
    before = {c.recipe for c in store.checkpoints("m")}
    tables.more = {"clip": 0}
    assert fit(store, "tables", settings={"lr": 0.2}).checkpoints == 0
    assert {c.recipe for c in store.checkpoints("m")} == before
