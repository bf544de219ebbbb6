"""Train an `nn.Module`, one constituent at a time: a network of ours or a platform's own.

The module sees true batches, without rows that fill up, because batch normalisation would count them. Its
parameters are views of the flat buffer of our optimisers; its buffers (batch statistics) are state like its
weights. Whatever it draws at random comes from torch's generators, seeded anew for each epoch. A network for images
is shown (n, channels, height, width), varied as `images` draws it; other modules see points as they are stored.

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
from unlearnd.hookspecs import Job, OnProgress
from unlearnd_torch.devices import Feed, answering, mixed, own_randomness, resolve_device, steady
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
from unlearnd_torch.images import Variation, draw_variation, image_of
from unlearnd_torch.optimisers import Optimiser, make_optimiser
from unlearnd_torch.settings import ImageSettings, ModuleSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

Build = Callable[[], nn.Module]
_CHUNK_BYTES = 16 << 20
_CHUNK_IMAGES = 256
"""Images answered at a time: what a network makes of an image is many times as large."""


def draw_initial_state(
    build: Build, settings: ModuleSettings, shape: tuple[int, ...], classes: int, seed: int
) -> State:
    """Return a fresh module's state, drawn from the seed, and an optimiser at step 0."""
    with own_randomness(torch.device("cpu"), derive_seed(seed, "init")):
        module = build()
    unfitted = scaling_before(settings, shape)
    scaling = unfitted.as_state() if unfitted else {}
    form = {"input.shape": np.array(shape, np.int64), "output.classes": np.array([classes], np.int64)}
    return _Constituent(module, settings, torch.device("cpu")).as_state() | scaling | form


def form_of(state: State) -> tuple[tuple[int, ...], int]:
    """Return the shape of a point and the number of classes that a state was made for."""
    return tuple(int(length) for length in state["input.shape"]), int(state["output.classes"][0])


def train(build: Build, settings: ModuleSettings, job: Job, device: str, on_progress: OnProgress) -> State:
    """Return the state after the job."""
    where = resolve_device(device)
    points = job.points
    epochs = points_per_epoch(len(points.x), job.epochs)
    if not epochs:
        return dict(job.state)
    shape, classes = form_of(job.state)
    check_labels(points, classes)
    scaling = fit_scaling(job.state, points, settings.standardize, _channel_axis(settings, shape))
    with steady(where, settings.tf32):
        with own_randomness(where, 0):  # what `build` draws is overwritten, but must not move others' draws
            constituent = _Constituent(build(), settings, where)
        constituent.load(job.state)
        prepare = Preparation(settings, shape, scaling, where)
        feed = Feed(points.x, points.y, where)
        for epoch, take in enumerate(epochs):
            order = draw_order(job.seed, epoch, len(points.x), take)
            varied = draw_variation(settings, job.seed, epoch, take) if isinstance(settings, ImageSettings) else None
            with own_randomness(where, derive_seed(job.seed, epoch, "dropout")):
                for batch, x, y in feed.batches(order, cut_into_batches(take, settings.batch_size)):
                    constituent.step(prepare(x, varied, batch), y)
                    on_progress(batch.stop - batch.start)
    fitted = scaling.as_state() if scaling else {}
    form = {name: job.state[name] for name in ("input.shape", "output.classes")}
    return constituent.as_state() | fitted | form


