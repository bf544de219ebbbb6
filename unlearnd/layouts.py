"""Lay a dataset out by who is likely to leave: from erasure probabilities by group to a frozen layout.

A layout is made when a dataset is created, from the priors alone: a probability and an expected share of the points
for each group. It never looks at a point. Groups lie one after the other on an axis, least likely to leave first,
each as long as its share; a point's position on it comes from its keyed number and its declared group. Everything is
in whole numbers, so whoever holds the placement key and the layout gets the same place on any machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlearnd.errors import InputError

AXIS = 1 << 32
"""The length of the axis."""
OTHERS = "*"
"""The group that stands for all that are not named."""
SMALLEST_SHARE = 1e-6
KINDS: Mapping[str, tuple[bool, float | None]] = {
    "aware": (True, None),
    "aware-algorithm-1": (False, 1.0),
    "aware-both": (True, 1.0),
    "aware-square-root": (False, 0.5),
}
"""The layouts by name: whether slices are ordered by risk, and by which power of the probability shards are cut."""


@dataclass(frozen=True)
class Risk:
    """What is expected of a group before any of its points is seen."""

    group: str
    probability: float
    """That one of its users asks to be erased, in whatever span of time all groups share."""
    share: float | None = None
    """Its expected share of the points; None where nobody said: groups then share alike what is left."""


Risks = Sequence[Risk] | Mapping[str, float | Sequence[float]]
"""Priors as a person gives them: by group a probability, or a probability and a share."""


@dataclass(frozen=True)
class FrozenLayout:
    """Where each group goes. Whoever has this and the placement key can recompute every place."""

    groups: tuple[str, ...]
    """Least likely to leave first."""
    edges: tuple[int, ...]
    """Group i lies on the axis from `edges[i]` up to `edges[i + 1]`."""
    probabilities: tuple[float, ...]
    ordered: bool
    """Whether slices follow the axis inside each shard, so that the likeliest to leave come last."""
    shard_edges: tuple[int, ...] | None
    """Shard k lies on the axis from `shard_edges[k - 1]` to `shard_edges[k]`; None when every shard has all of it."""

    def as_json(self) -> dict[str, Any]:
        """Return the layout as it is stored and logged: text and whole numbers only."""
        return {
            "groups": list(self.groups),
            "edges": list(self.edges),
            "probabilities": [repr(p) for p in self.probabilities],
            "ordered": self.ordered,
            "shardEdges": None if self.shard_edges is None else list(self.shard_edges),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "FrozenLayout":
        """Return the layout that `as_json` was made from."""
        edges = stored["shardEdges"]
        return cls(
            groups=tuple(stored["groups"]),
            edges=tuple(stored["edges"]),
            probabilities=tuple(float(p) for p in stored["probabilities"]),
            ordered=stored["ordered"],
            shard_edges=None if edges is None else tuple(edges),
        )


@dataclass(frozen=True)
class ByRisk:
    """A placement that is laid out by risk: what plugins register."""

    ordered: bool
    power: float | None

    def freeze(self, risks: Sequence[Risk], shards: int) -> Mapping[str, Any]:
        return freeze(risks, shards, ordered=self.ordered, power=self.power).as_json()

    def rule(self, layout: Mapping[str, Any]) -> "RiskRule":
        return RiskRule(FrozenLayout.from_json(layout))


@dataclass(frozen=True)
class RiskRule:
    """The rule of a frozen layout."""

    layout: FrozenLayout

    def __call__(
        self, numbers: NDArray[np.uint64], groups: Sequence[str] | None, shards: int, slices: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if groups is None:
            raise InputError("users are placed by group, and there is none")
        return place_by_risk(numbers, groups, self.layout, shards, slices)


def shard_by_risk(probabilities: ArrayLike, most: float) -> NDArray[np.int64]:
    """Return the shard of each point, from 0, by the paper's Algorithm 1.

    Points are taken in the order of their erasure probability, and a new shard begins with the point that would bring
    the expected number of requests of the present one to `most`, its constant C. A shard has at least one point.
    """
    risk = np.asarray(probabilities, np.float64)
    if not most > 0 or (risk < 0).any() or (risk > 1).any():
        raise InputError("Algorithm 1 takes probabilities from 0 to 1 and a constant above 0")
    order = np.argsort(risk, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(risk[order])])
    shards = np.empty(len(risk), np.int64)
    begin = shard = 0
    while begin < len(risk):
        # The first point that reaches the constant opens the next shard.
        end = max(begin + 1, int(np.searchsorted(total, total[begin] + most)) - 1)
        shards[order[begin:end]] = shard
        begin, shard = end, shard + 1
    return shards


def constant_for(expected: float, shards: int) -> float:
    """Return a constant C with which Algorithm 1 makes `shards` shards of `expected` requests in all.

    Any C from expected/S up to expected/(S-1) does; this is the middle, as far as can be from either end.
    """
    return expected / shards if shards == 1 else expected * (2 * shards - 1) / (2 * shards * (shards - 1))


def freeze(risks: Sequence[Risk], shards: int, *, ordered: bool, power: float | None) -> FrozenLayout:
    """Return the layout that these priors give, of the points of no one.

    With `power` None every shard takes points from the whole axis. With 1 every shard gets the same expected number of
    requests (Algorithm 1 for a given number of shards); with ½ shards are cut by the square root of the probability,
    which is what makes the expected samples of one request least.
    """
    complete = complete_shares(risks)
    line = sorted(complete, key=lambda risk: (risk.probability, risk.group))
    ends = np.cumsum([risk.share or 0.0 for risk in line])
    edges = [0, *(round(end / ends[-1] * AXIS) for end in ends.tolist())]
    probabilities = tuple(risk.probability for risk in line)
    cuts = None if power is None else _cut(edges, probabilities, shards, power)
    return FrozenLayout(tuple(risk.group for risk in line), tuple(edges), probabilities, ordered, cuts)


def as_risks(given: Risks) -> tuple[Risk, ...]:
    """Return priors however they are given."""
    if not isinstance(given, Mapping):
        return tuple(given)
    found = []
    for group, numbers in given.items():
        parts = numbers if isinstance(numbers, Sequence) and not isinstance(numbers, str) else (numbers,)
        if len(parts) not in (1, 2) or not all(isinstance(p, int | float) and not isinstance(p, bool) for p in parts):
            raise InputError(f"the risk of '{group}' must be a probability, or a probability and a share")
        found.append(Risk(str(group), *map(float, parts)))
    return tuple(found)


def risks_of(layout: FrozenLayout) -> tuple[Risk, ...]:
    """Return the priors that a layout was made from."""
    shares = [(end - begin) / AXIS for begin, end in pairwise(layout.edges)]
    return tuple(map(Risk, layout.groups, layout.probabilities, shares))


def complete_shares(risks: Sequence[Risk]) -> list[Risk]:
    """Return the risks with every share filled in; raise `InputError` where they make no sense."""
    if not risks:
        raise InputError("a placement by risk needs an erasure probability for at least one group")
    names = [risk.group for risk in risks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"the group '{twice[0]}' has two erasure probabilities")
    for risk in risks:
        if not risk.group:
            raise InputError("a group needs a name")
        if not 0 <= risk.probability <= 1:
            raise InputError(f"the erasure probability of '{risk.group}' must be from 0 to 1, not {risk.probability}")
        if risk.share is not None and not SMALLEST_SHARE <= risk.share <= 1:
            raise InputError(f"the share of '{risk.group}' must be from {SMALLEST_SHARE} to 1, not {risk.share}")
    if not any(risk.probability for risk in risks):
        raise InputError("at least one group needs an erasure probability above 0")
    said = sum(risk.share for risk in risks if risk.share is not None)
    silent = sum(risk.share is None for risk in risks)
    if (not silent and abs(said - 1) > 0.01) or said > 1.01 or (silent and (1 - said) / silent < SMALLEST_SHARE):
        raise InputError(f"the shares of the groups add up to {said:g}; all groups together must make 1")
    rest = (1 - said) / silent if silent else 0.0
    return [Risk(r.group, r.probability, rest if r.share is None else r.share) for r in risks]


def codes_of(layout: FrozenLayout, groups: Sequence[str]) -> NDArray[np.int64]:
    """Return the index of each group in the layout; raise `InputError` for one that has no place in it."""
    index = {name: number for number, name in enumerate(layout.groups)}
    others = index.get(OTHERS)
    distinct, inverse = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    codes = []
    for name in distinct.tolist():
        code = index.get(name, others)
        if code is None:
            named = ", ".join(layout.groups[:8]) + (", …" if len(layout.groups) > 8 else "")
            raise InputError(
                f"the group '{name}' has no erasure probability in the layout, which was frozen with: {named}"
            )
        codes.append(code)
    return np.asarray(codes, np.int64)[inverse]


def place_by_risk(
    numbers: NDArray[np.uint64], groups: Sequence[str], layout: FrozenLayout, shards: int, slices: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return shards and slices for keyed numbers of these groups."""
    codes = codes_of(layout, groups)
    edges = np.asarray(layout.edges, np.uint64)
    half, mask = np.uint64(32), np.uint64(AXIS - 1)
    # The upper half says where in its group a number lies, the lower half whatever the axis does not decide.
    start, width = edges[codes], edges[codes + 1] - edges[codes]
    position, free = start + ((numbers >> half) * width >> half), numbers & mask
    cuts = np.asarray(layout.shard_edges or (0, AXIS), np.uint64)
    part = np.searchsorted(cuts, position, side="right") - 1
    shard = part if layout.shard_edges else free * np.uint64(shards) >> half
    along = (position - cuts[part]) * np.uint64(slices) // (cuts[part + 1] - cuts[part])
    slice_ = along if layout.ordered else free * np.uint64(slices) >> half
    return shard.astype(np.int64) + 1, slice_.astype(np.int64) + 1


