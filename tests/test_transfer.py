"""Models on a frozen public base: what is refused, what is kept, what erasure takes, and that no bit depends on it."""

import hashlib
import runpy
import shutil
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

import unlearnd
from unlearnd.audit import audit
from unlearnd.errors import BackendError, DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.steps import Step
from unlearnd.translog import sign_head
from unlearnd.verify.reports import Result

WEIGHT = np.random.default_rng(7).normal(size=(5, 6)).astype(np.float32)


def load_backend() -> Any:
    """Return a fresh backend `transfer`."""
    return runpy.run_path(str(Path(__file__).parent / "backends" / "transfer.py"))["TransferBackend"]()


def see(x: Any) -> Any:
    """Return what the base makes of rows."""
    return load_backend().features({}, {"weight": WEIGHT}, x, "cpu")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model in a file."""
    path = tmp_path / "elsewhere" / "base.safetensors"
    path.parent.mkdir()
    save_file({"weight": WEIGHT}, path)
    return path


@pytest.fixture
def able_store(new_store: Callable[..., Any]) -> Callable[..., Any]:
    """Make stores that have the backend `transfer`."""

    def make(name: str = "store", **options: Any) -> Any:
        store = new_store(name, **options)
        more = {**store.plugins.backends, "transfer": load_backend()}
        store.plugins = replace(store.plugins, backends=more)
        return store

    return make


@pytest.fixture
def stand_on(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Train the model `m` on a base."""

    def train(store: Any, base: Any, **options: Any) -> Any:
        settings = {"batch_size": 8, "base": str(base), "base_public": True}
        return fit(store, "transfer", settings=settings, **options)

    return train


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *said: Any) -> None:
        pass


@contextmanager
def serving_http(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP, to this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def features_in(store: Any) -> list[Path]:
    return sorted(Path(store.folder).rglob("*.features"))


def rows_seen(store: Any) -> int:
    return int(store.plugins.backend("transfer").rows_seen)


# What may be a base.


def test_a_base_that_nobody_says_is_public_is_refused_and_nothing_is_left_behind(
    able_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any], people: Any, base: Path
) -> None:
    store = able_store()
    add(store, people())
    for settings in (
        {"base": str(base)},
        {"base": str(base), "base_public": False},
        {"base": str(base), "base_public": 1},
    ):
        with pytest.raises(RefusedError, match="say so with base_public=true"):
            fit(store, "transfer", settings=settings)
    assert store.status().models == ()
    assert not (Path(store.folder) / "storage" / "bases").exists()


@pytest.mark.parametrize("again", ["the file", "written anew", "after it was destroyed"])
def test_a_checkpoint_of_this_store_is_never_a_base(
    again: str,
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    people: Any,
    tmp_path: Path,
) -> None:
    store = able_store()
    add(store, people())
    fit(store)
    checkpoint = store.checkpoints("m")[-1]
    copy = tmp_path / "innocent.safetensors"
    shutil.copy(Path(store.folder) / "storage" / checkpoint.path, copy)
    if again == "written anew":
        save_file(load_file(copy), copy, metadata={"licence": "public domain"})
        assert hashlib.sha256(copy.read_bytes()).hexdigest() != checkpoint.file
    if again == "after it was destroyed":
        store.erase([next(user for user in set(people().user) if store.where_user(user)[0].shard == checkpoint.shard)])
    with pytest.raises(RefusedError, match="is a checkpoint of this store"):
        store.train("n", dataset="d", backend="transfer", settings={"base": str(copy), "base_public": True})


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("base.pt", b"PK\x03\x04", "is a pickle"),
        ("pytorch_model.bin", b"", "is a pickle"),
        ("base.safetensors", b"PK\x03\x04" + bytes(100), "is a pickle"),
        ("base.safetensors", b"\x80\x04\x95" + bytes(100), "is a pickle"),
        ("base.safetensors", b"", "is empty"),
        ("base.safetensors", b"hello", "not a safetensors file"),
        ("base.safetensors", struct.pack("<Q", 2**62) + b"{}", "not a safetensors file"),
        ("base.safetensors", struct.pack("<Q", 2**24) + b"{}", "not a safetensors file"),
        ("base.safetensors", struct.pack("<Q", 2) + b"{}", "no tensors"),
        ("base.safetensors", save({"weight": WEIGHT})[:-1], "not a safetensors file"),
        ("base.safetensors", save({"weight": np.full((5, 6), np.nan, np.float32)}), "not finite"),
        (
            "base.safetensors",
            struct.pack("<Q", 64) + b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'.ljust(64) + b"\0\0",
            "save it as float32",
        ),
        ("base.safetensors", save({"weight": WEIGHT[:3]}), "the base takes 3 features"),
        ("base.safetensors", save({"other": WEIGHT}), "backend 'transfer' cannot begin"),
    ],
)
def test_what_cannot_be_a_base_is_said_in_one_sentence_and_nothing_is_left_behind(
    name: str,
    data: bytes,
    says: str,
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    tmp_path: Path,
) -> None:
    store = able_store()
    add(store, people())
    with pytest.raises((InputError, BackendError), match=says) as raised:
        stand_on(store, write(tmp_path / name, data))
    assert "\n" not in str(raised.value)
    assert store.status().models == ()
    assert not (Path(store.folder) / "storage" / "bases").exists()


