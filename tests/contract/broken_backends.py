"""A backend that keeps the contract, and for each rule one that breaks it and no other.

Softmax regression with momentum, scaled inputs and `train_many`: just enough for every rule to have something to be
about. `tests/test_contract.py` runs the contract on each class here and compares what fails with its `breaks`.
"""

import hashlib
from contextlib import suppress

import numpy as np

from unlearnd import hookimpl
from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.recipes import samples_at

DEFAULTS = {"lr": 0.1, "momentum": 0.9, "batch_size": 8}
EVERYBODYS: dict[str, np.ndarray] = {}


class Good:
    """Keeps every rule; the rest of this file spoils one method each."""

    name, version, sliceable, deterministic = "good", "1", True, True
    breaks: tuple[str, ...] = ()

    def settings(self, given):
        for name, value in given.items():
            if name not in DEFAULTS:
                raise InputError(f"no setting '{name}'")
            if not isinstance(value, int | float):
                raise InputError(f"setting '{name}' must be a number")
        return {**DEFAULTS, **given}

    def initial_state(self, settings, shape, classes, seed):
        width = int(np.prod(shape))
        random = np.random.default_rng(seed)
        return {
            "weight": random.normal(size=(width, classes), scale=0.1).astype(np.float32),
            "velocity": np.zeros((width, classes), np.float32),
            "mean": np.zeros(width, np.float32),
            "scale": np.ones(width, np.float32),
            "steps": np.zeros((), np.int64),
        }

    def train(self, settings, job, device, on_progress):
        if not len(job.points.y):
            return job.state
        state = {name: np.array(value) for name, value in job.state.items()}
        if not state["steps"]:
            state["mean"], state["scale"] = self.fit(job)
        for epoch, take in enumerate(self.takes(job)):
            order = self.order(job, epoch)[:take]
            for at in range(0, take, settings["batch_size"]):
                batch = order[at : at + settings["batch_size"]]
                self.step(settings, state, job.points, batch)
                self.tell(on_progress, len(batch), state)
        state["steps"] = state["steps"] + np.int64(1)
        return state

    def takes(self, job):
        n = len(job.points.y)
        left = samples_at(job.epochs, n)
        return [min(n, left - at) for at in range(0, left, n)]

    def fit(self, job):
        flat = job.points.x.reshape(len(job.points.y), -1).astype(np.float64)
        spread = self.spread(flat)
        return flat.mean(axis=0).astype(np.float32), np.where(spread > 0, spread, 1).astype(np.float32)

    def spread(self, flat):
        return flat.std(axis=0)

    def order(self, job, epoch):
        return np.random.default_rng(derive_seed(job.seed, epoch)).permutation(len(job.points.y))

    def step(self, settings, state, points, batch):
        x = (points.x[batch].reshape(len(batch), -1) - state["mean"]) / state["scale"]
        error = softmax(np.einsum("ni,ic->nc", x, state["weight"]))
        error[np.arange(len(batch)), points.y[batch]] -= 1
        state["velocity"] = settings["momentum"] * state["velocity"] + np.einsum("ni,nc->ic", x, error) / len(batch)
        state["velocity"] = state["velocity"].astype(np.float32)
        state["weight"] = state["weight"] - np.float32(settings["lr"]) * state["velocity"]

    def tell(self, on_progress, count, state):
        on_progress(count)

    def train_many(self, settings, jobs, device, on_progress):
        return [self.train(settings, job, device, on_progress) for job in jobs]

    def predictor(self, settings, states, device):
        def answer(x):
            flat = x.reshape(len(x), len(states[0]["mean"]))
            logits = [np.einsum("ni,ic->nc", (flat - s["mean"]) / s["scale"], s["weight"]) for s in states]
            return np.stack([softmax(one) for one in logits]).astype(np.float32)

        return answer

    def environment(self, device):
        if device not in ("auto", "cpu"):
            raise InputError(f"no device '{device}'")
        return {"numpy": np.__version__}


def softmax(logits):
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def name_of(state):
    return hashlib.sha256(np.asarray(state["weight"]).tobytes()).hexdigest()