def masses(layout: FrozenLayout, shards: int, slices: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return for each place (shard, slice) its expected share of the points, and of the requests."""
    edges = np.asarray(layout.edges, np.float64) / AXIS
    requests = np.concatenate([[0.0], np.cumsum(np.diff(edges) * np.asarray(layout.probabilities))])
    cuts = np.array([0.0, 1.0]) if layout.shard_edges is None else np.asarray(layout.shard_edges) / AXIS
    ticks = np.linspace(0, 1, slices + 1)
    borders = cuts[:-1, None] + np.diff(cuts)[:, None] * ticks
    points = np.diff(borders, axis=1)
    asked = np.diff(np.interp(borders, edges, requests / requests[-1]), axis=1)
    if not layout.ordered:
        points, asked = (
            np.repeat(mass.sum(axis=1, keepdims=True) / slices, slices, axis=1) for mass in (points, asked)
        )
    if layout.shard_edges is None:
        points, asked = (np.repeat(mass / shards, shards, axis=0) for mass in (points, asked))
    return points, asked


def _cut(edges: Sequence[int], probabilities: Sequence[float], shards: int, power: float) -> tuple[int, ...]:
    """Return where shards begin and end so that each has the same mass of share × probability^power."""
    weight = np.asarray(probabilities) ** power
    mass = np.concatenate([[0.0], np.cumsum(np.diff(np.asarray(edges, np.float64)) * weight)])
    inner = np.interp(np.arange(1, shards) / shards * mass[-1], mass, edges)
    cuts = (0, *(round(cut) for cut in inner.tolist()), AXIS)
    if any(end <= begin for begin, end in pairwise(cuts)):
        raise InputError(f"{shards:,} shards are too many for these erasure probabilities: some would be empty")
    return cuts
