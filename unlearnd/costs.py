"""What an erasure costs in samples to train again: the paper's formulas, the exact values, and a simulator.

The first part has every formula of the time analysis in Bourtoule et al., "Machine Unlearning" (IEEE S&P 2021), under
the paper's assumptions: shards and slices of equal size, requests spread evenly and drawn with replacement. The
second part takes any `Scheme`, that is points, requests and epochs by place, and gives the expectation without the
paper's approximations. The third draws requests at random, for what no formula covers; tests hold the three together.
Costs are in samples, which is what training time is proportional to. Nothing here knows a store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unlearnd.layouts import FrozenLayout, masses

Floats = NDArray[np.float64]
_CELLS = 1 << 22
"""How many places of all trials together are simulated in one go."""


def sharding_sequential(points: float, shards: int, requests: float) -> float:
    """Return the points trained again for `requests` one by one: the paper's (N/S + 1/2S - 1)K - K²/2S."""
    return (points / shards + 1 / (2 * shards) - 1) * requests - requests**2 / (2 * shards)


def sharding_batched(points: float, shards: int, requests: float) -> float:
    """Return the points trained again for a batch: the paper's N(1 - (1 - 1/S)^K) - K."""
    return float(points * (1 - (1 - 1 / shards) ** requests) - requests)


def epochs_in_all(epochs: float, slices: int) -> float:
    """Return the epochs of a sliced training that costs as much as `epochs` unsliced: the paper's 2R/(R+1) e′."""
    return 2 * slices / (slices + 1) * epochs


def slicing_sequential(shard_points: float, slices: int, epochs: float = 1) -> float:
    """Return the samples trained again for one request in a shard: the paper's e′D(2/3 + 1/3R).

    It takes slices as full as before; R → ∞ leaves two thirds, so slicing alone gives at most 1.5×.
    """
    return epochs * shard_points * (2 / 3 + 1 / (3 * slices))


def slicing_batched(shard_points: float, slices: int, requests: float, epochs: float = 1) -> float:
    """Return the samples trained again for a batch of requests in one shard, as the paper has it.

    It takes the lowest slice hit for the least of `requests` draws from the continuous interval [1, R], and is off by
    up to some percent where slices are few: one request comes out too dear, by e′D(R-1)/6R(R+1), many too cheap.
    `slicing_batched_exact` has the lowest slice for the whole number it is.
    """
    first = (requests + slices) / (requests + 1)
    second = 1 + 2 * (slices - 1) / (requests + 1) * (requests + 1 + slices) / (requests + 2)
    whole = slices * (slices + 1) / 2
    return 2 * epochs * shard_points / (slices * (slices + 1)) * (whole - (second - first) / 2)


def slicing_batched_exact(shard_points: float, slices: int, requests: float, epochs: float = 1) -> float:
    """Return the samples trained again for a batch of requests in one shard, the lowest slice hit being a whole number.

    Slices count as full as before, as in the paper.
    """
    step = np.arange(1, slices + 1)
    hit = 1 - (1 - step / slices) ** requests
    return float(2 * epochs / (slices + 1) * shard_points / slices * (step * hit).sum())


def lone_shard_sequential(points: float, shards: int, requests: float) -> float:
    """Return what a single model on 1/S of the points costs one by one: 1/S of `sharding_sequential`."""
    return sharding_sequential(points, shards, requests) / shards


def lone_shard_batched(points: float, shards: int, requests: float) -> float:
    """Return what a single model on 1/S of the points costs for a batch, as the paper has it: (N - K)/S.

    It is trained again even where none of the batch was in it; `lone_shard_batched_exact` leaves it alone then.
    """
    return (points - requests) / shards


def lone_shard_batched_exact(points: float, shards: int, requests: float) -> float:
    """Return what a single model on 1/S of the points costs for a batch that may miss it."""
    return sharding_batched(points, shards, requests) / shards


def best_speedup(shards: int, slices: int) -> float:
    """Return the paper's best case for one request, one that falls into the last slice: (R+1)S/2."""
    return (slices + 1) * shards / 2


def storage_bytes(shards: int, slices: int, state_bytes: float, keep: int | None = None) -> float:
    """Return the bytes of all checkpoints: one per shard and slice, or only `keep` of each shard's."""
    return shards * min(slices, keep or slices) * state_bytes


def formula_speedup(points: float, shards: int, slices: int, requests: float) -> float:
    """Return the speed-up of a batch over training all again as the paper multiplies it.

    The batch formula for shards times the one-request formula for slices, which is where its headline figures come
    from. It is too good by some percent while requests are few, and by more when a shard is hit more than once.
    """
    return points / sharding_batched(points, shards, requests) / slicing_sequential(1, slices)


