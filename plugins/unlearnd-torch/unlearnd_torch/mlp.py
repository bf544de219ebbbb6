"""Train multilayer perceptrons, any number of constituents at once.

Constituents always train as a stack, also when there is one: parameters (constituents, in, out), batched
matrix products, every batch filled up to its full size with rows of no weight. So no shape depends on who
else is trained, and a constituent gets the same bits in any company. That is by layout (see `harness`), and
checked before the first stack of each form on this machine; where it does not hold, they train one by one. What a
constituent reads at each step is in `mlp_batches`, what a step computes in `mlp_steps`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearnd.hookspecs import Job, OnProgress, Points
from unlearnd_torch.devices import resolve_device, stack_bytes, steady
from unlearnd_torch.harness import (
    Scaling,
    check_labels,
    dump_row,
    fit_scaling,
    generator_for,
    lay_out,
    load_row,
    unfitted_scaling,
)
from unlearnd_torch.mlp_batches import Block, Source, Stream
from unlearnd_torch.mlp_steps import Stack, parameter_shapes
from unlearnd_torch.optimisers import make_optimiser
from unlearnd_torch.settings import MlpSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

_logger = logging.getLogger(__name__)


def draw_initial_state(settings: MlpSettings, shape: tuple[int, ...], classes: int, seed: int) -> State:
    """Return fresh weights, drawn as torch draws a `Linear`'s, and an optimiser at step 0."""
    widths = (math.prod(shape), *settings.hidden, classes)
    generator = generator_for(seed, "init")
    drawn = {}
    for name, size in parameter_shapes(widths).items():
        bound = 1 / math.sqrt(widths[int(name.split(".")[1])])
        drawn[name] = torch.rand(size, generator=generator).mul_(2 * bound).sub_(bound)
    layout = lay_out(parameter_shapes(widths))
    optimiser = make_optimiser(settings, torch.zeros(1, layout.width))
    for name, view in layout.views(optimiser.weights).items():
        view[0].copy_(drawn[name])
    scaling = {} if settings.standardize == "off" else unfitted_scaling(widths[0]).as_state()
    return dump_row(layout, optimiser, 0) | scaling


def train_stacked(settings: MlpSettings, jobs: Sequence[Job], device: str, on_progress: OnProgress) -> list[State]:
    """Return the states after the jobs, in the order of the jobs."""
    where = resolve_device(device)
    states: list[State] = [dict(job.state) for job in jobs]
    streams = {place: Stream(settings, job) for place, job in enumerate(jobs)}
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
    together = _train_group(settings, jobs, [Stream(settings, job) for job in jobs], where, _ignore)
    for job, state in zip(jobs, together, strict=True):
        alone = _train_group(settings, [job], [Stream(settings, job)], where, _ignore)[0]
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
    streams: Sequence[Stream],
    device: torch.device,
    on_progress: OnProgress,
) -> list[State]:
    """Train jobs of at least one step, longest first."""
    widths = widths_of(jobs[0].state)
    stack = Stack(settings, widths, len(jobs), device)
    scalings: list[Scaling | None] = []
    for row, job in enumerate(jobs):
        check_labels(job.points, widths[-1])
        load_row(stack.layout, stack.optimiser, row, job.state)
        scalings.append(fit_scaling(job.state, job.points, settings.standardize))
    block = Block(settings, widths, len(jobs), streams[0].steps, device)
    sources = [
        Source(job.points, stream, scaling, device)
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


def _ignore(samples: int) -> None:
    pass
