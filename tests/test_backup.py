"""A backup is of one moment and for its owner alone; put back, the store is as it was, or nothing is put back."""

import json
import os
import resource
import shutil
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import unlearnd
from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.ledger import Ledger, backups, log, points
from unlearnd.rollforward import Rolled
from unlearnd.storage import draw_backup_key, key_in_slot
from unlearnd.store import Store, restore_store
from unlearnd.verify.checks import verify_receipt


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
    assert restore_store(tmp_path / "backup", folder, passphrase) == (made, Rolled())
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


@pytest.mark.parametrize("storage_is", ["as it is now", "as old as the backup"])
def test_erasures_since_a_backup_are_carried_out_again_before_anything_is_served(
    store: Store, people: Any, digests: Any, tmp_path: Path, files_holding: Any, storage_is: str
) -> None:
    rows = people()
    kept_head = store.log_head()[1].encode()
    keys = keys_of(store, ["u4", "u5", "u6"])
    store.back_up(tmp_path / "old")
    shutil.copytree(store.folder / "storage", tmp_path / "old-storage")
    (point,) = [f"d:{position}" for where in store.where_user("u7") for position in where.positions[:1]]
    done = [store.erase(["u4", "nobody"]), store.erase(["u5", "u6"], points=[point], build=False)]
    openings = [opening for erased in done for opening in erased.openings.values()]
    expected, size = {c.recipe: c.tensors for c in store.checkpoints("m")}, store.log_head()[0]
    store.export_log(str(tmp_path / "export"))
    before = {entry.request_id: store.receipt(entry.request_id) for entry in store.receipts()}
    trusted = (store.folder / "keys" / "trust.json").read_bytes()
    folder = lose(store)
    if storage_is == "as old as the backup":
        shutil.rmtree(folder / "storage")
        shutil.copytree(tmp_path / "old-storage", folder / "storage")
    assert [name for user in ("u4", "u5") for name in files_holding(folder, row_of(rows, user))] == [] or (
        storage_is == "as old as the backup"
    )
    _, since = restore_store(tmp_path / "old", folder, head=kept_head, log=str(tmp_path / "export"))
    assert (since.points > 0, since.lost, since.rotated) == (True, (), ())
    assert sorted(since.erased) == sorted(o.request for erased in done for o in erased.outcomes)
    for user in ("u4", "u5", "u6"):
        assert files_holding(folder, row_of(rows, user)) == []
    assert [name for key in keys for name in files_holding(folder, key)] == []
    with unlearnd.open_store(str(folder)) as again:
        assert [again.where_user(user) for user in ("u4", "u5", "u6")] == [[], [], []]
        assert again.where_point(point) == []
        assert again.log_head()[0] > size
        # What is in service, until a build: nothing that had seen them, and nothing but what was there before.
        served = {c.recipe: c.tensors for c in again.checkpoints("m")}
        assert served.items() <= expected.items() or storage_is == "as old as the backup"
        again.build()
        assert {c.recipe: c.tensors for c in again.checkpoints("m")}.items() >= expected.items()
        for head in (kept_head, again.log_head()[1].encode()):
            report = audit(again, head=head, replay="all")
            assert (report.failed, report.level) == ((), 5)
        for opening in openings[:1]:
            assert audit(again, opening=opening.as_bytes()).failed == ()
        for request, receipt in before.items():
            assert verify_receipt(again.receipt(request), trusted, now=datetime.now(UTC)).failed == ()
            assert again.receipt(request) == receipt
        # Asked again, they get the receipts they have; and life goes on.
        assert again.erase(["u4"]).again
        assert again.erase(["u8"]).outcomes[0].points > 0
        assert audit(again, head=kept_head).level == 4


def keys_of(store: Store, users: list[str]) -> list[bytes]:
    return list(points.user_keys(store.ledger, store.keys.handles(users)).values())


def row_of(rows: Any, user: str) -> bytes:
    return bytes(rows.only([user]).x[0].tobytes())


