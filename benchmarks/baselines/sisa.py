"""SISA as research code does it: a `DataLoader`, a process for each shard and slice, whole models through `torch.save`.

Nothing here is slow on purpose. Rows are read once per process, and only those that it trains on; they lie in memory
as float32; the loader starts no workers, which at these sizes would make it slower; one thread, as unlearnd has. What a
process trains, it trains with the same network, optimiser, batches and number of epochs as `mlp` does.

    python -m benchmarks.baselines.sisa FOLDER SHARD SLICE

trains one shard on slices 1 to SLICE, beginning with what was saved after the slice before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """What is trained, and how."""

    shards: int
    slices: int
    epochs: int
    """Epochs of each slice's step."""
    batch: int
    hidden: int
    classes: int
    lr: float
    momentum: float


@dataclass
class Took:
    """What training cost."""

    processes: int = 0
    samples: int = 0
    seconds: float = 0.0
    """By the clock on the wall."""
    loop: float = 0.0
    """Of those, what the processes spent in their training loops: without their start, reading and saving."""


def lay_down(folder: Path, plan: Plan, x: Array, y: Array, shard: Array, slice_: Array) -> None:
    """Write the data, and where each row trains, to a folder."""
    folder.mkdir()
    for name, array in {"x": x, "y": y, "shard": shard, "slice": slice_, "erased": np.zeros(len(x), bool)}.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))


def train(folder: Path) -> Took:
    """Train every shard, slice after slice."""
    plan = _plan(folder)
    return _run(folder, [(k, r) for k in range(1, plan.shards + 1) for r in range(1, plan.slices + 1)])


def unlearn(folder: Path, rows: Array) -> Took:
    """Take rows out, and train on from the last model that has not seen any of them, shard by shard."""
    begun = time.perf_counter()
    plan = _plan(folder)
    erased = np.load(folder / "erased.npy")
    erased[rows] = True
    np.save(folder / "erased.npy", erased)
    shard, slice_ = (np.load(folder / f"{name}.npy")[rows] for name in ("shard", "slice"))
    steps = []
    for k in np.unique(shard).tolist():
        first = int(slice_[shard == k].min())
        for r in range(first, plan.slices + 1):
            _file(folder, k, r).unlink()
            steps.append((k, r))
    took = _run(folder, steps)
    took.seconds = time.perf_counter() - begun
    return took


def accuracy(folder: Path, x: Array, y: Array) -> float:
    """Return the share of rows whose label the constituents vote for."""
    import torch  # heavy

    plan = _plan(folder)
    votes = torch.zeros(len(x), plan.classes)
    inputs = torch.from_numpy(x.astype(np.float32))
    with torch.no_grad():
        for k in range(1, plan.shards + 1):
            model = _network(plan, x.shape[1])
            model.load_state_dict(_load(_file(folder, k, plan.slices))["model"])
            votes += torch.nn.functional.one_hot(model(inputs).argmax(1), plan.classes)
    return float((votes.argmax(1).numpy() == y).mean())


def _run(folder: Path, steps: list[tuple[int, int]]) -> Took:
    begun, took = time.perf_counter(), Took()
    for k, r in steps:
        command = [sys.executable, "-m", "benchmarks.baselines.sisa", str(folder), str(k), str(r)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        said = json.loads(done.stdout)
        took.processes += 1
        took.samples += said["samples"]
        took.loop += said["seconds"]
    took.seconds = time.perf_counter() - begun
    return took


def _train_slice(folder: Path, shard: int, slice_: int) -> dict[str, float]:
    """Train one shard on slices 1 to `slice_`, and save the model after it."""
    import torch  # heavy
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(shard * 1000 + slice_)
    plan = _plan(folder)
    mine = (np.load(folder / "shard.npy") == shard) & (np.load(folder / "slice.npy") <= slice_)
    rows = np.flatnonzero(mine & ~np.load(folder / "erased.npy"))
    x = np.load(folder / "x.npy", mmap_mode="r")[rows].astype(np.float32)
    y = np.load(folder / "y.npy")[rows].astype(np.int64)
    model = _network(plan, x.shape[1])
    optimiser = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum)
    if slice_ > 1:
        saved = _load(_file(folder, shard, slice_ - 1))
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimizer"])
    points = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = DataLoader(points, batch_size=plan.batch, shuffle=True)
    loss_of = torch.nn.CrossEntropyLoss()
    begun = time.perf_counter()
    for _ in range(plan.epochs):
        for inputs, labels in loader:
            optimiser.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimiser.step()
    seconds = time.perf_counter() - begun
    torch.save({"model": model.state_dict(), "optimizer": optimiser.state_dict()}, _file(folder, shard, slice_))
    return {"samples": plan.epochs * len(rows), "seconds": seconds}


def _network(plan: Plan, features: int) -> nn.Module:
    from torch import nn  # heavy

    return nn.Sequential(nn.Linear(features, plan.hidden), nn.ReLU(), nn.Linear(plan.hidden, plan.classes))


def _file(folder: Path, shard: int, slice_: int) -> Path:
    return folder / f"shard-{shard}-slice-{slice_}.pt"


def _load(path: Path) -> dict[str, Any]:
    """Read a file that this module wrote; tensors only, no objects."""
    import torch  # heavy

    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def _plan(folder: Path) -> Plan:
    return Plan(**json.loads((folder / "plan.json").read_text()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_train_slice(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
