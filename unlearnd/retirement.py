"""What a model leaves behind when an order has it destroyed: kept features and bases that nobody else needs.

The checkpoints themselves go as in every erasure. This is the rest: features of a frozen base are kept for the models
that see points through it, and a base for the models that stand on it. Both can be had again, so where it is not sure
that another model needs them, only time is lost.
"""

from collections.abc import Sequence

from unlearnd.bases import FOLDER as BASES
from unlearnd.bases import destroy_unnamed
from unlearnd.errors import NotFoundError
from unlearnd.features import Sight
from unlearnd.leases import Clock, hold
from unlearnd.ledger import Ledger, models, points
from unlearnd.ledger.features import forget_features, kept_features
from unlearnd.ledger.leases import data_lease
from unlearnd.ledger.models import Model
from unlearnd.plugins import Plugins
from unlearnd.storage import Record, Storage


def destroy_unneeded(
    ledger: Ledger,
    storage: Storage,
    plugins: Plugins,
    device: str,
    retired: Sequence[Model],
    clock: Clock,
    record: Record,
) -> None:
    """Destroy features and bases that only retired models needed. May be taken again after a kill."""
    for dataset_id in sorted({model.dataset_id for model in retired}):
        dataset = points.dataset_by_id(ledger, dataset_id)
        needed = _keys_in_use(ledger, storage, plugins, device, dataset_id)
        for shard in range(1, dataset.shards + 1) if needed is not None else ():
            with hold(ledger, [data_lease(dataset.name, shard)], clock):
                kept = kept_features(ledger, dataset_id, shard)
                forget_features(ledger, [one for one in kept if one.key not in (needed or ())])
                known = {one.path for one in kept_features(ledger, dataset_id, shard)}
                there = storage.list(f"data/{dataset.name}/{shard:04d}")
                storage.destroy((name for name in there if name.endswith(".features") and name not in known), record)
    with hold(ledger, [BASES], clock):
        destroy_unnamed(ledger, storage)


def _keys_in_use(
    ledger: Ledger, storage: Storage, plugins: Plugins, device: str, dataset_id: int
) -> frozenset[str] | None:
    """Return under which keys models in service keep features of a dataset; None where one cannot be asked."""
    try:
        sights = [
            Sight(storage, plugins.backend(model.spec.backend), model.spec, device)
            for model in models.models(ledger, dataset_id)
        ]
    except NotFoundError:
        return None
    return frozenset(sight.key for sight in sights if sight.on_features)
