"""A scikit-learn estimator that can forget people exactly.

`fit` takes everything into a new store and trains a model there; `forget` erases people from that store, with a
receipt for each, and trains on what is left. What was erased must not live on in a copy: a pickled or copied
estimator names its store and does not contain it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from unlearnd.errors import InputError, NotFoundError, RefusedError
from unlearnd.plugins import load_plugins
from unlearnd.serving import Answers
from unlearnd.store import Store

DATASET, MODEL = "data", "model"


class SisaClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier whose training can be taken back for single people, exactly.

    `backend` and `settings` say what each constituent is; any installed backend will do. `folder` is where the
    store is made and must not hold one yet; without it the store is temporary and goes with the estimator. With
    `random_state` a fit can be repeated; placement can then be guessed by whoever knows it, so leave it out where
    the data is real.
    """

    def __init__(
        self,
        backend: str = "sgd",
        *,
        settings: Mapping[str, object] | None = None,
        shards: int = 5,
        slices: int = 4,
        epochs: float = 10,
        aggregate: str = "mean",
        folder: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.shards = shards
        self.slices = slices
        self.epochs = epochs
        self.aggregate = aggregate
        self.folder = folder
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train on rows `X` with labels `y`; `groups` says whose each row is. Without it, row n is person n."""
        x, labels = validate_data(self, X, y, dtype=np.float32, order="C")
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__} tells classes apart: y has only one class")
        users = _users(groups, len(x))
        with _as_value_error():
            # Asked before anything is made: what cannot be trained must not leave a store behind.
            load_plugins().backend(self.backend).settings(dict(self.settings or {}))
            self._let_go()
            self._make_store(x, codes, users, classes)
        self.classes_ = classes
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the label that the constituents give each row together."""
        check_is_fitted(self, "classes_")
        labels: NDArray[Any] = self.classes_[self._answers(X).scores.argmax(axis=1)]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return (n, classes): mean probabilities, or with `aggregate="vote"` shares of votes."""
        check_is_fitted(self, "classes_")
        return self._answers(X).scores

    def forget(self, groups: ArrayLike) -> list[bytes]:
        """Erase people, train again what had seen them, and return a signed receipt for each, in their order.

        A receipt is the content of a file for `unlearnd verify`; somebody named twice gets one. Raise `ValueError`
        where somebody is not in the store, or was forgotten before: nobody is erased then.
        """
        check_is_fitted(self, "classes_")
        users = list(dict.fromkeys(np.atleast_1d(np.asarray(groups)).tolist()))
        with _as_value_error():
            store = self.store_
            unknown = sum(not store.where_user(user) for user in users)
            if unknown:
                raise InputError(f"{unknown} of {len(users)} groups are not in the store, or were forgotten before")
            erased = store.erase(users)
            return [store.receipt(outcome.request) for outcome in erased.outcomes]

    @property
    def store_(self) -> Store:
        """The open store, for everything else that can be done with one."""
        check_is_fitted(self, "folder_")
        if "_opened" not in self.__dict__:
            try:
                store = Store.open(self.folder_)
            except NotFoundError:
                raise ValueError(
                    f"the store of this {type(self).__name__} is gone; a temporary one goes with the estimator that "
                    "was fitted: give `folder` to keep it"
                ) from None
            self._opened = store
            self._closer = weakref.finalize(self, store.close)
        opened: Store = self._opened
        return opened

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_opened", "_closer", "_served", "_temporary")
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in left_out}

    def _make_store(self, x: NDArray[np.float32], codes: Any, users: NDArray[Any], classes: NDArray[Any]) -> None:
        seed, key = None, None
        if self.folder is None:
            # Removed when this estimator, or its next fit, is done with it.
            self._temporary = tempfile.TemporaryDirectory(prefix="unlearnd-", ignore_cleanup_errors=True)
            folder = Path(self._temporary.name) / "store"
        else:
            folder = Path(self.folder).absolute()
        new = not folder.exists()
        with tempfile.TemporaryDirectory(prefix="unlearnd-") as secret:
            if self.random_state is not None:
                seed = int(check_random_state(self.random_state).randint(2**31 - 1))
                key = Path(secret) / "placement.key"
                key.write_text(hashlib.sha256(f"SisaClassifier {seed}".encode()).hexdigest() + "\n")
            store = Store.create(folder, placement_key=key)
        try:
            names = _names(classes)
            labels = np.asarray(names)[codes]
            store.ingest(DATASET, x, user=users, label=labels, classes=names, shards=self.shards, slices=self.slices)
            settings = dict(self.settings or {})
            store.train(MODEL, dataset=DATASET, backend=self.backend, epochs=self.epochs, seed=seed, settings=settings)
        except BaseException:
            store.close()
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self.folder_, self._opened, self._served = str(folder), store, store.model(MODEL)
        self._closer = weakref.finalize(self, store.close)

    def _answers(self, X: ArrayLike) -> Answers:
        x = validate_data(self, X, dtype=np.float32, order="C", reset=False)
        with _as_value_error():
            served = self.__dict__.get("_served") or self.store_.model(MODEL)
            answers: Answers = served.predict(x, self.aggregate)
        return answers

    def _let_go(self) -> None:
        """Close the store of the last fit; a temporary one goes."""
        for name in ("_opened", "_served"):
            self.__dict__.pop(name, None)
        if "_closer" in self.__dict__:
            self.__dict__.pop("_closer")()
        if "_temporary" in self.__dict__:
            self.__dict__.pop("_temporary").cleanup()


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Say what cannot be used the way scikit-learn says it."""
    try:
        yield
    except (InputError, NotFoundError, RefusedError) as error:
        raise ValueError(str(error)) from error


def _users(groups: ArrayLike | None, rows: int) -> NDArray[Any]:
    if groups is None:
        return np.arange(rows)
    users = np.asarray(groups)
    if users.shape != (rows,):
        raise ValueError(f"groups must name one person for each of {rows} rows; its shape is {users.shape}")
    return users


def _names(classes: NDArray[Any]) -> list[int | str]:
    """Return the labels to declare: as they are where a store takes them, else their numbers."""
    values = classes.tolist()
    if all(type(value) is int for value in values) or all(type(value) is str and value for value in values):
        return list(values)
    return list(range(len(values)))
