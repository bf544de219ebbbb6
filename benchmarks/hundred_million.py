"""A ledger with a hundred million points, run by hand: `python -m benchmarks.hundred_million [MILLIONS [FOLDER]]`.

Not a line of `make bench`: it takes minutes and gigabytes. Points come in tens of millions, ten a user and users in
random order, each ten million of people of their own. Features are few, since it is the ledger that is measured. A row
is printed after every ten million, so that a run that is stopped has said something. In a folder that is named, the
store stays, and the next run goes on from there.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from unlearnd.store import Store

_LOT, _EACH, _SHARDS, _SLICES = 10_000_000, 10, 20, 50


def main() -> None:
    lots = max(1, int(sys.argv[1] if len(sys.argv) > 1 else "100") // 10)
    print("  points M   these, points/s   all, points/s   ledger B/point   data B/point   look up, ms   erase, ms")
    if len(sys.argv) > 2:
        _fill(Path(sys.argv[2]), lots)
    else:
        with tempfile.TemporaryDirectory() as folder:
            _fill(Path(folder), lots)


def _fill(folder: Path, lots: int) -> None:
    """Take in points up to so many lots, from the lot after those that are in already."""
    home, kept = folder / "store", folder / "seconds.json"
    seconds: list[float] = json.loads(kept.read_text()) if kept.exists() else []
    for lot in range(len(seconds), lots):
        generator = np.random.default_rng([9, lot])
        x = generator.integers(0, 256, (_LOT, 8), dtype=np.uint8)
        user = generator.permutation(_LOT) // _EACH + lot * (_LOT // _EACH)
        label, layout = generator.integers(0, 10, _LOT), {"shards": _SHARDS, "slices": _SLICES, "classes": 10}
        with Store.open(home) if lot else Store.create(home) as store:
            seconds.append(_seconds(partial(store.ingest, "points", x, label=label, user=user, **layout)))
            people = generator.choice((lot + 1) * (_LOT // _EACH), 115, replace=False).tolist()
            looked = [_seconds(partial(store.where_user, one)) for one in people[:110]][10:]
            erased = [_seconds(partial(store.erase, [one], build=False)) for one in people[110:]]
        kept.write_text(json.dumps(seconds))
        # Closed, the ledger has no journal beside it.
        count, size = (lot + 1) * _LOT, (home / "ledger.sqlite").stat().st_size
        held = sum(path.stat().st_size for path in (home / "storage" / "data").rglob("*") if path.is_file())
        look, erase = (1000 * statistics.median(times) for times in (looked, erased))
        print(
            f"{count // 1_000_000:10} {_LOT / seconds[-1]:17,.0f} {count / sum(seconds):15,.0f} {size / count:16.1f} "
            f"{held / count:14.1f} {look:13.3f} {erase:11.1f}",
            flush=True,
        )


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
