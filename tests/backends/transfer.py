"""A backend on a frozen base, as small as it gets: a leaky `relu(x @ base)` makes features, a regression learns.

Test modules cannot import each other, and child processes cannot import any; both load this file by its path.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unlearnd.default_plugins.linear import LinearBackend
from unlearnd.errors import InputError

BASE = ("base", "base_public")


def without_base(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of the regression alone."""
    return {name: value for name, value in settings.items() if name not in BASE}


class TransferBackend(LinearBackend):
    """The backend `transfer`. `rows_seen` counts the rows that features were computed of, by this object."""

    name = "transfer"

    def __init__(self) -> None:
        self.rows_seen = 0

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        return {**super().settings(without_base(given)), **{name: given[name] for name in BASE if name in given}}

    def train(self, settings: Mapping[str, Any], job: Any, device: str, on_progress: Any) -> Any:
        return super().train(without_base(settings), job, device, on_progress)

    def features_key(self, settings: Mapping[str, Any]) -> str | None:
        return "relu" if "base" in settings else None

    def features(self, settings: Mapping[str, Any], base: Any, x: Any, device: str) -> Any:
        self.rows_seen += len(x)
        weight = base["weight"]
        if x.shape[1:] != weight.shape[:1]:
            raise InputError(f"the base takes {weight.shape[0]} features, the dataset has {x.shape[1]}")
        # A sum down an axis of its own: no row meets another.
        made = (x[:, :, None] * weight[None]).sum(axis=1, dtype=np.float32)
        return np.maximum(made, made / 8)

    def initial_state_on(
        self, settings: Mapping[str, Any], base: Any, shape: Sequence[int], classes: int, seed: int
    ) -> Any:
        return self.initial_state(settings, (base["weight"].shape[1],), classes, seed)
