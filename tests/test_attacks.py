"""One forgery per test, each through the command line, each seen by the check that exists for it.

The attacker is the operator: the ledger's triggers are theirs to drop, the files theirs to change, the keys theirs to
use, and they may run other code than ours. What they cannot change is what somebody else kept: a receipt, an opening,
a tree head, an exported log.
"""

import base64
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import unlearnd
from unlearnd import erasure, features
from unlearnd.cli import main
from unlearnd.digests import digest_of
from unlearnd.erasure import record_requests
from unlearnd.keys import Signer, create_signer, open_signer, receipt_key_id
from unlearnd.ledger import log, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.packing import pack, unpack
from unlearnd.receipts import canonical, make_receipt, seal_envelope
from unlearnd.slices import Rows, compute_roots, encode_segment, read_segment, read_slices
from unlearnd.statements import live_set, slices_sealed
from unlearnd.store import Store
from unlearnd.translog import issue_receipts, keep_detail, prove_leaf, sign_head

LONG_AGO = datetime.now(UTC).replace(microsecond=0) - timedelta(days=50)
"""When the honest part happened: all that is open since is overdue."""


class Told:
    """A clock that tells what it is told, and goes on by a second each time."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@dataclass(frozen=True)
class Place:
    """A store in which u1 and u2 were erased, and what others kept of it."""

    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "store"

    @property
    def before(self) -> Path:
        """A copy of the store from before the erasures, as an attacker would have kept it."""
        return self.home / "before"

    @property
    def trust(self) -> Path:
        return self.home / "trust.json"

    @property
    def head(self) -> Path:
        """A tree head that an auditor kept after the erasures."""
        return self.home / "head"

    @property
    def opening(self) -> Path:
        return self.home / "u1.opening.json"

    @property
    def receipt(self) -> Path:
        return self.home / "u1.receipt.json"

    @contextmanager
    def opened(self, clock: Callable[[], datetime] | None = None) -> Iterator[Store]:
        with Store.open(self.folder, clock=clock or Told(LONG_AGO + timedelta(hours=2))) as store:
            yield store

    def sql(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Change the ledger behind the store's back."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as connection, connection:
            for table in ("leaf", "node"):
                for verb in ("update", "delete"):
                    connection.execute(f"DROP TRIGGER IF EXISTS {table}_{verb}")
            for sql, values in statements:
                connection.execute(sql, values)

    def ask(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as connection:
            return connection.execute(sql, values).fetchall()

    def export(self, name: str = "export") -> Path:
        run("log", "export", str(self.home / name), "--store", str(self.folder))
        return self.home / name

    def receipt_of(self, user: str, *, clock: Callable[[], datetime] | None = None, **options: Any) -> Path:
        """Erase somebody and return their receipt."""
        with self.opened(clock) as store:
            (outcome,) = store.erase([user], **options).outcomes
            path = self.home / f"{user}.receipt.json"
            path.write_bytes(store.receipt(outcome.request))
        return path


def make_place(home: Path) -> Place:
    place = Place(home)
    home.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    x = generator.normal(size=(120, 4)).astype(np.float32)
    y, user = np.arange(120) % 3, np.array([f"u{number % 20}" for number in range(120)])
    clock = Told(LONG_AGO)
    key = home / "placement.key"
    key.write_text("5eed" * 16 + "\n")
    with unlearnd.create_store(str(place.folder), placement_key=key, clock=clock) as store:
        store.ingest("d", x, user=user, label=y, shards=2, slices=3)
        store.train("m", dataset="d", backend="linear", epochs=2, seed=7)
    shutil.copytree(place.folder, place.before)
    clock.now = LONG_AGO + timedelta(hours=1)
    with place.opened(clock) as store:
        erased = store.erase(["u1", "u2"])
        first = erased.outcomes[0].request
        place.opening.write_bytes(erased.openings[first].as_bytes())
        place.receipt.write_bytes(store.receipt(first))
        place.head.write_text(sign_head(store.translog)[1])
    shutil.copy(place.folder / "keys" / "trust.json", place.trust)
    return place


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def place(template: Place, tmp_path: Path) -> Place:
    shutil.copytree(template.home, tmp_path / "place")
    return Place(tmp_path / "place")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


@dataclass(frozen=True)
class Verdict:
    """What a command found."""

    code: int
    results: dict[str, str]
    text: str

    @property
    def failed(self) -> list[str]:
        return [check for check, result in self.results.items() if result == "FAIL"]


def verdict_of(arguments: Sequence[str]) -> Verdict:
    runner = CliRunner()
    said = runner.invoke(main, [*arguments, "--json"], catch_exceptions=False)
    shown = runner.invoke(main, list(arguments), catch_exceptions=False)
    assert said.exit_code == shown.exit_code
    checks = json.loads(said.stdout)["checks"]
    return Verdict(said.exit_code, {check["id"]: check["result"] for check in checks}, shown.stdout)


def verify(place: Place, receipt: Path | None = None, *more: str | Path) -> Verdict:
    return verdict_of(["verify", str(receipt or place.receipt), "--trust", str(place.trust), *map(str, more)])


def audit(place: Place, *more: str | Path) -> Verdict:
    return verdict_of(["audit", "--store", str(place.folder), *map(str, more)])


def check_caught(verdict: Verdict, check: str) -> None:
    """Check that the check named failed, and that nothing printed reads as success."""
    assert verdict.results[check] == "FAIL", verdict.text
    assert verdict.code == 3
    assert f"{check}  FAIL" in verdict.text
    assert "DO NOT RELY" in verdict.text
    assert not re.search(r"Assurance level \d|\b(ok|valid|verified|success\w*|genuine)\b", last_words(verdict), re.I)


def last_words(verdict: Verdict) -> str:
    """Return the sentence in which a report ends, before the list of what nobody can prove."""
    return verdict.text.split("\n\n")[1]


def resign(receipt: Path, payload: bytes, signer: Signer, proof: str | None = None) -> Path:
    """Put other content, or another signature, into a receipt file."""
    old = json.loads(receipt.read_bytes())
    envelope = seal_envelope(payload, receipt_key_id(signer.public), signer.sign)
    made = receipt.with_name(f"forged-{receipt.name}")
    made.write_bytes(make_receipt(envelope, proof or old["proof"]))
    return made


def payload_of(receipt: Path) -> bytes:
    return base64.b64decode(json.loads(receipt.read_bytes())["envelope"]["payload"])


def edited(payload: bytes, **changes: Any) -> bytes:
    statement = json.loads(payload)
    statement["predicate"].update(changes)
    return canonical(statement)


def rewrite_log(place: Place, change: Callable[[int, bytes], bytes]) -> None:
    """Replace the log by another that holds together in itself: leaves, hashes, tree heads, receipts."""
    with place.opened() as store:
        size, _ = log.size_and_root(store.ledger)
        leaves = [change(index, leaf) for index, leaf in enumerate(log.leaves(store.ledger, 0, size))]
    place.sql(
        *((f"DELETE FROM {table}", ()) for table in ("leaf", "node", "tree_head")),
        ("UPDATE receipt SET key_id = NULL", ()),
    )
    # As who rewrites history would: the copy in storage goes too, else the store does not open.
    shutil.rmtree(place.folder / "storage" / "evidence" / "log")
    with place.opened() as store:
        log.append_alone(store.ledger, leaves)
        sign_head(store.translog)
        # A receipt that is there is never replaced: whoever rewrites history takes the old ones away.
        store.storage.destroy(store.storage.list("evidence/receipts"))
        issue_receipts(store.translog)


# Nobody attacks.


def test_the_honest_run_passes_everything(place: Place) -> None:
    export = place.export()
    verified = verify(place, None, "--log", export, "--head", place.head, "--opening", place.opening)
    assert verified.code == 0, verified.text
    assert {check for check, result in verified.results.items() if result != "PASS"} == {"R5"}
    audited = audit(place, "--replay", "all", "--head", place.head, "--opening", place.opening, "--trust", place.trust)
    assert audited.code == 0, audited.text
    assert set(audited.results.values()) == {"PASS"}
    assert "Assurance level 5" in audited.text


# Receipts.


def test_forged_by_an_outsider(place: Place) -> None:
    outsider = create_signer(place.home, "outsider")
    verdict = verify(place, resign(place.receipt, payload_of(place.receipt), outsider))
    check_caught(verdict, "R1")
    assert verdict.failed == ["R1"]


def test_a_field_edited(place: Place) -> None:
    receipt = json.loads(place.receipt.read_bytes())
    payload = edited(payload_of(place.receipt), influenceRemovedAt=stamp(LONG_AGO + timedelta(minutes=61)))
    receipt["envelope"]["payload"] = base64.b64encode(payload).decode()
    forged = place.home / "edited.json"
    forged.write_bytes(canonical(receipt))
    verdict = verify(place, forged)
    check_caught(verdict, "R1")
    check_caught(verdict, "R3")


def test_the_receipt_key_stolen_and_the_receipt_not_logged(place: Place) -> None:
    stolen = open_signer(place.folder / "keys", "receipt")
    verdict = verify(place, resign(place.receipt, edited(payload_of(place.receipt), requestId="0" * 32), stolen))
    check_caught(verdict, "R3")
    assert verdict.results["R1"] == "PASS"


def test_a_revoked_key_used(place: Place) -> None:
    old = json.loads(run("keys", "list", "--json", "--store", str(place.folder)))
    old_id = next(key["keyId"] for key in old if key["role"] == "receipt")
    run("keys", "rotate", "receipt", "--store", str(place.folder))
    honest = place.receipt_of("u3", clock=lambda: datetime.now(UTC))
    (since,) = place.ask("SELECT until FROM signing_key WHERE key_id = ?", old_id)[0]
    run("keys", "revoke", old_id, "--since", str(since), "--store", str(place.folder))
    revoked = open_signer(place.folder / "keys", f"receipt-{old_id[:12]}")
    forged = resign(honest, payload_of(honest), revoked)
    export = place.export()
    shutil.copy(export / "trust.json", place.trust)
    assert verify(place, honest, "--log", export).code == 0
    verdict = verify(place, forged, "--log", export)
    check_caught(verdict, "R1")
    assert verdict.failed == ["R1"]
    assert verify(place, place.receipt, "--log", export).code == 0, "what it signed before stays good"


def test_a_revoked_key_used_against_an_older_trust_file(place: Place) -> None:
    (old_id,) = place.ask("SELECT key_id FROM signing_key WHERE role = 'receipt'")[0]
    run("keys", "rotate", "receipt", "--store", str(place.folder))
    honest = place.receipt_of("u3", clock=lambda: datetime.now(UTC))
    forged = resign(honest, payload_of(honest), open_signer(place.folder / "keys", f"receipt-{old_id[:12]}"))
    verdict = verify(place, forged, "--log", place.export())
    check_caught(verdict, "R1")
    assert verdict.failed == ["R1"]


def test_a_proof_from_another_log(place: Place, tmp_path: Path) -> None:
    payload = payload_of(place.receipt)
    with unlearnd.create_store(str(tmp_path / "stranger")) as stranger:
        proof = prove_leaf(stranger.translog, log.append_alone(stranger.ledger, [payload]))
    signer = open_signer(place.folder / "keys", "receipt")
    verdict = verify(place, resign(place.receipt, payload, signer, proof))
    check_caught(verdict, "R4")
    assert verdict.results["R3"] == "PASS"


def test_a_duplicate_key_in_the_payload(place: Place) -> None:
    payload = payload_of(place.receipt).replace(b'"found":true', b'"found":false,"found":true')
    with place.opened() as store:
        proof = prove_leaf(store.translog, log.append_alone(store.ledger, [payload]))
        forged = resign(place.receipt, payload, store.translog.receipt_signer, proof)
    verdict = verify(place, forged)
    check_caught(verdict, "R2")
    assert (verdict.results["R1"], verdict.results["R3"]) == ("PASS", "PASS")
    check_caught(audit(place), "L2")


# The log.


def test_history_rewritten(place: Place) -> None:
    """A log that holds together, with receipts to it, and differs from the one before in a single word."""
    rewrite_log(place, lambda index, leaf: mended(leaf, note="x") if index == 3 else leaf)
    request = json.loads(place.opening.read_bytes())["requestId"]
    with place.opened() as store:
        place.receipt.write_bytes(store.receipt(request))
    assert audit(place, "--trust", place.trust).failed == [], "who kept nothing sees nothing"
    verdict = audit(place, "--head", place.head)
    check_caught(verdict, "L1")
    assert verdict.failed == ["L1"]
    verdict = verify(place, place.receipt, "--log", place.export(), "--head", place.head)
    check_caught(verdict, "L1")
    assert verdict.failed == ["L1"]


def mended(leaf: bytes, **changes: Any) -> bytes:
    """Return a leaf with other content, and the subject that goes with it."""
    statement = json.loads(leaf)
    statement["predicate"].update(changes)
    statement["subject"][0]["digest"]["sha256"] = digest_of(canonical(statement["predicate"]))
    return canonical(statement)


def test_leaves_changed_in_place(place: Place) -> None:
    (body,) = place.ask("SELECT body FROM leaf WHERE number = 5")[0]
    place.sql(("UPDATE leaf SET body = ? WHERE number = 5", (body + b" ",)))
    check_caught(audit(place), "L2")


def test_the_newest_leaves_cut_off(place: Place) -> None:
    (size,) = place.ask("SELECT count(*) FROM leaf")[0]
    place.sql(
        ("DELETE FROM leaf WHERE number >= ?", (size - 3,)),
        ("DELETE FROM node WHERE level = 0 AND number >= ?", (size - 3,)),
    )
    refused = CliRunner().invoke(main, ["audit", "--store", str(place.folder)])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "older than its storage" in refused.stderr
    shutil.rmtree(place.folder / "storage" / "evidence" / "log")
    check_caught(audit(place), "L2")


def test_a_fork_with_both_keys(place: Place) -> None:
    fork = Place(place.home.with_name("fork"))
    shutil.copytree(place.home, fork.home)
    forged = fork.receipt_of("u5")
    for user in ("u6", "u7"):
        place.receipt_of(user)
    assert verify(place, forged).code == 0, "the receipt alone, signed with the real keys, cannot show it"
    verdict = verify(place, forged, "--log", place.export())
    check_caught(verdict, "L3")


def test_two_views(place: Place) -> None:
    """One history for the witness and the auditor, another for the person."""
    shown = Place(place.home.with_name("shown"))
    shutil.copytree(place.home, shown.home)
    for_person, for_others = shown.receipt_of("u5"), place.receipt_of("u6")
    kept = place.home / "kept"
    kept.write_text(run("log", "head", "--store", str(place.folder)))
    verdict = verify(shown, for_person, "--log", shown.export(), "--head", kept)
    check_caught(verdict, "L1")
    # A witness that has seen the one does not cosign the other.
    key, state = place.home / "witness.key", place.home / "witness.state"
    vkey = run("witness", "--new-key", "example.com/w", str(key)).strip()
    log_key = json.loads(place.trust.read_bytes())["logKeys"][0]["vkey"]
    cosign = ("--key", str(key), "--state", str(state), "--log-key", log_key)
    policy = place.home / "policy"
    policy.write_text(f"log {log_key}\nwitness w {vkey}\nquorum w\n")
    path, note = split_proof(for_others)
    (place.home / "note").write_text(note)
    put_proof(for_others, path, run("witness", str(place.home / "note"), *cosign))
    assert verify(place, for_others, "--policy", policy).results["R5"] == "PASS"
    _, note = split_proof(for_person)
    (place.home / "note").write_text(note)
    export = str(shown.home / "export")
    refused = CliRunner().invoke(main, ["witness", str(place.home / "note"), *cosign, "--log", export])
    assert refused.exit_code == 3, refused.output
    assert "example.com/w" not in refused.stdout
    check_caught(verify(shown, for_person, "--policy", policy), "R5")


def split_proof(receipt: Path) -> tuple[str, str]:
    """Return the path in a receipt's proof, and the tree head it is under."""
    path, _, note = json.loads(receipt.read_bytes())["proof"].partition("\n\n")
    return path, note


