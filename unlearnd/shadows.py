"""Ask whether a model still gives away rows that were erased: membership inference on one's own model.

The store no longer has what was erased, so the rows come from whoever asks, and so do rows like them that were never
given to the store. Shadow models are trained as the model was, on the store's live rows, anew each: other seeds, other
shards and slices. They live in memory and die with it: nothing is written, no lease is taken. If the erased rows are
forgotten, nothing tells them from the others. Whether the attack could tell at all is seen on rows that the model does
learn from, which the shadow models go without.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.aggregation import mean
from unlearnd.build import GROUP_SHARDS, check_backend
from unlearnd.digests import derive_seed
from unlearnd.errors import BackendError, InputError, UnlearndError
from unlearnd.features import Sight
from unlearnd.hookspecs import Backend, Job, Points, State
from unlearnd.ledger import Ledger, models, points
from unlearnd.ledger.models import Model
from unlearnd.membership import Attack, Estimate, Floats, distances, log_odds, tell_apart
from unlearnd.placement import numbers_of_points
from unlearnd.plugins import Plugins
from unlearnd.recipes import epochs_at, step_seed
from unlearnd.serving import ServedModel
from unlearnd.slices import read_slices
from unlearnd.storage import Storage

FEWEST_ROWS, FEWEST_SHADOWS = 10, 2
FALSE_ALARM = 0.005
"""How seldom a store that forgot everything fails the test, by chance."""
_MOST_CONTROLS = 0.25
_SAME = b"unlearnd/membership/v1"


@dataclass(frozen=True)
class Labelled:
    """Rows somebody brings along, as the model takes them, and their right class indices."""

    x: NDArray[Any]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class MembershipReport:
    """What a membership inference attack finds out about a model."""

    model: str
    shadows: int
    erased: Attack
    """Erased rows against rows never given."""
    learned: Attack
    """Rows that the model does learn from against rows never given: what the attack can do here."""
    copies: int
    """How many rows given as erased have an equal among the live ones, with the same label."""

    @property
    def failed(self) -> bool:
        """Whether erased rows can be told from rows never given."""
        return self.erased.chance <= FALSE_ALARM

    @property
    def has_power(self) -> bool:
        """Whether the attack can tell the rows that are learned from: else it says little about the erased."""
        return self.learned.chance <= FALSE_ALARM

    @property
    def exit_code(self) -> int:
        """0, or 3 when the erased rows can be told from rows never given."""
        return 3 if self.failed else 0

    def as_json(self) -> dict[str, Any]:
        """Return the report for a script."""
        return {
            "model": self.model,
            "shadows": self.shadows,
            "failed": self.failed,
            "hasPower": self.has_power,
            "copies": self.copies,
            "erased": asdict(self.erased),
            "learned": asdict(self.learned),
        }

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        yield f"Membership inference on model '{self.model}': LiRA, offline, {self.shadows} shadow models."
        yield f"Compared with {self.erased.others:,} rows never given; 95 % intervals in brackets."
        yield ""
        for what, attack in (("erased", self.erased), ("learned from, for comparison", self.learned)):
            yield f"{what} ({attack.members:,} rows)"
            yield f"  AUC                          {_show(attack.auc)}  guessing: 0.500"
            chance = f"by chance below {attack.advantage_by_chance:.3f}"
            yield f"  advantage, TPR - FPR         {_show(attack.advantage)}  {chance}"
            yield f"  TPR at 1 % FPR               {_show(attack.caught)}  guessing: 0.010"
            yield f"  so high an AUC by chance     {attack.chance:.3f}"
        yield ""
        if self.copies:
            yield (
                f"Of the rows given as erased, {self.copies:,} have an equal among the live ones: they were not "
                "erased, or somebody else has the same."
            )
        if self.failed:
            yield "FAILED: the model tells rows given as erased from rows it was never given."
        elif self.has_power:
            yield (
                "The model does not tell the erased rows from rows it was never given, though it does tell those it "
                "learns from."
            )
        else:
            yield (
                "The model does not tell the erased rows from rows it was never given. It does not give away those it "
                "learns from either, so this says little: take more rows, or more shadow models."
            )


def attack_model(
    ledger: Ledger,
    storage: Storage,
    plugins: Plugins,
    served: ServedModel,
    erased: Labelled,
    never: Labelled,
    *,
    shadows: int,
    seed: int,
    device: str,
    on_shadow: Callable[[int], None] = lambda done: None,
) -> MembershipReport:
    """Attack a model as it answers now; change nothing. `on_shadow` is called with 1 for each shadow model trained."""
    model = models.model_in_service(ledger, served.name)
    backend = check_backend(plugins, model)
    check_enough(erased, never, shadows)
    live, copies = _live_rows(ledger, storage, model, erased, never)
    random = np.random.default_rng([seed, 0])
    controls = min(max(len(erased), len(never)), int(_MOST_CONTROLS * len(live)))
    if controls < FEWEST_ROWS:
        raise InputError(
            f"dataset of model '{model.name}' has {len(live):,} live rows beside those given: too few to train shadow "
            f"models on, there should be {int(FEWEST_ROWS / _MOST_CONTROLS)}"
        )
    order = random.permutation(len(live))
    control, rest = order[:controls], order[controls:]
    asked = np.concatenate([erased.x, never.x, live.x[control]])
    right = np.concatenate([erased.y, never.y, live.y[control]])
    attacked = log_odds(served.predict(asked, "mean").scores, right)
    sight = Sight(storage, backend, model.spec, device)
    slices = points.sealed_slices(ledger, model.dataset_id)
    trainer = _Trainer(backend, model, sight, slices, device)
    seen, learned = trainer.see(asked), Labelled(trainer.see(live.x[rest]), live.y[rest])
    found: list[Floats] = []
    for shadow in range(shadows):
        states = trainer.train(learned, derive_seed(seed, "shadow", shadow))
        found.append(log_odds(trainer.answer(states, seen), right))
        on_shadow(1)
    far = distances(attacked, np.array(found))
    ends = np.cumsum([len(erased), len(never)])
    gone, new, known = np.split(far, ends)
    return MembershipReport(model.name, shadows, tell_apart(gone, new, seed), tell_apart(known, new, seed), copies)


def check_enough(erased: Labelled, never: Labelled, shadows: int) -> None:
    """Raise `InputError` unless there is enough to say anything."""
    if shadows < FEWEST_SHADOWS:
        raise InputError(f"there must be at least {FEWEST_SHADOWS} shadow models, not {shadows}")
    for what, rows in (("erased", erased), ("held out", never)):
        if len(rows) < FEWEST_ROWS:
            raise InputError(
                f"{len(rows)} rows {what} are too few to tell: give {FEWEST_ROWS} or more, better hundreds"
            )


def _live_rows(
    ledger: Ledger, storage: Storage, model: Model, erased: Labelled, never: Labelled
) -> tuple[Labelled, int]:
    """Return the live rows that equal none of those given, and how many of the erased have an equal among them."""
    dataset = points.dataset_by_id(ledger, model.dataset_id)
    classes = {label: index for index, label in enumerate(model.spec.classes)}
    class_of = np.array([classes.get(label, -1) for label in dataset.labels], np.int64)
    gone, new = _numbers(erased), _numbers(never)
    given = np.concatenate([gone, new])
    parts, copied = [], np.zeros(len(gone), bool)
    for shard in range(1, model.spec.shards + 1):
        for rows in (rows for slice_ in read_slices(ledger, storage, dataset, shard).values() for rows in slice_):
            here = Labelled(rows.x, class_of[rows.label])
            numbers = _numbers(here)
            copied |= np.isin(gone, numbers)
            fresh = ~np.isin(numbers, given) & (here.y >= 0)
            parts.append(Labelled(here.x[fresh], here.y[fresh]))
    nothing = np.empty((0, *model.spec.shape), model.spec.dtype)
    x = np.concatenate([nothing, *(part.x for part in parts)])
    return Labelled(x, np.concatenate([np.empty(0, np.int64), *(part.y for part in parts)])), int(copied.sum())


def _numbers(rows: Labelled) -> NDArray[np.uint64]:
    """Return a number for each row that equal rows of one class share."""
    return numbers_of_points(rows.x, rows.y.astype(str).tolist(), np.zeros(len(rows), np.uint64), _SAME)


class _Trainer:
    """Trains models like one that exists, in memory."""

    def __init__(self, backend: Backend, model: Model, sight: Sight, slices: int, device: str) -> None:
        self._backend, self._model, self._sight = backend, model, sight
        self._slices, self._device = slices, device

    def see(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return what the backend is to be given for rows."""
        seen: NDArray[Any] = self._ask(self._sight.see, x)
        return seen

    def train(self, rows: Labelled, seed: int) -> list[State]:
        """Return the constituents of a model with that seed, its rows spread over shards and slices at random."""
        spec = self._model.spec
        random = np.random.default_rng(seed)
        shard = random.integers(1, spec.shards + 1, len(rows))
        slice_ = random.integers(1, self._slices + 1, len(rows))
        states: list[State] = []
        together = GROUP_SHARDS if hasattr(self._backend, "train_many") else 1
        for first in range(1, spec.shards + 1, together):
            group = range(first, min(first + together, spec.shards + 1))
            mine = [np.flatnonzero(shard == k) for k in group]
            # Slice after slice, as a build has them.
            ordered = [those[np.argsort(slice_[those], kind="stable")] for those in mine]
            ends = [np.searchsorted(slice_[those], np.arange(self._slices + 1), "right") for those in ordered]
            held = [Points(rows.x[those], rows.y[those]) for those in ordered]
            now = [self._ask(self._sight.initial_state, step_seed(seed, k, 0)) for k in group]
            states += self._train_group(group, held, ends, now, seed)
        return states

    def _train_group(
        self,
        group: Sequence[int],
        held: Sequence[Points],
        ends: Sequence[NDArray[np.int64]],
        now: list[State],
        seed: int,
    ) -> list[State]:
        spec = self._model.spec
        for step in range(1, self._slices + 1) if self._model.sliceable else (self._slices,):
            epochs = epochs_at(spec, step) if self._model.sliceable else spec.epochs
            jobs = {}
            for place, k in enumerate(group):
                end = int(ends[place][step])
                fresh = end > ends[place][step - 1] if self._model.sliceable else end
                if fresh:
                    rows = Points(held[place].x[:end], held[place].y[:end])
                    jobs[place] = Job(now[place], rows, epochs, step_seed(seed, k, step))
            for place, state in zip(jobs, self._carry_out(list(jobs.values())), strict=True):
                now[place] = state
        return now

    def _carry_out(self, jobs: Sequence[Job]) -> list[State]:
        settings, device = self._model.spec.settings, self._device
        many = getattr(self._backend, "train_many", None)
        if many is not None and len(jobs) > 1:
            trained: list[State] = self._ask(many, settings, jobs, device, _pass_on)
            return trained
        return [self._ask(self._backend.train, settings, job, device, _pass_on) for job in jobs]

    def answer(self, states: Sequence[State], seen: NDArray[Any]) -> Floats:
        """Return the mean of the constituents' probabilities."""
        predictor = self._ask(self._backend.predictor, self._model.spec.settings, states, self._device)
        return mean(self._ask(predictor, seen), np.ones(len(states)))[1]

    def _ask(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except UnlearndError:
            raise
        except Exception as error:
            raise BackendError(
                f"backend '{self._backend.name}' failed at a shadow of model '{self._model.name}': "
                f"{type(error).__name__}: {error}"
            ) from error


def _pass_on(samples: int) -> None:
    """Nobody counts samples here."""


def _show(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
