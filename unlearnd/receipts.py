"""Statements, canonical bytes, envelopes: what is signed, and how it is wrapped.

A payload is an in-toto Statement v1 in the canonical form of RFC 8785. The bytes that are hashed into the log,
signed, and parsed by a verifier are the same bytes. See docs/reference/evidence.md.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rfc8785

from unlearnd.digests import Digest, digest_of
from unlearnd.errors import RefusedError
from unlearnd.merkle import root_of

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://unlearnd.dev/{}/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
RECEIPT_TYPE = "application/vnd.unlearnd.receipt.v1+json"
OPENING_TYPE = "application/vnd.unlearnd.opening.v1+json"
MOST_BYTES = 65_535
_MOST_EXACT = 2**53 - 1
_PER_LEAF = 100


@dataclass(frozen=True)
class Detail:
    """A document with the lists behind the roots of a payload."""

    data: bytes

    @property
    def digest(self) -> Digest:
        return digest_of(self.data)


def canonical(value: Any) -> bytes:
    """Return the RFC 8785 bytes of a value without floats."""
    if _is_plain(value):
        # Of such values the standard library writes the same bytes, and ten times as fast.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    return bytes(rfc8785.dumps(value))


def _is_plain(value: Any) -> bool:
    """Say whether a value is one in which RFC 8785 and sorted JSON agree: exact types, small integers, ASCII alone.

    Beyond ASCII, keys are sorted otherwise, and half a character is an error that has to be told.
    """
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is dict:
        return all(type(key) is str and key.isascii() for key in value) and all(map(_is_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return value is None or kind is bool or (kind is int and -_MOST_EXACT <= value <= _MOST_EXACT)


def make_payload(kind: str, predicate: Mapping[str, Any], artifact: tuple[str, Digest] | None = None) -> bytes:
    """Return a statement's bytes; its subject is `artifact`, or the predicate itself."""
    name, digest = artifact or (kind, digest_of(canonical(predicate)))
    payload = canonical(
        {
            "_type": STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": digest}}],
            "predicateType": PREDICATE.format(kind),
            "predicate": dict(predicate),
        }
    )
    if len(payload) > MOST_BYTES:
        raise RefusedError(f"a statement of kind '{kind}' would have {len(payload)} bytes, more than a leaf can hold")
    return payload


def make_payloads(kind: str, predicate: Mapping[str, Any], name: str, entries: Sequence[Any]) -> list[bytes]:
    """Return statements that share `predicate` and have `entries` between them under `name`, some in each."""
    return [
        make_payload(kind, {**predicate, name: list(entries[start : start + _PER_LEAF])})
        for start in range(0, len(entries), _PER_LEAF)
    ]


def root_of_lines(entries: Iterable[Any]) -> Digest:
    """Return the root over the canonical JSON of each entry."""
    return Digest(root_of(canonical(entry) for entry in entries).hex())


def to_the_minute(moment: str) -> str:
    """Return a stored moment as leaves have it: no finer than the minute."""
    return moment[:-3] + "00Z" if moment.endswith("Z") else moment


def pae(payload: bytes) -> bytes:
    """Return what a DSSE signature is over."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal_envelope(payload: bytes, key_id: str, sign: Callable[[bytes], bytes]) -> dict[str, Any]:
    """Return the payload in a signed DSSE envelope."""
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": key_id, "sig": base64.b64encode(sign(pae(payload))).decode()}],
    }


def make_receipt(envelope: Mapping[str, Any], proof: str) -> bytes:
    """Return the receipt file."""
    return canonical({"mediaType": RECEIPT_TYPE, "envelope": dict(envelope), "proof": proof})


def key_id_of(spki: bytes) -> str:
    """Return the id of a receipt key from its SubjectPublicKeyInfo."""
    return hashlib.sha256(spki).hexdigest()
