"""Declare models, build them, and build again what erasures have set back.

A declaration fixes what a model is made from, and its seed, for good. What there is to train follows from recipes and
checkpoints alone (`build`); here is decided how, and when: as asked, else as the store's settings and policy say.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from functools import partial
from typing import Any

from unlearnd.answering import evaluate
from unlearnd.bases import FOLDER as BASES
from unlearnd.bases import destroy_unnamed, take_offer
from unlearnd.build import Report, Watch, build, build_task, check_start
from unlearnd.checkpoints import standings
from unlearnd.costs import choose_kept, even_scheme, scheme_of
from unlearnd.erasure import live_sets, shards_of
from unlearnd.errors import InputError, RefusedError, UnlearndError
from unlearnd.features import Sight
from unlearnd.hookspecs import Backend, FeatureBackend, Task
from unlearnd.ingest import check_name
from unlearnd.keys import draw_id, draw_seed
from unlearnd.layouts import FrozenLayout
from unlearnd.leases import hold
from unlearnd.ledger import dockets, erasures, log, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.leases import ingest_lease
from unlearnd.ledger.models import Build, Model
from unlearnd.ledger.points import Dataset
from unlearnd.opened import Opened
from unlearnd.planner import check_keep, read_keep
from unlearnd.policy import Policy
from unlearnd.rebuild import rebuild_is_due
from unlearnd.recipes import SCHEDULES, Spec, check_schedule, recipes
from unlearnd.statements import model_declared, models_rebuilt
from unlearnd.steps import Step, reached
from unlearnd.translog import newest_moment, sign_head

DEFAULT_EPOCHS = 10
MOST_EPOCHS = 1_000_000


@dataclass(frozen=True)
class How:
    """How to build."""

    executor: str
    workers: int
    device: str
    spread: bool
    """Nobody said how, so a backend with several devices gets a worker on each."""


def declare(
    store: Opened,
    model: str,
    *,
    dataset: str,
    backend: str,
    epochs: float | Fraction | None,
    seed: int | None,
    settings: Mapping[str, object] | None,
    schedule: str | None,
    keep: int | str | None,
    device: str | None,
) -> Model:
    """Fix what a model is made from, and its seed; a model of that name must be the same."""
    check_name("model", model)
    data = points.dataset_named(store.ledger, dataset)
    known = models.find_model(store.ledger, model)
    if known is not None:
        models.model_in_service(store.ledger, model)
    learner = store.plugins.backend(backend)
    given = float(epochs) if epochs is not None else None
    if given is not None and not 0 < given <= MOST_EPOCHS:
        raise InputError(f"epochs must be more than 0 and at most {MOST_EPOCHS:,}, not {epochs}")
    length = Fraction(str(epochs)) if epochs is not None else known.spec.epochs if known else DEFAULT_EPOCHS
    chosen = schedule or (known.spec.schedule if known else SCHEDULES[0])
    check_schedule(chosen)
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError("a seed is a whole number from 0 to 2^63 - 1")
    # A base is named by the digest of what is in it; where it came from is forgotten here.
    offer = take_offer(store.ledger, store.storage, settings or {}) if isinstance(learner, FeatureBackend) else None
    asked = {**(settings or {}), "base": offer.digest} if offer else settings or {}
    filled = (known.spec.settings if known and settings is None else None) or learner.settings(asked)
    same_backend = known and (known.spec.backend, known.spec.backend_version) == (learner.name, learner.version)
    if known and same_backend and learner.settings(known.spec.settings) == filled:
        filled = known.spec.settings  # it may have been declared before there were settings left at their defaults
    leases = [ingest_lease(dataset), *([BASES] if offer else [])]
    with hold(store.ledger, leases, store.clock) if known is None else nullcontext():
        # Read again under the lease: nothing is added between what the model is declared on and its declaration.
        data = points.dataset_named(store.ledger, dataset)
        dockets.check_not_destroyed(store.ledger, dataset)
        spec = Spec(
            backend=learner.name,
            backend_version=learner.version,
            settings=filled,
            shape=data.shape,
            dtype=data.dtype,
            classes=known.spec.classes if known else tuple(sorted(data.labels, key=_label_order)),
            shards=data.shards,
            slices=known.spec.slices if known else points.generations(store.ledger, data.id)[-1].last_slice,
            epochs=Fraction(length),
            schedule=chosen,
        )
        if known is not None:
            _check_same(known, data, spec, seed)
            if keep is not None and _kept(store, data, spec, learner, keep) != known.kept:
                raise RefusedError(
                    f"model '{known.name}' was declared with other checkpoints to keep; a model never changes, "
                    "train a new one"
                )
            if offer:
                offer.keep(store.storage)
            return known
        kept = _kept(store, data, spec, learner, keep)
        sight = Sight(store.storage, learner, spec, device or store.config.device, offer.tensors if offer else None)
        check_start(sight, spec)
        if offer:
            destroy_unnamed(store.ledger, store.storage)
            offer.keep(store.storage)
            reached(Step.TRAIN_BASE_KEPT)
        chosen_seed, now = draw_seed() if seed is None else seed, store.clock()
        first = [(shard, recipes(spec, chosen_seed, shard, [], True)[0]) for shard in range(1, spec.shards + 1)]
        declared = models.declare_model(
            store.ledger,
            model,
            data.id,
            spec,
            sliceable=learner.sliceable,
            deterministic=learner.deterministic,
            seed=chosen_seed,
            kept=kept,
            leaves=model_declared(model, data.name, spec, chosen_seed, learner.deterministic, kept, first, stamp(now)),
            now=now,
        )
    reached(Step.TRAIN_DECLARED)
    return declared


def _kept(store: Opened, data: Dataset, spec: Spec, learner: Backend, keep: int | str | None) -> tuple[int, ...] | None:
    """Return the slices whose checkpoints a model keeps: the best for the erasures expected; None for all.

    They follow from the spec and the frozen layout, and from no point.
    """
    if keep is None or keep == "all":
        return None
    count = read_keep(keep)
    check_keep(count, spec.slices)
    if not learner.sliceable:
        raise InputError(f"backend '{learner.name}' trains a shard whole: it has one checkpoint, and keeps it")
    if count == spec.slices:
        return None
    epochs, even = float(spec.epochs), len(points.generations(store.ledger, data.id)) > 1
    if data.layout is None or even:
        # Slices that were added later begin anew with those least likely to leave: taken together, evenly spread.
        return choose_kept(even_scheme(1.0, spec.shards, spec.slices, epochs, spec.schedule), count)
    layout = FrozenLayout.from_json(data.layout)
    return choose_kept(scheme_of(layout, 1.0, spec.shards, spec.slices, epochs, spec.schedule), count)


def how_to_build(store: Opened, executor: str | None, workers: int | None, device: str | None) -> How:
    """Return how to build: as asked, else as the store's settings say."""
    count = store.config.workers if workers is None else workers
    if count < 1:
        raise InputError(f"a build needs at least 1 worker, not {count}")
    several = workers is not None and workers > 1 and store.config.executor == "serial"
    chosen = executor or ("processes" if several else store.config.executor)
    check: Callable[[Mapping[str, Any]], None] | None = getattr(store.plugins.executor(chosen), "check", None)
    if check is not None:
        # Before a model is declared or an erasure begun: what cannot be built with is told at once.
        check(store.config.executor_options)
    unsaid = (executor, workers, store.config.executor, store.config.workers) == (None, None, "serial", 1)
    return How(chosen, count, device or store.config.device, spread=unsaid)