class GoodWhole(Good):
    """Cannot go on from a state, says so, and begins anew each time."""

    sliceable = False


class GoodGuess(Good):
    """Draws from the process's generator, and does not call itself deterministic."""

    deterministic = False

    def order(self, job, epoch):
        return np.random.permutation(len(job.points.y))


class GoodOnFeatures(Good):
    """Learns from what a frozen base makes of points."""

    def features_key(self, settings):
        return "squared"

    def features(self, settings, base, x, device):
        return np.square(x, dtype=np.float32)

    def initial_state_on(self, settings, base, shape, classes, seed):
        return self.initial_state(settings, shape, classes, seed)


class NearlyTrue(Good):
    breaks = ("test_it_has_every_member_of_a_backend",)
    sliceable = 1


class TupleInSettings(Good):
    breaks = ("test_settings_are_json_with_every_default_filled_in",)

    def settings(self, given):
        rest = dict(given)
        if list(rest.pop("range", [0, 1])) != [0, 1]:
            raise InputError("setting 'range' must be [0, 1]")
        return {**super().settings(rest), "range": (0, 1)}


class IgnoresWhatItDoesNotKnow(Good):
    breaks = ("test_an_unknown_setting_is_refused_by_name",)

    def settings(self, given):
        return super().settings({name: value for name, value in given.items() if name in DEFAULTS})


class RaisesWhateverComes(Good):
    breaks = ("test_a_wrong_value_is_refused_by_name",)

    def settings(self, given):
        super().settings(dict.fromkeys(given, 0))
        return {**DEFAULTS, **{name: type(DEFAULTS[name])(value) for name, value in given.items()}}


class TakesAnyDevice(Good):
    breaks = ("test_the_environment_is_told_and_an_absent_device_refused",)

    def environment(self, device):
        return {"numpy": np.__version__}


class NumberInState(Good):
    breaks = ("test_a_state_survives_safetensors",)

    def initial_state(self, settings, shape, classes, seed):
        return {**super().initial_state(settings, shape, classes, seed), "steps": 0}


class WritesToWhatItIsGiven(Good):
    breaks = ("test_training_leaves_what_it_is_given_alone",)

    def train(self, settings, job, device, on_progress):
        after = super().train(settings, job, device, on_progress)
        if not job.state["steps"]:
            job.state["mean"][...] = after["mean"]
        return after


class OneSeedForAll(Good):
    breaks = ("test_the_seed_decides_what_is_drawn",)

    def order(self, job, epoch):
        return np.random.default_rng(epoch).permutation(len(job.points.y))


class LooksAtAddresses(Good):
    breaks = ("test_where_points_lie_in_memory_changes_nothing",)

    def order(self, job, epoch):
        order = super().order(job, epoch)
        return order[::-1] if job.points.x.ctypes.data % 16 else order


class FirstComesFirst(Good):
    """Whoever trains first leaves its seed to everybody else's beginnings."""

    breaks = ("test_constituents_share_nothing",)
    first = None

    def order(self, job, epoch):
        if job.state["steps"]:
            return super().order(job, epoch)
        self.first = self.first or job.seed
        drawn = np.random.default_rng(derive_seed(self.first, job.seed, epoch))
        return drawn.permutation(len(job.points.y))


class OddOneOut(Good):
    breaks = ("test_several_at_once_train_the_same_bits_as_one_by_one",)

    def train_many(self, settings, jobs, device, on_progress):
        trained = super().train_many(settings, jobs, device, on_progress)
        if len(jobs) % 2:
            trained[-1] = {**trained[-1], "weight": trained[-1]["weight"] * np.float32(1 + 1e-6)}
        return trained


class TellsTotals(Good):
    breaks = ("test_progress_adds_up_to_what_was_trained",)

    def train(self, settings, job, device, on_progress):
        told = 0

        def total(count):
            nonlocal told
            told += count
            on_progress(told)

        return super().train(settings, job, device, total)

    def train_many(self, settings, jobs, device, on_progress):
        return [super(TellsTotals, self).train(settings, job, device, on_progress) for job in jobs]


