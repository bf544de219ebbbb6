"""Receipts against the verifier, honest ones and forged ones.

The evidence is made here, by a small operator written from docs/reference/evidence.md with nothing of the package in
it, so that a misreading shared by the package's two halves would show.
"""

import ast
import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import unlearnd.verify
from unlearnd.cli import Commands
from unlearnd.cli.verify import verify as verify_command
from unlearnd.errors import FormatError
from unlearnd.verify import LocalFolder, Report, verify_receipt
from unlearnd.verify.command import run as verify_by_words
from unlearnd.verify.command import understand
from unlearnd.verify.proofs import read_proof
from unlearnd.verify.receipts import read_receipt
from unlearnd.verify.trust import read_head, read_trust
from unlearnd.verify.values import Value

STORE = "5d0b2c4e7f8a9b1c2d3e4f5061728394"
NOW = datetime(2026, 3, 20, 12, 0, tzinfo=UTC)
NONCE = bytes(range(32))
PASS, FAIL, NOT_CHECKED = unlearnd.verify.Result


# An operator, written from the specification.


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def public_of(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def make_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def root_of(leaves: Sequence[bytes]) -> bytes:
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + root_of(leaves[:k]) + root_of(leaves[k:])).digest()


def path_of(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = 1 << (len(leaves) - 1).bit_length() - 1
    if index < k:
        return [*path_of(index, leaves[:k]), root_of(leaves[k:])]
    return [*path_of(index - k, leaves[k:]), root_of(leaves[:k])]


def consistency_of(old: int, leaves: Sequence[bytes], whole: bool = True) -> list[bytes]:
    if old == len(leaves):
        return [] if whole else [root_of(leaves)]
    k = 1 << (len(leaves) - 1).bit_length() - 1
    if old <= k:
        return [*consistency_of(old, leaves[:k], whole), root_of(leaves[k:])]
    return [*consistency_of(old - k, leaves[k:], False), root_of(leaves[:k])]


def root_of_lines(lines: Sequence[Any]) -> str:
    return root_of([canonical(line) for line in lines]).hex()


def note_id(name: str, algorithm: int, public: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([algorithm]) + public).digest()[:4]


def vkey(name: str, algorithm: int, key: Ed25519PrivateKey) -> str:
    public = public_of(key)
    return f"{name}+{note_id(name, algorithm, public).hex()}+{b64(bytes([algorithm]) + public)}"


def receipt_key_id(key: Ed25519PrivateKey) -> str:
    return digest(bytes.fromhex("302a300506032b6570032100") + public_of(key))


def seal(payload: bytes, key: Ed25519PrivateKey) -> dict[str, Any]:
    kind = "application/vnd.in-toto+json"
    message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    signature = {"keyid": receipt_key_id(key), "sig": b64(key.sign(message))}
    return {"payloadType": kind, "payload": b64(payload), "signatures": [signature]}


class Operator:
    """A store's evidence: a log, its keys, its documents."""

    def __init__(self, store: str = STORE) -> None:
        self.store, self.origin = store, f"unlearnd.dev/log/{store}"
        self.log_key, self.receipt_key = make_key("log" + store), make_key("receipt" + store)
        self.leaves: list[bytes] = []
        self.details: dict[str, bytes] = {}
        self.cosigners: dict[str, Ed25519PrivateKey] = {}
        self.trusted: dict[str, Any] = {
            "mediaType": "application/vnd.unlearnd.trust.v1+json",
            "storeId": self.store,
            "origin": self.origin,
            "logKeys": [{"vkey": vkey(self.origin, 1, self.log_key), "since": 0, "until": None}],
            "receiptKeys": [self.trusted_receipt_key(self.receipt_key)],
            "witnesses": [],
            "quorum": 0,
        }

    @staticmethod
    def trusted_receipt_key(key: Ed25519PrivateKey, since: int = 0, until: int | None = None) -> dict[str, Any]:
        return {"keyId": receipt_key_id(key), "publicKey": b64(public_of(key)), "since": since, "until": until}

    def append(self, kind: str, predicate: dict[str, Any], subject: tuple[str, str] | None = None) -> int:
        name, sha256 = subject or (kind, digest(canonical(predicate)))
        self.leaves.append(
            canonical(
                {
                    "_type": "https://in-toto.io/Statement/v1",
                    "subject": [{"name": name, "digest": {"sha256": sha256}}],
                    "predicateType": f"https://unlearnd.dev/{kind}/v1",
                    "predicate": predicate,
                }
            )
        )
        return len(self.leaves) - 1

    def key(self, role: str, action: str, key: Ed25519PrivateKey, at: str, since: int | None = None) -> int:
        public = public_of(key)
        key_id = receipt_key_id(key) if role == "receipt" else note_id(self.origin, 1, public).hex()
        more = {} if since is None else {"since": since}
        said = {"role": role, "action": action, "keyId": key_id, "publicKey": b64(public), "at": at, **more}
        return self.append("key", said)

    def begin(self) -> None:
        software = {"name": "unlearnd", "version": "0.1.0"}
        at = "2026-01-01T00:00:00Z"
        self.append("genesis", {"storeId": self.store, "origin": self.origin, "createdAt": at, "software": software})
        self.key("log", "add", self.log_key, at)
        self.key("receipt", "add", self.receipt_key, at)

    def request(self, number: int, received: str = "2026-03-01T09:30:00Z", due: str = "2026-03-31T09:30:00Z") -> int:
        ids = {"requestId": f"request-{number}", "erasureId": f"erasure-{number}", "kind": "user"}
        return self.append("request", {**ids, "receivedAt": received, "dueAt": due})

    def erasure(self, number: int, leaf: int, **changes: Any) -> int:
        predicate, document = make_erasure(self.store, number, leaf)
        predicate.update(changes)
        self.details[digest(document)] = document
        return self.append("erasure", predicate, ("detail", predicate["detail"]["digest"]["sha256"]))

    def head(self, size: int | None = None, key: Ed25519PrivateKey | None = None, time: int = 1_772_400_000) -> bytes:
        size, key = len(self.leaves) if size is None else size, key or self.log_key
        text = f"{self.origin}\n{size}\n{b64(root_of(self.leaves[:size]))}\n"
        log_id = note_id(self.origin, 1, public_of(key))
        lines = f"— {self.origin} {b64(log_id + key.sign(text.encode()))}\n"
        for name, witness in self.cosigners.items():
            signed = witness.sign(f"cosignature/v1\ntime {time}\n{text}".encode())
            line = note_id(name, 4, public_of(witness)) + time.to_bytes(8, "big") + signed
            lines += f"— {name} {b64(line)}\n"
        return f"{text}\n{lines}".encode()

    def proof(self, index: int, size: int | None = None) -> str:
        size = len(self.leaves) if size is None else size
        path = "".join(b64(value) + "\n" for value in path_of(index, self.leaves[:size]))
        return f"c2sp.org/tlog-proof@v1\nindex {index}\n{path}\n{self.head(size).decode()}"

    def receipt(self, index: int, size: int | None = None, key: Ed25519PrivateKey | None = None) -> bytes:
        envelope = seal(self.leaves[index], key or self.receipt_key)
        return wrap(envelope, self.proof(index, size))

    def trust(self) -> bytes:
        return json.dumps(self.trusted, indent=2).encode()

    def export(self, folder: Path) -> Path:
        def write(name: str, data: bytes) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

        for start in range(0, len(self.leaves), 256):
            part = self.leaves[start : start + 256]
            number = start // 256
            name = f"tile/entries/{number:03}" + ("" if len(part) == 256 else f".p/{len(part)}")
            write(name, b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in part))
        for name, document in self.details.items():
            write(f"detail/{name}.json", document)
        write("trust.json", self.trust())
        write("checkpoint", self.head())
        return folder


