"""Networks for images: speed against the same network in a bare loop, and what shards cost in accuracy.

PYTHONPATH=.:plugins/unlearnd-torch python -m benchmarks.bench_networks [--quick]

Accuracy is measured on real data in `../shared/data`, beside the repository; where it is not there, a line says so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import Line, seconds_in_turns

DATA = Path(__file__).parents[2] / "shared" / "data"
CLASSES = 10
Array = np.ndarray[Any, Any]


def run(quick: bool) -> list[Line]:
    """Measure the speed of each network, then accuracy by the number of shards."""
    import torch  # heavy

    torch.set_num_threads(1)
    repeats = 3 if quick else 6
    small: dict[str, Any] = {"depth": 10, "width": 1}
    lines = [
        _speed("convnet", "ConvNet, 28 × 28, batch 32", {}, (28, 28), 1024, 32, repeats),
        _speed("resnet", "ResNet-18, 32 × 32, batch 32", {}, (32, 32, 3), 64, 32, repeats),
        _speed("wide_resnet", "WRN-10-1, 32 × 32, batch 64", small, (32, 32, 3), 512, 64, repeats),
        _speed("wide_resnet", "WRN-10-1 with crops and flips", _varied(small), (32, 32, 3), 512, 64, repeats, None),
    ]
    digits = {"batch_size": 32, "lr": 0.02, "channels_last": True}
    lines += _accuracy("convnet", "MNIST", "mnist.npz", digits, (1, 5, 20), 12_000 if quick else 30_000, 3)
    colours = {**_varied(small), "batch_size": 64, "channels_last": True, "weight_decay": 0.0005}
    points, epochs = (4_000, 3) if quick else (10_000, 5)
    lines += _accuracy("wide_resnet", "CIFAR-10, a third of it", "cifar10_20k.npz", colours, (1, 5), points, epochs)
    return lines


def _varied(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "crop_padding": 4, "flip": True}


def _speed(
    backend: str,
    what: str,
    given: dict[str, Any],
    shape: tuple[int, ...],
    points: int,
    batch: int,
    repeats: int,
    bar: float | None = 0.95,
) -> Line:
    """Train an epoch with the backend and with a loop around the same module, in turns."""
    ours, bare = seconds_in_turns(repeats, *_ours_and_bare(backend, given, shape, points, batch))
    ratio = bare / ours
    detail: dict[str, float | str] = {
        "ours, samples/s": round(points / ours),
        "bare loop, samples/s": round(points / bare),
    }
    name = f"training, {what}, against a bare loop"
    return Line(name, ratio, f"≥ {bar}" if bar else "", ratio >= bar if bar else None, detail)


def _ours_and_bare(
    name: str, given: dict[str, Any], shape: tuple[int, ...], points: int, batch: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch  # heavy
    from torch.nn.functional import cross_entropy
    from unlearnd_torch import NetworkBackend
    from unlearnd_torch.networks import build_network
    from unlearnd_torch.settings import NETWORKS

    from unlearnd.hookspecs import Job, Points

    backend = NetworkBackend(name)
    settings = backend.settings({**given, "batch_size": batch, "lr": 0.01})
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (points, *shape)).astype(np.uint8)
    y = random.integers(0, CLASSES, points)
    state = backend.initial_state(settings, shape, CLASSES, 1)
    # Fit the input scaling beforehand, in a step of its own: it happens once in the life of a constituent.
    state = backend.train(settings, Job(state, Points(x, y), Fraction(1, points), 1), "cpu", _ignore)
    job = Job(state, Points(x, y), Fraction(1), 1)

    def train_ours() -> object:
        return backend.train(settings, job, "cpu", _ignore)

    def train_bare() -> None:
        """Train an epoch as a good hand-written loop does: images scaled beforehand, in memory, no variation."""
        torch.manual_seed(0)
        network = build_network(NETWORKS[name].model_validate(settings), shape, CLASSES)
        optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        images = torch.from_numpy(x).float().sub_(128).div_(64)
        images = images.unsqueeze(1) if len(shape) == 2 else images.permute(0, 3, 1, 2).contiguous()
        labels, order = torch.from_numpy(y), torch.randperm(points)
        for start in range(0, points, batch):
            rows = order[start : start + batch]
            loss = cross_entropy(network(images[rows]), labels[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return train_ours, train_bare


def _accuracy(
    backend: str, what: str, file: str, settings: dict[str, Any], shards: tuple[int, ...], points: int, epochs: int
) -> list[Line]:
    """Train with each number of shards; a line is accuracy by mean, as a share of what one shard reaches."""
    path = DATA / file
    if not path.exists():
        print(f"{'':28}skipped: accuracy of {backend} on {what} needs ../shared/data/{file}, which is not here")
        return []
    with np.load(path, allow_pickle=False) as data:
        x, y, x_test, y_test = (data[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    lines, alone = [], 0.0
    for count in shards:
        right = _train_and_evaluate(backend, settings, count, x[:points], y[:points], x_test, y_test, epochs)
        alone = alone or right["mean"]
        detail: dict[str, float | str] = {f"top-1 by {how}, %": 100 * share for how, share in right.items()}
        name = f"accuracy, {backend} on {what}, {points:,} points, S = {count}, against S = {shards[0]}"
        lines.append(Line(name, right["mean"] / alone, "", None, detail))
    return lines


def _train_and_evaluate(
    backend: str, settings: dict[str, Any], shards: int, x: Array, y: Array, x_test: Array, y_test: Array, epochs: int
) -> dict[str, float]:
    import unlearnd

    workers = min(2, shards)
    how: dict[str, Any] = {"executor": "processes" if workers > 1 else "serial", "workers": workers}
    with tempfile.TemporaryDirectory() as folder, unlearnd.create_store(f"{folder}/store") as store:
        people = np.arange(len(x))
        store.ingest("images", x, user=people, label=y, classes=CLASSES, shards=shards, slices=1)
        store.train("m", dataset="images", backend=backend, epochs=epochs, seed=1, settings=settings, **how)
        return {rule: store.evaluate("m", x_test, label=y_test, aggregate=rule).top1 for rule in ("vote", "mean")}


def _ignore(samples: int) -> None:
    pass


if __name__ == "__main__":
    for line in run(quick="--quick" in sys.argv):
        print(f"{line.ratio:6.2f}  {line.bar:8} {'' if line.holds is None else line.holds!s:5}  {line.name}")
        print(f"        {line.detail}")
