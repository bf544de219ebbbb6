"""Run all benchmarks: `python -m benchmarks [--quick] [--only training,erase] [--out FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

NAMES = (
    "training",
    "checkpoints",
    "ingest",
    "erase",
    "prediction",
    "log",
    "networks",
    "transfer",
    "scenarios",
    "storage",
    "executors",
    "growth",
    "baseline",
    "queue",
    "requests",
    "overhead",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a few minutes")
    parser.add_argument("--only", default=",".join(NAMES), help="which, separated by commas")
    parser.add_argument("--out", default="benchmarks/results.json", help="where to save the lines as JSON")
    options = parser.parse_args()
    saved = []
    failed = 0
    for name in options.only.split(","):
        if name not in NAMES:
            parser.error(f"no benchmark '{name}'; there are: {', '.join(NAMES)}")
        for line in importlib.import_module(f"benchmarks.bench_{name}").run(options.quick):
            verdict = {True: "holds", False: "MISSED", None: ""}[line.holds]
            print(f"{line.ratio:8.2f}  {line.bar:7}  {verdict:6}  {line.name}")
            for what, value in line.detail.items():
                print(f"{'':28}{what}: {value:,.3f}" if isinstance(value, float) else f"{'':28}{what}: {value}")
            sys.stdout.flush()
            saved.append(asdict(line))
            failed += line.holds is False
    machine = {"machine": platform.machine(), "python": platform.python_version(), "quick": options.quick}
    Path(options.out).write_text(json.dumps({**machine, "lines": saved}, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
