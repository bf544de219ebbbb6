"""Batches of perceptrons: which points each constituent takes at each step, gathered for several steps at a time.

Which points, and in what order, follows from a job's seed and size alone, so it is the same in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlearnd.hookspecs import Job, Points
from unlearnd_torch.devices import Feed
from unlearnd_torch.harness import Scaling, draw_order, generator_for, pad, points_per_epoch
from unlearnd_torch.settings import MlpSettings

_BLOCK_BYTES = 8 << 20
"""Inputs gathered at a time. Larger blocks fall out of the cache before they are used."""
_GATHER_BYTES = 512 << 10
"""Points gathered at a time: what is gathered should be in a near cache when it is copied and scaled, and Python be
asked seldom."""
_BLOCK_WORK = 1 << 31
"""Multiplications between two words of progress: a tenth of a second or two."""

_Read = tuple[Tensor, Sequence[Tensor], Tensor, Tensor, list[Tensor]]


class Stream:
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


class Source:
    """Where a constituent's batches come from."""

    def __init__(self, points: Points, stream: Stream, scaling: Scaling | None, device: torch.device) -> None:
        flat = points.x.reshape(len(points.x), -1)
        self.feed = Feed(flat, points.y, device)
        self.y = points.y
        self.width = flat.shape[1] * flat.itemsize
        self.stream = stream
        self.mean = self.factor = None
        if scaling is not None:
            self.mean = torch.from_numpy(scaling.mean.copy()).to(device)
            self.factor = torch.from_numpy(1 / scaling.scale).to(device)


class Block:
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
        self._masks = [aligned(size, self.steps, batch, width, device) for width in hidden]
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

    def fill(self, left: Sequence[int], sources: Sequence[Source]) -> int:
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

    def _gather(self, row: int, rows: NDArray[np.int64], source: Source) -> None:
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


def aligned(size: int, steps: int, batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a (size, steps, padded) buffer and its (size, steps, batch, width) view."""
    flat = torch.zeros(size, steps, pad(batch * width), device=device)
    return flat, flat[:, :, : batch * width].view(size, steps, batch, width)
