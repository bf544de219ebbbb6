"""Check Ed25519 signatures, and the keys before they are trusted.

`cryptography` verifies, but also under keys that RFC 8032 calls invalid. So a key is looked at when it enters (a
trust file, a vkey, a key leaf): canonical, on the curve, not of low order. Under a low-order key one signature
fits many messages.
"""

from __future__ import annotations

from functools import lru_cache

from unlearnd.errors import FormatError, SignatureError
from unlearnd.verify.hashes import sha256

KEY_BYTES = 32
SIGNATURE_BYTES = 64

# RFC 8410: the SubjectPublicKeyInfo of an Ed25519 key is these twelve bytes and the key.
_SPKI = bytes.fromhex("302a300506032b6570032100")
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_LOW_ORDER = frozenset((0, 1, _P - 1, _ORDER_8, _P - _ORDER_8))


@lru_cache(maxsize=256)
def check_public_key(key: bytes) -> None:
    """Raise FormatError unless `key` is a public key that may be trusted at all."""
    if len(key) != KEY_BYTES:
        raise FormatError(f"an Ed25519 public key is {KEY_BYTES} bytes, not {len(key)}")
    number = int.from_bytes(key, "little")
    y = number & (2**255 - 1)
    if y >= _P:
        raise FormatError("the public key is not canonically encoded")
    if y in _LOW_ORDER:
        raise FormatError("the public key is a point of low order")
    # RFC 8032, section 5.1.3: x² = (y² - 1) / (d·y² + 1) must have a root. x = 0 is y = ±1, refused above.
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    if pow(square, (_P - 1) // 2, _P) != 1:
        raise FormatError("the public key is not a point of the curve")


def key_id_of(key: bytes) -> str:
    """Return the id of a receipt key: SHA-256 of its SubjectPublicKeyInfo, in hexadecimal digits."""
    return sha256(_SPKI + key).hexdigest()


def check_signature(key: bytes, signature: bytes, message: bytes) -> None:
    """Raise SignatureError unless `signature` over `message` was made with the private half of `key`."""
    if not is_signed(key, signature, message):
        raise SignatureError("the signature does not fit")


def is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    """Say whether `signature` over `message` was made with the private half of `key`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True
