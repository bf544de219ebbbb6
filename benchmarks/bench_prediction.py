"""Answering with 20 constituents 600-128-2: one stacked predictor against a loop over single ones.

PYTHONPATH=.:plugins/unlearnd-torch python -m benchmarks.bench_prediction [--quick]
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.lines import Line, seconds_in_turns

FEATURES, HIDDEN, CLASSES, SHARDS = 600, 128, 2, 20


def run(quick: bool) -> list[Line]:
    """Measure line 6."""
    import torch  # heavy
    from unlearnd_torch import MlpBackend

    torch.set_num_threads(1)
    backend = MlpBackend()
    settings = backend.settings({"hidden": [HIDDEN]})
    states = [backend.initial_state(settings, (FEATURES,), CLASSES, shard) for shard in range(SHARDS)]
    stacked = backend.predictor(settings, states, "cpu")
    singles = [backend.predictor(settings, [state], "cpu") for state in states]
    random = np.random.default_rng(0)
    lines = []
    for rows, bar in ((1, 3.0), (32, 0.95), (256, 0.95), (4096, 0.95)):
        x = random.standard_normal((rows, FEATURES), dtype=np.float32)
        calls = max(1, (300 if quick else 1000) // (rows + 2))

        def ask_stacked(x: np.ndarray = x, calls: int = calls) -> None:
            for _ in range(calls):
                stacked(x)

        def ask_singles(x: np.ndarray = x, calls: int = calls) -> None:
            for _ in range(calls):
                np.concatenate([single(x) for single in singles])

        ours, loop = seconds_in_turns(6 if quick else 15, ask_stacked, ask_singles)
        ratio = loop / ours
        detail: dict[str, float | str] = {
            "stacked, ms": round(ours / calls * 1000, 3),
            "loop, ms": round(loop / calls * 1000, 3),
        }
        name = f"prediction, {SHARDS} constituents stacked against a loop, {rows} rows"
        text = f"≥ {bar:.0f}" if bar > 1 else "≥ 1.0 (noise: 0.95)"
        lines.append(Line(name, ratio, text, ratio >= bar, detail))
    return lines


if __name__ == "__main__":
    for line in run(quick="--quick" in sys.argv):
        print(f"{line.ratio:6.2f}  {line.bar:20} {line.holds!s:5}  {line.name}  {line.detail}")
