"""Softmax regression in numpy, as a backend for unlearnd."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unlearnd import Backend, Job, hookimpl
from unlearnd.errors import InputError


class ExampleSettings(BaseModel):
    """What can be set, with defaults and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(0.1, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.9, ge=0, lt=1)
    batch_size: int = Field(16, ge=1)


class ExampleBackend:
    """The backend `example`. Raise `version` whenever the same points would give other weights."""

    name = "example"
    version = "1"
    sliceable = True
    deterministic = True

    def settings(self, given: Mapping[str, object]) -> Mapping[str, Any]:
        """Check what was set and fill in the defaults."""
        try:
            return ExampleSettings.model_validate(dict(given)).model_dump()
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"backend '{self.name}', setting '{first['loc'][0]}': {first['msg'].lower()}") from None

    def initial_state(
        self, settings: Mapping[str, Any], shape: tuple[int, ...], classes: int, seed: int
    ) -> Mapping[str, Any]:
        """Return the state before the first slice."""
        width = math.prod(shape)
        return {
            "weight": np.zeros((width + 1, classes), np.float32),
            "velocity": np.zeros((width + 1, classes), np.float32),
            "mean": np.zeros(width, np.float32),
            "scale": np.ones(width, np.float32),
            "seen": np.zeros(1, np.int64),
        }

    def train(
        self, settings: Mapping[str, Any], job: Job, device: str, on_progress: Callable[[int], None]
    ) -> Mapping[str, Any]:
        """Return the state after a slice."""
        state, y = dict(job.state), job.points.y
        if not len(y):
            return state
        if not state["seen"][0]:
            state["mean"], state["scale"] = fit_scaling(job.points.x)
        x = prepare(state, job.points.x)
        left, epoch = math.ceil(job.epochs * len(y)), 0
        state["seen"] = state["seen"] + left
        while left:
            order = np.random.default_rng([job.seed, epoch]).permutation(len(y))[:left]
            for start in range(0, len(order), settings["batch_size"]):
                batch = order[start : start + settings["batch_size"]]
                error = answer(state, x[batch])
                error[np.arange(len(batch)), y[batch]] -= 1
                slope = np.einsum("ni,nc->ic", x[batch], error) / np.float32(len(batch))
                state["velocity"] = np.float32(settings["momentum"]) * state["velocity"] + slope
                state["weight"] = state["weight"] - np.float32(settings["lr"]) * state["velocity"]
                on_progress(len(batch))
            left, epoch = left - len(order), epoch + 1
        return state

    def predictor(
        self, settings: Mapping[str, Any], states: Sequence[Mapping[str, Any]], device: str
    ) -> Callable[[Any], Any]:
        """Return a function from features to probabilities of each constituent."""
        return lambda x: np.stack([answer(state, prepare(state, x)) for state in states])

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever may change bits; refuse a device that is not there."""
        if device not in ("auto", "cpu"):
            raise InputError(f"no device '{device}'; backend '{self.name}' has: auto, cpu")
        return {"numpy": np.__version__}


def fit_scaling(x: Any) -> tuple[Any, Any]:
    """Return mean and spread of each feature; a feature that does not vary is left as wide as it is."""
    flat = x.reshape(len(x), -1).astype(np.float64)
    spread = flat.std(axis=0)
    return flat.mean(axis=0).astype(np.float32), np.where(spread > 0, spread, 1).astype(np.float32)


def prepare(state: Mapping[str, Any], x: Any) -> Any:
    """Return features scaled, with a column of ones for the intercept."""
    scaled = (x.reshape(len(x), len(state["mean"])) - state["mean"]) / state["scale"]
    return np.concatenate([scaled, np.ones((len(x), 1))], axis=1).astype(np.float32)


def answer(state: Mapping[str, Any], x: Any) -> Any:
    """Return a constituent's probabilities for prepared features."""
    logits = np.einsum("ni,ic->nc", x, state["weight"])
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    register(ExampleBackend())
