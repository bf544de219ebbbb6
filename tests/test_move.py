"""`unlearnd ledger copy`: the same store in another database, whatever happens on the way."""

import signal
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.audit import audit
from unlearnd.config import read_config
from unlearnd.errors import BusyError, DamagedStoreError, NotFoundError, RefusedError, StorageError
from unlearnd.leases import hold
from unlearnd.ledger import Ledger
from unlearnd.steps import Step
from unlearnd.store import copy_ledger

MOVE = """
import os, signal, sys
from unlearnd import steps
from unlearnd.store import copy_ledger

def watch(reached):
    if reached.name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

steps.watcher = watch
copy_ledger(sys.argv[1], sys.argv[2])
"""


@pytest.fixture
def filled(new_store: Callable[..., Any], people: Callable[..., Any], add: Callable[..., Any], fit: Any) -> Any:
    """Return a store in SQLite with a bit of everything: models, erasures, points asked for, a rotated key."""
    store = new_store("moved", ledger="sqlite:///ledger.sqlite")
    rows = people(12, 40)
    add(store, rows, shards=2, slices=2)
    fit(store)
    store.erase(["u1", "nobody"], points=["d:7"])
    store.rotate_key("receipt")
    store.erase(["u2"], build=False)
    return store


@pytest.fixture
def elsewhere(postgres: Any, request: pytest.FixtureRequest) -> Any:
    """Return the URL of a ledger in PostgreSQL that is not there."""
    schema = f"move_{abs(hash(request.node.name))}"
    yield postgres.url(schema)
    postgres.run(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


def told(store: Any) -> dict[str, Any]:
    """Return all that must not change."""
    return {
        "head": store.log_head(),
        "receipts": {entry.request_id: store.receipt(entry.request_id) for entry in store.receipts()},
        "digests": [(c.shard, c.slice, c.recipe, c.file, c.tensors) for c in store.checkpoints("m")],
        "where": [store.where_user(f"u{number}") for number in range(12)],
        "builds": store.builds("m"),
        "status": store.status(),
        "keys": store.signing_keys(),
        "seed": store.seed_of("m"),
    }


def check_works(folder: Path, before: dict[str, Any], rows: Any) -> None:
    """Check that a moved store is what it was, and goes on."""
    with unlearnd.open_store(str(folder)) as store:
        assert told(store) == before
        assert audit(store).level == 4, list(audit(store).lines())
        store.ingest("d", rows.x[:6], user=rows.user[:6], label=rows.y[:6])
        store.erase(["u3"])
        assert store.log_head()[0] > before["head"][0]
        assert audit(store).level == 4, list(audit(store).lines())


def test_a_store_goes_to_postgresql_and_back_and_is_the_same(
    filled: Any, elsewhere: str, people: Callable[..., Any]
) -> None:
    before, folder = told(filled), filled.folder
    toml = (folder / "unlearnd.toml").read_text()
    filled.close()
    moved = copy_ledger(folder, elsewhere)
    assert moved.leaves == before["head"][0]
    assert read_config(folder).ledger == elsewhere
    assert list(folder.glob("ledger.sqlite*")) == []
    with unlearnd.open_store(str(folder)) as store:
        assert told(store) == before
    again = copy_ledger(folder, "sqlite:///ledger.sqlite")
    assert again == moved
    assert (folder / "unlearnd.toml").read_text() == toml
    with closing(Ledger(elsewhere)) as left:
        assert left.tables() == []
    check_works(folder, before, people(12, 40))


@pytest.mark.parametrize("step", [step for step in Step if step.name.startswith("LEDGER_")])
def test_killed_at_a_step_and_run_again_the_move_ends_the_same(
    filled: Any, elsewhere: str, step: Step, run_python: Callable[..., str], people: Callable[..., Any]
) -> None:
    before, folder = told(filled), filled.folder
    filled.close()
    run_python(MOVE, folder, elsewhere, step.name, code=-signal.SIGKILL)
    if step is Step.LEDGER_COPIED:
        # Nothing is decided yet: the store works as it is, and what it does meanwhile is not lost.
        with unlearnd.open_store(str(folder)) as store:
            store.erase(["u4"], build=False)
            before = told(store)
    else:
        with pytest.raises(RefusedError, match="run `unlearnd ledger copy` again"):
            unlearnd.open_store(str(folder))
    copy_ledger(folder, elsewhere)
    assert list(folder.glob("ledger.sqlite*")) == []
    check_works(folder, before, people(12, 40))


def test_whoever_has_the_old_ledger_open_can_neither_write_nor_answer(filled: Any, elsewhere: str) -> None:
    served = filled.model("m")
    served.predict(np.zeros((1, 5), np.float32))
    copy_ledger(filled.folder, elsewhere)
    with pytest.raises(StorageError, match="if it was moved, open the store again"):
        served.predict(np.zeros((1, 5), np.float32))
    with pytest.raises(StorageError, match="if it was moved, open the store again"):
        filled.erase(["u5"])


def test_a_ledger_moves_only_to_where_nothing_is(filled: Any, elsewhere: str, tmp_path: Path) -> None:
    other = Ledger.create(elsewhere)
    other.close()
    before = told(filled)
    with pytest.raises(RefusedError, match=r"there are tables in schema 'move_.* already"):
        copy_ledger(filled.folder, elsewhere)
    (tmp_path / "notes.sqlite").write_text("something else entirely")
    with pytest.raises(DamagedStoreError, match="is not a ledger"):
        copy_ledger(filled.folder, f"sqlite:///{tmp_path / 'notes.sqlite'}")
    with pytest.raises(RefusedError, match="the ledger is there already"):
        copy_ledger(filled.folder, "sqlite:///ledger.sqlite")
    with pytest.raises(NotFoundError):
        copy_ledger(tmp_path, elsewhere)
    assert told(filled) == before


def test_a_ledger_does_not_move_while_somebody_is_at_work(filled: Any, elsewhere: str) -> None:
    with (
        hold(filled.ledger, ["build/m/1"], lambda: datetime.now(UTC)),
        pytest.raises(BusyError, match="is at work on build/m/1"),
    ):
        copy_ledger(filled.folder, elsewhere)
    assert filled.status().unfinished == 0
