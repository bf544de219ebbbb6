"""SGD, Adam and AdamW over one flat buffer that holds every constituent of a stack.

A row is a constituent; a step is a handful of elementwise operations over the first `active` rows. The step
count, and so the learning rate and Adam's corrections, belong to the row: a constituent advances the same
whether it is alone or between others. The results agree with `torch.optim`, which we do not use because its
fused forms give other bits, and one optimiser per constituent costs more than the arithmetic.

Bits stay equal for every stack because the width of a row is a multiple of `LANES`: no kernel then handles
the end of one row differently from the middle of a stack. `harness` lays the buffers out so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unlearnd_torch.settings import TrainingSettings

LANES = 64
"""Floats in the widest run any CPU kernel of torch takes at a time (four AVX-512 registers)."""


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Return the rate of step 0, 1, 2, …: a function of the step number alone, never of data or epochs."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    after = step - settings.warmup_steps
    if settings.schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * min(after / settings.decay_steps, 1))) / 2
    if settings.schedule == "step":
        return settings.lr * settings.gamma ** (after // settings.decay_steps)
    return settings.lr


class Optimiser:
    """Advances rows of `weights` by what is in `gradient`.

    Before each step the gradient buffer must hold `carry` times what it held, plus the new gradient. With
    momentum the buffer *is* the momentum, so that the matrix product of the backward pass can add to it.
    """

    carry = 0.0
    kept: tuple[str, ...] = ()
    """Names of the buffers that are part of a constituent's state."""

    def __init__(self, settings: TrainingSettings, weights: Tensor) -> None:
        self.weights = weights
        self.buffers = {name: torch.zeros_like(weights) for name in self.kept}
        self.gradient = self.buffers["momentum"] if self.carry else torch.zeros_like(weights)
        self.steps = [0] * len(weights)
        self._settings = settings
        self._same_rate = settings.schedule == "constant" and settings.warmup_steps == 0
        self._cut: tuple[int, tuple[Tensor, ...]] = (-1, ())

    def advance(self, active: int) -> None:
        """Take one step with the first `active` rows."""
        raise NotImplementedError

    def _rows(self, active: int) -> tuple[Tensor, ...]:
        """Return the first `active` rows of weights, gradient and buffers, cut out once for all steps with as many."""
        if self._cut[0] != active:
            self._cut = active, tuple(whole[:active] for whole in (self.weights, self.gradient, *self.buffers.values()))
        return self._cut[1]

    def _clip(self, active: int) -> None:
        """Shorten each row's gradient to `clip_norm` if it is longer."""
        if not self._settings.clip_norm:
            return
        # Row by row: how a norm over a whole stack is summed up depends on how many rows there are.
        for row in self.gradient[:active]:
            norm = torch.linalg.vector_norm(row)
            row.mul_((self._settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))

    def _rates(self, active: int) -> list[float]:
        return [learning_rate(self._settings, step) for step in self.steps[:active]]

    def _count(self, active: int) -> None:
        for row in range(active):
            self.steps[row] += 1

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1).to(self.weights.device)


class Sgd(Optimiser):
    """Gradient descent, with momentum if it is set."""

    def __init__(self, settings: TrainingSettings, weights: Tensor) -> None:
        self.kept = ("momentum",) if settings.momentum else ()
        # Nesterov and clipping need the gradient by itself.
        self._apart = bool(settings.momentum) and (settings.nesterov or settings.clip_norm > 0)
        self.carry = 0.0 if self._apart else settings.momentum
        super().__init__(settings, weights)

    def advance(self, active: int) -> None:
        settings = self._settings
        weights, gradient, *momenta = self._rows(active)
        self._clip(active)
        if settings.weight_decay:
            gradient.add_(weights, alpha=settings.weight_decay)
        if self._apart:
            (momentum,) = momenta
            momentum.mul_(settings.momentum).add_(gradient)
            if settings.nesterov:
                gradient.add_(momentum, alpha=settings.momentum)
            else:
                gradient = momentum
        if self._same_rate:
            weights.add_(gradient, alpha=-settings.lr)
        else:
            weights.sub_(gradient * self._column(self._rates(active)))
        self._count(active)


class Adam(Optimiser):
    """Adam, and AdamW, which takes weight decay out of the gradient."""

    kept = ("exp_avg", "exp_avg_sq")

    def advance(self, active: int) -> None:
        settings = self._settings
        weights, gradient, average, squares = self._rows(active)
        first, second = settings.betas
        self._clip(active)
        rates = self._rates(active)
        self._count(active)
        corrections = [math.sqrt(1 - second**step) for step in self.steps[:active]]
        sizes = [
            rate * correction / (1 - first**step)
            for rate, correction, step in zip(rates, corrections, self.steps, strict=False)
        ]
        if settings.weight_decay and settings.optimizer == "adamw":
            weights.mul_(self._column([1 - rate * settings.weight_decay for rate in rates]))
        elif settings.weight_decay:
            gradient.add_(weights, alpha=settings.weight_decay)
        average.lerp_(gradient, 1 - first)
        squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        # rate / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps), with the corrections moved out of the fraction
        # to save two passes. The gradient has been used: its buffer takes the quotient.
        torch.sqrt(squares, out=gradient)
        gradient.add_(self._column([settings.eps * correction for correction in corrections]))
        torch.div(average, gradient, out=gradient)
        weights.sub_(gradient.mul_(self._column(sizes)))


def make_optimiser(settings: TrainingSettings, weights: Tensor) -> Optimiser:
    """Return the optimiser that the settings name, at step 0, over (constituents, parameters) weights."""
    return Sgd(settings, weights) if settings.optimizer == "sgd" else Adam(settings, weights)
