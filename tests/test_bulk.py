"""Many requests in one call: killed with SIGKILL half-way, given again, and nothing is lost or done twice."""

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rfc8785 import dumps

from unlearnd import intake, steps
from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.receipts import canonical
from unlearnd.store import Store

ROWS, LOT = 250, 60


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CSV in which some are known, some are not, some come twice, and one line is unusable."""
    monkeypatch.setattr(intake, "LOT", LOT)
    users = [f"u{number}" for number in range(20)] * 2 + [f"nobody-{number}" for number in range(ROWS - 41)]
    path = tmp_path / "asked.csv"
    path.write_text("user,received\n" + "".join(f"{user},\n" for user in users) + "u1,yesterday\n")
    return path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 1, result.output  # the row that cannot be used
    return json.loads(result.stdout)["rows"]


def killed(work: Callable[[], Any], step: steps.Step, times: int) -> None:
    """Do something in a process of its own, which is killed when it comes to a step for the n-th time."""
    child = os.fork()
    if child == 0:
        left = [times]

        def kill(here: steps.Step) -> None:
            left[0] -= here is step
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        signal.alarm(60)
        steps.watcher = kill
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_bulk_killed_while_it_comes_in_and_while_it_is_carried_out_ends_with_one_receipt_each(
    new_store: Callable[..., Store], people: Any, add: Any, fit: Any, listing: Path, tmp_path: Path
) -> None:
    store = new_store(policy="gdpr")
    add(store, people())
    fit(store)
    folder = str(store.folder)
    store.close()
    command = ("--store", folder, "requests", "receive", "--file", str(listing), "--run", "--json")
    became = tmp_path / "became.csv"

    def work() -> None:
        run(*command)

    killed(work, steps.Step.REQUEST_MOVED, 3)
    with Store.open(folder) as store:
        assert len(store.requests()) == 3 * LOT
        assert store.receipts() == []
    killed(work, steps.Step.ERASE_MARKED, 1)
    killed(work, steps.Step.RECEIPT_WRITTEN, 7)
    rows = run(*command, "--results", str(became))
    assert [row["row"] for row in rows] == list(range(1, ROWS + 1))
    states = [row["state"] for row in rows]
    assert (states.count("completed"), states.count("duplicate"), states[-1]) == (ROWS - 21, 20, "unusable")
    assert [line["request"] for line in csv.DictReader(became.open())] == [row["request"] or "" for row in rows]
    assert run(*command) == rows
    with Store.open(folder) as store:
        assert len(store.requests()) == ROWS - 1
        done = {row["request"] for row in rows if row["state"] == "completed"}
        assert sorted(receipt.request_id for receipt in store.receipts()) == sorted(done)
        report = audit(store)
        assert report.failed == (), [check.sentence for check in report.checks if check.id in report.failed]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_what_is_written_fast_has_the_bytes_of_rfc_8785(value: Any) -> None:
    assert canonical(value) == dumps(value)


@pytest.mark.parametrize("value", [2**53, -(2**53), "\ud800", ["\ud800"], {1: 2}, float("nan")])
def test_what_rfc_8785_knows_no_bytes_for_is_still_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        dumps(value)
    with pytest.raises(ValueError):
        canonical(value)
