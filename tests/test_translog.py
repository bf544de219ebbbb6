"""The log against a naive recomputation and against the auditor's code, which shares nothing with it."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd import steps
from unlearnd.audit import audit
from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError, UnlearndError
from unlearnd.keys import create_signer, open_signer, retire_signer
from unlearnd.ledger import Ledger, log
from unlearnd.merkle import leaf_hash, prove_consistency, prove_inclusion
from unlearnd.storage import Storage
from unlearnd.store import Store
from unlearnd.translog import export, key_in_use, prove_leaf, receipt_path, revoke_key, rotate_key, sign_head, trust
from unlearnd.verify import LocalFolder, verify_receipt
from unlearnd.verify.exports import TILE, read_checkpoint, read_leaves, tile_path
from unlearnd.verify.proofs import read_proof
from unlearnd.verify.trees import check_consistency, check_inclusion
from unlearnd.verify.trust import check_head, read_head, read_trust

MOST = 130
PAYLOADS = [f"leaf {number}".encode() for number in range(MOST)]


def naive_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + naive_root(leaves[:k]) + naive_root(leaves[k:])).digest()


ROOTS = [naive_root(PAYLOADS[:size]) for size in range(MOST + 1)]


pytestmark = pytest.mark.both_databases


@pytest.fixture
def ledger(ledger_url: Callable[[str], str]) -> Iterator[Ledger]:
    ledger = Ledger.create(ledger_url("ledger"))
    yield ledger
    ledger.close()


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    return new_store()


@pytest.fixture
def erased(store: Store) -> Store:
    """A store with a model and two erasures."""
    x = np.random.default_rng(2).normal(size=(60, 3)).astype(np.float32)
    user = np.array([f"u{number % 20}" for number in range(60)])
    store.ingest("d", x, user=user, label=np.arange(60) % 3, shards=2, slices=2)
    store.train("m", dataset="d", backend="linear", epochs=1)
    store.erase(["u1"])
    store.erase(["u2", "u3"], build=False)
    return store


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64, 130])
def test_batches_of_any_size_give_the_root_of_rfc_6962_at_every_size(ledger: Ledger, batch: int) -> None:
    assert log.size_and_root(ledger) == (0, ROOTS[0])
    for begin in range(0, MOST, batch):
        assert log.append_alone(ledger, PAYLOADS[begin : begin + batch]) == begin
        size = min(begin + batch, MOST)
        assert log.size_and_root(ledger) == (size, ROOTS[size])
    assert [log.root_of_first(ledger, size) for size in range(MOST + 1)] == ROOTS
    assert log.leaves(ledger, 0, MOST) == PAYLOADS
    assert log.leaves(ledger, 5, 9) == PAYLOADS[5:9]


def test_every_inclusion_proof_up_to_130_leaves_satisfies_the_auditor(ledger: Ledger) -> None:
    log.append_alone(ledger, PAYLOADS)
    with ledger.read() as connection:
        node = cache(log._node(connection))  # thousands of proofs from the same few hundred hashes
        for size in range(1, MOST + 1):
            for index in range(size):
                path = prove_inclusion(index, size, node)
                check_inclusion(index, size, leaf_hash(PAYLOADS[index]), path, ROOTS[size])


def test_every_consistency_proof_up_to_130_leaves_satisfies_the_auditor(ledger: Ledger) -> None:
    log.append_alone(ledger, PAYLOADS)
    with ledger.read() as connection:
        node = cache(log._node(connection))
        for new in range(1, MOST + 1):
            for old in range(1, new + 1):
                check_consistency(old, new, ROOTS[old], ROOTS[new], prove_consistency(old, new, node))


def test_only_hashes_of_perfect_subtrees_are_kept(ledger: Ledger) -> None:
    log.append_alone(ledger, PAYLOADS)
    with ledger.read() as connection:
        counts = dict(map(tuple, connection.exec_driver_sql("SELECT level, count(*) FROM node GROUP BY level")))
    assert counts == {level: MOST >> level for level in range(8)}


@pytest.mark.parametrize("table", ["leaf", "node"])
@pytest.mark.parametrize("change", ["UPDATE {} SET number = number + 1000", "DELETE FROM {}"])
def test_leaves_and_their_hashes_cannot_be_changed_by_mistake(ledger: Ledger, table: str, change: str) -> None:
    log.append_alone(ledger, PAYLOADS[:5])
    with pytest.raises(UnlearndError, match="append-only"), ledger.write() as connection:
        connection.exec_driver_sql(change.format(table))
    assert log.size_and_root(ledger) == (5, ROOTS[5])


def test_a_leaf_and_what_it_records_are_there_together_or_not_at_all(ledger: Ledger) -> None:
    log.append_alone(ledger, PAYLOADS[:3])

    def fail() -> None:
        with ledger.write() as connection:
            log.append(connection, PAYLOADS[3:7])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert log.size_and_root(ledger) == (3, ROOTS[3])


APPEND = """
import sys
from unlearnd.ledger import Ledger, log
ledger = Ledger.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    log.append_alone(ledger, [f"{sys.argv[2]} {number} {place}".encode() for place in range(3)])
"""


def test_two_processes_append_at_once_and_nothing_is_lost(ledger: Ledger) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(unlearnd.__file__).parent.parent)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", APPEND, ledger.url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in ("one", "two")
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    for child in children:
        child.communicate()
    leaves = log.leaves(ledger, 0, 1000)
    assert sorted(leaves) == sorted(
        f"{name} {number} {place}".encode() for name in ("one", "two") for number in range(40) for place in range(3)
    )
    assert log.size_and_root(ledger) == (240, naive_root(leaves))
    # Each batch is in one piece, and each process's batches in order.
    batches = [leaf.rsplit(b" ", 1)[0] for leaf in leaves[::3]]
    assert [batch for batch in batches for _ in range(3)] == [leaf.rsplit(b" ", 1)[0] for leaf in leaves]
    for name in (b"one", b"two"):
        mine = [int(batch.split()[1]) for batch in batches if batch.startswith(name)]
        assert mine == sorted(mine)


def test_what_is_not_durable_is_never_signed(store: Store) -> None:
    size, before = sign_head(store.translog)
    seen = []

    def fail() -> None:
        with store.ledger.write() as connection:
            log.append(connection, [b"never durable"])
            with Store.open(store.folder) as other:
                seen.append(sign_head(other.translog))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [(size, before)]
    assert sign_head(store.translog) == (size, before)


def test_signing_the_same_size_again_gives_the_same_bytes(store: Store) -> None:
    size, first = sign_head(store.translog)
    with store.ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM tree_head")
    assert sign_head(store.translog) == (size, first)


def test_a_tree_head_satisfies_the_auditor_and_names_the_log(store: Store) -> None:
    size, text = sign_head(store.translog)
    note, head = read_head(text.encode())
    check_head(note, head, read_trust(trust(store.translog)))
    assert (head.origin, head.size) == (f"unlearnd.dev/log/{store.config.store_id}", size)
    assert head.root == naive_root(log.leaves(store.ledger, 0, size))


def test_every_leaf_of_a_store_can_be_proven(erased: Store) -> None:
    size, _ = sign_head(erased.translog)
    for index, leaf in enumerate(log.leaves(erased.ledger, 0, size)):
        proof = read_proof(prove_leaf(erased.translog, index).encode())
        head = read_head(proof.note)[1]
        check_inclusion(proof.index, head.size, leaf_hash(leaf), proof.path, head.root)
    for index in (-1, size):
        with pytest.raises(NotFoundError):
            prove_leaf(erased.translog, index)


@pytest.mark.parametrize("extra", [0, 1, 256, 600])
def test_an_export_is_tiles_that_the_auditor_reads(store: Store, tmp_path: Path, extra: int) -> None:
    log.append_alone(store.ledger, [f"x{number}".encode() for number in range(extra)])
    size = export(store.translog, Storage(str(tmp_path / "export")))
    folder = LocalFolder(tmp_path / "export")
    head = read_head(read_checkpoint(folder))[1]
    leaves = list(read_leaves(folder, size))
    assert leaves == log.leaves(store.ledger, 0, size)
    assert (head.size, head.root) == (size, naive_root(leaves))
    # Tiles of hashes: every level, full ones and the part at the end.
    hashes = [leaf_hash(leaf) for leaf in leaves]
    level = 0
    while hashes:
        for begin in range(0, len(hashes), TILE):
            width = min(TILE, len(hashes) - begin)
            tile = (tmp_path / "export" / tile_path(level, begin // TILE, width)).read_bytes()
            assert tile == b"".join(hashes[begin : begin + width])
        full = len(hashes) // TILE
        hashes = [_root(hashes[n * TILE : (n + 1) * TILE]) for n in range(full)]
        level += 1


def _root(hashes: list[bytes]) -> bytes:
    while len(hashes) > 1:
        hashes = [hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]


def test_a_fresh_export_verifies_with_every_receipt_in_it(erased: Store, tmp_path: Path) -> None:
    target = tmp_path / "export"
    export(erased.translog, Storage(str(target)))
    trusted = (target / "trust.json").read_bytes()
    receipts = sorted((target / "receipts").iterdir())
    assert len(receipts) == 3
    for path in receipts:
        report = verify_receipt(
            path.read_bytes(), trusted, now=datetime.now(UTC), export=LocalFolder(target), older_head=None
        )
        assert report.failed == (), "\n".join(report.lines())
        assert {c.id for c in report.checks if c.result.value == "PASS"} >= {"R1", "R3", "R4", "R6", "L2", "L3", "D1"}


def test_an_export_can_be_brought_up_to_date(erased: Store, tmp_path: Path) -> None:
    target = tmp_path / "export"
    export(erased.translog, Storage(str(target)))
    older = (target / "checkpoint").read_bytes()
    (outcome,) = erased.erase(["u4"]).outcomes
    size = export(erased.translog, Storage(str(target)))
    report = verify_receipt(
        (target / "receipts" / f"{outcome.request}.receipt.json").read_bytes(),
        (target / "trust.json").read_bytes(),
        now=datetime.now(UTC),
        export=LocalFolder(target),
        older_head=older,
    )
    assert report.failed == (), "\n".join(report.lines())
    assert report["L1"].result.value == "PASS"
    assert read_head((target / "checkpoint").read_bytes())[1].size == size


def test_an_export_names_nobody_and_holds_no_key(erased: Store, tmp_path: Path, ask_ledger: Any) -> None:
    export(erased.translog, Storage(str(tmp_path / "export")))
    secrets = [bytes(key) for (key,) in ask_ledger(erased.folder, "SELECT key FROM users WHERE key IS NOT NULL")]
    secrets += [bytes(handle) for (handle,) in ask_ledger(erased.folder, "SELECT handle FROM users")]
    assert len(secrets) == 37
    secrets += [erased.keys.pepper, erased.keys.placement]
    whole = b"\n".join(path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file())
    for secret in secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)):
            assert form not in whole
    assert b"PRIVATE" not in whole


# Keys.


def heads_hold(store: Store) -> None:
    """Check that every tree head ever kept is signed by a key that counted then, and is of this log."""
    trusted = read_trust(trust(store.translog))
    leaves = log.leaves(store.ledger, 0, 100_000)
    for size, text in log.all_heads(store.ledger):
        note, head = read_head(text.encode())
        check_head(note, head, trusted)
        assert head.root == naive_root(leaves[:size])


def test_a_rotated_log_key_signs_from_its_own_leaf_on(erased: Store) -> None:
    new = rotate_key(erased.translog, "log", "2026-01-01T00:00:00Z")
    size, _ = log.size_and_root(erased.ledger)
    assert new.since == size - 1
    heads_hold(erased)
    with Store.open(erased.folder) as again:
        again.erase(["u5"])
        heads_hold(again)


def test_a_process_that_was_open_during_a_rotation_signs_with_the_new_keys(erased: Store) -> None:
    erased.translog.log_signer, erased.translog.receipt_signer  # noqa: B018  opened, and kept
    with Store.open(erased.folder) as other:
        other.rotate_key("log")
        other.rotate_key("receipt")
    (outcome,) = erased.erase(["u5"]).outcomes
    heads_hold(erased)
    data = erased.storage.read(receipt_path(outcome.request))
    assert verify_receipt(data, trust(erased.translog), now=datetime.now(UTC)).failed == ()


def test_a_key_file_that_is_not_the_stores_signs_nothing(erased: Store, tmp_path: Path) -> None:
    with unlearnd.create_store(str(tmp_path / "other")) as other:
        for name in ("log.key", "receipt.key"):
            (erased.folder / "keys" / name).write_bytes((other.folder / "keys" / name).read_bytes())
    before = log.all_heads(erased.ledger)
    with Store.open(erased.folder) as again, pytest.raises(DamagedStoreError, match="key"):
        again.erase(["u5"])
    assert log.all_heads(erased.ledger) == before


def test_receipts_that_wait_are_signed_before_the_key_changes(erased: Store) -> None:
    def stop(step: steps.Step) -> None:
        if step is steps.Step.ERASE_REMOVED:
            raise KeyboardInterrupt

    steps.watcher = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            erased.erase(["u5"])
    finally:
        steps.watcher = None
    rotate_key(erased.translog, "receipt", "2026-01-01T00:00:00Z")
    for entry in log.receipt_entries(erased.ledger):
        data = erased.storage.read(receipt_path(entry.request_id))
        assert verify_receipt(data, trust(erased.translog), now=datetime.now(UTC)).failed == ()


@pytest.mark.parametrize("role", ["log", "receipt"])
@pytest.mark.parametrize("made", [False, True], ids=["before the new key was made", "after"])
def test_a_rotation_cut_off_stops_nobody_from_signing_and_is_finished_by_the_next(
    erased: Store, role: str, made: bool
) -> None:
    old = key_in_use(erased.translog, role)
    retire_signer(erased.folder / "keys", role, old.key_id[:12])
    if made:
        create_signer(erased.folder / "keys", role)
    with Store.open(erased.folder) as again:
        again.erase(["u5"])
        heads_hold(again)
        assert key_in_use(again.translog, role) == old
        new = rotate_key(again.translog, role, "2026-01-01T00:00:00Z")
        assert open_signer(again.folder / "keys", role).public == new.public
    with Store.open(erased.folder) as again:
        again.erase(["u6"])
        heads_hold(again)
        for entry in log.receipt_entries(again.ledger):
            data = again.storage.read(receipt_path(entry.request_id))
            assert verify_receipt(data, trust(again.translog), now=datetime.now(UTC)).failed == ()


def test_a_key_in_use_is_rotated_before_it_is_revoked(erased: Store) -> None:
    old = next(key for key in log.signing_keys(erased.ledger) if key.role == "receipt")
    size, _ = log.size_and_root(erased.ledger)
    with pytest.raises(RefusedError, match="rotate"):
        revoke_key(erased.translog, old.key_id, size, "2026-01-01T00:00:00Z")
    rotate_key(erased.translog, "receipt", "2026-01-01T00:00:00Z")
    with pytest.raises(RefusedError):
        revoke_key(erased.translog, old.key_id, 10_000, "2026-01-01T00:00:00Z")
    with pytest.raises(NotFoundError):
        revoke_key(erased.translog, "0" * 64, 0, "2026-01-01T00:00:00Z")
    (first, *_) = log.receipt_entries(erased.ledger)
    revoke_key(erased.translog, old.key_id, first.leaf + 1, "2026-01-01T00:00:00Z")
    trusted = trust(erased.translog)
    failed = {
        entry.request_id: verify_receipt(
            erased.storage.read(receipt_path(entry.request_id)), trusted, now=datetime.now(UTC)
        ).failed
        for entry in log.receipt_entries(erased.ledger)
    }
    assert failed.pop(first.request_id) == ()
    assert set(failed.values()) == {("R1",)}
    assert (erased.folder / "keys" / "trust.json").read_bytes() == trusted


def test_the_log_says_who_signs_from_the_beginning(store: Store) -> None:
    first, *rest = (json.loads(leaf) for leaf in log.leaves(store.ledger, 0, 10))
    assert first["predicateType"] == "https://unlearnd.dev/genesis/v1"
    assert first["predicate"]["storeId"] == store.config.store_id
    assert [(leaf["predicate"]["role"], leaf["predicate"]["action"]) for leaf in rest] == [
        ("log", "add"),
        ("receipt", "add"),
    ]


def test_evidence_that_was_damaged_in_storage_is_not_handed_out(
    new_store: Callable[..., Any], people: Callable[..., Any], add: Callable[..., Any], tmp_path: Path
) -> None:
    store = new_store()
    add(store, people())
    request = store.erase(["u3"]).outcomes[0].request
    evidence = store.folder / "storage" / "evidence"
    for path in [*(evidence / "detail").iterdir(), *(evidence / "receipts").iterdir()]:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DamagedStoreError, match=path.name):
            store.export_log(str(tmp_path / "exported"))
        with pytest.raises(DamagedStoreError, match=path.name):
            store.export_receipt(request, tmp_path / path.name)
        path.write_bytes(whole)
    # What a killed writer left beside them is no evidence.
    (evidence / "detail" / ".half.json.0123abcd.part").write_bytes(b"{")
    store.export_log(str(tmp_path / "exported"))
    assert not list((tmp_path / "exported").rglob("*.part"))


KILLED_ROTATION = """
import os, signal, sys
from unlearnd.store import Store
real, left = os.replace, [int(sys.argv[2])]

def replace(*names, **more):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(*names, **more)

with Store.open(sys.argv[1]) as store:
    os.replace = replace
    store.rotate_key("log")
"""


@pytest.mark.parametrize("calls", [0, 1, 3, 5, 6])
def test_a_rotation_that_was_killed_leaves_a_trust_file_that_is_whole_and_can_be_run_again(
    erased: Any, calls: int, run_python: Any
) -> None:
    """However far it came: a file beside the keys is the old one or the new one, and never half of either."""
    folder = erased.folder
    erased.close()
    run_python(KILLED_ROTATION, folder, calls, code=-signal.SIGKILL)
    read_trust((folder / "keys" / "trust.json").read_bytes())
    with unlearnd.open_store(str(folder)) as again:
        again.rotate_key("log")
        assert (folder / "keys" / "trust.json").read_bytes() == trust(again.translog)
        again.erase(["u5"])
        assert audit(again).failed == ()
