"""The append-only log: sign its tree heads, prove what is in it, hand out receipts, export it.

Leaves are appended by whoever records the event, in the event's own transaction. Here they become evidence:
only what is durable is signed, signing twice gives the same bytes, and a receipt that a killed process did not
get to write is written by the next one.
"""

import base64
import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from unlearnd.digests import digest_of
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.hookspecs import Signer, SignerMaker
from unlearnd.keys import (
    ROLES,
    check_public_key,
    create_signer,
    open_signer,
    public_pem,
    receipt_key_id,
    retire_signer,
)
from unlearnd.ledger import Ledger, log
from unlearnd.ledger.log import ReceiptEntry, SigningKey
from unlearnd.logcopy import HOLDS, PLACES, holds_between, keep_copy, places_between
from unlearnd.notes import head_text, key_hash, proof_text, sign_note, tile_path, vkey
from unlearnd.receipts import Detail, make_receipt, seal_envelope
from unlearnd.statements import genesis, key_changed, moment_of, origin_of
from unlearnd.steps import Step, reached
from unlearnd.storage import Storage
from unlearnd.storage.disk import write_files

TRUST_TYPE = "application/vnd.unlearnd.trust.v1+json"
FOLDER = "evidence"
_TILE = 256
_RECEIPTS = 500
_WRITERS = 8
_WITNESSES = "witnesses.json"


@dataclass(frozen=True)
class Translog:
    """A store's log and the keys that sign for it."""

    ledger: Ledger
    storage: Storage
    keys: Path
    store_id: str
    software: str
    """This release's version."""
    make_signer: SignerMaker = open_signer
    evidence: Storage | None = None
    """Where receipts and their documents are kept; None: in the store's storage."""

    @property
    def shelf(self) -> Storage:
        """Where receipts and their documents are kept."""
        return self.evidence or self.storage

    @property
    def origin(self) -> str:
        return origin_of(self.store_id)

    @cached_property
    def log_signer(self) -> Signer:
        return self.make_signer(self.keys, "log")

    @cached_property
    def receipt_signer(self) -> Signer:
        return self.make_signer(self.keys, "receipt")


def begin(translog: Translog, at: str) -> None:
    """Make the signing keys and the first leaves of a new store's log."""
    if translog.make_signer is open_signer:
        for role in ROLES:
            create_signer(translog.keys, role)
    signers = {"log": translog.log_signer, "receipt": translog.receipt_signer}
    if signers["log"].public == signers["receipt"].public:
        raise RefusedError("the signer gives one key for both roles: tree heads and receipts need keys of their own")
    payloads = [genesis(translog.store_id, translog.software, at)]
    added = []
    for role, signer in signers.items():
        check_public_key(signer.public)
        key = _signing_key(translog, role, signer.public, 0)
        payloads.append(_key_leaf(key, "add", at))
        added.append(key)
    with translog.ledger.write() as connection:
        log.append(connection, payloads)
        for key in added:
            log.add_key(connection, key)
    sign_head(translog)
    write_trust(translog)


def sign_head(translog: Translog) -> tuple[int, str]:
    """Sign what is durable now and keep the tree head; return its size and note."""
    size, root = log.size_and_root(translog.ledger)
    newest = log.newest_head(translog.ledger)
    if newest is not None and newest[0] == size:
        return newest
    signer = signer_at(translog, "log", size - 1)
    note = sign_note(head_text(translog.origin, size, root), translog.origin, signer.public, signer.sign)
    # Before the ledger has it: a tree head that the ledger knows is one whose leaves are in storage, too.
    keep_copy(translog.ledger, translog.storage, size, note)
    log.keep_head(translog.ledger, size, note)
    reached(Step.LOG_SIGNED)
    return size, note


def newest_moment(ledger: Ledger) -> datetime | None:
    """Return when the newest leaf was made, to the minute; None while there is none."""
    leaf = log.last_leaf(ledger)
    return moment_of(leaf) if leaf else None


