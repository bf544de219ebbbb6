"""unlearnd: train models so that a person can be taken out again exactly.

    store = unlearnd.create_store("shop")
    store.ingest("baskets", "baskets.csv", user="customer", label="churned")
    store.train("churn", dataset="baskets", backend="mlp")
    store.erase(["customer-17"])
    store.model("churn").predict(x)

A name in `__all__` is a promise; the rest may move.
"""

from __future__ import annotations

from unlearnd.errors import UnlearndError

TYPE_CHECKING = False  # as type checkers know it: `unlearnd verify` has better to do first than to load typing
if TYPE_CHECKING:
    from typing import Any

    from unlearnd.hookspecs import Backend, Job, Points, hookimpl
    from unlearnd.store import Store

__all__ = ["Backend", "Job", "Points", "Store", "UnlearndError", "create_store", "hookimpl", "open_store"]
__version__ = "0.1.0"


def create_store(directory: str, **options: Any) -> Store:
    """Create a store in `directory` and open it; refuse to overwrite one. Options as in `Store.create`."""
    from unlearnd.store import Store  # heavy: the ledger brings sqlmodel

    return Store.create(directory, **options)


def open_store(directory: str) -> Store:
    """Open the store in `directory`."""
    from unlearnd.store import Store  # heavy: the ledger brings sqlmodel

    return Store.open(directory)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `unlearnd verify` needs none of it."""
    if name == "Store":
        from unlearnd.store import Store  # heavy: the ledger brings sqlmodel

        return Store
    if name in ("Backend", "Job", "Points", "hookimpl"):
        from unlearnd import hookspecs  # pluggy

        return getattr(hookspecs, name)
    raise AttributeError(f"module 'unlearnd' has no attribute {name!r}")
