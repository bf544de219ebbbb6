"""Make every missing checkpoint: the one operation behind train, resume, erase and new data.

Walk each shard's recipes in order, find the longest prefix of checkpoints that exist, train the rest. Nothing
else decides what to train. A task does that for some shards: it holds their leases, reads their points once,
and saves each state in the background while the next slice trains. When an erasure asks for a lease, the task
stops, lets go and looks again at what is missing; what it had entered stays.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unlearnd.checkpoints import (
    Standing,
    encode_state,
    folder_of,
    path_of,
    read_state,
    read_states,
    seal_state,
    standings,
)
from unlearnd.digests import Digest
from unlearnd.errors import BackendError, BusyError, DamagedStoreError, RefusedError, StorageError, UnlearndError
from unlearnd.features import Sight, read_seen
from unlearnd.hookspecs import Backend, Job, Points, Progress, State, Task
from unlearnd.leases import Clock, Hold, Preempted, hold
from unlearnd.ledger import Ledger, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.leases import build_lease, data_lease, ingest_lease
from unlearnd.ledger.models import Build, Checkpoint, Model, NewCheckpoint
from unlearnd.ledger.points import Dataset
from unlearnd.plugins import Plugins
from unlearnd.recipes import Spec, epochs_at, epochs_of, samples_at, step_seed
from unlearnd.slices import compute_roots
from unlearnd.statements import checkpoints_built, checkpoints_destroyed, slices_sealed
from unlearnd.steps import Step, reached
from unlearnd.storage import Overlooked, Pieces, Storage

T = TypeVar("T")
Report = Callable[[Progress], None]
Trained = tuple[int, int, State, int, float]
"""Shard, slice, the state after it, samples, seconds."""

GROUP_BYTES = 1 << 30
GROUP_SHARDS = 32
FIRST_SHARDS = 8
"""Of the first group, where points come over a network: nothing trains before they are here."""
WAITING_BYTES = 256 << 20
"""Of states that are trained and not saved yet, and of points read for the group that is next."""
_GIVE_WAY = 0.25


@dataclass(frozen=True)
class BuildPlan:
    """What a build would do."""

    standings: tuple[Standing, ...]
    costs: tuple[int, ...]
    """Samples to train for each of them."""
    from_scratch: int
    """Samples that training everything would take."""
    steps: int
    """Checkpoints to make."""

    @property
    def samples(self) -> int:
        """Samples to train."""
        return sum(self.costs)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(standing.shard for standing in self.standings if not standing.complete)


class Watch:
    """Somebody who wants to know how a build goes; this one looks away."""

    def planned(self, model: str, plan: BuildPlan) -> None:
        """Called once when it is known what there is to do, unless there is nothing."""

    def progressed(self, progress: Progress) -> None:
        """Called often; the samples of all calls add up to what is trained."""

    def finished(self) -> None:
        """Called once when there is nothing left to do."""


def plan_build(ledger: Ledger, model: Model, sealing: bool = True) -> BuildPlan:
    """Return what is missing and what it costs; without `sealing`, slices that still take points do not count."""
    counts = points.counts_of(ledger, model.dataset_id)
    found = standings(ledger, model)
    # Points in slices still open count too: a build closes them and trains.
    last = points.generations(ledger, model.dataset_id)[-1].last_slice if sealing else found[0].slices
    costs = tuple(cost_of(model.spec, model.sliceable, counts, s.shard, last, s.prefix) for s in found)
    scratch = sum(cost_of(model.spec, model.sliceable, counts, s.shard, last, 0) for s in found)
    steps = sum(1 for standing in found for slice_ in _steps(model, standing) if model.keeps(slice_))
    return BuildPlan(tuple(found), costs, scratch, steps)


def cost_of(
    spec: Spec, sliceable: bool, counts: Mapping[tuple[int, int], int], shard: int, slices: int, prefix: int
) -> int:
    """Return the samples that bring a constituent from slice `prefix` to its last."""
    if not sliceable:
        whole = sum(counts.get((shard, slice_), 0) for slice_ in range(1, slices + 1))
        return samples_at(spec.epochs, whole) if prefix < slices else 0
    total = seen = 0
    for slice_, epochs in enumerate(epochs_of(spec, slices), start=1):
        here = counts.get((shard, slice_), 0)
        seen += here
        if slice_ > prefix and here:
            total += samples_at(epochs, seen)
    return total


def seal(ledger: Ledger, dataset: Dataset, clock: Clock) -> None:
    """Close the slices filled so far, so that points given later go to new ones."""
    if not all(generation.sealed for generation in points.generations(ledger, dataset.id)):
        with hold(ledger, [ingest_lease(dataset.name)], clock):
            points.seal(ledger, dataset.id, clock())
        reached(Step.BUILD_SEALED)


def build(
    ledger: Ledger,
    storage: Storage,
    plugins: Plugins,
    model: Model,
    store: str,
    work: Callable[[Task, Report], None],
    clock: Clock,
    *,
    executor: str,
    workers: int,
    device: str,
    spread: bool,
    build_id: str,
    watch: Watch,
    sealing: bool,
) -> Build:
    """Make every missing checkpoint of `model` and count what it took.

    Checkpoints that are damaged are put away first and made anew from the one before. With `sealing`, slices that still
    take points are closed and trained too, and what constituents answer from is read and compared with its digest. With
    `spread`, a backend that has
    several devices trains in one process for each.
    """
    backend = check_backend(plugins, model)
    damaged = put_away_damaged(ledger, storage, model, clock, look_inside=sealing)
    run = plugins.executor(executor)
    dataset = points.dataset_by_id(ledger, model.dataset_id)
    started, begun = clock(), time.perf_counter()
    samples = steps = 0

    def count(progress: Progress) -> None:
        nonlocal samples, steps
        samples, steps = samples + progress.samples, steps + progress.steps
        watch.progressed(progress)

    if sealing:
        seal(ledger, dataset, clock)
    plan = plan_build(ledger, model, sealing)
    scratch = plan.from_scratch
    if plan.missing:
        watch.planned(model.name, plan)
    devices = _devices(backend, device) if plan.missing else [device]
    if spread and len(devices) > 1:
        run, workers = plugins.executor("processes"), len(devices)
    while plan.missing:
        run(_tasks(plan, model, store, devices, workers), work, count, workers)
        # An erasure may have come in between: look again rather than trust what was planned.
        plan = plan_build(ledger, model, sealing)
    watch.finished()
    result = Build(build_id, model.name, samples, scratch, steps, time.perf_counter() - begun, damaged)
    if steps:
        models.count_build(ledger, model, result, started, clock())
        reached(Step.BUILD_COUNTED)
    return result


def put_away_damaged(ledger: Ledger, storage: Storage, model: Model, clock: Clock, *, look_inside: bool) -> int:
    """Destroy checkpoints whose bytes are missing or not what was recorded, so that a build trains them anew.

    Return how many there were, with those made from them. Sizes are looked at and, with `look_inside`, the bytes of
    what each constituent answers from; those before it are looked at when they are read. Where not one of a model is
    there, that is no damage but another storage: raise `DamagedStoreError`.
    """
    version = points.version_of(ledger, model.dataset_id)
    chains = {standing.shard: standing.chain for standing in standings(ledger, model)}
    sizes = storage.sizes(f"checkpoints/{model.name}")
    every = [checkpoint for chain in chains.values() for checkpoint in chain]
    if len(every) > 1 and not any(checkpoint.path in sizes for checkpoint in every):
        if points.version_of(ledger, model.dataset_id) != version:
            # An erasure destroyed them between the two looks.
            return put_away_damaged(ledger, storage, model, clock, look_inside=look_inside)
        raise DamagedStoreError(
            f"not one of the {len(every)} checkpoints of model '{model.name}' is in storage: is it the right one? If "
            f"they are lost for good, `unlearnd build {model.name} --retrain-damaged` trains them anew"
        )
    suspects = [
        shard
        for shard, chain in chains.items()
        if any(sizes.get(checkpoint.path) != checkpoint.size for checkpoint in chain)
        or (look_inside and chain and _is_damaged(storage, chain[-1]))
    ]
    return sum(_put_away(ledger, storage, model, shard, clock) for shard in suspects)


def discard_damaged(ledger: Ledger, storage: Storage, model: Model, clock: Clock) -> int:
    """Destroy every checkpoint whose bytes are missing or not what was recorded; return how many there were."""
    return sum(_put_away(ledger, storage, model, shard, clock) for shard in range(1, model.spec.shards + 1))


def _put_away(ledger: Ledger, storage: Storage, model: Model, shard: int, clock: Clock) -> int:
    """Destroy a constituent's checkpoints from the first damaged one on."""
    with hold(ledger, [build_lease(model.name, shard)], clock, preempt=True):
        chain = standings(ledger, model, [shard])[0].chain
        first = next((n for n, checkpoint in enumerate(chain) if _is_damaged(storage, checkpoint)), len(chain))
        # What follows a damaged one is trained anew with it, and must not be entered twice.
        bad = chain[first:]
        if bad:
            storage.destroy(checkpoint.path for checkpoint in bad)
            gone = [(c.shard, c.slice, c.recipe, c.file) for c in bad]
            leaves = checkpoints_destroyed(model.name, "", gone, stamp(clock()))
            models.checkpoints_destroyed(ledger, model.dataset_id, [c.id for c in bad], None, leaves, clock())
    return len(bad)


