"""The trust file: which keys an auditor believes for one store, and from which leaf to which.

The operator publishes it. An auditor who fetched it once compares later ones with it; nothing here can tell a
false one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unlearnd.errors import FormatError, SignatureError
from unlearnd.verify.ed25519 import check_public_key, key_id_of
from unlearnd.verify.notes import Note, NoteKey, TreeHead, check_note, read_note, read_tree_head, read_vkey
from unlearnd.verify.statements import Fields, read_json
from unlearnd.verify.texts import read_base64
from unlearnd.verify.values import Value

MAX_TRUST = 1_000_000
MAX_KEYS = 256
TRUST_TYPE = "application/vnd.unlearnd.trust.v1+json"


class Span(Value):
    """The leaves at which a key is valid."""

    since: int
    until: int | None
    """The first leaf at which it is not; None when there is no end."""

    def __contains__(self, index: int) -> bool:
        return self.since <= index and (self.until is None or index < self.until)

    def __str__(self) -> str:
        return f"from leaf {self.since} on" if self.until is None else f"for leaves {self.since} to {self.until - 1}"


class LogKey(Value):
    """A key that signs tree heads."""

    key: NoteKey
    span: Span


class ReceiptKey(Value):
    """A key that signs receipts."""

    key_id: str
    public: bytes
    span: Span


class Trust(Value):
    """Whom to believe about one store."""

    store_id: str
    origin: str
    log_keys: tuple[LogKey, ...]
    receipt_keys: tuple[ReceiptKey, ...]
    witnesses: tuple[NoteKey, ...]
    quorum: int

    def ended(self, ends: dict[tuple[str, str], int]) -> Trust:
        """Return this trust with keys, by role and id, ended earlier where a log says so."""

        def end(role: str, key_id: str, span: Span) -> Span:
            known = [at for at in (span.until, ends.get((role, key_id))) if at is not None]
            return Span(span.since, min(known) if known else None)

        return self.but(
            log_keys=tuple(k.but(span=end("log", k.key.id.hex(), k.span)) for k in self.log_keys),
            receipt_keys=tuple(k.but(span=end("receipt", k.key_id, k.span)) for k in self.receipt_keys),
        )


def read_trust(data: bytes) -> Trust:
    """Return the trust of a trust file."""
    fields = Fields(read_json(data, "the trust file", MAX_TRUST), "the trust file")
    if fields.text("mediaType") != TRUST_TYPE:
        raise FormatError(f"the trust file is not of type {TRUST_TYPE}")
    origin = fields.text("origin")
    log_keys = []
    for entry in _entries(fields, "logKeys"):
        key = read_vkey(entry.text("vkey"))
        if key.name != origin:
            raise FormatError(f"the trust file has a log key for {key.name}, and its log is {origin}")
        log_keys.append(LogKey(key, _read_span(entry)))
    receipt_keys = []
    for entry in _entries(fields, "receiptKeys"):
        public = read_base64(entry.text("publicKey"), "a public key of the trust file")
        check_public_key(public)
        if key_id_of(public) != entry.text("keyId"):
            raise FormatError("a receipt key of the trust file has another id than the trust file says")
        receipt_keys.append(ReceiptKey(key_id_of(public), public, _read_span(entry)))
    witnesses = [read_vkey(entry.text("vkey"), cosigner=True) for entry in _entries(fields, "witnesses")]
    quorum = fields.count("quorum")
    if quorum > len(witnesses):
        raise FormatError(f"the trust file asks for {quorum} of {len(witnesses)} witnesses")
    everyone = [k.key.public for k in log_keys] + [k.public for k in receipt_keys] + [k.public for k in witnesses]
    if len(set(everyone)) != len(everyone):
        # A key with two roles, or counted twice, would make one signer look like two.
        raise FormatError("the trust file has a key twice")
    if not log_keys or not receipt_keys:
        raise FormatError("the trust file has no log key or no receipt key")
    return Trust(fields.text("storeId"), origin, tuple(log_keys), tuple(receipt_keys), tuple(witnesses), quorum)


def read_head(data: bytes) -> tuple[Note, TreeHead]:
    """Return a signed tree head, its signature not looked at."""
    note = read_note(data)
    return note, read_tree_head(note.text)


def check_head(note: Note, head: TreeHead, trust: Trust) -> NoteKey:
    """Return the log key that signed a tree head; raise SignatureError unless it was valid at the last leaf."""
    if head.origin != trust.origin:
        raise SignatureError(f"the tree head is of the log {head.origin!r}, the trust file is for {trust.origin!r}")
    known = {(k.key.name, k.key.id) for k in trust.log_keys}
    if not any((line.name, line.key_id) in known for line in note.signatures):
        raise SignatureError(
            f"the tree head of size {head.size} is signed by no log key of the trust file; is that older than the log?"
        )
    last = max(head.size - 1, 0)
    signers = check_note(note, [k.key for k in trust.log_keys])
    for trusted in trust.log_keys:
        if trusted.key in signers and last in trusted.span:
            return trusted.key
    ended = next(k for k in trust.log_keys if k.key in signers)
    raise SignatureError(
        f"the tree head of size {head.size} is signed by log key {ended.key.id.hex()}, which is valid {ended.span}"
    )


def _entries(fields: Fields, name: str) -> Iterable[Fields]:
    listed: Sequence[object] = fields.list(name)
    if len(listed) > MAX_KEYS:
        raise FormatError(f"the trust file has more than {MAX_KEYS} {name}")
    return [Fields(entry, f"{name} {number}") for number, entry in enumerate(listed)]


def _read_span(entry: Fields) -> Span:
    span = Span(entry.count("since"), entry.count_or_none("until"))
    if span.until is not None and span.until < span.since:
        raise FormatError("a key of the trust file ends before it begins")
    return span