class ModulePredictor:
    """Probabilities (constituents, n, classes) for features (n, *shape), one constituent after the other."""

    def __init__(self, build: Build, settings: ModuleSettings, states: Sequence[State], device: str) -> None:
        self._device = resolve_device(device)
        self._shape, self._classes = form_of(states[0])
        self._tf32 = settings.tf32
        self._members: list[tuple[nn.Module, Preparation]] = []
        for state in states:
            with own_randomness(self._device, 0):
                constituent = _Constituent(build(), settings, self._device)
            constituent.load(state)
            prepare = Preparation(settings, self._shape, scaling_of(state), self._device)
            self._members.append((constituent.module.eval().requires_grad_(False), prepare))
        self._chunk = max(1, _CHUNK_BYTES // (4 * max(1, int(np.prod(self._shape)))))
        if isinstance(settings, ImageSettings):
            self._chunk = min(self._chunk, _CHUNK_IMAGES)

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        answers = np.empty((len(self._members), len(x), self._classes), np.float32)
        with answering(self._device, self._tf32), torch.inference_mode():
            for member, (module, prepare) in enumerate(self._members):
                for at in range(0, len(x), self._chunk):
                    rows = slice(at, at + self._chunk)
                    inputs = torch.from_numpy(np.array(x[rows])).to(self._device)
                    answers[member, rows] = torch.softmax(module(prepare(inputs)), 1).cpu().numpy()
        return answers


class _Constituent:
    """A module whose trainable parameters lie in a flat buffer."""

    def __init__(self, module: nn.Module, settings: ModuleSettings, device: torch.device) -> None:
        self.module = module.to(device).train()
        self._device, self._precision, self._smoothing = device, settings.mixed_precision, settings.label_smoothing
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
        # Copied: whoever wrote the module may hold on to it, and its parameters lie in the row.
        own = {name: value.copy() for name, value in dump_row(self._layout, self._optimiser, 0).items()}
        return own | others

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        resting = [layer for layer in self._batch_norms if layer.training] if len(inputs) == 1 else []
        for layer in resting:
            layer.eval()
        # Backward adds to what is in the gradient buffer, so momentum is carried over by scaling it first.
        if self._optimiser.carry:
            self._optimiser.gradient.mul_(self._optimiser.carry)
        else:
            self._optimiser.gradient.zero_()
        with mixed(self._device, self._precision):
            loss = nn.functional.cross_entropy(self.module(inputs), labels, label_smoothing=self._smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.advance(1)
        for layer in resting:
            layer.train()


class Preparation:
    """Stored points made ready for the module: turned, varied, scaled."""

    def __init__(
        self, settings: ModuleSettings, shape: tuple[int, ...], scaling: Scaling | None, device: torch.device
    ) -> None:
        image = image_of(shape, settings.layout) if isinstance(settings, ImageSettings) else None
        self._turn = image.turn if image else None
        last = isinstance(settings, ImageSettings) and settings.channels_last
        self._memory = torch.channels_last if last else torch.contiguous_format
        self._scaling: tuple[Tensor, Tensor] | None = None
        if scaling is not None:
            mean, scale = (torch.tensor(array).view(1, *shape) for array in (scaling.mean, scaling.scale))
            if image:
                mean, scale = image.turn(mean).contiguous(), image.turn(scale).contiguous()
            self._scaling = mean.to(device), scale.to(device)

    def __call__(self, x: Tensor, varied: Variation | None = None, batch: slice | None = None) -> Tensor:
        if self._turn is not None:
            x = self._turn(x)
        if varied is not None and batch is not None:
            x = varied.apply(x, batch)
        # Into memory of torch's own, which is aligned as numpy's is not: equal bits.
        ready = torch.empty(x.shape, device=x.device, memory_format=self._memory)
        if self._scaling is None:
            return ready.copy_(x)
        mean, scale = self._scaling
        return torch.sub(x, mean, out=ready).div_(scale)


def _channel_axis(settings: ModuleSettings, shape: tuple[int, ...]) -> int | None:
    """Return which axis of a stored point is its channels; None where there is none."""
    if not isinstance(settings, ImageSettings):
        return None
    return {"hw": None, "hwc": 2, "chw": 0}[image_of(shape, settings.layout).layout]


def scaling_before(settings: ModuleSettings, shape: tuple[int, ...]) -> Scaling | None:
    """Return the scaling of a constituent that has seen no point: none yet, or the one that was set."""
    if not isinstance(settings, ImageSettings) or settings.standardize != "fixed":
        features = int(np.prod(shape, dtype=np.int64))
        return None if settings.standardize == "off" else unfitted_scaling(features)
    image = image_of(shape, settings.layout)
    if len(settings.mean) not in (1, image.channels):
        raise InputError(f"mean and std have {len(settings.mean)} numbers; the images have {image.channels} channels")
    whole = [1, 1, 1]
    axis = {"hw": 0, "hwc": 2, "chw": 0}[image.layout]
    whole[axis] = len(settings.mean)
    size = shape if len(shape) == 3 else (1, *shape)

    def fill(values: tuple[float, ...]) -> NDArray[np.float32]:
        given = np.array(values, np.float32).reshape(whole)
        return np.ascontiguousarray(np.broadcast_to(given, size)).reshape(-1)

    return Scaling(fill(settings.mean), fill(settings.std), 1)