def _is_damaged(storage: Storage, checkpoint: Checkpoint) -> bool:
    try:
        read_state(storage, checkpoint)
    except DamagedStoreError:
        return True
    return False


def check_backend(plugins: Plugins, model: Model) -> Backend:
    """Return the backend of a model; raise unless it is the very version the model was declared with."""
    backend = plugins.backend(model.spec.backend)
    if backend.version != model.spec.backend_version:
        raise RefusedError(
            f"model '{model.name}' was declared with {backend.name} {model.spec.backend_version}, installed is "
            f"{backend.version}, which may train other bits: install that version, or train a new model"
        )
    return backend


def check_start(sight: Sight, spec: Spec) -> None:
    """Raise unless the backend can begin on points of that shape, and see one: asked before a model is declared."""
    try:
        sight.initial_state(0)
        sight.see(np.zeros((1, *spec.shape), spec.dtype))
    except UnlearndError:
        raise
    except Exception as error:
        raise BackendError(f"backend '{spec.backend}' cannot begin: {type(error).__name__}: {error}") from error


def build_task(ledger: Ledger, storage: Storage, plugins: Plugins, task: Task, clock: Clock, report: Report) -> None:
    """Make the missing checkpoints of some shards of a model."""
    model = models.model_named(ledger, task.model)
    dataset = points.dataset_by_id(ledger, model.dataset_id)
    backend = check_backend(plugins, model)
    groups = _groups(ledger, dataset, backend, task.shards, GROUP_SHARDS if storage.local else FIRST_SHARDS)
    for group, following in zip(groups, [*groups[1:], ()], strict=True):
        while True:
            _fill_roots(ledger, storage, dataset, group, clock)
            names = [build_lease(model.name, shard) for shard in group]
            try:
                with hold(ledger, names, clock) as held:
                    # Looked at with the lease in hand: an order that destroys the model takes it, too.
                    models.model_in_service(ledger, model.name)
                    ready = _Group(ledger, storage, backend, model, dataset, group, task.device, held, clock, report)
                    with storage.reading_ahead(_first_segments(ledger, dataset, following)):
                        ready.build()
                break
            except Preempted:
                # Longer than whoever wants the lease waits between two tries, so that it gets its turn.
                time.sleep(_GIVE_WAY)


