"""The networks: `ConvNet`, `ResNet`, `WideResNet`, from (n, channels, height, width) to (n, classes) logits.

Names of parameters and buffers are those that published weights have: torchvision's for `ResNet` (`conv1`, `bn1`,
`layer1.0.conv1`, `layer2.0.downsample.0`, `fc`), and for `WideResNet` those of the CIFAR networks of its paper as
they are passed around for PyTorch (`block1.layer.0.convShortcut`, `bn1`, `fc`).

Every network is a row of blocks, and running the blocks in order is all that `forward` does. `blocks_of` lists
them: the first is the stem, the last is the head `fc`, a single linear layer, and what enters the head is flat.
Whoever keeps the first blocks as they are and trains the rest can cut between any two of them; the names of a
block's own parts say which tensors of a `state_dict` belong to it.

Only what has a deterministic form on every device is used: a mean instead of adaptive average pooling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from unlearnd.errors import InputError
from unlearnd_torch.images import image_of
from unlearnd_torch.settings import ConvNetSettings, ImageSettings, ResNetSettings, WideResNetSettings


@dataclass(frozen=True)
class Block:
    """One stage of a network: what it is called, the submodules it owns, and what it does."""

    name: str
    parts: tuple[str, ...]
    """Names of submodules; a tensor belongs to the block if its name begins with one of them and a dot."""
    run: Callable[[Tensor], Tensor]


class Network(nn.Module):
    """A row of blocks that ends in `fc`."""

    fc: nn.Linear
    begin = 0
    """The first block that runs. Those before it may have been taken out: `transfer` makes features of theirs."""

    def blocks(self) -> list[Block]:
        """Return the blocks in the order they run."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks()[self.begin :]:
            x = block.run(x)
        return x


def build_network(settings: ImageSettings, shape: tuple[int, ...], classes: int) -> Network:
    """Return the network that the settings are for, freshly drawn; raise `InputError` when points are no images."""
    image = image_of(shape, settings.layout).shape
    if isinstance(settings, ConvNetSettings):
        return ConvNet(image, classes, settings.channels, settings.kernel, settings.hidden, settings.dropout)
    if isinstance(settings, ResNetSettings):
        return ResNet(image, classes, settings.depth, settings.stem, settings.width)
    if isinstance(settings, WideResNetSettings):
        return WideResNet(image, classes, settings.depth, settings.width, settings.dropout)
    raise InputError(f"no network has settings of the kind {type(settings).__name__}")


def blocks_of(network: Network) -> list[Block]:
    """Return a network's blocks in the order they run: the stem first, the head `fc` last."""
    return network.blocks()