def test_a_base_that_is_not_there_or_not_text_is_said(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    fit: Any,
    people: Any,
    tmp_path: Path,
) -> None:
    store = able_store()
    add(store, people())
    with pytest.raises(NotFoundError, match=r"there is no file nowhere\.safetensors to be the base"):
        stand_on(store, "nowhere.safetensors")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    # Nobody listens there any more: that is not the same as a file that is not there.
    with pytest.raises(StorageError, match=f"cannot be read: Cannot connect to host 127.0.0.1:{port}"):
        stand_on(store, f"http://127.0.0.1:{port}/base.safetensors")
    with pytest.raises(InputError, match=r"cannot be opened: Cannot connect to host 127\.0\.0\.1"):
        store.ingest("far", f"http://127.0.0.1:{port}/rows.csv", user="user", label="label")
    with serving_http(tmp_path) as address, pytest.raises(NotFoundError, match="there is no file http"):
        stand_on(store, f"{address}/nowhere.safetensors")
    with pytest.raises(NotFoundError, match="keeps no base"):
        stand_on(store, "0" * 64)
    with pytest.raises(InputError, match="is a path or URI"):
        fit(store, "transfer", settings={"base": 5, "base_public": True})
    with pytest.raises(InputError, match="backend 'linear' has no setting 'base'"):
        fit(store, "linear", settings={"base": "x", "base_public": True})


# What is kept.


def test_the_model_names_its_base_by_digest_and_needs_the_file_no_more(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    ask_ledger: Callable[..., Any],
    digests: Callable[..., Any],
    files_holding: Callable[..., Any],
) -> None:
    store, rows = able_store(), people()
    add(store, rows)
    stand_on(store, base)
    digest = hashlib.sha256(base.read_bytes()).hexdigest()
    base.unlink()
    assert (Path(store.folder) / "storage" / "bases" / f"{digest}.safetensors").exists()
    ((spec,),) = ask_ledger(store.folder, "SELECT spec FROM model")
    assert digest in spec
    assert files_holding(store.folder, b"elsewhere") == []
    # Predicting, erasing, building and a second model go on without the file.
    store.model("m").predict(rows.x)
    store.erase(["u1", "u2"])
    settings = {"base": digest, "base_public": True}
    store.train("n", dataset="d", backend="transfer", epochs=2, seed=20210523, settings={**settings, "batch_size": 8})
    assert digests(store, "n") == digests(store, "m")


def test_no_checkpoint_holds_the_base(
    able_store: Callable[..., Any], add: Callable[..., Any], stand_on: Callable[..., Any], people: Any, base: Path
) -> None:
    store = able_store()
    add(store, people())
    stand_on(store, base)
    holding = [
        path for path in Path(store.folder).rglob("*") if path.is_file() and WEIGHT.tobytes() in path.read_bytes()
    ]
    assert [path.parent.name for path in holding] == ["bases"]


def test_a_base_that_is_missing_or_changed_stops_builds_and_answers_and_comes_back_by_training_again(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
) -> None:
    store, rows = able_store(), people()
    add(store, rows)
    stand_on(store, base)
    (kept,) = (Path(store.folder) / "storage" / "bases").iterdir()
    kept.write_bytes(save({"weight": WEIGHT + 1}))
    with pytest.raises(DamagedStoreError, match="its digest differs"):
        store.model("m").predict(rows.x)
    assert "its digest differs" in audit(store)["S2"].sentence
    kept.unlink()
    with pytest.raises(DamagedStoreError, match="is missing: restore it, or run the `unlearnd train`"):
        store.model("m").predict(rows.x)
    assert "is not there" in audit(store)["S2"].sentence
    stand_on(store, base)
    store.model("m").predict(rows.x)
    assert audit(store)["S2"].result is Result.PASS


