"""A backup is of one moment and for its owner alone; put back, the store is as it was, or nothing is put back."""

import json
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import unlearnd
from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.ledger import Ledger, log
from unlearnd.store import Store, restore_store


@pytest.fixture
def store(new_store: Callable[..., Store], people: Any, add: Any, fit: Any) -> Store:
    made = new_store()
    add(made, people())
    fit(made)
    made.erase(["u3"])
    return made


def lose(store: Store) -> Path:
    """Lose everything but the storage."""
    store.close()
    for path in store.folder.iterdir():
        if path.name != "storage":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert [path.name for path in store.folder.iterdir()] == ["storage"]
    return store.folder


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_what_was_lost_comes_back_as_it_was_and_goes_on(
    store: Store, digests: Any, tmp_path: Path, passphrase: bytes | None
) -> None:
    before, size = digests(store), store.log_head()
    made = store.back_up(tmp_path / "backup", passphrase)
    assert made.encrypted == (passphrase is not None)
    folder = lose(store)
    with pytest.raises(NotFoundError, match="no store"):
        unlearnd.open_store(str(folder))
    assert restore_store(tmp_path / "backup", folder, passphrase) == made
    with unlearnd.open_store(str(folder)) as again:
        assert (digests(again), again.log_head()) == (before, size)
        assert audit(again, head=size[1].encode()).level == 4
        assert again.where_user("u3") == []
        assert again.erase(["u4"]).outcomes[0].points > 0
        assert audit(again, head=size[1].encode()).level == 4
    assert {path.name for path in folder.iterdir()} >= {"keys", "ledger.sqlite", "storage", "unlearnd.toml"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_backup_is_for_its_owner_alone_and_leaves_nothing_else(store: Store, tmp_path: Path) -> None:
    there = set(tmp_path.iterdir())
    store.back_up(tmp_path / "plain")
    store.back_up(tmp_path / "sealed", b"correct horse")
    assert set(tmp_path.iterdir()) - there == {tmp_path / "plain", tmp_path / "sealed"}
    for name in ("plain", "sealed"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    pepper = (store.folder / "keys" / "pepper.key").read_bytes()
    assert pepper in (tmp_path / "plain").read_bytes()
    assert pepper not in (tmp_path / "sealed").read_bytes()
    with pytest.raises(RefusedError, match="never overwritten"):
        store.back_up(tmp_path / "plain")
    with pytest.raises(StorageError, match="cannot be written"):
        store.back_up(tmp_path / "nowhere" / "backup")


def test_a_backup_older_than_an_erasure_is_refused_and_nothing_is_put_in_place(store: Store, tmp_path: Path) -> None:
    store.back_up(tmp_path / "old")
    request = store.erase(["u4"]).outcomes[0].request
    store.back_up(tmp_path / "new")
    folder = lose(store)
    with pytest.raises(RefusedError, match=f"1 requests were carried out after .* {request}.*restore a newer backup"):
        restore_store(tmp_path / "old", folder)
    assert [path.name for path in folder.iterdir()] == ["storage"]
    # Nor where the receipts are lost, too: the slice data that it lists is not there.
    shutil.rmtree(folder / "storage" / "evidence")
    with pytest.raises(RefusedError, match="slice data that storage lacks"):
        restore_store(tmp_path / "old", folder)


def test_a_backup_older_than_a_tree_head_that_somebody_kept_is_refused(store: Store, fit: Any, tmp_path: Path) -> None:
    store.back_up(tmp_path / "old")
    store.train("second", dataset="d", backend="linear", epochs=1)
    head = store.log_head()[1].encode()
    store.back_up(tmp_path / "new")
    folder = lose(store)
    with pytest.raises(RefusedError, match="contradict what is signed"):
        restore_store(tmp_path / "old", folder, head=head)
    restore_store(tmp_path / "new", folder, head=head)


def test_a_restore_overwrites_nothing(store: Store, tmp_path: Path, new_store: Any) -> None:
    store.back_up(tmp_path / "backup")
    with pytest.raises(RefusedError, match="there is a store"):
        restore_store(tmp_path / "backup", store.folder)
    (store.folder / "unlearnd.toml").unlink()
    with pytest.raises(RefusedError, match="overwrites nothing"):
        restore_store(tmp_path / "backup", store.folder)
    other = lose(new_store("other"))
    with pytest.raises(RefusedError, match="belongs to another store"):
        restore_store(tmp_path / "backup", other)
    with pytest.raises(StorageError, match="is it mounted"):
        restore_store(tmp_path / "backup", tmp_path / "empty")


def test_a_backup_that_is_damaged_cut_or_does_not_open_is_told(store: Store, tmp_path: Path) -> None:
    store.back_up(tmp_path / "plain")
    store.back_up(tmp_path / "sealed", b"correct horse")
    folder = lose(store)
    with pytest.raises(InputError, match="UNLEARND_BACKUP_PASSPHRASE"):
        restore_store(tmp_path / "sealed", folder)
    with pytest.raises(DamagedStoreError, match="another passphrase"):
        restore_store(tmp_path / "sealed", folder, b"wrong")
    with pytest.raises(NotFoundError, match="no backup"):
        restore_store(tmp_path / "none", folder)
    for name, passphrase in (("plain", None), ("sealed", b"correct horse")):
        whole = (tmp_path / name).read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for number, bad in enumerate([whole[: len(whole) // 2], whole[:100], b"", b"anything", bytes(flipped)]):
            (tmp_path / f"{name}{number}").write_bytes(bad)
            with pytest.raises(UnlearndError):
                restore_store(tmp_path / f"{name}{number}", folder, passphrase)
    assert [path.name for path in folder.iterdir()] == ["storage"]


def test_a_backup_is_of_one_moment_while_others_write(store: Store, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        with closing(Ledger.open(store.ledger.url)) as ledger:
            while not stop.is_set():
                log.append_alone(ledger, [b"x"] * 7)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        made = [store.back_up(tmp_path / f"backup{number}") for number in range(5)]
    finally:
        stop.set()
        writer.join()
    assert [backup.root for backup in made] == [log.root_of_first(store.ledger, b.size).hex() for b in made]


KILLED = """
import os, signal, sys
from unlearnd.store import restore_store
real, left = os.replace, [int(sys.argv[3])]
def replace(*names):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(*names)
os.replace = replace
restore_store(sys.argv[1], sys.argv[2])
"""


def test_a_restore_that_was_killed_is_no_store_and_can_be_run_again(
    store: Store, tmp_path: Path, digests: Any, run_python: Callable[..., str]
) -> None:
    before = digests(store)
    store.back_up(tmp_path / "backup")
    folder = lose(store)
    for calls in (0, 1, 2):
        run_python(KILLED, tmp_path / "backup", folder, calls, code=-signal.SIGKILL)
        with pytest.raises(NotFoundError, match="no store"):
            unlearnd.open_store(str(folder))
    restore_store(tmp_path / "backup", folder)
    with unlearnd.open_store(str(folder)) as again:
        assert digests(again) == before
    assert not (folder / ".restoring").exists()


@pytest.mark.both_databases
def test_both_by_command(new_store: Callable[..., Store], people: Any, add: Any, tmp_path: Path, database: str) -> None:
    store = new_store()
    add(store, people())
    run = CliRunner().invoke
    given = ["backup", str(tmp_path / "backup"), "--store", str(store.folder)]
    if database == "postgresql":
        result = run(main, given)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "pg_dump" in result.stderr
        return
    result = run(main, given)
    assert result.exit_code == 0, result.output
    assert "keep it as safe" in result.stderr
    assert (
        json.loads(run(main, ["backup", str(tmp_path / "second"), "--json", "--store", str(store.folder)]).stdout)[
            "encrypted"
        ]
        is False
    )
    folder = lose(store)
    result = run(main, ["restore", str(tmp_path / "backup"), str(folder)])
    assert result.exit_code == 0, result.output
    assert run(main, ["restore", str(tmp_path / "backup"), str(folder)]).exit_code == 1
    assert run(main, ["status", "--store", str(folder)]).exit_code == 0
