"""Objects kept under keys of their own, so that destroying a key destroys every copy of its object.

Each object is encrypted with AES-256-GCM under a fresh key, used once. The key is wrapped by the store's key, or by
a key service, and kept in the ledger, never beside the object: whoever has a copy of the bucket from last year and all
of today's keys cannot read what was destroyed in between.
"""

import secrets
from dataclasses import dataclass

from unlearnd.errors import DamagedStoreError
from unlearnd.hookspecs import KeyWrapper
from unlearnd.storage.disk import Pieces

CIPHER = "AES-256-GCM"
_MARK = b"unlearnd sealed 1\n"
_NONCE = 12


@dataclass(frozen=True)
class Vault:
    """Seals and opens objects."""

    wrapper: KeyWrapper

    def draw_name(self, stem: str) -> str:
        """Return a name for an object that nobody else will write."""
        return f"{stem}.{secrets.token_hex(4)}.sealed"

    def seal(self, name: str, pieces: Pieces) -> tuple[bytes, bytes]:
        """Return an object encrypted for that name, and its key, wrapped."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # heavy

        key, nonce = secrets.token_bytes(32), secrets.token_bytes(_NONCE)
        plain = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return _MARK + nonce + AESGCM(key).encrypt(nonce, plain, name.encode()), self.wrapper.wrap(key)

    def open(self, name: str, data: bytes, wrapped: bytes) -> bytes:
        """Return what was sealed under that name; raise `DamagedStoreError` where key and object do not fit."""
        from cryptography.exceptions import InvalidTag  # heavy
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        begin = len(_MARK) + _NONCE
        if not data.startswith(_MARK) or len(data) < begin + 16:
            raise DamagedStoreError(f"{name} is not encrypted, and should be")
        try:
            key = self.wrapper.unwrap(wrapped)
            return AESGCM(key).decrypt(data[len(_MARK) : begin], memoryview(data)[begin:], name.encode())
        except (InvalidTag, ValueError):
            raise DamagedStoreError(f"{name} cannot be opened: its key does not fit") from None


def opened(vault: Vault | None, name: str, data: bytes, wrapped: bytes | None) -> bytes:
    """Return the content of an object: opened where the ledger has a key for it, else as it is."""
    if wrapped is None:
        return data
    if vault is None:
        raise DamagedStoreError(f"{name} is encrypted, and the store's settings name no wrapper of keys")
    return vault.open(name, data, wrapped)
