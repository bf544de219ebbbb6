"""What the tests of the torch plugin share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The tests run from a clone too, before the plugin is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from unlearnd.hookspecs import Job, Points

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job() -> MakeJob:
    """Return a function that makes a job of random points from the backend's initial state."""

    def make(
        backend: Any,
        settings: Mapping[str, Any],
        *,
        n: int = 90,
        shape: tuple[int, ...] = (20,),
        classes: int = 3,
        epochs: Fraction = Fraction(2),
        seed: int = 1,
        dtype: type = np.float32,
    ) -> Job:
        random = np.random.default_rng(seed)
        x = (random.standard_normal((n, *shape)) * 40 + 120).clip(0, 255).astype(dtype)
        y = random.integers(0, classes, n)
        x.flags.writeable = y.flags.writeable = False
        state = backend.initial_state(settings, shape, classes, seed)
        return Job(state=state, points=Points(x=x, y=y), epochs=epochs, seed=seed)

    return make


@pytest.fixture
def same() -> Callable[[Mapping[str, Any], Mapping[str, Any]], bool]:
    """Return a function that says whether two states are equal to the bit."""

    def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        assert one.keys() == other.keys()
        return all(
            one[name].dtype == other[name].dtype
            and one[name].shape == other[name].shape
            and one[name].tobytes() == other[name].tobytes()
            for name in one
        )

    return compare


@pytest.fixture
def shifted() -> Callable[[Job, int], Job]:
    """Return a function that moves a job's points and state to addresses that many bytes off."""

    def shift(array: Any, by: int) -> Any:
        memory = np.zeros(array.nbytes + 64 + by, np.uint8)
        start = -memory.ctypes.data % 64 + by
        moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        moved[...] = array
        return moved

    def shift_job(job: Job, by: int) -> Job:
        state = {name: shift(array, by) for name, array in job.state.items()}
        return Job(state, Points(shift(job.points.x, by), shift(job.points.y, by)), job.epochs, job.seed)

    return shift_job


@pytest.fixture(autouse=True)
def _threads_are_left_alone() -> Iterator[None]:
    import torch

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    assert before == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
