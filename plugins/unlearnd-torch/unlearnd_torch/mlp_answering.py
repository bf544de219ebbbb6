"""Answer with many multilayer perceptrons at once.

All constituents see the same row, so a few rows go through all first layers side by side, as one wide matrix.
Each constituent scales its inputs in its own way; that is folded into its first layer, around a mean shared
by all, so that subtracting large means costs no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlearnd_torch.devices import OneThread, resolve_device
from unlearnd_torch.harness import scaling_of
from unlearnd_torch.mlp import widths_of
from unlearnd_torch.settings import MlpSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

_WIDE_ROWS = 8
"""Up to this many rows one wide product is faster; above it, a product per constituent keeps to the cache."""
_CHUNK_BYTES = 4 << 20


class StackedPredictor:
    """Probabilities (constituents, n, classes) for features (n, *shape)."""

    def __init__(self, settings: MlpSettings, states: Sequence[State], device: str) -> None:
        self._device = resolve_device(device)
        widths = widths_of(states[0])
        size = len(states)
        self._features, self._first, self._size = widths[0], widths[1], size
        self._layers = len(widths) - 1
        self._activate = _ACTIVATIONS[settings.activation]
        center, factor, weight, bias = _fold_scaling(states)
        self._center, self._factor = center, factor
        wide = np.ascontiguousarray(weight.transpose(1, 0, 2).reshape(widths[0], size * widths[1]))
        self._wide = self._load(wide)
        self._wide_bias = self._load(bias.reshape(-1))
        self._weights = [self._wide.view(widths[0], size, widths[1]).transpose(0, 1)]
        self._biases = [self._wide_bias.view(size, 1, widths[1])]
        for layer in range(1, self._layers):
            weight = np.stack([state[f"layers.{layer}.weight"] for state in states])
            bias = np.stack([state[f"layers.{layer}.bias"] for state in states])
            self._weights.append(self._load(weight))
            self._biases.append(self._load(bias).unsqueeze(1))
        self._chunk = max(64, _CHUNK_BYTES // (4 * size * max(widths[1:])))

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        n = len(x)
        rows = x.reshape(n, self._features)
        with OneThread():
            if n <= self._chunk:
                return self._answer(rows)
            parts = [self._answer(rows[at : at + self._chunk]) for at in range(0, n, self._chunk)]
        return np.concatenate(parts, axis=1)

    def _answer(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        n = len(rows)
        values = torch.empty(n, self._features)  # torch's memory is aligned as numpy's is not: equal bits
        inputs = values.numpy()
        np.subtract(rows, self._center, out=inputs)
        inputs *= self._factor
        values = values.to(self._device)
        if n <= _WIDE_ROWS:
            side_by_side = torch.addmm(self._wide_bias, values, self._wide)
            values = side_by_side.view(n, self._size, self._first).transpose(0, 1)
        else:
            values = values.expand(self._size, n, self._features)
            values = torch.baddbmm(self._biases[0], values, self._weights[0])
        for layer in range(1, self._layers):
            values = self._activate(values)
            values = torch.baddbmm(self._biases[layer], values, self._weights[layer])
        probabilities: NDArray[np.float32] = torch.softmax(values, 2).cpu().numpy()
        return probabilities

    def _load(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.float32, order="C")).to(self._device)


def _fold_scaling(
    states: Sequence[State],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
    """Return a shared mean and factor, then first layers (constituents, in, out) and biases to match them."""
    weight = np.stack([state["layers.0.weight"] for state in states]).astype(np.float64)
    bias = np.stack([state["layers.0.bias"] for state in states]).astype(np.float64)
    scalings = [scaling for scaling in map(scaling_of, states) if scaling is not None]
    features = weight.shape[1]
    if not scalings:
        return np.zeros(features, np.float32), np.ones(features, np.float32), weight, bias
    means = np.stack([scaling.mean for scaling in scalings]).astype(np.float64)
    scales = np.stack([scaling.scale for scaling in scalings]).astype(np.float64)
    center = means.mean(0).astype(np.float32)
    factor = (1 / scales.mean(0)).astype(np.float32)
    # (x - mean) / scale = (x - center) * factor / (factor * scale) + (center - mean) / scale
    bias += np.einsum("si,sio->so", (center - means) / scales, weight)
    weight /= (factor * scales)[:, :, None]
    return center, factor, weight, bias


_ACTIVATIONS = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "gelu": torch.nn.functional.gelu,
}
