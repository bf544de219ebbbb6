"""Train a platform's own `nn.Module`, one constituent at a time.

The module sees true batches, without rows that fill up, because batch normalisation would count them. Its
parameters are views of the flat buffer of our optimisers; its buffers (batch statistics) are state like its
weights. Whatever it draws at random comes from torch's generators, seeded anew for each epoch.

A step of a single point cannot be batch-normalised: a single last point joins the batch before it, and where
there is no batch before it, batch-norm layers use the statistics they have and learn nothing in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, OnProgress, Points
from unlearnd_torch.devices import OneThread, own_randomness, resolve_device, steady
from unlearnd_torch.harness import (
    Layout,
    Scaling,
    check_labels,
    cut_into_batches,
    draw_order,
    dump_row,
    fit_scaling,
    lay_out,
    load_row,
    points_per_epoch,
    scaling_of,
    unfitted_scaling,
)
from unlearnd_torch.optimisers import Optimiser, make_optimiser
from unlearnd_torch.settings import TrainingSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

Build = Callable[[], nn.Module]
_CHUNK_BYTES = 16 << 20


def draw_initial_state(
    build: Build, settings: TrainingSettings, shape: tuple[int, ...], classes: int, seed: int
) -> State:
    """Return a fresh module's state, drawn from the seed, and an optimiser at step 0."""
    with own_randomness(torch.device("cpu"), derive_seed(seed, "init")):
        module = build()
    features = int(np.prod(shape, dtype=np.int64))
    scaling = {} if settings.standardize == "off" else unfitted_scaling(features).as_state()
    form = {"input.shape": np.array(shape, np.int64), "output.classes": np.array([classes], np.int64)}
    return _Constituent(module, settings, torch.device("cpu")).as_state() | scaling | form


def form_of(state: State) -> tuple[tuple[int, ...], int]:
    """Return the shape of a point and the number of classes that a state was made for."""
    return tuple(int(length) for length in state["input.shape"]), int(state["output.classes"][0])


def train(build: Build, settings: TrainingSettings, job: Job, device: str, on_progress: OnProgress) -> State:
    """Return the state after the job."""
    where = resolve_device(device)
    points = job.points
    epochs = points_per_epoch(len(points.x), job.epochs)
    if not epochs:
        return dict(job.state)
    shape, classes = form_of(job.state)
    check_labels(points, classes)
    scaling = fit_scaling(job.state, points, settings.standardize)
    with steady():
        with own_randomness(where, 0):  # what `build` draws is overwritten, but must not move others' draws
            constituent = _Constituent(build(), settings, where)
        constituent.load(job.state)
        reader = _Reader(points, shape, scaling, where)
        for epoch, take in enumerate(epochs):
            order = draw_order(job.seed, epoch, len(points.x), take)
            with own_randomness(where, derive_seed(job.seed, epoch, "dropout")):
                for batch in cut_into_batches(take, settings.batch_size):
                    constituent.step(*reader.read(order[batch]))
                    on_progress(batch.stop - batch.start)
    fitted = scaling.as_state() if scaling else {}
    form = {name: job.state[name] for name in ("input.shape", "output.classes")}
    return constituent.as_state() | fitted | form


class ModulePredictor:
    """Probabilities (constituents, n, classes) for features (n, *shape), one constituent after the other."""

    def __init__(self, build: Build, settings: TrainingSettings, states: Sequence[State], device: str) -> None:
        self._device = resolve_device(device)
        self._shape, self._classes = form_of(states[0])
        self._members: list[tuple[nn.Module, Scaling | None]] = []
        for state in states:
            with own_randomness(self._device, 0):
                constituent = _Constituent(build(), settings, self._device)
            constituent.load(state)
            self._members.append((constituent.module.eval().requires_grad_(False), scaling_of(state)))
        self._chunk = max(1, _CHUNK_BYTES // (4 * max(1, int(np.prod(self._shape)))))

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        answers = np.empty((len(self._members), len(x), self._classes), np.float32)
        with OneThread(), torch.inference_mode():
            for member, (module, scaling) in enumerate(self._members):
                for at in range(0, len(x), self._chunk):
                    rows = slice(at, at + self._chunk)
                    inputs = _scale(x[rows], self._shape, scaling, self._device)
                    answers[member, rows] = torch.softmax(module(inputs), 1).cpu().numpy()
        return answers


class _Constituent:
    """A module whose trainable parameters lie in a flat buffer."""

    def __init__(self, module: nn.Module, settings: TrainingSettings, device: torch.device) -> None:
        self.module = module.to(device).train()
        trainable = {f"module.{n}": p for n, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trainable.items():
            if parameter.dtype != torch.float32:
                raise InputError(f"parameter {name!r} is {parameter.dtype}: parameters must be float32")
        self._layout: Layout = lay_out({name: tuple(p.shape) for name, p in trainable.items()})
        flat = torch.zeros(1, self._layout.width, device=device)
        self._optimiser: Optimiser = make_optimiser(settings, flat)
        weights, gradients = self._layout.views(flat), self._layout.views(self._optimiser.gradient)
        for name, parameter in trainable.items():
            weights[name][0].copy_(parameter.data)
            parameter.data = weights[name][0]
            parameter.grad = gradients[name][0]
        shared = {id(parameter) for parameter in trainable.values()}  # tied weights have two names
        self._others = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"the module keeps state that is no tensor: {name!r}")
            if id(tensor) not in shared:
                self._others.append(name)
        self._batch_norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def load(self, state: State) -> None:
        load_row(self._layout, self._optimiser, 0, state)
        tensors = self.module.state_dict()
        for name in self._others:
            tensors[name].copy_(torch.from_numpy(np.array(state[f"module.{name}"])))

    def as_state(self) -> dict[str, NDArray[Any]]:
        tensors = self.module.state_dict()
        others = {f"module.{name}": np.array(tensors[name].cpu().numpy(), order="C") for name in self._others}
        return dump_row(self._layout, self._optimiser, 0) | others

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        resting = [layer for layer in self._batch_norms if layer.training] if len(inputs) == 1 else []
        for layer in resting:
            layer.eval()
        # Backward adds to what is in the gradient buffer, so momentum is carried over by scaling it first.
        if self._optimiser.carry:
            self._optimiser.gradient.mul_(self._optimiser.carry)
        else:
            self._optimiser.gradient.zero_()
        loss = nn.functional.cross_entropy(self.module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.advance(1)
        for layer in resting:
            layer.train()


class _Reader:
    """Batches of a constituent's points, scaled."""

    def __init__(self, points: Points, shape: tuple[int, ...], scaling: Scaling | None, device: torch.device) -> None:
        self._points, self._shape, self._scaling, self._device = points, shape, scaling, device

    def read(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x = _scale(np.take(self._points.x, rows, axis=0), self._shape, self._scaling, self._device)
        return x, torch.from_numpy(np.take(self._points.y, rows)).to(self._device)


def _scale(x: NDArray[Any], shape: tuple[int, ...], scaling: Scaling | None, device: torch.device) -> Tensor:
    scaled = torch.empty(len(x), *shape)  # torch's memory is aligned as numpy's is not: equal bits
    flat, target = x.reshape(len(x), -1), scaled.view(len(x), -1).numpy()
    if scaling is None:
        target[...] = flat
    else:
        np.subtract(flat, scaling.mean, out=target)
        target /= scaling.scale
    return scaled.to(device)
