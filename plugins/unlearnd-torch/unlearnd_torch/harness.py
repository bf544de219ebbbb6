"""What every way of training shares: which points a step takes, how inputs are scaled, where parameters lie.

An epoch's order depends on the job's seed and the epoch's number alone. What is fitted on data is fitted on
the constituent's own points and lives in its state. Parameters of a stack lie in one flat buffer, each at an
address that does not depend on how many constituents there are: MKL gives other bits for a matrix that does
not begin on a 16-byte boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.hookspecs import Points
from unlearnd_torch.optimisers import LANES, Optimiser

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

_ROWS_AT_A_TIME = 256


def points_per_epoch(n: int, epochs: Fraction) -> list[int]:
    """Return how many points each epoch takes: all of them, and in a last partial one ⌈fraction·n⌉."""
    whole = epochs.numerator // epochs.denominator
    part = epochs - whole
    rest = -(-part.numerator * n // part.denominator)
    return [n] * (whole if n else 0) + ([rest] if rest else [])


def draw_order(seed: int, epoch: int, n: int, take: int) -> NDArray[np.int64]:
    """Return the first `take` of a fresh permutation of `n` points."""
    order = torch.randperm(n, generator=generator_for(seed, epoch, "order")).numpy()
    return order[:take]


def generator_for(seed: int, *parts: str | int) -> torch.Generator:
    """Return the random stream of that name. It is drawn on the CPU, so every device sees the same one."""
    return torch.Generator().manual_seed(derive_seed(seed, *parts))


def cut_into_batches(points: int, batch_size: int) -> Iterator[slice]:
    """Yield batches of one epoch, a single last point joined to the batch before it.

    Batch normalisation cannot normalise one point. Joining depends on the number of points alone, so that a
    replay cuts the same way.
    """
    start = 0
    while start < points:
        stop = min(start + batch_size, points)
        if points - stop == 1 and batch_size > 1:
            stop = points
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class Scaling:
    """A constituent's scaling of inputs: subtract the mean, divide by the scale; fitted on `count` points."""

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    count: int

    def as_state(self) -> dict[str, NDArray[Any]]:
        """Return the tensors to keep in the constituent's state."""
        return {
            "input.mean": self.mean,
            "input.scale": self.scale,
            "input.count": np.array([self.count], dtype=np.int64),
        }


def unfitted_scaling(features: int) -> Scaling:
    """Return the scaling of a constituent that has seen no point yet."""
    return Scaling(np.zeros(features, np.float32), np.ones(features, np.float32), 0)


def scaling_of(state: State) -> Scaling | None:
    """Return the scaling in a state; None when its settings say `standardize: off`."""
    if "input.count" not in state:
        return None
    return Scaling(state["input.mean"], state["input.scale"], int(state["input.count"][0]))


def fit_scaling(state: State, points: Points, standardize: str, channel_axis: int | None = None) -> Scaling | None:
    """Return the state's scaling, fitted now if it has not been: in a constituent's first training step.

    It stays as it is afterwards: fitting again on later slices would change what earlier weights mean. With a
    channel axis of a point, `channel` and `auto` fit one mean and one spread for each channel.
    """
    scaling = scaling_of(state)
    if scaling is None or scaling.count:
        return scaling
    x = points.x.reshape(len(points.x), -1)
    shape = points.x.shape[1:]
    per_channel = channel_axis is not None and standardize in ("auto", "channel")
    per_feature = standardize == "feature" or (
        standardize == "auto" and points.x.ndim == 2 and points.x.dtype == np.float32
    )

    def level(values: NDArray[np.float64]) -> NDArray[np.float64]:
        if per_channel:
            others = tuple(axis for axis in range(len(shape)) if axis != channel_axis)
            means = values.reshape(shape).mean(others, keepdims=True)
            return np.ascontiguousarray(np.broadcast_to(means, shape)).reshape(-1)
        return values if per_feature else np.full_like(values, values.mean())

    mean = level(_mean_of(x, None))
    scale = np.sqrt(level(_mean_of(x, mean)))
    # A spread below what float32 can tell apart is rounding, not a spread.
    scale[scale <= 1e-7 * np.abs(mean)] = 1.0
    return Scaling(mean.astype(np.float32), scale.astype(np.float32), len(x))


def check_labels(points: Points, classes: int) -> None:
    """Raise `InputError` when a class index is out of range or there is not one per point."""
    if len(points.x) != len(points.y):
        raise InputError(f"{len(points.x)} points have {len(points.y)} labels")
    if len(points.y) and not 0 <= int(points.y.min()) <= int(points.y.max()) < classes:
        raise InputError(f"a class index is out of range: there are {classes} classes, 0 to {classes - 1}")


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a constituent lies in its row of a flat buffer."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    width: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return (constituents, *shape) views of (constituents, width) by name."""
        views = {}
        for name, shape in self.shapes.items():
            offset = self.offsets[name]
            views[name] = flat[:, offset : offset + _size_of(shape)].view(len(flat), *shape)
        return views

    def parts(self, row: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Return views of a single row by name."""
        return {
            name: row[offset : offset + _size_of(self.shapes[name])].reshape(self.shapes[name])
            for name, offset in self.offsets.items()
        }


def lay_out(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Give each parameter a place that begins on a boundary of `LANES` floats."""
    offsets, width = {}, 0
    for name, shape in shapes.items():
        offsets[name] = width
        width += pad(_size_of(shape))
    return Layout(dict(shapes), offsets, max(width, LANES))


def pad(size: int) -> int:
    """Return the next multiple of `LANES`."""
    return -(-size // LANES) * LANES


def load_row(layout: Layout, optimiser: Optimiser, row: int, state: State) -> None:
    """Copy a constituent's parameters and optimiser state into its row."""
    optimiser.steps[row] = int(state["optimizer.step"][0])
    for suffix, flat in _buffers_of(optimiser):
        there = flat[row]
        # On the CPU it is the row itself, and nothing is left to copy; elsewhere it is put together here and sent.
        here = there.cpu()
        for name, part in layout.parts(here.numpy()).items():
            part[...] = state[_key(name, suffix)]
        there.copy_(here)


def dump_row(layout: Layout, optimiser: Optimiser, row: int) -> dict[str, NDArray[Any]]:
    """Return a constituent's parameters and optimiser state; on the CPU they are the row, which must not train on."""
    state: dict[str, NDArray[Any]] = {"optimizer.step": np.array([optimiser.steps[row]], dtype=np.int64)}
    for suffix, flat in _buffers_of(optimiser):
        for name, part in layout.parts(flat[row].cpu().numpy()).items():
            state[_key(name, suffix)] = part
    return state


def _key(name: str, suffix: str | None) -> str:
    return name if suffix is None else f"optimizer.{name}.{suffix}"


def _buffers_of(optimiser: Optimiser) -> list[tuple[str | None, Tensor]]:
    return [(None, optimiser.weights), *optimiser.buffers.items()]


def _mean_of(x: NDArray[Any], around: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the mean per column, or the mean squared distance from `around`, without a copy of `x`."""
    total = np.zeros(x.shape[1], dtype=np.float64)
    for start in range(0, len(x), _ROWS_AT_A_TIME):
        rows = x[start : start + _ROWS_AT_A_TIME].astype(np.float64)
        total += rows.sum(0) if around is None else np.square(rows - around).sum(0)
    return total / len(x)


def _size_of(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
