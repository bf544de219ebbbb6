"""DSSE 1.0 envelopes: what was signed, and by which of the keys given.

The signature covers type and bytes, so nothing is re-encoded to check it, and the bytes that verified are the
bytes that get parsed. The `keyid` beside a signature is an unsigned hint; every key given is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unlearnd.errors import FormatError, SignatureError
from unlearnd.verify.ed25519 import is_signed
from unlearnd.verify.statements import Fields
from unlearnd.verify.texts import read_either_base64
from unlearnd.verify.values import Value

MAX_SIGNATURES = 16


class Envelope(Value):
    """Bytes, their type, and signatures over both."""

    payload_type: str
    payload: bytes
    signatures: tuple[bytes, ...]


def read_envelope(value: Any) -> Envelope:
    """Return the envelope of a JSON value; unknown fields are ignored, as DSSE says."""
    fields = Fields(value, "the envelope")
    payload_type = fields.text("payloadType")
    payload = fields.value.get("payload")
    if not isinstance(payload, str):
        raise FormatError("the envelope has no payload")
    signatures = []
    listed = fields.list("signatures")
    if not 1 <= len(listed) <= MAX_SIGNATURES:
        raise FormatError(f"an envelope has 1 to {MAX_SIGNATURES} signatures, this one has {len(listed)}")
    for number, given in enumerate(listed):
        entry = Fields(given, f"signature {number}")
        if not isinstance(entry.value.get("keyid", ""), str):
            raise FormatError(f"keyid of signature {number} is not a text")
        signatures.append(read_either_base64(entry.text("sig"), f"signature {number}"))
    return Envelope(payload_type, read_either_base64(payload, "the payload"), tuple(signatures))


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the pre-authentication encoding: the bytes a DSSE signature is over."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def signers_of(envelope: Envelope, keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return those of the Ed25519 `keys` that signed the envelope, each once; raise SignatureError when none did."""
    message = pae(envelope.payload_type, envelope.payload)
    signers = tuple(key for key in keys if any(is_signed(key, sig, message) for sig in envelope.signatures))
    if not signers:
        raise SignatureError(f"none of the {len(keys)} keys given signed the envelope")
    return signers
