"""What receipts say, and what neither they nor the log let anybody find out."""

import base64
import hashlib
import hmac
import json
import re
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.errors import DamagedStoreError, InputError
from unlearnd.keys import LOW_ORDER, check_public_key
from unlearnd.ledger import log, points
from unlearnd.store import Store
from unlearnd.translog import issue_receipts, receipt_bytes, revoke_key, rotate_key, trust
from unlearnd.verify import LocalFolder, Report, verify_receipt
from unlearnd.verify.statements import read_canonical

MOMENT = re.compile(r'"(\d{4}-\d\d-\d\dT[^"]*)"')


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Make a store with 120 points of 20 users `person-0` …, and a model."""
    made: list[Store] = []

    def make(
        name: str = "store", *, shards: int = 3, slices: int = 2, unit: str = "user", train: bool = True, **options: Any
    ) -> Store:
        store = unlearnd.create_store(str(tmp_path / name), **options)
        made.append(store)
        x = np.random.default_rng(4).normal(size=(120, 3)).astype(np.float32)
        user = np.array([f"person-{number % 20}" for number in range(120)])
        store.ingest("d", x, user=user, label=np.arange(120) % 3, shards=shards, slices=slices, unit=unit)
        if train:
            store.train("m", dataset="d", backend="linear", epochs=1)
        return store

    yield make
    for store in made:
        store.close()


def payload_of(receipt: bytes) -> bytes:
    return base64.b64decode(json.loads(receipt)["envelope"]["payload"])


def said(store: Store, request: str) -> dict[str, Any]:
    """Return what the receipt of a request says."""
    predicate: dict[str, Any] = json.loads(payload_of(store.receipt(request)))["predicate"]
    return predicate


def detail_of(store: Store, request: str) -> Any:
    digest = said(store, request)["detail"]["digest"]["sha256"]
    return json.loads(store.storage.read(f"evidence/detail/{digest}.json"))


def leaves_of(store: Store) -> list[dict[str, Any]]:
    return [json.loads(leaf) for leaf in log.leaves(store.ledger, 0, 100_000)]


def kinds(store: Store, kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [
        (index, leaf["predicate"])
        for index, leaf in enumerate(leaves_of(store))
        if leaf["predicateType"] == f"https://unlearnd.dev/{kind}/v1"
    ]


def verified(store: Store, request: str, tmp_path: Path, **more: Any) -> Report:
    """Check a receipt with everything an auditor could bring."""
    folder = tmp_path / f"export-{request}"
    store.export_log(str(folder))
    return verify_receipt(
        store.receipt(request), trust(store.translog), now=datetime.now(UTC), export=LocalFolder(folder), **more
    )


def everything_published(store: Store) -> bytes:
    """Return all that leaves the store: leaves, tree heads, receipts, details, the trust file."""
    parts = [*log.leaves(store.ledger, 0, 100_000), trust(store.translog)]
    parts += [note.encode() for _, note in log.all_heads(store.ledger)]
    for name in store.storage.list("evidence"):
        data = store.storage.read(name)
        parts += [name.encode(), data]
        if name.endswith(".receipt.json"):
            parts.append(payload_of(data))
    return b"\n".join(parts)


# What it looks like.


def test_a_payload_stays_below_4_kb_however_many_shards_there_are(new: Callable[..., Store]) -> None:
    sizes = {}
    for shards, slices in ((2, 1), (30, 4)):
        store = new(f"store-{shards}", shards=shards, slices=slices, unit="point")
        (outcome,) = store.erase([f"person-{0}"], build=False).outcomes
        payload = payload_of(store.receipt(outcome.request))
        sizes[shards] = len(payload)
        assert len(outcome.slices) >= (1 if shards == 2 else 4)
        assert len(store.receipt(outcome.request)) < 10_000
    assert max(sizes.values()) < 4096
    assert abs(sizes[2] - sizes[30]) < 50, "only numbers grow"


def test_leaves_receipts_and_details_are_canonical_and_have_no_floats(new: Callable[..., Store]) -> None:
    store = new()
    store.erase(["person-1", "nobody"], points=["d:7"])
    documents = [*log.leaves(store.ledger, 0, 100_000)]
    documents += [payload_of(store.receipt(entry.request_id)) for entry in store.receipts()]
    documents += [store.storage.read(name) for name in store.storage.list("evidence/detail")]
    assert len(documents) > 15
    for document in documents:
        # Refuses floats, integers from 2^53 on, keys outside ASCII and any second spelling.
        read_canonical(document, "the document", 10_000_000)


def test_leaves_and_so_receipts_are_dated_to_the_minute(new: Callable[..., Store]) -> None:
    store = new()
    (outcome,) = store.erase(["person-1"]).outcomes
    rotate_key(store.translog, "receipt", "2026-01-01T10:11:12Z")
    for leaf in leaves_of(store):
        moments = MOMENT.findall(json.dumps(leaf))
        assert moments
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:00Z", moment) for moment in moments)
    assert said(store, outcome.request)["influenceRemovedAt"][:16] == (outcome.influence_removed_at or "")[:16]


def test_a_receipt_is_the_leaf_and_its_file_is_named_after_the_request(new: Callable[..., Store]) -> None:
    store = new()
    (outcome,) = store.erase(["person-1"]).outcomes
    (entry,) = store.receipts()
    assert log.leaves(store.ledger, entry.leaf, entry.leaf + 1) == [payload_of(store.receipt(outcome.request))]
    assert store.storage.list("evidence/receipts") == [f"evidence/receipts/{outcome.request}.receipt.json"]


# What it says.


def test_a_receipt_says_what_was_done_and_everything_behind_it_holds(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new()
    plan = store.plan_erasure(["person-1"])
    (before,) = points.holdings_of(store.ledger, store.keys.handles(["person-1"]))
    erased = store.erase(["person-1"])
    (outcome,) = erased.outcomes
    predicate = said(store, outcome.request)
    assert predicate["found"] is True
    assert predicate["asked"] == "user"
    assert predicate["erased"] == {"points": 6, "root": outcome.erased_root}
    assert predicate["samples"] == {"retrain": plan.models[0].samples, "fromScratch": plan.models[0].from_scratch}
    assert predicate["checkpoints"]["destroyed"]["count"] == plan.models[0].checkpoints
    assert predicate["replay"] == "bit-exact"
    assert predicate["software"]["version"] == unlearnd.__version__
    assert "copies-outside-store" in predicate["scope"]["notClaimed"]
    detail = detail_of(store, outcome.request)
    assert [entry[:4] for entry in detail["slices"]] == [["d", before.shard, before.slice, 6]]
    ((*standing, _),) = detail["serving"]
    assert standing == ["m", before.shard, before.slice - 1], "the constituent answers from the slices before"
    (opening,) = erased.openings.values()
    report = verified(store, outcome.request, tmp_path, opening=opening.as_bytes())
    assert {check.id for check in report.checks if check.result.value != "PASS"} == {"R5", "L1"}


def test_users_erased_together_get_a_receipt_each_and_only_of_their_own(
    new: Callable[..., Store], tmp_path: Path
) -> None:
    store = new(shards=1, slices=1)
    outcomes = store.erase([f"person-{n}" for n in range(4)]).outcomes
    lists = [set(detail_of(store, outcome.request)["erased"]) for outcome in outcomes]
    assert [len(listed) for listed in lists] == [6, 6, 6, 6]
    assert len(set.union(*lists)) == 24
    assert len({said(store, outcome.request)["slices"]["after"] for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert verified(store, outcome.request, tmp_path).failed == ()


def test_a_user_who_is_not_there_gets_a_receipt_that_says_so(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new()
    erased = store.erase(["nobody"])
    (outcome,) = erased.outcomes
    predicate = said(store, outcome.request)
    assert predicate["found"] is False
    assert predicate["erased"]["points"] == predicate["slices"]["count"] == predicate["models"]["count"] == 0
    assert predicate["samples"] == {"retrain": 0, "fromScratch": 0}
    assert predicate["userCommitment"] is not None, "or a receipt would tell who is not there from who is"
    (opening,) = erased.openings.values()
    report = verified(store, outcome.request, tmp_path, opening=opening.as_bytes())
    assert report.failed == ()
    assert report["D0"].result.value == "PASS"


def test_a_receipt_for_a_point_commits_to_no_user(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new()
    erased = store.erase(points=["d:7"])
    (outcome,) = erased.outcomes
    assert said(store, outcome.request)["asked"] == "point"
    assert said(store, outcome.request)["userCommitment"] is None
    assert erased.openings == {}
    assert verified(store, outcome.request, tmp_path).failed == ()


def test_points_that_no_model_has_seen_have_no_roots(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new(train=False)
    (outcome,) = store.erase(["person-1"]).outcomes
    assert [entry[4:] for entry in detail_of(store, outcome.request)["slices"]] == [["", ""]]
    assert verified(store, outcome.request, tmp_path).failed == ()


def test_rebuilt_refers_to_the_receipts_of_its_erasure(new: Callable[..., Store]) -> None:
    store = new()
    outcomes = store.erase(["person-1", "person-2"], build=False).outcomes
    assert kinds(store, "rebuilt") == []
    store.build()
    ((index, predicate),) = kinds(store, "rebuilt")
    leaves = sorted(entry.leaf for entry in store.receipts())
    assert predicate["erasureId"] == outcomes[0].erasure
    assert sorted(predicate["receipts"]) == leaves
    assert all(leaf < index for leaf in leaves)
    ((model, trained, scratch),) = predicate["models"]
    assert model == "m"
    assert 0 < trained <= scratch


def test_a_live_set_lists_every_checkpoint_in_force(new: Callable[..., Store]) -> None:
    store = new()
    store.erase(["person-1"])
    _, newest = kinds(store, "liveset")[-1]
    document = json.loads(store.storage.read(f"evidence/detail/{newest['detail']}.json"))
    now = [[c.shard, c.slice, c.recipe, c.file, c.tensors, c.path, c.size] for c in store.checkpoints("m")]
    assert document == {"model": "m", "checkpoints": now}
    assert newest["count"] == len(now) == 6
    assert "shards" not in newest


def test_an_erasure_lists_anew_only_the_shards_that_it_changed(new: Callable[..., Store]) -> None:
    store = new()
    outcome = store.erase(["person-1"], build=False).outcomes[0]
    changed = sorted({touched.shard for touched in outcome.slices})
    _, newest = kinds(store, "liveset")[-1]
    document = json.loads(store.storage.read(f"evidence/detail/{newest['detail']}.json"))
    assert newest["shards"] == changed != sorted({c.shard for c in store.checkpoints("m")})
    assert document["checkpoints"] == [
        [c.shard, c.slice, c.recipe, c.file, c.tensors, c.path, c.size]
        for c in store.checkpoints("m")
        if c.shard in changed
    ]
    assert {shard for _, shard, _, _ in detail_of(store, outcome.request)["serving"]} == set(changed)


# Once, and always the same.


def test_a_receipt_issued_again_is_the_same(new: Callable[..., Store]) -> None:
    store = new()
    (outcome,) = store.erase(["person-1"], build=False).outcomes
    first = store.receipt(outcome.request)
    (entry,) = store.receipts()
    assert receipt_bytes(store.translog, entry) == first, "under the same tree head, to the byte"
    store.erase(["person-2"])
    issue_receipts(store.translog)
    assert store.receipt(outcome.request) == first, "what was handed out is never written again"
    again = json.loads(receipt_bytes(store.translog, entry))
    assert again["envelope"] == json.loads(first)["envelope"], "only the proof grows"


def test_asking_again_gives_no_second_receipt(new: Callable[..., Store]) -> None:
    store = new()
    first = store.erase(["person-1"]).outcomes
    size, _ = log.size_and_root(store.ledger)
    again = store.erase(["person-1"])
    assert again.outcomes == first
    assert again.openings == {}, "it was handed out once, and the store keeps none of it"
    assert len(store.receipts()) == 1
    assert log.size_and_root(store.ledger)[0] == size


# Whose it is, and who can tell.


def test_the_opening_opens_the_receipt_and_no_other_does(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new()
    erased = store.erase(["person-1", "person-2"])
    one, two = (erased.openings[outcome.request] for outcome in erased.outcomes)
    request = erased.outcomes[0].request
    committed = hmac.digest(one.nonce, b"unlearnd/user/v1\nperson-1", "sha256").hex()
    assert said(store, request)["userCommitment"] == committed
    assert verified(store, request, tmp_path, opening=one.as_bytes())["D0"].result.value == "PASS"
    for wrong in (two.as_bytes(), one.as_bytes().replace(b"person-1", b"person-2")):
        assert verified(store, request, tmp_path, opening=wrong)["D0"].result.value == "FAIL"
    assert "person-1" not in repr(one)


def test_nothing_published_names_anybody_or_lets_a_guess_be_tested(new: Callable[..., Store]) -> None:
    store = new()
    users = [f"person-{number}" for number in range(20)]
    handles = store.keys.handles(users)
    keys = points.user_keys(store.ledger, handles)
    erased = store.erase(["person-1", "person-2"], points=["d:7"])
    published = everything_published(store)
    secrets = [*handles, *keys.values(), store.keys.pepper, store.keys.placement]
    secrets += [opening.nonce for opening in erased.openings.values()]
    for user in users:
        # What somebody with a list of people, and all that is published, could compute.
        secrets += [
            hashlib.sha256(user.encode()).digest(),
            hashlib.sha256(b"unlearnd/user/v1\n" + user.encode()).digest(),
        ]
        for known in (store.config.store_id, *(outcome.request for outcome in erased.outcomes)):
            secrets.append(hmac.digest(known.encode(), b"unlearnd/user/v1\n" + user.encode(), "sha256"))
    for secret in secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")):
            assert form not in published
    assert b"person" not in published


def test_two_receipts_of_one_person_cannot_be_told_to_be_of_one(new: Callable[..., Store]) -> None:
    store = new()
    (first,) = store.erase(["person-1"]).outcomes
    rows = np.zeros((2, 3), np.float32)
    store.ingest("d", rows, user=np.array(["person-1", "person-3"]), label=np.array([0, 1]), readmit=True)
    store.build()
    (second,) = store.erase(["person-1"]).outcomes
    assert first.request != second.request
    commitments = [said(store, outcome.request)["userCommitment"] for outcome in (first, second)]
    assert commitments[0] != commitments[1]


def test_the_nonce_is_nowhere_in_the_store_once_it_was_handed_out(new: Callable[..., Store]) -> None:
    store = new()
    erased = store.erase(["person-1", "nobody"])
    nonces = [opening.nonce for opening in erased.openings.values()]
    assert len(nonces) == 2
    folder = store.folder
    store.close()
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(nonce in data or nonce.hex().encode() in data for nonce in nonces), path


# Keys.


def test_receipts_stay_good_over_rotation_and_a_revocation_takes_only_what_it_says(
    new: Callable[..., Store], tmp_path: Path
) -> None:
    store = new()
    (first,) = store.erase(["person-1"]).outcomes
    old = next(key for key in store.signing_keys() if key.role == "receipt")
    new_key = store.rotate_key("receipt")
    store.rotate_key("log")
    (second,) = store.erase(["person-2"]).outcomes
    for outcome in (first, second):
        assert verified(store, outcome.request, tmp_path).failed == ()
    signed_by = [json.loads(store.receipt(o.request))["envelope"]["signatures"][0]["keyid"] for o in (first, second)]
    assert signed_by == [old.key_id, new_key.key_id]
    leaf = next(entry.leaf for entry in store.receipts() if entry.request_id == first.request)
    revoke_key(store.translog, old.key_id, leaf, "2026-01-01T00:00:00Z")
    assert verify_receipt(store.receipt(first.request), trust(store.translog), now=datetime.now(UTC)).failed == ("R1",)
    assert verify_receipt(store.receipt(second.request), trust(store.translog), now=datetime.now(UTC)).failed == ()


def test_private_keys_are_for_their_owner_alone(new: Callable[..., Store]) -> None:
    store = new(train=False)
    store.rotate_key("receipt")
    files = list((store.folder / "keys").glob("*.key"))
    assert len(files) == 5
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_with_a_passphrase_signs_only_with_it_and_nothing_is_lost_without(
    new: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNLEARND_KEY_PASSPHRASE", "correct horse")
    folder = new().folder
    for name in ("log", "receipt"):
        assert b"ENCRYPTED PRIVATE KEY" in (folder / "keys" / f"{name}.key").read_bytes()
    for wrong in (None, "battery staple"):
        if wrong is None:
            monkeypatch.delenv("UNLEARND_KEY_PASSPHRASE")
        else:
            monkeypatch.setenv("UNLEARND_KEY_PASSPHRASE", wrong)
        with Store.open(folder) as store, pytest.raises(DamagedStoreError, match="UNLEARND_KEY_PASSPHRASE"):
            store.erase(["person-1"])
    monkeypatch.setenv("UNLEARND_KEY_PASSPHRASE", "correct horse")
    with Store.open(folder) as store:
        (outcome,) = store.erase(["person-1"]).outcomes
        assert len(store.receipts()) == 1, "the erasure was done the first time, and gets its one receipt now"
        assert verified(store, outcome.request, tmp_path).failed == ()


@pytest.mark.parametrize("number", sorted(LOW_ORDER))
@pytest.mark.parametrize("sign", [0, 1])
def test_points_of_low_order_and_second_spellings_are_no_keys(number: int, sign: int) -> None:
    low = (number | sign << 255).to_bytes(32, "little")
    with pytest.raises(InputError):
        check_public_key(low)


def test_a_key_that_is_not_canonical_or_too_short_is_no_key() -> None:
    for given in ((2**255 - 19 + 5).to_bytes(32, "little"), b"\x09" * 31):
        with pytest.raises(InputError):
            check_public_key(given)
