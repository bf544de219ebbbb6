"""Grow a forest with scikit-learn, keep it as plain arrays, and answer from those.

A state lists the nodes of all trees one after the other: which feature a node asks for, its threshold, where to go
on the left and on the right, and what a leaf adds to each class. Nothing is pickled, and answering needs numpy
alone. A leaf of a random forest adds shares of classes; one of gradient boosting adds to log odds, which start
from the classes' shares among the points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.hookspecs import Job, OnProgress
from unlearnd.recipes import samples_at

if TYPE_CHECKING:
    from unlearnd.hookspecs import State
    from unlearnd_sklearn.settings import ForestSettings

LEAF = -1
_TREES_AT_A_TIME = 8
_STEPS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class _Tree:
    """One tree of scikit-learn's and, by node and class, what its leaves add."""

    nodes: Any
    adds: NDArray[np.float64]


def no_trees(classes: int) -> State:
    """Return a forest without trees."""
    return _as_state([], np.zeros(classes), link=0)


def train(settings: ForestSettings, job: Job, on_progress: OnProgress) -> State:
    """Return the forest grown on the job's points, which do not depend on how many epochs are asked for."""
    if not len(job.points.y):
        return dict(job.state)
    classes = len(job.state["bias"])
    x = np.ascontiguousarray(job.points.x.reshape(len(job.points.y), -1), np.float32)
    present, y = np.unique(job.points.y, return_inverse=True)
    tell = _Teller(samples_at(job.epochs, len(y)), settings.n_estimators, on_progress)
    if len(present) == 1:
        # Nothing to tell apart: that one class, for certain.
        tell.grown(settings.n_estimators)
        only = np.zeros(classes)
        only[present[0]] = 1
        return _as_state([], only, link=0)
    if settings.kind == "random_forest":
        return _grow_random(settings, x, y, present, classes, job.seed, tell)
    return _grow_boosted(settings, x, y, present, classes, job.seed, tell)