def prove_leaf(translog: Translog, index: int) -> str:
    """Return a proof that a leaf is in the log, under the newest tree head."""
    size, note = sign_head(translog)
    if not 0 <= index < size:
        raise NotFoundError(f"the log has leaves 0 to {size - 1}, and none {index}")
    return proof_text(index, log.inclusion(translog.ledger, index, size), note)


def issue_receipts(translog: Translog) -> None:
    """Sign and write every receipt whose statement is in the log and that is not written yet."""
    waiting = log.unwritten_receipts(translog.ledger)
    for start in range(0, len(waiting), _RECEIPTS):
        made = _make_receipts(translog, waiting[start : start + _RECEIPTS])
        if translog.shelf.exclusive:
            # Side by side, so that they are made durable together; then all are entered in one transaction.
            with ThreadPoolExecutor(_WRITERS if len(made) > 1 else 1) as pool:
                list(pool.map(lambda one: _create_receipt(translog, one[0], one[1]), made))
            log.receipts_written(translog.ledger, [(entry.request_id, key_id) for entry, _, key_id in made])
        else:
            for entry, receipt, key_id in made:
                # Where storage cannot tell which of two writers came first, the ledger's lock does.
                with log.writing_receipt(translog.ledger, entry.request_id, key_id) as first:
                    if first:
                        _create_receipt(translog, entry, receipt)
        reached(Step.RECEIPT_ENTERED)


def _create_receipt(translog: Translog, entry: ReceiptEntry, receipt: bytes) -> None:
    """Write a receipt that is not there; one that is there must state the same."""
    path = receipt_path(entry.request_id)
    if not translog.shelf.create_new(path, receipt) and _stated(translog.shelf.read(path)) != _stated(receipt):
        raise DamagedStoreError(f"{path} is there already and states something else than the log")
    reached(Step.RECEIPT_WRITTEN)


def receipt_bytes(translog: Translog, entry: ReceiptEntry) -> bytes:
    """Return a receipt: its statement signed, with a proof under the newest tree head."""
    return _make_receipts(translog, [entry])[0][1]


def _make_receipts(translog: Translog, lot: Sequence[ReceiptEntry]) -> list[tuple[ReceiptEntry, bytes, str]]:
    """Return receipts with the ids of the keys that signed them."""
    size, note = sign_head(translog)
    signers = dict(_receipt_signers(translog, lot))
    made = []
    for entry, payload, path in log.receipt_parts(translog.ledger, lot, size):
        key_id = receipt_key_id(signers[entry].public)
        envelope = seal_envelope(payload, key_id, signers[entry].sign)
        made.append((entry, make_receipt(envelope, proof_text(entry.leaf, path, note)), key_id))
    return made


def _receipt_signers(translog: Translog, entries: Sequence[ReceiptEntry]) -> list[tuple[ReceiptEntry, Signer]]:
    """Return each entry with the signer of the key that counts at its leaf, asked for once per key."""
    keys = log.signing_keys(translog.ledger, "receipt")
    found: dict[str, Signer] = {}
    paired = []
    for entry in entries:
        key = next((k for k in keys if k.since <= entry.leaf and (k.until is None or entry.leaf < k.until)), None)
        name = key.key_id if key is not None else ""
        if name not in found:
            found[name] = signer_at(translog, "receipt", entry.leaf)
        paired.append((entry, found[name]))
    return paired


def receipt_path(request_id: str) -> str:
    """Return the name of a receipt in storage."""
    return f"{FOLDER}/receipts/{request_id}.receipt.json"


def detail_path(digest: str) -> str:
    """Return the name of a detail document in storage."""
    return f"{FOLDER}/detail/{digest}.json"


def keep_detail(translog: Translog, detail: Detail) -> None:
    """Make a detail document durable, before a leaf names it."""
    translog.shelf.write(detail_path(detail.digest), detail.data)


def keep_details(translog: Translog, details: Sequence[Detail]) -> None:
    """Make detail documents durable, before leaves name them."""
    translog.shelf.write_many((detail_path(detail.digest), [detail.data]) for detail in details)


