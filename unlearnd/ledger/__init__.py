"""The ledger: every point's placement, every checkpoint, every erasure. The only package that knows SQL.

`connection` opens it and runs transactions; `points`, `models`, `erasures` and `leases` are what is said and
asked in them, as functions that take the ledger.
"""

from unlearnd.ledger.connection import Ledger

__all__ = ["Ledger"]
