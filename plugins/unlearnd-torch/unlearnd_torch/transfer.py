"""Train the end of a network on top of a frozen base: the base's blocks make features, the last blocks learn.

A network is a row of blocks and is cut once. What comes before the cut is the base's, in evaluation mode, and never
changes; what comes after starts from the base's weights, but for the head `fc`, which is drawn anew, and is all that
a constituent's state holds.

The features of a point may not depend on the points that come with it. Kernels choose their way by the size of a
batch, and so do bits; so every batch has the same size, filled up with zeros. That a point's place in such a batch
makes no difference either is tried out for every network before it is relied on; where it does, points go alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unlearnd.digests import canonical_json
from unlearnd.errors import InputError
from unlearnd_torch.devices import frozen_batch, own_randomness, resolve_device, steady
from unlearnd_torch.module import Build, Preparation, draw_initial_state, scaling_before
from unlearnd_torch.networks import Block, Network, blocks_of, build_network
from unlearnd_torch.settings import ImageSettings, ModuleSettings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State

_UNUSED = "num_batches_tracked"
"""Counted by batch norm and used by nobody; older published weights lack it."""


def cut_of(settings: ImageSettings, network: Network) -> int:
    """Return the number of frozen blocks; raise `InputError` when the settings leave none to freeze."""
    learning = 1 if settings.train == "head" else 1 + int(settings.train.removeprefix("last-"))
    blocks = blocks_of(network)
    if learning >= len(blocks):
        raise InputError(
            f"train={settings.train} leaves nothing of the base frozen: the network has {len(blocks) - 1} blocks below "
            f"its head, so say last-{len(blocks) - 2} at most, or leave the base out"
        )
    return len(blocks) - learning


def tail_settings(settings: ImageSettings) -> ModuleSettings:
    """Return how the end of a network trains on features: like any module, on arrays that are no images.

    What enters the head is brought to a common scale, fitted on the constituent's own first points. Blocks that come
    from the base want to be shown what they were trained on, so they get it as it is.
    """
    common = {name: getattr(settings, name) for name in ModuleSettings.model_fields}
    common["standardize"] = "global" if settings.train == "head" else "off"
    return ModuleSettings.model_validate(common)


def draw_state(settings: ImageSettings, base: State, shape: tuple[int, ...], classes: int, seed: int) -> State:
    """Return the state before slice 1 of what trains: blocks as in the base, and a fresh head."""

    def build() -> nn.Module:
        network = _cut_off(settings, shape, classes)
        _load(network, base, blocks_of(network)[network.begin : -1])
        return network

    _check_fits(settings, base, shape)
    state = draw_initial_state(build, tail_settings(settings), _shape_of_features(settings, shape), classes, seed)
    return {**state, "base.shape": np.array(shape, np.int64)}


def build_tail(settings: ImageSettings, state: State, classes: int) -> Build:
    """Return what builds the end of the network that a state belongs to."""
    shape = tuple(int(length) for length in state["base.shape"])
    return lambda: _cut_off(settings, shape, classes)


class Frozen:
    """The blocks before the cut, ready to make features."""

    def __init__(self, settings: ImageSettings, base: State, shape: tuple[int, ...], device: str) -> None:
        self._device, self._tf32 = resolve_device(device), settings.tf32
        with own_randomness(torch.device("cpu"), 0):
            network = build_network(settings, shape, 1)
        cut = cut_of(settings, network)
        _check_fits(settings, base, shape)
        _load(network, base, blocks_of(network)[:cut])
        self._network = network.eval().requires_grad_(False).to(self._device)
        self._blocks = blocks_of(network)[:cut]
        self._prepare = Preparation(settings, shape, scaling_before(settings, shape), self._device)
        self._shape, self._size = shape, frozen_batch(self._device)
        with steady(self._device, self._tf32), torch.inference_mode():
            if not self._place_makes_no_difference():
                self._size = 1

    def features(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return what the frozen blocks make of points."""
        with steady(self._device, self._tf32), torch.inference_mode():
            made = [self._run(x[at : at + self._size]) for at in range(0, max(len(x), 1), self._size)]
        return np.concatenate(made)

    def _run(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        full = np.zeros((self._size, *self._shape), rows.dtype)
        full[: len(rows)] = rows
        made: NDArray[np.float32] = self._forward(torch.from_numpy(full)).cpu().numpy()
        return made[: len(rows)]

    def _forward(self, x: Tensor) -> Tensor:
        x = self._prepare(x.to(self._device))
        for block in self._blocks:
            x = block.run(x)
        return x.contiguous()

    def _place_makes_no_difference(self) -> bool:
        """Try out whether a point has the same features wherever it is in a batch, whatever else is in it."""
        generator = torch.Generator().manual_seed(0)
        points = torch.rand(self._size, *self._shape, generator=generator)
        others = torch.rand(self._size, *self._shape, generator=generator) * 4
        here = self._forward(points)
        for by in {1, self._size // 2}:
            if not torch.equal(self._forward(points.roll(by, 0)), here.roll(by, 0)):
                return False
        for place in {0, self._size - 1}:
            others[place] = points[place]
        mixed = self._forward(others)
        return all(torch.equal(mixed[place], here[place]) for place in {0, self._size - 1})


_newest: list[tuple[bytes, Frozen]] = []
"""The frozen part used last: a shard comes in many segments, and loading and trying out is not to be done for each."""


def features(
    settings: ImageSettings, given: Mapping[str, Any], base: State, x: NDArray[Any], device: str
) -> NDArray[np.float32]:
    """Return the features of points (n, *shape)."""
    shape = tuple(int(length) for length in x.shape[1:])
    # The settings name the base by digest, so this is all that a frozen part depends on.
    key = canonical_json([type(settings).__name__, dict(given), list(shape), device])
    if not _newest or _newest[0][0] != key:
        _newest[:] = [(key, Frozen(settings, base, shape, device))]
    return _newest[0][1].features(x)


def _cut_off(settings: ImageSettings, shape: tuple[int, ...], classes: int) -> Network:
    """Return a network that begins at the cut; what is before it is taken out, so that it is in no state."""
    network = build_network(settings, shape, classes)
    network.begin = cut_of(settings, network)
    for block in blocks_of(network)[: network.begin]:
        for part in block.parts:
            above, _, name = part.rpartition(".")
            setattr(network.get_submodule(above), name, nn.Identity())
    return network


def _shape_of_features(settings: ImageSettings, shape: tuple[int, ...]) -> tuple[int, ...]:
    with torch.device("meta"), torch.inference_mode():
        network = build_network(settings, shape, 1).eval()
        x = Preparation(settings, shape, None, torch.device("meta"))(torch.empty(1, *shape))
        for block in blocks_of(network)[: cut_of(settings, network)]:
            x = block.run(x)
    return tuple(x.shape[1:])


def _load(network: Network, base: State, blocks: list[Block]) -> None:
    """Copy the base's tensors into some blocks."""
    parts = tuple(f"{part}." for block in blocks for part in block.parts)
    for name, tensor in network.state_dict().items():
        if name.startswith(parts) and name in base:
            tensor.copy_(torch.from_numpy(np.array(base[name], order="C")))


def _check_fits(settings: ImageSettings, base: State, shape: tuple[int, ...]) -> None:
    """Raise `InputError` unless the base is of this very network, its head aside."""
    with torch.device("meta"):
        wanted = build_network(settings, shape, 1).state_dict()
    for name, tensor in wanted.items():
        if name.startswith("fc.") or name.endswith(_UNUSED):
            continue
        if name not in base:
            raise InputError(f"the base has no tensor '{name}', which this network has: it is of another one")
        if base[name].shape != tuple(tensor.shape):
            raise InputError(f"the base has '{name}' of shape {base[name].shape}, this network {tuple(tensor.shape)}")
        if base[name].dtype.kind != "f":
            raise InputError(f"the base has '{name}' in {base[name].dtype}, which is no float")
    strange = sorted(name for name in base if name not in wanted and not name.startswith("fc."))
    if strange:
        raise InputError(f"the base has a tensor '{strange[0]}', which this network has not: it is of another one")
