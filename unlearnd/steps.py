"""Every durable step of ingest, build, erase and moving a ledger, named once.

A step is a moment after which a killed process leaves something behind. The code says `reached(step)` right
after each; nothing happens there unless somebody watches. The crash tests watch, kill the process at every
step of this list and run the command again, so that a step added here is a step that is tested.
"""

from collections.abc import Callable
from enum import StrEnum


class Step(StrEnum):
    """What is durable now; the value is what a person would call it."""

    INGEST_OPENED = "ingest: announced in the ledger"
    INGEST_SEGMENTS = "ingest: some slice data written"
    INGEST_STAGED = "ingest: all slice data written, nothing in the ledger"
    INGEST_COMMITTED = "ingest: points in the ledger"
    TRAIN_BASE_KEPT = "train: base copied into storage, model not declared"
    TRAIN_DECLARED = "train: model declared"
    BUILD_SEALED = "build: slices closed to new points"
    BUILD_ROOTS = "build: roots of a shard's slices in the ledger"
    BUILD_FEATURES_WRITTEN = "build: features of a shard written, not in the ledger"
    BUILD_FEATURES_ENTERED = "build: features of a shard in the ledger"
    BUILD_WRITTEN = "build: checkpoints written, not in the ledger"
    BUILD_ENTERED = "build: checkpoints in the ledger"
    BUILD_COUNTED = "build: samples and seconds counted"
    ERASE_RECORDED = "erase: request recorded"
    ERASE_MARKED = "erase: points marked, roots recomputed, user key destroyed"
    ERASE_REWRITTEN = "erase: slice data written without the points, old data still there"
    ERASE_FEATURES_REWRITTEN = "erase: features written without the points, old ones still there"
    ERASE_SWAPPED = "erase: ledger names the new slice data"
    ERASE_DATA_DESTROYED = "erase: old slice data destroyed"
    ERASE_CHECKPOINTS_DESTROYED = "erase: tainted checkpoints of a shard destroyed"
    ERASE_REMOVED = "erase: no influence left, outcome in the ledger"
    ERASE_REBUILT = "erase: models rebuilt"
    REQUEST_MOVED = "request: a transition in the ledger"
    HOLD_MARKED = "hold: points out of training, or back in it"
    HOLD_CLEANED = "hold: checkpoints of a constituent that no longer fit destroyed"
    LOG_SIGNED = "log: a tree head signed"
    RECEIPT_WRITTEN = "receipt: written, not in the ledger"
    RECEIPT_ENTERED = "receipt: in the ledger"
    LEDGER_COPIED = "ledger copy: all in the new database, the old one in force"
    LEDGER_ENDED = "ledger copy: the old one ended, the settings name it"
    LEDGER_SWITCHED = "ledger copy: the settings name the new one"
    LEDGER_DISCARDED = "ledger copy: the old one destroyed"


watcher: Callable[[Step], None] | None = None


def reached(step: Step) -> None:
    """Say that `step` is durable now."""
    if watcher is not None:
        watcher(step)