def put_proof(receipt: Path, path: str, note: str) -> None:
    receipt.write_bytes(canonical({**json.loads(receipt.read_bytes()), "proof": f"{path}\n\n{note}"}))


def test_a_completion_dated_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for on the second day, done on the fortieth, dated the third."""
    conclude = erasure._conclude
    third_day = LONG_AGO + timedelta(days=3)
    monkeypatch.setattr(erasure, "_conclude", lambda log, plugins, which, now: conclude(log, plugins, which, third_day))
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        asked = record_requests(store.ledger, [handle], LONG_AGO + timedelta(days=2), named={handle: "u4"})
    with place.opened(Told(LONG_AGO + timedelta(days=40))) as store:
        store.finish_erasures()
        store.build()
        (request,) = place.ask("SELECT id FROM request WHERE erasure_id = ?", asked)[0]
        forged = place.home / "back.receipt.json"
        forged.write_bytes(store.receipt(request))
    assert verify(place, forged).code == 0, "the receipt alone cannot show it"
    verdict = verify(place, forged, "--log", place.export())
    check_caught(verdict, "R6")
    check_caught(audit(place), "L2")


def test_a_completion_too_late(place: Place) -> None:
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        asked = record_requests(store.ledger, [handle], LONG_AGO + timedelta(days=2), named={handle: "u4"})
    with place.opened(Told(LONG_AGO + timedelta(days=40))) as store:
        store.finish_erasures()
        (request,) = place.ask("SELECT id FROM request WHERE erasure_id = ?", asked)[0]
        late = place.home / "late.receipt.json"
        late.write_bytes(store.receipt(request))
    check_caught(verify(place, late), "R6")


def test_a_request_silently_dropped(place: Place) -> None:
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        asked = record_requests(store.ledger, [handle], LONG_AGO + timedelta(days=2), named={handle: "u4"})
        sign_head(store.translog)
    place.sql(("DELETE FROM request WHERE erasure_id = ?", (asked,)), ("DELETE FROM erasure WHERE id = ?", (asked,)))
    verdict = audit(place)
    check_caught(verdict, "L2")
    assert verdict.failed == ["L2"]
    verdict = verify(place, None, "--log", place.export())
    check_caught(verdict, "L2")
    assert verdict.failed == ["L2"]


def test_a_request_dropped_before_it_is_due(place: Place) -> None:
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        asked = record_requests(store.ledger, [handle], datetime.now(UTC), named={handle: "u4"})
        sign_head(store.translog)
    assert audit(place).code == 0, "open and not overdue is no offence"
    place.sql(("DELETE FROM request WHERE erasure_id = ?", (asked,)), ("DELETE FROM erasure WHERE id = ?", (asked,)))
    check_caught(audit(place), "L2")


def test_a_seed_chosen_afterwards(place: Place) -> None:
    place.sql(("UPDATE model SET seed = seed + 1", ()))
    check_caught(audit(place), "L2")


# Storage.


def live_paths(place: Place) -> list[str]:
    return [row[0] for row in place.ask("SELECT path FROM checkpoint WHERE destroyed_at IS NULL ORDER BY path")]


def test_a_checkpoint_file_swapped(place: Place) -> None:
    one, other = live_paths(place)[:2]
    shutil.copy(place.folder / "storage" / other, place.folder / "storage" / one)
    verdict = audit(place)
    check_caught(verdict, "S1")
    assert verdict.failed == ["S1"]


def test_a_checkpoint_file_swapped_and_the_ledger_with_it(place: Place) -> None:
    one, other = live_paths(place)[:2]
    shutil.copy(place.folder / "storage" / other, place.folder / "storage" / one)
    for column in ("file", "tensors", "size"):
        (value,) = place.ask(f"SELECT {column} FROM checkpoint WHERE path = ? AND destroyed_at IS NULL", other)[0]
        place.sql((f"UPDATE checkpoint SET {column} = ? WHERE path = ? AND destroyed_at IS NULL", (value, one)))
    check_caught(audit(place), "S1")


def tainted_paths(place: Place) -> list[str]:
    return [row[0] for row in place.ask("SELECT path FROM checkpoint WHERE destroyed_by IS NOT NULL ORDER BY slice")]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its place", "under another name"])
def test_a_destroyed_file_kept(place: Place, elsewhere: bool) -> None:
    path = tainted_paths(place)[0]
    target = place.folder / "storage" / ("checkpoints/m/.old" if elsewhere else path)
    shutil.copy(place.before / "storage" / path, target)
    verdict = audit(place)
    check_caught(verdict, "S2")
    assert verdict.failed == ["S2"]


def test_the_slice_data_of_the_erased_kept(place: Place) -> None:
    old = next((place.before / "storage" / "data").rglob("*.safetensors"))
    target = place.folder / "storage" / old.relative_to(place.before / "storage").with_suffix(".bak")
    shutil.copy(old, target)
    check_caught(audit(place), "S2")


# Models and data.


@pytest.mark.parametrize("listed", ["all shards", "its shard"])
def test_a_shard_not_retrained(listed: str, place: Place) -> None:
    """An old tainted checkpoint is put back, in storage, in the ledger and in a signed live set."""
    path = tainted_paths(place)[-1]
    shutil.copy(place.before / "storage" / path, place.folder / "storage" / path)
    place.sql(("UPDATE checkpoint SET destroyed_at = NULL, destroyed_by = NULL WHERE path = ?", (path,)))
    with place.opened() as store:
        (model,) = models.models(store.ledger)
        everything = models.checkpoints_of(store.ledger, model.id)
        shards = None if listed == "all shards" else [c.shard for c in everything if c.path == path]
        entries = [
            (c.shard, c.slice, c.recipe, c.file, c.tensors, c.path, c.size)
            for c in everything
            if shards is None or c.shard in shards
        ]
        leaf, detail = live_set("m", shards, entries, stamp(store.clock()))
        keep_detail(store.translog, detail)
        log.append_alone(store.ledger, [leaf])
        sign_head(store.translog)
    verdict = audit(place)
    check_caught(verdict, "D2")
    assert "S2" not in verdict.failed


def test_a_shard_not_retrained_by_software_that_destroys_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log never says the checkpoints are destroyed, so it and the ledger agree about them."""
    with monkeypatch.context() as patch:
        patch.setattr(erasure, "_destroy_tainted", lambda *arguments: None)
        place.receipt_of("u4", build=False)
    verdict = audit(place)
    check_caught(verdict, "D2")
    assert verdict.failed == ["D2"]


