"""Images as they are stored, as networks see them, and how they are varied in training.

Stored points are arrays of any shape; a network wants (n, channels, height, width). `image_of` says which axis is
which, from the shape and the setting `layout` alone. Random crops and flips are drawn from the step's seed and the
epoch's number, on the CPU, one draw per point in the order the epoch takes them: a replay varies every image in
the same way, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from unlearnd.errors import InputError
from unlearnd_torch.harness import generator_for
from unlearnd_torch.settings import ImageSettings


@dataclass(frozen=True)
class Image:
    """How one stored point is an image."""

    layout: str
    """`hw`, `hwc` or `chw`: the order of the stored axes."""
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    def turn(self, x: Tensor) -> Tensor:
        """Return a view (n, channels, height, width) of points as they are stored."""
        if self.layout == "hw":
            return x.unsqueeze(1)
        return x.permute(0, 3, 1, 2) if self.layout == "hwc" else x


def image_of(shape: tuple[int, ...], layout: str) -> Image:
    """Return how points of that shape are images; raise `InputError` when they are not.

    With `auto`, two axes are height and width, and of three the shorter of the first and the last is the channels.
    """
    if len(shape) == 2 and layout in ("auto", "hw"):
        return Image("hw", 1, *shape)
    if len(shape) == 3 and layout != "hw":
        first, last = shape[0], shape[2]
        if layout == "auto" and first == last:
            raise InputError(f"points of shape {shape} may be images of two kinds: set layout to 'hwc' or 'chw'")
        if layout == "hwc" or (layout == "auto" and last < first):
            return Image("hwc", last, shape[0], shape[1])
        return Image("chw", first, shape[1], shape[2])
    forms = {"auto": "two axes (height, width) or three (with channels first or last)", "hw": "two axes"}
    raise InputError(
        f"points of shape {shape} are no images: layout '{layout}' needs {forms.get(layout, 'three axes')}"
    )


@dataclass(frozen=True)
class Variation:
    """Crops and flips of the points of one epoch, in the order the epoch takes them."""

    padding: int
    down: Tensor | None
    """Where each crop begins in the padded image: (n, 2) of row and column."""
    flipped: Tensor | None

    def apply(self, x: Tensor, batch: slice) -> Tensor:
        """Return a batch (n, channels, height, width) varied; what a crop takes from outside is 0."""
        height, width = x.shape[2:]
        rows = torch.arange(height).expand(len(x), height)
        columns = torch.arange(width).expand(len(x), width)
        if self.flipped is not None:
            columns = torch.where(self.flipped[batch].unsqueeze(1), width - 1 - columns, columns)
        if self.down is not None:
            rows = rows + self.down[batch, :1]
            columns = columns + self.down[batch, 1:]
            x = functional.pad(x, (self.padding,) * 4)
        # One gather does both: a flip reads the crop's columns backwards.
        which = torch.arange(len(x), device=x.device)[:, None, None]
        rows, columns = rows.to(x.device)[:, :, None], columns.to(x.device)[:, None, :]
        return x.permute(0, 2, 3, 1)[which, rows, columns].permute(0, 3, 1, 2)


def draw_variation(settings: ImageSettings, seed: int, epoch: int, points: int) -> Variation | None:
    """Draw how the first `points` of an epoch are varied; None when the settings say not at all."""
    if not settings.crop_padding and not settings.flip:
        return None
    padding, down, flipped = settings.crop_padding, None, None
    if padding:
        down = torch.randint(0, 2 * padding + 1, (points, 2), generator=generator_for(seed, epoch, "crop"))
    if settings.flip:
        flipped = torch.rand(points, generator=generator_for(seed, epoch, "flip")) < 0.5
    return Variation(padding, down, flipped)
