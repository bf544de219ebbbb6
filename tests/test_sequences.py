"""Any sequence of ingests, builds, erasures and interruptions ends where a store ends that never met the erased.

Hypothesis draws the sequences. Beside the store runs a simple model of it: a list of the ingests and builds that
happened and, for each ingest, which of its rows are still there. Whenever models are built, that list is played
again into a fresh store without the rows that were erased since, and all digests must be equal. (Builds are
played, too, because points given after a build go to new slices.)
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import unlearnd
from unlearnd import steps
from unlearnd.build import seal
from unlearnd.errors import RefusedError
from unlearnd.ledger import points
from unlearnd.steps import Step

SEED = 99
ANCHOR = "somebody who stays"
"""Owns a row of every class in every ingest, so that no ingest and no class goes with the erased."""
users = st.integers(0, 7).map(lambda number: f"u{number}")


class CutOff(BaseException):
    """Stands in for a process that ends in the middle of something."""


def draw_rows(number: int, owners: list[str]) -> tuple[Any, Any, list[str]]:
    """Return features, labels and users of an ingest: one row for each owner, and the anchor's."""
    everybody = [ANCHOR, *owners, ANCHOR]
    generator = np.random.default_rng(number)
    x = generator.normal(size=(len(everybody), 3)).astype(np.float32)
    y = generator.integers(0, 2, len(everybody))
    y[0], y[-1] = 0, 1
    return x, y, everybody