def wrap(envelope: dict[str, Any], proof: str) -> bytes:
    kind = "application/vnd.unlearnd.receipt.v1+json"
    return json.dumps({"mediaType": kind, "envelope": envelope, "proof": proof}, ensure_ascii=False).encode()


OLD, NEW = digest("slice before"), digest("slice after")
FIRST, TAINTED = digest("recipe of slice 1"), digest("recipe of slice 2")


def make_detail(number: int) -> dict[str, Any]:
    return {
        "requestId": f"request-{number}",
        "erased": sorted(digest(f"commitment {number}.{i}") for i in range(5)),
        "slices": [["people", 0, 2, 5, OLD, NEW]],
        "destroyed": [["churn", 0, 2, TAINTED, digest("file 2"), digest("tensors 2")]],
        "serving": [["churn", 0, 1, FIRST], ["churn", 1, 0, ""]],
        "models": [["churn", "people", digest("spec"), "bit-exact", 40, 200]],
    }


def make_erasure(
    store: str, number: int, leaf: int, detail: dict[str, Any] | None = None
) -> tuple[dict[str, Any], bytes]:
    detail = detail or make_detail(number)
    document = canonical(detail)
    listed: Callable[[str], dict[str, Any]] = lambda name: {  # noqa: E731
        "count": len(detail[name]),
        "root": root_of_lines(detail[name]),
    }
    predicate = {
        "storeId": store,
        "requestId": f"request-{number}",
        "erasureId": f"erasure-{number}",
        "asked": "user",
        "found": True,
        "request": {"leafIndex": leaf, "receivedAt": "2026-03-01T09:30:17Z", "dueAt": "2026-03-31T09:30:00Z"},
        "influenceRemovedAt": "2026-03-01T09:30:19Z",
        "userCommitment": hmac.digest(NONCE, b"unlearnd/user/v1\nada", "sha256").hex(),
        "erased": {"points": len(detail["erased"]), "root": root_of(list(map(bytes.fromhex, detail["erased"]))).hex()},
        "slices": {
            "count": len(detail["slices"]),
            "before": root_of_lines([[*entry[:3], entry[4]] for entry in detail["slices"]]),
            "after": root_of_lines([[*entry[:3], entry[5]] for entry in detail["slices"]]),
        },
        "checkpoints": {"destroyed": listed("destroyed"), "serving": listed("serving")},
        "models": listed("models"),
        "samples": {"retrain": sum(m[4] for m in detail["models"]), "fromScratch": sum(m[5] for m in detail["models"])},
        "replay": "bit-exact",
        "detail": {"digest": {"sha256": digest(document)}, "size": len(document)},
        "scope": {
            "claims": ["training-data", "checkpoints", "ledger"],
            "notClaimed": ["copies-outside-store", "backups", "other-users-data"],
        },
        "software": {"name": "unlearnd", "version": "0.1.0", "plugins": {"unlearnd-torch": "0.1.0"}},
    }
    return predicate, document


REQUEST, RECEIPT = 7, 10


def make_shop(store: str = STORE) -> Operator:
    """An operator who trained a model, erased one user and rebuilt it."""
    shop = Operator(store)
    shop.begin()
    at = "2026-01-02T10:00:00Z"
    layout = {"shards": 2, "unit": "user", "placement": "uniform", "shape": [4], "dtype": "float32", "classes": 2}
    shop.append("dataset", {"dataset": "people", **layout, "at": at})
    shop.append("slices", {"dataset": "people", "roots": [[0, 1, digest("slice 1"), 9], [0, 2, OLD, 9]], "at": at})
    model = {"model": "churn", "dataset": "people", "spec": digest("spec"), "seed": "17", "replay": "bit-exact"}
    shop.append("model", {**model, "recipes": [[0, digest("r0")], [1, digest("r1")]], "at": at})
    built = [
        [0, 1, FIRST, digest("r0"), digest("slice 1"), digest("file 1"), digest("tensors 1"), 100],
        [0, 2, TAINTED, FIRST, OLD, digest("file 2"), digest("tensors 2"), 100],
    ]
    shop.append("built", {"model": "churn", "checkpoints": built, "at": at})
    at = "2026-03-01T09:30:00Z"
    assert shop.request(1) == REQUEST
    shop.append("slices", {"dataset": "people", "roots": [[0, 2, NEW, 4]], "at": at})
    gone = [[0, 2, TAINTED, digest("file 2")]]
    shop.append("destroyed", {"model": "churn", "checkpoints": gone, "erasureId": "erasure-1", "at": at})
    assert shop.erasure(1, REQUEST) == RECEIPT
    again = [[0, 2, digest("new recipe"), FIRST, NEW, digest("file 3"), digest("tensors 3"), 100]]
    shop.append("built", {"model": "churn", "checkpoints": again, "at": at})
    shop.append("rebuilt", {"erasureId": "erasure-1", "receipts": [RECEIPT], "models": [["churn", 40, 200]], "at": at})
    shop.append("from-the-future", {"anything": [1, "two", None]})
    return shop


def make_opening(user: str = "ada", number: int = 1) -> bytes:
    kind = "application/vnd.unlearnd.opening.v1+json"
    said = {"mediaType": kind, "requestId": f"request-{number}", "user": user, "nonce": NONCE.hex()}
    return json.dumps(said).encode()


def check(shop: Operator, receipt: bytes | None = None, folder: Path | None = None, **more: Any) -> Report:
    """Verify a receipt of `shop`; its own by default, with its log where a folder is given."""
    export = LocalFolder(shop.export(folder)) if folder else None
    given = shop.receipt(RECEIPT) if receipt is None else receipt
    return verify_receipt(given, shop.trust(), export=export, **{"now": NOW, **more})


def failed(report: Report) -> set[str]:
    assert report.level is None
    assert report.exit_code == 3
    return set(report.failed)


@pytest.fixture
def shop() -> Operator:
    return make_shop()


