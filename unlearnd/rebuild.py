"""Erased now, built later: when a policy says that it is time to train what erasures set back.

The data's influence is gone the moment its checkpoints are; what is left to decide is when to spend compute.
"""

from datetime import datetime, timedelta

from unlearnd.checkpoints import standings
from unlearnd.ledger import Ledger, dockets, erasures
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.models import Model
from unlearnd.policy import Build


def degraded(ledger: Ledger, model: Model) -> int:
    """Return how many constituents of a model answer from less than all their slices, or abstain."""
    return sum(not standing.complete for standing in standings(ledger, model))


def rebuild_is_due(ledger: Ledger, rules: Build, model: Model, now: datetime) -> bool:
    """Say whether it is time to build a model that erasures set back; `accuracy` is for the caller to measure."""
    if rules.when == "now":
        return True
    waiting = [e for e in erasures.erasures_to_rebuild(ledger) if any(d == model.dataset_id for d, _ in e.touched)]
    if rules.when == "degraded":
        return degraded(ledger, model) >= (rules.constituents or 1)
    if rules.when == "schedule":
        since = stamp(now - timedelta(days=rules.every_days or 1))
        return any((erasure.influence_removed_at or "") <= since for erasure in waiting)
    assert rules.when == "deadline"
    by = stamp(now + timedelta(days=rules.margin_days or 0))
    ids = [request.id for erasure in waiting for request in erasures.requests_of(ledger, erasure.id)]
    with ledger.read() as connection:
        return any(entry.due_at <= by for entry in dockets.by_ids(connection, ids).values())
