"""What checkpoints cost in storage and save in training: all of them kept, or only the best few.

Prices are the paper's (appendix C): $0.026 for a gigabyte and month, $0.25 for an hour of the cheapest accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, plain_ticks, setup_of, short
from benchmarks.paper.trial import MLP, draws_of, erase_and_build, planned, store_with

TITLE = "Storage"
FIGURES = "appendix C"
ALONE = False
GIGABYTE_MONTH, HOUR = 0.026, 0.25


def cells(quick: bool) -> list[dict[str, Any]]:
    size = {
        "data": purchase(),
        "points": 10_000 if quick else 65_000,
        "epochs": 2 if quick else 4,
        "shards": 20,
        "slices": 20 if quick else 50,
    }
    return [{**size, "keep": keep} for keep in ([0, 5, 1] if quick else [0, 20, 10, 5, 2, 1])]


def measure(data: str, points: int, epochs: int, shards: int, slices: int, keep: int) -> dict[str, Any]:
    """Measure with `keep` checkpoints of each shard kept; 0 for all."""
    held = load(data).flat().first(points)
    random = np.random.Generator(np.random.PCG64(4))
    draws = {k: draws_of(random, len(held.x), k, 100) for k in (1, 8)}
    with store_with(held, shards, slices, 1) as store:
        how: dict[str, Any] = {"backend": "mlp", "epochs": epochs, "seed": 1, "settings": MLP}
        built = store.train("m", dataset="d", keep=keep or None, **how)
        kept = store.checkpoints("m")
        return {
            "checkpoints": len(kept),
            "bytes": sum(checkpoint.size for checkpoint in kept),
            "train_seconds": built.seconds,
            "samples": built.samples,
            "one": float(np.mean(planned(store, draws[1]))),
            "batch": float(np.mean(planned(store, draws[8]))),
            "erasures": [erase_and_build(store, draws[8][0])],
        }


def findings(cells: Sequence[Cell]) -> Findings:
    whole, least = _all(cells), _with(cells, 1)
    claims, rows = [], []
    ten = _with(cells, 10) or _with(cells, 5)
    if whole and ten:
        kept = f"{ten['keep']} of {whole['slices']}"
        smaller, more = 100 * ten["bytes"] / whole["bytes"], 100 * (ten["one"] / whole["one"] - 1)
        ours = f"{kept} checkpoints: {smaller:.0f} % of the bytes, {more:+.0f} % to train for one request"
        claims.append(
            Claim(
                "Beyond the paper: a few checkpoints do nearly as well as all",
                "–",
                ours,
                ten["one"] / whole["one"] < 1.15,
            )
        )
    if whole and least:
        # What an erasure trains less because of checkpoints, in hours at the speed of this machine.
        speed = whole["train_seconds"] / whole["samples"]
        saved = (least["one"] - whole["one"]) * whole["samples"] * speed / 3600 * HOUR
        rent = whole["bytes"] / 1e9 * GIGABYTE_MONTH
        held = f"all {whole['checkpoints']:,} checkpoints: {whole['bytes'] / 1e6:.0f} MB, ${rent:.4f} a month"
        ours = f"{held}; one request saves ${saved:.6f} of training"
        often = rent / saved if saved > 0 else float("inf")
        from_then = f"worth it from {often:.0f} requests a month on" if saved > 0 else "never worth it"
        claims.append(
            Claim(
                "Storage costs less than the training it saves (at one request a day)",
                "“will not be a drawback” (appendix C)",
                f"{ours}: {from_then}",
                often <= 30,
                ""
                if often <= 30
                else "A model this small trains so fast that keeping few checkpoints is the better bargain: `--keep`.",
            )
        )
    for cell in cells:
        speedup = f"{1 / cell['one']:.1f}×", f"{1 / cell['batch']:.1f}×"
        rows.append(
            (
                cell["keep"] or "all",
                cell["checkpoints"],
                f"{cell['bytes'] / 1e6:.1f} MB",
                *speedup,
                f"{cell['train_seconds']:.1f} s",
            )
        )
    sizes = [f"{setup_of(cells)}; 100 draws each."]
    columns = ("kept of each shard", "checkpoints", "bytes", "speed-up, one request", "K = 8", "training took")
    return Findings(claims, [Table("Checkpoints kept, and what they save in samples", columns, rows)], sizes)


def _all(cells: Sequence[Cell]) -> Cell | None:
    return _with(cells, 0)


def _with(cells: Sequence[Cell], keep: int) -> Cell | None:
    return next((cell for cell in cells if cell["keep"] == keep), None)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panel = figure.subplots()
    shown = sorted(cells, key=lambda cell: cell["bytes"])
    for colour, (what, label) in enumerate((("one", "one request"), ("batch", "a batch of 8"))):
        panel.plot(
            [c["bytes"] / 1e6 for c in shown],
            [1 / c[what] for c in shown],
            "o-",
            ms=3,
            color=COLOURS[4 * colour],
            label=label,
        )
    for cell in shown:
        panel.annotate(
            str(cell["keep"] or "all"),
            (cell["bytes"] / 1e6, 1 / cell["one"]),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=7,
        )
    panel.set(xlabel="MB of checkpoints", ylabel="speed-up in samples, ×", ylim=(0, None))
    plain_ticks(panel, [c["bytes"] / 1e6 for c in shown])
    panel.set_title(f"{short(title_of(shown[0]['data']))}: checkpoints kept of each shard", fontsize=9)
    panel.legend(fontsize=7)