def rewrite(shop: Operator, index: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a leaf says, with its subject, as an operator could who writes the log anew."""
    statement = json.loads(shop.leaves[index])
    change(statement["predicate"])
    if statement["subject"][0]["name"] != "detail":
        statement["subject"][0]["digest"]["sha256"] = digest(canonical(statement["predicate"]))
    shop.leaves[index] = canonical(statement)


# Honest evidence.


def test_a_receipt_and_the_trust_file_alone_reach_level_0(shop: Operator) -> None:
    report = check(shop)
    assert report.failed == ()
    assert {c.id for c in report.checks if c.result is PASS} == {"R1", "R2", "R3", "R4", "R6"}
    assert report.level == 0
    assert report.exit_code == 0
    assert report.about["requestId"] == "request-1"


def test_with_the_log_everything_it_can_show_is_checked(shop: Operator, tmp_path: Path) -> None:
    report = check(shop, folder=tmp_path, older_head=shop.head(5), opening=make_opening())
    assert report.failed == ()
    assert {c.id for c in report.checks if c.result is NOT_CHECKED} == {"R5"}
    assert report.level == 1
    assert "request is leaf 7" in report["R6"].sentence
    assert "stand in the log" in report["D1"].sentence


@pytest.mark.parametrize("size", range(RECEIPT + 1, 15))
def test_a_receipt_verifies_under_every_tree_head_that_holds_it(shop: Operator, size: int, tmp_path: Path) -> None:
    if size <= len(shop.leaves):
        assert check(shop, shop.receipt(RECEIPT, size), tmp_path).level == 1


def test_a_log_of_several_tiles(tmp_path: Path) -> None:
    shop = make_shop()
    for number in range(600):
        at = "2026-03-02T00:00:00Z"
        shop.append("slices", {"dataset": "people", "roots": [[1, number, digest(str(number)), 1]], "at": at})
    report = check(shop, folder=tmp_path, older_head=shop.head(300))
    assert (report.failed, report.level) == ((), 1)


def test_a_partial_bundle_may_have_grown_into_a_full_one(tmp_path: Path) -> None:
    shop = make_shop()
    while len(shop.leaves) < 256:
        shop.append("future", {})
    shop.export(tmp_path)
    (tmp_path / "checkpoint").write_bytes(shop.head(200))
    report = verify_receipt(shop.receipt(RECEIPT, 100), shop.trust(), export=LocalFolder(tmp_path), now=NOW)
    assert (report.failed, report.level) == ((), 1)


def test_a_user_without_data_gets_a_receipt_that_verifies(tmp_path: Path) -> None:
    shop = make_shop()
    leaf = shop.request(2)
    detail = {"requestId": "request-2", "erased": [], "slices": [], "destroyed": [], "serving": [], "models": []}
    predicate, document = make_erasure(shop.store, 2, leaf, detail)
    shop.details[digest(document)] = document
    index = shop.append("erasure", {**predicate, "found": False}, ("detail", digest(document)))
    report = check(shop, shop.receipt(index), tmp_path, opening=make_opening(number=2))
    assert (report.failed, report.level) == ((), 1)
    assert report["D1"].result is PASS


def test_a_tree_head_kept_of_the_same_size_needs_no_log(shop: Operator) -> None:
    assert check(shop, older_head=shop.head()).level == 1
    report = check(shop, older_head=shop.head(5))
    assert report["L1"].result is NOT_CHECKED
    assert report.level == 0


def test_an_export_older_than_the_receipt_proves_nothing_about_it(shop: Operator, tmp_path: Path) -> None:
    shop.export(tmp_path)
    shop.append("future", {})
    report = verify_receipt(shop.receipt(RECEIPT), shop.trust(), export=LocalFolder(tmp_path), now=NOW)
    assert report["L3"].result is NOT_CHECKED
    assert report.level == 0


# Keys.


def test_a_rotated_key_still_vouches_for_what_it_signed(shop: Operator, tmp_path: Path) -> None:
    before, head = shop.receipt(RECEIPT), shop.head()
    new_receipt, new_log = make_key("second receipt key"), make_key("second log key")
    at = "2026-03-02T00:00:00Z"
    for role, new, listed in (("receipt", new_receipt, "receiptKeys"), ("log", new_log, "logKeys")):
        since = shop.key(role, "add", new, at)
        shop.trusted[listed][0]["until"] = since
        entry = {"vkey": vkey(shop.origin, 1, new), "since": since, "until": None}
        shop.trusted[listed].append(entry if role == "log" else shop.trusted_receipt_key(new, since))
    shop.log_key = new_log
    assert check(shop, before, tmp_path, older_head=head).level == 1
    # The new key does not vouch for old leaves, nor the old one for new trees.
    assert failed(check(shop, shop.receipt(RECEIPT, key=new_receipt))) == {"R1"}
    shop.log_key = make_key("log" + STORE)
    assert failed(check(shop)) == {"R4"}


def test_revoked_key_used(shop: Operator, tmp_path: Path) -> None:
    old_trust = shop.trust()
    shop.key("receipt", "revoke", shop.receipt_key, "2026-03-02T00:00:00Z", since=9)
    shop.trusted["receiptKeys"][0]["until"] = 9
    receipt = shop.receipt(RECEIPT)
    assert failed(check(shop, receipt)) == {"R1"}
    # A trust file from before the revocation does not help, where the log is there.
    export = LocalFolder(shop.export(tmp_path))
    assert verify_receipt(receipt, old_trust, now=NOW).level == 0
    assert failed(verify_receipt(receipt, old_trust, export=export, now=NOW)) == {"R1"}


def test_a_key_of_the_trust_file_that_was_never_logged(shop: Operator, tmp_path: Path) -> None:
    stranger = make_key("stranger")
    shop.trusted["receiptKeys"].append(shop.trusted_receipt_key(stranger))
    assert failed(check(shop, folder=tmp_path)) == {"L2"}
    assert failed(check(shop, shop.receipt(RECEIPT, key=stranger), tmp_path)) == {"L2"}


def test_a_key_trusted_from_before_it_was_logged(shop: Operator, tmp_path: Path) -> None:
    late = make_key("late")
    shop.key("receipt", "add", late, "2026-03-02T00:00:00Z")
    shop.trusted["receiptKeys"].append(shop.trusted_receipt_key(late, since=3))
    assert "L2" in failed(check(shop, shop.receipt(RECEIPT, key=late), tmp_path))


# Attacks, one each.


def test_forged_by_an_outsider(shop: Operator) -> None:
    assert failed(check(shop, shop.receipt(RECEIPT, key=make_key("outsider")))) == {"R1"}


def test_field_edited(shop: Operator, tmp_path: Path) -> None:
    value = json.loads(shop.receipt(RECEIPT))
    payload = base64.b64decode(value["envelope"]["payload"]).replace(b'"points":5', b'"points":6')
    value["envelope"]["payload"] = b64(payload)
    assert failed(check(shop, json.dumps(value).encode())) == {"R1", "R3"}
    assert failed(check(shop, json.dumps(value).encode(), tmp_path)) == {"R1", "R3", "L3", "D1"}


def test_receipt_key_stolen_and_not_logged(shop: Operator, tmp_path: Path) -> None:
    predicate, document = make_erasure(shop.store, 66, REQUEST)
    forged = Operator()
    forged.append("erasure", predicate, ("detail", digest(document)))
    receipt = wrap(seal(forged.leaves[0], shop.receipt_key), shop.proof(RECEIPT))
    assert failed(check(shop, receipt)) == {"R3"}
    assert {"R3", "L3"} <= failed(check(shop, receipt, tmp_path))


def test_history_rewritten(shop: Operator, tmp_path: Path) -> None:
    kept = shop.head(9)
    rewrite(shop, 4, lambda said: said["roots"][0].__setitem__(3, 8))
    assert check(shop, folder=tmp_path).level == 1, "without a tree head kept, nobody can see it"
    assert failed(check(shop, folder=tmp_path, older_head=kept)) == {"L1"}


def test_log_cut_short(shop: Operator, tmp_path: Path) -> None:
    shop.append("future", {})
    kept = shop.head()
    shop.leaves.pop()
    assert failed(check(shop, folder=tmp_path, older_head=kept)) == {"L1"}


def test_fork_with_both_keys(shop: Operator, tmp_path: Path) -> None:
    fork = make_shop()
    rewrite(fork, RECEIPT, lambda said: said.__setitem__("userCommitment", digest("somebody else")))
    receipt = fork.receipt(RECEIPT)
    assert check(shop, receipt).level == 0, "a receipt alone cannot show it"
    assert failed(check(shop, receipt, tmp_path)) == {"L3"}


def test_fork_after_the_receipt(shop: Operator, tmp_path: Path) -> None:
    fork = make_shop()
    rewrite(fork, 12, lambda said: said["models"].append(["other", 1, 1]))
    assert failed(check(shop, fork.receipt(RECEIPT), tmp_path)) == {"L3"}


def test_tree_head_of_another_log_under_our_name(shop: Operator) -> None:
    ours, other = shop.origin, "unlearnd.dev/log/other"
    text = shop.head().decode().split("\n\n")[0].replace(ours, other) + "\n"
    line = note_id(ours, 1, public_of(shop.log_key)) + shop.log_key.sign(text.encode())
    front = shop.proof(RECEIPT).partition("\n\n")[0]
    proof = f"{front}\n\n{text}\n— {ours} {b64(line)}\n"
    assert failed(check(shop, wrap(seal(shop.leaves[RECEIPT], shop.receipt_key), proof))) == {"R4"}


def test_a_request_logged_after_its_receipt(shop: Operator) -> None:
    index = shop.erasure(2, 99)
    assert failed(check(shop, shop.receipt(index))) == {"R6"}


def test_two_views(shop: Operator) -> None:
    kept = shop.head()
    other = make_shop()
    rewrite(other, 4, lambda said: said["roots"][0].__setitem__(3, 8))
    assert failed(check(other, older_head=kept)) == {"L1"}


def test_back_dated_completion(shop: Operator, tmp_path: Path) -> None:
    # Removed on the day it was due; the log went on for a week in between.
    index = shop.request(2)
    shop.append("slices", {"dataset": "people", "roots": [[1, 1, OLD, 3]], "at": "2026-04-07T00:00:00Z"})
    late = shop.erasure(2, index, influenceRemovedAt="2026-03-31T09:30:00Z")
    assert {"R6", "L2"} <= failed(check(shop, shop.receipt(late), tmp_path))
    # Before it was even received.
    early = shop.erasure(3, shop.request(3), influenceRemovedAt="2026-02-01T00:00:00Z")
    assert failed(check(shop, shop.receipt(early))) == {"R6"}


def test_deadline_missed(shop: Operator, tmp_path: Path) -> None:
    index = shop.erasure(2, shop.request(2), influenceRemovedAt="2026-03-31T09:30:01Z")
    assert failed(check(shop, shop.receipt(index))) == {"R6"}
    assert failed(check(shop, folder=tmp_path)) == {"L2"}, "others see it in the log"


def test_request_silently_dropped(shop: Operator, tmp_path: Path) -> None:
    shop.request(2)
    assert check(shop, folder=tmp_path).level == 1, "not yet due"
    report = check(shop, folder=tmp_path, now=datetime(2026, 4, 1, tzinfo=UTC))
    assert failed(report) == {"L2"}
    assert "request-2" in report["L2"].sentence


def test_an_extension_in_time_moves_the_deadline_and_a_late_one_does_not(shop: Operator, tmp_path: Path) -> None:
    later, when = "2026-05-31T09:30:00Z", datetime(2026, 5, 1, tzinfo=UTC)
    index = shop.request(2)
    shop.append("extended", {"requestId": "request-2", "dueAt": later, "at": "2026-03-31T09:30:00Z"})
    assert check(shop, folder=tmp_path, now=when).level == 1
    request = {"leafIndex": index, "receivedAt": "2026-03-01T09:30:17Z", "dueAt": later}
    answer = shop.erasure(2, index, request=request, influenceRemovedAt="2026-04-20T10:00:00Z")
    report = check(shop, shop.receipt(answer), tmp_path, now=when)
    assert (report["R6"].result, report["L2"].result) == (PASS, PASS)
    rewrite(shop, index + 1, lambda said: said.__setitem__("at", "2026-04-01T09:30:00Z"))
    assert failed(check(shop, shop.receipt(answer), tmp_path, now=when)) >= {"R6", "L2"}


def test_a_refused_request_is_closed(shop: Operator, tmp_path: Path) -> None:
    index, when = shop.request(2), datetime(2026, 5, 1, tzinfo=UTC)
    refusal = shop.append("refused", {"requestId": "request-2", "reason": "legal-hold", "at": "2026-03-05T00:00:00Z"})
    assert check(shop, folder=tmp_path, now=when).level == 1
    answer = shop.erasure(2, index, influenceRemovedAt="2026-03-06T10:00:00Z")
    assert "L2" in failed(check(shop, shop.receipt(answer), tmp_path, now=when))
    shop.leaves.pop()
    rewrite(shop, refusal, lambda said: said.__setitem__("at", "2026-04-05T00:00:00Z"))
    assert failed(check(shop, folder=tmp_path, now=when)) == {"L2"}


def test_dates_of_the_request_changed_in_the_receipt(shop: Operator, tmp_path: Path) -> None:
    request = {"leafIndex": 14, "receivedAt": "2026-03-01T09:30:00Z", "dueAt": "2026-05-31T09:30:00Z"}
    assert shop.request(2) == 14
    index = shop.erasure(2, 14, request=request)
    assert check(shop, shop.receipt(index)).level == 0
    assert failed(check(shop, shop.receipt(index), tmp_path)) >= {"R6", "L2"}


def test_receipt_for_somebody_elses_request(shop: Operator, tmp_path: Path) -> None:
    index = shop.erasure(2, REQUEST)
    assert failed(check(shop, shop.receipt(index), tmp_path)) >= {"R6", "L2"}


def test_second_receipt_for_one_request(shop: Operator, tmp_path: Path) -> None:
    shop.erasure(1, REQUEST)
    assert failed(check(shop, folder=tmp_path)) == {"L2"}


def test_proof_from_another_log(shop: Operator) -> None:
    other = make_shop("f" * 32)
    other.leaves[RECEIPT] = shop.leaves[RECEIPT]
    receipt = wrap(seal(shop.leaves[RECEIPT], shop.receipt_key), other.proof(RECEIPT))
    assert failed(check(shop, receipt)) == {"R4"}


def test_receipt_of_another_store(shop: Operator) -> None:
    other = make_shop("f" * 32)
    assert failed(check(shop, other.receipt(RECEIPT))) == {"R1", "R2", "R4"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.replace(b'"found":true', b'"found":true,"found":true'), "twice"),
        (lambda p: p.replace(b'"points":5', b'"points": 5'), "canonical"),
        (lambda p: p.replace(b'"points":5', b'"points":5.0'), "integer"),
        (lambda p: p.replace(b'"points":5', b'"points":9007199254740993'), "2^53"),
        (lambda p: p.replace(b'"points":5', b'"points":true'), "count"),
        (lambda p: p.replace(b'"points":5', b'"points":-5'), "count"),
        (lambda p: p.replace(b'"points":5', b'"points":0'), "contradicts"),
        (lambda p: p.replace(b'"replay":"bit-exact"', b'"replay":"roughly"'), "bit-exact"),
        (lambda p: p.replace(b"09:30:19Z", b"09:30:19+00:00"), "moment"),
        (lambda p: p.replace(b"2026-03-01T09:30:19Z", b"2026-02-30T09:30:19Z"), "calendar"),
        (lambda p: p.replace(b"/erasure/v1", b"/erasure/v2"), "erasure"),
        (lambda p: p.replace(b"Statement/v1", b"Statement/v0"), "in-toto"),
        (lambda p: p.replace(b'"name":"detail"', b'"name":"other"'), "subject"),
        (lambda p: p + b" " * 70_000, "larger"),
        (lambda p: b"\xff" + p, "UTF-8"),
        (lambda p: b"[" * 60_000, "nested"),
    ],
)
def test_duplicate_key_in_the_payload_and_other_forms(
    shop: Operator, change: Callable[[bytes], bytes], why: str
) -> None:
    # Signed and logged by the operator: only the form is wrong.
    changed = change(shop.leaves[RECEIPT])
    assert changed != shop.leaves[RECEIPT]
    shop.leaves[RECEIPT] = changed
    report = check(shop)
    assert failed(report) == {"R2"}
    assert why in report["R2"].sentence
    assert report.about == {}


def test_leaves_that_are_not_those_of_the_tree_head(shop: Operator, tmp_path: Path) -> None:
    shop.export(tmp_path)
    bundle = next((tmp_path / "tile" / "entries").rglob("14"))
    honest = bundle.read_bytes()
    for position in range(0, len(honest), 97):
        damaged = bytearray(honest)
        damaged[position] ^= 1
        bundle.write_bytes(damaged)
        report = verify_receipt(shop.receipt(RECEIPT), shop.trust(), export=LocalFolder(tmp_path), now=NOW)
        assert "L2" in failed(report)
        assert report["L3"].result is not PASS


def test_missing_or_foreign_parts_of_the_export(shop: Operator, tmp_path: Path) -> None:
    receipt, trust = shop.receipt(RECEIPT), shop.trust()
    empty = verify_receipt(receipt, trust, export=LocalFolder(tmp_path / "nothing"), now=NOW)
    assert failed(empty) == {"L2"}
    shop.export(tmp_path)
    (tmp_path / "checkpoint").write_bytes(make_shop("f" * 32).head())
    foreign = verify_receipt(receipt, trust, export=LocalFolder(tmp_path), now=NOW)
    assert failed(foreign) == {"L2"}
    (tmp_path / "checkpoint").write_bytes(shop.head(key=make_key("outsider")))
    assert failed(verify_receipt(receipt, trust, export=LocalFolder(tmp_path), now=NOW)) == {"L2"}


BAD_LOGS: dict[str, Callable[[Operator], object]] = {
    "a second genesis": lambda s: s.leaves.append(s.leaves[0]),
    "genesis not first": lambda s: s.leaves.insert(0, s.leaves[1]),
    "genesis of another store": lambda s: rewrite(s, 0, lambda said: said.__setitem__("storeId", "other")),
    "a key added twice": lambda s: s.key("log", "add", s.log_key, "2026-03-02T00:00:00Z"),
    "a key under another id": lambda s: rewrite(s, 1, lambda said: said.__setitem__("keyId", "00000000")),
    "an unknown key revoked": lambda s: s.key("log", "revoke", make_key("x"), "2026-03-02T00:00:00Z", 3),
    "a key revoked for the future": lambda s: s.key("receipt", "revoke", s.receipt_key, "2026-03-02T00:00:00Z", 99),
    "a request received twice": lambda s: s.request(1),
    "a request due before it came": lambda s: s.request(2, due="2026-02-01T00:00:00Z"),
    "rebuilt without a receipt": lambda s: rewrite(s, 12, lambda said: said.__setitem__("receipts", [3])),
    "an unknown request extended": lambda s: s.append(
        "extended", {"requestId": "x", "dueAt": "2027-01-01T00:00:00Z", "at": "2026-03-02T00:00:00Z"}
    ),
    "an answered request refused": lambda s: s.append(
        "refused", {"requestId": "request-1", "reason": "x", "at": "2026-03-02T00:00:00Z"}
    ),
    "a leaf to the second": lambda s: rewrite(s, 3, lambda said: said.__setitem__("at", "2026-01-02T10:00:01Z")),
    "a leaf that is no statement": lambda s: s.leaves.append(b"{}"),
    "a leaf with another subject": lambda s: s.append("dataset", {"at": "2026-03-02T00:00:00Z"}, ("dataset", OLD)),
    "a receipt that refers to itself": lambda s: s.erasure(5, len(s.leaves)),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_a_log_that_is_signed_and_wrong(shop: Operator, name: str, tmp_path: Path) -> None:
    BAD_LOGS[name](shop)
    where = RECEIPT + (name == "genesis not first")
    assert "L2" in failed(check(shop, shop.receipt(where), tmp_path))


# Detail and opening.


def change_detail(shop: Operator, change: Callable[[dict[str, Any]], None], consistent: bool) -> bytes:
    """Put another detail document behind the receipt; `consistent` when the receipt's roots follow it."""
    detail = make_detail(1)
    change(detail)
    predicate, document = make_erasure(shop.store, 1, REQUEST, detail)
    if not consistent:
        honest, _ = make_erasure(shop.store, 1, REQUEST)
        predicate = {**honest, "detail": predicate["detail"]}
    shop.leaves.pop(RECEIPT)
    shop.append("erasure", predicate, ("detail", digest(document)))
    shop.leaves.insert(RECEIPT, shop.leaves.pop())
    return document


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(detail: dict[str, Any]) -> None:
        where: Any = detail
        for step in path[:-2]:
            where = where[step]
        where[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["erased"].pop(),
        put("erased", 0, "0" * 64),
        put("slices", 0, 4, NEW),
        put("slices", 0, 5, OLD),
        put("slices", []),
        put("destroyed", []),
        put("destroyed", 0, 5, OLD),
        put("serving", 0, 2, 2),
        put("serving", []),
        put("models", 0, 4, 39),
        put("models", 0, 3, "none"),
    ],
)
def test_a_detail_document_other_than_the_receipts_roots(shop: Operator, change: Any) -> None:
    document = change_detail(shop, change, consistent=False)
    assert failed(check(shop, detail=document)) == {"D1"}


