"""Requests that come in as one file, against the same recorded one after another.

Each is a request of its own either way, with its rows, its leaf and its deadline. What is carried out is measured
elsewhere; this is about taking in.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.lines import Line
from unlearnd.store import Store

ONE_BY_ONE = 200


def run(quick: bool) -> list[Line]:
    """Record rows in one call, give the same call again, and record some one by one."""
    rows = [{"user": f"person-{n}", "identity": "account_login"} for n in range(2_000 if quick else 10_000)]
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "store", policy="gdpr") as store:
        begun = time.perf_counter()
        store.receive_rows(rows, source="file", approve=True)
        together = time.perf_counter() - begun
        begun = time.perf_counter()
        store.receive_rows(rows, source="file", approve=True)
        again = time.perf_counter() - begun
        begun = time.perf_counter()
        for n in range(ONE_BY_ONE):
            (entry,) = store.receive([f"other-{n}"], identity="account_login")
            store.approve(entry.id)
        alone = time.perf_counter() - begun
        recorded = len(store.requests())
    detail: dict[str, float | str] = {
        "rows": len(rows),
        "in one call, s": together,
        "rows/s": len(rows) / together,
        "the same call again, s": again,
        "one by one, requests/s": ONE_BY_ONE / alone,
    }
    ratio = (alone / ONE_BY_ONE) / (together / len(rows))
    return [
        Line(
            "requests/s taken in as one file / one by one",
            ratio,
            "≥ 20",
            ratio >= 20 and recorded == len(rows) + ONE_BY_ONE,
            detail,
        )
    ]
