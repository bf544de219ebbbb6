"""Transfer learning: what a frozen base does to the price of sharding, and what keeping features saves.

A base is trained on half of the classes of a dataset, as somebody would on public data. SISA then learns the other
half, from scratch and on top of the base, with few points per shard as in section VI-C of the paper.

PYTHONPATH=.:plugins/unlearnd-torch python -m benchmarks.bench_transfer [--quick]
"""

from __future__ import annotations

import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import Line, seconds_in_turns

DATA = Path(__file__).parents[2] / "shared" / "data"
NAMES = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10_20k": "CIFAR-10 (20,000)"}
SHARDS = (1, 5, 20)
NETWORK = {"batch_size": 32, "lr": 0.02, "standardize": "fixed", "mean": 128, "std": 64}


def run(quick: bool) -> list[Line]:
    """Measure the gap to S = 1 with a base and without, and an epoch with kept features and without."""
    lines = []
    names = [name for name in ("fashion_mnist", "cifar10_20k") if (DATA / f"{name}.npz").exists()]
    for name in names[:1] if quick else names or ["digits"]:
        lines += _on(name, quick)
    return lines or _on("digits", quick)


def _on(name: str, quick: bool) -> list[Line]:
    title = NAMES.get(name, "handwritten digits of 8 × 8, because the shared data is not there")
    public, private, test = _halves(name, 2000 if quick else 4000)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.safetensors"
        _train_base(public, base, 3 if quick else 6)
        return [_gap(title, private, test, base, Path(folder), quick), _epoch(title, private, base, quick)]


def _halves(name: str, points: int) -> tuple[Any, Any, Any]:
    """Return (images, labels) of the first five classes, and of the other five for training and for testing."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x, rest = (x.reshape(-1, 8, 8) * 15).astype(np.uint8), len(x) * 4 // 5
        train, held = (x[:rest], y[:rest]), (x[rest:], y[rest:])
    else:
        with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
            train, held = (file["x_train"], file["y_train"]), (file["x_test"], file["y_test"])

    def pick(given: tuple[Any, Any], low: bool, most: int) -> tuple[Any, Any]:
        rows = np.flatnonzero((given[1] < 5) == low)[:most]
        return np.ascontiguousarray(given[0][rows]), given[1][rows].astype(np.int64) - (0 if low else 5)

    return pick(train, True, 4 * points), pick(train, False, points), pick(held, False, 2000)


def _train_base(public: tuple[Any, Any], path: Path, epochs: int) -> None:
    """Train a whole network on the public half and save it as anybody would."""
    from safetensors.numpy import save_file
    from unlearnd_torch import NetworkBackend

    from unlearnd.hookspecs import Job, Points

    backend = NetworkBackend("convnet")
    settings = backend.settings(NETWORK)
    state = backend.initial_state(settings, public[0].shape[1:], 5, 1)
    trained = backend.train(settings, Job(state, Points(*public), Fraction(epochs), 1), "cpu", _ignore)
    prefix = "module."
    save_file({key.removeprefix(prefix): trained[key] for key in trained if key.startswith(prefix)}, path)


def _gap(title: str, private: tuple[Any, Any], test: tuple[Any, Any], base: Path, folder: Path, quick: bool) -> Line:
    """Compare how much accuracy sharding costs from scratch and on the base."""
    import unlearnd

    x, y = private
    on_base = {**NETWORK, "base": str(base), "base_public": True}
    ways = {
        "from scratch": NETWORK,
        "head on the base": {**on_base, "train": "head"},
        "last block on the base": {**on_base, "train": "last-1"},
    }
    right: dict[str, dict[int, float]] = {how: {} for how in ways}
    for shards in SHARDS:
        with unlearnd.create_store(folder / f"store{shards}") as store:
            store.ingest("d", x, user=np.arange(len(x)), label=y, classes=5, shards=shards, slices=2)
            for how, settings in ways.items():
                name = how.replace(" ", "-")
                store.train(name, dataset="d", backend="convnet", epochs=4 if quick else 10, seed=1, settings=settings)
                labels = store.model(name).predict(test[0], "mean").labels
                right[how][shards] = float((labels == test[1]).mean()) * 100
    most = SHARDS[-1]
    gaps = {how: found[1] - found[most] for how, found in right.items()}
    detail: dict[str, float | str] = {"points, test points": f"{len(x):,}, {len(test[0]):,}"}
    for how, found in right.items():
        detail[f"{how}, accuracy at S = {', '.join(map(str, SHARDS))}"] = ", ".join(
            f"{v:.1f} %" for v in found.values()
        )
        detail[f"{how}, gap of S = {most} to S = 1"] = f"{gaps[how]:.1f} points"
    saved = gaps["from scratch"] - gaps["head on the base"]
    return Line(f"transfer, points of the gap to S = 1 that a base saves ({title})", saved, "> 0", saved > 0, detail)


def _epoch(title: str, private: tuple[Any, Any], base: Path, quick: bool) -> Line:
    """Compare an epoch on kept features with one that computes them, and with one of the whole network."""
    from safetensors.numpy import load_file
    from unlearnd_torch import NetworkBackend

    from unlearnd.hookspecs import Job, Points

    backend, tensors = NetworkBackend("convnet"), load_file(base)
    x, y = (column[:1000] for column in private)
    settings = backend.settings({**NETWORK, "base": "0" * 64, "base_public": True, "train": "head"})
    state = backend.initial_state_on(settings, tensors, x.shape[1:], 5, 1)
    kept = backend.features(settings, tensors, x, "cpu")
    plain = backend.settings(NETWORK)
    whole = backend.initial_state(plain, x.shape[1:], 5, 1)

    def on_kept() -> object:
        return backend.train(settings, Job(state, Points(kept, y), Fraction(1), 1), "cpu", _ignore)

    def computed_anew() -> object:
        seen = backend.features(settings, tensors, x, "cpu")
        return backend.train(settings, Job(state, Points(seen, y), Fraction(1), 1), "cpu", _ignore)

    def from_scratch() -> object:
        return backend.train(plain, Job(whole, Points(x, y), Fraction(1), 1), "cpu", _ignore)

    with_cache, without, scratch = seconds_in_turns(3 if quick else 7, on_kept, computed_anew, from_scratch)
    detail: dict[str, float | str] = {
        "kept features, points/s": round(len(x) / with_cache),
        "computed anew, points/s": round(len(x) / without),
        "whole network from scratch, points/s": round(len(x) / scratch),
    }
    ratio = without / with_cache
    return Line(
        f"transfer, an epoch on kept features against computing them ({title})", ratio, "> 1", ratio > 1, detail
    )


def _ignore(samples: int) -> None:
    pass


if __name__ == "__main__":
    for line in run(quick="--quick" in sys.argv):
        print(f"{line.ratio:6.2f}  {line.bar:8} {'' if line.holds is None else line.holds!s:5}  {line.name}")
        print(f"        {line.detail}")
