"""Complex tasks: what sharding costs where points per class are few, mean against vote, what a public base gives back.

What stands for public data is another data set, or half of the classes of the same one: a network is trained on it, as
anybody would, and SISA then learns the rest, from scratch and on top of that frozen network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.data import Data, best, is_here, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import (
    COLOURS,
    apart,
    distinct,
    mean_interval,
    plus_minus,
    seeds_of,
    setup_of,
    short,
    values_of,
    where,
)
from benchmarks.paper.trial import accuracy, erase_and_build, store_with

TITLE = "Complex tasks, and transfer learning"
FIGURES = "figures 6, 8 and 14"
ALONE = False
NETWORK = {"batch_size": 32, "lr": 0.02, "standardize": "fixed", "mean": 128, "std": 64}
SHARDS = (1, 5, 10, 20)
SEEDS = 3
TESTED = 1500
"""Test points that networks for images are asked about, others with every seed: many constituents take long to ask."""


def cells(quick: bool) -> list[dict[str, Any]]:
    shards, seeds = ((1, 10), 1) if quick else (SHARDS, SEEDS)
    size = {"public": 1500 if quick else 10_000, "private": 600 if quick else 3000, "epochs": 3 if quick else 8}
    colours = best("cifar_10", "cifar10_20k")
    # What is learned, and what the base has learned before: of the same data, half of the classes each.
    pairs = [("cifar_100", best("imagenet_32", colours)), (colours, colours), ("fashion_mnist", "fashion_mnist")]
    pairs.append(("mnist", "fashion_mnist"))
    given = [pair for pair in pairs if all(map(is_here, pair))] or [("digits", "digits")]
    found: list[dict[str, Any]] = [
        {"task": "transfer", "data": name, "base": base, **size, "shards": list(shards), "seed": seed}
        for seed in range(seeds)
        for name, base in given[: 1 if quick else None]
    ]
    many = {"cifar_100": (20_000, 10), "mini_imagenet": (6000, 6), "imagenet": (20_000, 4), "location30": (4010, 20)}
    for name, (points, epochs) in many.items():
        if is_here(name):
            found += [
                {"task": "scratch", "data": name, "points": points, "epochs": epochs, "shards": s, "seed": seed}
                for seed in range(seeds)
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
    found: dict[str, Any] = {}
    with store_with(held, shards, 1, seed) as store:
        store.train("m", dataset="d", seed=seed, **how)
        found["sisa"] = accuracy(store, "m", held)
        found["erasures"] = [erase_and_build(store, [0])]
    rows = np.random.Generator(np.random.PCG64(seed)).permutation(len(held.x))[: len(held.x) // shards]
    with store_with(held.rows(rows), 1, 1, seed) as store:
        store.train("m", dataset="d", seed=seed, **how)
        found["fraction"] = accuracy(store, "m", held)
    return found


def _transfer(
    data: str, base: str, public: int, private: int, epochs: int, shards: list[int], seed: int
) -> dict[str, Any]:
    """Train from scratch and on a base, for each number of shards."""
    if base == data:
        known, rest = _halves(load(data), public, private)
    else:
        known, rest = load(base).first(public), load(data).first(private)
    asked = np.random.Generator(np.random.PCG64(seed)).permutation(len(rest.x_test))[:TESTED]
    rest = replace(rest, x_test=rest.x_test[asked], y_test=rest.y_test[asked])
    found: dict[str, Any] = {"classes": rest.classes, "tested": len(asked), "scratch": {}, "head": {}, "erasures": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.safetensors"
        _train_base(known, path, max(1, epochs * 3 // 4), seed)
        ways = {"scratch": NETWORK, "head": {**NETWORK, "base": str(path), "base_public": True, "train": "head"}}
        for count in shards:
            with store_with(rest, count, 2, seed) as store:
                for way, settings in ways.items():
                    store.train(way, dataset="d", backend="convnet", epochs=epochs, seed=seed, settings=settings)
                    found[way][str(count)] = accuracy(store, way, rest)
                found["erasures"].append({"shards": count, "slices": 2, **erase_and_build(store, [0])})
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
    for group in _transfers(cells):
        claims += _on_base(group)
        tables.append(_base_table(group))
        sizes.append(_on_transfer(group))
    used = {cell["data"] for cell in cells} | {cell.settings.get("base") for cell in cells}
    wanted = {"imagenet": "ImageNet", "mini_imagenet": "mini-ImageNet", "cifar_100": "CIFAR-100"}
    missing = [title for name, title in wanted.items() if not used & {name, f"{name}_32"}]
    sizes.append(
        "The paper has ResNet-50 on ImageNet, mini-ImageNet, and CIFAR-100 on an ImageNet base"
        + (f"; not to be had here: {', '.join(missing)}." if missing else ". These networks are smaller.")
    )
    return Findings(claims, tables, sizes)


def _transfers(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return cells of transfer learning, those that differ in the seed alone together."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in where(cells, task="transfer"):
        groups.setdefault((cell["data"], cell["base"]), []).append(cell)
    return list(groups.values())


def _called(group: Sequence[Cell]) -> str:
    """Return what is learned, and on what base."""
    data, base = (short(title_of(group[0][what])) for what in ("data", "base"))
    return f"{data}, half of its classes" if data == base else f"{data} on {base}"


def _on_transfer(group: Sequence[Cell]) -> str:
    cell = group[0]
    rest, classes = f"e′ = {cell['epochs']}, {seeds_of(group)}", cell["classes"]
    if "tested" in cell.results:
        rest += f", {cell['tested']:,} test points drawn with each"
    if cell["data"] == cell["base"]:
        return (
            f"{title_of(cell['data'])}: a `convnet` trained on {cell['public']:,} points of half of the classes is the "
            f"base; {cell['private']:,} points of the other {classes} are learned, {rest}."
            + (" Of five classes there is no top-5." if classes <= 5 else "")
        )
    return (
        f"{title_of(cell['data'])}: a `convnet` trained on {cell['public']:,} points of {title_of(cell['base'])} is "
        f"the base; {cell['private']:,} points of {classes} classes are learned, {rest}."
    )


def _on_scratch(data: str, cells: Sequence[Cell]) -> list[Claim]:
    title = short(title_of(data))
    shards = distinct(cells, "shards")
    whole, most = where(cells, shards=1), shards[-1]
    last = where(cells, shards=most)
    gap, gap5 = ([-x for x in apart(last, at, at, whole)] for at in (("sisa", "mean"), ("sisa", "mean_top5")))
    by_vote = [-x for x in apart(last, ("sisa", "vote"), ("sisa", "vote"), whole)]
    ours = f"S = {most}: {plus_minus(gap)} points top-1 and {plus_minus(gap5)} top-5 by mean, {plus_minus(by_vote)} "
    claims = [
        Claim(
            f"On a complex task sharding costs more than 2 points ({title})",
            "ImageNet, S = 20: 18.8 points top-1 and 16.1 top-5 by vote, 11.8 top-5 by mean",
            ours + "top-1 by vote",
            bool(np.mean(gap) > 2),
        )
    ]
    others = [s for s in shards if s > 1]
    lead = {s: apart(where(cells, shards=s), ("sisa", "mean"), ("fraction", "mean")) for s in others}
    if lead:
        least, best_at = (by(lead, key=lambda s: np.mean(lead[s])) for by in (min, max))
        ours = f"SISA less the fraction: {plus_minus(lead[least], sign='+')} points (S = {least}) to "
        ours += f"{plus_minus(lead[best_at], sign='+')} (S = {best_at})"
        holds = bool(np.mean(lead[least]) > 0)
        claims.append(
            Claim(f"SISA is more accurate than the 1/S fraction ({title})", "more accurate (figure 6)", ours, holds)
        )
        claims.append(_votes(title, [where(cells, shards=s) for s in others], "sisa"))
    return claims


def _votes(title: str, groups: Sequence[Sequence[Cell]], *path: str) -> Claim:
    """Compare mean and vote, averaged over numbers of shards, seed by seed."""

    def gains(suffix: str) -> list[float]:
        each = [apart(group, (*path, f"mean{suffix}"), (*path, f"vote{suffix}")) for group in groups]
        return [float(np.mean(column)) for column in zip(*each, strict=False)]

    top1, top5 = gains(""), gains("_top5")
    return Claim(
        f"The mean of vectors wins back accuracy over votes ({title})",
        "+1.7 points top-1, +4.4 top-5 (ImageNet)",
        f"on average {plus_minus(top1, sign='+')} points top-1, {plus_minus(top5, sign='+')} top-5",
        bool(np.mean(top1) > 0 and np.mean(top5) > 0),
    )


def _gaps(group: Sequence[Cell], way: str, shards: int, rule: str = "mean") -> list[float]:
    """Return, seed by seed, the points of accuracy that so many shards cost."""
    return apart(group, (way, "1", rule), (way, str(shards), rule))


def _on_base(group: Sequence[Cell]) -> list[Claim]:
    cell, title = group[0], _called(group)
    most = cell["shards"][-1]
    scratch, head = (_gaps(group, way, most) for way in ("scratch", "head"))
    claims = [
        Claim(
            f"On a complex task sharding costs more than 2 points ({title})",
            "ImageNet, S = 20: 18.8 points top-1 by vote",
            f"S = {most}: {plus_minus(scratch)} points top-1 by mean, from scratch",
            bool(np.mean(scratch) > 2),
        )
    ]
    if cell["data"] == "mnist":
        claims = []  # digits are no complex task; they are here for the base, and for top-5
    paper = "about 4 points top-1 and less than 1 top-5 at S = 10 (CIFAR-100 on an ImageNet base)"
    ours = f"gap of S = {most} to S = 1: {plus_minus(head)} points on the base, {plus_minus(scratch)} from scratch"
    if 10 in cell["shards"]:
        ours += f"; on the base at S = 10: {plus_minus(_gaps(group, 'head', 10))}"
        if "mean_top5" in cell["head"]["10"]:
            ours += f", top-5 {plus_minus(_gaps(group, 'head', 10, 'mean_top5'))}"
    note = _if_by_chance([a - b for a, b in zip(scratch, head, strict=True)])
    what, holds = f"Transfer learning shrinks the gap ({title})", bool(np.mean(head) < np.mean(scratch))
    claims.append(Claim(what, paper, ours, holds, note))
    based, alone = (values_of(group, way, str(most), "mean") for way in ("head", "scratch"))
    ours = f"S = {most}: {plus_minus(based)} % on the base, {plus_minus(alone)} % from scratch"
    holds = bool(np.mean(based) > np.mean(alone))
    note = _if_by_chance([a - b for a, b in zip(based, alone, strict=True)])
    claims.append(Claim(f"… and with many shards is more accurate outright ({title})", "–", ours, holds, note))
    return claims


def _if_by_chance(differences: Sequence[float]) -> str:
    """Say so where seeds differ too much to tell a difference from chance."""
    mean, half = mean_interval(differences)
    if len(differences) < 2 or abs(mean) > half:
        return ""
    return f"Seed by seed the two differ by {plus_minus(differences)} points, which may be chance."


def _scratch_table(data: str, cells: Sequence[Cell]) -> Table:
    rows = []
    for s in distinct(cells, "shards"):
        found = where(cells, shards=s)
        accuracies = (values_of(found, "sisa", rule) for rule in ("vote", "mean", "vote_top5", "mean_top5"))
        rows.append([s, *map(plus_minus, accuracies), plus_minus(values_of(found, "fraction", "mean"))])
    columns = ("S", "vote", "mean", "vote, top-5", "mean, top-5", "1/S fraction, mean")
    return Table(f"{title_of(data)}, from scratch: accuracy in percent", columns, rows)


def _base_table(group: Sequence[Cell]) -> Table:
    first = group[0]
    rules = ("vote", "mean", *(("mean_top5",) if "mean_top5" in first["head"]["1"] else ()))
    rows = []
    for s in first["shards"]:
        columns = [(way, str(s), rule) for way in ("scratch", "head") for rule in rules]
        rows.append([s, *(plus_minus(values_of(group, *path)) for path in columns)])
    said = {"scratch": "from scratch", "head": "head on a base"}
    names = ["S"]
    names += [f"{said[way]}, {rule.replace('_top5', ', top-5')}" for way in ("scratch", "head") for rule in rules]
    return Table(f"{_called(group)}: accuracy in percent", names, rows)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    transfers = _transfers(cells)
    scratch = distinct(where(cells, task="scratch"), "data")
    panels = figure.subplots(1, len(transfers) + len(scratch), squeeze=False)[0]

    def line(panel: Any, x: Sequence[int], columns: Sequence[Sequence[float]], colour: int, label: str) -> None:
        bars = [mean_interval(column) for column in columns]
        panel.errorbar(x, [m for m, _ in bars], [h for _, h in bars], fmt="o-", ms=3, lw=1, capsize=2,
                       color=COLOURS[colour], label=label)  # fmt: skip

    for panel, data in zip(panels, scratch, strict=False):
        group = where(cells, task="scratch", data=data)
        shards = distinct(group, "shards")
        for colour, rule in enumerate(("vote", "mean", "vote_top5", "mean_top5")):
            found = [values_of(where(group, shards=s), "sisa", rule) for s in shards]
            line(panel, shards, found, colour, rule.replace("_top5", ", top-5"))
        line(panel, shards, [values_of(where(group, shards=s), "fraction", "mean") for s in shards], 4, "1/S fraction")
        panel.set_title(short(title_of(data)), fontsize=9)
    for panel, of_data in zip(panels[len(scratch) :], transfers, strict=True):
        shards = of_data[0]["shards"]
        for colour, (way, label) in enumerate((("scratch", "from scratch"), ("head", "head on a base"))):
            line(panel, shards, [values_of(of_data, way, str(s), "mean") for s in shards], 4 * colour, label)
        panel.set_title(_called(of_data).replace(", ", ",\n").replace(" on ", "\non "), fontsize=8)
    for panel in panels:
        panel.set(xlabel="shards, S")
        panel.legend(fontsize=6)
    panels[0].set_ylabel("accuracy, % (95 % intervals)")
