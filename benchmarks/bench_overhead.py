"""What unlearnd itself costs in training: CPU time of a whole `train` that is not calls into torch.

It is counted in two parts, each a ratio within one run, since two trainings of this length differ by more than what is
looked for. Outside the backend: the CPU time of the process, all threads, less what the training thread takes in
`train_many`; that is reading slices, digests, writing checkpoints, ledger, log, leases. Within it: of every few blocks
of steps, filling the block and taking its steps are done as they are, and then only the calls into torch that were made
meanwhile, with the tensors they had; in turns, a few milliseconds each. Calls that only make views are left out. What
the first takes beyond the second is Python. The states that come of this are worth nothing, and nobody wants them.

To launch a call counts as the call: it is torch's. A file that is written takes memory; memory that a virtual machine
has given back to its host is slow to come by, so some is asked for and let go first.

    python -m benchmarks --only overhead [--quick]
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_baseline import Rows, read_rows
from benchmarks.lines import Line
from unlearnd.store import Store

MOST = 0.05
SETTINGS = {"hidden": [128], "batch_size": 32, "lr": 0.01, "momentum": 0.9, "standardize": "off"}
EPOCHS = 20.0
"""As the paper trains Purchase."""
_EVERY = 4
_TURNS = 3
_Operation = tuple[Any, tuple[Any, ...], dict[str, Any]]


def run(quick: bool) -> list[Line]:
    """Measure a training with few slices, and one with as many as the paper's largest has."""
    import torch  # heavy

    torch.set_num_threads(1)
    rows = read_rows(20_000 if quick else 130_000)
    shards = 4 if quick else 20
    lines = [_measure(rows, shards, slices=5, repeats=2 if quick else 5, bar=not quick)]
    if not quick:
        lines.append(_measure(rows, shards, slices=50, repeats=2, bar=False))
    return lines


def _measure(rows: Rows, shards: int, slices: int, repeats: int, bar: bool) -> Line:
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "store") as store:
        store.ingest("rows", rows.x, user=np.arange(len(rows.x)), label=rows.y, shards=shards, slices=slices)
        number = iter(range(100))

        def train() -> int:
            name = f"m{next(number)}"
            how: dict[str, Any] = {"epochs": EPOCHS, "seed": 1, "settings": SETTINGS, "executor": "serial"}
            return store.train(name, dataset="rows", backend="mlp", **how).samples

        # The first one also computes the roots of slices, loads torch and tries out stacks: told, but not compared.
        begun = time.process_time()
        samples = train()
        first = time.process_time() - begun
        turns = []
        for _ in range(repeats):
            _take_memory(Path(folder))
            turns.append(_in_backend(train))
        within = _Tally()
        with _looking(within):
            train()
    outside = statistics.median(1 - inside / whole for whole, inside in turns)
    share = outside + (1 - outside) * within.share
    detail: dict[str, float | str] = {
        "training, CPU s": statistics.median(whole for whole, _ in turns),
        "outside the backend, share": outside,
        "of each training": ", ".join(f"{1 - inside / whole:.4f}" for whole, inside in turns),
        "within it and outside calls into torch, share": within.share,
        "filling blocks, of that": within.fill / within.whole,
        "blocks looked at": within.blocks,
        "samples": f"{samples:,}",
        "checkpoints": shards * slices,
        "the first training on a dataset, CPU s": first,
    }
    name = f"training, share of CPU outside tensor operations ({rows.name}, S = {shards}, R = {slices})"
    return Line(name, share, f"≤ {MOST}" if bar else "", share <= MOST if bar else None, detail)


def _take_memory(folder: Path) -> None:
    """Ask for as much memory for files as a training writes, several times over, and let it go."""
    path, piece = folder / "memory", bytes(1 << 20)
    with open(path, "wb") as file:
        for _ in range(1024):
            file.write(piece)
    path.unlink()


def _in_backend(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU seconds of the process and, of those, the seconds of the thread that trains in the backend."""
    from unlearnd_torch import mlp  # heavy

    inside = 0.0
    train_stacked = mlp.train_stacked

    def timed(*arguments: Any) -> Any:
        nonlocal inside
        begun = time.thread_time()
        states = train_stacked(*arguments)
        inside += time.thread_time() - begun
        return states

    mlp.train_stacked = timed
    try:
        begun = time.process_time()
        work()
        return time.process_time() - begun, inside
    finally:
        mlp.train_stacked = train_stacked


class _Tally:
    """CPU seconds of blocks as they are, of that what filling them takes beyond its calls, and of their calls alone."""

    def __init__(self) -> None:
        self.whole = self.alone = self.fill = 0.0
        self.blocks = 0

    @property
    def share(self) -> float:
        return (self.whole - self.alone) / self.whole

    def add(self, work: Callable[[], Any]) -> float:
        """Do some work several times, in turns with its calls alone; return what it took beyond them."""
        calls = _recorded(work)
        whole = alone = 0.0
        for turn in range(_TURNS):
            for calls_only in (turn % 2 == 0, turn % 2 == 1):
                begun = time.thread_time()
                if calls_only:
                    _call(calls)
                else:
                    work()
                took = time.thread_time() - begun
                whole, alone = (whole, alone + took) if calls_only else (whole + took, alone)
        self.whole, self.alone = self.whole + whole, self.alone + alone
        return whole - alone


@contextmanager
def _looking(tally: _Tally) -> Iterator[None]:
    """Look at every few blocks that `mlp` fills, and at the steps that are taken with them."""
    from unlearnd_torch.mlp_batches import Block  # heavy
    from unlearnd_torch.mlp_steps import Stack

    fill, step = Block.fill, Stack.step
    blocks = 0
    waiting: list[tuple[Any, ...]] = []
    looked_at = False

    def look_at_fill(block: Any, left: Sequence[int], sources: Sequence[Any]) -> int:
        nonlocal blocks, looked_at
        blocks += 1
        if waiting:
            steps = waiting.copy()
            waiting.clear()
            tally.blocks += 1
            tally.add(lambda: [step(*one) for one in steps])
        looked_at = blocks % _EVERY == 0
        if not looked_at:
            return fill(block, left, sources)
        before = [source.stream for source in sources]

        def work() -> int:
            for source, stream in zip(sources, before, strict=True):
                source.stream = copy.copy(stream)
            return fill(block, left, sources)

        tally.fill += tally.add(work)
        return work()

    def look_at_step(stack: Any, active: int, block: Any, place: int) -> None:
        if looked_at:
            waiting.append((stack, active, block, place))
        step(stack, active, block, place)

    Block.fill, Stack.step = look_at_fill, look_at_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.fill, Stack.step = fill, step  # type: ignore[method-assign]


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