@dataclass(frozen=True)
class Scheme:
    """Points, requests and epochs by place: all that the cost of erasures depends on."""

    points: Floats
    """(S, R): points in each slice of each shard."""
    requests: Floats
    """(S, R): the probability that a request falls there; what is missing to 1 falls on nobody trained on."""
    epochs: Floats
    """(R,): epochs that each step trains on slices 1 to its own."""
    kept: tuple[int, ...] | None = None
    """The slices, from 1, whose checkpoints are kept, the last among them; None for all."""

    @property
    def from_scratch(self) -> float:
        """Samples that training everything takes."""
        return float((self.points.cumsum(axis=1) * self.epochs).sum())


def epochs_by_step(slices: int, epochs: float, schedule: str = "uniform") -> Floats:
    """Return the epochs of each step: the paper's 2e′/(R+1), or e′/r where the schedule is `equal-work`."""
    if schedule == "equal-work":
        return epochs / np.arange(1, slices + 1)
    return np.full(slices, 2 * epochs / (slices + 1))


def even_scheme(points: float, shards: int, slices: int, epochs: float = 1, schedule: str = "uniform") -> Scheme:
    """Return the paper's scheme: everything spread evenly."""
    even = np.full((shards, slices), 1 / (shards * slices))
    return Scheme(points * even, even, epochs_by_step(slices, epochs, schedule))


def scheme_of(
    layout: FrozenLayout, points: float, shards: int, slices: int, epochs: float = 1, schedule: str = "uniform"
) -> Scheme:
    """Return the scheme of a layout by risk, as its priors have it."""
    held, asked = masses(layout, shards, slices)
    return Scheme(points * held, asked, epochs_by_step(slices, epochs, schedule))


def expected_batch(scheme: Scheme, requests: float, points_each: float = 1, *, arriving: bool = False) -> float:
    """Return the expected samples trained again for a batch of requests, each of one user with `points_each` points.

    With `arriving`, `requests` is the mean of a Poisson count: what comes in while a lazy build waits.
    """
    reach = _reach(scheme)
    asked, held = scheme.requests.cumsum(axis=1), scheme.points.cumsum(axis=1)
    near = asked[:, reach]
    hit = 1 - np.exp(-requests * near) if arriving else 1 - (1 - np.minimum(near, 1)) ** requests
    # Whatever leaves a step's points also hits it, so that the expectation of the product is this difference.
    return float(((held * hit - requests * points_each * asked) * scheme.epochs).sum())


def expected_sequential(scheme: Scheme, requests: int, points_each: float = 1) -> float:
    """Return the expected samples trained again for requests carried out and built one by one."""
    reach = _reach(scheme)
    asked, held = scheme.requests.cumsum(axis=1), scheme.points.cumsum(axis=1)
    near = asked[:, reach]
    before = points_each * asked * requests * (requests - 1) / 2
    return float(((requests * (held * near - points_each * asked) - near * before) * scheme.epochs).sum())


def exact_speedup(scheme: Scheme, requests: float, points_each: float = 1) -> float:
    """Return how much less a batch costs than training on everybody else from scratch."""
    gone = float(requests * points_each / scheme.points.sum() * scheme.requests.sum())
    return scheme.from_scratch * (1 - gone) / expected_batch(scheme, requests, points_each)


def choose_kept(scheme: Scheme, keep: int) -> tuple[int, ...]:
    """Return the `keep` checkpoints of a shard that make one request cheapest, by dynamic programming.

    The last is always kept, and counts: it answers. A request in slice r goes back to the last kept checkpoint before
    r. With W the work of the steps up to a checkpoint, a set of kept ones i < j < … saves, against training the shard
    whole, the sum of W(i) × (requests that fall between i and the next). One set serves all shards.
    """
    slices = len(scheme.epochs)
    if keep >= slices:
        return tuple(range(1, slices + 1))
    work = np.pad((scheme.points.cumsum(axis=1) * scheme.epochs).cumsum(axis=1), ((0, 0), (1, 0)))
    asked = np.pad(scheme.requests.cumsum(axis=1), ((0, 0), (1, 0)))
    # saved[i, j]: what keeping i saves when j is the next one kept.
    saved = work.T @ asked - (work * asked).sum(axis=0)[:, None]
    saved[np.tril_indices(slices + 1)] = -np.inf
    best = np.full(slices + 1, -np.inf)
    best[0] = 0.0
    came = []
    for _ in range(keep):
        reached = best[:, None] + saved
        came.append(reached.argmax(axis=0))
        best = reached.max(axis=0)
    kept = [slices]
    for origin in reversed(came[1:]):
        kept.append(int(origin[kept[-1]]))
    return tuple(reversed(kept))