@pytest.mark.parametrize(
    "change",
    [
        put("slices", 0, 4, digest("a root never logged")),
        put("slices", 0, 5, digest("a root never logged")),
        put("slices", 0, 1, 1),
        put("destroyed", 0, 3, digest("never destroyed")),
        put("destroyed", 0, 4, digest("another file")),
        put("serving", 0, 3, digest("never built")),
    ],
)
def test_a_detail_document_that_the_log_contradicts(shop: Operator, change: Any, tmp_path: Path) -> None:
    document = change_detail(shop, change, consistent=True)
    assert check(shop, detail=document).level == 0
    assert failed(check(shop, detail=document, folder=tmp_path)) == {"D1"}


def damage(shop: Operator, train_anew: bool) -> None:
    """Let a checkpoint in service be found damaged before the request, and perhaps be made again."""
    at = "2026-02-01T00:00:00Z"
    gone = {"model": "churn", "checkpoints": [[0, 1, FIRST, digest("file 1")]], "erasureId": "", "at": at}
    leaves = [("destroyed", gone)]
    if train_anew:
        again = [0, 1, FIRST, digest("r0"), digest("slice 1"), digest("file 1b"), digest("tensors 1"), 100]
        leaves.append(("built", {"model": "churn", "checkpoints": [again], "at": at}))
    for number, (kind, predicate) in enumerate(leaves):
        shop.append(kind, predicate)
        shop.leaves.insert(REQUEST + number, shop.leaves.pop())
    more = len(leaves)
    rewrite(shop, RECEIPT + more, lambda said: said["request"].__setitem__("leafIndex", REQUEST + more))
    rewrite(shop, RECEIPT + 2 + more, lambda said: said.__setitem__("receipts", [RECEIPT + more]))


