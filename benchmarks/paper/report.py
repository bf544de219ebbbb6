"""Write the report from what was saved: one table claim by claim, then tables and a plot for each experiment.

Every figure comes out of the JSON documents beside the report, and whether a claim holds is computed from them. The
same documents give the same bytes, plots included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.cells import read_experiment, write_text
from benchmarks.paper.data import title_of
from benchmarks.paper.experiment import EXPERIMENTS, Cell, Claim, Experiment, Findings, Table, experiment
from benchmarks.paper.figures import plus_minus, short

_Shown = tuple[str, dict[str, Any], list[Cell], Findings]
BUSY = 0.2
"""Of a core, taken by others, from which on we say that the machine did other work."""
WAITED = 1.5
"""The same where only trainings were looked at: their time by the clock over their CPU time."""
VERDICTS = {True: "holds", False: "**does not hold**", None: "–"}
_HEAD = """\
<!-- Written by `python -m benchmarks.paper`. Change what it measures, not this page. -->

# The paper's evaluation, on unlearnd

Bourtoule et al., "Machine Unlearning" (IEEE S&P 2021), claim by claim: what the paper found, what this system does on
the data that can be had here, and where it does not hold. Everything went through the library as anybody uses it
(`ingest`, `train`, `erase`, `build`, `evaluate`). Each row says which command measured it; all of them are `make paper`
(see the guide [run the paper's evaluation](../how-to/run-the-papers-evaluation.md)). Verdicts are computed from the
figures, intervals are 95 %, and `S`, `R`, `K`, `e′` are the paper's: shards, slices, requests, epochs without slicing.
"""


def write_report(out: Path, *, plots: bool = True) -> Path:
    """Write `README.md` and the plots for all experiments that have saved something below `out`.

    Without `plots` those that are there are shown as they are.
    """
    found = [(name, *read_experiment(path)) for name in EXPERIMENTS if (path := out / "data" / f"{name}.json").exists()]
    shown = [(name, about, cells, _findings(name, cells)) for name, about, cells in found if cells]
    lines = [_head(out), _machine_line(shown), "", *_data_line(shown), "## Claim by claim", "", _count(shown), ""]
    lines += ["| | claim | the paper | ours | | measured by |", "|---|---|---|---|---|---|"]
    number = 0
    for name, about, _, findings in shown:
        for claim in findings.claims:
            number += 1
            lines.append(_claim_row(number, claim, name, about))
    lines += ["", *_what_does_not_hold([findings for *_, findings in shown]), ""]
    lines += _receipts([(name, cells) for name, _, cells, _ in shown])
    for name, about, cells, findings in shown:
        what = experiment(name)
        picture = out / f"{name}.svg"
        drawn = _draw(what, cells, picture) if plots else picture.exists()
        lines += [*_section(name, what, about, cells, findings, drawn), ""]
    path = out / "README.md"
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def _findings(name: str, cells: Sequence[Cell]) -> Findings:
    try:
        return experiment(name).findings(cells)
    except KeyError as missing:
        raise SystemExit(
            f"{name}: its cells have no {missing}, so older code measured them; run `--only {name} --fresh`"
        ) from missing


def _head(out: Path) -> str:
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "run-the-papers-evaluation.md"
    if (out / "../how-to" / guide.name).exists():
        return _HEAD
    return _HEAD.replace(f"[run the paper's evaluation](../how-to/{guide.name})", f"`docs/how-to/{guide.name}`")


def _machine_line(shown: Sequence[_Shown]) -> str:
    if not shown:
        return "Nothing has been measured yet."
    newest = shown[-1][1]
    machine = newest["machine"]
    parts = [f"{machine['cores']} cores ({machine['machine']}), on the CPU", f"Python {machine['python']}"]
    parts += [f"{name} {machine[name]}" for name in ("torch", "numpy", "unlearnd") if name in machine]
    small = " **Small sizes** (`--quick`): to see that it runs, not to be quoted." if newest["quick"] else ""
    took = ""
    if all(about.get("watch") for _, about, _, _ in shown):
        minutes = sum(about["watch"]["seconds"] for _, about, _, _ in shown) / 60
        took = f" All of it took {minutes:.0f} minutes by the clock."
    return f"Measured on {', '.join(parts)}; one thread per process.{took}{_on_load(shown)}{small}"


def _data_line(shown: Sequence[_Shown]) -> list[str]:
    """Name the data in full, once: what was made up or cut down says so."""
    given = (cell.settings.get(what) for *_, cells, _ in shown for cell in cells for what in ("data", "base"))
    titles = sorted({title_of(name) for name in given if name is not None}, key=str.lower)
    return [f"Data: {', '.join(titles)}.", ""] if titles else []


def _on_load(shown: Sequence[_Shown]) -> str:
    """Say during which experiments the machine did other work, and how much of it."""
    cores = {name: taken for name, about, _, _ in shown if (taken := _others(about)) is not None}
    busy = {name: f"`{name}` ({taken:.1f} cores)" for name, taken in cores.items() if taken > BUSY}
    unseen = [(name, cells) for name, _, cells, _ in shown if name not in cores]
    slow = {name: ratio for name, cells in unseen if (ratio := _wall_by_cpu(cells)) > WAITED}
    busy |= {name: f"`{name}` (trainings took {ratio:.0f} times their CPU time)" for name, ratio in slow.items()}
    quiet = [taken for name, taken in cores.items() if name not in busy]
    said = ""
    if quiet:
        when = "where that was looked at" if unseen else "during the others" if busy else "during any experiment"
        said = f" Other work took at most {max(quiet):.2f} of a core {when}."
    if not busy:
        return said
    return (
        f" **The machine was busy with other work** during {', '.join(busy.values())}. Seconds are longer there than "
        f"they need be, and ratios of times less certain. Samples, accuracies and bytes do not depend on it.{said}"
    )


def _others(about: dict[str, Any]) -> float | None:
    """Return how many cores others took on average while an experiment was measured; None where that is not known."""
    watch = about.get("watch")
    return watch["others"] / watch["seconds"] if watch and watch["others"] is not None and watch["seconds"] else None


def _count(shown: Sequence[_Shown]) -> str:
    """Say how many claims hold, before any of them is read."""
    judged = [claim for *_, findings in shown for claim in findings.claims if claim.holds is not None]
    hold = sum(bool(claim.holds) for claim in judged)
    missed = "" if hold == len(judged) else " [Where one does not](#where-it-does-not-hold) is said below, in words."
    return f"{hold} of {len(judged)} claims hold.{missed}"


def _wall_by_cpu(cells: Sequence[Cell]) -> float:
    """Return how many times their CPU time trainings took by the wall clock; 1 where that was not measured."""
    wall = cpu = 0.0
    for cell in cells:
        for one in (*cell.results.get("erasures", ()), *cell.results.get("batch_k", ())):
            wall, cpu = wall + one["build_seconds"], cpu + one["build_cpu"]
        if "cpu" in cell.results:
            wall, cpu = wall + sum(cell["seconds"]), cpu + sum(cell["cpu"])
    return wall / cpu if cpu else 1.0


def _claim_row(number: int, claim: Claim, name: str, about: dict[str, Any]) -> str:
    cells = (claim.claim, claim.paper, claim.ours, VERDICTS[claim.holds], f"[`--only {name}`](#{_anchor(name)})")
    return f"| {number} | " + " | ".join(_cell(text) for text in cells) + " |"


def _what_does_not_hold(all_findings: Sequence[Findings]) -> list[str]:
    claims = [claim for findings in all_findings for claim in findings.claims]
    missed = [claim for claim in claims if claim.holds is False]
    noted = [claim for claim in claims if claim.note and claim.holds is not False]
    judged = sum(claim.holds is not None for claim in claims)
    lines = ["### Where it does not hold", ""]
    if not missed:
        lines.append(f"All {judged} claims that can be judged hold on this data.")
    for claim in missed:
        lines.append(f"- **{claim.claim}**: {claim.ours}." + (f" {claim.note}" if claim.note else ""))
    if noted:
        lines += ["", "Of those that hold, this must be known:", ""]
        lines += [f"- {claim.claim}: {claim.note}" for claim in noted]
    return lines


def _receipts(shown: Sequence[tuple[str, Sequence[Cell]]]) -> list[str]:
    """Collect from all experiments how long erasures took from request to receipt, by configuration."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name, cells in shown:
        for cell in cells:
            for one in cell.results.get("erasures", ()):
                shards, slices = (one.get(what) or cell.settings.get(what) or 1 for what in ("shards", "slices"))
                found.setdefault((name, *_configuration(cell), shards, slices, one["users"]), []).append(one)
    rows, sooner = [], 0
    for where, erasures in found.items():
        receipt, build, scratch = (
            sum(one[f"{what}_seconds"] for one in erasures) / len(erasures) for what in ("receipt", "build", "scratch")
        )
        sooner += receipt < scratch
        times = (plus_minus([one["receipt_seconds"] for one in erasures], 2), f"{build:.2f}", f"{scratch:.2f}")
        rows.append((*where, len(erasures), *times, f"{scratch / receipt:.1f}×"))
    if not rows:
        return []
    columns = ("experiment", "data", "", "points", "S", "R", "K", "erasures", "receipt after, s")
    columns += ("full strength after another, s", "training all took, s", "receipt sooner by")
    title = (
        f"In {sooner} of {len(rows)} configurations the receipt was there before training all again would have ended."
    )
    about = (
        "From then on nothing made from the erased is left or served; the build that follows restores full strength."
    )
    return ["### From request to receipt", "", f"{title} {about}", "", *_table(Table("", columns, rows)), ""]


def _configuration(cell: Cell) -> tuple[str, str, Any]:
    """Return on what data a cell was measured, what else tells it from others, and how many points it had."""
    given = cell.settings
    words = [f"`{given['backend']}`"] if "backend" in given else []
    words += [given["way"]] if "way" in given else []
    words += ["equal-work"] if given.get("schedule") == "equal-work" else []
    words += [f"{given['per_class']:,} per class"] if "per_class" in given else []
    words += [f"{given['keep'] or 'all'} checkpoints kept"] if "keep" in given else []
    words += [{"user": "in one place", "point": "scattered"}[given["unit"]]] if "unit" in given else []
    words += [f"scratch, and on {short(title_of(given['base']))}"] if "base" in given else []
    sizes = (given.get("points"), given.get("private"), given.get("learned"), cell.results.get("points"))
    return short(title_of(given["data"])), ", ".join(words), next((size for size in sizes if size), "all")


def _section(
    name: str, what: Experiment, about: dict[str, Any], cells: Sequence[Cell], findings: Findings, drawn: bool
) -> list[str]:
    lines = [f"## {_heading(what)}", ""]
    lines += [f"`{about['command']}`: {len(cells)} cells, {_spent(about, cells)}; [data](data/{name}.json).", ""]
    for sentence in findings.sizes:
        lines += [f"- {sentence}"]
    if findings.sizes:
        lines.append("")
    if drawn:
        lines += [f"![{what.TITLE}]({name}.svg)", ""]
    for table in findings.tables:
        lines += [*_table(table), ""]
    return lines[:-1]


def _spent(about: dict[str, Any], cells: Sequence[Cell]) -> str:
    """Say what an experiment took, and what others took meanwhile."""
    if not about.get("watch"):
        return f"{sum(cell.seconds for cell in cells) / 60:.1f} minutes of work"
    took = f"{about['watch']['seconds'] / 60:.1f} minutes, {sum(cell.cpu for cell in cells) / 60:.1f} of CPU"
    taken = _others(about)
    if taken is None:
        return f"{took}; what else the machine did is not known"
    return f"{took}; other work took {taken:.2f} of {about['machine']['cores']} cores meanwhile"


def _table(table: Table) -> list[str]:
    lines = [f"**{table.title}**", ""] if table.title else []
    lines += ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return lines + ["| " + " | ".join(_cell(_text(value)) for value in row) + " |" for row in table.rows]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _heading(what: Experiment) -> str:
    return what.TITLE + (f" ({what.FIGURES})" if what.FIGURES else "")


def _anchor(name: str) -> str:
    """Return the anchor that GitHub gives to the heading of an experiment."""
    return re.sub(r"[^\w\- ]", "", _heading(experiment(name)).lower()).replace(" ", "-")


def _draw(what: Experiment, cells: Sequence[Cell], path: Path) -> bool:
    """Draw an experiment; say whether there was anything to draw."""
    import matplotlib  # heavy, and an extra
    from matplotlib.figure import Figure

    # A fixed salt and no date, so that equal figures are equal bytes.
    settings = {
        "svg.hashsalt": "unlearnd",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        what.draw(cells, figure)
        if not figure.axes:
            return False
        unfinished = path.with_name(f".{path.name}.part.svg")
        figure.savefig(unfinished, format="svg", metadata={"Date": None, "Creator": None})
        unfinished.replace(path)
    return True
