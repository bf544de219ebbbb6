"""The auditor's side: check receipts, tree heads and exported logs without the store.

Written against docs/reference/evidence.md and sharing nothing with what writes these files, so that a mistake
there does not hide itself here. Imports the standard library, and `cryptography` when the first signature is
checked; nothing that reads a store or a network. `unlearnd verify` prints what `verify_receipt` returns.
"""

from unlearnd.verify.checks import verify_receipt
from unlearnd.verify.exports import Folder, LocalFolder
from unlearnd.verify.reports import Check, Report, Result

__all__ = ["Check", "Folder", "LocalFolder", "Report", "Result", "verify_receipt"]
