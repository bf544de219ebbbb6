"""Train multilayer perceptrons, any number of constituents at once.

Constituents always train as a stack, also when there is one: parameters (constituents, in, out), batched
matrix products, every batch filled up to its full size with rows of no weight. So no shape depends on who
else is trained, and a constituent gets the same bits in any company. That is by layout (see `harness`), and
checked before the first stack of each form on this machine; where it does not hold, they train one by one.

The backward pass is written out: at these sizes autograd costs more than the arithmetic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlearnd.hookspecs import Job, OnProgress, Points
from unlearnd_torch.devices import Feed, resolve_device, stack_bytes, steady
from unlearnd_torch.harness import (
    Scaling,
    check_labels,
    draw_order,
    dump_row,
    fit_scaling,
    generator_for,
    lay_out,
    load_row,
    pad,
    points_per_epoch,
    unfitted_scaling,
)
from unlearnd_torch.optimisers import LANES, make_optimiser
from unlearnd_torch.settings import MlpSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

_logger = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20
"""Inputs gathered at a time. Larger blocks fall out of the cache before they are used."""
_GATHER_BYTES = 512 << 10
"""Points gathered at a time: what is gathered should be in a near cache when it is copied and scaled, and Python be
asked seldom."""
_BLOCK_WORK = 1 << 31
"""Multiplications between two words of progress: a tenth of a second or two."""


def draw_initial_state(settings: MlpSettings, shape: tuple[int, ...], classes: int, seed: int) -> State:
    """Return fresh weights, drawn as torch draws a `Linear`'s, and an optimiser at step 0."""
    widths = (math.prod(shape), *settings.hidden, classes)
    generator = generator_for(seed, "init")
    drawn = {}
    for name, size in _parameter_shapes(widths).items():
        bound = 1 / math.sqrt(widths[int(name.split(".")[1])])
        drawn[name] = torch.rand(size, generator=generator).mul_(2 * bound).sub_(bound)
    layout = lay_out(_parameter_shapes(widths))
    optimiser = make_optimiser(settings, torch.zeros(1, layout.width))
    for name, view in layout.views(optimiser.weights).items():
        view[0].copy_(drawn[name])
    scaling = {} if settings.standardize == "off" else unfitted_scaling(widths[0]).as_state()
    return dump_row(layout, optimiser, 0) | scaling


def train_stacked(settings: MlpSettings, jobs: Sequence[Job], device: str, on_progress: OnProgress) -> list[State]:
    """Return the states after the jobs, in the order of the jobs."""
    where = resolve_device(device)
    states: list[State] = [dict(job.state) for job in jobs]
    streams = {place: _Stream(settings, job) for place, job in enumerate(jobs)}
    # Longest first, so that those still training at any step are the first rows of the stack.
    order = sorted((p for p in streams if streams[p].steps), key=lambda p: -streams[p].steps)
    if not order:
        return states
    widths = widths_of(jobs[order[0]].state)
    # No autograd here, and so none of its bookkeeping either: it costs 3 % of a training.
    with steady(where, settings.tf32), torch.inference_mode():
        size = _stack_size(settings, widths, len(order), where)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            trained = _train_group(settings, [jobs[p] for p in group], [streams[p] for p in group], where, on_progress)
            for place, state in zip(group, trained, strict=True):
                states[place] = state
    return states


def widths_of(state: State) -> tuple[int, ...]:
    """Return the number of inputs, of each hidden layer's units, and of classes."""
    layers = sum(name.startswith("layers.") and name.endswith(".weight") for name in state)
    shapes = [state[f"layers.{layer}.weight"].shape for layer in range(layers)]
    return (shapes[0][0], *(shape[1] for shape in shapes))


