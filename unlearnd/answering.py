"""Ask a model: answers, and how many of them are right, batch by batch.

Of files, the columns are read that the model's dataset was made of, in their order.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from unlearnd.errors import InputError
from unlearnd.ledger import models, points
from unlearnd.ledger.points import Dataset
from unlearnd.opened import Opened
from unlearnd.serving import Answers, Evaluation, ServedModel, join_evaluations
from unlearnd.shadows import Labelled, MembershipReport, attack_model
from unlearnd.sources import Batch, Data, read_batches


def served_model(store: Opened, name: str, device: str | None) -> ServedModel:
    """Return a model to ask."""
    found = models.model_in_service(store.ledger, name)
    return ServedModel(store.ledger, store.storage, store.plugins, found, device or store.config.device)


def predict(store: Opened, model: str, data: Data, *, aggregate: str, device: str | None = None) -> Iterator[Answers]:
    """Answer for rows in files or an array, batch by batch, in order."""
    served = served_model(store, model, device)
    for batch in _read_for(store, model, data, None):
        yield served.predict(batch.x, aggregate)


def evaluate(
    store: Opened,
    model: str,
    data: Data,
    *,
    label: str | ArrayLike,
    aggregate: str,
    device: str | None,
) -> Evaluation:
    """Compare a model's answers with the right ones."""
    served = served_model(store, model, device)
    known = {str(value): index for index, value in enumerate(served.classes)}
    parts = []
    for batch in _read_for(store, model, data, label):
        assert batch.label is not None
        right = np.array([known.get(str(value), -1) for value in batch.label.values], np.int64)
        parts.append(served.evaluate(batch.x, right[batch.label.codes], aggregate))
    return join_evaluations(parts)


def evaluate_groups(
    store: Opened,
    model: str,
    data: Data,
    *,
    label: str | ArrayLike,
    group: str | ArrayLike,
    aggregate: str,
    device: str | None,
) -> dict[str, Evaluation]:
    """Compare a model's answers with the right ones, for each group by itself, by name."""
    served = served_model(store, model, device)
    known = {str(value): index for index, value in enumerate(served.classes)}
    parts: dict[str, list[Evaluation]] = {}
    for batch in _read_for(store, model, data, label, group):
        assert batch.label is not None
        assert batch.group is not None
        right = np.array([known.get(str(value), -1) for value in batch.label.values], np.int64)[batch.label.codes]
        for code, name in enumerate(batch.group.values):
            rows = batch.group.codes == code
            if rows.any():
                parts.setdefault(str(name), []).append(served.evaluate(batch.x[rows], right[rows], aggregate))
    return {name: join_evaluations(parts[name]) for name in sorted(parts)}


def attack_membership(
    store: Opened,
    model: str,
    *,
    erased: Data,
    held_out: Data,
    label: str | tuple[ArrayLike, ArrayLike],
    shadows: int,
    seed: int,
    device: str | None,
    on_shadow: Callable[[int], None],
) -> MembershipReport:
    """Try to tell rows that were erased from rows never given, by the model's answers alone; change nothing."""
    served = served_model(store, model, device)
    labels = (label, label) if isinstance(label, str) else label
    return attack_model(
        store.ledger,
        store.storage,
        store.plugins,
        served,
        _labelled(store, served, erased, labels[0]),
        _labelled(store, served, held_out, labels[1]),
        shadows=shadows,
        seed=seed,
        device=device or store.config.device,
        on_shadow=on_shadow,
    )


def _labelled(store: Opened, served: ServedModel, data: Data, label: str | ArrayLike) -> Labelled:
    """Return rows somebody brings along, all of classes that the model knows."""
    known = {str(value): index for index, value in enumerate(served.classes)}
    x, y = [], []
    for batch in _read_for(store, served.name, data, label):
        assert batch.label is not None
        unknown = [str(value) for value in batch.label.values if str(value) not in known]
        if unknown:
            raise InputError(f"model '{served.name}' knows no class '{unknown[0]}', which some rows have")
        x.append(served.checked(batch.x))
        y.append(np.array([known[str(value)] for value in batch.label.values], np.int64)[batch.label.codes])
    return Labelled(np.concatenate(x), np.concatenate(y))


def _read_for(
    store: Opened, model: str, data: Data, label: str | ArrayLike | None, group: str | ArrayLike | None = None
) -> Iterator[Batch]:
    """Read rows to ask a model about: of files, the columns that its dataset was made of."""
    found = models.model_named(store.ledger, model)
    dataset = points.dataset_by_id(store.ledger, found.dataset_id)
    return read_batches(data, user=None, label=label, group=group, features=columns_for(dataset, data))


def columns_for(dataset: Dataset, data: Data) -> tuple[str, ...] | None:
    """Return the columns to read from files for a dataset; None where there are none to name."""
    if dataset.columns is None or not isinstance(data, str | os.PathLike | Sequence):
        return None
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    for file in [os.fspath(name) for name in files]:
        if file.endswith(".npz"):
            names = ", ".join(dataset.columns[:5]) + (", …" if len(dataset.columns) > 5 else "")
            raise InputError(f"{file}: dataset '{dataset.name}' has the columns {names}; give a CSV or Parquet file")
    return dataset.columns