def test_the_story_ends_as_in_a_store_that_never_met_them(
    store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, tmp_path: Path
) -> None:
    store.back_up(tmp_path / "old")
    store.erase(["u4", "u5"])
    folder = lose(store)
    restore_store(tmp_path / "old", folder)
    other = new_store("other")
    add(other, people().without(["u3", "u4", "u5"]))
    fit(other)
    with unlearnd.open_store(str(folder)) as again:
        again.build()
        assert digests(again) == digests(other)


def test_what_came_later_and_no_log_brings_back_is_a_reason_to_refuse_and_said(
    store: Store, people: Any, add: Any, digests: Any, tmp_path: Path, files_holding: Any
) -> None:
    store.back_up(tmp_path / "old")
    later = people(10, 30, seed=9)
    later = type(later)(later.x, later.y, np.array([f"later-{user}" for user in later.user]))
    add(store, later, shards=None, slices=None)
    store.train("second", dataset="d", backend="linear", epochs=1)
    store.erase(["u4", "later-u1"])
    (open_one,) = store.receive(["u9"])
    head = store.log_head()[1].encode()
    folder = lose(store)
    with pytest.raises(RefusedError, match=r"1 models .second.*slices.*1 requests.*slice data.*--accept-losses"):
        restore_store(tmp_path / "old", folder)
    assert [path.name for path in folder.iterdir()] == ["storage"]
    _, since = restore_store(tmp_path / "old", folder, accept_losses=True)
    assert ("model", "second") in since.lost
    assert ("request", open_one.id) in since.lost
    assert files_holding(folder, row_of(later, "later-u2")) == []
    with unlearnd.open_store(str(folder)) as again:
        assert again.where_user("u4") == []
        assert [m.name for m in again.status().models] == ["m"]
        assert again.request(open_one.id).state == "refused"
        again.build()
        report = audit(again, head=head, replay="all")
        assert (report.failed, report.level) == ((), 5), "\n".join(report.lines())
        # Given again, they are there again, in slices of their own.
        add(again, later, shards=None, slices=None)
        again.train("second", dataset="d", backend="linear", epochs=1)
        again.erase(["later-u1"])
        assert audit(again, head=head).level == 4


@pytest.mark.parametrize("given", ["copy in storage", "exported log"])
def test_holds_that_were_set_or_lifted_since_a_backup_are_set_and_lifted_again(
    store: Store, digests: Any, tmp_path: Path, given: str
) -> None:
    review = datetime.now(UTC).date() + timedelta(days=20)

    def hold(request: str) -> None:
        store.hold(request, basis="legal_claims", approver="ann", review=review)

    known, lifted = store.receive(["u4", "u5"])
    hold(lifted.id)
    store.back_up(tmp_path / "old")
    hold(known.id)
    store.erase(["u7", "u8"], build=False)
    store.release(lifted.id)
    (later, carried_out) = store.receive(["u6", "u9"])
    hold(carried_out.id)
    hold(later.id)
    store.erase(["u10"], build=False)
    store.release(carried_out.id)
    store.approve(carried_out.id, identity="account_login")
    store.run_requests(build=False)
    store.build()
    store.export_log(str(tmp_path / "export"))
    expected, head = digests(store), store.log_head()[1].encode()
    before = {one.id: store.request(one.id) for one in (known, lifted, later, carried_out)}
    folder = lose(store)
    if given == "exported log":
        shutil.rmtree(folder / "storage" / "evidence" / "log")
    _, since = restore_store(
        tmp_path / "old", folder, log=str(tmp_path / "export") if given != "copy in storage" else None
    )
    assert since.lost == ()
    with unlearnd.open_store(str(folder)) as again:
        for request, entry in before.items():
            now = again.request(request)
            told = (entry.state, entry.handle, entry.due_at, entry.hold_basis, entry.hold_review, entry.paused_at)
            assert told[:5] == (now.state, now.handle, now.due_at, now.hold_basis, now.hold_review)
            assert (entry.paused_at is None) == (now.paused_at is None)
        assert [bool(again.where_user(user)) for user in ("u4", "u5", "u6", "u9", "u10")] == [True] * 3 + [False] * 2
        again.build()
        assert digests(again) == expected
        report = audit(again, head=head, replay="all")
        assert (report.failed, report.level) == ((), 5), "\n".join(report.lines())
        # A hold that was set again can be lifted, and what was on hold carried out.
        for request in (known.id, later.id):
            again.release(request)
            again.approve(request, identity="account_login")
        assert len(again.run_requests().outcomes) == 2
        assert [again.where_user(user) for user in ("u4", "u6")] == [[], []]
        report = audit(again, head=head)
        assert (report.failed, report.level) == ((), 4), "\n".join(report.lines())


