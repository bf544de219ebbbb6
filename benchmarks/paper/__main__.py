"""Run the paper's evaluation and write the report.

python -m benchmarks.paper [--quick] [--only sharding,slicing] [--data DIR] [--out DIR] [--fresh]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.experiment import EXPERIMENTS
from benchmarks.paper.report import write_report
from benchmarks.paper.runner import run

ROOT = Path(__file__).parents[2]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes; into build/paper/quick")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="which experiments, separated by commas")
    parser.add_argument("--data", help="folder with the paper's data sets, see the how-to guide")
    parser.add_argument("--out", type=Path, help="where JSON, plots and the report go (docs/results)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "paper" / "cells", help="where cells are kept")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cells at a time; 0: in this process"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what these experiments have found, and begin anew")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the report again")
    options = parser.parse_args(given)
    names = [name.strip().replace("-", "_") for name in options.only.split(",")]
    for name in names:
        if name not in EXPERIMENTS:
            parser.error(f"no experiment '{name}'; there are: {', '.join(EXPERIMENTS)}")
    if options.data is not None:
        if not Path(options.data).is_dir():
            parser.error(f"--data {options.data}: there is no such folder")
        # In the environment, because worker processes look there too.
        os.environ["UNLEARND_PAPER_DATA"] = options.data
    out = options.out or (ROOT / "build" / "paper" / "quick" if options.quick else ROOT / "docs" / "results")
    failed = 0
    if not options.report:
        command = "python -m benchmarks.paper" + (" --quick" if options.quick else "")
        failed = run(
            names,
            quick=options.quick,
            out=out,
            work=options.work,
            jobs=options.jobs,
            fresh=options.fresh,
            command=command,
        )
    report = write_report(out)
    print(f"{report.relative_to(ROOT) if report.is_relative_to(ROOT) else report}: the report")
    if failed:
        print(f"{failed} cells failed and are not in it; run again to try them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; what was measured is kept, run again to go on")