# Features are computed once.


def test_features_of_each_slice_are_computed_once_for_all_epochs_builds_and_models(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    check_no_orphans: Callable[[Path], None],
) -> None:
    store, rows = able_store(), people()
    add(store, rows)
    stand_on(store, base, epochs=5)
    declared = 1  # one empty point, to see that the base fits
    assert rows_seen(store) == declared + len(rows)
    check_no_orphans(store.folder)
    settings = {"base": str(base), "base_public": True, "lr": 0.01}
    store.train("n", dataset="d", backend="transfer", settings=settings)
    assert rows_seen(store) == 2 * declared + len(rows)
    # An erasure computes none anew either, and what comes later is all that is computed later.
    store.erase(["u1", "u2", "u3"])
    assert rows_seen(store) == 2 * declared + len(rows)
    late = people(10, 20, seed=9).without(["u1", "u2", "u3"])
    add(store, late, shards=None, slices=1)
    store.build()
    assert rows_seen(store) == 2 * declared + len(rows) + len(late)
    check_no_orphans(store.folder)


def test_what_trains_on_the_points_themselves_keeps_no_features(
    able_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any], people: Any
) -> None:
    store = able_store()
    add(store, people())
    fit(store, "transfer")
    assert features_in(store) == []
    assert rows_seen(store) == 0


def test_answers_are_those_of_a_model_trained_on_features_made_by_hand(
    able_store: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
) -> None:
    rows, store, by_hand = people(), able_store(), new_store("hand")
    add(store, rows)
    stand_on(store, base)
    add(by_hand, type(rows)(see(rows.x), rows.y, rows.user))
    fit(by_hand, settings={"batch_size": 8})
    new = people(seed=5).x
    ours, theirs = store.model("m").predict(new, "mean"), by_hand.model("m").predict(see(new), "mean")
    assert np.array_equal(ours.scores, theirs.scores)


# Exactness: with the cache, without it, after erasure.