def test_a_hold_of_which_the_copy_of_the_log_does_not_say_on_whom_is_a_reason_to_refuse(
    store: Store, tmp_path: Path
) -> None:
    store.back_up(tmp_path / "old")
    (later,) = store.receive(["u4"])
    review = datetime.now(UTC).date() + timedelta(days=20)
    store.hold(later.id, basis="legal_claims", approver="ann", review=review)
    folder = lose(store)
    # As an older release wrote it.
    for path in (folder / "storage" / "evidence" / "log").glob("*.json"):
        path.write_text(
            json.dumps({name: said for name, said in json.loads(path.read_text()).items() if name != "holds"})
        )
    with pytest.raises(RefusedError, match=f"request {later.id} was put on hold .* on whose data: restore a newer"):
        restore_store(tmp_path / "old", folder, accept_losses=True)
    assert [path.name for path in folder.iterdir()] == ["storage"]


@pytest.mark.both_databases
def test_an_encrypted_store_loses_nobody_but_the_erased_when_an_older_backup_is_restored(
    new_store: Callable[..., Store], people: Any, add: Any, fit: Any, digests: Any, tmp_path: Path, database: str
) -> None:
    """What is rewritten has a slot that the backup opens: the keys are in the ledger that is lost, and there."""
    store = new_store(encrypt="file")
    add(store, people(), shards=1, slices=1)
    fit(store)
    store.back_up(tmp_path / "old", b"correct horse")
    left = {f"u{number}" for number in range(40)}
    # Twice from the same backup, and each time a little later: the slice is rewritten again and again.
    for users in (["u4"], ["u5", "u6"]):
        store.erase(users)
        left -= {*users}
        head, expected = store.log_head()[1].encode(), digests(store)
        folder = lose(store)
        if database == "postgresql":
            Ledger.discard(store.ledger.url)
        _, since = restore_store(tmp_path / "old", folder, b"correct horse")
        assert since.lost == ()
        store = unlearnd.open_store(str(folder))
        assert {f"u{number}" for number in range(40) if store.where_user(f"u{number}")} == left
        store.build()
        report = audit(store, head=head, replay=1)
        assert (report.failed, report.level) == ((), 5), "\n".join(report.lines())
        assert digests(store) == expected
    store.close()


def test_what_is_rewritten_is_open_to_the_backup_s_file_alone(
    new_store: Callable[..., Store], people: Any, add: Any, tmp_path: Path
) -> None:
    """A copy of storage with all that the store has, now and later, opens nothing that was destroyed."""
    store = new_store(encrypt="file")
    add(store, people(), shards=1, slices=1)
    store.back_up(tmp_path / "old")
    store.erase(["u4"])
    with tarfile.open(tmp_path / "old") as tar:
        member = tar.extractfile("slot.key")
        assert member is not None
        slot_key = member.read()
    (path,) = [p for p in (store.folder / "storage" / "data").rglob("*") if p.is_file()]
    name, copy = str(path.relative_to(store.folder / "storage")), path.read_bytes()
    assert store.storage.vault is not None
    wrapped = key_in_slot(name, copy, slot_key)
    assert wrapped is not None
    assert store.storage.vault.open(name, copy, wrapped)
    # The next erasure destroys the object and its key; the copy of the object stays in somebody's backup of storage.
    store.erase(["u5"])
    store.back_up(tmp_path / "new")
    everything = b"".join(p.read_bytes() for p in store.folder.rglob("*") if p.is_file())
    assert slot_key not in everything
    assert wrapped not in everything
    with tarfile.open(tmp_path / "new") as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    assert not any(slot_key in data or wrapped in data for data in files.values())
    assert key_in_slot(name, copy, files["slot.key"]) is None
    # Nor has a store that was restored from it the key of the slots: it would open copies from then on.
    folder = lose(store)
    restore_store(tmp_path / "old", folder)
    assert slot_key not in b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())