def test_a_damaged_checkpoint_trained_anew_may_be_in_service_and_one_put_away_may_not(tmp_path: Path) -> None:
    anew, away = make_shop(), make_shop()
    damage(anew, True)
    report = check(anew, anew.receipt(RECEIPT + 2), tmp_path / "anew")
    assert (report.failed, report.level) == ((), 1)
    damage(away, False)
    assert failed(check(away, away.receipt(RECEIPT + 1), tmp_path / "away")) == {"D1"}


def test_a_destroyed_checkpoint_in_service(shop: Operator) -> None:
    document = change_detail(shop, put("serving", 0, 3, TAINTED), consistent=True)
    assert failed(check(shop, detail=document)) == {"D1"}


def test_a_detail_document_that_the_receipt_does_not_name(shop: Operator, tmp_path: Path) -> None:
    assert failed(check(shop, detail=canonical(make_detail(2)))) == {"D1"}
    shop.export(tmp_path)
    next((tmp_path / "detail").iterdir()).write_bytes(b"{}")
    export = LocalFolder(tmp_path)
    assert failed(verify_receipt(shop.receipt(RECEIPT), shop.trust(), export=export, now=NOW)) == {"D1"}


@pytest.mark.parametrize(
    "opening",
    [
        make_opening("bob"),
        make_opening(number=2),
        make_opening().replace(b"00010203", b"00010204"),
        b"{}",
        b"",
        make_opening().replace(b"opening.v1", b"opening.v2"),
    ],
)
def test_an_opening_of_somebody_else(shop: Operator, opening: bytes) -> None:
    report = check(shop, opening=opening)
    assert failed(report) == {"D0"}
    assert "bob" not in "".join(report.lines())


