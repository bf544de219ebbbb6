"""Name every checkpoint by what it is made from.

    recipe(k, 0) = H(model spec, seed, k)
    recipe(k, r) = H(recipe(k, r-1), root of slice (k, r), epochs at step r)

A state is the output of a pure function of these, so the name says all there is to say: whatever exists
under its recipe need not be trained again, and whatever was made from a root that is no longer the slice's
root has no name that anybody will look up. Nothing else decides what to train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from unlearnd.digests import Digest, derive_seed, digest_of_json
from unlearnd.errors import InputError

SCHEDULES = ("uniform", "equal-work")


@dataclass(frozen=True)
class Spec:
    """All that a model is made from but its data: no path, no date, no host."""

    backend: str
    backend_version: str
    settings: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: str
    classes: tuple[int | str, ...]
    shards: int
    slices: int
    """How many slices a shard had when the model was declared; slices added later train like the last."""
    epochs: Fraction
    """Epochs that a constituent would train without slicing: e′ of the paper."""
    schedule: str

    def as_json(self) -> dict[str, Any]:
        """Return the spec as JSON values, as it is hashed and stored."""
        return {
            "backend": self.backend,
            "backend_version": self.backend_version,
            "settings": dict(self.settings),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "classes": list(self.classes),
            "shards": self.shards,
            "slices": self.slices,
            "epochs": str(self.epochs),
            "schedule": self.schedule,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Spec":
        """Return the spec that `as_json` was made from."""
        return cls(
            **{
                **stored,
                "shape": tuple(stored["shape"]),
                "classes": tuple(stored["classes"]),
                "epochs": Fraction(stored["epochs"]),
            }
        )


def check_schedule(name: str) -> None:
    """Raise `InputError` unless there is a schedule of that name."""
    if name not in SCHEDULES:
        raise InputError(f"no schedule '{name}'; there are: {', '.join(SCHEDULES)}")


def epochs_of(spec: Spec, steps: int) -> list[Fraction]:
    """Return how many epochs each of the first `steps` steps trains; step r trains on slices 1…r.

    `uniform` is the paper's: e_r = 2e′/(R+1), so that all steps together cost e′ epochs over the whole shard
    (its equation 1). `equal-work` spends the same total with every step costing the same: e_r = e′/r.
    """
    if spec.schedule == "equal-work":
        return [spec.epochs / step for step in range(1, steps + 1)]
    return [2 * spec.epochs / (spec.slices + 1)] * steps


def epochs_at(spec: Spec, step: int) -> Fraction:
    """Return how many epochs step `step` trains on slices 1…`step`."""
    return epochs_of(spec, step)[-1]


def samples_at(epochs: Fraction, points: int) -> int:
    """Return how many samples `epochs` over `points` are: a partial epoch is rounded up to a whole point."""
    return -(-epochs.numerator * points // epochs.denominator)


def recipes(spec: Spec, seed: int, shard: int, roots: Sequence[Digest], sliceable: bool) -> list[Digest]:
    """Return recipe(k, 0), recipe(k, 1), … for the slice roots given."""
    chain = [digest_of_json(["unlearnd/recipe/v1", spec.as_json(), seed, shard])]
    each = epochs_of(spec, len(roots)) if sliceable else [spec.epochs] * len(roots)
    for root, epochs in zip(roots, each, strict=True):
        chain.append(digest_of_json([chain[-1], root, str(epochs)]))
    return chain


def step_seed(seed: int, shard: int, step: int) -> int:
    """Return the seed of one step; step 0 is the initial state."""
    return derive_seed(seed, shard, step)
