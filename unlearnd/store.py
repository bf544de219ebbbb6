"""The façade: opens ledger, storage, keys and plugins, and has one method per verb.

Nothing is decided here. Each method reads top to bottom as what the verb does; the doing is in the modules it
calls. Only the surfaces read the clock; a store is given one when it is opened.
"""

import base64
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from unlearnd import __version__, requests
from unlearnd.backup import Backup, back_up, restore
from unlearnd.bases import FOLDER as BASES
from unlearnd.bases import destroy_unnamed, take_offer
from unlearnd.build import BuildPlan, Report, Watch, build, build_task, check_start, discard_damaged, plan_build
from unlearnd.checkpoints import standings
from unlearnd.config import (
    FILE_NAME,
    Config,
    change_ledger,
    check_no_secret,
    check_storage_options,
    ledger_url,
    read_config,
    storage_url,
    write_config,
)
from unlearnd.costs import choose_kept, even_scheme, scheme_of
from unlearnd.default_plugins.exemptions import read_exemptions, write_exemptions
from unlearnd.dossier import summary_page
from unlearnd.erasure import (
    ErasurePlan,
    Outcome,
    Target,
    begin_erasure,
    carry_out,
    is_order,
    live_sets,
    outcome_of,
    outcomes_of,
    plan_erasure,
    record_requests,
    shards_of,
)
from unlearnd.errors import InputError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.features import Sight
from unlearnd.hookspecs import Backend, FeatureBackend, Petition, PriorPlacement, Task, Veto
from unlearnd.ingest import Added, Layout, check_layout, check_name, ingest
from unlearnd.intake import RowResult, receive_rows
from unlearnd.keys import (
    check_private,
    create_keys,
    create_wrapper,
    discard_keys,
    draw_id,
    draw_seed,
    open_keys,
    public_pem,
)
from unlearnd.layouts import FrozenLayout, Risk, Risks, as_risks, risks_of
from unlearnd.leases import Clock, SteadyClock, check_idle, hold
from unlearnd.ledger import Ledger, dockets, erasures, log, models, points, recipients
from unlearnd.ledger import move as ledger_move
from unlearnd.ledger.connection import MOVED, stamp
from unlearnd.ledger.dockets import Entry, Transition
from unlearnd.ledger.erasures import Request
from unlearnd.ledger.leases import ingest_lease
from unlearnd.ledger.log import ReceiptEntry, SigningKey
from unlearnd.ledger.migrate import migrate
from unlearnd.ledger.models import Build, Checkpoint, Model
from unlearnd.ledger.points import Dataset
from unlearnd.ledger.recipients import Recipient
from unlearnd.packing import unpack
from unlearnd.planner import Question, check_keep, read_keep
from unlearnd.plugins import load_plugins
from unlearnd.policy import DEFAULT, Policy, codes, load_policy
from unlearnd.rebuild import rebuild_is_due
from unlearnd.receipts import OPENING_TYPE, canonical
from unlearnd.recipes import SCHEDULES, Spec, check_schedule, recipes
from unlearnd.recipients import Telling, check_outcome, recipient_named, tellings
from unlearnd.recipients import record as record_tellings
from unlearnd.report import RequestReport, report_on
from unlearnd.requests import Asked, Deadline, petition_of
from unlearnd.restriction import settle
from unlearnd.retirement import destroy_unneeded
from unlearnd.serving import Answers, Evaluation, ServedModel, join_evaluations
from unlearnd.shadows import Labelled, MembershipReport, attack_model
from unlearnd.sources import Batch, Data, read_batches
from unlearnd.statements import model_declared, models_rebuilt
from unlearnd.steps import Step, reached
from unlearnd.storage import Storage, Vault
from unlearnd.translog import (
    Translog,
    add_witness,
    begin,
    check_signers,
    export,
    issue_receipts,
    keep_cosignatures,
    newest_moment,
    prove_leaf,
    read_detail,
    read_receipt,
    revoke_key,
    rotate_key,
    sign_head,
    trust,
)
from unlearnd.verify.trust import read_head

DEFAULT_SHARDS = 5
DEFAULT_SLICES = 10
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


@dataclass(frozen=True, repr=False)
class Opening:
    """A user id and the nonce that opens a receipt's commitment to it. Not shown when printed."""

    request: str
    user: str
    nonce: bytes

    def as_bytes(self) -> bytes:
        """Return the private file that the user gets."""
        return canonical(
            {"mediaType": OPENING_TYPE, "requestId": self.request, "user": self.user, "nonce": self.nonce.hex()}
        )


@dataclass(frozen=True)
class Erased:
    """What an erase did: one outcome per user or point, in the order asked, and the builds that followed."""

    outcomes: tuple[Outcome, ...]
    builds: tuple[Build, ...]
    again: frozenset[str]
    """The requests among the outcomes that had been carried out before."""
    held: tuple[str, ...]
    """Requests that were not carried out, because they are on hold."""
    openings: Mapping[str, "Opening"]
    """By request: what proves to whom a receipt belongs. For that user alone; the store keeps none of it."""

    def check_destroyed(self) -> None:
        """Raise `StorageError` where storage did not let go something that was to be destroyed."""
        kept = {(one.name, one.version): one for outcome in self.outcomes for one in outcome.kept}
        if kept:
            first = next(iter(kept.values()))
            raise StorageError(
                f"nothing made from the data is in service, but {len(kept)} versions of objects could not be "
                f"destroyed, and the receipts say so; the first is {first.name}: {first.why}"
            )


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


