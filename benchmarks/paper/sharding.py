"""Accuracy and samples retrained by the number of shards, against *batch K* and *1/S fraction*.

Batch K is S = 1: everything is trained again after every batch. The 1/S fraction is a store that holds only one shard's
worth of points, with one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import digits, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import COLOURS, distinct, mean_of, setup_of, short, where
from benchmarks.paper.trial import MLP, accuracy, draws_of, erase_and_build, planned, store_with
from unlearnd.costs import sharding_batched

TITLE = "Sharding"
FIGURES = "figures 4 and 13"
ALONE = False
SHARDS = (1, 2, 5, 10, 20, 50, 100)
REQUESTS = (1, 8, 20, 60, 150, 300)
RATES = (0.003, 0.01, 0.03)
"""Learning rates tried on a part of the data, to see whether the one that is used favours a number of shards."""
ERASED = 8
"""How many are really erased, in one batch."""


def cells(quick: bool) -> list[dict[str, Any]]:
    what = [
        {"data": purchase(), "points": 20_000 if quick else 130_000, "epochs": 3 if quick else 5},
        {"data": digits(), "points": 6000 if quick else 60_000, "epochs": 4 if quick else 10},
    ]
    shards = (1, 5, 20) if quick else SHARDS
    found: list[dict[str, Any]] = [{**one, "shards": s, "seed": 0} for one in what for s in shards]
    if not quick:
        what = [{"data": purchase(), "points": 40_000, "epochs": 5}, {"data": digits(), "points": 20_000, "epochs": 6}]
        found += [{**one, "shards": s, "seed": 0, "lr": rate} for one in what for s in (1, 20) for rate in RATES]
    return found


def measure(data: str, points: int, epochs: int, shards: int, seed: int, lr: float | None = None) -> dict[str, Any]:
    held = load(data).flat().first(points)
    if lr is not None:
        with store_with(held, shards, 1, seed) as store:
            store.train("m", dataset="d", backend="mlp", epochs=epochs, seed=seed, settings={**MLP, "lr": lr})
            return {"sisa": accuracy(store, "m", held)}
    how: dict[str, Any] = {"backend": "mlp", "epochs": epochs, "seed": seed, "settings": MLP}
    random = np.random.Generator(np.random.PCG64(seed))
    found: dict[str, Any] = {}
    with store_with(held, shards, 1, seed) as store:
        store.train("m", dataset="d", **how)
        found["sisa"] = accuracy(store, "m", held)
        asked = [k for k in REQUESTS if k <= len(held.x) // 10]
        draws = {k: draws_of(random, len(held.x), k, 10) for k in asked}
        found["shares"] = {str(k): planned(store, draws[k]) for k in asked}
        (leaving,) = draws_of(random, len(held.x), ERASED, 1)
        found["promised"] = store.plan_erasure(leaving).models[0].samples
        found["erasures"] = [erase_and_build(store, leaving)]
        found["sisa_after"] = accuracy(store, "m", held)
    if shards > 1:
        rows = random.permutation(len(held.x))[: len(held.x) // shards]
        with store_with(held.rows(rows), 1, 1, seed, user=rows) as store:
            store.train("m", dataset="d", **how)
            found["fraction"] = accuracy(store, "m", held)
            # Of the same requests, most are about people whom it was never given.
            found["fraction_shares"] = {str(k): [one / shards for one in planned(store, draws[k])] for k in asked}
    return found


def findings(cells: Sequence[Cell]) -> Findings:
    rates = [cell for cell in cells if "lr" in cell.settings]
    cells = [cell for cell in cells if "lr" not in cell.settings]
    claims: list[Claim] = []
    tables = []
    for data in distinct(cells, "data"):
        of_data = where(cells, data=data)
        if not where(of_data, shards=1):
            continue
        claims += _claims(data, of_data, where(rates, data=data))
        tables.append(_table(data, of_data))
    claims += _costs(cells)
    if rates:
        tables.append(_rates_table(rates))
    sizes = [f"{setup_of(where(cells, data=data))}, one seed." for data in distinct(cells, "data")]
    sizes.append("With one seed, differences below half a point say nothing: that much a seed moves, see `slicing`.")
    sizes.append("A perceptron with one hidden layer of 128 on both; the paper has convolutions on its images.")
    sizes.append(
        "Samples retrained are those of plans, over 10 draws of K; one batch of 8 was really erased each time."
    )
    return Findings(claims, tables, sizes)


def _claims(data: str, cells: Sequence[Cell], rates: Sequence[Cell]) -> list[Claim]:
    title = short(title_of(data))
    whole = mean_of(where(cells, shards=1), "sisa", "mean")
    gap = {s: whole - mean_of(where(cells, shards=s), "sisa", "mean") for s in distinct(cells, "shards")}
    claims = []
    if 20 in gap:
        ours, holds = f"{gap[20]:.1f} points at S = 20 (S = 1: {whole:.1f} %)", gap[20] < 2
        paper = "less than 2 points at S = 20 on simple tasks"
        what = f"Sharding costs little accuracy on a simple task ({title})"
        claims.append(Claim(what, paper, ours, holds, _note_on_rate(rates)))
    beyond = {s: g for s, g in gap.items() if s > 20}
    if beyond:
        ours = ", ".join(f"{g:.1f} points at S = {s}" for s, g in beyond.items())
        holds = all(g > 5 for g in beyond.values())
        note = "" if holds else "More shards cost less here than the paper found."
        claims.append(Claim(f"Beyond 20 shards it costs more than 5 points ({title})", "> 5 points", ours, holds, note))
    others = [s for s in gap if s > 1]
    if others:
        lead = {
            s: mean_of(where(cells, shards=s), "sisa", "mean") - mean_of(where(cells, shards=s), "fraction", "mean")
            for s in others
        }
        ours = (
            f"better by {min(lead.values()):.1f} to {max(lead.values()):.1f} points for S = {others[0]} … {others[-1]}"
        )
        paper = "consistently better (figures 4 and 6)"
        claims.append(
            Claim(f"SISA is more accurate than the 1/S fraction ({title})", paper, ours, min(lead.values()) > 0)
        )
        apart = {
            s: mean_of(where(cells, shards=s), "sisa", "mean") - mean_of(where(cells, shards=s), "sisa", "vote")
            for s in others
        }
        most = max(apart, key=lambda s: abs(apart[s]))
        ours = f"mean minus vote: at most {apart[most]:+.1f} points (S = {most})"
        easy = "no significant difference on simple tasks (figure 13)"
        holds = abs(apart[most]) <= 1
        claims.append(
            Claim(
                f"Mean of vectors against vote of labels ({title})",
                easy,
                ours,
                holds,
                "We call up to one point no difference.",
            )
        )
    return claims


def _by_rate(rates: Sequence[Cell], shards: int) -> dict[float, float]:
    return {cell["lr"]: cell["sisa"]["mean"] for cell in where(rates, shards=shards)}


def _note_on_rate(rates: Sequence[Cell]) -> str:
    """Say what another learning rate would have done to the gap, as far as that was tried."""
    alone, many = _by_rate(rates, 1), _by_rate(rates, 20)
    used = MLP["lr"]
    if not (used in alone and used in many):
        return ""
    gap, best = alone[used] - many[used], max(alone.values()) - max(many.values())
    return (
        f"One learning rate ({used}) serves every S. On {rates[0]['points']:,} points the gap at S = 20 is {gap:.1f} "
        f"points with it, and {best:.1f} where S = 1 and S = 20 each have the best of {len(alone)} by test accuracy."
    )


def _rates_table(rates: Sequence[Cell]) -> Table:
    rows = []
    for data in distinct(rates, "data"):
        for s in distinct(rates, "shards"):
            found = _by_rate(where(rates, data=data), s)
            rows.append([short(title_of(data)), where(rates, data=data)[0]["points"], s])
            rows[-1] += [f"{found[rate]:.2f} %" if rate in found else "–" for rate in RATES]
    columns = ["data", "points", "S", *(f"rate {rate}" for rate in RATES)]
    return Table(f"Learning rates tried (mean); {MLP['lr']} is the one used everywhere", columns, rows)


def _costs(cells: Sequence[Cell]) -> list[Claim]:
    """Compare samples with the paper's formula, and with what was promised."""
    worst, few, many = 0.0, [], []
    for cell in cells:
        for k, shares in cell["shares"].items():
            expected = sharding_batched(cell["points"], cell["shards"], int(k)) / (cell["points"] - int(k))
            if cell["shards"] > 1:
                worst = max(worst, abs(float(np.mean(shares)) - expected))
                (many if int(k) >= 3 * cell["shards"] else few).append(float(np.mean(shares)))
    larger = {}
    for s in distinct(cells, "shards"):
        sides = [
            [share for cell in where(cells, shards=s) for share in cell.results.get(side, {}).get("8", ())]
            for side in ("shares", "fraction_shares")
        ]
        # With many shards, ten draws of eight may all have missed the one that is there.
        if any(sides[1]):
            larger[s] = float(np.mean(sides[0]) / np.mean(sides[1]))
    wrong = sum(cell["erasures"][0]["samples"] != cell["promised"] for cell in cells)
    claims = []
    if few and many:
        ours = f"K < 3S: {100 * np.mean(few):.0f} % of all samples on average; K ≥ 3S: {100 * np.mean(many):.0f} %"
        paper = "gains while K < 3S, then as batch K"
        claims.append(
            Claim("Sharding saves samples while K < 3S", paper, ours, bool(np.mean(many) > 0.9 > np.mean(few)))
        )
    if worst:
        ours = f"the mean of 10 draws is at most {100 * worst:.0f} points of 100 % away from the formula"
        claims.append(
            Claim("Samples retrained are what the batch formula says", "N(1 - (1 - 1/S)^K) - K", ours, worst < 0.15)
        )
    if larger:
        ours = ", ".join(f"{ratio:.0f}× at S = {s}" for s, ratio in larger.items())
        paper = "S× less than SISA, at a large cost in accuracy"
        holds = all(ratio > 0.5 * s for s, ratio in larger.items())
        claims.append(Claim("The 1/S fraction trains less again than SISA (K = 8)", paper, ours, holds))
    ours = f"{len(cells)} batches of {ERASED} really erased: {wrong} trained another number of samples"
    claims.append(Claim("What a dry run promises is what an erasure trains", "–", ours, wrong == 0))
    return claims


