"""Make one answer of many constituents': pure arithmetic on probabilities.

A constituent counts with its weight, the share of its shard that it has seen: 1 unless an erasure has set it
back and no build has followed yet. Where shards are of unequal size, the weight is times the shard's size
over the mean.
"""

import numpy as np
from numpy.typing import NDArray


def vote(
    probabilities: NDArray[np.float32], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Count each constituent's best class; a tie goes to the higher mean probability, then the lower class."""
    _, rows, classes = probabilities.shape
    # A constituent that cannot tell two classes apart votes for the lower.
    ballots = np.arange(rows) * classes + probabilities.argmax(axis=2)
    counted = np.bincount(ballots.ravel(), np.repeat(weights, rows), rows * classes)
    scores = counted.reshape(rows, classes) / weights.sum()
    tied = scores == scores.max(axis=1, keepdims=True)
    _, means = mean(probabilities, weights)
    return np.where(tied, means, -1).argmax(axis=1).astype(np.int64), scores


def mean(
    probabilities: NDArray[np.float32], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Average the constituents' probabilities; a tie goes to the lower class."""
    scores = np.tensordot(weights / weights.sum(), probabilities.astype(np.float64), axes=1)
    return scores.argmax(axis=1).astype(np.int64), scores
