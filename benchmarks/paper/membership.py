"""Does it forget? Membership inference on rows before they are erased, after, and on a model never given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import best, load, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.trial import erase_and_build, new_store
from unlearnd.shadows import FALSE_ALARM

TITLE = "Does it forget? Membership inference on the erased"
FIGURES = ""
ALONE = False
MOMENTS = ("before", "after", "never")
_SAID = {"before": "before they are erased", "after": "after", "never": "a model never given them"}


def cells(quick: bool) -> list[dict[str, Any]]:
    data = best("location30", "digits")
    size = {"learned": 600, "erased": 100, "epochs": 30, "shadows": 4} if quick else {
        "learned": 2000, "erased": 300, "epochs": 40, "shadows": 16
    }  # fmt: skip
    return [{"data": data, "shards": shards, **size} for shards in ((1,) if quick else (1, 5, 20))]


def measure(data: str, shards: int, learned: int, erased: int, epochs: int, shadows: int) -> dict[str, Any]:
    """Attack one model three times: as trained, after an erasure, and a twin that was never given the rows."""
    held = load(data).flat()
    x, y = held.x, held.y
    learned = min(learned, len(x) * 2 // 3)
    rows, gone, never = np.arange(learned), slice(0, erased), slice(learned, learned + 1000)
    found: dict[str, Any] = {}
    for moments, present in ((("before", "after"), rows), (("never",), rows[erased:])):
        # The same seed: the same placement key, so that the twin differs in nothing but whom it was given.
        with new_store(1) as store:
            given = {"user": present, "label": y[present], "classes": held.classes, "shards": shards, "slices": 2}
            store.ingest("rows", x[present], **given)
            how: dict[str, Any] = {"hidden": [128], "standardize": "off"}
            store.train("m", dataset="rows", backend="mlp", epochs=epochs, seed=1, settings=how)
            for moment in moments:
                if moment == "after":
                    found["erasures"] = [erase_and_build(store, rows[gone].tolist())]
                report = store.attack_membership(
                    "m", erased=x[gone], held_out=x[never], label=(y[gone], y[never]), shadows=shadows
                )
                right = store.evaluate("m", held.x_test, label=held.y_test, aggregate="mean").top1
                found[moment] = {**report.as_json(), "accuracy": right}
    return found


def findings(cells: Sequence[Cell]) -> Findings:
    claims, rows = [], []
    for cell in cells:
        before, after, never = (cell[moment]["erased"] for moment in MOMENTS)
        what = f"{title_of(cell['data'])}, `mlp`, S = {cell['shards']}"
        holds = after["chance"] > FALSE_ALARM
        notes = []
        if before["chance"] > FALSE_ALARM:
            notes.append("The attack does not find them before the erasure either, so this says little.")
        if after == never:
            notes.append(
                "After the erasure the attacker finds, to the last digit, what the model never given them shows."
            )
        claims.append(
            Claim(
                f"An attacker cannot tell who was erased from who was never there ({what})",
                "– (argued, not measured)",
                f"AUC {_interval(before['auc'])} before, {_interval(after['auc'])} after, "
                f"{_interval(never['auc'])} never given",
                holds and after == never,
                " ".join(notes),
            )
        )
        for moment in MOMENTS:
            attack = cell[moment]["erased"]
            rows.append(
                (
                    title_of(cell["data"]),
                    cell["shards"],
                    _SAID[moment],
                    _interval(attack["auc"]),
                    _interval(attack["advantage"]),
                    f"{attack['advantage_by_chance']:.3f}",
                    _interval(attack["caught"]),
                    f"{attack['chance']:.3f}",
                    f"{100 * cell[moment]['accuracy']:.1f} %",
                )
            )
    columns = ("data", "S", "when", "AUC", "advantage", "by chance below", "TPR at 1 % FPR", "p", "accuracy")
    sizes = [
        "LiRA, offline: shadow models trained like the model on the same rows less those asked about, with other seeds "
        "and places; the mean of the constituents' probabilities is attacked, as it is served. Intervals by bootstrap. "
        "Advantage is the largest TPR − FPR; guesses stay below the value beside it in 99 of 100 shuffles.",
        *(
            f"S = {cell['shards']}: {cell['learned']:,} rows learned from, {cell['erased']} of them erased, "
            f"{cell['after']['erased']['others']:,} never given, {cell['shadows']} shadow models."
            for cell in cells
        ),
        "The same test on a model of your own: `unlearnd audit --membership MODEL`.",
    ]
    return Findings(claims, [Table("Attacks", columns, rows)], sizes)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    panel = figure.subplots()
    for place, moment in enumerate(MOMENTS):
        at = [group + (place - 1) * 0.25 for group in range(len(cells))]
        values = [cell[moment]["erased"]["auc"] for cell in cells]
        spread = [[v["value"] - v["low"] for v in values], [v["high"] - v["value"] for v in values]]
        colour = ("#b3401f", "#0b3c5d", "#d9a21b")[place]
        middle = [v["value"] for v in values]
        panel.errorbar(at, middle, spread, fmt="o", ms=4, capsize=3, color=colour, label=_SAID[moment])
    panel.axhline(0.5, color="#888888", lw=0.8, ls="--")
    panel.set_xticks(range(len(cells)), [f"S = {cell['shards']}" for cell in cells])
    panel.set(ylabel="AUC of the attack")
    panel.legend(fontsize=8)


def _interval(found: Any) -> str:
    return f"{found['value']:.3f} ({found['low']:.3f} – {found['high']:.3f})"
