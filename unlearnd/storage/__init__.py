"""Storage: slice data, checkpoints and receipts as objects. The only package that knows where bytes lie.

`objects` is the door: names under one root, on a local disk (`disk`) or on any file system that fsspec opens.
"""

from unlearnd.storage.disk import Pieces
from unlearnd.storage.objects import Storage

__all__ = ["Pieces", "Storage"]