def read_receipt(translog: Translog, entry: ReceiptEntry) -> bytes:
    """Return a receipt as it was written, after checking that it states what the log says."""
    path = receipt_path(entry.request_id)
    data = translog.shelf.read(path)
    if _stated(data) != base64.b64encode(log.leaves(translog.ledger, entry.leaf, entry.leaf + 1)[0]).decode():
        raise DamagedStoreError(f"{path} is not whole, or states something else than the log")
    return data


def read_detail(translog: Translog, digest: str) -> bytes:
    """Return a detail document, after checking that it is the one of that digest."""
    data = translog.shelf.read(detail_path(digest))
    if digest_of(data) != digest:
        raise DamagedStoreError(f"{detail_path(digest)} is not the document that was logged: its digest differs")
    return data


def _stated(receipt: bytes) -> Any:
    """Return the payload of a receipt, in base64; None where there is none to be found."""
    try:
        return json.loads(receipt)["envelope"]["payload"]
    except (ValueError, LookupError, TypeError):
        return None


def rotate_key(translog: Translog, role: str, at: str) -> SigningKey:
    """Put a new signing key in the place of the one in use; return it.

    Where the keys are in a key service, it is there that a new one is made; this enters it.
    """
    # What is in the log and not signed yet belongs to the key that counts at its index.
    issue_receipts(translog)
    old = key_in_use(translog, role)
    signer = _open(translog, role)
    if signer is not None and signer.public == old.public:
        if translog.make_signer is not open_signer:
            raise RefusedError(
                f"the key service still gives the {role} key in use: make a new one there, then run this again"
            )
        retire_signer(translog.keys, role, old.key_id[:12])
        signer = None
    # A key file that the ledger does not know was made by a rotation that was cut off: go on with it.
    if signer is None:
        if translog.make_signer is not open_signer:
            raise NotFoundError(f"the key service gives no {role} key")
        signer = create_signer(translog.keys, role)
    check_public_key(signer.public)
    with translog.ledger.write() as connection:
        size = log.size_of(connection)
        new = _signing_key(translog, role, signer.public, size)
        log.append(connection, [_key_leaf(new, "add", at)])
        log.end_key(connection, old.key_id, size)
        log.add_key(connection, new)
    fresh = replace(translog)
    sign_head(fresh)
    write_trust(fresh)
    return new


def revoke_key(translog: Translog, key_id: str, since: int, at: str) -> None:
    """Say that a key does not count from leaf `since` on: what it signed there is not to be believed."""
    known = {key.key_id: key for key in log.signing_keys(translog.ledger)}
    if key_id not in known:
        raise NotFoundError(f"no key '{key_id}'; there are: {', '.join(known)}")
    key = known[key_id]
    if key.until is None:
        raise RefusedError(f"the key is in use: rotate the {key.role} key first, then revoke the old one")
    size, _ = log.size_and_root(translog.ledger)
    if not key.since <= since <= size:
        raise RefusedError(f"the key counts from leaf {key.since}, and the log has {size}: {since} is not between")
    with translog.ledger.write() as connection:
        log.append(connection, [_key_leaf(key, "revoke", at, since)])
        log.end_key(connection, key_id, min(since, key.until))
    sign_head(translog)
    write_trust(translog)


def apply_key_leaf(connection: log.Transaction, index: int, said: Mapping[str, Any]) -> None:
    """Enter within a transaction what a leaf says of a key: added in the place of another, or revoked."""
    if said["action"] == "revoke":
        log.end_key(connection, said["keyId"], said["since"])
        return
    log.end_keys_of(connection, said["role"], index)
    public = base64.b64decode(said["publicKey"])
    log.add_key(connection, SigningKey(said["keyId"], said["role"], public, index, None))


