"""Complex tasks: what sharding costs where points per class are few, mean against vote, what a public base gives back.

Half of the classes of an image data set stand for public data: a network is trained on them, as anybody would, and SISA
then learns the other half, from scratch and on top of that frozen network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.data import Data, best, is_here, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_of, setup_of, short, where
from benchmarks.paper.trial import accuracy, erase_and_build, store_with

TITLE = "Complex tasks, and transfer learning"
FIGURES = "figures 6, 8 and 14"
ALONE = False
NETWORK = {"batch_size": 32, "lr": 0.02, "standardize": "fixed", "mean": 128, "std": 64}
SHARDS = (1, 5, 10, 20)


def cells(quick: bool) -> list[dict[str, Any]]:
    names = [best("cifar_10", "cifar10_20k"), "fashion_mnist"]
    names = [name for name in names if is_here(name)] or ["digits"]
    shards = (1, 10) if quick else SHARDS
    size = {"public": 1500 if quick else 10_000, "private": 600 if quick else 4000, "epochs": 3 if quick else 8}
    found = [
        {"task": "transfer", "data": name, **size, "shards": list(shards), "seed": 1}
        for name in names[: 1 if quick else 2]
    ]
    for name, points, epochs in (("cifar_100", 20_000, 10), ("location30", 4010, 20)):
        if is_here(name):
            found += [
                {"task": "scratch", "data": name, "points": points, "epochs": epochs, "shards": s, "seed": seed}
                for seed in range(1 if quick else 3)
                for s in shards
            ]
    return found


def measure(task: str, data: str, **settings: Any) -> dict[str, Any]:
    return _transfer(data, **settings) if task == "transfer" else _scratch(data, **settings)


def _scratch(data: str, points: int, epochs: int, shards: int, seed: int) -> dict[str, Any]:
    """Train on many classes with few points each."""
    held = load(data).first(points)
    flat = held.x.ndim == 2
    settings = {"batch_size": 16, "lr": 0.01} if flat else {**NETWORK, "depth": 10, "width": 1}
    how: dict[str, Any] = {"backend": "mlp" if flat else "wide_resnet", "epochs": epochs, "settings": settings}
    found = {}
    with store_with(held, shards, 1, seed) as store:
        store.train("m", dataset="d", seed=seed, **how)
        found["sisa"] = accuracy(store, "m", held)
    rows = np.random.Generator(np.random.PCG64(seed)).permutation(len(held.x))[: len(held.x) // shards]
    with store_with(held.rows(rows), 1, 1, seed) as store:
        store.train("m", dataset="d", seed=seed, **how)
        found["fraction"] = accuracy(store, "m", held)
    return found


def _transfer(data: str, public: int, private: int, epochs: int, shards: list[int], seed: int) -> dict[str, Any]:
    """Train from scratch and on a base, for each number of shards."""
    held = load(data)
    known, rest = _halves(held, public, private)
    found: dict[str, Any] = {"classes": rest.classes, "scratch": {}, "head": {}, "erasures": []}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.safetensors"
        _train_base(known, base, max(1, epochs * 3 // 4), seed)
        ways = {"scratch": NETWORK, "head": {**NETWORK, "base": str(base), "base_public": True, "train": "head"}}
        for count in shards:
            with store_with(rest, count, 2, seed) as store:
                for way, settings in ways.items():
                    store.train(way, dataset="d", backend="convnet", epochs=epochs, seed=seed, settings=settings)
                    found[way][str(count)] = accuracy(store, way, rest)
                if count == shards[-1]:
                    found["erasures"].append(erase_and_build(store, [0]))
    return found


def _halves(data: Data, public: int, private: int) -> tuple[Data, Data]:
    """Return the data of the first half of the classes, and of the other half."""
    half = data.classes // 2

    def pick(low: bool, most: int) -> Data:
        mine = data.rows(np.flatnonzero((data.y < half) == low)[:most])
        test = (data.y_test < half) == low
        first, classes = (0, half) if low else (half, data.classes - half)
        named = {"y": mine.y - first, "x_test": data.x_test[test], "y_test": data.y_test[test] - first}
        return Data(data.name, data.title, mine.x, named["y"], named["x_test"], named["y_test"], classes, mine.user)

    return pick(True, public), pick(False, private)


def _train_base(public: Data, path: Path, epochs: int, seed: int) -> None:
    """Train a whole network on the public half and save it as anybody would."""
    from safetensors.numpy import save_file
    from unlearnd_torch import NetworkBackend

    from unlearnd.hookspecs import Job, Points

    backend = NetworkBackend("convnet")
    settings = backend.settings(NETWORK)
    state = backend.initial_state(settings, public.x.shape[1:], public.classes, seed)
    job = Job(state, Points(public.x, public.y), Fraction(epochs), seed)
    trained = backend.train(settings, job, "cpu", lambda samples: None)
    prefix = "module."
    save_file({key.removeprefix(prefix): trained[key] for key in trained if key.startswith(prefix)}, path)


def findings(cells: Sequence[Cell]) -> Findings:
    claims: list[Claim] = []
    tables: list[Table] = []
    sizes: list[str] = []
    for data in distinct(where(cells, task="scratch"), "data"):
        group = where(cells, task="scratch", data=data)
        if where(group, shards=1):
            claims += _on_scratch(data, group)
            tables.append(_scratch_table(data, group))
            sizes.append(f"{setup_of(group)}.")
    for cell in where(cells, task="transfer"):
        claims += _on_base(cell)
        tables.append(_base_table(cell))
        sizes.append(
            f"{title_of(cell['data'])}: a `convnet` trained on {cell['public']:,} points of half of the classes is the "
            f"base; {cell['private']:,} points of the other {cell['classes']} are learned, e′ = {cell['epochs']}, "
            "one seed."
        )
    sizes.append(
        "The paper has ResNet-50 on ImageNet, mini-ImageNet, and CIFAR-100 on an ImageNet base: none can be had here."
    )
    return Findings(claims, tables, sizes)


def _on_scratch(data: str, cells: Sequence[Cell]) -> list[Claim]:
    title = short(title_of(data))
    shards = distinct(cells, "shards")

    def right(s: int, rule: str) -> float:
        return mean_of(where(cells, shards=s), "sisa", rule)

    most = shards[-1]
    gap, gap5 = right(1, "mean") - right(most, "mean"), right(1, "mean_top5") - right(most, "mean_top5")
    claims = [
        Claim(
            f"On a complex task sharding costs more ({title})",
            "ImageNet, S = 20: 18.8 points top-1 and 16.1 top-5 by vote, 11.8 top-5 by mean",
            f"S = {most}: {gap:.1f} points top-1, {gap5:.1f} top-5 by mean",
            gap > 2,
        )
    ]
    others = [s for s in shards if s > 1]
    lead = [right(s, "mean") - mean_of(where(cells, shards=s), "fraction", "mean") for s in others]
    if lead:
        ours = f"better by {min(lead):.1f} to {max(lead):.1f} points for S = {others[0]} … {others[-1]}"
        paper = "more accurate (figure 6)"
        claims.append(Claim(f"SISA is more accurate than the 1/S fraction ({title})", paper, ours, min(lead) > 0))
    gains = {s: right(s, "mean") - right(s, "vote") for s in shards if s > 1}
    gains5 = {s: right(s, "mean_top5") - right(s, "vote_top5") for s in shards if s > 1}
    if gains:
        ours = (
            f"on average {np.mean(list(gains.values())):+.1f} points top-1, {np.mean(list(gains5.values())):+.1f} top-5"
        )
        paper = "+1.7 points top-1, +4.4 top-5 (ImageNet)"
        claims.append(
            Claim(
                f"The mean of vectors wins back accuracy over votes ({title})",
                paper,
                ours,
                np.mean(list(gains.values())) > 0 and np.mean(list(gains5.values())) > 0,
            )
        )
    return claims


def _on_base(cell: Cell) -> list[Claim]:
    title, most = short(title_of(cell["data"])), str(cell["shards"][-1])
    gap = {way: cell[way]["1"]["mean"] - cell[way][most]["mean"] for way in ("scratch", "head")}
    complex_one = Claim(
        f"On a complex task sharding costs more ({title}, half of its classes)",
        "ImageNet, S = 20: 18.8 points top-1 by vote",
        f"S = {most}: {gap['scratch']:.1f} points top-1 by mean, from scratch",
        gap["scratch"] > 2,
    )
    ours = f"gap of S = {most} to S = 1: {gap['head']:.1f} points on the base, {gap['scratch']:.1f} from scratch"
    paper = "about 4 points top-1 and less than 1 top-5 at S = 10 (CIFAR-100 on an ImageNet base)"
    claims = [
        complex_one,
        Claim(f"Transfer learning shrinks the gap ({title})", paper, ours, gap["head"] < gap["scratch"]),
    ]
    based, alone = (cell[way][most]["mean"] for way in ("head", "scratch"))
    ours = f"S = {most}: {based:.1f} % on the base, {alone:.1f} % from scratch"
    claims.append(Claim(f"… and with many shards is more accurate outright ({title})", "–", ours, based > alone))
    return claims


def _scratch_table(data: str, cells: Sequence[Cell]) -> Table:
    rows = []
    for s in distinct(cells, "shards"):
        found = where(cells, shards=s)
        rows.append(
            [
                s,
                *(f"{mean_of(found, 'sisa', rule):.1f} %" for rule in ("vote", "mean", "vote_top5", "mean_top5")),
                f"{mean_of(found, 'fraction', 'mean'):.1f} %",
            ]
        )
    return Table(
        f"{title_of(data)}, from scratch", ("S", "vote", "mean", "vote, top-5", "mean, top-5", "1/S fraction"), rows
    )


def _base_table(cell: Cell) -> Table:
    rows = []
    for s in cell["shards"]:
        rows.append(
            [s, *(f"{cell[way][str(s)][rule]:.1f} %" for way in ("scratch", "head") for rule in ("vote", "mean"))]
        )
    columns = ("S", "from scratch, vote", "from scratch, mean", "head on a base, vote", "head on a base, mean")
    return Table(f"{title_of(cell['data'])}, half of the classes", columns, rows)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    transfer = where(cells, task="transfer")
    scratch = distinct(where(cells, task="scratch"), "data")
    panels = figure.subplots(1, len(transfer) + len(scratch), squeeze=False)[0]
    for panel, data in zip(panels, scratch, strict=False):
        group = where(cells, task="scratch", data=data)
        shards = distinct(group, "shards")
        for colour, rule in enumerate(("vote", "mean", "vote_top5", "mean_top5")):
            y = [mean_of(where(group, shards=s), "sisa", rule) for s in shards]
            panel.plot(shards, y, "o-", ms=3, color=COLOURS[colour], label=rule.replace("_top5", ", top-5"))
        panel.set_title(short(title_of(data)), fontsize=9)
    for panel, cell in zip(panels[len(scratch) :], transfer, strict=True):
        for colour, (way, label) in enumerate((("scratch", "from scratch"), ("head", "head on a base"))):
            panel.plot(
                cell["shards"],
                [cell[way][str(s)]["mean"] for s in cell["shards"]],
                "o-",
                ms=3,
                color=COLOURS[4 * colour],
                label=label,
            )
        panel.set_title(f"{short(title_of(cell['data']))}, half of it", fontsize=9)
    for panel in panels:
        panel.set(xlabel="shards", ylabel="accuracy, %")
        panel.legend(fontsize=7)