def test_an_opening_for_a_receipt_about_a_point(shop: Operator) -> None:
    rewrite(shop, RECEIPT, lambda said: said.update(asked="point", userCommitment=None))
    assert check(shop).level == 0
    assert failed(check(shop, opening=make_opening())) == {"D0"}


# Witnesses.


def make_policy(*names: str, threshold: str = "all", log: str = "") -> bytes:
    lines = [f"witness {name} {vkey(name, 4, make_key(name))}" for name in names]
    return "\n".join([log, *lines, f"group g {threshold} {' '.join(names)}", "quorum g", ""]).encode()


def test_a_witness_quorum_reaches_level_2(shop: Operator, tmp_path: Path) -> None:
    shop.cosigners = {name: make_key(name) for name in ("w1", "w2")}
    alone = check(shop, policy=make_policy("w1", "w2"))
    assert alone["R5"].result is PASS
    assert alone.level == 0, "witnesses without the log show less than the log"
    assert "a witness saw" in alone["R6"].sentence
    assert check(shop, folder=tmp_path, policy=make_policy("w1", "w2")).level == 2
    assert check(shop, folder=tmp_path, policy=make_policy("w1", "w3", threshold="1")).level == 2
    assert check(shop, policy=b"quorum none\n")["R5"].result is NOT_CHECKED
    shop.trusted["witnesses"] = [{"vkey": vkey(name, 4, make_key(name))} for name in ("w1", "w2", "w3")]
    shop.trusted["quorum"] = 2
    assert check(shop, folder=tmp_path).level == 2
    shop.trusted["quorum"] = 3
    assert failed(check(shop)) == {"R5"}


def test_a_witness_may_be_named_by_a_key_of_the_older_form(shop: Operator) -> None:
    shop.cosigners = {"w1": make_key("w1")}
    shop.trusted.update(witnesses=[{"vkey": vkey("w1", 1, make_key("w1"))}], quorum=1)
    assert check(shop)["R5"].result is PASS


def test_a_quorum_that_is_not_there(shop: Operator) -> None:
    assert failed(check(shop, policy=make_policy("w1", threshold="any"))) == {"R5"}
    shop.cosigners = {"w1": make_key("w1")}
    assert failed(check(shop, policy=make_policy("w1", "w2"))) == {"R5"}
    assert failed(check(shop, policy=b"nonsense\n")) == {"R5"}


def test_a_cosignature_of_another_tree(shop: Operator) -> None:
    shop.cosigners = {"w1": make_key("w1")}
    other = make_shop()
    other.cosigners = shop.cosigners
    other.append("future", {})
    line = other.head().decode().rstrip("\n").rsplit("\n", 1)[1]
    shop.cosigners = {}
    receipt = wrap(seal(shop.leaves[RECEIPT], shop.receipt_key), shop.proof(RECEIPT) + line + "\n")
    assert failed(check(shop, receipt, policy=make_policy("w1"))) == {"R5"}


def test_nobody_is_their_own_witness(shop: Operator) -> None:
    shop.cosigners = {"w1": shop.log_key}
    policy = f"witness w1 {vkey('w1', 4, shop.log_key)}\nquorum w1\n".encode()
    assert failed(check(shop, policy=policy)) == {"R5"}
    shop.trusted.update(witnesses=[{"vkey": vkey("w1", 4, shop.log_key)}], quorum=1)
    with pytest.raises(FormatError):
        check(shop)