def _first_segments(ledger: Ledger, dataset: Dataset, shards: Iterable[int]) -> Iterator[str]:
    """Yield the slice data of shards, as much as may wait in memory; where it lies may change until they are built."""
    width = _width(dataset)
    room = WAITING_BYTES
    for shard in shards:
        for segment in points.segments_of(ledger, dataset.id, shard):
            room -= segment.rows * width
            if room < 0:
                return
            yield segment.path


def _devices(backend: Backend, device: str) -> list[str]:
    """Return the devices that workers take in turn; a backend that says nothing has the one that was named."""
    listed: Callable[[str], Sequence[str]] | None = getattr(backend, "devices", None)
    return list(listed(device)) if listed else [device]


def _tasks(plan: BuildPlan, model: Model, store: str, devices: Sequence[str], workers: int) -> list[Task]:
    """Share the missing shards out to the workers, the longest first, each to whoever has least."""
    loads: list[tuple[int, list[int]]] = [(0, []) for _ in range(min(workers, len(plan.missing)))]
    by_cost = sorted(zip(plan.costs, plan.standings, strict=True), key=lambda pair: (-pair[0], pair[1].shard))
    for cost, standing in by_cost:
        if not standing.complete:
            least = min(range(len(loads)), key=lambda i: (loads[i][0], len(loads[i][1])))
            load, shards = loads[least]
            loads[least] = (load + cost, [*shards, standing.shard])
    return [
        Task(store, model.name, tuple(sorted(shards)), devices[place % len(devices)])
        for place, (_, shards) in enumerate(loads)
    ]