def replace_missing_keys(translog: Translog, at: str) -> tuple[str, ...]:
    """Make new keys for the roles whose key in use is nowhere to be found; return those roles.

    As after going back to a backup that is older than a rotation: the newer key went with what was lost.
    """
    replaced = []
    for role in ROLES:
        in_use, signer = key_in_use(translog, role), _open(translog, role)
        if signer is not None and signer.public == in_use.public:
            continue
        if translog.make_signer is not open_signer:
            raise NotFoundError(f"the key service does not give the {role} key in use, {in_use.key_id[:12]}")
        if signer is not None:
            retire_signer(translog.keys, role, _signing_key(translog, role, signer.public, 0).key_id[:12])
        made = create_signer(translog.keys, role)
        with translog.ledger.write() as connection:
            size = log.size_of(connection)
            new = _signing_key(translog, role, made.public, size)
            log.append(connection, [_key_leaf(new, "add", at)])
            log.end_key(connection, in_use.key_id, size)
            log.add_key(connection, new)
        replaced.append(role)
    return tuple(replaced)


def signer_at(translog: Translog, role: str, index: int) -> Signer:
    """Return what signs for the key that counts at leaf `index`, whichever process put that key in place, and when."""
    for key in log.signing_keys(translog.ledger, role):
        if key.since <= index and (key.until is None or index < key.until):
            with suppress(NotFoundError):
                held = translog.log_signer if role == "log" else translog.receipt_signer
                if held.public == key.public:
                    return held
            for name in (role, f"{role}-{key.key_id[:12]}"):
                signer = _open(translog, name)
                if signer is not None and signer.public == key.public:
                    return signer
            raise DamagedStoreError(
                f"neither key file in {translog.keys} nor key service has the {role} key {key.key_id[:12]}: "
                "nothing signed"
            )
    raise DamagedStoreError(f"no {role} key counts at leaf {index}: nothing signed")


def check_signers(translog: Translog) -> None:
    """Raise unless the keys in use can sign now."""
    size = log.size_and_root(translog.ledger)[0]
    for role in ("log", "receipt"):
        signer_at(translog, role, size)


def key_in_use(translog: Translog, role: str) -> SigningKey:
    """Return the key that signs now for a role."""
    current = [key for key in log.signing_keys(translog.ledger, role) if key.until is None]
    if len(current) != 1:
        raise DamagedStoreError(f"the ledger lists {len(current)} {role} keys in use, and there must be one")
    return current[0]


