"""Encrypted objects: nothing readable at rest, the same bits, and no copy can be read once a key is destroyed."""

import shutil
import sqlite3
import stat
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unlearnd.audit import audit
from unlearnd.checkpoints import read_state
from unlearnd.dossier import predicate_of
from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError
from unlearnd.keys import open_wrapper
from unlearnd.storage import Storage, Vault
from unlearnd.store import Store
from unlearnd.verify.checks import verify_receipt


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    return new_store("sealed", encrypt="file")


def test_an_encrypted_store_has_the_bits_of_a_plain_one_and_nothing_readable_in_storage(
    store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any
) -> None:
    rows, plain = people(), new_store("plain")
    for one in (store, plain):
        add(one, rows)
        fit(one)
    assert digests(store) == digests(plain)
    wanted = rows.x[0].tobytes()
    kept = {path: path.read_bytes() for path in (store.folder / "storage").rglob("*") if path.is_file()}
    assert any(wanted in p.read_bytes() for p in (plain.folder / "storage").rglob("*") if p.is_file())
    assert not any(wanted in data or b"position" in data for data in kept.values())
    store.erase(["u3"])
    plain.erase(["u3"])
    assert digests(store) == digests(plain)
    assert (store.model("m").predict(rows.x).scores == plain.model("m").predict(rows.x).scores).all()
    report = audit(store, replay=3)
    assert report.failed == ()
    assert report.level == 5


def test_a_copy_from_before_an_erasure_cannot_be_opened_with_the_keys_of_after(
    store: Store, people: Any, add: Any, fit: Any, tmp_path: Path
) -> None:
    add(store, people(), shards=1)
    fit(store)
    place = store.where_user("u3")[0].slice
    before = [c for c in store.checkpoints("m") if c.slice >= place]
    shutil.copytree(store.folder / "storage", tmp_path / "backup")
    copy = Storage(str(tmp_path / "backup"))
    copy.vault = Vault(open_wrapper(store.folder / "keys"))
    assert read_state(copy, before[0]), "with its key the copy is readable"
    outcome = store.erase(["u3"]).outcomes[0]
    with closing(sqlite3.connect(store.folder / "ledger.sqlite")) as ledger:
        left = {key for (key,) in ledger.execute("SELECT key FROM checkpoint UNION SELECT key FROM segment") if key}
    # No key that is left opens the copies, and the destroyed ones are nowhere in the ledger's files.
    everything = b"".join(path.read_bytes() for path in store.folder.glob("ledger.sqlite*"))
    for checkpoint in before:
        assert checkpoint.key not in left
        assert checkpoint.key not in everything
        for key in left:
            with pytest.raises(DamagedStoreError, match="does not fit"):
                copy.vault.open(checkpoint.path, copy.read(checkpoint.path), key)
    receipt = store.receipt(outcome.request)
    said = predicate_of(receipt)
    assert said["encryption"] == {"cipher": "AES-256-GCM", "keys": "destroyed"}
    assert "object-keys" in said["scope"]["claims"]
    trust = (store.folder / "keys" / "trust.json").read_bytes()
    assert verify_receipt(receipt, trust, now=store.clock()).failed == ()


def test_a_plain_store_claims_nothing_about_keys(new_store: Any, people: Any, add: Any) -> None:
    store = new_store()
    add(store, people())
    said = predicate_of(store.receipt(store.erase(["u3"]).outcomes[0].request))
    assert "encryption" not in said
    assert "object-keys" not in said["scope"]["claims"]


def test_an_object_is_bound_to_its_name_and_to_its_bytes(store: Store) -> None:
    vault = store.storage.vault
    assert vault is not None
    data, key = vault.seal("a/b", [b"one ", memoryview(b"two")])
    assert vault.open("a/b", data, key) == b"one two"
    other = vault.seal("a/b", [b"one two"])
    assert other[0] != data
    assert other[1] != key
    changed = data[:-1] + bytes([data[-1] ^ 1])
    for name, given, wrapped in (
        ("a/c", data, key),
        ("a/b", changed, key),
        ("a/b", data, other[1]),
        ("a/b", data, b""),
    ):
        with pytest.raises(DamagedStoreError, match="does not fit"):
            vault.open(name, given, wrapped)
    with pytest.raises(DamagedStoreError, match="not encrypted"):
        vault.open("a/b", b"plain", key)


