"""A store's secrets, and all randomness.

Two keys live in `keys/` as 64 hexadecimal digits, readable by their owner alone: `placement.key` decides
where users go, `pepper.key` turns user ids into handles. They are apart because two stores may have to share
the first (to compare their checkpoints) and never need to share the second. Two more sign: `log.key` tree heads,
`receipt.key` receipts; each is an Ed25519 key in PEM, with its public half beside it. A signer is anything that
signs bytes and names its public key, so a key service can take their place.
"""

import base64
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.hookspecs import Signer

HANDLE_BYTES = 16
KEY_BYTES = 32
# RFC 8410: the DER of an Ed25519 public key is this prefix and the key.
_SPKI = bytes.fromhex("302a300506032b6570032100")
_P = 2**255 - 19
_EIGHTH = 55188659117513257062467267217118295137698188065244968500265048394206261417927
# The y coordinates of edwards25519's points of order 4, 1, 2 and 8: a test multiplies them out.
LOW_ORDER = {0, 1, _P - 1, _EIGHTH, _P - _EIGHTH}


@dataclass(frozen=True, repr=False)
class FileSigner:
    """A signer whose private key is in a file."""

    public: bytes
    _private: Any

    def sign(self, message: bytes) -> bytes:
        return bytes(self._private.sign(message))


@dataclass(frozen=True, repr=False)
class FileWrapper:
    """Wraps keys under one in a file (RFC 3394)."""

    _key: bytes

    def wrap(self, key: bytes) -> bytes:
        from cryptography.hazmat.primitives.keywrap import aes_key_wrap  # heavy

        return aes_key_wrap(self._key, key)

    def unwrap(self, wrapped: bytes) -> bytes:
        from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap  # heavy

        try:
            return aes_key_unwrap(self._key, wrapped)
        except InvalidUnwrap:
            raise ValueError("the key was not wrapped by this one") from None


@dataclass(frozen=True, repr=False)
class Keys:
    """The store's secrets. Not shown when printed."""

    placement: bytes
    pepper: bytes

    def handles(self, users: Iterable[str]) -> list[bytes]:
        """Return the keyed handle of each user: all that the store ever keeps of an id."""
        pepper = self.pepper
        return [hmac.digest(pepper, user.encode(), "sha256")[:HANDLE_BYTES] for user in users]


def create_keys(folder: Path, placement_key: Path | None = None) -> Keys:
    """Write fresh keys into `folder`, taking the placement key from a file where one is given."""
    placement = _read_key(placement_key, InputError) if placement_key else secrets.token_bytes(KEY_BYTES)
    keys = Keys(placement=placement, pepper=secrets.token_bytes(KEY_BYTES))
    for path in folder.glob("*.key"):
        raise RefusedError(f"there is a key at {path} already, and no store to it; a key is never overwritten")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, key in (("placement", keys.placement), ("pepper", keys.pepper)):
        _write_key(folder / f"{name}.key", key)
    return keys


def discard_keys(folder: Path) -> None:
    """Remove keys that were just made and will not be used: nothing was ever placed, named or signed with them."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def open_keys(folder: Path) -> Keys:
    """Read the keys of a store."""
    return Keys(
        placement=_read_key(folder / "placement.key", DamagedStoreError),
        pepper=_read_key(folder / "pepper.key", DamagedStoreError),
    )


def create_wrapper(folder: Path) -> None:
    """Write a fresh key that wraps those of objects."""
    _write_key(folder / "store.key", secrets.token_bytes(KEY_BYTES))


def open_wrapper(folder: Path) -> FileWrapper:
    """Return what wraps keys under the key file `store.key`."""
    return FileWrapper(_read_key(folder / "store.key", DamagedStoreError))


def check_private(*paths: Path) -> None:
    """Raise `RefusedError` where a file, or a folder and the keys in it, can be read or changed by others."""
    if os.name != "posix":
        return
    for path in [inner for given in paths for inner in (given, *sorted(given.glob("*.key")))]:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            right = "700" if path.is_dir() else "600"
            raise RefusedError(f"{path} is open to others (mode {mode:04o}): close it with `chmod {right} {path}`")


def make_private(folder: Path) -> None:
    """Make a folder for the owner alone. An empty one is closed to others; one that has something must be closed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and not any(folder.iterdir()):
        folder.chmod(0o700)
    check_private(folder)


ROLES = ("log", "receipt")


