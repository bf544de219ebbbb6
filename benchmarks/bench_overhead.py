"""What unlearnd itself costs in training: CPU time of a whole `train` that is not tensor operations.

A model is trained in a store, checkpoints, ledger, log and all, and the CPU time of the process is taken, of all its
threads. The calls into torch that such a training makes have been recorded, with the tensors they had; they are made
once more, one after the other, with nothing in between. Calls that only make views are left out. What the training
takes beyond that is ours: Python, drawing orders, reading slices, digests, writing checkpoints, the ledger. It is CPU
time, and not the clock on the wall, taken in turns, the best of each: a machine that is busy with other things still
makes both slower, unevenly, so let it be quiet.

Calls are repeated as the training makes them. In the form in which torch's dispatcher shows operations each would
take a microsecond longer to launch, and flatter the share.

    python -m benchmarks --only overhead [--quick]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_baseline import Rows, read_rows
from benchmarks.lines import Line
from unlearnd.store import Store

MOST = 0.05
_Operation = tuple[Any, tuple[Any, ...], dict[str, Any]]
SETTINGS = {"hidden": [128], "batch_size": 32, "lr": 0.01, "momentum": 0.9, "standardize": "off"}


def run(quick: bool) -> list[Line]:
    """Measure a training with few slices, and one with as many as the paper's largest has."""
    import torch  # heavy

    torch.set_num_threads(1)
    rows = read_rows(20_000 if quick else 80_000)
    shards = 4 if quick else 20
    # A short training is no measure: what a build costs once, whatever it trains, is then most of it.
    lines = [_measure(rows, shards, slices=5, epochs=18.0, repeats=2 if quick else 6, bar=not quick)]
    if not quick:
        lines.append(_measure(rows, shards, slices=50, epochs=20.0, repeats=2, bar=False))
    return lines


def _measure(rows: Rows, shards: int, slices: int, epochs: float, repeats: int, bar: bool) -> Line:
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "store") as store:
        store.ingest("rows", rows.x, user=np.arange(len(rows.x)), label=rows.y, shards=shards, slices=slices)
        number = iter(range(100))

        def train() -> int:
            name = f"m{next(number)}"
            how: dict[str, Any] = {"epochs": epochs, "seed": 1, "settings": SETTINGS, "executor": "serial"}
            return store.train(name, dataset="rows", backend="mlp", **how).samples

        # The first one also computes the roots of slices, loads torch and tries out stacks: told, but not compared.
        first, samples = _cpu(train)
        calls = _recorded(train)
        works = (train, lambda: _call(calls))
        turns = [[_cpu(work)[0] for work in works] for _ in range(repeats)]
    whole, again = (min(times) for times in zip(*turns, strict=True))
    share = (whole - again) / whole
    detail: dict[str, float | str] = {
        "training, CPU s": whole,
        "its tensor operations alone, CPU s": again,
        "share of each turn": ", ".join(f"{1 - alone / with_us:.3f}" for with_us, alone in turns),
        "operations": f"{len(calls):,}",
        "samples": f"{samples:,}",
        "checkpoints": shards * slices,
        "the first training on a dataset, CPU s": first,
    }
    name = f"training, share of CPU outside tensor operations ({rows.name}, S = {shards}, R = {slices})"
    return Line(name, share, f"≤ {MOST}" if bar else "", share <= MOST if bar else None, detail)


def _cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def _recorded(work: Callable[[], Any]) -> list[_Operation]:
    """Do the work and return the calls into torch that came to tensor operations, and not only to views."""
    from torch.overrides import TorchFunctionMode  # heavy
    from torch.utils._python_dispatch import TorchDispatchMode

    operations = 0
    calls: list[_Operation] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal operations
            operations += not func.is_view
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = operations
            result = func(*args, **(kwargs or {}))
            if operations > before:
                calls.append((func, args, kwargs or {}))
            return result

    with Operations(), Calls():
        work()
    return calls


def _call(operations: list[_Operation]) -> None:
    for operation, args, kwargs in operations:
        operation(*args, **kwargs)