def _table(data: str, cells: Sequence[Cell]) -> Table:
    top5 = "mean_top5" in cells[0]["sisa"]
    columns = ["S", "vote", "mean", *(["vote, top-5", "mean, top-5"] if top5 else []), "1/S fraction (mean)"]
    columns += ["mean, after 8 erased", "share retrained, K = 1", "K = 8", "K = 60"]
    rows = []
    for s in distinct(cells, "shards"):
        here = where(cells, shards=s)
        row: list[Any] = [s]
        row += [
            f"{mean_of(here, 'sisa', rule):.2f} %"
            for rule in ("vote", "mean", *(("vote_top5", "mean_top5") if top5 else ()))
        ]
        row.append(f"{mean_of(here, 'fraction', 'mean'):.2f} %" if s > 1 else "the same")
        row.append(f"{mean_of(here, 'sisa_after', 'mean'):.2f} %")
        for k in ("1", "8", "60"):
            shares = [share for cell in here for share in cell["shares"].get(k, [])]
            row.append(f"{100 * np.mean(shares):.1f} %" if shares else "–")
        rows.append(row)
    return Table(
        f"{title_of(data)}: accuracy, and the share of all samples that a batch of K trains again", columns, rows
    )


def draw(cells: Sequence[Cell], figure: Any) -> None:
    cells = [cell for cell in cells if "lr" not in cell.settings]
    names = distinct(cells, "data")
    panels = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    for panel, data in zip(panels, names, strict=False):
        of_data = where(cells, data=data)
        shards = distinct(of_data, "shards")
        for what, rule, colour in (("sisa", "mean", 0), ("sisa", "vote", 1), ("fraction", "mean", 4)):
            given = [s for s in shards if all(what in cell.results for cell in where(of_data, shards=s))]
            label = f"SISA, {rule}" if what == "sisa" else "1/S fraction"
            panel.plot(
                given,
                [mean_of(where(of_data, shards=s), what, rule) for s in given],
                "o-",
                ms=3,
                color=COLOURS[colour],
                label=label,
            )
        panel.set(xscale="log", xlabel="shards", ylabel="accuracy, %")
        panel.set_title(short(title_of(data)), fontsize=9)
    panels[0].legend(fontsize=7)
    of_data = where(cells, data=names[0])
    for colour, s in enumerate(distinct(of_data, "shards")):
        found = where(of_data, shards=s)
        asked = [int(k) for k in found[0]["shares"]]
        means = [100 * np.mean([x for cell in found for x in cell["shares"][str(k)]]) for k in asked]
        panels[-1].plot(asked, means, "o-", ms=3, color=COLOURS[colour % len(COLOURS)], label=f"S = {s}")
    panels[-1].set(xscale="log", xlabel="requests in a batch", ylabel="share retrained, %")
    panels[-1].legend(fontsize=7)
    panels[-1].set_title(short(title_of(names[0])), fontsize=9)