class Store:
    """An open store. Use it in a `with` block, or close it."""

    def __init__(self, folder: Path, config: Config, clock: Clock) -> None:
        self.folder = folder
        self.config = config
        self.clock = SteadyClock(clock)
        self.keys = open_keys(folder / "keys")
        self.ledger = Ledger.open(ledger_url(folder, config.ledger))
        self.clock.not_before(newest_moment(self.ledger))
        self.storage = Storage(storage_url(folder, config.storage), **config.storage_options)
        self.storage.check(config.store_id, encrypted=config.wrapper != "none")
        check_private(folder / "keys", *_private_files(folder, config))
        evidence = self.storage
        if config.receipts is not None:
            evidence = Storage(storage_url(folder, config.receipts), **config.storage_options)
            evidence.check(config.store_id)
        self.plugins = load_plugins()
        if config.wrapper != "none":
            self.storage.vault = Vault(self.plugins.wrapper(config.wrapper)(folder / "keys"))
        signer = self.plugins.signer(config.signer)
        self.translog = Translog(
            self.ledger, self.storage, folder / "keys", config.store_id, __version__, signer, evidence
        )

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        ledger: str = "sqlite:///ledger.sqlite",
        storage: str = "storage",
        storage_options: Mapping[str, Any] | None = None,
        receipts: str | None = None,
        encrypt: str | None = None,
        placement_key: str | os.PathLike[str] | None = None,
        policy: str = DEFAULT,
        signer: str = "file",
        clock: Clock = lambda: datetime.now(UTC),
    ) -> "Store":
        """Make a new store; refuse to overwrite one, or to share its storage with one.

        `storage_options` say how to reach the storage and hold no secret; `receipts` is where receipts and their
        documents go, if not to the storage; `encrypt` names who wraps the keys of encrypted objects (`file`, or what a
        plugin brings), and without it nothing is encrypted; `policy` is that of requests which name none; `signer`
        signs tree heads and receipts: key files, or a plugin's key service.
        """
        folder = Path(directory).absolute()
        load_policy(policy, folder / Config.policies)
        load_plugins().signer(signer)
        if (folder / FILE_NAME).exists():
            raise RefusedError(f"there is a store in {folder} already")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"the folder {folder} cannot be made: {error.strerror}") from error
        if storage.startswith("memory:"):
            raise InputError("storage in memory:// would be lost with the process; name a folder or a bucket")
        options = dict(storage_options or {})
        check_storage_options(options)
        check_no_secret(options, storage, receipts or "")
        config = Config(
            store_id=draw_id(),
            ledger=ledger,
            storage=storage,
            policy=policy,
            storage_options=options,
            receipts=receipts,
            signer=signer,
            wrapper=encrypt or "none",
        )
        if encrypt:
            load_plugins().wrapper(encrypt)
        with ExitStack() as undo:
            _claim(undo, Storage(storage_url(folder, storage), **options), config.store_id, encrypted=bool(encrypt))
            if receipts is not None:
                _claim(undo, Storage(storage_url(folder, receipts), **options), config.store_id, lock_allowed=True)
            Ledger.create(ledger_url(folder, ledger)).close()
            undo.callback(Ledger.discard, ledger_url(folder, ledger))
            create_keys(folder / "keys", Path(placement_key) if placement_key else None)
            undo.callback(discard_keys, folder / "keys")
            if encrypt == "file":
                create_wrapper(folder / "keys")
            with cls(folder, config, clock) as store:
                begin(store.translog, stamp(store.clock()))
            # Last, because with this file the folder is a store.
            write_config(folder, config)
            undo.pop_all()
        return cls.open(folder, clock=clock)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, clock: Clock = lambda: datetime.now(UTC)) -> "Store":
        """Open the store in `directory`."""
        folder = Path(directory).absolute()
        return cls(folder, read_config(folder), clock)

    def policy(self, name: str | None = None) -> Policy:
        """Return a policy by name, of those shipped or the store's own; by default the one that counts here."""
        return load_policy(name or self.config.policy, self.folder / self.config.policies)

    def close(self) -> None:
        """Let go of the ledger."""
        self.ledger.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ingest(
        self,
        dataset: str,
        data: Data,
        *,
        user: str | ArrayLike,
        label: str | ArrayLike,
        group: str | ArrayLike | None = None,
        features: str | Sequence[str] | None = None,
        shards: int | None = None,
        slices: int | None = None,
        unit: str | None = None,
        placement: str | None = None,
        risk: Risks | None = None,
        policy: str | None = None,
        classes: Sequence[int | str] | int | None = None,
        readmit: bool = False,
        on_progress: Any = lambda rows: None,
    ) -> Added:
        """Add points: all of them or none. The first call fixes the dataset's layout.

        Points given before anything is trained fill the same slices. Once a model has been built, they go to
        `slices` new ones (one, unless said otherwise) at the end of each shard. Rows of users who were erased for
        good or are on hold are left out; `readmit` lets the erased in again.

        A placement by risk is laid out by `risk`, which has for each group a probability, or a probability and the
        group's share of the points; else by the erasure probabilities of `policy`, or of the store's own.
        """
        known = points.find_dataset(self.ledger, dataset)
        layout = Layout(
            shards=shards if shards is not None else known.shards if known else DEFAULT_SHARDS,
            slices=slices if slices is not None else 1 if known else DEFAULT_SLICES,
            unit=unit or (known.unit if known else "user"),
            placement=placement or (known.placement if known else "uniform"),
            classes=_classes(classes),
        )
        layout = replace(layout, risks=self._risks(layout.placement, known, risk, policy))
        check_layout(known, layout, self.plugins.placements)
        if features is None and known is not None:
            features = _columns_for(known, data)
        batches = read_batches(data, user=user, label=label, group=group, features=features, batch_bytes=16 << 20)
        added = ingest(
            self.ledger,
            self.storage,
            self.keys,
            dataset,
            batches,
            layout,
            self.plugins.placements,
            self.clock,
            self.folder,
            slices is not None,
            on_progress,
            readmit,
        )
        sign_head(self.translog)
        return added

    def train(
        self,
        model: str,
        *,
        dataset: str,
        backend: str,
        epochs: float | Fraction | None = None,
        seed: int | None = None,
        settings: Mapping[str, object] | None = None,
        schedule: str | None = None,
        keep: int | str | None = None,
        executor: str | None = None,
        workers: int | None = None,
        device: str | None = None,
        watch: Watch | None = None,
    ) -> Build:
        """Declare a model and build it. Called again, go on where it stopped."""
        how = self._how(executor, workers, device)
        # Asked before anything is declared: a device that is not there must not leave a model behind.
        self.plugins.backend(backend).environment(how.device)
        declared = self.declare(
            model,
            dataset=dataset,
            backend=backend,
            epochs=epochs,
            seed=seed,
            settings=settings,
            schedule=schedule,
            keep=keep,
            device=how.device,
        )
        self.finish_erasures()
        built = self._build_one(declared, how, watch)
        self._note_rebuilt([built])
        sign_head(self.translog)
        return built

    def declare(
        self,
        model: str,
        *,
        dataset: str,
        backend: str,
        epochs: float | Fraction | None = None,
        seed: int | None = None,
        settings: Mapping[str, object] | None = None,
        schedule: str | None = None,
        keep: int | str | None = None,
        device: str | None = None,
    ) -> Model:
        """Fix what a model is made from, and its seed; a model of that name must be the same.

        `keep` is how many checkpoints of each shard are saved, the best ones for the erasures expected; `all`, or
        nothing said, saves every one.
        """
        check_name("model", model)
        data = points.dataset_named(self.ledger, dataset)
        known = models.find_model(self.ledger, model)
        if known is not None:
            models.model_in_service(self.ledger, model)
        learner = self.plugins.backend(backend)
        given = float(epochs) if epochs is not None else None
        if given is not None and not 0 < given <= MOST_EPOCHS:
            raise InputError(f"epochs must be more than 0 and at most {MOST_EPOCHS:,}, not {epochs}")
        length = Fraction(str(epochs)) if epochs is not None else known.spec.epochs if known else DEFAULT_EPOCHS
        chosen = schedule or (known.spec.schedule if known else SCHEDULES[0])
        check_schedule(chosen)
        if seed is not None and not 0 <= seed < 2**63:
            raise InputError("a seed is a whole number from 0 to 2^63 - 1")
        # A base is named by the digest of what is in it; where it came from is forgotten here.
        offer = take_offer(self.ledger, self.storage, settings or {}) if isinstance(learner, FeatureBackend) else None
        asked = {**(settings or {}), "base": offer.digest} if offer else settings or {}
        filled = (known.spec.settings if known and settings is None else None) or learner.settings(asked)
        same_backend = known and (known.spec.backend, known.spec.backend_version) == (learner.name, learner.version)
        if known and same_backend and learner.settings(known.spec.settings) == filled:
            filled = known.spec.settings  # it may have been declared before there were settings left at their defaults
        leases = [ingest_lease(dataset), *([BASES] if offer else [])]
        with hold(self.ledger, leases, self.clock) if known is None else nullcontext():
            # Read again under the lease: nothing is added between what the model is declared on and its declaration.
            data = points.dataset_named(self.ledger, dataset)
            dockets.check_not_destroyed(self.ledger, dataset)
            spec = Spec(
                backend=learner.name,
                backend_version=learner.version,
                settings=filled,
                shape=data.shape,
                dtype=data.dtype,
                classes=known.spec.classes if known else tuple(sorted(data.labels, key=_label_order)),
                shards=data.shards,
                slices=known.spec.slices if known else points.generations(self.ledger, data.id)[-1].last_slice,
                epochs=Fraction(length),
                schedule=chosen,
            )
            if known is not None:
                _check_same(known, data, spec, seed)
                if keep is not None and self._kept(data, spec, learner, keep) != known.kept:
                    raise RefusedError(
                        f"model '{known.name}' was declared with other checkpoints to keep; a model never changes, "
                        "train a new one"
                    )
                if offer:
                    offer.keep(self.storage)
                return known
            kept = self._kept(data, spec, learner, keep)
            sight = Sight(self.storage, learner, spec, device or self.config.device, offer.tensors if offer else None)
            check_start(sight, spec)
            if offer:
                destroy_unnamed(self.ledger, self.storage)
                offer.keep(self.storage)
                reached(Step.TRAIN_BASE_KEPT)
            chosen_seed, now = draw_seed() if seed is None else seed, self.clock()
            first = [(shard, recipes(spec, chosen_seed, shard, [], True)[0]) for shard in range(1, spec.shards + 1)]
            declared = models.declare_model(
                self.ledger,
                model,
                data.id,
                spec,
                sliceable=learner.sliceable,
                deterministic=learner.deterministic,
                seed=chosen_seed,
                kept=kept,
                leaves=model_declared(
                    model, data.name, spec, chosen_seed, learner.deterministic, kept, first, stamp(now)
                ),
                now=now,
            )
        reached(Step.TRAIN_DECLARED)
        return declared

    def build(
        self,
        names: Iterable[str] = (),
        *,
        executor: str | None = None,
        workers: int | None = None,
        device: str | None = None,
        watch: Watch | None = None,
    ) -> list[Build]:
        """Make every missing checkpoint of these models, or of all: after a crash, an erasure, new data."""
        wanted = [models.model_in_service(self.ledger, name) for name in names] or models.models(self.ledger)
        how = self._how(executor, workers, device)
        self.finish_erasures()
        done = [self._build_one(model, how, watch) for model in wanted]
        self._note_rebuilt(done)
        sign_head(self.translog)
        return done

    def discard_damaged(self, names: Iterable[str] = ()) -> int:
        """Discard checkpoints whose bytes are missing or not what was recorded, so that a build makes them anew.

        Returns how many there were. Look for the cause first: this is for when there is no backup to restore.
        """
        wanted = [models.model_in_service(self.ledger, name) for name in names] or models.models(self.ledger)
        return sum(discard_damaged(self.ledger, self.storage, model, self.clock) for model in wanted)

    def model(self, name: str, *, device: str | None = None) -> ServedModel:
        """Return a model to ask."""
        found = models.model_in_service(self.ledger, name)
        return ServedModel(self.ledger, self.storage, self.plugins, found, device or self.config.device)

    def predict(
        self, model: str, data: Data, *, aggregate: str = "vote", device: str | None = None
    ) -> Iterator[Answers]:
        """Answer for rows in files or an array, batch by batch, in order."""
        served = self.model(model, device=device)
        for batch in self._read_for(model, data, None):
            yield served.predict(batch.x, aggregate)

    def evaluate(
        self,
        model: str,
        data: Data,
        *,
        label: str | ArrayLike,
        aggregate: str = "vote",
        device: str | None = None,
    ) -> Evaluation:
        """Compare a model's answers with the right ones."""
        served = self.model(model, device=device)
        known = {str(value): index for index, value in enumerate(served.classes)}
        parts = []
        for batch in self._read_for(model, data, label):
            assert batch.label is not None
            right = np.array([known.get(str(value), -1) for value in batch.label.values], np.int64)
            parts.append(served.evaluate(batch.x, right[batch.label.codes], aggregate))
        return join_evaluations(parts)

    def evaluate_groups(
        self,
        model: str,
        data: Data,
        *,
        label: str | ArrayLike,
        group: str | ArrayLike,
        aggregate: str = "vote",
        device: str | None = None,
    ) -> dict[str, Evaluation]:
        """Compare a model's answers with the right ones, for each group by itself, by name.

        A placement by risk serves those who leave most a little worse than others: this is how much.
        """
        served = self.model(model, device=device)
        known = {str(value): index for index, value in enumerate(served.classes)}
        parts: dict[str, list[Evaluation]] = {}
        for batch in self._read_for(model, data, label, group):
            assert batch.label is not None
            assert batch.group is not None
            right = np.array([known.get(str(value), -1) for value in batch.label.values], np.int64)[batch.label.codes]
            for code, name in enumerate(batch.group.values):
                rows = batch.group.codes == code
                if rows.any():
                    parts.setdefault(str(name), []).append(served.evaluate(batch.x[rows], right[rows], aggregate))
        return {name: join_evaluations(parts[name]) for name in sorted(parts)}

    def attack_membership(
        self,
        model: str,
        *,
        erased: Data,
        held_out: Data,
        label: str | tuple[ArrayLike, ArrayLike],
        shadows: int = 16,
        seed: int = 0,
        device: str | None = None,
        on_shadow: Callable[[int], None] = lambda done: None,
    ) -> MembershipReport:
        """Try to tell rows that were erased from rows never given, by the model's answers alone; change nothing.

        `label` is the column of the right answers; for arrays, those of the erased rows and of those held out.
        """
        served = self.model(model, device=device)
        labels = (label, label) if isinstance(label, str) else label
        return attack_model(
            self.ledger,
            self.storage,
            self.plugins,
            served,
            self._labelled(served, erased, labels[0]),
            self._labelled(served, held_out, labels[1]),
            shadows=shadows,
            seed=seed,
            device=device or self.config.device,
            on_shadow=on_shadow,
        )

    def _labelled(self, served: ServedModel, data: Data, label: str | ArrayLike) -> Labelled:
        """Return rows somebody brings along, all of classes that the model knows."""
        known = {str(value): index for index, value in enumerate(served.classes)}
        x, y = [], []
        for batch in self._read_for(served.name, data, label):
            assert batch.label is not None
            unknown = [str(value) for value in batch.label.values if str(value) not in known]
            if unknown:
                raise InputError(f"model '{served.name}' knows no class '{unknown[0]}', which some rows have")
            x.append(served.checked(batch.x))
            y.append(np.array([known[str(value)] for value in batch.label.values], np.int64)[batch.label.codes])
        return Labelled(np.concatenate(x), np.concatenate(y))

    def _risks(
        self, placement: str, known: Dataset | None, given: Risks | None, policy: str | None
    ) -> tuple[Risk, ...]:
        """Return the priors to lay a dataset out by: as given, else the policy's where they are needed."""
        if given is not None:
            return as_risks(given)
        needed = known is None and isinstance(self.plugins.placements.get(placement), PriorPlacement)
        if not needed and policy is None:
            return ()
        return as_risks(self.policy(policy).placement.erasure_probability)

    def _kept(self, data: Dataset, spec: Spec, learner: Backend, keep: int | str | None) -> tuple[int, ...] | None:
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
        epochs, even = float(spec.epochs), len(points.generations(self.ledger, data.id)) > 1
        if data.layout is None or even:
            # Slices that were added later begin anew with those least likely to leave: taken together, evenly spread.
            return choose_kept(even_scheme(1.0, spec.shards, spec.slices, epochs, spec.schedule), count)
        layout = FrozenLayout.from_json(data.layout)
        return choose_kept(scheme_of(layout, 1.0, spec.shards, spec.slices, epochs, spec.schedule), count)

    def _read_for(
        self, model: str, data: Data, label: str | ArrayLike | None, group: str | ArrayLike | None = None
    ) -> Iterator[Batch]:
        """Read rows to ask a model about: of files, the columns that its dataset was made of."""
        found = models.model_named(self.ledger, model)
        dataset = points.dataset_by_id(self.ledger, found.dataset_id)
        return read_batches(data, user=None, label=label, group=group, features=_columns_for(dataset, data))

    def plan_erasure(
        self,
        users: Iterable[str | int] = (),
        points: Iterable[str] = (),
        *,
        dataset: str | None = None,
        model: str | None = None,
    ) -> ErasurePlan:
        """Return what erasing these, or a whole dataset or model, would do; change nothing."""
        orders = [] if dataset is None else [self._order("dataset", dataset)]
        orders += [] if model is None else [self._order("model", model)]
        if len(orders) + bool(users or points) > 1:
            raise InputError("a whole dataset or model is erased by itself")
        return plan_erasure(self.ledger, orders or self._targets(users, points))

    def erase(
        self,
        users: Iterable[str | int] = (),
        *,
        points: Iterable[str] = (),
        policy: str | None = None,
        build: bool | None = None,
        executor: str | None = None,
        workers: int | None = None,
        device: str | None = None,
        watch: Watch | None = None,
        hand_out: Callable[[Mapping[str, Opening]], None] = lambda openings: None,
    ) -> Erased:
        """Erase users, or single points given as `dataset:position`, from every dataset and model.

        When this returns, nothing made from them is left. `build` says whether models are brought to full strength
        again at once; by default the policy does. A user without data gets an outcome that says so; one erased before,
        the outcome of then; one whose request is on hold, none. `hand_out` gets the openings as soon as requests are
        recorded: whatever fails later, they are not lost.
        """
        given = [_user(user) for user in ([users] if isinstance(users, str | int) else users)]
        targets = self._targets(given, points)
        named: dict[Target, str] = dict(zip(self.keys.handles(given), given, strict=True))
        rules = self.policy(policy)
        how = self._how(executor, workers, device)
        if build is not False and device is not None:
            for backend in {model.spec.backend for model in models.models(self.ledger)}:
                self.plugins.backend(backend).environment(device)
        # What cannot be signed is not begun: the statement of an erasure must follow it at once.
        check_signers(self.translog)
        openings = self._openings(named)
        hand_out(openings)
        new, held, recorded = self._record(targets, named, rules)
        if recorded:
            openings |= self._openings(named)
            hand_out(openings)
            self._carry_out(recorded)
        builds = self._rebuild(rules, build, how, watch)
        done = [target for target in targets if target not in held]
        outcomes = self._outcomes(done)
        known = [outcome.request for target, outcome in zip(done, outcomes, strict=True) if target not in new]
        return Erased(outcomes, tuple(builds), frozenset(known), tuple(held.values()), openings)

    def erase_dataset(self, dataset: str, *, policy: str | None = None, actor: str = "operator") -> Erased:
        """Destroy a dataset: all its points, every model trained on it, and the keys of users with no other data.

        For good: its name and those of the models stay taken. Refused while a hold keeps points of it.
        """
        return self._erase_whole("dataset", dataset, policy, actor)

    def erase_model(self, model: str, *, policy: str | None = None, actor: str = "operator") -> Erased:
        """Destroy a model: every checkpoint of it. For good: it is never built again, and its name stays taken."""
        return self._erase_whole("model", model, policy, actor)

    def finish_erasures(self) -> int:
        """Carry on with erasures that a killed process left undone; return how many there were."""
        settle(self.ledger, self.storage, self.clock)
        unfinished = erasures.unfinished_erasures(self.ledger)
        for left in unfinished:
            self._carry_out(left.id)
        issue_receipts(self.translog)
        return len(unfinished)

    # The life of requests.

    def receive(
        self,
        users: Iterable[str | int] = (),
        *,
        points: Iterable[str] = (),
        dataset: str | None = None,
        model: str | None = None,
        policy: str | None = None,
        received: date | None = None,
        due: date | None = None,
        ground: str | None = None,
        requester: str = "user",
        identity: str = "",
        actor: str = "operator",
        hand_out: Callable[[Mapping[str, Opening]], None] = lambda openings: None,
    ) -> list[Entry]:
        """Record requests that came in, without carrying them out; return each as it stands.

        They are about users, points, or a whole dataset or model, as an order of an authority is. `identity` is a code
        for how it was checked; there is no place for the proof. A second request about a user whose first is still open
        is a duplicate of it. `hand_out` gets the openings, which the store keeps only until the request is carried out.
        """
        given = [_user(user) for user in ([users] if isinstance(users, str | int) else users)]
        orders = [] if dataset is None else [self._order("dataset", dataset)]
        orders += [] if model is None else [self._order("model", model)]
        targets = orders + (self._targets(given, points) if given or points or not orders else [])
        named: dict[Target, str] = dict(zip(self.keys.handles(given), given, strict=True))
        asked = [Asked(t, named.get(t), received, due, ground, requester, identity) for t in targets]
        entries = requests.receive(self.ledger, asked, self.policy(policy), self.clock(), actor)
        hand_out(self._openings(named))
        sign_head(self.translog)
        return entries

    def receive_rows(
        self,
        rows: Iterable[Mapping[str, str]],
        *,
        source: str,
        policy: str | None = None,
        approve: bool = False,
        actor: str = "operator",
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> list[RowResult]:
        """Record many requests, some in each transaction, every row with a result of its own.

        A row has `user` and may have `received`, `due`, `ground`, `requester` and `identity`. `source` names the whole
        (a file's digest): given again with the same, rows that were recorded before are not recorded twice.
        """
        results = receive_rows(
            self.ledger, self.keys, rows, source, self.policy(policy), self.clock, actor, approve, on_progress
        )
        sign_head(self.translog)
        return results

    def requests(self, states: Sequence[str] | None = None) -> list[Entry]:
        """Return all requests, or those in some states, in the order they came in."""
        return dockets.entries(self.ledger, states)

    def request(self, request_id: str) -> Entry:
        """Return the one request whose id begins so."""
        return requests.entry_named(self.ledger, request_id)

    def transitions(self, request_id: str) -> list[Transition]:
        """Return all that a request went through."""
        return dockets.transitions_of(self.ledger, self.request(request_id).id)

    def acknowledge(self, request_id: str, *, actor: str = "operator") -> Entry:
        """Record that the requester was told that the request has come in."""
        return self._moved(requests.acknowledge(self.ledger, self.request(request_id).id, self.clock(), actor))

    def ask_identity(self, request_id: str, *, actor: str = "operator") -> Entry:
        """Record that the requester was asked who they are."""
        return self._moved(requests.ask_identity(self.ledger, self.request(request_id).id, self.clock(), actor))

    def verify_identity(self, request_id: str, how: str, *, actor: str = "operator") -> Entry:
        """Record how identity was checked, as a code."""
        return self._moved(requests.verify(self.ledger, self.request(request_id).id, how, self.clock(), actor))

    def approve(self, request_id: str, *, identity: str | None = None, actor: str = "operator") -> Entry:
        """Decide that a request is to be carried out; `identity` says how that was checked, if it is said only now."""
        found = self.request(request_id)
        if identity is not None:
            requests.verify(self.ledger, found.id, identity, self.clock(), actor)
        return self._moved(requests.approve(self.ledger, found.id, self.clock(), actor))

    def hold(self, request_id: str, *, basis: str, approver: str, review: date, actor: str = "operator") -> Entry:
        """Stop a request for a reason that its policy knows; the user's data is restricted until it is released."""
        now, found = self.clock(), self.request(request_id).id
        return self._moved(requests.put_on_hold(self.ledger, found, basis, approver, review, now, actor))

    def release(self, request_id: str, *, actor: str = "operator") -> Entry:
        """Lift a hold: the request goes on where it was, with the time it had left, and the data is in use again."""
        return self._moved(requests.release(self.ledger, self.request(request_id).id, self.clock(), actor))

    def extend(self, request_id: str, *, reason: str, actor: str = "operator") -> Entry:
        """Take the one extension that the request's policy knows."""
        return self._moved(requests.extend(self.ledger, self.request(request_id).id, reason, self.clock(), actor))

    def refuse(self, request_id: str, *, reason: str, actor: str = "operator") -> Entry:
        """Close a request without an erasure, for a reason that its policy knows."""
        return self._moved(requests.refuse(self.ledger, self.request(request_id).id, reason, self.clock(), actor))

    def withdraw(self, request_id: str, *, actor: str = "operator") -> Entry:
        """Close a request because whoever made it no longer wants it."""
        return self._moved(requests.withdraw(self.ledger, self.request(request_id).id, self.clock(), actor))

    def exempt(self, user: str | int, *, basis: str | None, until: date) -> None:
        """Put a user on the list of those who must not be erased before a day; without a basis, take them off it."""
        policy = self.policy()
        known = codes(policy.exemptions)
        if basis is not None and basis not in known:
            raise InputError(f"policy '{policy.id}' knows no exemption '{basis}'; there are: {', '.join(known)}")
        listed = read_exemptions(self.folder)
        handle = self.keys.handles([_user(user)])[0].hex()
        if basis is None:
            listed.pop(handle, None)
        else:
            listed[handle] = (basis, until)
        write_exemptions(self.folder, listed)

    # Who was given models, and what became of requests.

    def recipients(self) -> list[Recipient]:
        """Return everybody who was ever given a model, by model and name."""
        return recipients.recipients(self.ledger)

    def add_recipient(self, name: str, *, model: str, given: date | None = None) -> Recipient:
        """Record that somebody was given a model, today or on a day before; who has it is returned as they are."""
        requests.check_actor(name)
        models.model_named(self.ledger, model)
        today = self.clock().date()
        if given is not None and given > today:
            raise InputError(f"a model cannot have been given on {given}: that day is not over yet")
        at = stamp(self.clock()) if given in (None, today) else f"{given}T00:00:00Z"
        return recipients.enter_recipient(self.ledger, Recipient(draw_id(), name, model, at, None))

    def end_recipient(self, recipient_id: str) -> Recipient:
        """Record that a recipient no longer has the model; of later erasures they need not be told."""
        found = recipient_named(self.ledger, recipient_id)
        recipients.end_recipient(self.ledger, found.id, self.clock())
        return recipient_named(self.ledger, found.id)

    def tellings(self, request_id: str | None = None, *, erasure: str | None = None) -> list[Telling]:
        """Return which recipients must be or were told of all erasures, of one, or of what carried out a request."""
        if request_id is None:
            return tellings(self.ledger, erasure)
        wanted = self.request(request_id).id
        begun = erasures.requests_by_ids(self.ledger, [wanted])
        return [t for one in begun.values() for t in tellings(self.ledger, one.erasure_id) if wanted in t.requests]

    def tell_recipients(self) -> list[Telling]:
        """Have plugins tell every recipient who is still to be told; return those, with what came of it."""
        owed = [(one.erasure, one.recipient.id) for one in self.tellings() if one.owed]
        for one in self.tellings():
            if one.owed:
                whom, what = one.recipient, one.erasure
                outcome, by = self.plugins.tell(whom.name, whom.model, what, one.requests, self.folder)
                record_tellings(self.ledger, [(one, outcome, by)], self.clock())
        return [one for one in self.tellings() if (one.erasure, one.recipient.id) in owed]

    def record_notice(self, recipient_id: str, request_id: str, outcome: str, *, actor: str = "operator") -> Telling:
        """Record what came of telling a recipient of the erasure that carried out a request."""
        check_outcome(outcome)
        requests.check_actor(actor)
        whom = recipient_named(self.ledger, recipient_id)
        found = [one for one in self.tellings(request_id) if one.recipient.id == whom.id]
        if not found:
            raise RefusedError(f"recipient {whom.id[:12]} need not be told of that request")
        record_tellings(self.ledger, [(found[0], outcome, actor)], self.clock())
        return next(one for one in self.tellings(request_id) if one.recipient.id == whom.id)

    def report(self, first: date, last: date | None = None) -> RequestReport:
        """Return what became of requests from one day to another, or to today: counts and codes, and nobody's data."""
        return report_on(self.ledger, first, last or self.clock().date())

    def deadlines(self, within: timedelta = timedelta(0)) -> list[Deadline]:
        """Return what is owed within a time from now, or late already: answers, acknowledgements, reviews of holds."""
        return requests.deadlines(self.ledger, self.clock(), within)

    def run_requests(
        self,
        *,
        within: timedelta | None = None,
        build: bool | None = None,
        actor: str = "operator",
        executor: str | None = None,
        workers: int | None = None,
        device: str | None = None,
        watch: Watch | None = None,
    ) -> Erased:
        """Carry out what is approved, together, and rebuild where the store's policy says so.

        `within` leaves out what is due later than that from now. What a plugin vetoes is put on hold instead.
        """
        how = self._how(executor, workers, device)
        check_signers(self.translog)
        done: list[str] = []
        while True:
            self.finish_erasures()
            limit = None if within is None else stamp(self.clock() + within)
            ready = [e for e in dockets.entries(self.ledger, ("approved",)) if limit is None or e.due_at <= limit]
            held = self._veto(ready)
            free = [entry for entry in ready if entry.id not in held]
            # Orders come last and each by itself: what people asked for waits for no order that is refused.
            lots = [[entry.id for entry in free if not is_order(entry.target)]]
            lots += [[entry.id] for entry in free if is_order(entry.target)]
            begun = [lot for lot in lots if lot and self._begin(lot, actor)]
            done += [request_id for lot in begun for request_id in lot]
            if len(begun) == sum(map(bool, lots)):
                break
        builds = self._rebuild(self.policy(), build, how, watch)
        carried = erasures.requests_by_ids(self.ledger, done)
        outcomes = outcomes_of(self.ledger, [carried[request_id] for request_id in done])
        return Erased(tuple(outcomes), tuple(builds), frozenset(), tuple(held), {})

    def _begin(self, ids: Sequence[str], actor: str) -> bool:
        """Carry out approved requests together; False when one of them no longer is."""
        for entry in (self.request(request_id) for request_id in ids):
            if entry.asked == "dataset":
                self._check_nobody_held(str(entry.dataset))
        begun = begin_erasure(self.ledger, ids, self.clock(), actor)
        if begun:
            self._carry_out(begun)
        return begun is not None

    def _erase_whole(self, kind: str, name: str, policy: str | None, actor: str) -> Erased:
        """Carry out an order about a dataset or a model in one step; one that was carried out gives its outcome."""
        target, rules = self._order(kind, name), self.policy(policy)
        check_signers(self.translog)
        while True:
            self.finish_erasures()
            before = dockets.order_about(self.ledger, kind, name)
            if before is not None:
                done = erasures.requests_by_ids(self.ledger, [before.id])[before.id]
                return Erased((outcome_of(self.ledger, done),), (), frozenset([before.id]), (), {})
            if kind == "dataset":
                self._check_nobody_held(name)
            held = self._held([target], {}, rules)
            if held:
                return Erased((), (), frozenset(), tuple(held.values()), {})
            recorded = record_requests(self.ledger, [target], self.clock(), policy=rules, actor=actor)
            if recorded:
                break
        self._carry_out(recorded)
        self._note_rebuilt([])
        sign_head(self.translog)
        (request,) = erasures.requests_of(self.ledger, recorded)
        return Erased((outcome_of(self.ledger, request),), (), frozenset(), (), {})

    def _order(self, kind: str, name: str) -> Target:
        """Return what an order is about; raise `NotFoundError` unless it is there."""
        if kind == "dataset":
            points.dataset_named(self.ledger, name)
        else:
            models.model_named(self.ledger, name)
        return kind, name

    def _check_nobody_held(self, name: str) -> None:
        """Raise `RefusedError` while requests on hold keep data of a dataset: a hold outranks an order."""
        dataset = points.dataset_named(self.ledger, name)
        held = {entry.handle: entry.id for entry in dockets.entries(self.ledger, ("on_hold",)) if entry.handle}
        found = {h.handle for h in points.holdings_of(self.ledger, list(held)) if h.dataset_id == dataset.id}
        if found:
            first = min(held[handle] for handle in found)
            raise RefusedError(
                f"dataset '{name}' cannot be destroyed: it has data of {len(found)} users whose requests are on hold, "
                f"the first is {first[:12]}; `unlearnd requests release` lifts a hold"
            )

    def _moved(self, entry: Entry) -> Entry:
        """Bring training in line with the holds there are now, and sign what the transition logged."""
        settle(self.ledger, self.storage, self.clock)
        sign_head(self.translog)
        return entry

    def _carry_out(self, erasure_id: str) -> None:
        """Carry out an erasure; what stops it is noted with its requests, which stay where there is no way back."""
        settle(self.ledger, self.storage, self.clock)
        try:
            carry_out(
                self.translog,
                self._versions(),
                erasure_id,
                self.clock,
                lambda retired, record: destroy_unneeded(
                    self.ledger, self.storage, self.plugins, self.config.device, retired, self.clock, record
                ),
            )
        except UnlearndError as error:
            with suppress(UnlearndError):
                ids = [request.id for request in erasures.requests_of(self.ledger, erasure_id)]
                requests.note_failure(self.ledger, ids, type(error).__name__, self.clock())
            raise

    def _rebuild(self, policy: Policy, build: bool | None, how: "How", watch: Watch | None) -> list[Build]:
        """Build what erasures set back: as asked, else when the policy says."""
        set_back = self._set_back()
        wanted = set_back if build else []
        try:
            if build is None:
                wanted = [model for model in set_back if self._build_is_due(policy, model)]
            # Not more than the erasure set back: slices that still take points stay open.
            builds = [self._build_one(model, how, watch, sealing=False) for model in wanted]
        except UnlearndError as error:
            raise type(error)(
                f"the erasure is done and nothing made from the data is left, but the rebuild failed: {error}; "
                "`unlearnd build` goes on with it"
            ) from error
        if build is not False:
            self._note_rebuilt(builds)
            sign_head(self.translog)
        return builds

    def _build_is_due(self, policy: Policy, model: Model) -> bool:
        rules = policy.build
        if rules.when != "accuracy":
            return rebuild_is_due(self.ledger, rules, model, self.clock())
        assert rules.held_out is not None
        assert rules.floor is not None
        file = rules.held_out.file
        named = file if "://" in file else str(self.folder / file)
        try:
            return self.evaluate(model.name, named, label=rules.held_out.label).top1 < rules.floor
        except RefusedError:
            return True  # every constituent abstains

    def _veto(self, entries: Sequence[Entry]) -> list[str]:
        """Ask plugins about requests that are to be carried out; put on hold what one vetoes; return those."""
        rules = self.policy()
        petitions = [petition_of(entry, entry.target, rules) for entry in entries]
        held: list[str] = []
        for plugin, veto in self._vetoes(petitions):
            entry = entries[veto.number]
            if entry.id not in held:
                last = requests.last_review(self.ledger, entry, self.clock())
                review = last if veto.until is None else min(veto.until, last)
                now, by = self.clock(), f"plugin {plugin}"
                requests.put_on_hold(self.ledger, entry.id, veto.basis, by, review, now, by)
                held.append(entry.id)
        if held:
            settle(self.ledger, self.storage, self.clock)
            sign_head(self.translog)
        return held

    def _vetoes(self, petitions: Sequence[Petition]) -> list[tuple[str, Veto]]:
        """Ask plugins about requests; of an order to destroy a dataset, about everybody who has data in it as well."""
        asked, about = list(petitions), list(range(len(petitions)))
        for number, petition in enumerate(petitions):
            if petition.asked == "dataset":
                dataset = points.dataset_named(self.ledger, petition.name)
                for handle in points.users_of(self.ledger, dataset.id):
                    asked.append(replace(petition, asked="user", handle=handle.hex(), name=""))
                    about.append(number)
        said = self.plugins.vetoes(asked, self.folder, self.clock().date()) if asked else []
        return [(plugin, replace(veto, number=about[veto.number])) for plugin, veto in said]

    def where_user(self, user: str | int) -> list[Whereabouts]:
        """Return where a user's points train."""
        places: dict[tuple[int, int, int], list[int]] = {}
        # Every ingest has a row of its own; whoever asks wants to know the place once.
        for holding in points.holdings_of(self.ledger, self.keys.handles([_user(user)])):
            place = (holding.dataset_id, holding.shard, holding.slice)
            places.setdefault(place, []).extend(unpack(holding.positions).tolist())
        return [self._whereabouts(place, sorted(positions)) for place, positions in sorted(places.items())]

    def where_point(self, point: str) -> list[Whereabouts]:
        """Return where one point, given as `dataset:position`, trains; nothing when it is not there."""
        name, position = _point(point)
        dataset = points.dataset_named(self.ledger, name)
        holding = points.holding_at(self.ledger, dataset.id, position)
        return [self._whereabouts((holding.dataset_id, holding.shard, holding.slice), [position])] if holding else []

    def checkpoints(self, model: str) -> list[Checkpoint]:
        """Return every checkpoint of a model that is in force, by shard and slice."""
        found = models.model_named(self.ledger, model)
        return [checkpoint for standing in standings(self.ledger, found) for checkpoint in standing.chain]

    def builds(self, model: str) -> list[Build]:
        """Return what every build of a model cost, oldest first."""
        return models.builds_of(self.ledger, models.model_named(self.ledger, model))

    def seed_of(self, model: str) -> int:
        """Return the seed of a model, which a second store needs to train the same bits."""
        return models.model_named(self.ledger, model).seed

    def plan_build(self, model: str) -> BuildPlan:
        """Return what a build of a model would do."""
        return plan_build(self.ledger, models.model_in_service(self.ledger, model))

    def receipts(self) -> list[ReceiptEntry]:
        """Return every receipt of the store, in the order of the log."""
        return log.receipt_entries(self.ledger)

    def receipt(self, request_id: str) -> bytes:
        """Return a receipt file."""
        return read_receipt(self.translog, self._receipt(request_id))

    def export_receipt(self, request_id: str, folder: str | os.PathLike[str]) -> list[str]:
        """Write the evidence pack of a receipt to a new folder; return the names of its files."""
        entry = self._receipt(request_id)
        data = self.receipt(entry.request_id)
        size, head = sign_head(self.translog)
        name = f"{entry.request_id}.receipt.json"
        command = f"unlearnd verify {name} --trust trust.json --detail detail.json"
        files = {
            name: data,
            "detail.json": read_detail(self.translog, entry.detail),
            "tree-head.txt": head.encode(),
            "trust.json": trust(self.translog),
            # The keys that this receipt and this tree head were signed with, which need not be those in use now.
            "receipt.pub": public_pem(self._key_of("receipt", entry.leaf)),
            "log.pub": public_pem(self._key_of("log", size - 1)),
            "summary.html": summary_page(data, command),
            "verify.txt": f"{command}\n".encode(),
        }
        target = Path(folder)
        try:
            target.mkdir(mode=0o700, parents=True)
            for file, content in files.items():
                (target / file).write_bytes(content)
        except FileExistsError:
            raise RefusedError(f"{target} is there already; name a new folder") from None
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}") from error
        return list(files)

    def log_head(self) -> tuple[int, str]:
        """Return the newest signed tree head and its size."""
        return sign_head(self.translog)

    def log_proof(self, index: int) -> str:
        """Return a proof that a leaf is in the log."""
        return prove_leaf(self.translog, index)

    def log_consistency(self, old: int, new: int | None = None) -> tuple[int, list[str]]:
        """Return a size of the log and the proof that `old` leaves are its prefix, in base64."""
        size = sign_head(self.translog)[0]
        wanted = size if new is None else new
        if not 0 < old <= wanted <= size:
            raise NotFoundError(f"the log has {size} leaves: no proof from {old} to {wanted}")
        path = log.consistency(self.ledger, old, wanted)
        return wanted, [base64.b64encode(part).decode() for part in path]

    def export_log(self, target: str) -> int:
        """Write the log, its documents and receipts to a folder or URL; return its size."""
        url = target if "://" in target else str(Path(target).absolute())
        options = self.config.storage_options if url.startswith(("s3://", "s3a://")) else {}
        return export(self.translog, Storage(url, **options))

    def signing_keys(self) -> list[SigningKey]:
        """Return the keys that sign or signed for this store, oldest first."""
        return log.signing_keys(self.ledger)

    def _key_of(self, role: str, leaf: int) -> bytes:
        keys = [key for key in log.signing_keys(self.ledger, role) if key.since <= leaf]
        return keys[-1].public

    def rotate_key(self, role: str) -> SigningKey:
        """Put a new signing key in the place of the one in use."""
        new = rotate_key(self.translog, role, stamp(self.clock()))
        self.translog = replace(self.translog)
        return new

    def add_witness(self, key: str, quorum: int) -> None:
        """Name a witness (a C2SP verifier key) in the trust file, and how many cosignatures a receipt needs."""
        add_witness(self.translog, key, quorum)

    def keep_cosignatures(self, note: str) -> int:
        """Keep a cosigned tree head and write the receipts it covers anew with it; return how many."""
        return keep_cosignatures(self.translog, note)

    def revoke_key(self, key_id: str, since: int) -> None:
        """Say that a key that is no longer in use does not count from leaf `since` on."""
        revoke_key(self.translog, key_id, since, stamp(self.clock()))

    def _receipt(self, request_id: str) -> ReceiptEntry:
        found = [entry for entry in self.receipts() if request_id and entry.request_id.startswith(request_id)]
        if len(found) != 1:
            raise NotFoundError(f"{'no' if not found else 'more than one'} receipt begins with '{request_id}'")
        return found[0]

    def back_up(self, file: str | os.PathLike[str], passphrase: bytes | None = None) -> Backup:
        """Write ledger, keys and settings to a new file, as of one moment; with a passphrase, encrypted."""
        target = Path(file).absolute()
        return back_up(self.folder, self.ledger, self.config, target, stamp(self.clock()), passphrase)

    def status(self) -> Status:
        """Return how everything stands."""
        data = {dataset.id: dataset for dataset in points.datasets(self.ledger)}
        waiting = dockets.open_entries(self.ledger)
        return Status(
            datasets=tuple(self._dataset_status(dataset) for dataset in data.values()),
            models=tuple(self._model_status(model, data[model.dataset_id]) for model in models.models(self.ledger)),
            unfinished=len(erasures.unfinished_erasures(self.ledger)),
            to_rebuild=len(erasures.erasures_to_rebuild(self.ledger)),
            policy=self.config.policy,
            requests=dict(Counter(entry.state for entry in waiting)),
            next_due=min((entry.due_at for entry in waiting if entry.paused_at is None), default=None),
            retired={m.name: m.retired_at for m in models.models(self.ledger, retired=True) if m.retired_at},
        )

    def planning_facts(self, model: str) -> Question:
        """Return what a plan needs to know and this store can tell of a model: points, epochs, what was measured."""
        found = models.model_named(self.ledger, model)
        dataset = points.dataset_by_id(self.ledger, found.dataset_id)
        built = models.builds_of(self.ledger, found)
        sizes = [checkpoint.size for checkpoint in models.checkpoints_of(self.ledger, found.id)]
        seconds = sum(build.seconds for build in built)
        return Question(
            points=sum(points.counts_of(self.ledger, dataset.id).values()),
            shards=found.spec.shards,
            slices=points.generations(self.ledger, dataset.id)[-1].last_slice,
            keep=None if found.kept is None else len(found.kept),
            epochs=float(found.spec.epochs),
            schedule=found.spec.schedule,
            scattered=dataset.unit == "point",
            risks=() if dataset.layout is None else risks_of(FrozenLayout.from_json(dataset.layout)),
            state_bytes=sum(sizes) / len(sizes) if sizes else None,
            samples_per_second=sum(build.samples for build in built) / seconds if seconds else None,
        )

    def work(self, task: Task, report: Report) -> None:
        """Carry out one task of a build, as a worker."""
        build_task(self.ledger, self.storage, self.plugins, task, self.clock, report)

    def _how(self, executor: str | None, workers: int | None, device: str | None) -> "How":
        """Return how to build: as asked, else as the store's settings say."""
        count = self.config.workers if workers is None else workers
        if count < 1:
            raise InputError(f"a build needs at least 1 worker, not {count}")
        several = workers is not None and workers > 1 and self.config.executor == "serial"
        chosen = executor or ("processes" if several else self.config.executor)
        self.plugins.executor(chosen)
        unsaid = (executor, workers, self.config.executor, self.config.workers) == (None, None, "serial", 1)
        return How(chosen, count, device or self.config.device, spread=unsaid)

    def _build_one(self, model: Model, how: "How", watch: Watch | None, sealing: bool = True) -> Build:
        return build(
            self.ledger,
            self.storage,
            self.plugins,
            model,
            str(self.folder),
            self.work,
            self.clock,
            executor=how.executor,
            workers=how.workers,
            device=how.device,
            spread=how.spread,
            build_id=draw_id(),
            watch=watch or Watch(),
            sealing=sealing,
        )

    def _set_back(self) -> list[Model]:
        """Return the models that erasures have set back and no build has brought up again."""
        touched = {
            dataset_id for erasure in erasures.erasures_to_rebuild(self.ledger) for dataset_id, _ in erasure.touched
        }
        return [model for model in models.models(self.ledger) if model.dataset_id in touched]

    def _rebuilt_leaves(self, ready: Sequence[str], builds: Sequence[Build], now: datetime) -> list[bytes]:
        """Return the statements that follow receipts once models are at full strength, and what is in service."""
        leaf_of = {entry.request_id: entry.leaf for entry in log.receipt_entries(self.ledger)}
        trained = [(build.model, build.samples, build.from_scratch) for build in builds]
        built = {build.model for build in builds if build.checkpoints}
        listed = [(model, shards_of(model)) for model in models.models(self.ledger) if model.name in built]
        leaves = live_sets(self.translog, listed, now)
        for erasure_id in ready:
            receipts = [leaf_of[request.id] for request in erasures.requests_of(self.ledger, erasure_id)]
            leaves.append(models_rebuilt(erasure_id, receipts, trained, stamp(now)))
        return leaves

    def _note_rebuilt(self, builds: Sequence[Build]) -> None:
        """Record for each erasure whether every model it touched is back at full strength."""
        complete: dict[int, bool] = {}
        ready = []
        for erasure in erasures.erasures_to_rebuild(self.ledger):
            for dataset_id in {dataset_id for dataset_id, _ in erasure.touched}:
                if dataset_id not in complete:
                    complete[dataset_id] = all(
                        standing.complete
                        for model in models.models(self.ledger, dataset_id)
                        for standing in standings(self.ledger, model)
                    )
            if all(complete[dataset_id] for dataset_id, _ in erasure.touched):
                ready.append(erasure.id)
        if ready:
            self.clock.not_before(newest_moment(self.ledger))
            now = self.clock()
            erasures.rebuilt(self.ledger, ready, self._rebuilt_leaves(ready, builds, now), now)
            reached(Step.ERASE_REBUILT)

    def _targets(self, users: Iterable[str | int], given: Iterable[str]) -> list[Target]:
        listed = [users] if isinstance(users, str | int) else list(users)
        handles: list[Target] = list(self.keys.handles([_user(user) for user in listed]))
        single = [_point(point) for point in ([given] if isinstance(given, str) else given)]
        for name in {name for name, _ in single}:
            points.dataset_named(self.ledger, name)
        targets = handles + single
        if not targets:
            raise InputError("nobody to erase: give at least one user or point")
        return list(dict.fromkeys(targets))

    def _openings(self, named: Mapping[Target, str]) -> dict[str, Opening]:
        """Return the openings of these users' requests that are not carried out yet."""
        handles = [handle for handle in named if isinstance(handle, bytes)]
        begun = erasures.last_requests(self.ledger, handles, [])
        with self.ledger.read() as connection:
            waiting = dockets.open_by_handles(connection, handles)
        known: list[Request | Entry] = [*begun.values(), *waiting.values()]
        return {
            found.id: Opening(found.id, named[found.handle], found.nonce)
            for found in known
            if found.nonce is not None and found.handle is not None
        }

    def _versions(self) -> dict[str, str]:
        """Return the distributions of installed plugins with their versions, as receipts name them."""
        return {plugin.distribution: plugin.version for plugin in self.plugins.installed}

    def _record(
        self, targets: Sequence[Target], named: Mapping[Target, str], policy: Policy
    ) -> tuple[list[Target], dict[Target, str], str | None]:
        """Record a request for each target that is not erased yet; return those, those on hold, the erasure's id."""
        while True:
            # What others have begun about the same users is carried to its end first: its outcome is theirs.
            self.finish_erasures()
            new, alive = self._not_erased_yet(targets)
            held = self._held(new, named, policy)
            new = [target for target in new if target not in held]
            if not new:
                return [], held, None
            still = [handle for handle in alive if handle not in held]
            recorded = record_requests(self.ledger, new, self.clock(), still, named, policy)
            if recorded:
                return new, held, recorded

    def _held(self, targets: Sequence[Target], named: Mapping[Target, str], policy: Policy) -> dict[Target, str]:
        """Return those on hold, after asking plugins; one that is vetoed and new is received first, then held."""
        with self.ledger.read() as connection:
            handles = [target for target in targets if isinstance(target, bytes)]
            waiting: dict[Target, Entry] = dict(dockets.open_by_handles(connection, handles).items())
            waiting |= {t: e for t, e in dockets.open_of_others(connection).items() if t in targets}
        held = {target: entry.id for target, entry in waiting.items() if entry.state == "on_hold"}
        free = [target for target in targets if target not in held]
        petitions = [petition_of(waiting.get(target), target, policy) for target in free]
        for number in {veto.number for _, veto in self._vetoes(petitions)}:
            target = free[number]
            entry = waiting.get(target)
            if entry is None:
                asked = Asked(target, named.get(target), requester="operator")
                (entry,) = requests.receive(self.ledger, [asked], policy, self.clock(), "operator")
            for request_id in self._veto([entry]):
                held[target] = request_id
        return held

    def _not_erased_yet(self, targets: Sequence[Target]) -> tuple[list[Target], list[bytes]]:
        """Return the targets there is something to ask about, and the users among them that have data."""
        handles = [target for target in targets if isinstance(target, bytes)]
        single = [target for target in targets if not isinstance(target, bytes)]
        asked = erasures.last_requests(self.ledger, handles, single)
        alive = points.user_keys(self.ledger, handles).keys()
        # Positions are never given twice, so a point that was erased is gone for good.
        new = [
            target
            for target in targets
            if target not in asked
            or target in alive
            or (target in single and not outcome_of(self.ledger, asked[target]).found)
        ]
        return new, list(alive)

    def _outcomes(self, targets: Sequence[Target]) -> tuple[Outcome, ...]:
        handles = [target for target in targets if isinstance(target, bytes)]
        single = [target for target in targets if not isinstance(target, bytes)]
        asked = erasures.last_requests(self.ledger, handles, single)
        return tuple(outcomes_of(self.ledger, [asked[target] for target in targets]))

    def _whereabouts(self, place: tuple[int, int, int], positions: Sequence[int]) -> Whereabouts:
        dataset_id, shard, slice_ = place
        return Whereabouts(points.dataset_by_id(self.ledger, dataset_id).name, shard, slice_, tuple(positions))

    def _dataset_status(self, dataset: Dataset) -> DatasetStatus:
        generations = points.generations(self.ledger, dataset.id)
        return DatasetStatus(
            name=dataset.name,
            points=sum(points.counts_of(self.ledger, dataset.id).values()),
            shards=dataset.shards,
            slices=generations[-1].last_slice,
            open_slices=0 if generations[-1].sealed else generations[-1].slices,
            classes=len(dataset.labels),
        )

    def _model_status(self, model: Model, dataset: Dataset) -> ModelStatus:
        plan = plan_build(self.ledger, model)
        return ModelStatus(
            name=model.name,
            dataset=dataset.name,
            backend=f"{model.spec.backend} {model.spec.backend_version}",
            slices=points.generations(self.ledger, dataset.id)[-1].last_slice,
            prefixes=tuple(standing.prefix for standing in plan.standings),
            samples_missing=plan.samples,
            samples_from_scratch=plan.from_scratch,
            degraded=len(plan.missing),
        )