def thinned(scheme: Scheme, keep: int | None) -> Scheme:
    """Return the scheme with only the `keep` best checkpoints of each shard kept; None keeps all."""
    return replace(scheme, kept=None if keep is None else choose_kept(scheme, keep))


@dataclass(frozen=True)
class Simulated:
    """What random requests cost, over many trials."""

    mean: float
    """Samples trained again, on average."""
    error: float
    """The standard error of that mean."""
    requests: float
    """How many requests a trial had, on average."""


def one_by_one(requests: int, trials: int) -> NDArray[np.int64]:
    """Return batches for `simulate`: every request is built at once."""
    return np.ones((trials, requests), np.int64)


def at_once(requests: int, trials: int) -> NDArray[np.int64]:
    """Return batches for `simulate`: one build for all requests."""
    return np.full((trials, 1), requests, np.int64)


def arrivals(per_day: float, days: int, window: int, trials: int, seed: int, burst: float = 0.0) -> NDArray[np.int64]:
    """Return batches for `simulate`: requests come in at random, and a build every `window` days takes them together.

    Counts of a day are Poisson; with `burst` their rate varies from day to day by that coefficient of variation, as
    it does after a newspaper has written.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    rate = np.full((trials, days), float(per_day))
    if burst > 0:
        rate = generator.gamma(1 / burst**2, per_day * burst**2, (trials, days))
    counts = generator.poisson(rate)
    lots = -(-days // window)
    padded = np.zeros((trials, lots * window), np.int64)
    padded[:, :days] = counts
    batches: NDArray[np.int64] = padded.reshape(trials, lots, window).sum(axis=2)
    return batches


def simulate(
    scheme: Scheme,
    batches: NDArray[np.int64],
    seed: int,
    sizes: Sequence[int] = (1,),
    *,
    scattered: bool = False,
) -> Simulated:
    """Draw requests at random and count the samples trained again.

    `batches` has a row per trial and a column per build: how many requests each takes. A request is of a user with as
    many points as one of `sizes`, drawn evenly, all in one place, or each somewhere else where they are `scattered`.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    trials, builds = batches.shape
    costs = np.zeros(trials)
    lot = max(1, _CELLS // scheme.points.size)
    for begin in range(0, trials, lot):
        here = batches[begin : begin + lot]
        gone = np.zeros((len(here), *scheme.points.shape))
        for build in range(builds):
            lost = _draw(scheme, here[:, build], generator, sizes, scattered)
            gone += lost
            costs[begin : begin + lot] += _retrained(scheme, lost, gone)
    error = float(costs.std(ddof=1) / np.sqrt(trials)) if trials > 1 else float("inf")
    return Simulated(float(costs.mean()), error, float(batches.sum(axis=1).mean()))


def _draw(
    scheme: Scheme, counts: NDArray[np.int64], generator: np.random.Generator, sizes: Sequence[int], scattered: bool
) -> Floats:
    """Return (trials, S, R): how many points each place loses to `counts` requests."""
    trial = np.repeat(np.arange(len(counts)), counts)
    lost = (
        generator.choice(np.asarray(sizes, np.int64), len(trial)) if len(sizes) > 1 else np.full(len(trial), sizes[0])
    )
    if scattered:
        trial, lost = np.repeat(trial, lost), np.ones(int(lost.sum()), np.int64)
    ends = scheme.requests.ravel().cumsum()
    if abs(ends[-1] - 1) < 1e-9:
        ends = ends / ends[-1]
    place = np.searchsorted(ends, generator.random(len(trial)), side="right")
    there = place < len(ends)
    cells = len(counts) * len(ends)
    drawn = np.bincount(trial[there] * len(ends) + place[there], lost[there].astype(np.float64), cells)
    return drawn.astype(np.float64).reshape(len(counts), *scheme.points.shape)


def _retrained(scheme: Scheme, lost: Floats, gone: Floats) -> Floats:
    """Return per trial the samples of a build after `lost`, when `gone` has left in all."""
    hit = lost.cumsum(axis=2)[:, :, _reach(scheme)] > 0
    held = np.maximum(scheme.points - gone, 0).cumsum(axis=2)
    costs: Floats = np.einsum("tsr,r->t", hit * held, scheme.epochs)
    return costs


def _reach(scheme: Scheme) -> NDArray[np.int64]:
    """Return for each step the index of the first kept checkpoint from it on.

    A step is trained again when anything up to there is hit: what it made was not kept, or is tainted.
    """
    slices = len(scheme.epochs)
    kept = np.arange(slices) if scheme.kept is None else np.asarray(scheme.kept) - 1
    reach: NDArray[np.int64] = kept[np.searchsorted(kept, np.arange(slices))]
    return reach
