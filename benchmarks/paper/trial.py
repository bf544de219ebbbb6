"""Stores to try things in: made, asked and erased from only as any user of the library would.

Every trial has a store of its own in a temporary folder. The placement key comes from the seed of the trial, so that a
cell gives the same places, weights and counts of samples whenever it is measured; only seconds differ.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.data import Array, Data
from unlearnd.store import Store

MLP = {"batch_size": 32, "lr": 0.01}
"""The perceptron of most experiments: one hidden layer of 128. At the default rate one large shard learns badly, and
sharding would look better than it is."""


@contextmanager
def new_store(seed: int) -> Iterator[Store]:
    """Give a new store whose placement follows from the seed."""
    with tempfile.TemporaryDirectory(prefix="unlearnd-paper-") as folder:
        key = Path(folder) / "placement.key"
        key.write_text(hashlib.sha256(f"placement {seed}".encode()).hexdigest() + "\n")
        with Store.create(Path(folder) / "store", placement_key=key) as store:
            yield store


@contextmanager
def store_with(
    data: Data, shards: int, slices: int, seed: int, *, user: Array | None = None, **layout: Any
) -> Iterator[Store]:
    """Give a store that holds the data as dataset `d`, in shards and slices.

    Every point is somebody else's, as in the paper, unless `user` says whose each is.
    """
    with new_store(seed) as store:
        owner = np.arange(len(data.x)) if user is None else user
        store.ingest(
            "d", data.x, user=owner, label=data.y, classes=data.classes, shards=shards, slices=slices, **layout
        )
        yield store


def accuracy(store: Store, model: str, data: Data) -> dict[str, float]:
    """Return the accuracy of a model by vote and by mean, in percent: top-1, and top-5 with more than five classes."""
    found = {}
    for rule in ("vote", "mean"):
        evaluation = store.evaluate(model, data.x_test, label=data.y_test, aggregate=rule)
        found[rule] = 100 * evaluation.top1
        if evaluation.top5 is not None:
            found[f"{rule}_top5"] = 100 * evaluation.top5
    return found


@dataclass(frozen=True)
class Erasure:
    """What erasing some users at once took, from the request to the receipt and then to full strength."""

    users: int
    receipt_seconds: float
    """From the request until receipts were signed and logged: nothing made from the data was left then."""
    build_seconds: float
    """From then until all constituents were at full strength again."""
    build_cpu: float
    """CPU seconds of that build: what else the machine was doing does not count."""
    scratch_seconds: float
    """What training these models took when they were new."""
    samples: int
    from_scratch: int
    checkpoints: int
    """How many the build made."""


def erase_and_build(store: Store, users: Sequence[int | str], models: Sequence[str] = ()) -> dict[str, Any]:
    """Erase users at once, get the receipts, then build these models or all; return what an `Erasure` has."""
    begin = time.perf_counter()
    erased = store.erase(users, build=False)
    receipt, cpu = time.perf_counter(), time.process_time()
    builds = store.build(models)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    erased.check_destroyed()
    counted = ((b.samples, b.from_scratch, b.checkpoints) for b in builds)
    samples, whole, made = (sum(values) for values in zip(*counted, strict=True))
    scratch = sum(store.builds(build.model)[0].seconds for build in builds)
    return asdict(Erasure(len(users), receipt - begin, end - receipt, cpu, scratch, samples, whole, made))


def planned(store: Store, draws: Iterable[Sequence[int | str]]) -> list[float]:
    """Return for each draw of users the share of all samples that erasing them at once would train again."""
    shares = []
    for users in draws:
        models = store.plan_erasure(users).models
        # No model is named where nobody was found: then nothing is trained again.
        shares.append(sum(model.samples for model in models) / max(1, sum(model.from_scratch for model in models)))
    return shares


def draws_of(random: np.random.Generator, people: int, users: int, draws: int) -> list[list[int]]:
    """Return draws of some users, nobody twice within one."""
    return [random.choice(people, users, replace=False).tolist() for _ in range(draws)]