def test_an_audit_holds_after_damaged_checkpoints_were_made_anew(
    store: Store, people: Any, add: Any, fit: Any, digests: Any
) -> None:
    """The same state is other bytes each time it is encrypted, and the list of what is in service is older."""
    add(store, people())
    fit(store)
    store.erase(["u3"])
    before = digests(store)
    for path in (store.folder / "storage" / "checkpoints").rglob("*.sealed"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert sum(build.damaged for build in store.build()) == len(before)
    assert digests(store) == before
    report = audit(store)
    assert (report.failed, report.level) == ((), 4), "\n".join(report.lines())


def test_a_store_without_its_wrapping_key_says_so(store: Store, people: Any, add: Any) -> None:
    add(store, people())
    (store.folder / "keys" / "store.key").unlink()
    with pytest.raises(NotFoundError, match=r"no key file .*store.key"):
        Store.open(store.folder)


def test_encryption_is_from_the_first_day_or_not_at_all(store: Store, new_store: Any) -> None:
    plain = new_store("plain")
    for one, old, new in (
        (store, 'wrapper = "file"', 'wrapper = "none"'),
        (plain, "[keys]", '[keys]\nwrapper = "file"'),
    ):
        path = one.folder / "unlearnd.toml"
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(RefusedError, match="since the store was made"):
            Store.open(one.folder)
    with pytest.raises(NotFoundError, match="no wrapper 'kms'; installed: file"):
        new_store("other", encrypt="kms")


@pytest.mark.parametrize("where", ["keys", "keys/store.key", "keys/pepper.key", "ledger.sqlite", "storage"])
def test_what_others_may_read_is_refused_at_open(store: Store, where: str) -> None:
    path = store.folder / where
    path.chmod(path.stat().st_mode | 0o040)
    with pytest.raises(RefusedError, match=r"is open to others \(mode 0[67]40\): close it with `chmod [67]00"):
        Store.open(store.folder)
    path.chmod(path.stat().st_mode & 0o700)
    Store.open(store.folder).close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_store_whose_folder_is_open_to_others_is_refused(store: Store, mode: int) -> None:
    """What is in it may be closed to them, and they could still put something else in its place."""
    store.folder.chmod(mode)
    with pytest.raises(RefusedError, match=rf"is open to others \(mode {mode:04o}\): close it with `chmod 700"):
        Store.open(store.folder)
    store.folder.chmod(0o700)
    Store.open(store.folder).close()


def test_a_new_store_closes_its_folder_unless_others_have_something_in_it(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "full" / "notes.txt").write_text("ours")
    Store.create(tmp_path / "empty").close()
    Store.open(tmp_path / "empty").close()
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    with pytest.raises(RefusedError, match="full is open to others"):
        Store.create(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


# Damage.


def headed(length: int, rest: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 7,
        headed(2**63),
        headed(10**12, b"{" * 100),
        headed(100, b" " * 99),
        headed(2, b"xx"),
        headed(74, b'{"x":{"dtype":"F32","shape":[4000000000,4000000000],"data_offsets":[0,8]}}xxxxxxxx'),
        headed(17 << 20, b" " * (17 << 20)),
    ],
    ids=["empty", "short", "huge header", "long header", "cut header", "no JSON", "lying shape", "header too long"],
)
def test_a_header_that_lies_is_damage_and_makes_nothing(data: bytes) -> None:
    from unlearnd.tensors import read_tensors

    tracemalloc.start()
    try:
        with pytest.raises(DamagedStoreError, match="a/b cannot be read"):
            read_tensors(data, "a/b")
        # Refused before anything of the size that it claims is asked for, or the header read.
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_damaged_checkpoint_is_trained_anew_from_the_one_before(
    new_store: Any, people: Any, add: Any, fit: Any, digests: Any
) -> None:
    store = new_store()
    add(store, people(), shards=1)
    fit(store)
    before = digests(store)
    damaged = next(c for c in store.checkpoints("m") if c.slice == 3)
    path = store.folder / "storage" / damaged.path
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert "S1" in audit(store).failed
    assert store.discard_damaged() == 2, "the damaged one and the one made from it"
    built = store.build()
    assert built[0].checkpoints == 2
    assert digests(store) == before
    assert audit(store).failed == ()


def test_a_path_in_the_ledger_never_leads_out_of_storage(new_store: Any, people: Any, add: Any, fit: Any) -> None:
    store = new_store()
    add(store, people(), shards=1)
    fit(store)
    (store.folder / "outside").write_bytes(b"not yours")
    for sql in ("UPDATE checkpoint SET path = '../outside'", "UPDATE segment SET path = '../outside'"):
        with closing(sqlite3.connect(store.folder / "ledger.sqlite")) as ledger, ledger:
            ledger.execute(sql)
    with Store.open(store.folder) as again:
        from unlearnd.errors import UnlearndError

        for work in (lambda: again.model("m").predict(np.zeros((1, 5), np.float32)), lambda: again.erase(["u3"])):
            with pytest.raises(UnlearndError, match="leads out of the storage root"):
                work()
        assert again.folder.joinpath("outside").read_bytes() == b"not yours"


def test_a_missing_slice_is_told_with_what_can_be_done(new_store: Any, people: Any, add: Any, fit: Any) -> None:
    store = new_store()
    add(store, people(), shards=1)
    fit(store)
    saved = {path: path.read_bytes() for path in (store.folder / "storage" / "data").rglob("*.safetensors")}
    for path in saved:
        path.unlink()
    store.model("m").predict(np.zeros((1, 5), np.float32))
    with pytest.raises(DamagedStoreError, match=r"restore that object from a backup .* shard 1 of dataset 'd'"):
        store.train("n", dataset="d", backend="linear", epochs=1)
    with pytest.raises(DamagedStoreError, match=r"restore that object from a backup .* is carried out then"):
        store.erase(["u3"])
    for path, data in saved.items():
        path.write_bytes(data)
    # What was asked for meanwhile is carried out, with one receipt.
    assert store.build()
    assert (store.where_user("u3"), len(store.receipts())) == ([], 1)
    assert audit(store).failed == ()


def test_who_is_not_in_a_missing_slice_is_erased_and_what_is_asked_about_it_meanwhile_waits(
    new_store: Any, people: Any, add: Any, fit: Any, place_of: Any
) -> None:
    """One erasure that cannot go on must neither stop those of others nor lose requests that come in after it."""
    store = new_store()
    rows = people()
    add(store, rows, shards=2, slices=1)
    fit(store)
    stuck = [user for user in sorted(set(rows.user.tolist())) if place_of(store, user)[0] == 1][:4]
    free = [user for user in sorted(set(rows.user.tolist())) if place_of(store, user)[0] == 2][:2]
    (path,) = (store.folder / "storage" / "data" / "d" / "0001").rglob("*.safetensors")
    saved = path.read_bytes()
    path.unlink()
    for user in stuck[:2]:
        with pytest.raises(DamagedStoreError, match="is carried out then"):
            store.erase([user])
    # Somebody else's: done, with a receipt, and what is in the way of the others is told.
    erased = store.erase([free[0]], build=False)
    assert (erased.outcomes[0].found, store.where_user(free[0])) == (True, [])
    with pytest.raises(DamagedStoreError, match=r"asked for is done, but an erasure that was begun .*that object"):
        erased.check_finished()
    # Asked for together with one that waits already.
    with pytest.raises(DamagedStoreError, match="is carried out then"):
        store.erase([stuck[0], free[1]], build=False)
    assert store.where_user(free[1]) == []
    with pytest.raises(DamagedStoreError, match="is carried out then"):
        store.erase([stuck[1]])
    with pytest.raises(DamagedStoreError, match="is carried out then"):
        store.erase([stuck[2]])
    assert len(store.receipts()) == 2
    path.write_bytes(saved)
    store.build()
    assert [store.where_user(user) for user in stuck[:3]] == [[], [], []]
    assert store.where_user(stuck[3]) != []
    assert len(store.receipts()) == 5
    report = audit(store)
    assert report.failed == (), "\n".join(report.lines())