def test_a_slot_fits_its_object_and_nothing_else(new_store: Callable[..., Store]) -> None:
    vault = new_store(encrypt="file").storage.vault
    assert vault is not None
    (one, first), (two, second), (other, _) = draw_backup_key(), draw_backup_key(), draw_backup_key()
    data, wrapped = vault.seal("a/b", [b"rows"], [first, second])
    assert vault.open("a/b", data, wrapped) == b"rows"
    assert key_in_slot("a/b", data, one) == key_in_slot("a/b", data, two) == wrapped
    assert key_in_slot("a/b", data, other) is None
    assert key_in_slot("a/b", vault.seal("a/b", [b"rows"])[0], one) is None
    with pytest.raises(DamagedStoreError, match="its slot does not fit"):
        key_in_slot("a/c", data, one)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(DamagedStoreError, match=r"does not fit|is not encrypted"):
            vault.open("a/b", changed, wrapped)
    for length in range(len(data)):
        with pytest.raises(DamagedStoreError, match=r"does not fit|is not encrypted"):
            vault.open("a/b", data[:length], wrapped)


def test_a_backup_cannot_open_points_that_came_after_it(
    new_store: Callable[..., Store], people: Any, add: Any, tmp_path: Path
) -> None:
    """Whoever destroys the backups that know a person has destroyed all that opens copies of their rows."""
    store = new_store(encrypt="file")
    rows = people()
    add(store, rows.only([f"u{number}" for number in range(20)]), shards=1, slices=1)
    store.back_up(tmp_path / "old")
    add(store, rows.only([f"u{number}" for number in range(20, 40)]), shards=None, slices=None)
    store.ingest("later", rows.x, user=rows.user, label=rows.y, shards=1, slices=1)
    store.erase(["u4", "u24"])
    with tarfile.open(tmp_path / "old") as tar:
        slot_key = tar.extractfile("slot.key").read()  # type: ignore[union-attr]
    found = {}
    for path in (store.folder / "storage" / "data").rglob("*.safetensors"):
        name = str(path.relative_to(store.folder / "storage"))
        key = key_in_slot(name, path.read_bytes(), slot_key)
        found[name] = key is not None
    assert len(found) == 3
    assert [[*name.split("/")[1:4], name.split("/")[4][:12]] for name, able in found.items() if able] == [
        ["d", "0001", "0001", "0" * 12]
    ]


