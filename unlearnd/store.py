"""The façade: one method per verb, on what is open.

Nothing is decided here. Each method reads top to bottom as what the verb does; the doing is in the modules it
calls. Only the surfaces read the clock; a store is given one when it is opened.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from unlearnd import answering, erasing, evidence, overview, requests, training
from unlearnd.answering import columns_for, served_model
from unlearnd.backup import Backup, back_up
from unlearnd.build import BuildPlan, Report, Watch, discard_damaged, plan_build
from unlearnd.checkpoints import standings
from unlearnd.config import read_config
from unlearnd.default_plugins.exemptions import read_exemptions, write_exemptions
from unlearnd.erasing import Erased
from unlearnd.erasure import ErasurePlan, Target
from unlearnd.errors import InputError, RefusedError
from unlearnd.evidence import receipt_named
from unlearnd.founding import copy_ledger, found, migrate_store, restore_folder
from unlearnd.hookspecs import PriorPlacement, Task
from unlearnd.ingest import Added, Layout, check_layout, ingest
from unlearnd.intake import RowResult, receive_rows
from unlearnd.keys import draw_id
from unlearnd.layouts import Risk, Risks, as_risks
from unlearnd.leases import Clock
from unlearnd.ledger import dockets, erasures, log, models, points, recipients
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.dockets import Entry, Transition
from unlearnd.ledger.log import ReceiptEntry, SigningKey
from unlearnd.ledger.models import Build, Checkpoint, Model
from unlearnd.ledger.points import Dataset
from unlearnd.ledger.recipients import Recipient
from unlearnd.opened import Opened
from unlearnd.overview import DatasetStatus, ModelStatus, Status, Whereabouts
from unlearnd.planner import Question
from unlearnd.policy import DEFAULT, codes
from unlearnd.recipients import Telling, check_excuse, check_outcome, recipient_named, tell, tellings
from unlearnd.recipients import record as record_tellings
from unlearnd.report import RequestReport, report_on
from unlearnd.requests import Asked, Deadline, Duty
from unlearnd.restriction import settle
from unlearnd.rollforward import Rolled
from unlearnd.serving import Answers, Evaluation, ServedModel
from unlearnd.shadows import MembershipReport
from unlearnd.sources import Data, read_batches
from unlearnd.targets import Opening, openings_of, order_about, targets_of, user_id
from unlearnd.training import build_one, how_to_build, note_rebuilt
from unlearnd.translog import (
    add_witness,
    keep_cosignatures,
    prove_leaf,
    read_receipt,
    revoke_key,
    rotate_key,
    sign_head,
    write_trust,
)

DEFAULT_SHARDS = 5
DEFAULT_SLICES = 10

__all__ = [
    "DatasetStatus",
    "Erased",
    "ModelStatus",
    "Opening",
    "Status",
    "Store",
    "Watch",
    "Whereabouts",
    "copy_ledger",
    "migrate_store",
    "restore_store",
]


class Store(Opened):
    """An open store. Use it in a `with` block, or close it."""

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
        found(
            folder,
            ledger=ledger,
            storage=storage,
            storage_options=storage_options,
            receipts=receipts,
            encrypt=encrypt,
            placement_key=placement_key,
            policy=policy,
            signer=signer,
            clock=clock,
        )
        return cls.open(folder, clock=clock)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        clock: Clock = lambda: datetime.now(UTC),
        may_be_behind: bool = False,
    ) -> "Store":
        """Open the store in `directory`; with `may_be_behind`, for a backup of a ledger that is older than storage."""
        folder = Path(directory).absolute()
        return cls(folder, read_config(folder), clock, may_be_behind=may_be_behind)

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
            features = columns_for(known, data)
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
        how = how_to_build(self, executor, workers, device)
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
        built = build_one(self, declared, how, watch)
        note_rebuilt(self, [built])
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
        return training.declare(
            self,
            model,
            dataset=dataset,
            backend=backend,
            epochs=epochs,
            seed=seed,
            settings=settings,
            schedule=schedule,
            keep=keep,
            device=device,
        )

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
        how = how_to_build(self, executor, workers, device)
        self.finish_erasures()
        done = [build_one(self, model, how, watch) for model in wanted]
        note_rebuilt(self, done)
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
        return served_model(self, name, device)

    def predict(
        self, model: str, data: Data, *, aggregate: str = "vote", device: str | None = None
    ) -> Iterator[Answers]:
        """Answer for rows in files or an array, batch by batch, in order."""
        return answering.predict(self, model, data, aggregate=aggregate, device=device)

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
        return answering.evaluate(self, model, data, label=label, aggregate=aggregate, device=device)

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
        return answering.evaluate_groups(
            self, model, data, label=label, group=group, aggregate=aggregate, device=device
        )

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
        return answering.attack_membership(
            self,
            model,
            erased=erased,
            held_out=held_out,
            label=label,
            shadows=shadows,
            seed=seed,
            device=device,
            on_shadow=on_shadow,
        )

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

    def plan_erasure(
        self,
        users: Iterable[str | int] = (),
        points: Iterable[str] = (),
        *,
        dataset: str | None = None,
        model: str | None = None,
    ) -> ErasurePlan:
        """Return what erasing these, or a whole dataset or model, would do; change nothing."""
        return erasing.plan_erasure(self, users, points, dataset=dataset, model=model)

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
        return erasing.erase(
            self,
            users,
            points=points,
            policy=policy,
            build=build,
            executor=executor,
            workers=workers,
            device=device,
            watch=watch,
            hand_out=hand_out,
        )

    def erase_dataset(self, dataset: str, *, policy: str | None = None, actor: str = "operator") -> Erased:
        """Destroy a dataset: all its points, every model trained on it, and the keys of users with no other data.

        For good: its name and those of the models stay taken. Refused while a hold keeps points of it.
        """
        return erasing.erase_whole(self, "dataset", dataset, policy, actor)

    def erase_model(self, model: str, *, policy: str | None = None, actor: str = "operator") -> Erased:
        """Destroy a model: every checkpoint of it. For good: it is never built again, and its name stays taken."""
        return erasing.erase_whole(self, "model", model, policy, actor)

    def finish_erasures(self) -> int:
        """Carry on with erasures that a killed process left undone; return how many there were."""
        return erasing.finish_erasures(self)

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
        given = [user_id(user) for user in ([users] if isinstance(users, str | int) else users)]
        orders = [] if dataset is None else [order_about(self, "dataset", dataset)]
        orders += [] if model is None else [order_about(self, "model", model)]
        targets = orders + (targets_of(self, given, points) if given or points or not orders else [])
        named: dict[Target, str] = dict(zip(self.keys.handles(given), given, strict=True))
        asked = [Asked(t, named.get(t), received, due, ground, requester, identity) for t in targets]
        entries = requests.receive(self.ledger, asked, self.policy(policy), self.clock(), actor)
        hand_out(openings_of(self, named))
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
        # Said before and cut off before the decision: then only that is left to do.
        if identity is not None and (found.state, found.identity) != ("verified", identity):
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
        handle = self.keys.handles([user_id(user)])[0].hex()
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
        return tell(self.ledger, self.plugins, self.folder, self.clock)

    def record_notice(self, recipient_id: str, request_id: str, outcome: str, *, actor: str = "operator") -> Telling:
        """Record what came of telling a recipient of the erasure that carried out a request."""
        check_outcome(outcome)
        requests.check_actor(actor)
        whom = recipient_named(self.ledger, recipient_id)
        found = [one for one in self.tellings(request_id) if one.recipient.id == whom.id]
        if not found:
            raise RefusedError(f"recipient {whom.id[:12]} need not be told of that request")
        check_excuse(self.ledger, found[0], outcome)
        record_tellings(self.ledger, [(found[0], outcome, actor)], self.clock())
        return next(one for one in self.tellings(request_id) if one.recipient.id == whom.id)

    def report(self, first: date, last: date | None = None) -> RequestReport:
        """Return what became of requests from one day to another, or to today: counts and codes, and nobody's data."""
        now = self.clock()
        return report_on(self.ledger, first, last or now.date(), now)

    def deadlines(self, within: timedelta = timedelta(0)) -> list[Deadline]:
        """Return what is owed within a time from now, or late already: answers, acknowledgements, reviews of holds."""
        return requests.deadlines(self.ledger, self.clock(), within)

    def duty_to_tell(self, entry: Entry, of: str) -> Duty | None:
        """Return what a request's policy wants the person told once it was received, extended, refused or completed."""
        return requests.duty_to_tell(self.ledger, entry, of)

    def expire_requests(self, *, dry_run: bool = False) -> list[Entry]:
        """Take away what ties closed requests past their keeping time to a person; return those as they were.

        What stays holds no personal data: id, state, dates and policy, the leaf and the receipt.
        """
        return (requests.expired if dry_run else requests.expire)(self.ledger, self.clock())

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
        return erasing.run_requests(
            self,
            within=within,
            build=build,
            actor=actor,
            executor=executor,
            workers=workers,
            device=device,
            watch=watch,
        )

    def _moved(self, entry: Entry) -> Entry:
        """Bring training in line with the holds there are now, and sign what the transition logged."""
        settle(self.ledger, self.storage, self.clock)
        sign_head(self.translog)
        return entry

    def where_user(self, user: str | int) -> list[Whereabouts]:
        """Return where a user's points train."""
        return overview.where_user(self, user)

    def where_point(self, point: str) -> list[Whereabouts]:
        """Return where one point, given as `dataset:position`, trains; nothing when it is not there."""
        return overview.where_point(self, point)

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
        return read_receipt(self.translog, receipt_named(self, request_id))

    def export_receipt(self, request_id: str, folder: str | os.PathLike[str]) -> list[str]:
        """Write the evidence pack of a receipt to a new folder; return the names of its files."""
        return evidence.export_receipt(self, request_id, folder)

    def log_head(self) -> tuple[int, str]:
        """Return the newest signed tree head and its size."""
        return sign_head(self.translog)

    def log_proof(self, index: int) -> str:
        """Return a proof that a leaf is in the log."""
        return prove_leaf(self.translog, index)

    def log_consistency(self, old: int, new: int | None = None) -> tuple[int, list[str]]:
        """Return a size of the log and the proof that `old` leaves are its prefix, in base64."""
        return evidence.log_consistency(self, old, new)

    def export_log(self, target: str) -> int:
        """Write the log, its documents and receipts to a folder or URL; return its size."""
        return evidence.export_log(self, target)

    def signing_keys(self) -> list[SigningKey]:
        """Return the keys that sign or signed for this store, oldest first."""
        return log.signing_keys(self.ledger)

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

    def back_up(self, file: str | os.PathLike[str], passphrase: bytes | None = None) -> Backup:
        """Write ledger, keys and settings to a new file, as of one moment; with a passphrase, encrypted."""
        target = Path(file).absolute()
        return back_up(self.folder, self.ledger, self.config, target, stamp(self.clock()), passphrase)

    def status(self) -> Status:
        """Return how everything stands."""
        return overview.status(self)

    def planning_facts(self, model: str) -> Question:
        """Return what a plan needs to know and this store can tell of a model: points, epochs, what was measured."""
        return overview.planning_facts(self, model)

    def work(self, task: Task, report: Report) -> None:
        """Carry out one task of a build, as a worker."""
        training.work(self, task, report)


