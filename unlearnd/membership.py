"""Tell from a model's answers who it learned from: the arithmetic of a membership inference attack.

The attack is LiRA, offline (Carlini et al., "Membership Inference Attacks From First Principles", IEEE S&P 2022). A
model is surer of what it learned from. How sure others are of a row who never saw it depends on the row, so shadow
models that never saw it are asked first, and what counts is how far the model under attack is from them, in their
standard deviations. Here are only numbers; who trains the shadow models, and on what, is for others (`shadows`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 1000
FALSE_ALARMS = 0.01
"""The share of rows never learned from that a careful attacker takes for members."""
_PRIOR = 16
"""How many shadow models the variance over all rows counts for, against the variance of one row."""
_LEAST = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A value, and between what it lies with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Attack:
    """How well members and others are told apart by a score that should be higher for members."""

    members: int
    others: int
    auc: Estimate
    """How often a member scores higher than another row: 0.5 is guessing."""
    advantage: Estimate
    """The largest difference of true and false positive rates that any threshold gives. Never below 0: see below."""
    caught: Estimate
    """The true positive rate at a false positive rate of 1 %: 0.01 is guessing."""
    advantage_by_chance: float
    """What the advantage stays below in 99 of 100 shuffles of who is a member: picking the best threshold gains."""
    chance: float
    """The share of shuffles that give so high an AUC: the p-value of a one-sided permutation test."""


def log_odds(scores: Floats, right: NDArray[np.int64]) -> Floats:
    """Return log(p / (1 - p)) of the right class of each row: what is close to normally distributed over models."""
    rows = np.arange(len(scores))
    sure = scores[rows, right]
    rest = scores.copy()
    rest[rows, right] = 0.0
    # The others are summed: 1 - p has lost what matters when p is close to 1.
    odds: Floats = np.log(np.maximum(sure, _LEAST)) - np.log(np.maximum(rest.sum(axis=1), _LEAST))
    return odds


def distances(attacked: Floats, shadows: Floats) -> Floats:
    """Return how far above the shadow models the attacked one is on each row, in their standard deviations.

    `attacked` has the log odds of n rows, `shadows` (models, n) those of models that saw none of these rows. Each row
    has a mean of its own. Few models say little about a row's variance, so it is drawn towards that over all rows.
    """
    models = len(shadows)
    own = shadows.var(axis=0, ddof=1)
    variance = ((models - 1) * own + _PRIOR * own.mean()) / (models - 1 + _PRIOR)
    found: Floats = (attacked - shadows.mean(axis=0)) / np.sqrt(variance * (1 + 1 / models) + _LEAST)
    return found


def tell_apart(members: Floats, others: Floats, seed: int, draws: int = DRAWS) -> Attack:
    """Return how well a score tells members from others, with bootstrap intervals and a permutation test."""
    random = np.random.default_rng([seed, 1])
    found = _measure(members, others)
    again = np.array([_measure(random.choice(members, len(members)), random.choice(others, len(others)))
                      for _ in range(draws)])  # fmt: skip
    low, high = np.percentile(again, (2.5, 97.5), axis=0)
    both = np.concatenate([members, others])
    shuffled = np.empty((draws, 3))
    for draw in range(draws):
        random.shuffle(both)
        shuffled[draw] = _measure(both[: len(members)], both[len(members) :])
    auc, advantage, caught = (Estimate(*map(float, three)) for three in zip(found, low, high, strict=True))
    as_high = int((shuffled[:, 0] >= found[0]).sum())
    return Attack(
        members=len(members),
        others=len(others),
        auc=auc,
        advantage=advantage,
        caught=caught,
        advantage_by_chance=float(np.percentile(shuffled[:, 1], 99)),
        chance=(1 + as_high) / (1 + draws),
    )


def _measure(members: NDArray[Any], others: NDArray[Any]) -> tuple[float, float, float]:
    """Return AUC, advantage, and the true positive rate at 1 % false positives."""
    ordered, ranked = np.sort(others), np.sort(members)
    below, upto = (np.searchsorted(ordered, members, side) for side in ("left", "right"))
    auc = float((below + upto).sum() / (2 * len(members) * len(others)))
    thresholds = np.concatenate([ordered, ranked])
    caught = 1 - np.searchsorted(ranked, thresholds, "left") / len(members)
    alarms = 1 - np.searchsorted(ordered, thresholds, "left") / len(others)
    advantage = float(max(0.0, (caught - alarms).max()))
    # So many of the others may lie above the threshold, which is just above the next one of them.
    spared = int(FALSE_ALARMS * len(others))
    return auc, advantage, float((members > ordered[len(others) - spared - 1]).mean())
