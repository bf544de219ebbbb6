"""Make one answer of many constituents': pure arithmetic on probabilities.

A constituent counts with its weight, the share of its shard that it has seen: 1 unless an erasure has set it
back and no build has followed yet.
"""

import numpy as np
from numpy.typing import NDArray


def vote(
    probabilities: NDArray[np.float32], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Count each constituent's best class; a tie goes to the higher mean probability, then the lower class."""
    constituents, _, classes = probabilities.shape
    ballots = np.zeros(probabilities.shape[1:], np.float64)
    rows = np.arange(probabilities.shape[1])
    for constituent in range(constituents):
        # A constituent that cannot tell two classes apart votes for the lower.
        ballots[rows, probabilities[constituent].argmax(axis=1)] += weights[constituent]
    scores = ballots / weights.sum()
    _, means = mean(probabilities, weights)
    order = np.lexsort((np.broadcast_to(np.arange(classes), scores.shape), -means, -scores), axis=1)
    return order[:, 0].astype(np.int64), scores


def mean(
    probabilities: NDArray[np.float32], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Average the constituents' probabilities; a tie goes to the lower class."""
    scores = np.tensordot(weights / weights.sum(), probabilities.astype(np.float64), axes=1)
    return scores.argmax(axis=1).astype(np.int64), scores