def _classes(given: Sequence[int | str] | int | None) -> tuple[int | str, ...] | None:
    if given is None:
        return None
    classes = tuple(range(given)) if isinstance(given, int) else tuple(given)
    if not classes or len(set(map(str, classes))) != len(classes):
        raise InputError("declare at least one class, and each only once")
    return classes


def restore_store(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    passphrase: bytes | None = None,
    *,
    head: bytes | None = None,
    log: str | None = None,
    ledger: str | None = None,
    accept_losses: bool = False,
    clock: Clock = lambda: datetime.now(UTC),
) -> tuple[Backup, Rolled]:
    """Put a backup into `directory`, where the storage is and no store, after bringing it up to what happened since.

    Erasures that came after the backup are carried out again on it before anything is in place. What happened is read
    from the copy of the log in storage, or from `log`, an exported one, where that is newer. `head` is the newest tree
    head that anybody kept: the log must go on from it. `ledger` is the database to put the ledger into, if not where it
    was. What came later and cannot be brought back is a reason to refuse, unless `accept_losses`.
    """
    folder = Path(directory).absolute()
    done = restore_folder(
        Path(file),
        folder,
        passphrase,
        head=head,
        exported=log,
        ledger=ledger,
        accept_losses=accept_losses,
        clock=clock,
    )
    with Store.open(folder, clock=clock) as store:
        store.finish_erasures()
        sign_head(store.translog)
        write_trust(store.translog)
    return done
