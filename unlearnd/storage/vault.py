"""Objects kept under keys of their own, so that destroying a key destroys every copy of its object.

Each object is encrypted with AES-256-GCM under a fresh key, used once. The key is wrapped by the store's key, or by
a key service, and kept in the ledger, never beside the object: whoever has a copy of the bucket from last year and all
of today's keys cannot read what was destroyed in between.

An object that takes the place of one that a backup has the key of may be opened by that backup, too, or what an erasure
leaves to others would be lost with the ledger. So it begins with slots: its wrapped key, once for each such backup,
encrypted to a key of which the private half is in the backup's file alone. The store cannot open a slot, and slots go
where the object goes.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unlearnd.errors import DamagedStoreError
from unlearnd.hookspecs import KeyWrapper
from unlearnd.storage.disk import Pieces

CIPHER = "AES-256-GCM"
_MARK = b"unlearnd sealed 1\n"
_SLOTTED = b"unlearnd sealed 2\n"
_NONCE = 12
_PUBLIC, _NAME, _COUNT = 32, 8, 2


@dataclass(frozen=True)
class Vault:
    """Seals and opens objects."""

    wrapper: KeyWrapper

    def draw_name(self, stem: str) -> str:
        """Return a name for an object that nobody else will write."""
        return f"{stem}.{secrets.token_hex(4)}.sealed"

    def seal(self, name: str, pieces: Pieces, backups: Sequence[bytes] = ()) -> tuple[bytes, bytes]:
        """Return an object encrypted for that name, and its key, wrapped; `backups` can open it, by public key."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # heavy

        key, nonce = secrets.token_bytes(32), secrets.token_bytes(_NONCE)
        plain = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        wrapped = self.wrapper.wrap(key)
        head = _slots(name, wrapped, backups) if backups else b""
        bound = head + name.encode()
        return (_SLOTTED if head else _MARK) + head + nonce + AESGCM(key).encrypt(nonce, plain, bound), wrapped

    def open(self, name: str, data: bytes, wrapped: bytes) -> bytes:
        """Return what was sealed under that name; raise `DamagedStoreError` where key and object do not fit."""
        from cryptography.exceptions import InvalidTag  # heavy
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        head = _head(data)
        begin = len(_MARK) + len(head) + _NONCE
        if not data.startswith((_MARK, _SLOTTED)) or len(data) < begin + 16:
            raise DamagedStoreError(f"{name} is not encrypted, and should be")
        try:
            key = self.wrapper.unwrap(wrapped)
            bound = head + name.encode()
            return AESGCM(key).decrypt(data[begin - _NONCE : begin], memoryview(data)[begin:], bound)
        except (InvalidTag, ValueError):
            raise DamagedStoreError(f"{name} cannot be opened: its key does not fit") from None


def draw_backup_key() -> tuple[bytes, bytes]:
    """Return the private and the public half of a key for a backup."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # heavy

    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def key_in_slot(name: str, data: bytes, private: bytes) -> bytes | None:
    """Return the wrapped key of an object from the slot that is for a backup; None where there is none for it."""
    from cryptography.exceptions import InvalidTag  # heavy
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    head = _head(data)
    mine = X25519PrivateKey.from_private_bytes(private)
    public = mine.public_key().public_bytes_raw()
    for whose, sealed in _each_slot(head):
        if whose == _name(public):
            try:
                shared = mine.exchange(X25519PublicKey.from_public_bytes(head[:_PUBLIC]))
                return AESGCM(_slot_key(shared, head[:_PUBLIC], public)).decrypt(bytes(_NONCE), sealed, name.encode())
            except (InvalidTag, ValueError):
                raise DamagedStoreError(f"{name} cannot be opened by the backup: its slot does not fit") from None
    return None


def _slots(name: str, wrapped: bytes, backups: Sequence[bytes]) -> bytes:
    """Return a wrapped key encrypted to each of these, each after its name and length, behind a key used once."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey  # heavy
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    once = X25519PrivateKey.generate()
    ours = once.public_key().public_bytes_raw()
    slots = [ours, len(backups).to_bytes(_COUNT, "big")]
    for public in backups:
        shared = once.exchange(X25519PublicKey.from_public_bytes(public))
        # The key is of this object and this backup alone, and used once: the nonce may be anything.
        sealed = AESGCM(_slot_key(shared, ours, public)).encrypt(bytes(_NONCE), wrapped, name.encode())
        slots += [_name(public), len(sealed).to_bytes(_COUNT, "big"), sealed]
    return b"".join(slots)


def _slot_key(shared: bytes, ours: bytes, public: bytes) -> Any:
    from cryptography.hazmat.primitives.hashes import SHA256  # heavy
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, b"unlearnd backup slot 1\n" + ours + public).derive(shared)


def _name(public: bytes) -> bytes:
    return hashlib.sha256(public).digest()[:_NAME]


def _head(data: bytes) -> bytes:
    """Return the slots that an object begins with, as far as it has any and is whole."""
    if not data.startswith(_SLOTTED):
        return b""
    begin = end = len(_SLOTTED)
    end += _PUBLIC + _COUNT
    for _ in range(int.from_bytes(data[end - _COUNT : end], "big")):
        end += _NAME + _COUNT
        end += int.from_bytes(data[end - _COUNT : end], "big")
    return data[begin:end]


def _each_slot(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = _PUBLIC + _COUNT
    while at < len(head):
        end = at + _NAME + _COUNT
        size = int.from_bytes(head[end - _COUNT : end], "big")
        yield head[at : at + _NAME], head[end : end + size]
        at = end + size


def opened(vault: Vault | None, name: str, data: bytes, wrapped: bytes | None) -> bytes:
    """Return the content of an object: opened where the ledger has a key for it, else as it is."""
    if wrapped is None:
        return data
    if vault is None:
        raise DamagedStoreError(f"{name} is encrypted, and the store's settings name no wrapper of keys")
    return vault.open(name, data, wrapped)
