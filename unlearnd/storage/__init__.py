"""Storage: slice data, checkpoints and receipts as objects. The only package that knows where bytes lie.

`objects` is the door: names under one root, on a local disk (`disk`), in a bucket (`s3`), or wherever else fsspec
reaches. `vault` encrypts what is to be unreadable in copies once its key is destroyed.
"""

from unlearnd.storage.disk import Pieces
from unlearnd.storage.objects import CLAIM, Overlooked, Record, Storage
from unlearnd.storage.s3 import Abilities, Kept, Version
from unlearnd.storage.vault import CIPHER, Vault, draw_backup_key, key_in_slot, opened

__all__ = [
    "CIPHER",
    "CLAIM",
    "Abilities",
    "Kept",
    "Overlooked",
    "Pieces",
    "Record",
    "Storage",
    "Vault",
    "Version",
    "draw_backup_key",
    "key_in_slot",
    "opened",
]
