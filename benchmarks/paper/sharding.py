"""Accuracy and samples retrained by the number of shards, against *batch K* and *1/S fraction*.

Batch K is S = 1: everything is trained again after every batch. The 1/S fraction is a store that holds only one shard's
worth of points, with one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data import digits, is_here, load, purchase, title_of
from benchmarks.paper.experiment import Cell, Claim, Findings, Table
from benchmarks.paper.figures import (
    COLOURS,
    apart,
    distinct,
    mean_interval,
    plain_ticks,
    plus_minus,
    setup_of,
    short,
    values_of,
    where,
)
from benchmarks.paper.trial import MLP, accuracy, draws_of, erase_and_build, planned, store_with
from unlearnd.costs import sharding_batched

TITLE = "Sharding"
FIGURES = "figures 4 and 13"
ALONE = False
SHARDS = (1, 2, 5, 10, 20, 50, 100)
REQUESTS = (1, 8, 20, 60, 150, 300)
RATES = (0.003, 0.01, 0.03)
"""Learning rates tried on a part of the data, to see whether the one that is used favours a number of shards."""
SEEDS = 3
DRAWS = 10
ERASED = (8, 1, 60)
"""How many are really erased: the first of these with every seed; then, in turn, the rest with one."""


def cells(quick: bool) -> list[dict[str, Any]]:
    what = [
        {"data": purchase(), "points": 20_000 if quick else 130_000, "epochs": 3 if quick else 5},
        {"data": digits(), "points": 6000 if quick else 60_000, "epochs": 4 if quick else 10},
    ]
    if is_here("svhn"):
        what.append({"data": "svhn", "points": 6000 if quick else 60_000, "epochs": 4 if quick else 10})
    shards, seeds = ((1, 5, 20), 1) if quick else (SHARDS, SEEDS)
    found: list[dict[str, Any]] = [
        {**one, "shards": s, "seed": seed} for seed in range(seeds) for one in what for s in shards
    ]
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
        draws = {k: draws_of(random, len(held.x), k, DRAWS) for k in asked}
        found["shares"] = {str(k): planned(store, draws[k]) for k in asked}
        people = random.permutation(len(held.x))
        found["promised"], found["erasures"] = [], []
        for k in ERASED if seed == 0 else ERASED[:1]:
            leaving, people = people[:k].tolist(), people[k:]
            found["promised"].append(store.plan_erasure(leaving).models[0].samples)
            found["erasures"].append(erase_and_build(store, leaving))
            if "sisa_after" not in found:
                found["sisa_after"] = accuracy(store, "m", held)
    if shards > 1:
        rows = random.permutation(len(held.x))[: len(held.x) // shards]
        with store_with(held.rows(rows), 1, 1, seed, user=rows) as store:
            store.train("m", dataset="d", **how)
            found["fraction"] = accuracy(store, "m", held)
            # Of the same requests, most are about people whom it was never given: of many draws, few cost anything.
            more = draws_of(random, len(held.x), ERASED[0], 20 * DRAWS)
            found["fraction_shares"] = [one / shards for one in planned(store, more)]
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
    sizes = [f"{setup_of(where(cells, data=data))}." for data in distinct(cells, "data")]
    sizes.append(_on_seeds(cells))
    sizes.append("S = 1 is batch K. Of two classes there is no top-5.")
    sizes.append("A perceptron with one hidden layer of 128 on all; the paper has convolutions on its images.")
    sizes.append(
        f"Samples retrained are those of plans, over {DRAWS} draws of K with each seed. Really erased, at once, were "
        f"{ERASED[0]} with every seed and then, with one seed, {' and '.join(map(str, ERASED[1:]))} more."
    )
    return Findings(claims, tables, sizes)


def _on_seeds(cells: Sequence[Cell]) -> str:
    if len(distinct(cells, "seed")) > 1:
        return "Differences are taken seed by seed."
    return "With one seed, differences below half a point say nothing: that much a seed moves, see `slicing`."


def _claims(data: str, cells: Sequence[Cell], rates: Sequence[Cell]) -> list[Claim]:
    title = short(title_of(data))
    whole, mean = where(cells, shards=1), ("sisa", "mean")
    others = [s for s in distinct(cells, "shards") if s > 1]
    lost = {s: [-x for x in apart(where(cells, shards=s), mean, mean, whole)] for s in others}
    claims = []
    if 20 in lost:
        ours = f"{plus_minus(lost[20])} points at S = 20 (S = 1: {plus_minus(values_of(whole, *mean))} %)"
        paper = "less than 2 points at S = 20 on simple tasks"
        what = f"Sharding costs little accuracy on a simple task ({title})"
        claims.append(Claim(what, paper, ours, bool(np.mean(lost[20]) < 2), _note_on_rate(rates)))
    beyond = {s: lost[s] for s in others if s > 20}
    if beyond:
        ours = ", ".join(f"{plus_minus(gap)} points at S = {s}" for s, gap in beyond.items())
        less = [s for s, gap in beyond.items() if np.mean(gap) <= 5]
        note = f"At S = {' and '.join(map(str, less))} it costs less here than the paper found." if less else ""
        claims.append(
            Claim(f"Beyond 20 shards it costs more than 5 points ({title})", "> 5 points", ours, not less, note)
        )
    if others:
        lead = {s: apart(where(cells, shards=s), mean, ("fraction", "mean")) for s in others}
        least, most = (by(lead, key=lambda s: np.mean(lead[s])) for by in (min, max))
        ours = f"SISA less the fraction: {plus_minus(lead[least], sign='+')} points (S = {least}) to "
        ours += f"{plus_minus(lead[most], sign='+')} (S = {most})"
        paper = "consistently better (figures 4 and 6)"
        what = f"SISA is more accurate than the 1/S fraction ({title})"
        worse = [s for s in others if np.mean(lead[s]) <= 0]
        unsure = [s for s in others if s not in worse and mean_interval(lead[s])[0] <= mean_interval(lead[s])[1]]
        note = f"At S = {', '.join(map(str, unsure))} the interval has 0 in it." if unsure else ""
        claims.append(Claim(what, paper, ours, not worse, note))
        votes = {s: apart(where(cells, shards=s), mean, ("sisa", "vote")) for s in others}
        most = max(votes, key=lambda s: abs(np.mean(votes[s])))
        ours = f"mean less vote: at most {plus_minus(votes[most], 2, sign='+')} points (S = {most})"
        easy = "no significant difference on simple tasks (figure 13)"
        what, note = f"Mean of vectors against vote of labels ({title})", "We call up to one point no difference."
        claims.append(Claim(what, easy, ours, bool(abs(np.mean(votes[most])) <= 1), note))
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
    for data in distinct(cells, "data"):
        for s in distinct(cells, "shards"):
            here = where(cells, data=data, shards=s)
            for k in here[0]["shares"] if here and s > 1 else ():
                points, share = here[0]["points"], float(np.mean([x for cell in here for x in cell["shares"][k]]))
                worst = max(worst, abs(share - sharding_batched(points, s, int(k)) / (points - int(k))))
                (many if int(k) >= 3 * s else few).append(share)
    larger = {}
    for s in distinct(cells, "shards"):
        here = [cell for cell in where(cells, shards=s) if "fraction_shares" in cell.results]
        sisa = [x for cell in here for x in cell["shares"][str(ERASED[0])]]
        fraction = [x for cell in here for x in cell["fraction_shares"]]
        # With many shards, draws of eight may all have missed the one that is there.
        if any(fraction):
            larger[s] = float(np.mean(sisa) / np.mean(fraction))
    kept = [
        (one["samples"], said) for cell in cells for one, said in zip(cell["erasures"], cell["promised"], strict=True)
    ]
    wrong = sum(trained != said for trained, said in kept)
    claims = []
    if few and many:
        ours = f"K < 3S: {100 * np.mean(few):.0f} % of all samples on average; K ≥ 3S: {100 * np.mean(many):.0f} %"
        paper = "gains while K < 3S, then as batch K"
        claims.append(
            Claim("Sharding saves samples while K < 3S", paper, ours, bool(np.mean(many) > 0.9 > np.mean(few)))
        )
    if worst:
        draws = DRAWS * len(distinct(cells, "seed"))
        ours = f"the mean of {draws} draws is at most {100 * worst:.0f} points of 100 % away from the formula"
        what = "Samples retrained are what the batch formula says (within 10 points)"
        claims.append(Claim(what, "N(1 - (1 - 1/S)^K) - K", ours, worst < 0.10))
    if larger:
        ours = ", ".join(f"{ratio:.0f}× at S = {s}" for s, ratio in larger.items())
        off = [s for s, ratio in larger.items() if not 0.5 * s < ratio < 2 * s]
        missed = [s for s in distinct(cells, "shards") if s > 1 and s not in larger]
        note = f"At S = {', '.join(map(str, off))} it is more than twice or less than half of S." if off else ""
        note += f" At S = {', '.join(map(str, missed))} no draw hit the fraction." if missed else ""
        what, paper = (
            f"The 1/S fraction trains S times less again than SISA (K = {ERASED[0]})",
            "S×, at a large cost in accuracy",
        )
        claims.append(Claim(what, paper, ours, not off, note.strip()))
    ours = f"{len(kept)} batches of {', '.join(map(str, sorted(ERASED)))} really erased: "
    ours += f"{wrong or 'none'} trained another number of samples"
    claims.append(Claim("What a dry run promises is what an erasure trains", "–", ours, wrong == 0))
    return claims


def _table(data: str, cells: Sequence[Cell]) -> Table:
    top5 = "mean_top5" in cells[0]["sisa"]
    columns = ["S", "vote", "mean", *(["vote, top-5", "mean, top-5"] if top5 else []), "1/S fraction, mean"]
    asked = list(cells[0]["shares"])
    columns += [f"mean, after {ERASED[0]} erased", *(f"share retrained, K = {k}" for k in asked)]
    rows = []
    for s in distinct(cells, "shards"):
        here = where(cells, shards=s)
        row: list[Any] = [s]
        row += [
            plus_minus(values_of(here, "sisa", rule), 2)
            for rule in ("vote", "mean", *(("vote_top5", "mean_top5") if top5 else ()))
        ]
        row.append(plus_minus(values_of(here, "fraction", "mean"), 2) if s > 1 else "the same")
        row.append(plus_minus(values_of(here, "sisa_after", "mean"), 2))
        for k in asked:
            shares = [share for cell in here for share in cell["shares"].get(k, [])]
            row.append(f"{100 * np.mean(shares):.1f} %" if shares else "–")
        rows.append(row)
    title = f"{title_of(data)}: accuracy in percent, and the share of all samples that a batch of K trains again"
    return Table(title, columns, rows)


def draw(cells: Sequence[Cell], figure: Any) -> None:
    cells = [cell for cell in cells if "lr" not in cell.settings]
    names = distinct(cells, "data")
    panels = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    for panel, data in zip(panels, names, strict=False):
        of_data = where(cells, data=data)
        shards = distinct(of_data, "shards")
        for what, rule, colour in (("sisa", "mean", 0), ("sisa", "vote", 1), ("fraction", "mean", 4)):
            given = [s for s in shards if all(what in cell.results for cell in where(of_data, shards=s))]
            bars = [mean_interval(values_of(where(of_data, shards=s), what, rule)) for s in given]
            label = f"SISA, {rule}" if what == "sisa" else "1/S fraction, mean"
            # Beside each other, so that the one does not hide the interval of the other.
            at = [s * (1.06 if rule == "vote" else 1) for s in given]
            panel.errorbar(at, [m for m, _ in bars], [h for _, h in bars], fmt="o-", ms=3, lw=1, capsize=2,
                           color=COLOURS[colour], label=label)  # fmt: skip
        whole = np.mean(values_of(where(of_data, shards=1), "sisa", "mean")) if 1 in shards else None
        if whole is not None:
            panel.axhline(whole, color=COLOURS[6], lw=0.8, ls="--", label="batch K (S = 1)")
        panel.set(xscale="log", xlabel="shards, S", ylabel="accuracy, % (95 % intervals)")
        plain_ticks(panel, shards)
        panel.set_title(short(title_of(data)), fontsize=9)
    panels[0].legend(fontsize=7)
    of_data = where(cells, data=names[0])
    for colour, s in enumerate(distinct(of_data, "shards")):
        found = where(of_data, shards=s)
        asked = [int(k) for k in found[0]["shares"]]
        means = [100 * np.mean([x for cell in found for x in cell["shares"][str(k)]]) for k in asked]
        panels[-1].plot(asked, means, "o-", ms=3, color=COLOURS[colour % len(COLOURS)], label=f"S = {s}")
    panels[-1].set(xscale="log", xlabel="requests in a batch, K", ylabel="share of samples retrained, %")
    plain_ticks(panels[-1], [int(k) for k in where(of_data, shards=distinct(of_data, "shards")[0])[0]["shares"]])
    panels[-1].legend(fontsize=7)
    panels[-1].set_title(short(title_of(names[0])), fontsize=9)