class CannotBeStopped(Good):
    breaks = ("test_progress_may_stop_the_training",)

    def tell(self, on_progress, count, state):
        with suppress(Exception):
            on_progress(count)


class LosesAnAxis(Good):
    breaks = ("test_answers_are_probabilities_of_the_right_shape",)

    def predictor(self, settings, states, device):
        answer = super().predictor(settings, states, device)
        return lambda x: answer(x).squeeze() if len(x) == 1 else answer(x)


class CountsNothing(Good):
    breaks = ("test_a_step_without_points_passes_the_state_on",)

    def train(self, settings, job, device, on_progress):
        after = super().train(settings, job, device, on_progress)
        return after if len(job.points.y) else {**after, "steps": after["steps"] + np.int64(1)}


class DividesByZero(Good):
    breaks = ("test_one_point_trains",)

    def spread(self, flat):
        with np.errstate(all="ignore"):
            spread = np.square(flat - flat.mean(axis=0)).sum(axis=0) / (len(flat) - 1)
        return np.where(np.isnan(spread), np.inf, np.sqrt(spread))


class WantsTwoClasses(Good):
    breaks = ("test_points_of_one_class_train",)

    def fit(self, job):
        if len(job.points.y) > 1 and len(np.unique(job.points.y)) == 1:
            raise ValueError("the number of classes has to be greater than one")
        return super().fit(job)


class DropsSmallBatches(Good):
    breaks = ("test_fewer_points_than_a_batch_train",)

    def step(self, settings, state, points, batch):
        if len(points.y) >= settings["batch_size"]:
            super().step(settings, state, points, batch)


class KeepsMomentumToItself(Good):
    breaks = ("test_a_build_goes_on_after_a_stop_at_each_slice",)

    def __init__(self):
        self.memory = {}

    def train(self, settings, job, device, on_progress):
        velocity = self.memory.get(name_of(job.state), job.state["velocity"])
        state = {**job.state, "velocity": velocity}
        after = super().train(settings, type(job)(state, job.points, job.epochs, job.seed), device, on_progress)
        if not len(job.points.y):
            return job.state
        self.memory[name_of(after)] = after["velocity"]
        return {**after, "velocity": np.zeros_like(velocity)}


class KeepsMomentumInTheProcess(KeepsMomentumToItself):
    """The same, where no new instance helps: only another process tells."""

    name = "in-the-process"
    breaks = ("test_a_build_goes_on_after_a_kill_at_each_slice",)

    def __init__(self):
        pass

    @property
    def memory(self):
        return EVERYBODYS


class CachesByTheWrongName(Good):
    """A statistic kept under the step's seed, which an erasure does not change."""

    breaks = ("test_erasing_gives_the_bits_of_a_store_that_never_met_them",)

    def __init__(self):
        self.fitted = {}

    def fit(self, job):
        if job.seed not in self.fitted:
            self.fitted[job.seed] = super().fit(job)
        return self.fitted[job.seed]


class LooksAtOneDifferently(GoodOnFeatures):
    """A point alone goes another way through the base, as a product of a matrix and a vector does in BLAS."""

    breaks = ("test_features_depend_on_the_point_alone",)

    def features(self, settings, base, x, device):
        seen = super().features(settings, base, x, device)
        return np.nextafter(seen, np.float32(9)) if len(x) == 1 else seen


class DrawsFromTheProcess(Good):
    """Broken so much that most comparisons fail."""

    breaks = (
        "test_a_state_survives_safetensors",
        "test_the_seed_decides_what_is_drawn",
        "test_where_points_lie_in_memory_changes_nothing",
        "test_constituents_share_nothing",
        "test_several_at_once_train_the_same_bits_as_one_by_one",
        "test_a_build_goes_on_after_a_stop_at_each_slice",
        "test_erasing_gives_the_bits_of_a_store_that_never_met_them",
    )
    order = GoodGuess.order


@hookimpl
def register_backends(register):
    register(KeepsMomentumInTheProcess())