def _groups(
    ledger: Ledger, dataset: Dataset, backend: Backend, shards: Sequence[int], first: int
) -> list[tuple[int, ...]]:
    """Cut shards into groups that fit in memory, `first` of them in the first.

    Without `train_many` there is nothing to gain from a group.
    """
    if not hasattr(backend, "train_many"):
        return [(shard,) for shard in shards]
    counts = points.counts_of(ledger, dataset.id)
    width = _width(dataset)
    groups: list[list[int]] = [[]]
    size = 0
    for shard in shards:
        here = width * sum(count for place, count in counts.items() if place[0] == shard)
        most = GROUP_SHARDS if groups[1:] else first
        if groups[-1] and (size + here > GROUP_BYTES or len(groups[-1]) == most):
            groups.append([])
            size = 0
        groups[-1].append(shard)
        size += here
    return [tuple(group) for group in groups]


def _width(dataset: Dataset) -> int:
    """Return the bytes of a point's features."""
    return int(np.prod(dataset.shape, dtype=np.int64)) * np.dtype(dataset.dtype).itemsize


def _fill_roots(ledger: Ledger, storage: Storage, dataset: Dataset, shards: Iterable[int], clock: Clock) -> None:
    """Compute the roots of sealed slices that have none yet."""
    last = points.sealed_slices(ledger, dataset.id)
    known = points.roots_of(ledger, dataset.id)
    for shard in shards:
        if any((shard, slice_) not in known for slice_ in range(1, last + 1)):
            with hold(ledger, [data_lease(dataset.name, shard)], clock):
                here = points.roots_of(ledger, dataset.id, shard)
                missing = [slice_ for slice_ in range(1, last + 1) if (shard, slice_) not in here]
                current = points.dataset_by_id(ledger, dataset.id)
                roots = compute_roots(ledger, storage, current, shard, missing)
                counts = points.counts_of(ledger, dataset.id)
                sealed = [(shard, slice_, root, counts.get((shard, slice_), 0)) for slice_, root in roots.items()]
                leaves = slices_sealed(dataset.name, sealed, stamp(clock()))
                points.enter_roots(ledger, dataset.id, shard, roots, leaves)
            reached(Step.BUILD_ROOTS)


def _steps(model: Model, standing: Standing) -> list[int]:
    """Return the slices to train: all behind the clean prefix, whether or not their checkpoints are kept."""
    if model.sliceable:
        return list(range(standing.prefix + 1, standing.slices + 1))
    return [] if standing.complete else [standing.slices]


