"""A ledger with a hundred million points, run by hand: `python -m benchmarks.hundred_million [MILLIONS]`.

Not a line of `make bench`: it takes minutes and gigabytes. Points come in tens of millions, ten a user and users in
random order, each ten million of people of their own. Features are few, since it is the ledger that is measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from unlearnd.store import Store

_LOT, _EACH, _SHARDS, _SLICES = 10_000_000, 10, 20, 50


def main() -> None:
    lots = max(1, int(sys.argv[1] if len(sys.argv) > 1 else "100") // 10)
    generator = np.random.default_rng(9)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "store"
        with Store.create(home) as store:
            spent = 0.0
            for lot in range(lots):
                x = generator.integers(0, 256, (_LOT, 8), dtype=np.uint8)
                user = generator.permutation(_LOT) // _EACH + lot * (_LOT // _EACH)
                layout = {"shards": _SHARDS, "slices": _SLICES, "classes": 10}
                begun = time.perf_counter()
                store.ingest("points", x, label=generator.integers(0, 10, _LOT), user=user, **layout)
                took = time.perf_counter() - begun
                spent += took
                print(f"{(lot + 1) * 10:4} M points, the last ten at {_LOT / took:,.0f} points/s", flush=True)
            people = generator.choice(lots * _LOT // _EACH, 220, replace=False).tolist()
            for user in people[:20]:
                store.where_user(user)
            looked = [_seconds(lambda user=user: store.where_user(user)) for user in people[20:200]]
            erased = [_seconds(lambda user=user: store.erase([user], build=False)) for user in people[200:]]
            store.ledger.scrub()
        size = (home / "ledger.sqlite").stat().st_size
        held = sum(path.stat().st_size for path in (home / "storage").rglob("*") if path.is_file())
    count = lots * _LOT
    print(f"ingest, points/s                        {count / spent:14,.0f}   ({spent:,.0f} s)")
    print(f"ledger, bytes per point                 {size / count:14.1f}   ({size / 1e9:.2f} GB)")
    print(f"slice data, bytes per point             {held / count:14.1f}   ({held / 1e9:.2f} GB)")
    print(f"look up a user, median, ms              {1000 * statistics.median(looked):14.3f}")
    print(f"erase a user without build, median, ms  {1000 * statistics.median(erased):14.1f}")
    print(f"erase a user without build, most, ms    {1000 * max(erased):14.1f}")


def _seconds(work) -> float:  # type: ignore[no-untyped-def]
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