def migrate_store(directory: str | os.PathLike[str]) -> tuple[str | None, str]:
    """Bring the ledger of the store in `directory` to this release's schema; return it before and after."""
    folder = Path(directory).absolute()
    url = ledger_url(folder, read_config(folder).ledger)
    # What is not a ledger at all must not become an empty one.
    Ledger.check(url)
    return migrate(url)


def restore_store(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    passphrase: bytes | None = None,
    *,
    head: bytes | None = None,
) -> Backup:
    """Put a backup into `directory`, where the storage is and no store; refuse one that erasures have overtaken.

    `head` is the newest tree head that anybody kept: the backup must be as new.
    """
    folder = Path(directory).absolute()

    def reach(config: Config, place: str) -> Storage:
        storage = Storage(storage_url(folder, place), **config.storage_options)
        storage.check(config.store_id)
        return storage

    return restore(
        Path(file),
        folder,
        passphrase,
        lambda config: (reach(config, config.storage), reach(config, config.receipts or config.storage)),
        lambda config: ledger_url(folder, config.ledger),
        0 if head is None else read_head(head)[1].size,
    )


def copy_ledger(
    directory: str | os.PathLike[str], url: str, *, clock: Clock = lambda: datetime.now(UTC)
) -> ledger_move.Moved:
    """Move the ledger of the store in `directory` to the database at `url`, where nothing is yet.

    Log, receipts and digests stay as they are. Killed anywhere, called again it goes on. Nobody may be at work.
    """
    folder = Path(directory).absolute()
    config = read_config(folder)
    here, there = ledger_url(folder, config.ledger), ledger_url(folder, url)
    if here == there:
        if not ledger_move.is_unfinished(there):
            raise RefusedError("the ledger is there already")
    else:
        if Ledger.check(here) != MOVED:
            with closing(Ledger.open(here)) as ledger:
                check_idle(ledger, clock)
        ledger_move.move(here, there)
        change_ledger(folder, url)
        reached(Step.LEDGER_SWITCHED)
    return ledger_move.finish(there)