def test_a_policy_that_names_another_log(shop: Operator) -> None:
    shop.cosigners = {"w1": make_key("w1")}
    own = f"log {vkey(shop.origin, 1, shop.log_key)}"
    assert check(shop, policy=make_policy("w1", log=own))["R5"].result is PASS
    other = f"log {vkey(shop.origin, 1, make_key('x'))}"
    assert failed(check(shop, policy=make_policy("w1", log=other))) == {"R5"}


# Trust files.


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("mediaType"),
        lambda t: t.update(mediaType="x"),
        lambda t: t.update(logKeys=[]),
        lambda t: t.update(receiptKeys=[]),
        lambda t: t.update(quorum=1),
        lambda t: t.update(quorum=-1),
        lambda t: t.update(origin="elsewhere"),
        lambda t: t["logKeys"].append(t["logKeys"][0]),
        lambda t: t["receiptKeys"].append(t["receiptKeys"][0]),
        lambda t: t["receiptKeys"][0].update(keyId="0" * 64),
        lambda t: t["receiptKeys"][0].update(publicKey=b64(bytes(32))),
        lambda t: t["receiptKeys"][0].update(since=5, until=4),
        lambda t: t["receiptKeys"][0].update(since=None),
        lambda t: t["logKeys"][0].update(vkey=vkey("elsewhere", 1, make_key("x"))),
        lambda t: t["logKeys"][0].update(vkey=vkey(t["origin"], 4, make_key("x"))),
    ],
)
def test_an_unusable_trust_file_is_an_error_and_no_report(shop: Operator, change: Any) -> None:
    shop.trusted = deepcopy(shop.trusted)
    change(shop.trusted)
    with pytest.raises(FormatError, match="the trust file cannot be used"):
        check(shop)


# Every byte counts.


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_any_single_byte_change_is_refused_or_changes_nothing_signed_or_proven(shop: Operator, mask: int) -> None:
    shop.cosigners = {"w1": make_key("w1")}
    honest, trust = shop.receipt(RECEIPT), shop.trust()

    def signed_and_proven(receipt: bytes) -> object:
        read = read_receipt(receipt)
        proof = read_proof(read.proof)
        note, head = read_head(proof.note)
        return read.envelope.payload_type, read.envelope.payload, proof.index, proof.path, note.text, head

    expected = signed_and_proven(honest)
    accepted = 0
    for position in range(len(honest)):
        changed = bytearray(honest)
        changed[position] ^= mask
        report = verify_receipt(bytes(changed), trust, now=NOW)
        if report.level is not None:
            assert signed_and_proven(bytes(changed)) == expected, position
            accepted += 1
    # What may change: the hint that names the key, and lines by witnesses nobody asked for.
    assert accepted < 300


# The command.


def run(tmp_path: Path, shop: Operator, *options: str, receipt: bytes | None = None) -> Result:
    group = Commands()
    group.add_command(verify_command)
    (tmp_path / "r.json").write_bytes(receipt or shop.receipt(RECEIPT))
    (tmp_path / "t.json").write_bytes(shop.trust())
    given = ["verify", str(tmp_path / "r.json"), "--trust", str(tmp_path / "t.json"), *options]
    return CliRunner().invoke(group, given)


def test_the_command_prints_a_line_per_check_the_level_and_the_limits(shop: Operator, tmp_path: Path) -> None:
    shop.export(tmp_path / "log")
    (tmp_path / "head").write_bytes(shop.head(4))
    (tmp_path / "opening").write_bytes(make_opening())
    options = ["--log", "log", "--head", "head", "--opening", "opening"]
    given = [option if option.startswith("--") else str(tmp_path / option) for option in options]
    ended = run(tmp_path, shop, *given, "--at", "2026-03-20T12:00:00Z")
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines[:11]] == list(unlearnd.verify.reports.TITLES)
    assert "Assurance level 1" in ended.stdout
    assert "No receipt can prove:" in ended.stdout
    assert "ada" not in ended.output.replace("data", "")
    told = json.loads(run(tmp_path, shop, *given, "--at", "2026-03-20T12:00:00Z", "--json").stdout)
    assert (told["level"], told["failed"]) == (1, [])


def test_a_failed_check_exits_3_without_a_word_of_success(shop: Operator, tmp_path: Path) -> None:
    forged = shop.receipt(RECEIPT, key=make_key("outsider"))
    ended = run(tmp_path, shop, receipt=forged)
    assert ended.exit_code == 3
    assert "R1  FAIL" in ended.stdout
    assert "DO NOT RELY ON THIS RECEIPT: R1" in ended.stdout
    assert "Assurance level: none" in ended.stdout
    for word in ("verified", "valid receipt", "success", "Assurance level 0", " ok", "OK"):
        assert word not in ended.stdout
    told = run(tmp_path, shop, "--json", receipt=forged)
    assert told.exit_code == 3
    assert json.loads(told.stdout)["level"] is None


def test_unreadable_files_are_one_sentence_and_exit_1(shop: Operator, tmp_path: Path) -> None:
    for options in (["--head", "nowhere"], ["--log", "nowhere"], ["--policy", str(tmp_path)], ["--at", "yesterday"]):
        ended = run(tmp_path, shop, *options)
        assert ended.exit_code == 1, options
        assert ended.stderr.startswith("unlearnd: ")
        assert ended.stderr.count("\n") == 1
        assert not ended.stdout


def test_an_unusable_trust_file_exits_3_and_prints_no_report(shop: Operator, tmp_path: Path) -> None:
    shop.trusted["quorum"] = 9
    ended = run(tmp_path, shop)
    assert (ended.exit_code, ended.stdout) == (3, "")


def test_names_in_a_trust_file_cannot_move_the_cursor(shop: Operator, tmp_path: Path) -> None:
    shop.trusted["logKeys"][0]["vkey"] = vkey("\x1b[2J\u202e", 1, shop.log_key)
    ended = run(tmp_path, shop)
    assert ended.exit_code == 3
    assert "\x1b" not in ended.stderr


def test_names_in_evidence_cannot_move_the_cursor(shop: Operator, tmp_path: Path) -> None:
    ids = {"requestId": "\x1b[2J\nR1  PASS\u202e", "erasureId": "e", "kind": "user"}
    shop.append("request", {**ids, "receivedAt": "2026-01-01T00:00:00Z", "dueAt": "2026-01-02T00:00:00Z"})
    shop.export(tmp_path / "log")
    ended = run(tmp_path, shop, "--log", str(tmp_path / "log"))
    assert ended.exit_code == 3
    assert "\x1b" not in ended.stdout
    assert "\u202e" not in ended.stdout
    assert "\nR1  PASS\ufffd" not in ended.stdout


# The same command without click.

QUICK = "import sys; from unlearnd.__main__ import main; sys.argv[0] = 'unlearnd'; main()"
BY_CLICK = "import sys; from unlearnd.cli import main; sys.argv[0] = 'unlearnd'; main()"