@lru_cache(maxsize=256)
def stacking_keeps_bits(settings: MlpSettings, widths: tuple[int, ...], size: int, device: str) -> bool:
    """Try out whether a stack of `size` gives here, at these widths, the bits of one by one."""
    if 1 in widths[1:]:
        return False  # MKL multiplies a matrix of one column as a vector when it is alone, not in a stack
    where = torch.device(device)
    random = np.random.default_rng(1)
    jobs = []
    for place in range(size):
        # Four steps, every second of a single point; every third job takes only the other two.
        n = settings.batch_size + (place % 3 != 2)
        x = random.standard_normal((n, widths[0]), dtype=np.float32)
        y = random.integers(0, widths[-1], n)
        jobs.append(
            Job(
                state=draw_initial_state(settings, (widths[0],), widths[-1], place),
                points=Points(x=x, y=y),
                epochs=Fraction(2),
                seed=place,
            )
        )
    jobs.sort(key=lambda job: -len(job.points.x))
    together = _train_group(settings, jobs, [_Stream(settings, job) for job in jobs], where, _ignore)
    for job, state in zip(jobs, together, strict=True):
        alone = _train_group(settings, [job], [_Stream(settings, job)], where, _ignore)[0]
        if any(alone[name].tobytes() != state[name].tobytes() for name in alone):
            _logger.info("stacks of width %s give other bits here: training one by one", widths)
            return False
    return True


