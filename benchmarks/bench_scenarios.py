"""7. Samples retrained under the paper's scenario of three countries, relative to training from scratch.

Counts, not times: by simulation of requests at random on the shape of SVHN, and once in a real store, where what builds
trained is added up. Ratios below 1 are what is left to train.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lines import Line
from unlearnd.costs import Scheme, arrivals, even_scheme, one_by_one, scheme_of, simulate, thinned
from unlearnd.layouts import KINDS, Risk, freeze
from unlearnd.store import Store

COUNTRIES = (Risk("c1", 3e-6, 0.7717), Risk("c2", 3e-5, 0.1001), Risk("c3", 6e-6, 0.1282))
POINTS, SHARDS, SLICES = 604_833, 20, 50
REQUESTS = 18
"""0.003 % of the points."""


def run(quick: bool) -> list[Line]:
    """Simulate every placement, then erase in real stores."""
    return [*_simulated(300 if quick else 3000), *_real(18 if quick else 60)]


def _scheme(placement: str, schedule: str = "uniform") -> Scheme:
    if placement == "uniform":
        return even_scheme(POINTS, SHARDS, SLICES, schedule=schedule)
    ordered, power = KINDS[placement]
    layout = freeze(COUNTRIES, SHARDS, ordered=ordered, power=power)
    return scheme_of(layout, POINTS, SHARDS, SLICES, schedule=schedule)


def _simulated(trials: int) -> list[Line]:
    turns = one_by_one(REQUESTS, trials)
    schemes = {
        "uniform": _scheme("uniform"),
        "Algorithm 1": _scheme("aware-algorithm-1"),
        "square-root rule": _scheme("aware-square-root"),
        "risk-ordered slices": _scheme("aware"),
        "both (Algorithm 1, risk-ordered slices)": _scheme("aware-both"),
        "risk-ordered slices, equal-work epochs": _scheme("aware", "equal-work"),
        "risk-ordered slices, 10 of 50 checkpoints": thinned(_scheme("aware"), 10),
    }
    share = {name: _share(scheme, turns) for name, scheme in schemes.items()}
    # What each must save over uniform, as far as something is promised.
    promised = {"square-root rule": 1.2, "risk-ordered slices": 1.6, "risk-ordered slices, equal-work epochs": 2.2}
    lines = []
    for name, (left, error) in share.items():
        gain = share["uniform"][0] / left
        detail: dict[str, float | str] = {"standard error": f"{error:.4f}", "less than uniform, times": gain}
        bar = promised.get(name)
        says = f"≤ {share['uniform'][0] / bar:.2f}" if bar else ""
        holds = gain >= bar if bar else None
        lines.append(Line(f"7 18 requests one by one: {name} / from scratch once", left, says, holds, detail))
    # Five requests a day for 30 days, built each at once or all on the last day.
    waiting = arrivals(5, 30, 30, trials, seed=2)
    for name in ("uniform", "aware"):
        scheme = _scheme(name)
        at_once, _ = _share(scheme, one_by_one(150, max(50, trials // 10)))
        left, error = _share(scheme, waiting)
        holds = at_once / left >= 4 if name == "uniform" else None
        less = at_once / left
        detail = {"standard error": f"{error:.4f}", "built at once": at_once, "less than at once, times": less}
        says = f"≤ {at_once / 4:.2f}" if name == "uniform" else ""
        title = f"7 150 requests in one lazy build: {name} / from scratch once"
        lines.append(Line(title, left, says, holds, detail))
    return lines


def _share(scheme: Scheme, batches: np.ndarray) -> tuple[float, float]:  # type: ignore[type-arg]
    """Return what all requests together retrain, over training from scratch once, and its standard error."""
    drawn = simulate(scheme, batches, seed=7)
    return drawn.mean / scheme.from_scratch, drawn.error / scheme.from_scratch


def _store(folder: Path) -> Store:
    """Make a store that places users as it did yesterday, so that counts are the same in every run."""
    (folder / "placement.key").write_text("5eed" * 16 + "\n")
    return Store.create(folder / "store", placement_key=folder / "placement.key")


def _real(erased: int) -> list[Line]:
    """Erase the same users, drawn by risk, in stores that place them differently; add up what builds trained."""
    rows, people = 12_000, 6_000
    generator = np.random.Generator(np.random.PCG64(11))
    country = generator.choice(3, people, p=[risk.share or 0.0 for risk in COUNTRIES])
    weight = np.array([risk.probability for risk in COUNTRIES])[country]
    leaving = generator.choice(people, erased, replace=False, p=weight / weight.sum())
    owner = np.arange(rows) % people
    x = generator.normal(size=(rows, 8)).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    names = np.array([risk.group for risk in COUNTRIES])
    shares = {}
    for placement in ("uniform", *KINDS):
        with tempfile.TemporaryDirectory() as folder, _store(Path(folder)) as store:
            risk = None if placement == "uniform" else COUNTRIES
            how = {"shards": 5, "slices": 20, "placement": placement, "risk": risk}
            store.ingest("people", x, label=y, user=owner, group=names[country[owner]], **how)  # type: ignore[arg-type]
            whole = store.train("model", dataset="people", backend="linear", epochs=2).samples
            trained = sum(build.samples for user in leaving.tolist() for build in store.erase([user]).builds)
            shares[placement] = trained / erased / whole
    gain = shares["uniform"] / shares["aware"]
    detail: dict[str, float | str] = {f"{name} / from scratch": share for name, share in shares.items()}
    detail["users erased, one by one"] = str(erased)
    return [Line("7 in a store: uniform / risk-ordered slices", gain, "≥ 1.2", gain >= 1.2, detail)]