def _private_files(folder: Path, config: Config) -> list[Path]:
    """Return what besides the keys is for the owner alone: a local storage, a ledger that is a file."""
    ledger = ledger_url(folder, config.ledger)
    files = [Path(ledger.removeprefix("sqlite:///"))] if ledger.startswith("sqlite:///") else []
    return files + ([] if "://" in config.storage else [folder / config.storage])


def _claim(
    undo: ExitStack, storage: Storage, store_id: str, lock_allowed: bool = False, encrypted: bool = False
) -> None:
    """Take a place for a store that is being made; it is let go again when the making fails."""
    storage.create()
    storage.claim(store_id, lock_allowed=lock_allowed, encrypted=encrypted)
    undo.callback(storage.unclaim)


def _classes(given: Sequence[int | str] | int | None) -> tuple[int | str, ...] | None:
    if given is None:
        return None
    classes = tuple(range(given)) if isinstance(given, int) else tuple(given)
    if not classes or len(set(map(str, classes))) != len(classes):
        raise InputError("declare at least one class, and each only once")
    return classes


def _columns_for(dataset: Dataset, data: Data) -> tuple[str, ...] | None:
    """Return the columns to read from files for a dataset; None where there are none to name."""
    if dataset.columns is None or not isinstance(data, str | os.PathLike | Sequence):
        return None
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    for file in [os.fspath(name) for name in files]:
        if file.endswith(".npz"):
            names = ", ".join(dataset.columns[:5]) + (", …" if len(dataset.columns) > 5 else "")
            raise InputError(f"{file}: dataset '{dataset.name}' has the columns {names}; give a CSV or Parquet file")
    return dataset.columns


def _user(user: str | int) -> str:
    if isinstance(user, bool) or not isinstance(user, str | int | np.integer) or not str(user):
        raise InputError("a user id is a non-empty string or an integer")
    text = str(user)
    if not text.isascii() and not text.encode(errors="ignore").decode() == text:
        raise InputError("the user id is not proper text: it has half a character in it")
    return text


def _point(point: str) -> tuple[str, int]:
    name, _, position = point.rpartition(":")
    if not name or not (position.isascii() and position.isdigit() and len(position) < 19):
        raise InputError("a point is written dataset:position, like digits:1234")
    return name, int(position)


def _label_order(label: int | str) -> tuple[int, int | str]:
    return (0, label) if isinstance(label, int) else (1, label)


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
