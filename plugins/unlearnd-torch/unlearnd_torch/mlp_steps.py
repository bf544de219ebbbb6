"""One training step of several perceptrons at once: forward, backward, and the calls of both written down beforehand.

The backward pass is written out: at these sizes autograd costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unlearnd_torch.harness import lay_out
from unlearnd_torch.mlp_batches import Block, aligned
from unlearnd_torch.optimisers import LANES, make_optimiser
from unlearnd_torch.settings import MlpSettings

_Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


class Stack:
    """Parameters, activations and gradients of several constituents."""

    def __init__(self, settings: MlpSettings, widths: tuple[int, ...], size: int, device: torch.device) -> None:
        self.layout = lay_out(parameter_shapes(widths))
        self.optimiser = make_optimiser(settings, torch.zeros(size, self.layout.width, device=device))
        self._activate, self._pull_back, in_place = _ACTIVATIONS[settings.activation]
        batch = settings.batch_size
        self._weights = self.layout.views(self.optimiser.weights)
        self._gradients = self.layout.views(self.optimiser.gradient)
        self._before = [aligned(size, 1, batch, width, device) for width in widths[1:]]
        self._after = self._before if in_place else _like(self._before)
        self._kept = _like(self._after) if settings.dropout else self._after
        self._masks = _like(self._after[:-1]) if settings.dropout else []
        self._deltas = _like(self._before)
        self._per_row = torch.zeros(size, batch, 1, device=device)
        self._now: _Views | None = None

    def step(self, active: int, block: Block, step: int) -> None:
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

    def __init__(self, stack: Stack, active: int) -> None:
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


def parameter_shapes(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        shapes[f"layers.{layer}.weight"] = (inputs, outputs)
        shapes[f"layers.{layer}.bias"] = (outputs,)
    return shapes


def _like(buffers: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [aligned(view.shape[0], view.shape[1], view.shape[2], view.shape[3], flat.device) for flat, view in buffers]


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
