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
from benchmarks.paper.figures import short

_Shown = tuple[str, dict[str, Any], list[Cell], Findings]
BUSY = 1.5
"""Of the CPU time of trainings, from which on we say that the machine did other work."""
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
    lines = [_head(out), _machine_line(shown), "", "## Claim by claim", ""]
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
    parts = [f"{machine['cores']} cores ({machine['machine']}), no GPU", f"Python {machine['python']}"]
    parts += [f"{name} {machine[name]}" for name in ("torch", "numpy", "unlearnd") if name in machine]
    small = " **Small sizes** (`--quick`): to see that it runs, not to be quoted." if newest["quick"] else ""
    waited = {name: ratio for name, _, cells, _ in shown if (ratio := _wall_by_cpu(cells)) > BUSY}
    busy = ""
    if waited:
        names = ", ".join(f"`{name}`" for name in waited)
        busy = (
            f" **The machine was busy with other work** during {names}: by the wall clock trainings took up to "
            f"{max(waited.values()):.0f} times their CPU time. Seconds are longer there than they need be, and ratios "
            "of times less certain. Samples, accuracies and bytes do not depend on it."
        )
    return f"Measured on {', '.join(parts)}; one thread per process.{busy}{small}"


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
        lines += ["", "Holds, with a limit to be known:" if missed else "But with limits to be known:", ""]
        lines += [f"- {claim.claim}: {claim.note}" for claim in noted]
    return lines


def _receipts(shown: Sequence[tuple[str, Sequence[Cell]]]) -> list[str]:
    """Collect from all experiments how long erasures took from request to receipt, by configuration."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name, cells in shown:
        for cell in cells:
            for one in cell.results.get("erasures", ()):
                shards, slices = (cell.settings.get(what) for what in ("shards", "slices"))
                shards = shards[-1] if isinstance(shards, list) else shards
                data = short(title_of(cell.settings["data"]))
                where = (name, data, cell.settings.get("points", "–"), shards or 1, slices or 1, one["users"])
                found.setdefault(where, []).append(one)
    rows, sooner = [], 0
    for where, erasures in found.items():
        receipt, build, scratch = (
            sum(one[f"{what}_seconds"] for one in erasures) / len(erasures) for what in ("receipt", "build", "scratch")
        )
        sooner += receipt < scratch
        times = (f"{seconds:.2f}" for seconds in (receipt, build, scratch))
        rows.append((*where, len(erasures), *times, f"{scratch / receipt:.1f}×"))
    if not rows:
        return []
    columns = ("experiment", "data", "points", "S", "R", "K", "erasures", "receipt after, s")
    columns += ("full strength after another, s", "training all took, s", "receipt sooner by")
    title = (
        f"In {sooner} of {len(rows)} configurations the receipt was there before training all again would have ended."
    )
    about = (
        "From then on nothing made from the erased is left or served; the build that follows restores full strength."
    )
    return ["### From request to receipt", "", f"{title} {about}", "", *_table(Table("", columns, rows)), ""]


def _section(
    name: str, what: Experiment, about: dict[str, Any], cells: Sequence[Cell], findings: Findings, drawn: bool
) -> list[str]:
    lines = [f"## {_heading(what)}", ""]
    minutes = sum(cell.seconds for cell in cells) / 60
    lines += [f"`{about['command']}`: {len(cells)} cells, {minutes:.1f} minutes of work; [data](data/{name}.json).", ""]
    for sentence in findings.sizes:
        lines += [f"- {sentence}"]
    if findings.sizes:
        lines.append("")
    if drawn:
        lines += [f"![{what.TITLE}]({name}.svg)", ""]
    for table in findings.tables:
        lines += [*_table(table), ""]
    return lines[:-1]


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
