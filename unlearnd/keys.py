"""A store's secrets, and all randomness.

Two keys live in `keys/` as 64 hexadecimal digits, readable by their owner alone: `placement.key` decides
where users go, `pepper.key` turns user ids into handles. They are apart because two stores may have to share
the first (to compare their checkpoints) and never need to share the second.
"""

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError

HANDLE_BYTES = 16
KEY_BYTES = 32


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


def open_keys(folder: Path) -> Keys:
    """Read the keys of a store."""
    return Keys(
        placement=_read_key(folder / "placement.key", DamagedStoreError),
        pepper=_read_key(folder / "pepper.key", DamagedStoreError),
    )


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


def _write_key(path: Path, key: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise RefusedError(f"there is a key at {path} already; a key is never overwritten") from None
    with os.fdopen(handle, "w") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())


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
