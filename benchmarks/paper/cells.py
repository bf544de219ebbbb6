"""Keep what cells found: one small file each, written at once, so that nothing that was measured is measured again.

A cell is named by the digest of its experiment and settings. Other settings are another cell, and so is other data,
because the name of the data is a setting. What was measured by older code is not found out: `--fresh` forgets it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.experiment import Cell, Settings


def key_of(experiment: str, settings: Settings) -> str:
    """Return the name of a cell."""
    text = json.dumps({"experiment": experiment, "settings": settings}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_cell(folder: Path, experiment: str, settings: Settings) -> Cell | None:
    """Return what a cell found; None where it has not been measured, or its file is not whole."""
    try:
        saved = json.loads(_path(folder, experiment, settings).read_text())
        return _from_json(saved)
    except (FileNotFoundError, ValueError, KeyError):
        return None


def save_cell(folder: Path, experiment: str, cell: Cell) -> None:
    """Save what a cell found: whole, or not at all."""
    write_json(_path(folder, experiment, cell.settings), _as_json(cell))


def forget_cells(folder: Path, experiment: str) -> None:
    """Forget all that an experiment has found."""
    for path in (folder / experiment).glob("*.json"):
        path.unlink()


def save_experiment(path: Path, experiment: str, about: Settings, cells: Sequence[Cell]) -> None:
    """Save all that an experiment has found so far as one document: what the report is made from."""
    write_json(path, {"experiment": experiment, **about, "cells": [_as_json(cell) for cell in cells]})


def read_experiment(path: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Return what `save_experiment` saved: what it is about, and its cells."""
    saved = json.loads(path.read_text())
    return saved, [_from_json(one) for one in saved.pop("cells")]


def write_json(path: Path, content: object) -> None:
    """Write a document, whole or not at all, the same bytes for the same content."""
    write_text(path, json.dumps(_rounded(content), indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _path(folder: Path, experiment: str, settings: Settings) -> Path:
    return folder / experiment / f"{key_of(experiment, settings)}.json"


def _as_json(cell: Cell) -> dict[str, Any]:
    return {
        "settings": dict(cell.settings),
        "results": dict(cell.results),
        "seconds": cell.seconds,
        "cpu": cell.cpu,
    }


def _from_json(saved: dict[str, Any]) -> Cell:
    return Cell(saved["settings"], saved["results"], saved["seconds"], saved.get("cpu", 0.0))


def _rounded(value: Any) -> Any:
    """Return a value with six digits of each float: what was measured is not known better, and files stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
