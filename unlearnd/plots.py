"""Draw what a plan is about: speed-up against requests, shards and slices (figures 7, 11 and 12 of the paper)."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearnd.costs import exact_speedup, expected_batch, thinned
from unlearnd.errors import InputError, NotFoundError, StorageError
from unlearnd.planner import Question, schemes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg")
_COLOURS = ("#0b3c5d", "#328cc1", "#3a9d5d", "#d9a21b", "#c8553d", "#7b4b94")


def check_plot(file: str) -> None:
    """Raise unless a plot can be drawn into a file of that name."""
    if Path(file).suffix.lower() not in KINDS:
        raise InputError(f"a plot is a .png or .svg file, not '{file}'")
    try:
        import matplotlib  # noqa: F401  (heavy, and an extra)
    except ImportError:
        raise NotFoundError("plots need matplotlib, which is not installed: pip install 'unlearnd[plot]'") from None


def draw_plan(question: Question, file: str) -> None:
    """Draw four panels for the points, priors and schedule of a question, and write them to `file`."""
    check_plot(file)
    from matplotlib.figure import Figure  # heavy, and an extra; no window system is touched

    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    shards, slices = question.shards or 20, question.slices or 50
    _speedup_by_requests(panels[0, 0], question, slices)
    _speedup_by_cut(panels[0, 1], question)
    _share_by_requests(panels[1, 0], question, [(s, 1) for s in _ladder(question, (1, 5, 10, 20, 50))], "shards", 0)
    # One shard, as in the paper: what slices alone do to the requests that hit it.
    _share_by_requests(panels[1, 1], question, [(1, r) for r in (1, 2, 5, 20, 50)], "slices", 1)
    kind = "" if "aware" not in schemes(question, shards, slices) else ", placement aware"
    figure.suptitle(f"{question.points:,} points, schedule {question.schedule}{kind}: what erasing in one batch costs")
    _save(figure, Path(file))


def _ladder(question: Question, steps: tuple[int, ...]) -> list[int]:
    """Return these numbers of shards and the one asked about, as far as there are points for them."""
    wanted = {*steps, *([question.shards] if question.shards else [])}
    return sorted(step for step in wanted if 2 * step <= question.points)


def _requests(question: Question) -> np.ndarray[Any, np.dtype[np.int64]]:
    most = max(2, min(1000, int(question.points / question.points_each / 10)))
    return np.unique(np.geomspace(1, most, 60).round().astype(np.int64))


def _speedup_by_requests(panel: "Axes", question: Question, slices: int) -> None:
    requests = _requests(question)
    for colour, shards in zip(_COLOURS, _ladder(question, (1, 5, 10, 20, 50)), strict=False):
        for name, scheme in schemes(question, shards, slices).items():
            if name in ("uniform", "aware"):
                kept = thinned(scheme, question.keep if question.keep and question.keep < slices else None)
                gains = [exact_speedup(kept, k, question.points_each) for k in requests.tolist()]
                style = "-" if name == "uniform" else "--"
                named = f"S = {shards}" + ("" if name == "uniform" else ", aware")
                panel.plot(requests, gains, style, color=colour, label=named)
    _mark_batch(panel, question)
    panel.set(xscale="log", yscale="log", xlabel="requests in one batch", ylabel="speed-up over training anew")
    panel.set_title(f"Speed-up against requests, R = {slices}")
    panel.grid(True, which="both", alpha=0.25)
    panel.legend(fontsize="small")


def _speedup_by_cut(panel: "Axes", question: Question) -> None:
    all_shards, all_slices = _ladder(question, (1, 2, 5, 10, 15, 20, 30, 50)), [1, 2, 5, 10, 20, 50]
    gains = np.array(
        [
            [_gain(question, shards, slices) for shards in all_shards]
            for slices in sorted({*all_slices, *([question.slices] if question.slices else [])})
        ]
    )
    names = sorted({*all_slices, *([question.slices] if question.slices else [])})
    panel.imshow(np.log(gains), origin="lower", aspect="auto", cmap="YlGnBu")
    middle = np.log(gains).max() * 0.6
    for row, column in np.ndindex(gains.shape):
        gain = gains[row, column]
        colour = "white" if np.log(gain) > middle else "black"
        panel.text(column, row, f"{gain:.1f}×", ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(len(all_shards)), [str(s) for s in all_shards])
    panel.set_yticks(range(len(names)), [str(r) for r in names])
    panel.set(xlabel="shards", ylabel="slices")
    panel.set_title(f"Speed-up against shards and slices, {question.batch:,.4g} requests")


def _gain(question: Question, shards: int, slices: int) -> float:
    found = schemes(question, shards, slices)
    return exact_speedup(found.get("aware", found["uniform"]), question.batch, question.points_each)


def _share_by_requests(panel: "Axes", question: Question, cuts: list[tuple[int, int]], what: str, index: int) -> None:
    requests = _requests(question)
    for colour, (shards, slices) in zip(_COLOURS, cuts, strict=False):
        scheme = schemes(question, shards, slices)["uniform"]
        shares = [expected_batch(scheme, k, question.points_each) / scheme.from_scratch for k in requests.tolist()]
        panel.plot(requests, shares, color=colour, label=f"{'SR'[index]} = {(shards, slices)[index]}")
    panel.set(xscale="log", xlabel="requests in one batch", ylabel="share of all samples trained again", ylim=(0, 1.05))
    panel.set_title(f"What {what} alone do" + ("" if index == 0 else ", requests all in one shard"))
    panel.grid(True, which="both", alpha=0.25)
    panel.legend(fontsize="small")


def _mark_batch(panel: "Axes", question: Question) -> None:
    if question.requests is not None or question.per_day is not None:
        panel.axvline(question.batch, color="grey", linewidth=1, linestyle=":")


def _save(figure: Any, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=110)
        os.replace(unfinished, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