def create_signer(folder: Path, role: str) -> Signer:
    """Write a fresh signing key for a role; refuse to overwrite one."""
    from cryptography.hazmat.primitives import serialization as forms  # heavy
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    passphrase = _passphrase()
    how = forms.BestAvailableEncryption(passphrase) if passphrase else forms.NoEncryption()
    secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, how)
    _write_exclusive(folder / f"{role}.key", secret, 0o600)
    # That of the key before, where a rotation was killed between moving the two aside.
    (folder / f"{role}.pub").unlink(missing_ok=True)
    _write_exclusive(folder / f"{role}.pub", public_pem(_raw(private)), 0o644)
    return open_signer(folder, role)


def open_signer(folder: Path, role: str) -> Signer:
    """Read the signing key of a role. A key with a passphrase takes it from UNLEARND_KEY_PASSPHRASE."""
    from cryptography.hazmat.primitives import serialization as forms  # heavy
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = folder / f"{role}.key"
    try:
        data = path.read_bytes()
        # A key made before there was a passphrase has none.
        private = forms.load_pem_private_key(data, _passphrase() if b"ENCRYPTED" in data else None)
    except FileNotFoundError:
        raise NotFoundError(f"no key file {path}") from None
    except (OSError, ValueError, TypeError):
        raise DamagedStoreError(f"the key file {path} cannot be read, or needs UNLEARND_KEY_PASSPHRASE") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise DamagedStoreError(f"the key file {path} does not hold an Ed25519 key")
    return FileSigner(_raw(private), private)


def public_pem(public: bytes) -> bytes:
    """Return a public key as others read it: SubjectPublicKeyInfo in PEM."""
    encoded = base64.b64encode(_SPKI + public).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{encoded}\n-----END PUBLIC KEY-----\n".encode()


def retire_signer(folder: Path, role: str, name: str) -> None:
    """Move a signing key aside, so that a new one can take its place."""
    try:
        for ending in ("key", "pub"):
            os.replace(folder / f"{role}.{ending}", folder / f"{role}-{name}.{ending}")
    except OSError as error:
        raise StorageError(f"the {role} key in {folder} cannot be moved aside: {error.strerror}") from error


def receipt_key_id(public: bytes) -> str:
    """Return a receipt key's id: SHA-256 of its SubjectPublicKeyInfo."""
    return hashlib.sha256(_SPKI + public).hexdigest()


def check_public_key(public: bytes) -> None:
    """Raise `InputError` for a public key that must not be registered: of low order, or not canonical."""
    number = int.from_bytes(public, "little") & ((1 << 255) - 1)
    if len(public) != 32 or number >= _P or number in LOW_ORDER:
        raise InputError("the public key is not a proper Ed25519 key: of low order, or not in canonical form")


def draw_nonce() -> bytes:
    """Return 32 fresh random bytes."""
    return secrets.token_bytes(32)


def draw_user_keys(count: int) -> list[bytes]:
    """Return `count` fresh user keys."""
    pool = secrets.token_bytes(KEY_BYTES * count)
    return [pool[i : i + KEY_BYTES] for i in range(0, len(pool), KEY_BYTES)]


def draw_seed() -> int:
    """Return a fresh model seed of 63 bits."""
    return secrets.randbits(63)


def draw_id() -> str:
    """Return a fresh random name of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def _raw(private: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as forms  # heavy

    return bytes(private.public_key().public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw))


def _write_key(path: Path, key: bytes) -> None:
    _write_exclusive(path, key.hex().encode() + b"\n", 0o600)


def _write_exclusive(path: Path, data: bytes, mode: int) -> None:
    """Write a new file, whole or not at all: half a key would stand in the way of the next try."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces what is there.
        os.link(part, path)
    except FileExistsError:
        raise RefusedError(f"there is a key at {path} already; a key is never overwritten") from None
    except OSError as error:
        raise StorageError(f"the key {path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def _passphrase() -> bytes | None:
    given = os.environ.get("UNLEARND_KEY_PASSPHRASE")
    return given.encode() if given else None


def _read_key(path: Path, error: type[InputError] | type[DamagedStoreError]) -> bytes:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        raise NotFoundError(f"no key file {path}") from None
    except (OSError, UnicodeDecodeError):
        raise error(f"the key file {path} cannot be read") from None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise error(f"the key file {path} does not hold {2 * KEY_BYTES} hexadecimal digits")
    return key
