"""Training an MLP 600-128-2: our harness against loops as people write them. One thread.

PYTHONPATH=.:plugins/unlearnd-torch python -m benchmarks.bench_training [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.lines import Line, seconds_in_turns

FEATURES, HIDDEN, CLASSES, SHARDS = 600, 128, 2, 20


def run(quick: bool) -> list[Line]:
    """Measure lines 1a, 1b and 2, and 1b for other optimisers and batches."""
    import torch  # heavy

    torch.set_num_threads(1)
    repeats = 4 if quick else 9
    points = 1280 if quick else 2560
    lines = [_one_by_one(points, repeats)]
    lines += [
        _stacked(points, repeats, "sgd", 32, bar=1.3),
        _against_dataloader(points, repeats),
        _stacked(points, repeats, "adam", 32),
        *(_stacked(points, repeats, "sgd", batch) for batch in (16, 64, 256)),
    ]
    return lines


def _one_by_one(points: int, repeats: int) -> Line:
    ours, bare = seconds_in_turns(repeats, *_ours_and(_bare_loop, points * 4, 1, "sgd", 32))
    ratio = bare / ours
    detail = _detail(points * 4, ours, bare)
    return Line("training, one constituent against a bare loop", ratio, "≥ 0.95", ratio >= 0.95, detail)


def _stacked(points: int, repeats: int, optimizer: str, batch: int, bar: float | None = None) -> Line:
    ours, bare = seconds_in_turns(repeats, *_ours_and(_bare_loop, points, SHARDS, optimizer, batch))
    ratio = bare / ours
    name = f"training, {SHARDS} shards stacked against a bare loop ({optimizer}, batch {batch})"
    detail = _detail(points * SHARDS, ours, bare)
    return Line(name, ratio, f"≥ {bar}" if bar else "", ratio >= bar if bar else None, detail)


def _against_dataloader(points: int, repeats: int) -> Line:
    ours, loader = seconds_in_turns(repeats, *_ours_and(_dataloader_loop, points, SHARDS, "sgd", 32))
    detail = _detail(points * SHARDS, ours, loader)
    return Line(f"training, {SHARDS} shards stacked against a DataLoader", loader / ours, "", None, detail)


def _detail(samples: int, ours: float, theirs: float) -> dict[str, float | str]:
    return {"ours, samples/s": round(samples / ours), "theirs, samples/s": round(samples / theirs)}


def _ours_and(
    theirs: Callable[..., None], points: int, shards: int, optimizer: str, batch: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions that train the same shards: ours as one stack, theirs one after the other."""
    from unlearnd_torch import MlpBackend

    from unlearnd.hookspecs import Job, Points

    backend = MlpBackend()
    settings = backend.settings(
        {"hidden": [HIDDEN], "batch_size": batch, "optimizer": optimizer, "lr": 0.01, "momentum": 0.0}
    )
    random = np.random.default_rng(0)
    jobs = []
    for shard in range(shards):
        x = random.standard_normal((points, FEATURES), dtype=np.float32)
        y = random.integers(0, CLASSES, points)
        state = backend.initial_state(settings, (FEATURES,), CLASSES, shard)
        jobs.append(Job(state=state, points=Points(x=x, y=y), epochs=Fraction(1), seed=shard))
    # Fit the input scaling beforehand, in a step of its own: it happens once in the life of a constituent.
    fitted = backend.train_many(
        settings, [Job(job.state, job.points, Fraction(1, points), job.seed) for job in jobs], "cpu", _ignore
    )
    jobs = [Job(state, job.points, job.epochs, job.seed) for state, job in zip(fitted, jobs, strict=True)]

    def train_ours() -> object:
        if shards == 1:
            return backend.train(settings, jobs[0], "cpu", _ignore)
        return backend.train_many(settings, jobs, "cpu", _ignore)

    def train_theirs() -> object:
        for job in jobs:
            theirs(job.points.x, job.points.y, optimizer, batch)
        return None

    return train_ours, train_theirs


def _make_model(optimizer: str) -> tuple[Any, Any]:
    import torch  # heavy

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return model, kinds[optimizer](model.parameters(), lr=0.01)


def _bare_loop(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], optimizer: str, batch: int) -> None:
    """Train one epoch as a good hand-written loop does: tensors in memory, indexed in place."""
    import torch  # heavy

    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    model, optimiser = _make_model(optimizer)
    order = torch.randperm(len(inputs))
    for start in range(0, len(inputs), batch):
        rows = order[start : start + batch]
        loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _dataloader_loop(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], optimizer: str, batch: int) -> None:
    """Train one epoch as the tutorials do."""
    import torch  # heavy
    from torch.utils.data import DataLoader, TensorDataset

    model, optimiser = _make_model(optimizer)
    points = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = DataLoader(points, batch_size=batch, shuffle=True)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _ignore(samples: int) -> None:
    pass


if __name__ == "__main__":
    for line in run(quick="--quick" in sys.argv):
        print(f"{line.ratio:6.2f}  {line.bar:8} {'' if line.holds is None else line.holds!s:5}  {line.name}")
        print(f"        {line.detail}")
