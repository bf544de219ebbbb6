"""The auditor's side: check receipts, tree heads and exported logs without the store.

Written against docs/reference/evidence.md and sharing nothing with what writes these files, so that a mistake
there does not hide itself here. Imports the standard library, and `cryptography` when the first signature is
checked; nothing that reads a store or a network. `unlearnd verify` prints what `verify_receipt` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unlearnd.verify.checks import verify_receipt
from unlearnd.verify.reports import Check, Report, Result

if TYPE_CHECKING:
    from unlearnd.verify.exports import Folder, LocalFolder

__all__ = ["Check", "Folder", "LocalFolder", "Report", "Result", "verify_receipt"]


def __getattr__(name: str) -> Any:
    """Import what only exported logs need when it is asked for: most receipts are checked without one."""
    if name in ("Folder", "LocalFolder"):
        from unlearnd.verify import exports

        return getattr(exports, name)
    raise AttributeError(f"module 'unlearnd.verify' has no attribute {name!r}")
