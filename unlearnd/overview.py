"""How a store stands: datasets, models, open requests, where points train, and what a plan can be made from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unlearnd.build import plan_build
from unlearnd.layouts import FrozenLayout, risks_of
from unlearnd.ledger import dockets, erasures, models, points
from unlearnd.ledger.models import Model
from unlearnd.ledger.points import Dataset
from unlearnd.opened import Opened
from unlearnd.packing import unpack
from unlearnd.planner import Question
from unlearnd.targets import point_at, user_id


@dataclass(frozen=True)
class Whereabouts:
    """Where points of a user, or one point, train."""

    dataset: str
    shard: int
    slice: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Status:
    """How a store stands."""

    datasets: tuple["DatasetStatus", ...]
    models: tuple["ModelStatus", ...]
    unfinished: int
    """Erasures that were recorded and not carried out to the end."""
    to_rebuild: int
    """Erasures after which models have not been rebuilt yet."""
    policy: str
    """The policy of requests that name none."""
    requests: Mapping[str, int]
    """Open requests by state."""
    next_due: str | None
    """When the first answer is due; None when none is owed."""
    retired: Mapping[str, str] = field(default_factory=dict)
    """Models that an order had destroyed, and when."""


@dataclass(frozen=True)
class DatasetStatus:
    """How a dataset stands."""

    name: str
    points: int
    shards: int
    slices: int
    open_slices: int
    """Slices that still take points."""
    classes: int


@dataclass(frozen=True)
class ModelStatus:
    """How a model stands: the clean prefix of each constituent, and what a build would train."""

    name: str
    dataset: str
    backend: str
    slices: int
    prefixes: tuple[int, ...]
    samples_missing: int
    samples_from_scratch: int
    degraded: int
    """Constituents that answer from less than all their slices, or abstain."""


def status(store: Opened) -> Status:
    """Return how everything stands."""
    data = {dataset.id: dataset for dataset in points.datasets(store.ledger)}
    waiting = dockets.open_entries(store.ledger)
    return Status(
        datasets=tuple(_dataset_status(store, dataset) for dataset in data.values()),
        models=tuple(_model_status(store, model, data[model.dataset_id]) for model in models.models(store.ledger)),
        unfinished=len(erasures.unfinished_erasures(store.ledger)),
        to_rebuild=len(erasures.erasures_to_rebuild(store.ledger)),
        policy=store.config.policy,
        requests=dict(Counter(entry.state for entry in waiting)),
        next_due=min((entry.due_at for entry in waiting if entry.paused_at is None), default=None),
        retired={m.name: m.retired_at for m in models.models(store.ledger, retired=True) if m.retired_at},
    )


def where_user(store: Opened, user: str | int) -> list[Whereabouts]:
    """Return where a user's points train."""
    places: dict[tuple[int, int, int], list[int]] = {}
    # Every ingest has a row of its own; whoever asks wants to know the place once.
    for holding in points.holdings_of(store.ledger, store.keys.handles([user_id(user)])):
        place = (holding.dataset_id, holding.shard, holding.slice)
        places.setdefault(place, []).extend(unpack(holding.positions).tolist())
    return [_whereabouts(store, place, sorted(positions)) for place, positions in sorted(places.items())]


def where_point(store: Opened, point: str) -> list[Whereabouts]:
    """Return where one point, given as `dataset:position`, trains; nothing when it is not there."""
    name, position = point_at(point)
    dataset = points.dataset_named(store.ledger, name)
    holding = points.holding_at(store.ledger, dataset.id, position)
    return [_whereabouts(store, (holding.dataset_id, holding.shard, holding.slice), [position])] if holding else []


def planning_facts(store: Opened, model: str) -> Question:
    """Return what a plan needs to know and this store can tell of a model: points, epochs, what was measured."""
    found = models.model_named(store.ledger, model)
    dataset = points.dataset_by_id(store.ledger, found.dataset_id)
    built = models.builds_of(store.ledger, found)
    sizes = [checkpoint.size for checkpoint in models.checkpoints_of(store.ledger, found.id)]
    seconds = sum(build.seconds for build in built)
    return Question(
        points=sum(points.counts_of(store.ledger, dataset.id).values()),
        shards=found.spec.shards,
        slices=points.generations(store.ledger, dataset.id)[-1].last_slice,
        keep=None if found.kept is None else len(found.kept),
        epochs=float(found.spec.epochs),
        schedule=found.spec.schedule,
        scattered=dataset.unit == "point",
        risks=() if dataset.layout is None else risks_of(FrozenLayout.from_json(dataset.layout)),
        state_bytes=sum(sizes) / len(sizes) if sizes else None,
        samples_per_second=sum(build.samples for build in built) / seconds if seconds else None,
    )


def _whereabouts(store: Opened, place: tuple[int, int, int], positions: Sequence[int]) -> Whereabouts:
    dataset_id, shard, slice_ = place
    return Whereabouts(points.dataset_by_id(store.ledger, dataset_id).name, shard, slice_, tuple(positions))


def _dataset_status(store: Opened, dataset: Dataset) -> DatasetStatus:
    generations = points.generations(store.ledger, dataset.id)
    return DatasetStatus(
        name=dataset.name,
        points=sum(points.counts_of(store.ledger, dataset.id).values()),
        shards=dataset.shards,
        slices=generations[-1].last_slice,
        open_slices=0 if generations[-1].sealed else generations[-1].slices,
        classes=len(dataset.labels),
    )


def _model_status(store: Opened, model: Model, dataset: Dataset) -> ModelStatus:
    plan = plan_build(store.ledger, model)
    return ModelStatus(
        name=model.name,
        dataset=dataset.name,
        backend=f"{model.spec.backend} {model.spec.backend_version}",
        slices=points.generations(store.ledger, dataset.id)[-1].last_slice,
        prefixes=tuple(standing.prefix for standing in plan.standings),
        samples_missing=plan.samples,
        samples_from_scratch=plan.from_scratch,
        degraded=len(plan.missing),
    )
