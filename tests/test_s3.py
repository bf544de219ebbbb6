"""A store whose bytes are in a bucket: a real S3 server, the same verbs, the same bits, nothing left of the erased."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.seaweed import READER_KEY, READER_SECRET, Seaweed
from unlearnd.audit import audit
from unlearnd.checkpoints import path_of
from unlearnd.cli import main
from unlearnd.dossier import predicate_of
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.steps import Step
from unlearnd.storage import CLAIM, Storage
from unlearnd.storage.straight import straight_to
from unlearnd.store import Store
from unlearnd.verify.checks import verify_receipt


@pytest.fixture
def bucket(seaweed: Seaweed) -> str:
    """A bucket of the test's own, which keeps versions: the harder case."""
    return seaweed.bucket(versioned=True)


@pytest.fixture
def storage(seaweed: Seaweed, bucket: str) -> Storage:
    made = Storage(f"s3://{bucket}/p", **seaweed.options)
    made.create()
    made.claim("mine")
    return made


@pytest.fixture
def far_store(new_store: Callable[..., Store], seaweed: Seaweed, bucket: str) -> Store:
    return new_store("far", storage=f"s3://{bucket}/shop", storage_options=seaweed.options)


def keys_in(seaweed: Seaweed, bucket: str) -> list[str]:
    return sorted(found["Key"] for found in seaweed.versions(bucket))


def test_train_erase_and_rebuild_in_a_bucket_gives_the_bits_of_a_store_that_never_met_the_user(
    far_store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, seaweed: Seaweed, bucket: str
) -> None:
    rows = people()
    add(far_store, rows)
    fit(far_store)
    before = digests(far_store)
    erased = far_store.erase(["u3", "u7"])
    never = new_store("never")
    add(never, rows.without(["u3", "u7"]))
    fit(never)
    assert digests(far_store) == digests(never) != before
    assert (far_store.model("m").predict(rows.x).labels == never.model("m").predict(rows.x).labels).all()
    # Every version of what is no longer in force is gone, markers too.
    live = {c.path for c in far_store.checkpoints("m")}
    left = [found for found in seaweed.versions(bucket) if "/checkpoints/" in found["Key"]]
    assert {found["Key"] for found in left} == {f"shop/{path}" for path in live}
    assert len(left) == len(live)
    report = audit(far_store)
    assert report.failed == ()
    assert report.level == 4
    trust = (far_store.folder / "keys" / "trust.json").read_bytes()
    for outcome in erased.outcomes:
        assert verify_receipt(far_store.receipt(outcome.request), trust, now=far_store.clock()).failed == ()


def test_nothing_secret_is_in_the_settings_file(far_store: Store, seaweed: Seaweed) -> None:
    text = (far_store.folder / "unlearnd.toml").read_text()
    assert seaweed.url in text
    for secret in seaweed.environment.values():
        assert secret not in text


WORK = """
import os, signal, sys
import unlearnd
from unlearnd import steps
folder, step, times = sys.argv[1], steps.Step[sys.argv[2]], int(sys.argv[3])
left = times
def stop(here):
    global left
    left -= here is step
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
steps.watcher = stop
with unlearnd.open_store(folder) as store:
    store.erase(["u3"])
print("not killed")
"""


