"""Train scikit-learn's `SGDClassifier` by `partial_fit`, from a state to a state.

An estimator is made anew for each step from arrays: weights, intercepts and the counter `t_` that the learning rate
depends on are the whole of it. It never shuffles; each epoch's order is drawn here from the job's seed and the
epoch's number alone. Inputs are scaled by mean and spread of the constituent's first points, which are state too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, OnProgress, Points
from unlearnd.recipes import samples_at

if TYPE_CHECKING:
    from unlearnd.hookspecs import State
    from unlearnd_sklearn.settings import SgdSettings

_ROWS_AT_A_TIME = 8192


def zero_state(shape: tuple[int, ...], classes: int) -> State:
    """Return the state of a constituent that has seen nothing."""
    if classes < 2:
        raise InputError(f"backend 'sgd' tells classes apart and needs two at least, not {classes}")
    width = int(np.prod(shape, dtype=np.int64))
    # Two classes share one line between them, as scikit-learn has it.
    lines = classes if classes > 2 else 1
    return {
        "coef": np.zeros((lines, width)),
        "intercept": np.zeros(lines),
        "t": np.ones(1),
        "classes": np.array([classes], np.int64),
        "input.mean": np.zeros(width),
        "input.scale": np.ones(width),
        "input.count": np.zeros(1, np.int64),
    }


def train(settings: SgdSettings, job: Job, on_progress: OnProgress) -> State:
    """Return the state after the job."""
    n = len(job.points.y)
    left = samples_at(job.epochs, n)
    if not left:
        return dict(job.state)
    scaling = _scaling_of(job.state, job.points, settings.standardize)
    estimator = _estimator(settings, job.state)
    x = _scaled(scaling, job.points.x)
    epoch = 0
    while left:
        generator = np.random.Generator(np.random.PCG64(derive_seed(job.seed, epoch, "order")))
        order = generator.permutation(n)[:left]
        for start in range(0, len(order), _ROWS_AT_A_TIME):
            rows = order[start : start + _ROWS_AT_A_TIME]
            estimator.partial_fit(x[rows], job.points.y[rows])
            on_progress(len(rows))
        left, epoch = left - len(order), epoch + 1
    return {
        "coef": np.array(estimator.coef_, np.float64),
        "intercept": np.array(estimator.intercept_, np.float64),
        "t": np.array([estimator.t_], np.float64),
        "classes": job.state["classes"],
        **scaling,
    }


class LinearPredictor:
    """Probabilities (constituents, n, classes) for features (n, *shape), from all constituents in one product."""

    def __init__(self, loss: str, states: Sequence[State]) -> None:
        self._loss = loss
        self._classes = int(states[0]["classes"][0])
        # Scaling is folded into the weights: (x - mean) / scale · w is x · (w / scale) - mean · (w / scale).
        weights = [state["coef"] / state["input.scale"] for state in states]
        self._weights = np.stack([weight.T for weight in weights])
        self._shifts = np.stack(
            [state["intercept"] - w @ state["input.mean"] for state, w in zip(states, weights, strict=True)]
        )

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        flat = x.reshape(len(x), self._weights.shape[1]).astype(np.float64)
        scores = flat @ self._weights + self._shifts[:, None]
        if self._classes == 2:
            scores = np.concatenate([-scores, scores], axis=2)
        return _probabilities(self._loss, scores).astype(np.float32)


def _probabilities(loss: str, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what `predict_proba` gives where scikit-learn has one; for other losses, softmax of the scores."""
    if loss == "log_loss":
        # 1 / (1 + exp(-s)) without overflow.
        shares = 0.5 * (1 + np.tanh(0.5 * scores))
    elif loss == "modified_huber":
        shares = (np.clip(scores, -1, 1) + 1) / 2
    else:
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    total = shares.sum(axis=2, keepdims=True)
    # Where every class is said to be impossible, they are alike.
    even = np.full_like(shares, 1 / shares.shape[2])
    result: NDArray[np.float64] = np.divide(shares, total, out=even, where=total > 0)
    return result


def _estimator(settings: SgdSettings, state: State) -> Any:
    from sklearn.linear_model import SGDClassifier  # heavy

    given = settings.model_dump(exclude={"standardize"})
    estimator = SGDClassifier(**given, shuffle=False, random_state=0)
    estimator.classes_ = np.arange(int(state["classes"][0]))
    estimator.n_features_in_ = state["coef"].shape[1]
    # Copies: `partial_fit` writes to them.
    estimator.coef_, estimator.intercept_ = np.array(state["coef"]), np.array(state["intercept"])
    estimator.t_ = float(state["t"][0])
    return estimator


def _scaling_of(state: State, points: Points, standardize: bool) -> dict[str, NDArray[Any]]:
    """Return a constituent's scaling, fitted now if it has not been: in its first training step."""
    if state["input.count"][0]:
        return {name: state[name] for name in ("input.mean", "input.scale", "input.count")}
    count = np.array([len(points.y)], np.int64)
    if not standardize:
        return {"input.mean": state["input.mean"], "input.scale": state["input.scale"], "input.count": count}
    flat = points.x.reshape(len(points.y), -1).astype(np.float64)
    mean, spread = flat.mean(axis=0), flat.std(axis=0)
    # A spread below what float32 can tell apart is rounding, not a spread.
    scale = np.where(spread > 1e-7 * np.abs(mean), spread, 1.0)
    return {"input.mean": mean, "input.scale": scale, "input.count": count}


def _scaled(scaling: Mapping[str, NDArray[Any]], x: NDArray[Any]) -> NDArray[np.float64]:
    flat = x.reshape(len(x), len(scaling["input.mean"])).astype(np.float64)
    flat -= scaling["input.mean"]
    flat /= scaling["input.scale"]
    return flat