class ConvNet(Network):
    """Two convolutions, each halved by a max pool, then two fully connected layers: the paper's network for MNIST."""

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        channels: tuple[int, int],
        kernel: int,
        hidden: int,
        drop: float,
    ) -> None:
        super().__init__()
        depth, height, width = image
        if min(height, width) < 4:
            raise InputError(f"images of {height} × {width} are too small for a ConvNet: it halves them twice")
        self.conv1 = nn.Conv2d(depth, channels[0], kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel, padding=kernel // 2)
        self.fc1 = nn.Linear(channels[1] * (height // 4) * (width // 4), hidden)
        self.fc = nn.Linear(hidden, classes)
        self._drop = drop

    def blocks(self) -> list[Block]:
        return [
            Block("conv1", ("conv1",), lambda x: _halve(self.conv1(x))),
            Block("conv2", ("conv2",), lambda x: _halve(self.conv2(x))),
            Block("fc1", ("fc1",), self._hide),
            Block("fc", ("fc",), self.fc),
        ]

    def _hide(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.fc1(x.flatten(1)))
        return functional.dropout(hidden, self._drop, self.training) if self._drop else hidden


class ResNet(Network):
    """A residual network of depth 18, 34 or 50 (He et al. 2016), with a stem for small images or for large ones.

    The large stem is the paper's: 7 × 7 with stride 2, then a max pool, an eighth of the work per pixel. The small
    one, 3 × 3 with stride 1, keeps what little there is to see. Strides of the deeper blocks are on the 3 × 3
    convolution, as in torchvision.
    """

    def __init__(self, image: tuple[int, int, int], classes: int, depth: int, stem: str, width: int) -> None:
        super().__init__()
        make, counts = _DEPTHS[depth]
        self._large = stem == "large" or (stem == "auto" and min(image[1:]) >= _LARGE)
        if self._large:
            self.conv1 = nn.Conv2d(image[0], width, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(image[0], width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(counts):
            outputs = width * 2**stage
            layers = []
            for place in range(count):
                layers.append(make(inputs, outputs, 2 if stage and not place else 1))
                inputs = outputs * make.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes)
        _draw_as_he(self)

    def blocks(self) -> list[Block]:
        blocks = [Block("stem", ("conv1", "bn1"), self._begin)]
        for stage in range(1, 5):
            layers: nn.Sequential = getattr(self, f"layer{stage}")
            for place, layer in enumerate(layers):
                name = f"layer{stage}.{place}"
                last = stage == 4 and place == len(layers) - 1
                blocks.append(Block(name, (name,), _then_mean(layer) if last else layer))
        return [*blocks, Block("fc", ("fc",), self.fc)]

    def _begin(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.max_pool2d(x, 3, 2, 1) if self._large else x


class WideResNet(Network):
    """WRN-d-k (Zagoruyko and Komodakis 2016): three groups of (d - 4) / 6 wide residual blocks."""

    def __init__(self, image: tuple[int, int, int], classes: int, depth: int, width: int, drop: float) -> None:
        super().__init__()
        count = (depth - 4) // 6
        widths = (16, 16 * width, 32 * width, 64 * width)
        self.conv1 = nn.Conv2d(image[0], widths[0], 3, padding=1, bias=False)
        for group in (1, 2, 3):
            layers = [
                _WideBlock(widths[group - (place == 0)], widths[group], 2 if group > 1 and not place else 1, drop)
                for place in range(count)
            ]
            setattr(self, f"block{group}", _Group(layers))
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.fc = nn.Linear(widths[3], classes)
        _draw_as_he(self)
        nn.init.zeros_(self.fc.bias)

    def blocks(self) -> list[Block]:
        blocks = [Block("stem", ("conv1",), self.conv1)]
        for group in (1, 2, 3):
            layers: nn.Sequential = getattr(self, f"block{group}").layer
            for place, layer in enumerate(layers):
                name = f"block{group}.layer.{place}"
                if group == 3 and place == len(layers) - 1:
                    blocks.append(Block(name, (name, "bn1"), self._end))
                else:
                    blocks.append(Block(name, (name,), layer))
        return [*blocks, Block("fc", ("fc",), self.fc)]

    def _end(self, x: Tensor) -> Tensor:
        group: _Group = self.block3  # type: ignore[assignment]
        return functional.relu(self.bn1(group.layer[-1](x)), inplace=True).mean((2, 3))


class _Basic(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return functional.relu(out, inplace=True)


class _Bottleneck(nn.Module):
    """A 3 × 3 convolution between two of 1 × 1, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv3 = nn.Conv2d(outputs, outputs * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs * self.expansion)
        self.downsample = _shortcut(inputs, outputs * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = functional.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return functional.relu(out, inplace=True)


class _WideBlock(nn.Module):
    """Batch norm and activation come before each convolution; a change of width is made by `convShortcut`."""

    def __init__(self, inputs: int, outputs: int, stride: int, drop: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.convShortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self._drop = drop

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.bn1(x), inplace=True)
        out = functional.relu(self.bn2(self.conv1(active)), inplace=True)
        if self._drop:
            out = functional.dropout(out, self._drop, self.training)
        out = self.conv2(out)
        return torch.add(x if self.convShortcut is None else self.convShortcut(active), out)


class _Group(nn.Module):
    """Blocks under the name `layer`."""

    def __init__(self, layers: list[_WideBlock]) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layers)


_LARGE = 96
"""Images from this size on get the large stem when nobody chose: what it leaves of smaller ones is too little."""

_DEPTHS: dict[int, tuple[type[_Basic | _Bottleneck], tuple[int, int, int, int]]] = {
    18: (_Basic, (2, 2, 2, 2)),
    34: (_Basic, (3, 4, 6, 3)),
    50: (_Bottleneck, (3, 4, 6, 3)),
}


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _halve(x: Tensor) -> Tensor:
    return functional.max_pool2d(functional.relu(x), 2)


def _then_mean(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).mean((2, 3))


def _draw_as_he(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