@pytest.mark.parametrize(
    ("step", "times"),
    [
        (Step.ERASE_REWRITTEN, 1),
        (Step.ERASE_SWAPPED, 1),
        (Step.ERASE_CHECKPOINTS_DESTROYED, 1),
        (Step.RECEIPT_WRITTEN, 1),
        (Step.BUILD_WRITTEN, 1),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_kill_in_an_erasure_loses_nothing_in_a_bucket(
    step: Step,
    times: int,
    far_store: Store,
    new_store: Any,
    people: Any,
    add: Any,
    fit: Any,
    digests: Any,
    start_python: Any,
    seaweed: Seaweed,
    bucket: str,
) -> None:
    rows = people(20, 50)
    add(far_store, rows, shards=2, slices=3)
    fit(far_store, epochs=1)
    child = start_python(WORK, far_store.folder, step.name, times)
    out, err = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, out + err
    far_store.erase(["u3"])
    never = new_store("never")
    add(never, rows.without(["u3"]), shards=2, slices=3)
    fit(never, epochs=1)
    assert digests(far_store) == digests(never)
    assert len(far_store.receipts()) == 1
    report = audit(far_store)
    assert report.failed == ()
    assert report.level == 4
    receipts = [key for key in keys_in(seaweed, bucket) if "/receipts/" in key]
    assert len(receipts) == 1


def test_what_a_killed_builder_left_in_the_bucket_is_gone_after_the_next_build(
    far_store: Store, people: Any, add: Any, fit: Any, digests: Any, seaweed: Seaweed, bucket: str
) -> None:
    add(far_store, people())
    fit(far_store)
    before = digests(far_store)
    far_store.erase(["u3"], build=False)
    left = [f"checkpoints/m/{shard:04d}/left-behind.safetensors" for shard in (1, 2, 3)]
    for name in left:
        far_store.storage.write(name, b"made by somebody who was killed")
    far_store.build(["m"])
    assert digests(far_store).keys() == before.keys()
    # The sweep is of the shards that are built; the others are whole, and nobody was at work on them.
    rebuilt = {shard for (shard, slice_), digest in digests(far_store).items() if before[shard, slice_] != digest}
    assert rebuilt
    still = {name for name in left if f"shop/{name}" in keys_in(seaweed, bucket)}
    assert still == {name for name in left if int(name.split("/")[2]) not in rebuilt}


def test_states_wait_for_storage_only_as_long_as_there_is_room(
    far_store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = new_store("near")
    for store in (far_store, near):
        add(store, people())
    fit(near)
    # No room at all: every step waits until the one before is saved.
    monkeypatch.setattr("unlearnd.build.WAITING_BYTES", 0)
    fit(far_store)
    assert digests(far_store) == digests(near)


def test_points_of_the_next_shards_are_fetched_while_these_are_trained(
    far_store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = new_store("near")
    for store in (far_store, near):
        add(store, people())
    fit(near, "mlp")
    monkeypatch.setattr("unlearnd.build.GROUP_SHARDS", 1)
    monkeypatch.setattr("unlearnd.build.FIRST_SHARDS", 1)
    ahead: list[str] = []
    through = far_store.storage.reading_ahead

    def watched(names: Any) -> Any:
        listed = list(names)
        ahead.extend(listed)
        return through(listed)

    monkeypatch.setattr(far_store.storage, "reading_ahead", watched)
    fit(far_store, "mlp")
    assert {name.split("/")[2] for name in ahead} == {"0002", "0003"}
    assert far_store.storage._ahead == {}
    assert digests(far_store) == digests(near)


def test_of_many_shards_a_few_are_trained_first_and_the_rest_is_fetched_meanwhile(
    far_store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = new_store("near")
    for store in (far_store, near):
        add(store, people(60), shards=18, slices=2)
    fit(near, "mlp")
    ahead: list[set[str]] = []
    through = far_store.storage.reading_ahead

    def watched(names: Any) -> Any:
        listed = list(names)
        ahead.append({name.split("/")[2] for name in listed})
        return through(listed)

    monkeypatch.setattr(far_store.storage, "reading_ahead", watched)
    fit(far_store, "mlp")
    assert [len(shards) for shards in ahead] == [10, 0]
    assert digests(far_store) == digests(near)


def test_workers_reach_the_bucket_by_themselves(
    far_store: Store, people: Any, add: Any, fit: Any, digests: Any, new_store: Any
) -> None:
    add(far_store, people())
    fit(far_store, workers=2)
    near = new_store("near")
    add(near, people())
    fit(near)
    assert digests(far_store) == digests(near)


def test_init_by_command_and_all_that_follows(
    tmp_path: Path, seaweed: Seaweed, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        ended = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert ended.exit_code == code, ended.output
        return ended.output

    (tmp_path / "visits.csv").write_text(
        "who,a,b,bought\n" + "".join(f"p{n % 9},{n % 7},{n % 5},{n % 2}\n" for n in range(60))
    )
    option = ("--storage-option", f"endpoint_url={seaweed.url}", "--storage-option", "region=us-east-1")
    run("init", "shop", "--storage", f"s3://{bucket}/x", *option)
    run("--store", "shop", "ingest", "visits", "visits.csv", "--user", "who", "--label", "bought", "--shards", "2")
    run("--store", "shop", "train", "buyers", "--dataset", "visits", "--backend", "linear", "--epochs", "1")
    run("--store", "shop", "erase", "--user", "p4")
    assert "Assurance level 4" in run("--store", "shop", "audit")
    said = run("init", "other", "--storage", f"s3://{bucket}/x", *option, code=1)
    assert "belongs to a store already" in said
    assert not (tmp_path / "other" / "unlearnd.toml").exists()
    assert "no bucket 'no-such-bucket'" in run("init", "third", "--storage", "s3://no-such-bucket/x", *option, code=1)


# The place a store takes.


def test_two_stores_never_share_a_prefix_nor_one_within_the_other(seaweed: Seaweed, storage: Storage) -> None:
    root = storage.url.rpartition("/")[0]
    for url, says in (
        (storage.url, "belongs to a store already"),
        (f"{storage.url}/inner", "belongs to a store already"),
        (root, "something below"),
    ):
        with pytest.raises(RefusedError, match=says):
            Storage(url, **seaweed.options).claim("other")
    Storage(f"{root}/beside", **seaweed.options).claim("other")
    with pytest.raises(RefusedError, match="belongs to another store, mine"):
        Storage(storage.url, **seaweed.options).check("other")


def test_of_many_who_claim_a_prefix_at_once_one_gets_it(seaweed: Seaweed, bucket: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def claim(number: int) -> bool:
        try:
            Storage(f"s3://{bucket}/race", **seaweed.options).claim(f"store {number}")
        except RefusedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(claim, range(8)))
    assert sum(won) <= 1
    if any(won):
        Storage(f"s3://{bucket}/race", **seaweed.options).check(f"store {won.index(True)}")


def test_a_place_without_its_claim_is_no_store(seaweed: Seaweed, far_store: Store, bucket: str) -> None:
    with pytest.raises(StorageError, match="is it the right place"):
        Storage(f"s3://{bucket}/elsewhere", **seaweed.options).check("x")
    far_store.storage.write(CLAIM, b"{}")
    with pytest.raises(DamagedStoreError, match="cannot be read"):
        Store.open(far_store.folder)


def test_the_probe_is_recorded_and_leaves_nothing(seaweed: Seaweed, storage: Storage, bucket: str) -> None:
    said = json.loads(storage.read(CLAIM))
    assert (said["exclusive"], said["versioning"], said["objectLock"]) == (True, "enabled", False)
    assert keys_in(seaweed, bucket) == [f"p/{CLAIM}"]
    plain = seaweed.bucket()
    other = Storage(f"s3://{plain}", **seaweed.options)
    other.claim("y")
    assert other.abilities.versioning == "off"


def test_a_bucket_with_object_lock_is_refused_for_slices_and_serves_for_receipts(
    new_store: Any, seaweed: Seaweed, bucket: str, people: Any, add: Any, fit: Any, tmp_path: Path
) -> None:
    locked = seaweed.bucket(locked=True)
    with pytest.raises(RefusedError, match="object lock") as caught:
        new_store("refused", storage=f"s3://{locked}/p", storage_options=seaweed.options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "refused" / "unlearnd.toml").exists()
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    seaweed.call(
        "put_object_lock_configuration",
        Bucket=locked,
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
    )
    store = new_store("store", storage=f"s3://{bucket}/p", receipts=f"s3://{locked}/r", storage_options=seaweed.options)
    add(store, people())
    fit(store)
    erased = store.erase(["u3"])
    # The copy of the log stays beside the data that it is about.
    elsewhere = [key for key in keys_in(seaweed, bucket) if "evidence" in key and "evidence/log/" not in key]
    assert elsewhere == []
    name = f"r/evidence/receipts/{erased.outcomes[0].request}.receipt.json"
    (found,) = [found for found in seaweed.versions(locked) if found["Key"] == name]
    with pytest.raises(PermissionError):
        seaweed.call("delete_object", Bucket=locked, Key=name, VersionId=found["VersionId"])
    report = audit(store)
    assert report.failed == ()
    assert report.level == 4
    assert store.receipt(erased.outcomes[0].request)


# Destroying.


def test_destroying_takes_every_version_marker_and_unfinished_upload(
    storage: Storage, seaweed: Seaweed, bucket: str
) -> None:
    for text in (b"one", b"two", b"three"):
        storage.write("a/x", text)
    storage.write("a/xx", b"stays")
    seaweed.call("delete_object", Bucket=bucket, Key="p/a/x")
    upload = seaweed.call("create_multipart_upload", Bucket=bucket, Key="p/a/big")["UploadId"]
    seaweed.call("upload_part", Bucket=bucket, Key="p/a/big", UploadId=upload, PartNumber=1, Body=b"half of it")
    assert storage.list("a") == ["a/big", "a/x", "a/xx"]
    with pytest.raises(NotFoundError):
        storage.read("a/x")
    storage.destroy(["a/x", "a/big", "a/never"])
    assert storage.list("a") == ["a/xx"]
    assert keys_in(seaweed, bucket) == ["p/a/xx", f"p/{CLAIM}"]
    assert not seaweed.call("list_multipart_uploads", Bucket=bucket).get("Uploads")


def test_a_locked_version_is_told_and_not_swallowed(seaweed: Seaweed) -> None:
    locked = seaweed.bucket(locked=True)
    storage = Storage(f"s3://{locked}/p", **seaweed.options)
    storage.write("a/x", b"held")
    seaweed.call("put_object_legal_hold", Bucket=locked, Key="p/a/x", LegalHold={"Status": "ON"})
    with pytest.raises(StorageError, match=r"1 versions .* a/x: the server refuses"):
        storage.destroy(["a/x"])
    seaweed.call("put_object_legal_hold", Bucket=locked, Key="p/a/x", LegalHold={"Status": "OFF"})
    storage.destroy(["a/x"])
    assert seaweed.versions(locked) == []


def test_listings_longer_than_a_page_are_read_to_the_end(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {f"many/{number:04d}": b"" for number in range(25)}
    storage.write_many((name, [data]) for name, data in objects.items())
    bucket = storage._bucket
    call = bucket._call

    def in_small_pages(method: str, **arguments: Any) -> Any:
        # A server that answers with few at a time, as every server may.
        most = {"list_objects_v2": "MaxKeys", "list_object_versions": "MaxKeys", "list_multipart_uploads": "MaxUploads"}
        return call(method, **arguments, **({most[method]: 7} if method in most else {}))

    monkeypatch.setattr(bucket, "_call", in_small_pages)
    assert storage.list("many") == sorted(objects)
    assert sorted(storage.sizes("many")) == sorted(objects)
    storage.destroy(objects)
    assert storage.list("many") == []


def test_an_older_version_of_anything_fails_the_audit(
    far_store: Store, people: Any, add: Any, fit: Any, seaweed: Seaweed, bucket: str
) -> None:
    add(far_store, people())
    fit(far_store)
    path = far_store.checkpoints("m")[0].path
    state = far_store.storage.read(path)
    far_store.storage.write(path, state)
    assert audit(far_store).failed == (), "the same bytes written twice are no other state"
    far_store.storage.write(path, b"somebody else's state")
    far_store.storage.write(path, state)
    report = audit(far_store)
    assert report.failed == ("S2",)
    assert "older version" in next(check.sentence for check in report.checks if check.id == "S2")


def test_what_a_killed_erasure_had_half_sent_goes_though_it_is_sent_again_under_its_name(
    far_store: Store, people: Any, add: Any, fit: Any, cut_off_at: Any, seaweed: Seaweed, bucket: str
) -> None:
    add(far_store, people(), shards=1, slices=1)
    fit(far_store)
    before = set(far_store.storage.list("data"))
    cut_off_at(Step.ERASE_REWRITTEN, lambda: far_store.erase(["u1"]))
    (name,) = set(far_store.storage.list("data")) - before
    far_store.storage.destroy([name])
    place = {"Bucket": bucket, "Key": f"{far_store.storage.url.partition(bucket + '/')[2]}/{name}"}
    upload = seaweed.call("create_multipart_upload", **place)["UploadId"]
    seaweed.call("upload_part", **place, UploadId=upload, PartNumber=1, Body=b"half of a slice")
    far_store.erase(["u1"])
    assert far_store.storage.list("data") == [name]
    assert not seaweed.call("list_multipart_uploads", Bucket=bucket).get("Uploads")
    assert audit(far_store).failed == ()


def deny(seaweed: Seaweed, bucket: str, what: str) -> None:
    """Take the right to delete versions away from everybody, as an administrator may."""
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
        "Resource": f"arn:aws:s3:::{bucket}/{what}",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    seaweed.call("put_bucket_policy", Bucket=bucket, Policy=json.dumps(policy))


def test_what_the_bucket_does_not_let_go_is_in_the_outcome_and_the_receipt(
    far_store: Store, people: Any, add: Any, fit: Any, digests: Any, seaweed: Seaweed, bucket: str, tmp_path: Path
) -> None:
    add(far_store, people(), shards=1)
    fit(far_store)
    old = {c.path for c in far_store.checkpoints("m")}
    deny(seaweed, bucket, "shop/checkpoints/*")
    erased = far_store.erase(["u3"])
    (outcome,) = erased.outcomes
    assert outcome.found
    assert {one.name for one in outcome.kept} == {c_path(c) for c in outcome.checkpoints} <= old
    assert all("the server refuses" in one.why for one in outcome.kept)
    with pytest.raises(StorageError, match="could not be destroyed, and the receipts say so"):
        erased.check_destroyed()
    said = predicate_of(far_store.receipt(outcome.request))
    assert said["objects"]["kept"]["count"] == len(outcome.kept)
    assert said["objects"]["destroyed"]["count"] >= 1
    assert said["scope"]["claims"] == ["training-data", "ledger"]
    assert "object-versions-kept" in said["scope"]["notClaimed"]
    names = far_store.export_receipt(outcome.request, tmp_path / "pack")
    trust = (tmp_path / "pack" / "trust.json").read_bytes()
    detail = (tmp_path / "pack" / "detail.json").read_bytes()
    assert "NOT destroyed" in (tmp_path / "pack" / "summary.html").read_text()
    report = verify_receipt((tmp_path / "pack" / names[0]).read_bytes(), trust, detail=detail, now=far_store.clock())
    assert report.failed == ()
    assert any("NOT ALL IS DESTROYED" in line for line in report.lines())
    # What holds no version any more is not claimed to, and an audit sees what lies there.
    assert "S2" in audit(far_store).failed
    seaweed.call("delete_bucket_policy", Bucket=bucket)
    again = far_store.erase(["u4", "u5", "u6"])
    assert not any(one.kept for one in again.outcomes)
    again.check_destroyed()
    assert audit(far_store).failed == ()


def test_what_the_queue_could_not_destroy_ends_the_command_with_a_sentence(
    far_store: Store, people: Any, add: Any, fit: Any, seaweed: Seaweed, bucket: str, tmp_path: Path
) -> None:
    add(far_store, people(), shards=1)
    fit(far_store)
    deny(seaweed, bucket, "shop/checkpoints/*")
    (tmp_path / "asked.csv").write_text("user,identity\nu3,account\n")
    at = ["--store", str(far_store.folder)]
    for command in (
        ["requests", "receive", "--file", str(tmp_path / "asked.csv"), "--run", *at],
        ["requests", "run", *at],
    ):
        if command[1] == "run":
            far_store.approve(far_store.receive(["u4"])[0].id, identity="account")
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1, result.output
        assert "could not be destroyed, and the receipts say so" in result.stderr


def c_path(checkpoint: Any) -> str:
    return path_of(checkpoint.model, checkpoint.shard, checkpoint.recipe)


def test_a_kill_between_destroying_and_saying_so_does_not_lose_the_record(
    far_store: Store, people: Any, add: Any, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(far_store, people(), shards=1)
    fit(far_store)

    class CutError(BaseException):
        pass

    def cut(*arguments: Any) -> None:
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr("unlearnd.ledger.erasures.versions_destroyed", cut)
        with pytest.raises(CutError):
            far_store.erase(["u3"])
    (outcome,) = far_store.erase(["u3"]).outcomes
    said = predicate_of(far_store.receipt(outcome.request))
    assert said["objects"]["kept"]["count"] == 0
    # The segment that was destroyed before the cut, and every checkpoint.
    assert said["objects"]["destroyed"]["count"] == 1 + len(outcome.checkpoints)
    assert audit(far_store).failed == ()


# Writing.


def test_of_many_writers_of_a_new_name_one_succeeds(storage: Storage) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: storage.create_new("x", b"%d" % number), range(16)))
    assert sum(won) == 1
    assert storage.read("x") == b"%d" % won.index(True)


def test_a_large_object_goes_up_in_parts_and_comes_back_whole(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, seaweed: Seaweed, bucket: str
) -> None:
    from unlearnd.storage import s3

    monkeypatch.setattr(s3, "_WHOLE", 1 << 20)
    monkeypatch.setattr(s3, "_PART", 5 << 20)
    data = os.urandom((11 << 20) + 3)
    storage.write("big", data)
    assert storage.read("big") == data
    (found,) = [found for found in seaweed.versions(bucket) if found["Key"] == "p/big"]
    assert found["ETag"].strip('"').endswith("-3")


def test_whole_objects_go_straight_to_the_bucket_and_are_what_s3fs_finds(storage: Storage, bucket: str) -> None:
    assert storage._bucket is not None
    assert storage._bucket._way(bucket) is not None
    for name in ("a/plain", "a/ü b+c%20~d&e=f?g.bin", "a/empty"):
        data = b"" if name == "a/empty" else name.encode() * 100
        storage.write(name, data)
        assert bytes(storage._fs.cat_file(storage._full(name))) == data
        assert storage.read(name) == data
    with pytest.raises(NotFoundError):
        storage.read("a/absent")


@pytest.mark.parametrize(
    "asked",
    [
        {"s3_additional_kwargs": {"StorageClass": "STANDARD"}},
        {"requester_pays": True},
        {"client_kwargs": {"verify": False}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_only_s3fs_knows_is_left_to_it(seaweed: Seaweed, bucket: str, asked: dict[str, Any]) -> None:
    storage = Storage(f"s3://{bucket}/other", **seaweed.options, options=asked)
    assert storage._bucket is not None
    assert storage._bucket._way(bucket) is None
    storage.write("a", b"x")
    assert storage.read("a") == b"x"


def test_behind_a_proxy_s3fs_does_it_all(seaweed: Seaweed, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert straight_to(Storage(f"s3://{bucket}/other", **seaweed.options)._fs, bucket) is None


def test_credentials_that_may_only_read_are_told_so(
    seaweed: Seaweed, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    reader = Storage(storage.url, **seaweed.options, options={"skip_instance_cache": True})
    assert reader.list("") == [CLAIM]
    with pytest.raises(StorageError, match="a/b: "):
        reader.write("a/b", b"x")
    with pytest.raises(StorageError, match="the server refuses"):
        reader.destroy([CLAIM])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = Storage(storage.url, **seaweed.options, options={"skip_instance_cache": True})
    with pytest.raises(StorageError, match="may not be used with the credentials"):
        stranger.check("mine")


def test_a_bucket_without_credentials_says_where_they_go(far_store: Store, tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_ACCESS")}
    bare = {name: value for name, value in bare.items() if not name.startswith("AWS_SECRET")} | {"HOME": str(tmp_path)}
    # In a process of its own: file systems with credentials are kept for as long as one lives.
    command = [sys.executable, "-c", "from unlearnd.cli import main; main()", "status", "--store", far_store.folder]
    ended = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no credentials for the storage: give them in the environment (AWS_ACCESS_KEY_ID" in ended.stderr


def test_a_secret_in_the_settings_is_refused(far_store: Store, new_store: Any, seaweed: Seaweed) -> None:
    path = far_store.folder / "unlearnd.toml"
    text = path.read_text()
    for line in ('options = {secret = "x"}', 'options = {client_kwargs = {aws_secret_access_key = "x"}}'):
        path.write_text(f"{text}{line}\n")
        with pytest.raises(InputError, match=r"is a secret, .* environment"):
            Store.open(far_store.folder)
    path.write_text(text.replace("http://", "http://user:pass@"))
    with pytest.raises(InputError, match="has a password in it"):
        Store.open(far_store.folder)
    for options in ({"options": {"key": "x"}}, {"options": {"token": "x"}}):
        with pytest.raises(InputError, match="is a secret"):
            new_store("x", storage="s3://b/p", storage_options=options)
    with pytest.raises(InputError, match="not known"):
        new_store("x", storage="s3://b/p", storage_options={"endpiont_url": "x"})


BROKEN = """
import sys
sys.path.insert(0, sys.argv[2])
from doors import Doors
from unlearnd.errors import StorageError
from unlearnd.store import Store

with Store.open(sys.argv[1]) as store:
    Doors(int(sys.argv[3]), sys.argv[4], only="write_many").wrap()
    try:
        store.train("m", dataset="d", backend="linear", epochs=2, seed=int(sys.argv[5]))
    except StorageError as error:
        print(error)
"""


@pytest.mark.parametrize("how", ["raise", "lost"])
def test_an_upload_that_fails_in_the_middle_of_a_build_is_told_with_its_step_and_a_rerun_ends_with_the_same_bits(
    far_store: Store, new_store: Any, people: Any, add: Any, fit: Any, digests: Any, how: str, run_python: Any
) -> None:
    rows = people()
    add(far_store, rows)
    harness = Path(__file__).parent / "faults"
    said = run_python(BROKEN, far_store.folder, harness, 1, how, 20210523)
    assert said.startswith("the state after slice 2 of shard 1 of model 'm' cannot be saved: "), said
    # What came before it is saved, and what comes after was not begun upon a state that is nowhere.
    assert digests(far_store).keys() == {(1, 1)}
    fit(far_store)
    near = new_store("near")
    add(near, rows)
    fit(near)
    assert digests(far_store) == digests(near)
    assert audit(far_store).failed == ()