class Sequences(RuleBasedStateMachine):
    """A store, and what must be true of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="unlearnd-sequences-"))
        (self.folder / "placement.key").write_text("ab" * 32)
        self.stores = 0
        self.store = self.new_store()
        self.played: list[Any] = []
        """What happened: "seal", "build", or an ingest as (number of slices, features, labels, [owner or None])."""
        self.asked: dict[str, Any] = {}
        """The outcome of each user who was erased and has not come back."""

    def new_store(self) -> Any:
        self.stores += 1
        key = self.folder / "placement.key"
        return unlearnd.create_store(str(self.folder / str(self.stores)), placement_key=key)

    def teardown(self) -> None:
        steps.watcher = None
        self.store.close()
        shutil.rmtree(self.folder)

    def live(self) -> list[str | None]:
        """Return the owner of every position, None where it was erased."""
        return [owner for call in self.played if not isinstance(call, str) for owner in call[3]]

    def do(self, work: Any, cut_off: Step | None) -> bool:
        """Do something, cut off at a step if it gets there; return whether it came to its end."""

        def stop(step: Step) -> None:
            if step is cut_off:
                steps.watcher = None
                raise CutOff(step)

        steps.watcher = stop
        try:
            work()
        except CutOff:
            # The process is gone; the next one opens the store anew.
            self.store.close()
            self.store = unlearnd.open_store(str(self.store.folder))
            return False
        finally:
            steps.watcher = None
        return True

    @initialize(owners=st.lists(users, min_size=3, max_size=10))
    def begin(self, owners: list[str]) -> None:
        self.ingest(owners, 3, None)

    @rule(
        owners=st.lists(users, min_size=1, max_size=6),
        slices=st.integers(1, 2),
        cut_off=st.sampled_from([None, None, Step.INGEST_OPENED, Step.INGEST_SEGMENTS, Step.INGEST_STAGED]),
    )
    def ingest(self, owners: list[str], slices: int, cut_off: Step | None) -> None:
        x, y, everybody = draw_rows(len(self.played), owners)
        # How many slices there are to be can be said when they are opened, and not while they are open.
        opened = slices if not self.played or isinstance(self.played[-1], str) else None

        def add() -> None:
            self.store.ingest("d", x, user=everybody, label=y, shards=2, slices=opened, readmit=True)

        if self.do(add, cut_off):
            self.played.append((opened, x, y, list(everybody)))
            for user in everybody:
                self.asked.pop(user, None)

    @rule(cut_off=st.sampled_from([None, None, *(step for step in Step if step.name.startswith(("BUILD", "TRAIN")))]))
    def train(self, cut_off: Step | None) -> None:
        def train() -> None:
            self.store.train("m", dataset="d", backend="linear", epochs=1, seed=SEED, settings={"batch_size": 4})

        # The first training closes the slices and then declares the model: it may be cut off in between.
        finished = self.do(train, cut_off)
        self.note_what_was_closed()
        assert not finished or self.played[-1] == "build"
        self.compare()

    @rule(
        chosen=st.lists(users, min_size=1, max_size=3, unique=True),
        cut_off=st.sampled_from([None, None, *(step for step in Step if step.name.startswith("ERASE"))]),
        build=st.booleans(),
    )
    def erase(self, chosen: list[str], cut_off: Step | None, build: bool) -> None:
        held = Counter(self.live())
        outcomes: list[Any] = []

        def erase() -> None:
            outcomes.extend(self.store.erase(chosen, build=build).outcomes)

        if not self.do(erase, cut_off):
            if cut_off is not Step.ERASE_REBUILT:
                assert self.store.status().unfinished == (cut_off is not Step.ERASE_REMOVED)
            # Asked again, it ends as if nothing had happened.
            erase()
        for user, outcome in zip(chosen, outcomes, strict=True):
            if user in self.asked:
                # Nobody is erased twice: the answer is the first one's, up to when models were rebuilt.
                assert (outcome.request, outcome.points) == (self.asked[user].request, self.asked[user].points)
            else:
                assert outcome.points == held[user]
                assert outcome.found == (held[user] > 0)
            self.asked[user] = outcome
        self.take_out(lambda position, owner: owner in chosen)
        self.note_what_was_closed()
        assert self.store.status().unfinished == 0
        self.compare()

    @rule(data=st.data(), build=st.booleans())
    def erase_points(self, data: st.DataObject, build: bool) -> None:
        # Anchors stay; a position beyond the end is nobody's yet.
        owners = self.live()
        some = [n for n, owner in enumerate(owners) if owner != ANCHOR] + [len(owners) + 1000]
        chosen = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=3, unique=True))
        there = [n < len(owners) and owners[n] is not None for n in chosen]
        erased = self.store.erase(points=[f"d:{position}" for position in chosen], build=build)
        for position, was_there, outcome in zip(chosen, there, erased.outcomes, strict=True):
            if was_there:
                assert outcome.points == 1
            assert self.store.where_point(f"d:{position}") == []
        self.take_out(lambda position, owner: position in chosen)
        self.note_what_was_closed()
        self.compare()

    @precondition(lambda self: "build" in self.played)
    @rule()
    def answer(self) -> None:
        if not self.store.status().models:
            return
        try:
            answers = self.store.model("m").predict(np.zeros((2, 3), np.float32))
        except RefusedError:
            # Every constituent may abstain for a while, but not when all is built: the anchor is always there.
            assert self.store.status().models[0].samples_missing > 0
        else:
            np.testing.assert_allclose(answers.scores.sum(axis=1), 1)

    def take_out(self, gone: Any) -> None:
        position = 0
        for call in self.played:
            if isinstance(call, str):
                continue
            for number, owner in enumerate(call[3]):
                if owner is not None and gone(position, owner):
                    call[3][number] = None
                position += 1

    @invariant()
    def counts_and_places_agree(self) -> None:
        owners = self.live()
        if not owners:
            return
        (data,) = self.store.status().datasets
        assert data.points == sum(owner is not None for owner in owners)
        for user in {f"u{number}" for number in range(8)} | {ANCHOR}:
            expected = [position for position, owner in enumerate(owners) if owner == user]
            found = sorted(position for where in self.store.where_user(user) for position in where.positions)
            assert found == expected

    @invariant()
    def nothing_served_or_stored_was_made_from_the_erased(self) -> None:
        if not self.store.status().models:
            return
        for standing in self.store.model("m").constituents():
            # Recipes are made from today's roots, and today's roots from today's points.
            for checkpoint in standing.chain:
                assert checkpoint.recipe == standing.recipes[checkpoint.slice]
        storage = self.store.folder / "storage" / "checkpoints"
        today = {r for standing in self.store.model("m").constituents() for r in standing.recipes}
        assert {path.stem for path in storage.rglob("*.safetensors")} <= today
        assert not list(storage.rglob("*.part"))

    def note_what_was_closed(self) -> None:
        """Write down that slices were closed: points given from now on go to new ones."""
        status = self.store.status()
        happened = "build" if status.models else "seal"
        if status.datasets[0].open_slices == 0 and self.played[-1] != happened:
            self.played.append(happened)

    def compare(self) -> None:
        """Play everything again into a fresh store without the erased, and compare every digest that there is."""
        if not self.store.status().models:
            return
        reference = self.new_store()
        for call in self.played:
            if call == "build":
                reference.train("m", dataset="d", backend="linear", epochs=1, seed=SEED, settings={"batch_size": 4})
                continue
            if call == "seal":
                seal(reference.ledger, points.dataset_named(reference.ledger, "d"), reference.clock)
                continue
            slices, x, y, owners = call
            stay = [number for number, owner in enumerate(owners) if owner is not None]
            kept = [owners[number] for number in stay]
            reference.ingest("d", x[stay], user=kept, label=y[stay], shards=2, slices=slices)
        here, there = digests(self.store), digests(reference)
        assert here.items() <= there.items()
        (model,) = self.store.status().models
        if all(prefix == model.slices for prefix in model.prefixes):
            assert here.keys() == there.keys()
        reference.close()
        shutil.rmtree(reference.folder)


def digests(store: Any) -> dict[tuple[int, int], str]:
    return {(c.shard, c.slice): c.tensors for c in store.checkpoints("m")}


Sequences.TestCase.settings = settings(
    max_examples=15,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestSequences = Sequences.TestCase