LINES = {
    # Answered without click.
    "R --trust T": 0,
    "--json --trust=T R": 0,
    "- --trust T": 0,
    "R --trust T --log L --head H --policy P --opening O --detail D --at 2026-03-20T12:00:00Z": 0,
    "forged --trust T": 3,
    "R --trust R": 3,
    "R --trust nowhere --log nowhere": 1,
    "R --trust T --at yesterday": 1,
    # Left to click.
    "R": 2,
    "R --trust T --jsno": 2,
    "R --trust T --trust T": 0,
    "R --trust=": 1,
    "R --help": 0,
}


@pytest.fixture
def evidence(shop: Operator, tmp_path: Path) -> Path:
    """A folder with every kind of file that `verify` takes, under names of one letter."""
    shop.cosigners = {"w1": make_key("w1")}
    shop.export(tmp_path / "L")
    for name, data in {
        "R": shop.receipt(RECEIPT),
        "forged": shop.receipt(RECEIPT, key=make_key("outsider")),
        "T": shop.trust(),
        "H": shop.head(4),
        "P": make_policy("w1"),
        "O": make_opening(),
        "D": shop.details[json.loads(shop.leaves[RECEIPT])["predicate"]["detail"]["digest"]["sha256"]],
    }.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def in_a_process(code: str, words: Sequence[str], evidence: Path, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code, "verify", *words],
        cwd=evidence,
        stdin=(evidence / "R").open("rb"),
        stderr=subprocess.PIPE,
        **{"stdout": subprocess.PIPE, **options},
    )


@pytest.mark.parametrize("line", LINES)
def test_without_click_the_command_says_the_same_and_exits_the_same(evidence: Path, line: str) -> None:
    both = [in_a_process(code, line.split(" "), evidence) for code in (QUICK, BY_CLICK)]
    (out, err), by_click = (process.communicate(timeout=60) for process in both)
    assert (out, err) == by_click
    assert [process.returncode for process in both] == [LINES[line]] * 2, err
    assert bool(out) is (LINES[line] in (0, 3) and b"trust file cannot" not in err)


def test_without_click_a_closed_pipe_is_no_traceback(evidence: Path) -> None:
    for code in (QUICK, BY_CLICK):
        reading, writing = os.pipe()
        os.close(reading)
        process = in_a_process(code, ["R", "--trust", "T"], evidence, stdout=writing)
        os.close(writing)
        assert process.communicate(timeout=60) == (None, b"")
        assert process.returncode == 1


def test_words_are_understood_without_click_when_each_is_known_and_given_once() -> None:
    assert understand(["r", "--trust", "t"]) == {"receipt": "r", "trust": "t"}
    assert understand(["--trust=-", "--json", "-"]) == {"receipt": "-", "trust": "-", "json": "yes"}
    assert understand(["--trust=a=b", "r"]) == {"receipt": "r", "trust": "a=b"}
    assert understand(["--trust=--json", "r"]) == {"receipt": "r", "trust": "--json"}
    for left in (
        *([], ["r"], ["--trust", "t"], ["r", "r", "--trust", "t"], ["r", "--trust"], ["r", "--trust", ""]),
        *(["r", "--trust="], ["", "--trust", "t"], ["r", "--trust", "--json"], ["r", "--trust", "t", "--json=1"]),
        *(["r", "--trust", "t", "--help"], ["r", "-h", "--trust", "t"], ["r", "--trust", "t", "--"]),
        *(["r", "-trust", "t"], ["r", "--tru", "t"], ["r", "trust=t"], ["r", "--receipt=r", "--trust=t"]),
        *(["r", "--trust", "t", "--trust", "t"], ["r", "--trust", "t", "--json", "--json"]),
        *(["\x1b[2J", "--trust", "t"], ["r", "--trust", "\udcff"]),
    ):
        assert understand(left) is None, left


def test_without_click_an_interrupted_command_says_that_nothing_is_lost(
    evidence: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: int) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=interrupted)))
    assert verify_by_words(["-", "--trust", str(evidence / "T")]) == 1
    assert capfd.readouterr() == ("", "unlearnd: stopped; nothing is lost, run the command again to go on\n")


# What it stands on.

HEAVY = (
    *("numpy", "sqlmodel", "sqlalchemy", "torch", "pyarrow", "fsspec", "pydantic", "rich", "alembic", "safetensors"),
    *("socket", "ssl", "http", "urllib.request", "sqlite3", "asyncio", "rfc8785"),
)


def test_a_fresh_interpreter_verifies_without_store_database_numpy_or_network(shop: Operator, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(shop.receipt(RECEIPT))
    (tmp_path / "t").write_bytes(shop.trust())
    shop.export(tmp_path / "log")
    code = f"""
import sys
from datetime import UTC, datetime
from pathlib import Path
import unlearnd.verify
early = "cryptography" in sys.modules
folder = Path(sys.argv[1])
report = unlearnd.verify.verify_receipt(
    (folder / "r").read_bytes(), (folder / "t").read_bytes(), now=datetime(2026, 3, 20, tzinfo=UTC),
    export=unlearnd.verify.LocalFolder(folder / "log"),
)
ours = sorted(m for m in sys.modules if m.startswith("unlearnd.") and not m.startswith("unlearnd.verify"))
print([early, report.level, sorted(set({HEAVY}) & set(sys.modules)), ours])
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    early, level, heavy, ours = ast.literal_eval(ended.stdout)
    assert (early, level, heavy) == (False, 1, [])
    # What the map of the package itself imports, and nothing of the writer.
    assert set(ours) <= {"unlearnd.errors", "unlearnd.hookspecs"}


def test_the_verifier_imports_the_standard_library_cryptography_and_our_errors_only() -> None:
    for path in Path(unlearnd.verify.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                ours = name == "unlearnd.errors" or name.startswith("unlearnd.verify")
                # `_sha2` is the standard library's from Python 3.12 on.
                known = top in sys.stdlib_module_names or top in ("cryptography", "_sha2")
                assert ours or known, f"{path.name}: {name}"


def test_trust_files_are_read_as_written(shop: Operator) -> None:
    trust = read_trust(shop.trust())
    assert (trust.store_id, trust.origin) == (STORE, shop.origin)
    assert trust.receipt_keys[0].key_id == receipt_key_id(shop.receipt_key)


class _Pair(Value):
    left: int
    right: str = "r"


def test_a_value_of_the_verifier_is_frozen_and_equal_by_content() -> None:
    pair = _Pair(1)
    assert pair == _Pair(left=1, right="r")
    assert pair != _Pair(2)
    assert len({pair, _Pair(1), pair.but(right="x")}) == 2
    assert repr(pair) == "_Pair(left=1, right='r')"
    with pytest.raises(AttributeError, match="cannot be changed"):
        pair.left = 2  # type: ignore[misc]
    for given, named in (((), {}), ((1, "r", 3), {}), ((1,), {"left": 1}), ((1,), {"other": 1})):
        with pytest.raises(TypeError):
            _Pair(*given, **named)  # type: ignore[arg-type]