def work(store: Opened, task: Task, report: Report) -> None:
    """Carry out one task of a build, as a worker."""
    build_task(store.ledger, store.storage, store.plugins, task, store.clock, report)


def build_one(store: Opened, model: Model, how: How, watch: Watch | None, sealing: bool = True) -> Build:
    return build(
        store.ledger,
        store.storage,
        store.plugins,
        model,
        str(store.folder),
        partial(work, store),
        store.clock,
        executor=how.executor,
        workers=how.workers,
        device=how.device,
        spread=how.spread,
        build_id=draw_id(),
        watch=watch or Watch(),
        sealing=sealing,
    )


def rebuild(store: Opened, policy: Policy, build: bool | None, how: How, watch: Watch | None) -> list[Build]:
    """Build what erasures set back: as asked, else when the policy says."""
    set_back = _set_back(store)
    wanted = set_back if build else []
    try:
        if build is None:
            wanted = [model for model in set_back if _build_is_due(store, policy, model)]
        # Not more than the erasure set back: slices that still take points stay open.
        builds = [build_one(store, model, how, watch, sealing=False) for model in wanted]
    except UnlearndError as error:
        raise type(error)(
            f"the erasure is done and nothing made from the data is left, but the rebuild failed: {error}; "
            "`unlearnd build` goes on with it"
        ) from error
    if build is not False:
        note_rebuilt(store, builds)
        sign_head(store.translog)
    return builds