@pytest.mark.parametrize("cache", ["kept", "gone before the erasure", "gone before the build", "damaged"])
@pytest.mark.parametrize("doomed", [["u1"], ["u1", "u2", "u3", "u4", "u5", "u6", "u7"]], ids=["one", "several"])
def test_erasing_gives_the_bits_of_a_store_that_never_met_them_with_the_cache_and_without(
    cache: str,
    doomed: list[str],
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    digests: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, met, never = people(), able_store("met"), able_store("never")
    add(met, rows)
    stand_on(met, base)
    if cache == "gone before the erasure":
        for path in features_in(met):
            path.unlink()
    if cache == "damaged":
        for path in features_in(met):
            path.write_bytes(path.read_bytes()[:-4] + b"oops")
    met.erase(doomed, build=False)
    if cache == "gone before the build":
        for path in features_in(met):
            path.unlink()
    met.build()
    add(never, rows.without(doomed))
    stand_on(never, base)
    assert digests(met) == digests(never)
    if cache == "kept":
        check_no_orphans(met.folder)
    # And what lies beside the data is the same, too, to the bit.
    if cache == "kept":
        beside = [
            {
                digest
                for path in features_in(store)
                for digest in [hashlib.sha256(load_file(path)["x"].tobytes()).digest()]
            }
            for store in (met, never)
        ]
        assert beside[0] == beside[1]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_in_a_bucket_bases_and_features_are_kept_and_erased_as_on_a_disk(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    digests: Callable[..., Any],
    seaweed: Any,
) -> None:
    bucket = seaweed.bucket(versioned=True)
    met = able_store("met", storage=f"s3://{bucket}/met", storage_options=seaweed.options)
    rows, never = people(), able_store("never")
    add(met, rows)
    stand_on(met, base)

    def versions() -> set[tuple[str, str]]:
        found = seaweed.versions(bucket)
        return {(one["Key"], one["VersionId"]) for one in found if one["Key"].endswith(".features")}

    before = versions()
    met.erase(["u1"])
    # Those of the one slice that held them are gone, every version, and are there anew without them.
    assert len(before - versions()) == 1
    add(never, rows.without(["u1"]))
    stand_on(never, base)
    assert digests(met) == digests(never)
    assert audit(met, replay=2).failed == ()


def test_a_hold_takes_somebody_out_of_kept_features_and_a_release_brings_the_same_bits_back(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    digests: Callable[..., Any],
) -> None:
    rows, met, never = people(), able_store("met"), able_store("never")
    add(met, rows)
    stand_on(met, base)
    before = digests(met)
    (entry,) = met.receive(["u1"])
    review = met.clock().date() + timedelta(days=30)
    met.hold(entry.id, basis="legal_claims", approver="ann", review=review)
    assert digests(met) != before
    met.build()
    add(never, rows.without(["u1"]))
    stand_on(never, base)
    assert digests(met) == digests(never)
    # Others are erased meanwhile, from slices whose features were kept while somebody in them was on hold.
    met.erase(["u2", "u3"])
    without = able_store("without")
    add(without, rows.without(["u1", "u2", "u3"]))
    stand_on(without, base)
    assert digests(met) == digests(without)
    met.release(entry.id)
    met.build()
    back = able_store("back")
    add(back, rows.without(["u2", "u3"]))
    stand_on(back, base)
    assert digests(met) == digests(back)
    assert audit(met, replay="all").failed == ()


def test_after_an_erasure_no_file_holds_what_the_base_made_of_the_erased(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    files_holding: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, store = people(), able_store()
    add(store, rows)
    stand_on(store, base)
    doomed = rows.only(["u1", "u2"])
    before = ask_ledger(store.folder, "SELECT path, digest FROM feature")
    assert all(files_holding(store.folder, row.tobytes()) for row in see(doomed.x))
    store.erase(["u1", "u2"])
    for row in (*see(doomed.x), *doomed.x):
        assert files_holding(store.folder, row.tobytes()) == []
    # Those of the others are still there, and a digest that could test a guess is in no file.
    kept = {path for (path,) in ask_ledger(store.folder, "SELECT path FROM feature")}
    gone = [(path, digest) for path, digest in before if path not in kept]
    assert gone
    for _, digest in gone:
        assert files_holding(store.folder, digest.encode()) == []
    check_no_orphans(store.folder)


def test_a_slice_that_loses_everybody_loses_its_features(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    users_at: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, store = people(), able_store()
    add(store, rows)
    stand_on(store, base)
    doomed = users_at(store, rows, 1, [2])
    assert list((Path(store.folder) / "storage" / "data" / "d" / "0001" / "0002").iterdir())
    store.erase(doomed)
    assert list((Path(store.folder) / "storage" / "data" / "d" / "0001" / "0002").iterdir()) == []
    check_no_orphans(store.folder)


@pytest.mark.parametrize(
    "step", [Step.BUILD_FEATURES_WRITTEN, Step.BUILD_FEATURES_ENTERED, Step.BUILD_WRITTEN], ids=lambda step: step.name
)
def test_an_erasure_after_a_build_was_cut_off_finds_the_features_it_left(
    step: Step,
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    cut_off_at: Callable[..., Any],
    files_holding: Callable[..., Any],
    users_at: Callable[..., Any],
) -> None:
    rows, store = people(), able_store()
    add(store, rows, shards=1)
    cut_off_at(step, lambda: stand_on(store, base))
    (user, *_) = users_at(store, rows, 1, [2])
    doomed = rows.only([user])
    assert all(files_holding(store.folder, row.tobytes()) for row in see(doomed.x))
    store.erase([user], build=False)
    for row in see(doomed.x):
        assert files_holding(store.folder, row.tobytes()) == []


def test_an_erasure_while_features_are_computed_leaves_none_of_the_erased(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    files_holding: Callable[..., Any],
    digests: Callable[..., Any],
    users_at: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    rows, store, never = people(), able_store(), able_store("never")
    add(store, rows, shards=1)
    (user, *_) = users_at(store, rows, 1, [1])
    backend, other = store.plugins.backend("transfer"), unlearnd.open_store(store.folder)
    other.plugins = store.plugins
    compute, eraser = backend.features, threading.Thread(target=lambda: other.erase([user], build=False))

    def interrupted(*given: Any) -> Any:
        seen = compute(*given)
        # After the one of the declaration, and with the rows of a first segment in memory: erase, as far as data goes.
        if backend.rows_seen > 1 and not eraser.ident:
            eraser.start()
            give_up = time.monotonic() + 60
            while not ask_ledger(store.folder, "SELECT 1 FROM segment WHERE destroyed_at IS NOT NULL"):
                assert time.monotonic() < give_up
                time.sleep(0.01)
        return seen

    backend.features = interrupted
    stand_on(store, base)
    eraser.join()
    for row in see(rows.only([user]).x):
        assert files_holding(store.folder, row.tobytes()) == []
    check_no_orphans(store.folder)
    add(never, rows.without([user]), shards=1)
    stand_on(never, base)
    assert digests(store) == digests(never)
    other.close()


def test_features_made_in_another_environment_are_not_used(
    able_store: Callable[..., Any], add: Callable[..., Any], stand_on: Callable[..., Any], people: Any, base: Path
) -> None:
    rows, store = people(), able_store()
    add(store, rows)
    stand_on(store, base)
    backend = store.plugins.backend("transfer")
    backend.environment = lambda device: {"numpy": "another"}
    before = backend.rows_seen
    store.train("n", dataset="d", backend="transfer", settings={"base": str(base), "base_public": True})
    assert backend.rows_seen == before + 1 + len(rows)


# What an audit sees.


def check_passes(store: Any) -> None:
    report = audit(store, replay="all", head=sign_head(store.translog)[1].encode())
    assert [c.sentence for c in report.checks if c.result is not Result.PASS and c.id != "D3"] == []
    assert report.level == 5


def test_an_audit_replays_a_model_on_a_base_before_and_after_an_erasure(
    able_store: Callable[..., Any], add: Callable[..., Any], stand_on: Callable[..., Any], people: Any, base: Path
) -> None:
    store = able_store()
    add(store, people())
    stand_on(store, base)
    check_passes(store)
    store.erase(["u1", "u2"])
    check_passes(store)


@pytest.mark.ledger_file
def test_an_audit_finds_features_that_are_missing_changed_or_of_other_rows(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
) -> None:
    store = able_store()
    add(store, people())
    stand_on(store, base)
    first, second, *_ = features_in(store)
    whole = first.read_bytes()
    first.write_bytes(whole[:-4] + b"oops")
    assert "is not what the ledger recorded" in audit(store)["S2"].sentence
    first.write_bytes(whole)
    first.with_name("copy.features").write_bytes(whole)
    assert "copy.features is there and should not be" in audit(store)["S2"].sentence
    first.with_name("copy.features").unlink()
    # Whoever holds the ledger, too, can make it agree; the rows still differ.
    first.write_bytes(second.read_bytes())
    name = str(first.relative_to(Path(store.folder) / "storage"))
    with closing(sqlite3.connect(Path(store.folder) / "ledger.sqlite")) as ledger, ledger:
        ledger.execute(
            "UPDATE feature SET digest = ? WHERE path = ?", (hashlib.sha256(second.read_bytes()).hexdigest(), name)
        )
    assert "has features of other rows than its slice data" in audit(store)["S2"].sentence
    first.unlink()
    assert "is not there" in audit(store)["S2"].sentence


def test_a_replay_computes_features_anew_and_finds_a_model_trained_on_others(
    able_store: Callable[..., Any], add: Callable[..., Any], stand_on: Callable[..., Any], people: Any, base: Path
) -> None:
    store = able_store()
    add(store, people())
    backend = store.plugins.backend("transfer")
    honest = backend.features
    backend.features = lambda *given: honest(*given) + np.float32(1)
    stand_on(store, base)
    backend.features = honest
    report = audit(store, replay="all")
    assert report["P1"].result is Result.FAIL
    assert report["S2"].result is Result.PASS


def test_a_build_or_declaration_that_was_cut_off_leaves_an_audit_undecided_not_wrong(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    cut_off_at: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    store = able_store()
    add(store, people())
    cut_off_at(Step.TRAIN_BASE_KEPT, lambda: stand_on(store, base))
    assert audit(store)["S2"].result is Result.NOT_CHECKED
    assert "a declaration was cut off" in audit(store)["S2"].sentence
    cut_off_at(Step.BUILD_FEATURES_WRITTEN, lambda: stand_on(store, base))
    assert audit(store)["S2"].result is Result.NOT_CHECKED
    assert "a build was cut off" in audit(store)["S2"].sentence
    store.build()
    assert audit(store)["S2"].result is Result.PASS
    check_no_orphans(store.folder)


def test_a_base_that_a_killed_declaration_left_goes_with_the_next_one(
    able_store: Callable[..., Any],
    add: Callable[..., Any],
    stand_on: Callable[..., Any],
    people: Any,
    base: Path,
    cut_off_at: Callable[..., Any],
    check_no_orphans: Callable[[Path], None],
) -> None:
    store = able_store()
    add(store, people())
    cut_off_at(Step.TRAIN_BASE_KEPT, lambda: stand_on(store, base))
    save_file({"weight": WEIGHT * 2}, base)
    stand_on(store, base)
    assert len(list((Path(store.folder) / "storage" / "bases").iterdir())) == 1
    check_no_orphans(store.folder)