def trust(translog: Translog) -> bytes:
    """Return the trust file: all that an auditor needs, to be published by the operator."""
    keys = log.signing_keys(translog.ledger)
    document = {
        "mediaType": TRUST_TYPE,
        "storeId": translog.store_id,
        "origin": translog.origin,
        "logKeys": [
            {"vkey": vkey(translog.origin, key.public), "since": key.since, "until": key.until}
            for key in keys
            if key.role == "log"
        ],
        "receiptKeys": [
            {"keyId": key.key_id, "publicKey": _base64(key.public), "since": key.since, "until": key.until}
            for key in keys
            if key.role == "receipt"
        ],
        **_witnesses(translog),
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def add_witness(translog: Translog, key: str, quorum: int) -> None:
    """Name a witness in the trust file, and how many cosignatures a receipt then needs."""
    known = _witnesses(translog)
    listed = [*known["witnesses"], *([] if {"vkey": key} in known["witnesses"] else [{"vkey": key}])]
    if not 0 <= quorum <= len(listed):
        raise InputError(f"there are {len(listed)} witnesses: a quorum of {quorum} cannot be")
    _write(translog.keys / _WITNESSES, json.dumps({"witnesses": listed, "quorum": quorum}).encode() + b"\n")
    write_trust(translog)


def keep_cosignatures(translog: Translog, note: str) -> int:
    """Keep a tree head that witnesses have cosigned, and write every receipt it covers anew with it; return how many.

    Only a note that says what our own log says at that size is taken; its further signatures are the witnesses'.
    """
    text, _, signatures = note.partition("\n\n")
    lines = text.split("\n")
    if len(lines) != 3 or not lines[1].isdigit() or not signatures.endswith("\n"):
        raise InputError("this is not a tree head: it needs an origin, a size, a root and signatures")
    size = int(lines[1])
    if not 0 < size <= log.size_and_root(translog.ledger)[0]:
        raise InputError(f"the log has no tree head of size {size} yet")
    if f"{text}\n" != head_text(translog.origin, size, log.root_of_first(translog.ledger, size)):
        raise RefusedError("this tree head is not of this log: another origin, or another root at that size")
    log.keep_head(translog.ledger, size, note)
    covered = [e for e in log.receipt_entries(translog.ledger) if e.leaf < size and e.key_id is not None]
    for entry in covered:
        data = json.loads(read_receipt(translog, entry))
        path = log.inclusion(translog.ledger, entry.leaf, size)
        fresh = make_receipt(data["envelope"], proof_text(entry.leaf, path, note))
        translog.shelf.write(receipt_path(entry.request_id), fresh)
    return len(covered)


def _witnesses(translog: Translog) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((translog.keys / _WITNESSES).read_text())
    except FileNotFoundError:
        return {"witnesses": [], "quorum": 0}
    return found


def write_trust(translog: Translog) -> None:
    """Write `trust.json` beside the keys, and the public half of each key in use."""
    for role in ROLES:
        _write(translog.keys / f"{role}.pub", public_pem(key_in_use(translog, role).public))
    _write(translog.keys / "trust.json", trust(translog))


def _write(path: Path, data: bytes) -> None:
    """Write a file beside the keys in the place of what is there: whole or not at all."""
    try:
        write_files([(str(path), [data])])
        path.chmod(0o644)  # to be published
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def export(translog: Translog, target: Storage, on_progress: Callable[[int], None] = lambda count: None) -> int:
    """Write the log as C2SP tlog-tiles with its documents and receipts; return its size.

    The tree head goes last, so that a folder with a tree head is complete.
    """
    # A killed process may have left receipts unwritten, and half a document under a temporary name.
    issue_receipts(translog)
    size, note = sign_head(translog)
    for entry in log.receipt_entries(translog.ledger):
        target.write(f"receipts/{entry.request_id}.receipt.json", read_receipt(translog, entry))
    for name in translog.shelf.list(f"{FOLDER}/detail"):
        digest = posixpath.basename(name).removesuffix(".json")
        if name == detail_path(digest) and not digest.startswith("."):
            target.write(f"detail/{digest}.json", read_detail(translog, digest))
    for begin in range(0, size, _TILE):
        end = min(begin + _TILE, size)
        entries = log.leaves(translog.ledger, begin, end)
        packed = b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in entries)
        target.write(tile_path("entries", begin // _TILE, end - begin), packed)
        on_progress(end - begin)
    level, count = 0, size
    while count:
        for begin in range(0, count, _TILE):
            end = min(begin + _TILE, count)
            hashes = log.hashes(translog.ledger, 8 * level, begin, end)
            target.write(tile_path(level, begin // _TILE, end - begin), b"".join(hashes))
        level, count = level + 1, count // _TILE
    target.write(PLACES, json.dumps(places_between(translog.ledger, 0, size)).encode() + b"\n")
    if moved := holds_between(translog.ledger, 0, size):
        target.write(HOLDS, json.dumps(moved).encode() + b"\n")
    target.write("trust.json", trust(translog))
    target.write("checkpoint", note.encode())
    return size


def _open(translog: Translog, name: str) -> Signer | None:
    try:
        return translog.make_signer(translog.keys, name)
    except NotFoundError:
        return None


def _signing_key(translog: Translog, role: str, public: bytes, since: int) -> SigningKey:
    key_id = receipt_key_id(public) if role == "receipt" else key_hash(translog.origin, public).hex()
    return SigningKey(key_id, role, public, since, None)


def _key_leaf(key: SigningKey, action: str, at: str, since: int | None = None) -> bytes:
    return key_changed(key.role, action, key.key_id, _base64(key.public), at, since)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