def _build_is_due(store: Opened, policy: Policy, model: Model) -> bool:
    rules = policy.build
    if rules.when != "accuracy":
        return rebuild_is_due(store.ledger, rules, model, store.clock())
    assert rules.held_out is not None
    assert rules.floor is not None
    file = rules.held_out.file
    named = file if "://" in file else str(store.folder / file)
    try:
        found = evaluate(store, model.name, named, label=rules.held_out.label, aggregate="vote", device=None)
        return found.top1 < rules.floor
    except RefusedError:
        return True  # every constituent abstains


def _set_back(store: Opened) -> list[Model]:
    """Return the models that erasures have set back and no build has brought up again."""
    touched = {
        dataset_id for erasure in erasures.erasures_to_rebuild(store.ledger) for dataset_id, _ in erasure.touched
    }
    return [model for model in models.models(store.ledger) if model.dataset_id in touched]


def note_rebuilt(store: Opened, builds: Sequence[Build]) -> None:
    """Record for each erasure whether every model it touched is back at full strength."""
    complete: dict[int, bool] = {}
    ready = []
    for erasure in erasures.erasures_to_rebuild(store.ledger):
        for dataset_id in {dataset_id for dataset_id, _ in erasure.touched}:
            if dataset_id not in complete:
                complete[dataset_id] = all(
                    standing.complete
                    for model in models.models(store.ledger, dataset_id)
                    for standing in standings(store.ledger, model)
                )
        if all(complete[dataset_id] for dataset_id, _ in erasure.touched):
            ready.append(erasure.id)
    if ready:
        store.clock.not_before(newest_moment(store.ledger))
        now = store.clock()
        erasures.rebuilt(store.ledger, ready, _rebuilt_leaves(store, ready, builds, now), now)
        reached(Step.ERASE_REBUILT)


def _rebuilt_leaves(store: Opened, ready: Sequence[str], builds: Sequence[Build], now: datetime) -> list[bytes]:
    """Return the statements that follow receipts once models are at full strength, and what is in service."""
    leaf_of = {entry.request_id: entry.leaf for entry in log.receipt_entries(store.ledger)}
    trained = [(build.model, build.samples, build.from_scratch) for build in builds]
    built = {build.model for build in builds if build.checkpoints}
    listed = [(model, shards_of(model)) for model in models.models(store.ledger) if model.name in built]
    leaves = live_sets(store.translog, listed, now)
    for erasure_id in ready:
        receipts = [leaf_of[request.id] for request in erasures.requests_of(store.ledger, erasure_id)]
        leaves.append(models_rebuilt(erasure_id, receipts, trained, stamp(now)))
    return leaves


def _check_same(known: Model, dataset: Dataset, spec: Spec, seed: int | None) -> None:
    """Raise `RefusedError` where a model is declared again as something else."""
    if known.dataset_id != dataset.id:
        raise RefusedError(f"model '{known.name}' was declared on another dataset than '{dataset.name}'")
    if seed is not None and seed != known.seed:
        raise RefusedError(f"model '{known.name}' has its seed; it was drawn when it was declared and never changes")
    now, then = replace(spec, backend_version="").as_json(), replace(known.spec, backend_version="").as_json()
    differ = [name for name in now if now[name] != then[name]]
    if differ:
        raise RefusedError(
            f"model '{known.name}' was declared with other {', '.join(differ)}; a model never changes, train a new one"
        )


def _label_order(label: int | str) -> tuple[int, int | str]:
    return (0, label) if isinstance(label, int) else (1, label)