def test_the_newest_backups_are_remembered_and_one_that_failed_is_not(
    new_store: Callable[..., Store], people: Any, add: Any, tmp_path: Path
) -> None:
    store, plain = new_store(encrypt="file"), new_store("other")
    for one in (store, plain):
        add(one, people())
    plain.back_up(tmp_path / "plain")
    (tmp_path / "full").mkdir()
    # Small enough for nothing to fit: the copy of the ledger fails in the middle.
    with limited(20_000), pytest.raises((StorageError, OSError)):
        store.back_up(tmp_path / "full" / "backup")
    assert remembered(store) == remembered(plain) == []
    ids: list[str] = []
    for number in range(backups.KEPT + 2):
        moment = f"2026-01-01T00:00:{number:02d}Z"
        ids.append(f"{number:02d}")
        backups.enter(store.ledger, backups.Made(ids[-1], bytes(32)), moment)
    assert remembered(store) == ids[2:]


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file grow beyond `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def remembered(store: Store) -> list[str]:
    with store.ledger.read() as connection:
        return list(connection.exec_driver_sql("SELECT id FROM backup ORDER BY made_at").scalars())


def test_slices_that_were_rewritten_without_a_slot_for_a_backup_are_said_to_be_lost(
    new_store: Callable[..., Store], people: Any, add: Any, fit: Any, tmp_path: Path, place_of: Any
) -> None:
    """As by an older release: their keys came after the backup, and a copy of storage alone must never be readable."""
    store = new_store(encrypt="file")
    rows = people()
    add(store, rows, shards=2, slices=2)
    fit(store)
    store.back_up(tmp_path / "old")
    with store.ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM backup")
    where = place_of(store, "u4")
    store.erase(["u4"])
    store.back_up(tmp_path / "new")
    head = store.log_head()[1].encode()
    folder = lose(store)
    with pytest.raises(RefusedError, match=rf"1 slices \(d {where[0]} {where[1]}\).*under keys.*newer backup"):
        restore_store(tmp_path / "old", folder)
    # A backup from after the erasure loses nothing.
    restore_store(tmp_path / "new", folder)
    with unlearnd.open_store(str(folder)) as again:
        assert (again.where_user("u4"), audit(again, head=head).level) == ([], 4)
        folder = lose(again)
    _, since = restore_store(tmp_path / "old", folder, accept_losses=True)
    assert since.lost == (("slice", "d", *where),)
    with unlearnd.open_store(str(folder)) as again:
        gone = [user for user in sorted(set(rows.user.tolist())) if not again.where_user(user)]
        assert "u4" in gone
        # What was lost can be added again, and all is as it should be.
        add(again, rows.only([user for user in gone if user != "u4"]), shards=None, slices=None)
        again.build()
        report = audit(again, head=head)
        assert (report.failed, report.level) == ((), 4), "\n".join(report.lines())


def test_a_key_that_was_changed_after_the_backup_is_changed_again(store: Store, tmp_path: Path) -> None:
    store.back_up(tmp_path / "old")
    store.rotate_key("log")
    store.rotate_key("receipt")
    store.erase(["u4"])
    head = store.log_head()[1].encode()
    folder = lose(store)
    _, since = restore_store(tmp_path / "old", folder)
    assert since.rotated == ("log", "receipt")
    with unlearnd.open_store(str(folder)) as again:
        again.erase(["u5"])
        assert audit(again, head=head).level == 4
        (first, *_, last) = again.receipts()
        for entry in (first, last):
            trusted = (folder / "keys" / "trust.json").read_bytes()
            assert verify_receipt(again.receipt(entry.request_id), trusted, now=datetime.now(UTC)).failed == ()


def test_an_old_ledger_put_in_place_by_hand_is_noticed_at_the_first_opening(store: Store, tmp_path: Path) -> None:
    Ledger.open(store.ledger.url).copy_file(tmp_path / "ledger.sqlite")
    store.erase(["u4"])
    store.close()
    for ending in ("-wal", "-shm"):
        (store.folder / f"ledger.sqlite{ending}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "ledger.sqlite", store.folder / "ledger.sqlite")
    for command in ("status", "predict m x.npz", "erase --user u5", "build", "audit"):
        result = CliRunner().invoke(main, [*command.split(), "--store", str(store.folder)])
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert "unlearnd restore" in result.stderr


def test_without_a_copy_of_the_log_an_old_backup_is_refused_unless_the_exported_one_is_given(
    store: Store, tmp_path: Path
) -> None:
    store.back_up(tmp_path / "old")
    request = store.erase(["u4"]).outcomes[0].request
    store.export_log(str(tmp_path / "export"))
    head = store.log_head()[1].encode()
    folder = lose(store)
    shutil.rmtree(folder / "storage" / "evidence" / "log")
    with pytest.raises(RefusedError, match=f"1 requests were carried out after .* {request}.*--log"):
        restore_store(tmp_path / "old", folder)
    with pytest.raises(RefusedError, match="contradict what is signed"):
        restore_store(tmp_path / "old", folder, head=head)
    assert [path.name for path in folder.iterdir()] == ["storage"]
    restore_store(tmp_path / "old", folder, head=head, log=str(tmp_path / "export"))
    with unlearnd.open_store(str(folder)) as again:
        assert again.where_user("u4") == []


def test_a_log_that_is_not_the_backups_own_is_refused(store: Store, new_store: Any, tmp_path: Path) -> None:
    store.back_up(tmp_path / "old")
    other = new_store("other")
    for _ in range(40):
        other.receive(["x"])
    other.export_log(str(tmp_path / "export"))
    folder = lose(store)
    with pytest.raises(UnlearndError, match="tree head"):
        restore_store(tmp_path / "old", folder, log=str(tmp_path / "export"))
    assert [path.name for path in folder.iterdir()] == ["storage"]


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
            with pytest.raises(UnlearndError):
                restore_store(tmp_path / f"{name}{number}", tmp_path / "new", passphrase)
    assert [path.name for path in folder.iterdir()] == ["storage"]
    assert not (tmp_path / "new").exists()


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
    result = run(main, given)
    assert result.exit_code == 0, result.output
    assert "keep it as safe" in result.stderr
    assert (
        json.loads(run(main, ["backup", str(tmp_path / "second"), "--json", "--store", str(store.folder)]).stdout)[
            "encrypted"
        ]
        is False
    )
    store.erase(["u4"])
    head = store.log_head()[1].encode()
    folder = lose(store)
    if database == "postgresql":
        refused = run(main, ["restore", str(tmp_path / "backup"), str(folder)])
        assert (refused.exit_code, "overwrites nothing" in refused.stderr) == (1, True), refused.output
        Ledger.discard(store.ledger.url)
    result = run(main, ["restore", str(tmp_path / "backup"), str(folder)])
    assert result.exit_code == 0, result.output
    assert "Carried out again: 1 erasure, which took" in result.stdout
    assert run(main, ["restore", str(tmp_path / "backup"), str(folder)]).exit_code == 1
    assert run(main, ["status", "--store", str(folder)]).exit_code == 0
    with unlearnd.open_store(str(folder)) as again:
        assert again.ledger.url == store.ledger.url
        assert again.where_user("u4") == []
        assert audit(again, head=head).level == 4


@pytest.mark.both_databases
def test_a_backup_goes_to_another_database_than_it_came_from(
    new_store: Callable[..., Store], people: Any, add: Any, fit: Any, tmp_path: Path, digests: Any, ledger_url: Any
) -> None:
    store = new_store()
    add(store, people())
    fit(store)
    before = digests(store)
    store.back_up(tmp_path / "backup")
    store.erase(["u4"], build=False)
    folder = lose(store)
    restore_store(tmp_path / "backup", folder, ledger="sqlite:///elsewhere.sqlite")
    with unlearnd.open_store(str(folder)) as again:
        assert again.ledger.url == f"sqlite:///{folder / 'elsewhere.sqlite'}"
        assert digests(again).items() <= before.items()
        assert audit(again).level == 4


def test_a_dump_of_the_database_that_was_put_back_is_brought_up_to_the_log_by_backup_and_restore(
    new_store: Callable[..., Store], people: Any, add: Any, fit: Any, tmp_path: Path, postgres: Any
) -> None:
    url = postgres.url("dumped")
    store = new_store(ledger=url)
    add(store, people())
    fit(store)
    tools = Path(postgres.run("SELECT setting FROM pg_config WHERE name = 'BINDIR'")[0][0])
    place = ["-h", postgres.socket, "-U", "postgres", "-d", postgres.database]
    dump = tmp_path / "dump.sql"
    subprocess.run([tools / "pg_dump", *place, "--schema=dumped", "-f", dump], check=True)
    store.erase(["u4", "u5"])
    head = store.log_head()[1].encode()
    store.close()
    postgres.run("DROP SCHEMA dumped CASCADE")
    subprocess.run([tools / "psql", *place, "-q", "-o", os.devnull, "-v", "ON_ERROR_STOP=1", "-f", dump], check=True)
    run, named = CliRunner().invoke, ["--store", str(store.folder)]
    refused = run(main, ["status", *named])
    assert (refused.exit_code, "unlearnd backup" in refused.stderr) == (1, True), refused.output
    made = run(main, ["backup", str(tmp_path / "backup"), *named])
    assert made.exit_code == 0, made.output
    assert "The ledger lacks the last" in made.stderr
    folder = lose(store)
    Ledger.discard(url)
    result = run(main, ["restore", str(tmp_path / "backup"), str(folder)])
    assert result.exit_code == 0, result.output
    assert "Carried out again: 2 erasures, which took" in result.stdout
    with unlearnd.open_store(str(folder)) as again:
        assert [again.where_user(user) for user in ("u4", "u5")] == [[], []]
        assert again.behind == 0
        again.build()
        assert audit(again, head=head).level == 4
    postgres.run("DROP SCHEMA dumped CASCADE")