class ForestPredictor:
    """Probabilities (constituents, n, classes) for features (n, *shape)."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = list(states)

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        flat = np.ascontiguousarray(x.reshape(len(x), int(np.prod(x.shape[1:], dtype=np.int64))), np.float32)
        return np.stack([_answer(state, flat) for state in self._states])


def _grow_random(
    settings: ForestSettings,
    x: NDArray[np.float32],
    y: NDArray[Any],
    present: NDArray[np.int64],
    classes: int,
    seed: int,
    tell: _Teller,
) -> State:
    from sklearn.ensemble import RandomForestClassifier  # heavy

    forest = RandomForestClassifier(
        n_estimators=1,
        max_depth=settings.max_depth,
        min_samples_leaf=settings.min_samples_leaf,
        max_features=_max_features(settings),
        bootstrap=settings.bootstrap,
        random_state=seed % 2**32,
        n_jobs=1,
        warm_start=True,
    )
    # A few trees at a time, so that progress can be told, and stop it. The trees are those of one call.
    for count in [*range(_TREES_AT_A_TIME, settings.n_estimators, _TREES_AT_A_TIME), settings.n_estimators]:
        forest.set_params(n_estimators=count).fit(x, y)
        tell.grown(count)
    trees = []
    for grown in forest.estimators_:
        shares = grown.tree_.value[:, 0, :]
        adds = np.zeros((len(shares), classes))
        adds[:, present] = shares / shares.sum(axis=1, keepdims=True) / len(forest.estimators_)
        trees.append(_Tree(grown.tree_, adds))
    return _as_state(trees, np.zeros(classes), link=0)


def _grow_boosted(
    settings: ForestSettings,
    x: NDArray[np.float32],
    y: NDArray[Any],
    present: NDArray[np.int64],
    classes: int,
    seed: int,
    tell: _Teller,
) -> State:
    from sklearn.ensemble import GradientBoostingClassifier  # heavy

    forest = GradientBoostingClassifier(
        n_estimators=settings.n_estimators,
        max_depth=settings.max_depth,
        min_samples_leaf=settings.min_samples_leaf,
        max_features=_max_features(settings),
        learning_rate=settings.learning_rate,
        subsample=settings.subsample,
        random_state=seed % 2**32,
    )
    forest.fit(x, y, monitor=lambda stage, grower, names: tell.grown(stage + 1))
    odds = np.log(np.bincount(y) / len(y))
    bias = np.full(classes, -np.inf)
    bias[present] = odds
    trees = []
    for stage in forest.estimators_:
        for number, grown in enumerate(stage):
            adds = np.zeros((grown.tree_.node_count, classes))
            # Of two classes only the second has trees: what it gains, the first lacks.
            into = present[1] if len(present) == 2 else present[number]
            adds[:, into] = settings.learning_rate * grown.tree_.value[:, 0, 0]
            trees.append(_Tree(grown.tree_, adds))
    # Classes that no point has are never answered; minus infinity would not be a number to save.
    bias[~np.isfinite(bias)] = -1e30
    return _as_state(trees, bias, link=1)


class _Teller:
    """Tells progress in samples while trees grow."""

    def __init__(self, samples: int, trees: int, on_progress: OnProgress) -> None:
        self._samples, self._trees, self._on_progress = samples, trees, on_progress
        self._told = 0

    def grown(self, count: int) -> None:
        """Say that there are `count` trees now."""
        due = self._samples * count // self._trees
        self._on_progress(due - self._told)
        self._told = due


def _max_features(settings: ForestSettings) -> str | None:
    return None if settings.max_features == "all" else settings.max_features


def _as_state(trees: Sequence[_Tree], bias: NDArray[np.float64], link: int) -> State:
    """Return trees as arrays over all their nodes, those of a tree counted on from those before it."""
    sizes = [tree.nodes.node_count for tree in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if trees else np.empty(0, np.int64)

    def joined(parts: Sequence[NDArray[Any]], dtype: type, *shape: int) -> NDArray[Any]:
        return np.concatenate(parts).astype(dtype) if parts else np.empty((0, *shape), dtype)

    def child(side: str) -> NDArray[Any]:
        ends = [getattr(tree.nodes, side) for tree in trees]
        return joined([np.where(end < 0, LEAF, end + root) for end, root in zip(ends, roots, strict=True)], np.int32)

    return {
        "roots": roots,
        "left": child("children_left"),
        "right": child("children_right"),
        "feature": joined([tree.nodes.feature for tree in trees], np.int32),
        "threshold": joined([tree.nodes.threshold for tree in trees], np.float64),
        "adds": joined([tree.adds for tree in trees], np.float64, len(bias)),
        "bias": np.asarray(bias, np.float64),
        "link": np.array([link], np.int64),
    }


def _answer(state: State, x: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = np.tile(state["bias"], (len(x), 1))
    roots = state["roots"]
    rows_at_a_time = max(1, _STEPS_AT_A_TIME // max(1, len(roots)))
    for start in range(0, len(x) if len(roots) else 0, rows_at_a_time):
        part = x[start : start + rows_at_a_time]
        leaves = _leaves(state, part)
        # Tree after tree, so that no array of rows, trees and classes is made.
        for tree in range(len(roots)):
            scores[start : start + len(part)] += state["adds"][leaves[:, tree]]
    if state["link"][0]:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    total = scores.sum(axis=1, keepdims=True)
    even = np.full_like(scores, 1 / scores.shape[1])
    shares: NDArray[np.float32] = np.divide(scores, total, out=even, where=total > 0).astype(np.float32)
    return shares


def _leaves(state: State, x: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the leaf that each row ends in, for each tree: all rows go down all trees one level at a time."""
    at = np.tile(state["roots"], (len(x), 1))
    rows = np.arange(len(x))[:, None]
    while True:
        left = state["left"][at]
        inner = left != LEAF
        if not inner.any():
            return at
        goes_left = x[rows, state["feature"][at]] <= state["threshold"][at]
        at = np.where(inner, np.where(goes_left, left, state["right"][at]), at)