def test_trained_on_the_erased_rows_anyway(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paperwork is perfect; only replay sees it."""
    with place.opened() as store:
        (dataset,) = points.datasets(store.ledger)
        stash = {shard: read_slices(store.ledger, store.storage, dataset, shard) for shard in (1, 2)}
        (outcome,) = store.erase(["u4"], build=False).outcomes
        monkeypatch.setattr(features, "read_slices", lambda ledger, storage, dataset, shard: stash[shard])
        store.build()
        monkeypatch.undo()
    assert outcome.points == 6
    assert audit(place).failed == []
    verdict = audit(place, "--replay", "all")
    check_caught(verdict, "P1")
    assert verdict.failed == ["P1"]


def test_one_row_of_the_user_kept(place: Place) -> None:
    """A row is hidden from the erasure and the user's key kept, so that commitments and counts all fit."""
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        (holding,) = points.holdings_of(store.ledger, [handle])
        positions = unpack(holding.positions)
        (key,) = points.user_keys(store.ledger, [handle]).values()
    place.sql(("UPDATE holding SET positions = ? WHERE handle = ?", (pack(positions[:-1]), handle)))
    with place.opened() as store:
        erased = store.erase(["u4"])
        (opening,) = erased.openings.values()
    place.opening.write_bytes(opening.as_bytes())
    place.sql(("UPDATE users SET key = ? WHERE handle = ?", (key, handle)))
    assert erased.outcomes[0].points == 5
    assert audit(place, "--replay", "all").failed == []
    verdict = audit(place, "--opening", place.opening)
    check_caught(verdict, "D3")
    assert verdict.failed == ["D3"]


def put_rows(store: Store, segment: points.Segment, rows: Rows) -> tuple[str, tuple[Any, ...]]:
    """Write other rows into a segment; return the change that makes the ledger agree."""
    data = encode_segment(rows)
    store.storage.write(segment.path, data)
    return "UPDATE segment SET digest = ?, rows = ?, live = ? WHERE id = ?", (
        digest_of(data),
        len(rows),
        len(rows),
        segment.id,
    )


def test_someone_elses_row_dropped(place: Place) -> None:
    """A row goes with no request: rewritten, logged as a new root, retrained. No receipt accounts for it."""
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        (holding,) = points.holdings_of(store.ledger, [handle])
        (dataset,) = points.datasets(store.ledger)
        shard, slice_ = holding.shard, holding.slice
        gone = unpack(holding.positions)[0]
        (segment,) = (
            s for s in points.segments_of(store.ledger, dataset.id, shard, slice_)
            if gone in read_segment(store.storage, s).position
        )  # fmt: skip
        rows = read_segment(store.storage, segment)
        change = put_rows(store, segment, rows.keep(rows.position != gone))
    left = unpack(holding.positions)[1:]
    place.sql(
        change, ("UPDATE holding SET first = ?, positions = ? WHERE handle = ?", (int(left[0]), pack(left), handle))
    )
    with place.opened() as store:
        root = compute_roots(store.ledger, store.storage, dataset, shard, [slice_])[slice_]
        count = points.counts_of(store.ledger, dataset.id)[shard, slice_]
        leaves = slices_sealed("d", [(shard, slice_, root, count)], stamp(store.clock()))
        log.append_alone(store.ledger, leaves)
        where = "dataset_id = ? AND shard = ? AND slice = ?"
        place.sql((f"UPDATE slice SET root = ? WHERE {where}", (root, dataset.id, shard, slice_)))
        (model,) = models.models(store.ledger)
        record = erasure._Record(store.ledger, "0" * 32, store.clock)
        erasure._destroy_tainted(store.ledger, store.storage, model, shard, "0" * 32, store.clock(), record)
        store.build()
    verdict = audit(place, "--replay", "all")
    check_caught(verdict, "D1")
    assert verdict.failed == ["D1"]


def test_someone_elses_row_changed_under_cover_of_an_erasure(place: Place) -> None:
    """Counts all fit; only putting the erased points back shows that the others are not the same."""
    with place.opened() as store:
        (handle,) = store.keys.handles(["u4"])
        (holding,) = points.holdings_of(store.ledger, [handle])
        (dataset,) = points.datasets(store.ledger)
        segment = points.segments_of(store.ledger, dataset.id, holding.shard, holding.slice)[0]
        rows = read_segment(store.storage, segment)
        victim = next(i for i in range(len(rows)) if rows.owner[i].tobytes() != handle)
        x = rows.x.copy()
        x[victim] += 1
        change = put_rows(store, segment, Rows(x, rows.label, rows.position, rows.owner, rows.group))
    place.sql(change)
    place.receipt_of("u4")
    verdict = audit(place, "--replay", "all")
    check_caught(verdict, "D1")
    assert verdict.failed == ["D1"]


def test_rows_changed_after_training(place: Place) -> None:
    with place.opened() as store:
        (dataset,) = points.datasets(store.ledger)
        segment = points.segments_of(store.ledger, dataset.id, 1)[0]
        rows = read_segment(store.storage, segment)
        change = put_rows(store, segment, Rows(rows.x + 1, rows.label, rows.position, rows.owner, rows.group))
    place.sql(change)
    verdict = audit(place, "--replay", "all")
    check_caught(verdict, "D1")
    check_caught(verdict, "P1")


def test_reingested_after_erasure(place: Place) -> None:
    with place.opened() as store:
        rows = np.ones((4, 4), np.float32)
        users = np.array(["u1", "u1", "u18", "u19"])
        store.ingest("d", rows, user=users, label=np.array([0, 1, 2, 0]), readmit=True)
        store.build()
    assert audit(place, "--replay", "all").failed == []
    verdict = audit(place, "--opening", place.opening)
    check_caught(verdict, "D3")
    assert verdict.failed == ["D3"]


def test_the_receipt_of_somebody_else_shown_to_the_user(place: Place) -> None:
    opening = json.loads(place.opening.read_bytes())
    place.opening.write_bytes(canonical({**opening, "user": "u9"}))
    check_caught(audit(place, "--opening", place.opening), "D3")


def test_the_pepper_changed_so_that_the_user_is_not_found(place: Place) -> None:
    (place.folder / "keys" / "pepper.key").write_text("ab" * 32 + "\n")
    check_caught(audit(place, "--opening", place.opening), "D3")


def test_a_detail_document_replaced(place: Place) -> None:
    request = json.loads(place.opening.read_bytes())["requestId"]
    (digest,) = place.ask("SELECT detail FROM receipt WHERE request_id = ?", request)[0]
    path = place.folder / "storage" / "evidence" / "detail" / f"{digest}.json"
    path.write_bytes(path.read_bytes().replace(b'"slices"', b'"Slices"'))
    check_caught(audit(place), "D1")


def test_a_model_called_unrepeatable_to_escape_replay(place: Place) -> None:
    place.sql(("UPDATE model SET deterministic = 0", ()))
    verdict = audit(place, "--replay", "all")
    check_caught(verdict, "L2")
    assert verdict.results["P1"] == "NOT CHECKED"


def test_an_environment_made_up_to_escape_replay_does_not_count_as_replayed(place: Place) -> None:
    place.sql(("UPDATE checkpoint SET environment = ?", (json.dumps({"numpy": "0.0"}),)))
    verdict = audit(place, "--replay", "all")
    assert verdict.results["P1"] == "NOT CHECKED"
    assert "numpy (0.0 then" in verdict.text
    assert "Assurance level 5" not in verdict.text


def test_a_ledger_that_makes_no_sense_is_a_finding_and_not_a_crash(place: Place) -> None:
    place.sql(("UPDATE model SET spec = '{'", ()))
    verdict = audit(place)
    assert verdict.code == 3
    assert "DO NOT RELY" in verdict.text
