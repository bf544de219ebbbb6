"""Eight processes erase, build, ingest and answer at once on one ledger in PostgreSQL, and nothing is lost.

A few seconds here; `UNLEARND_CROWD_SECONDS=60 pytest tests/test_crowd.py -s` runs it for a minute and tells figures.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unlearnd.audit import audit

SECONDS = float(os.environ.get("UNLEARND_CROWD_SECONDS", "8"))

WORK = """
import json, sys, time
import numpy as np
import unlearnd
from unlearnd.errors import BusyError, RefusedError

folder, role, number, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
store = unlearnd.open_store(folder)
store.plugins.backend("linear")
generator = np.random.default_rng(number)
print("ready", flush=True)
sys.stdin.readline()
end, done, again, asked = time.monotonic() + seconds, 0, 0, {}
while time.monotonic() < end:
    try:
        if role == "erase":
            # Every fourth is asked for by both erasers, and some are not there.
            user = f"u{done if done % 4 == 0 else 2 * done + number + 1000 * (done % 9 == 8)}"
            (outcome,) = store.erase([user], build=False).outcomes
            asked[user] = [outcome.request, outcome.points]
        elif role == "build":
            store.build()
        elif role == "ingest":
            x = generator.normal(size=(20, 4)).astype(np.float32)
            users = [f"n{number}-{done}-{row % 7}" for row in range(20)]
            store.ingest("d", x, user=users, label=np.arange(20) % 3)
        else:
            model = store.model("m") if not done else model
            assert len(model.predict(generator.normal(size=(8, 4)).astype(np.float32)).labels) == 8
        done += 1
    except BusyError:
        again += 1  # says: try again
    except RefusedError as refused:
        assert "every constituent abstains" in str(refused)
        again += 1
store.close()
print(json.dumps({"role": role, "done": done, "again": again, "asked": asked}))
"""


def test_eight_processes_at_once_lose_nothing_and_never_wait_for_each_other_in_a_circle(
    postgres: Any,
    new_store: Callable[..., Any],
    people: Callable[..., Any],
    start_python: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    store = new_store(ledger=postgres.url("crowd"))
    rows = people(400, 900, features=4)
    store.ingest("d", rows.x, user=rows.user, label=rows.y, shards=3, slices=3, classes=3)
    store.train("m", dataset="d", backend="linear", epochs=1, seed=3)
    deadlocks = "SELECT deadlocks, conflicts FROM pg_stat_database WHERE datname = current_database()"
    before = postgres.run(deadlocks)
    roles = [(role, number) for role in ("erase", "build", "ingest", "answer") for number in (1, 2)]
    children = [start_python(WORK, store.folder, role, number, SECONDS) for role, number in roles]
    for child in children:
        assert child.stdout.readline() == "ready\n", child.communicate()
    begun = time.monotonic()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    told = []
    for child in children:
        out, err = child.communicate(timeout=SECONDS + 150)
        assert child.returncode == 0, err
        told.append(json.loads(out))
    took = time.monotonic() - begun
    assert postgres.run(deadlocks) == before
    assert all(work["done"] > 0 for work in told), told
    store.build()
    assert (store.status().unfinished, store.status().to_rebuild) == (0, 0)
    # Every request has its receipt, whoever of the two asked first, and nobody erased is there.
    receipts = {entry.request_id for entry in store.receipts()}
    for work in told:
        for user, (request, _) in work["asked"].items():
            assert request in receipts
            assert store.where_user(user) == []
    found = sum(points > 0 for work in told for _, points in work["asked"].values())
    assert found > 0
    assert audit(store).level == 4
    check_no_orphans(store.folder)
    postgres.run("DROP SCHEMA crowd CASCADE")
    counts = {f"{work['role']}": 0 for work in told}
    for work in told:
        counts[work["role"]] += work["done"]
    asked_again = sum(work["again"] for work in told)
    print(f"\n{took:.0f} s, 8 processes: {counts}, told to try again {asked_again} times, {len(receipts)} receipts")
