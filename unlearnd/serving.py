"""Answer with the ensemble: each constituent from its longest clean prefix.

What may be served is derived from recipes before every answer, if anything changed since the last one: an
erasure made by another process is seen before the next answer. A constituent that has no clean checkpoint, or
none that has seen a point, abstains. One that was set back counts by the share of its shard that it has seen. Where
the layout makes shards of unequal size, each counts by its size as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.checkpoints import Standing, read_states, standings
from unlearnd.errors import BackendError, DamagedStoreError, InputError, RefusedError, UnlearndError
from unlearnd.features import Sight
from unlearnd.hookspecs import Predictor, State
from unlearnd.ledger import Ledger, models, points
from unlearnd.ledger.models import Model
from unlearnd.plugins import Plugins
from unlearnd.storage import Storage


@dataclass(frozen=True)
class Answers:
    """What the ensemble says about some rows."""

    labels: NDArray[Any]
    """The predicted label of each row."""
    scores: NDArray[np.float64]
    """(n, classes): the share of votes or the mean probability, by the order of `classes`."""
    classes: tuple[int | str, ...]


@dataclass(frozen=True)
class Evaluation:
    """How often the ensemble is right."""

    points: int
    top1: float
    top5: float | None
    """None when there are five classes or fewer."""
    constituents: int
    abstaining: int


@dataclass(frozen=True)
class _Serving:
    """Constituents ready to answer, and the moment of the ledger they belong to."""

    version: int
    states: dict[str, State]
    weights: NDArray[np.float64]
    predictor: Predictor | None


def join_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of several batches together; the last one says how many constituents answered."""
    total = sum(part.points for part in parts)
    top1 = sum(part.top1 * part.points for part in parts) / total
    top5 = None if parts[-1].top5 is None else sum((part.top5 or 0) * part.points for part in parts) / total
    return replace(parts[-1], points=total, top1=top1, top5=top5)


class ServedModel:
    """A model to ask. Keep it: it loads constituents once and again only when they change."""

    def __init__(self, ledger: Ledger, storage: Storage, plugins: Plugins, model: Model, device: str) -> None:
        self._ledger, self._storage, self._plugins = ledger, storage, plugins
        self._model, self._device = model, device
        self._serving: _Serving | None = None

    @cached_property
    def _sight(self) -> Sight:
        return Sight(self._storage, self._plugins.backend(self._model.spec.backend), self._model.spec, self._device)

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def classes(self) -> tuple[int | str, ...]:
        return self._model.spec.classes

    def constituents(self) -> list[Standing]:
        """Return how far each constituent is clean."""
        return standings(self._ledger, self._model)

    def predict(self, x: NDArray[Any], aggregate: str = "vote") -> Answers:
        """Return labels and scores for features (n, *shape)."""
        combine = self._plugins.aggregator(aggregate)
        rows = self.checked(x)
        serving = self._refresh()
        if serving.predictor is None:
            models.model_in_service(self._ledger, self.name)
            raise RefusedError(
                f"model '{self.name}' cannot answer: every constituent abstains; run `unlearnd build {self.name}`"
            )
        try:
            probabilities = serving.predictor(self._sight.see(rows))
        except UnlearndError:
            raise
        except Exception as error:
            raise BackendError(
                f"backend '{self._model.spec.backend}' failed to answer for model '{self.name}': "
                f"{type(error).__name__}: {error}"
            ) from error
        best, scores = combine(probabilities, serving.weights)
        return Answers(np.asarray(self.classes)[best], scores, self.classes)

    def evaluate(self, x: NDArray[Any], right: NDArray[np.int64], aggregate: str = "vote") -> Evaluation:
        """Compare answers with the right class indices (-1 for a class the model does not know)."""
        answers = self.predict(x, aggregate)
        order = np.argsort(-answers.scores, axis=1, kind="stable")[:, :5]
        best = np.asarray(self.classes)[right]
        top1 = float(np.mean((answers.labels == best) & (right >= 0)))
        top5 = float(np.mean((order == right[:, None]).any(axis=1))) if len(self.classes) > 5 else None
        assert self._serving is not None
        constituents = len(self._serving.weights)
        return Evaluation(len(x), top1, top5, constituents, self._model.spec.shards - constituents)

    def checked(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return features as the model takes them, (n, *shape); raise `InputError` where they cannot be."""
        spec = self._model.spec
        try:
            rows = np.asarray(x)
        except ValueError:
            raise InputError("features must be numbers, as many in every row") from None
        if rows.dtype.kind not in "buif":
            raise InputError(f"features must be numbers, not {rows.dtype}")
        if rows.shape == spec.shape and rows.ndim:
            rows = rows[None]
        if rows.shape[1:] != spec.shape:
            raise InputError(
                f"model '{self.name}' takes features of shape (n, {', '.join(map(str, spec.shape))}), not {rows.shape}"
            )
        if spec.dtype == "uint8" and rows.dtype != np.uint8:
            raise InputError(f"model '{self.name}' takes uint8 features, not {rows.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.ascontiguousarray(rows, dtype=spec.dtype)
        if rows.dtype != np.uint8 and not np.isfinite(rows).all():
            raise InputError("features must be finite numbers")
        return rows

    def _refresh(self) -> _Serving:
        """Return constituents that are clean now, loading only those that changed."""
        while True:
            version = points.version_of(self._ledger, self._model.dataset_id)
            if self._serving is not None and self._serving.version == version:
                return self._serving
            try:
                self._serving = self._load(version)
            except DamagedStoreError:
                # A checkpoint may have been destroyed between looking and reading; then look again.
                if points.version_of(self._ledger, self._model.dataset_id) == version:
                    raise

    def _usual_size(self, counts: Mapping[tuple[int, int], int]) -> float | None:
        """Return the mean size of a shard where the layout makes them unequal; None where they are alike."""
        layout = points.dataset_by_id(self._ledger, self._model.dataset_id).layout
        if layout is None or layout.get("shardEdges") is None:
            return None
        return sum(counts.values()) / self._model.spec.shards

    def _load(self, version: int) -> _Serving:
        counts = points.counts_of(self._ledger, self._model.dataset_id)
        usual = self._usual_size(counts)
        old = self._serving.states if self._serving else {}
        states: dict[str, State] = {}
        weights = []
        found = standings(self._ledger, self._model)
        fresh = [s.checkpoint for s in found if s.checkpoint is not None and s.checkpoint.recipe not in old]
        read = {c.recipe: state for c, state in zip(fresh, read_states(self._storage, fresh), strict=True)}
        for standing in found:
            seen = sum(counts.get((standing.shard, s), 0) for s in range(1, standing.prefix + 1))
            if standing.checkpoint is not None and seen:
                recipe = standing.checkpoint.recipe
                states[recipe] = old[recipe] if recipe in old else read[recipe]
                held = sum(counts.get((standing.shard, s), 0) for s in range(1, standing.slices + 1))
                weights.append(seen / (usual or held))
        predictor = None
        if old.keys() == states.keys() and self._serving is not None:
            predictor = self._serving.predictor
        elif states:
            backend = self._plugins.backend(self._model.spec.backend)
            predictor = backend.predictor(self._model.spec.settings, list(states.values()), self._device)
        return _Serving(version, states, np.asarray(weights, np.float64), predictor)
