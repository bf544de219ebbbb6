"""Softmax regression by mini-batch gradient descent, in numpy alone: the backend in the box.

For plain tabular data, and for trying everything out before installing a framework. Matrix products are
single-threaded sums in a fixed order (`einsum` without BLAS), so its bits depend on numpy's version alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unlearnd import __version__
from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, OnProgress, Points, Settings, State
from unlearnd.recipes import samples_at


class LinearSettings(BaseModel):
    """What can be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    batch_size: int = Field(default=32, ge=1)


class LinearBackend:
    """The backend `linear`."""

    name = "linear"
    version = __version__
    sliceable = True
    deterministic = True

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Fill in defaults; raise `InputError` naming the setting that cannot be used."""
        try:
            return LinearSettings.model_validate(dict(given)).model_dump()
        except ValidationError as error:
            first, known = error.errors()[0], ", ".join(sorted(LinearSettings.model_fields))
            name = first["loc"][0]
            if first["type"] == "extra_forbidden":
                raise InputError(f"backend 'linear' has no setting '{name}'; settings: {known}") from None
            raise InputError(f"backend 'linear' cannot use {name}={first['input']!r}: {first['msg'].lower()}") from None

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return zero weights: the problem is convex, nothing is gained by a random start."""
        width = int(np.prod(shape, dtype=np.int64))
        return {
            "weight": np.zeros((width, classes), np.float32),
            "bias": np.zeros(classes, np.float32),
            "momentum.weight": np.zeros((width, classes), np.float32),
            "momentum.bias": np.zeros(classes, np.float32),
            "input.mean": np.zeros(width, np.float32),
            "input.scale": np.ones(width, np.float32),
            "input.fitted": np.zeros((), np.int64),
        }

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state`."""
        s = LinearSettings.model_validate(dict(settings))
        state = {name: value.copy() for name, value in job.state.items()}
        _fit_input(state, job.points)
        left, epoch = samples_at(job.epochs, len(job.points.y)), 0
        while left:
            generator = np.random.Generator(np.random.PCG64(derive_seed(job.seed, epoch, "order")))
            order = generator.permutation(len(job.points.y))[:left]
            for start in range(0, len(order), s.batch_size):
                batch = order[start : start + s.batch_size]
                _step(state, s, _standardised(state, job.points.x[batch]), job.points.y[batch])
            on_progress(len(order))
            left, epoch = left - len(order), epoch + 1
        return state

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> "_Predictor":
        """Return the constituents ready to answer."""
        self.environment(device)
        return _Predictor(states)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return what changes bits here; raise for a device there is not."""
        if device not in ("auto", "cpu"):
            raise InputError(f"no device '{device}'; backend 'linear' has: auto, cpu")
        return {"numpy": np.__version__}


class _Predictor:
    def __init__(self, states: Sequence[State]) -> None:
        self._states = list(states)

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        return np.stack([_softmax(_standardised(s, x) @ s["weight"] + s["bias"]) for s in self._states])


def _fit_input(state: dict[str, NDArray[Any]], points: Points) -> None:
    """Fit mean and scale on the first points this constituent ever sees; they are part of its state."""
    if state["input.fitted"] or not len(points.y):
        return
    flat = points.x.reshape(len(points.y), -1).astype(np.float64)
    spread = flat.std(axis=0)
    state["input.mean"] = flat.mean(axis=0).astype(np.float32)
    state["input.scale"] = np.where(spread > 0, spread, 1).astype(np.float32)
    state["input.fitted"] = np.array(len(points.y), np.int64)


def _standardised(state: Mapping[str, NDArray[Any]], x: NDArray[Any]) -> NDArray[np.float32]:
    flat = x.reshape(len(x), len(state["input.mean"])).astype(np.float32)
    standard: NDArray[np.float32] = (flat - state["input.mean"]) / state["input.scale"]
    return standard


def _step(state: dict[str, NDArray[Any]], s: LinearSettings, x: NDArray[Any], y: NDArray[np.int64]) -> None:
    error = _softmax(np.einsum("ni,ic->nc", x, state["weight"]) + state["bias"])
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    gradients = {"weight": np.einsum("ni,nc->ic", x, error), "bias": error.sum(axis=0)}
    for name, gradient in gradients.items():
        velocity = state[f"momentum.{name}"]
        velocity *= np.float32(s.momentum)
        velocity += gradient + np.float32(s.weight_decay) * state[name]
        state[name] -= np.float32(s.lr) * velocity


def _softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = raised / raised.sum(axis=1, keepdims=True)
    return shares