class _Group:
    """Shards that are built together, step by step."""

    def __init__(
        self,
        ledger: Ledger,
        storage: Storage,
        backend: Backend,
        model: Model,
        dataset: Dataset,
        shards: Sequence[int],
        device: str,
        held: Hold,
        clock: Clock,
        report: Report,
    ) -> None:
        self._ledger, self._storage, self._backend = ledger, storage, backend
        self._model, self._dataset, self._device = model, dataset, device
        self._held, self._clock, self._report = held, clock, report
        # The order matters. Roots first, points after, then a look whether the roots still are those: points
        # read before an erasure can then never be trained under a name made after it.
        self._standings = {s.shard: s for s in standings(ledger, model, shards) if not s.complete}
        if any(len(s.recipes) <= s.slices for s in self._standings.values()):
            raise Preempted("more slices were closed since their roots were computed")
        classes = {label: index for index, label in enumerate(model.spec.classes)}
        dataset = points.dataset_by_id(ledger, model.dataset_id)
        self._class_of = np.array([classes.get(label, -1) for label in dataset.labels], np.int64)
        self._sight = self._ask("the settings", Sight, storage, backend, model.spec, device)
        self._points = {shard: self._read(shard) for shard in self._standings}
        again = {s.shard: s for s in standings(ledger, model, shards) if not s.complete}
        if again != self._standings:
            raise Preempted("an erasure came in while points were read")
        self._states: dict[int, State] = {}
        self._owed: dict[int, tuple[int, float]] = {}
        """By shard: samples and seconds of steps since the last checkpoint."""
        self._environment = backend.environment(device)

    def build(self) -> None:
        """Train what is missing, slice by slice, all shards that lack a slice together."""
        if not self._standings:
            return
        self._sweep()
        reached_by = {k: s.checkpoint for k, s in self._standings.items() if s.checkpoint and self._model.sliceable}
        self._states.update(zip(reached_by, read_states(self._storage, list(reached_by.values())), strict=True))
        for shard in self._standings:
            if shard not in reached_by:
                seed = step_seed(self._model.seed, shard, 0)
                self._states[shard] = self._ask(f"shard {shard}", self._sight.initial_state, seed)
        writer = _Writer(self._enter)
        try:
            last = max(standing.slices for standing in self._standings.values())
            for slice_ in range(1, last + 1):
                lacking = [k for k, s in self._standings.items() if slice_ in _steps(self._model, s)]
                if lacking:
                    self._held.check()
                    trained = self._saved(self._train(slice_, lacking))
                    if trained:
                        writer.put(trained)
        finally:
            writer.close()
        writer.check()

    def _sweep(self) -> None:
        """Destroy what a builder that was killed, or lost its lease, wrote and could not enter."""
        alone = next(iter(self._standings)) if len(self._standings) == 1 else None
        known = {checkpoint.path for checkpoint in models.checkpoints_of(self._ledger, self._model.id, alone)}
        folders = [folder_of(self._model.name, shard) for shard in self._standings]
        there = [path for listed in self._storage.list_many(folders) for path in listed]
        self._storage.destroy([path for path in there if path not in known], Overlooked())

    def _saved(self, trained: Sequence[Trained]) -> list[Trained]:
        """Return what of a step is to be saved; the cost of what is not goes to the next that is."""
        saved = []
        for shard, slice_, state, samples, seconds in trained:
            owed = self._owed.pop(shard, (0, 0.0))
            samples, seconds = samples + owed[0], seconds + owed[1]
            if self._model.keeps(slice_):
                saved.append((shard, slice_, state, samples, seconds))
            else:
                self._owed[shard] = samples, seconds
        return saved

    def _train(self, slice_: int, shards: Sequence[int]) -> list[Trained]:
        """Train one slice for these shards; return (shard, slice, state, samples, seconds) of each."""
        jobs: dict[int, Job] = {}
        samples: dict[int, int] = {}
        for shard in shards:
            job = self._job(slice_, shard)
            samples[shard] = 0
            if job is not None:
                jobs[shard] = job
                samples[shard] = samples_at(job.epochs, len(job.points.y))
        begun = time.perf_counter()

        def on_progress(count: int) -> None:
            self._report(Progress(shards[0] if len(shards) == 1 else 0, slice_, count))
            self._held.check()

        settings, what = self._model.spec.settings, f"slice {slice_}"
        if len(jobs) > 1:
            train_many: Callable[..., list[State]] = self._backend.train_many  # type: ignore[attr-defined]
            trained = self._ask(what, train_many, settings, list(jobs.values()), self._device, on_progress)
            self._states.update(zip(jobs, trained, strict=True))
        else:
            for shard, job in jobs.items():
                self._states[shard] = self._ask(
                    f"shard {shard}, {what}", self._backend.train, settings, job, self._device, on_progress
                )
        seconds, total = time.perf_counter() - begun, sum(samples.values()) or 1
        return [(k, slice_, self._states[k], samples[k], seconds * samples[k] / total) for k in shards]

    def _job(self, slice_: int, shard: int) -> Job | None:
        """Return the step to train, or None where the slice has no points: the state is then passed on."""
        x, y, ends = self._points[shard]
        begin, end = ends[slice_ - 1], ends[slice_]
        spec = self._model.spec
        epochs: Fraction = epochs_at(spec, slice_) if self._model.sliceable else spec.epochs
        if (begin == end and self._model.sliceable) or end == 0:
            return None
        seed = step_seed(self._model.seed, shard, slice_)
        return Job(self._states[shard], Points(x[:end], y[:end]), epochs, seed)

    def _read(self, shard: int) -> tuple[NDArray[Any], NDArray[np.int64], list[int]]:
        """Return what the backend sees of all points of a shard, slice after slice, and where each slice ends."""
        found = self._ask(
            f"the features of shard {shard}",
            read_seen,
            *(self._ledger, self._storage, self._dataset, shard, self._sight, self._clock, self._held.check),
        )
        slices = self._standings[shard].slices
        ordered = [rows for slice_ in range(1, slices + 1) for rows in found.get(slice_, ())]
        counts = [sum(map(len, found.get(slice_, ()))) for slice_ in range(1, slices + 1)]
        ends = [0, *np.cumsum(counts).tolist()]
        nothing = np.empty((0, *self._dataset.shape), self._dataset.dtype)
        x = np.concatenate([r.x for r in ordered]) if ordered else nothing
        labels = np.concatenate([r.label for r in ordered]) if ordered else np.empty(0, np.int32)
        y = self._class_of[labels]
        if (y < 0).any():
            raise RefusedError(
                f"dataset '{self._dataset.name}' has points of a class that model '{self._model.name}' "
                "was not declared with"
            )
        return x, y, ends

    def _ask(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        """Call the backend; whatever it raises of its own becomes a `BackendError`."""
        try:
            return call(*arguments)
        except (UnlearndError, Preempted):
            raise
        except Exception as error:
            raise BackendError(
                f"backend '{self._backend.name}' failed at {what} of model '{self._model.name}': "
                f"{type(error).__name__}: {error}"
            ) from error

    def _enter(self, trained: Sequence[Trained]) -> None:
        """Make states durable, then known."""
        written: list[NewCheckpoint] = []
        objects: list[tuple[str, Pieces]] = []
        for shard, slice_, state, samples, seconds in trained:
            recipe: Digest = self._standings[shard].recipes[slice_]
            saved, path = encode_state(state), path_of(self._model.name, shard, recipe)
            key = None
            if self._storage.vault:
                path, saved, key = seal_state(self._storage.vault, path, saved)
            objects.append((path, saved.pieces))
            written.append(
                NewCheckpoint(shard, slice_, recipe, saved.file, saved.tensors, path, saved.size, samples, seconds, key)
            )
        self._held.check()
        try:
            self._storage.write_many(objects)
        except StorageError as error:
            shards = ", ".join(str(one.shard) for one in written)
            what = f"slice {written[0].slice} of shard {shards} of model '{self._model.name}'"
            raise StorageError(f"the state after {what} cannot be saved: {error}") from error
        reached(Step.BUILD_WRITTEN)
        environment = self._environment
        try:
            now = self._clock()
            leaves = checkpoints_built(self._model.name, [self._entry(one) for one in written], stamp(now))
            models.enter_checkpoints(self._ledger, self._model, written, environment, self._held.holder, leaves, now)
        except BusyError as taken_over:
            # Whoever took over may have swept this folder already; what was just written must not stay.
            self._storage.destroy(path for path, _ in objects)
            raise Preempted(str(taken_over)) from None
        reached(Step.BUILD_ENTERED)
        self._report(Progress(0, trained[0][1], 0, len(written)))

    def _entry(self, written: NewCheckpoint) -> tuple[Any, ...]:
        """Return what the log says about a checkpoint."""
        standing = self._standings[written.shard]
        parent, root = standing.recipes[written.slice - 1], standing.roots[written.slice - 1]
        made = (written.shard, written.slice, written.recipe, parent, root)
        return (*made, written.file, written.tensors, written.size)


class _Writer:
    """Saves states in the background, in order; what goes wrong surfaces at the next `put` or at the end.

    Early slices train quicker than their states are saved, late ones slower: what waits is bounded by its bytes, so
    that the late ones have something to save beside them.
    """

    def __init__(self, enter: Callable[[Sequence[Trained]], None]) -> None:
        self._enter = enter
        self._queue: queue.Queue[Sequence[Trained] | None] = queue.Queue()
        self._room = threading.Condition()
        self._waiting = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint writer")
        self._thread.start()

    def put(self, trained: Sequence[Trained]) -> None:
        """Hand over states; wait while there are too many bytes of earlier ones."""
        size = _size_of(trained)
        with self._room:
            self._room.wait_for(lambda: self._failure or not self._waiting or self._waiting + size <= WAITING_BYTES)
            self._waiting += size
        self.check()
        self._queue.put(trained)

    def close(self) -> None:
        """Wait until everything handed over is saved or has failed."""
        self._queue.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (trained := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._enter(trained)
                except BaseException as failure:
                    self._failure = failure
            with self._room:
                self._waiting -= _size_of(trained)
                self._room.notify()


def _size_of(trained: Sequence[Trained]) -> int:
    return sum(value.nbytes for _, _, state, _, _ in trained for value in state.values())