def _stack_size(settings: MlpSettings, widths: tuple[int, ...], jobs: int, device: torch.device) -> int:
    """Return how many constituents to train at once: bits do not depend on it, speed does."""
    floats = sum(a * b + b for a, b in pairwise(widths))
    buffers = 2 if settings.optimizer == "sgd" else 4
    most = max(1, stack_bytes(device) // (4 * buffers * floats))
    # As many stacks as that takes, all of a size: a stack of the few that were left costs a step like any other.
    size = -(-jobs // -(-jobs // most))
    probes = {min(size, 2), min(size, 3), min(size, 8)} - {1}
    fits = all(stacking_keeps_bits(settings, widths, probe, str(device)) for probe in sorted(probes))
    return size if fits else 1


def _train_group(
    settings: MlpSettings,
    jobs: Sequence[Job],
    streams: Sequence[_Stream],
    device: torch.device,
    on_progress: OnProgress,
) -> list[State]:
    """Train jobs of at least one step, longest first."""
    widths = widths_of(jobs[0].state)
    stack = _Stack(settings, widths, len(jobs), device)
    scalings: list[Scaling | None] = []
    for row, job in enumerate(jobs):
        check_labels(job.points, widths[-1])
        load_row(stack.layout, stack.optimiser, row, job.state)
        scalings.append(fit_scaling(job.state, job.points, settings.standardize))
    block = _Block(settings, widths, len(jobs), streams[0].steps, device)
    sources = [
        _Source(job.points, stream, scaling, device)
        for job, stream, scaling in zip(jobs, streams, scalings, strict=True)
    ]
    done = 0
    while done < streams[0].steps:
        left = [min(block.steps, stream.steps - done) for stream in streams]
        samples = block.fill([steps for steps in left if steps > 0], sources)
        active = len(jobs)
        for step in range(left[0]):
            while left[active - 1] <= step:
                active -= 1
            stack.step(active, block, step)
        done += left[0]
        on_progress(samples)
    states: list[State] = []
    for row, scaling in enumerate(scalings):
        state = dump_row(stack.layout, stack.optimiser, row)
        states.append(state | (scaling.as_state() if scaling else {}))
    return states


class _Stream:
    """The steps of one job in order: which rows each takes, and its dropout draws."""

    def __init__(self, settings: MlpSettings, job: Job) -> None:
        self._n, self._seed, self._batch = len(job.points.x), job.seed, settings.batch_size
        self._draws = settings.batch_size * sum(settings.hidden) if settings.dropout else 0
        self._epochs = points_per_epoch(self._n, job.epochs)
        self.steps = sum(-(-points // self._batch) for points in self._epochs)
        self._epoch = 0
        self._rows: NDArray[np.int64] = np.empty((0, self._batch), np.int64)
        self._over = 0
        """Points in the last batch of the epoch, if that is not full."""
        self._dropout: torch.Generator | None = None

    def take(self, steps: int) -> tuple[NDArray[np.int64], list[tuple[int, int]], Tensor | None]:
        """Return rows (steps, batch), which steps have fewer real ones and how many, and uniform draws for dropout."""
        rows, ends, draws = [], [], []
        done = 0
        while done < steps:
            if not len(self._rows):
                self._begin_epoch()
            now = min(steps - done, len(self._rows))
            rows.append(self._rows[:now])
            if self._dropout is not None:
                draws.append(torch.rand(now, self._draws, generator=self._dropout))
            self._rows = self._rows[now:]
            done += now
            if self._over and not len(self._rows):
                ends.append((done - 1, self._over))
        if len(rows) == 1:
            return rows[0], ends, draws[0] if draws else None
        return np.concatenate(rows), ends, torch.cat(draws) if draws else None

    def _begin_epoch(self) -> None:
        points = self._epochs[self._epoch]
        steps = -(-points // self._batch)
        # Rows that fill up the last batch repeat row 0: they must be finite, and have no weight.
        rows = np.zeros(steps * self._batch, np.int64)
        rows[:points] = draw_order(self._seed, self._epoch, self._n, points)
        self._rows = rows.reshape(steps, self._batch)
        self._over = points % self._batch
        self._dropout = generator_for(self._seed, self._epoch, "dropout") if self._draws else None
        self._epoch += 1


class _Source:
    """Where a constituent's batches come from."""

    def __init__(self, points: Points, stream: _Stream, scaling: Scaling | None, device: torch.device) -> None:
        flat = points.x.reshape(len(points.x), -1)
        self.feed = Feed(flat, points.y, device)
        self.y = points.y
        self.width = flat.shape[1] * flat.itemsize
        self.stream = stream
        self.mean = self.factor = None
        if scaling is not None:
            self.mean = torch.from_numpy(scaling.mean.copy()).to(device)
            self.factor = torch.from_numpy(1 / scaling.scale).to(device)


_Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]
_Read = tuple[Tensor, Sequence[Tensor], Tensor, Tensor, list[Tensor]]


class _Block:
    """Inputs and targets of the next few steps of every constituent."""

    def __init__(
        self, settings: MlpSettings, widths: tuple[int, ...], size: int, longest: int, device: torch.device
    ) -> None:
        batch, classes = settings.batch_size, widths[-1]
        hidden = settings.hidden if settings.dropout else ()
        work = size * batch * sum(a * b for a, b in pairwise(widths)) * 3
        bytes_per_step = 4 * size * batch * (widths[0] + classes + sum(hidden))
        self.steps = max(1, min(longest, _BLOCK_BYTES // bytes_per_step, _BLOCK_WORK // work))
        self._batch, self._dropout, self._device = batch, settings.dropout, device
        self._smoothing = settings.label_smoothing
        # Not zeroed: only what has been filled is read.
        gaps = torch.empty(size, self.steps, pad(batch * widths[0]), device=device)
        self._x = gaps[:, :, : batch * widths[0]].view(size, self.steps, batch, widths[0])
        self._onehot = torch.empty(size, self.steps, batch, classes, device=device)
        self._labels = np.zeros((size, self.steps, batch), np.int64)
        self._shares = np.full((size, self.steps, batch, 1), 1 / batch, np.float32)
        self._weight = torch.from_numpy(self._shares.copy()).to(device)
        self._short: list[tuple[int, int, int]] = []
        self._masks = [_aligned(size, self.steps, batch, width, device) for width in hidden]
        self._classes = torch.arange(classes, device=device)
        # What a step reads, cut out once: a view costs as much as a small kernel.
        self._size = size
        self._each_x = self._x.unbind()
        self._per_step: list[_Read] = list(
            zip(
                self._x.unbind(1),
                [x.transpose(1, 2).unbind() for x in self._x.unbind(1)],
                self._onehot.unbind(1),
                self._weight.unbind(1),
                [[flat[:, step] for flat, _ in self._masks] for step in range(self.steps)],
                strict=True,
            )
        )

    def read(self, step: int, active: int) -> _Read:
        """Return inputs, the same turned one by one, targets, row weights and dropout masks of the first `active`."""
        if active == self._size:
            return self._per_step[step]
        x, turned, onehot, weight, masks = self._per_step[step]
        return x[:active], turned[:active], onehot[:active], weight[:active], [mask[:active] for mask in masks]

    def fill(self, left: Sequence[int], sources: Sequence[_Source]) -> int:
        """Gather the next steps of the first constituents, so many of each; return how many points they train."""
        longest = left[0]
        samples = 0
        short = []
        for row, (steps, source) in enumerate(zip(left, sources, strict=False)):
            rows, ends, draws = source.stream.take(steps)
            self._gather(row, rows, source)
            # Where a constituent has fewer steps left than the first, nobody reads what stands here.
            source.y.take(rows, out=self._labels[row, :steps], mode="clip")  # without `clip` numpy copies twice
            samples += steps * self._batch
            for step, points in ends:
                short.append((row, step, points))
                samples += points - self._batch
            if draws is not None:
                self._mask(row, steps, draws)
        # One operation for all constituents: for each of them it would cost as much.
        targets = self._onehot[: len(left), :longest]
        labels = torch.from_numpy(self._labels[: len(left), :longest])
        targets.copy_(labels.to(self._device).unsqueeze(3) == self._classes)
        if self._smoothing:
            targets.mul_(1 - self._smoothing).add_(self._smoothing / len(self._classes))
        self._weigh(short)
        return samples

    def _weigh(self, short: list[tuple[int, int, int]]) -> None:
        """Give every point of a step its share; of steps that are short, (row, step, points), only the real ones."""
        if short == self._short:
            return
        self._shares[:] = 1 / self._batch
        for row, step, points in short:
            self._shares[row, step, :points] = 1 / points
            self._shares[row, step, points:] = 0
        self._weight.copy_(torch.from_numpy(self._shares))
        self._short = short

    def _gather(self, row: int, rows: NDArray[np.int64], source: _Source) -> None:
        at_once = max(1, _GATHER_BYTES // (self._batch * source.width))
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            gathered = source.feed.points(some)
            target = self._each_x[row][start : start + len(some)]
            if source.mean is None or source.factor is None:
                target.copy_(gathered)
            else:
                torch.sub(gathered, source.mean, out=target).mul_(source.factor)

    def _mask(self, row: int, steps: int, draws: Tensor) -> None:
        kept = (draws >= self._dropout).float().div_(1 - self._dropout).to(self._device)
        begin = 0
        for _, mask in self._masks:
            size = self._batch * mask.shape[-1]
            mask[row, :steps] = kept[:, begin : begin + size].view(steps, self._batch, -1)
            begin += size


class _Stack:
    """Parameters, activations and gradients of several constituents."""

    def __init__(self, settings: MlpSettings, widths: tuple[int, ...], size: int, device: torch.device) -> None:
        self.layout = lay_out(_parameter_shapes(widths))
        self.optimiser = make_optimiser(settings, torch.zeros(size, self.layout.width, device=device))
        self._activate, self._pull_back, in_place = _ACTIVATIONS[settings.activation]
        batch = settings.batch_size
        self._weights = self.layout.views(self.optimiser.weights)
        self._gradients = self.layout.views(self.optimiser.gradient)
        self._before = [_aligned(size, 1, batch, width, device) for width in widths[1:]]
        self._after = self._before if in_place else _like(self._before)
        self._kept = _like(self._after) if settings.dropout else self._after
        self._masks = _like(self._after[:-1]) if settings.dropout else []
        self._deltas = _like(self._before)
        self._per_row = torch.zeros(size, batch, 1, device=device)
        self._now: _Views | None = None

    def step(self, active: int, block: _Block, step: int) -> None:
        """Take one training step with the first `active` constituents."""
        if self._now is None or self._now.active != active:
            self._now = _Views(self, active)
        v = self._now
        x, x_turned, onehot, weight, masks = block.read(step, active)
        _make(_product(v.before[0], x, v.weights[0], v.biases[0]))
        for mine, drawn in zip(v.masks, masks, strict=True):
            mine.copy_(drawn)
        _make(v.forward)
        # The gradient of the mean cross-entropy by the logits.
        v.deltas[-1].sub_(onehot).mul_(weight)
        _make(v.backward)
        # Matrix by matrix: see `_product`. Gradients lie in the optimiser's rows, which have gaps.
        for gradient, a, b in zip(v.first_gradients, x_turned, v.first_deltas, strict=True):
            gradient.addmm_(a, b, beta=self.optimiser.carry)
        self.optimiser.advance(active)


class _Views:
    """The first `active` constituents of a stack, and what a step calls with them, once for all steps with as many.

    A step is 30 calls of a few microseconds: to go through a list is quicker than to find out each time, layer by
    layer, what to call with what. Not in the lists are the calls that have to do with a step's own inputs.
    """

    def __init__(self, stack: _Stack, active: int) -> None:
        self.active = active
        layers = range(len(stack._before))
        self.weights = [stack._weights[f"layers.{layer}.weight"][:active] for layer in layers]
        self.biases = [stack._weights[f"layers.{layer}.bias"][:active].unsqueeze(1) for layer in layers]
        weight_gradients = [stack._gradients[f"layers.{layer}.weight"][:active].unbind() for layer in layers]
        bias_gradients = [stack._gradients[f"layers.{layer}.bias"][:active].unsqueeze(1) for layer in layers]
        flat_before, self.before = _first(stack._before, active)
        flat_after, _ = _first(stack._after, active)
        flat_kept, kept = _first(stack._kept, active)
        flat_deltas, self.deltas = _first(stack._deltas, active)
        self.masks, _ = _first(stack._masks, active)
        self.first_gradients, self.first_deltas = weight_gradients[0], self.deltas[0].unbind()
        self.forward: list[_Call] = []
        """From the products of the first layer to the softmax."""
        for layer in layers[1:]:
            below = layer - 1
            self.forward.append(stack._activate(flat_before[below], flat_after[below]))
            if self.masks:
                self.forward.append(_call(torch.mul, flat_after[below], self.masks[below], out=flat_kept[below]))
            self.forward += _product(self.before[layer], kept[below], self.weights[layer], self.biases[layer])
        self.forward += _softmax(self.before[-1], self.deltas[-1], stack._per_row[:active])
        self.backward: list[_Call] = []
        """From the gradient by the logits to all others, but for the weights of the first layer."""
        carry = stack.optimiser.carry
        for layer in reversed(layers):
            delta, below = self.deltas[layer], layer - 1
            if layer:
                turned = kept[below].transpose(1, 2).unbind()
                for gradient, a, b in zip(weight_gradients[layer], turned, delta.unbind(), strict=True):
                    self.backward.append(_call(gradient.addmm_, a, b, beta=carry))
            self.backward += _sum_up(delta, bias_gradients[layer], carry)
            if layer:
                self.backward += _product(self.deltas[below], delta, self.weights[layer].transpose(1, 2))
                if self.masks:
                    self.backward.append(_call(flat_deltas[below].mul_, self.masks[below]))
                self.backward.append(stack._pull_back(flat_deltas[below], flat_before[below], flat_after[below]))


def _call(function: Callable[..., object], *arguments: object, **named: object) -> _Call:
    """Return a call to be made later."""
    return function, arguments, named


def _make(calls: Sequence[_Call]) -> None:
    for function, arguments, named in calls:
        function(*arguments, **named)


def _parameter_shapes(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        shapes[f"layers.{layer}.weight"] = (inputs, outputs)
        shapes[f"layers.{layer}.bias"] = (outputs,)
    return shapes


def _aligned(size: int, steps: int, batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a (size, steps, padded) buffer and its (size, steps, batch, width) view."""
    flat = torch.zeros(size, steps, pad(batch * width), device=device)
    return flat, flat[:, :, : batch * width].view(size, steps, batch, width)


def _like(buffers: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [_aligned(view.shape[0], view.shape[1], view.shape[2], view.shape[3], flat.device) for flat, view in buffers]


def _first(buffers: list[tuple[Tensor, Tensor]], active: int) -> tuple[list[Tensor], list[Tensor]]:
    return [flat[:active, 0] for flat, _ in buffers], [view[:active, 0] for _, view in buffers]


def _softmax(logits: Tensor, out: Tensor, per_row: Tensor) -> list[_Call]:
    """Write the softmax over classes: for few classes several times as fast as torch's, which goes row by row."""
    return [
        _call(torch.amax, logits, 2, keepdim=True, out=per_row),
        _call(torch.sub, logits, per_row, out=out),
        _call(out.exp_),
        _call(torch.sum, out, 2, keepdim=True, out=per_row),
        _call(out.div_, per_row),
    ]


def _sum_up(delta: Tensor, gradient: Tensor, carry: float) -> list[_Call]:
    """Write the gradient of a bias, plus `carry` times what stands there."""
    if not carry:
        return [_call(torch.sum, delta, 1, keepdim=True, out=gradient)]
    summed = torch.empty(gradient.shape, device=gradient.device)
    return [
        _call(torch.sum, delta, 1, keepdim=True, out=summed),
        _call(gradient.mul_, carry),
        _call(gradient.add_, summed),
    ]


def _product(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> list[_Call]:
    """Write the product of each constituent, plus its bias.

    On the CPU torch multiplies a stack as a batch only if the result lies without gaps, and matrix by matrix
    otherwise; a stack of one never has gaps. Which of the two is done must follow from the shapes alone.
    """
    without_gaps = (out.shape[1] * out.shape[2]) % LANES == 0
    if without_gaps:
        if bias is None:
            return [_call(torch.bmm, left, right, out=out)]
        return [_call(torch.baddbmm, bias, left, right, out=out)]
    each = zip(out.unbind(), left.unbind(), right.unbind(), strict=True)
    if bias is None:
        return [_call(torch.mm, a, b, out=one) for one, a, b in each]
    return [_call(torch.addmm, c, a, b, out=one) for (one, a, b), c in zip(each, bias.unbind(), strict=True)]


def _ignore(samples: int) -> None:
    pass


def _relu(before: Tensor, after: Tensor) -> _Call:
    return _call(torch.clamp_, before, min=0)


def _pull_back_relu(gradient: Tensor, before: Tensor, after: Tensor) -> _Call:
    return _call(torch.ops.aten.threshold_backward.grad_input, gradient, after, 0, grad_input=gradient)


def _tanh(before: Tensor, after: Tensor) -> _Call:
    return _call(before.tanh_)


def _pull_back_tanh(gradient: Tensor, before: Tensor, after: Tensor) -> _Call:
    return _call(torch.ops.aten.tanh_backward.grad_input, gradient, after, grad_input=gradient)


def _sigmoid(before: Tensor, after: Tensor) -> _Call:
    return _call(before.sigmoid_)


def _pull_back_sigmoid(gradient: Tensor, before: Tensor, after: Tensor) -> _Call:
    return _call(torch.ops.aten.sigmoid_backward.grad_input, gradient, after, grad_input=gradient)


def _gelu(before: Tensor, after: Tensor) -> _Call:
    return _call(torch.ops.aten.gelu.out, before, out=after)


def _pull_back_gelu(gradient: Tensor, before: Tensor, after: Tensor) -> _Call:
    return _call(torch.ops.aten.gelu_backward.grad_input, gradient, before, grad_input=gradient)


_Step = Callable[[Tensor, Tensor], _Call]
_StepBack = Callable[[Tensor, Tensor, Tensor], _Call]
_ACTIVATIONS: dict[str, tuple[_Step, _StepBack, bool]] = {
    "relu": (_relu, _pull_back_relu, True),
    "tanh": (_tanh, _pull_back_tanh, True),
    "sigmoid": (_sigmoid, _pull_back_sigmoid, True),
    "gelu": (_gelu, _pull_back_gelu, False),
}
"""Forward, backward from the gradient by the output, and whether the input may be overwritten."""
