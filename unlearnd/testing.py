"""The contract that every backend must keep, as tests that a plugin's author runs.

Subclass `BackendContract`, supply one fixture, and pytest does the rest:

    from unlearnd.testing import BackendContract

    class TestMine(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend()

Nothing here looks inside a backend. It is given points, states and seeds as a build gives them, and real stores
train, are stopped, are killed and erase with it. What a backend does not claim (`sliceable`, `deterministic`,
`train_many`, features of a base) is not asked of it. A failure says what to mend. This module alone needs pytest:
`unlearnd[testing]`.
"""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors

from unlearnd import steps
from unlearnd.checkpoints import encode_state
from unlearnd.errors import InputError
from unlearnd.hookspecs import Backend, FeatureBackend, Job, OnProgress, Points, Settings, State
from unlearnd.plugins import load_plugins
from unlearnd.recipes import samples_at
from unlearnd.store import Store

T = TypeVar("T")

SHARDS, SLICES, USERS, ROWS = 2, 3, 30, 90
_EPOCHS = Fraction(3, 2)
_SEED = 20210523
# Fixed, so that everybody is in the same slice on every machine and no slice is empty by chance.
_PLACEMENT_KEY = "5eed" * 16

_BUILD_AND_DIE = """
import os, signal, sys
from unlearnd import open_store, steps

def die(step):
    if step is steps.Step.BUILD_ENTERED:
        os.kill(os.getpid(), signal.SIGKILL)

steps.watcher = die
with open_store(sys.argv[1]) as store:
    store.build(device=sys.argv[2])
"""


def devices_here() -> tuple[str, ...]:
    """Return the kinds of device that this machine may have; whether a backend can use one, it says itself."""
    cuda = any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/dxg"))
    apple = sys.platform == "darwin" and os.uname().machine == "arm64"
    return ("cpu", *(["cuda"] if cuda else []), *(["mps"] if apple else []))


@dataclass(frozen=True)
class Trial:
    """A backend with settings, data to try it on, and a folder for stores."""

    backend: Backend
    fresh: Callable[[], Backend]
    given: Mapping[str, object]
    settings: Settings
    shape: tuple[int, ...]
    classes: int
    dtype: str
    device: str
    folder: Path

    def again(self) -> "Trial":
        """Return the same trial with a backend that has not done anything yet."""
        return replace(self, backend=self.fresh())

    def points(self, n: int, draw: int = 1) -> Points:
        """Return `n` points that can be learned from, the same for the same `draw`."""
        random = np.random.Generator(np.random.PCG64(draw))
        x = random.standard_normal((n, *self.shape))
        rule = np.random.Generator(np.random.PCG64(0)).standard_normal((x[:1].size or 1, self.classes))
        y = (x.reshape(n, len(rule)) @ rule).argmax(axis=1)
        # Whatever the draw, every class is there if there is room for it.
        y[: self.classes] = np.arange(self.classes)[:n]
        if self.dtype == "uint8":
            x = (x * 40 + 120).clip(0, 255)
        return Points(np.ascontiguousarray(x, self.dtype), y.astype(np.int64))

    def start(self, seed: int = 11) -> State:
        """Return an initial state."""
        return _ask(
            "initial_state", self.backend.initial_state, self.settings, self.shape, self.classes, _fixed_seed(seed)
        )

    def job(self, state: State, points: Points, seed: int = 21, epochs: Fraction = _EPOCHS) -> Job:
        """Return a step to train."""
        return Job(state, points, epochs, _fixed_seed(seed))

    def train(self, job: Job, on_progress: OnProgress = lambda samples: None) -> State:
        """Return the state after a job."""
        what = f"train on {len(job.points.y)} points"
        return _ask(what, self.backend.train, self.settings, job, self.device, on_progress)

    def answer(self, states: Sequence[State], x: NDArray[Any]) -> NDArray[Any]:
        """Return what constituents answer for some rows."""
        ready = _ask("predictor", self.backend.predictor, self.settings, states, self.device)
        return _ask(f"the predictor on {len(x)} rows", ready, x)

    @contextmanager
    def store(self, name: str, shards: int, without: Sequence[str] = ()) -> Iterator[Store]:
        """Make a store of everybody but some, with the model `m` declared on it, and open it with this backend."""
        key = self.folder / "placement.key"
        key.write_text(_PLACEMENT_KEY + "\n")
        points, users = self.points(ROWS, draw=5), np.array([f"u{row % USERS}" for row in range(ROWS)])
        keep = ~np.isin(users, list(without))
        with Store.create(self.folder / name, placement_key=key) as store:
            _plug_in(store, self.backend)
            store.ingest(
                "d",
                points.x[keep],
                user=users[keep],
                label=points.y[keep],
                classes=self.classes,
                shards=shards,
                slices=SLICES,
            )
            store.declare(
                "m", dataset="d", backend=self.backend.name, epochs=_EPOCHS, seed=_SEED, settings=dict(self.given)
            )
            yield store

    @contextmanager
    def reopened(self, name: str) -> Iterator[Store]:
        """Open a store again with this backend."""
        with Store.open(self.folder / name) as store:
            _plug_in(store, self.backend)
            yield store

    @property
    def shards_to_stop(self) -> int:
        """How many shards to have for a checkpoint to stop after: a shard trained whole has only one."""
        return 1 if self.backend.sliceable else SHARDS


class BackendContract:
    """Tests that a backend keeps its promises. Subclass it, name the subclass `Test…`, define `backend`."""

    draws = True
    """Whether training draws anything at random: an order, a sample, a mask. Set it to False where it does not."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Return a new backend: the one fixture that has to be supplied."""
        _fail("define a fixture `backend` in the subclass that returns a new instance of your backend")

    @pytest.fixture
    def settings(self) -> Mapping[str, object]:
        """Return what a person would set: small widths and batches keep the tests quick."""
        return {}

    @pytest.fixture
    def wrong_settings(self, backend: Backend, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Return a value for each setting that it cannot have."""
        return {name: {"no": ["such", "value"]} for name in backend.settings(settings)}

    @pytest.fixture
    def feature_settings(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Return settings with which a backend that can trains on what a frozen base makes of points."""
        return settings

    @pytest.fixture
    def base(self) -> State | None:
        """Return the tensors of the base that `feature_settings` name; None where features need none."""
        return None

    @pytest.fixture
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one point's features."""
        return (6,)

    @pytest.fixture
    def classes(self) -> int:
        """Return how many classes there are; at least 2."""
        return 3

    @pytest.fixture
    def dtype(self) -> str:
        """Return the type of features: `float32` or `uint8`."""
        return "float32"

    @pytest.fixture(params=devices_here())
    def device(self, request: pytest.FixtureRequest, backend: Backend) -> str:
        """Return where to train: one after the other, every device that is here and that the backend can use."""
        name = str(request.param)
        try:
            backend.environment(name)
        except InputError as error:
            pytest.skip(f"backend '{backend.name}' cannot use '{name}' here: {error}")
        return name

    @pytest.fixture
    def fresh(self, backend: Backend) -> Callable[[], Backend]:
        """Return a function that makes a backend which has not done anything yet: a copy, unless overridden."""
        untouched = copy.deepcopy(backend)
        return lambda: copy.deepcopy(untouched)

    @pytest.fixture
    def trial(
        self,
        backend: Backend,
        fresh: Callable[[], Backend],
        settings: Mapping[str, object],
        shape: tuple[int, ...],
        classes: int,
        dtype: str,
        device: str,
        tmp_path: Path,
    ) -> Trial:
        """Put together what a test needs."""
        # As a build gets them: through JSON.
        checked = json.loads(json.dumps(_ask("settings", backend.settings, settings)))
        return Trial(backend, fresh, settings, checked, shape, classes, dtype, device, tmp_path)

    # What it is

    def test_it_has_every_member_of_a_backend(self, backend: Backend) -> None:
        """Members as the protocol `unlearnd.Backend` has them, of the right types."""
        _check(
            isinstance(backend, Backend),
            f"{type(backend).__name__} lacks a member of the protocol `unlearnd.Backend`: it needs name, version, "
            "sliceable, deterministic, settings, initial_state, train, predictor and environment",
        )
        for member in ("name", "version"):
            value = getattr(backend, member)
            _check(
                isinstance(value, str) and bool(value), f"`{member}` must be text and not empty, it is {_shown(value)}"
            )
        for member in ("sliceable", "deterministic"):
            value = getattr(backend, member)
            _check(value is True or value is False, f"`{member}` must be True or False, it is {_shown(value)}")

    def test_settings_are_json_with_every_default_filled_in(
        self, backend: Backend, settings: Mapping[str, object]
    ) -> None:
        """What `settings` returns is what goes into recipes: JSON values that mean the same when given again."""
        filled = _ask("settings", backend.settings, settings)
        try:
            read = json.loads(json.dumps(dict(filled), allow_nan=False))
        except (TypeError, ValueError) as error:
            _fail(f"`settings` must return JSON values only: {error}")
        _check(
            _plain(filled) == _plain(read),
            f"`settings` returns {_shown(dict(filled))}, which comes back from JSON as {_shown(read)}: return lists "
            "instead of tuples and plain numbers instead of numpy's, or recipes and settings disagree",
        )
        again = _ask("settings", backend.settings, read)
        _check(
            _plain(again) == _plain(read),
            f"`settings` makes {_shown(dict(again))} of its own answer {_shown(read)}: fill in every default at once, "
            "so that two spellings of the same settings come out equal",
        )

    def test_an_unknown_setting_is_refused_by_name(self, backend: Backend, settings: Mapping[str, object]) -> None:
        """A misspelt setting is not ignored."""
        _check_refusal(backend, {**settings, "no_such_setting": 1}, "no_such_setting")

    def test_a_wrong_value_is_refused_by_name(
        self, backend: Backend, settings: Mapping[str, object], wrong_settings: Mapping[str, object]
    ) -> None:
        """Each setting says so when it cannot use a value."""
        if not wrong_settings:
            pytest.skip(f"backend '{backend.name}' has no settings")
        for name, value in wrong_settings.items():
            _check_refusal(backend, {**settings, name: value}, name)

    def test_the_environment_is_told_and_an_absent_device_refused(self, backend: Backend, device: str) -> None:
        """A replay knows what to reproduce, and a device that is not there is said before anything is trained."""
        told = _ask("environment", backend.environment, device)
        _check(
            bool(told) and all(isinstance(part, str) for item in told.items() for part in item),
            f"`environment` must name what changes bits (library versions, device, …) as text by name, not {told!r}",
        )
        try:
            backend.environment("no-such-device")
        except InputError:
            return
        except Exception as error:
            _fail(f"`environment` must raise InputError for a device that is not there; it raised {_said(error)}")
        _fail("`environment` must raise InputError for a device that is not there; it took 'no-such-device'")

    # What a state is

    def test_a_state_survives_safetensors(self, trial: Trial) -> None:
        """All that a constituent is lies in its arrays: read back from a file, it goes on and answers the same."""
        start = trial.start()
        first = trial.train(trial.job(start, trial.points(20)))
        for what, state in (("initial_state", start), ("train", first)):
            for name, value in state.items():
                _check(
                    (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biuf",
                    f"`{what}` returns {_shown(value)} as '{name}': a state holds numpy arrays of numbers and "
                    "nothing else, because it is saved as safetensors",
                )
        read = _through_file(first)
        _check_same(first, read, "a state read back from safetensors is another one")
        x = trial.points(7, draw=3).x
        _check(
            np.allclose(trial.answer([first], x), trial.answer([read], x), atol=1e-6),
            "a state read back from safetensors answers differently: something that answers need is not in its arrays",
        )
        before = (first, read) if trial.backend.sliceable else (start, _through_file(start))
        one, two = (trial.train(trial.job(state, trial.points(48), seed=22)) for state in before)
        if trial.backend.deterministic:
            _check_same(
                one, two, "training on from a state read back from safetensors ends elsewhere: put it all into arrays"
            )

    def test_training_leaves_what_it_is_given_alone(self, trial: Trial) -> None:
        """States and points belong to the build, which saves and trains on with them meanwhile."""
        state, points = trial.start(), trial.points(20)
        for seed in (21, 22):
            kept = {name: value.copy() for name, value in _arrays(state).items()}
            x, y = points.x.copy(), points.y.copy()
            after = trial.train(trial.job(state, points, seed))
            _check_same(kept, state, "`train` writes to the state it is given: copy arrays before changing them")
            _check(
                np.array_equal(x, points.x) and np.array_equal(y, points.y),
                "`train` writes to the points it is given: they are trained on again in the next slice; copy them",
            )
            if not trial.backend.sliceable:
                break
            state = after

    # Where its bits come from

    def test_the_seed_decides_what_is_drawn(self, trial: Trial) -> None:
        """Equal seeds give equal bits, whatever was drawn before; another seed draws something else."""
        self._only_if_deterministic(trial)
        _check_same(
            trial.start(),
            trial.start(),
            "`initial_state` gives other bits for the same seed: draw from a generator made from `seed` alone",
        )
        start, points = trial.start(), trial.points(48)
        one, same, other = (trial.train(trial.job(start, points, seed)) for seed in (21, 21, 22))
        _check_same(
            one, same, "`train` gives other bits for the same job: draw from generators made from `job.seed` alone"
        )
        if self.draws:
            _check(
                _bytes_of(one) != _bytes_of(other),
                "`train` gives the same bits for two seeds: derive every random stream from `job.seed`, or every step "
                "of every constituent draws the same. (If 48 points are one batch, set a smaller one in the fixture "
                "`settings`; if training draws nothing, set `draws = False` on your test class.)",
            )

    def test_where_points_lie_in_memory_changes_nothing(self, trial: Trial) -> None:
        """Arrays begin at any address in the next process; the bits may not depend on it."""
        self._only_if_deterministic(trial)
        state, points = trial.train(trial.job(trial.start(), trial.points(20))), trial.points(48)
        if not trial.backend.sliceable:
            state = trial.start()
        results = []
        for by in (0, 4, 8, 24):
            moved = Points(_moved(points.x, by), _moved(points.y, 8 * (by > 0)))
            at = {name: _moved(value, value.itemsize * (by > 0)) for name, value in _arrays(state).items()}
            results.append(trial.train(trial.job(at, moved, 22)))
        for result in results[1:]:
            _check_same(
                results[0],
                result,
                "training gives other bits when arrays begin at another address: matrix products of BLAS do that; "
                "copy into memory of your own that begins on a 64-byte boundary, or sum without BLAS",
            )

    def test_constituents_share_nothing(self, trial: Trial) -> None:
        """Two constituents trained in two orders, each order by a new backend, come out the same."""
        self._only_if_deterministic(trial)
        given = [(trial.points(26, draw), trial.points(44, draw)) for draw in (1, 2)]
        orders = ((0, 0, 1, 1), (1, 0, 1, 0)) if trial.backend.sliceable else ((0, 1), (1, 0))
        ends = []
        for order in orders:
            one = trial.again()
            states, step = [one.start(100), one.start(200)], [0, 0]
            for who in order:
                job = one.job(states[who], given[who][step[who]], seed=100 * who + step[who] + 1)
                states[who], step[who] = one.train(job), step[who] + 1
            ends.append(states)
        for first, second in zip(*ends, strict=True):
            _check_same(
                first,
                second,
                "what a constituent becomes depends on what was trained before it: keep nothing on the backend, in a "
                "module or in a global generator that training reads; whatever has to be kept belongs into the state",
            )

    def test_several_at_once_train_the_same_bits_as_one_by_one(self, trial: Trial) -> None:
        """`train_many`, where there is one, is only a faster way to the same states."""
        many: Callable[..., list[State]] | None = getattr(trial.backend, "train_many", None)
        if many is None:
            pytest.skip(f"backend '{trial.backend.name}' has no `train_many`: constituents are trained one by one")
        jobs = [trial.job(trial.start(seed), trial.points(n, seed), seed) for n, seed in ((48, 31), (31, 32), (17, 33))]
        said: list[int] = []
        together = _ask("train_many", many, trial.settings, jobs, trial.device, said.append)
        _check(
            len(together) == len(jobs),
            f"`train_many` returns {len(together)} states for {len(jobs)} jobs: return one for each, in their order",
        )
        _check_progress("train_many", said, sum(samples_at(job.epochs, len(job.points.y)) for job in jobs))
        if not trial.backend.deterministic:
            return
        for job, state in zip(jobs, together, strict=True):
            _check_same(
                trial.train(job),
                state,
                "`train_many` gives other bits than `train`: after an erasure a constituent is trained alone, or in "
                "other company, and must come out the same; leave `train_many` out if that cannot be had",
            )

    # What it tells

    def test_progress_adds_up_to_what_was_trained(self, trial: Trial) -> None:
        """Also when an epoch is a fraction: 1/3 of an epoch of 20 points is 7."""
        for epochs in (Fraction(1, 3), Fraction(1), Fraction(5, 2)):
            said: list[int] = []
            trial.train(trial.job(trial.start(), trial.points(20), epochs=epochs), said.append)
            _check_progress(f"train with {epochs} epochs of 20 points", said, samples_at(epochs, 20))

    def test_progress_may_stop_the_training(self, trial: Trial) -> None:
        """An erasure stops a training by raising from `on_progress`."""

        def stop(samples: int) -> None:
            raise _Stopped

        try:
            trial.backend.train(trial.settings, trial.job(trial.start(), trial.points(20)), trial.device, stop)
        except _Stopped:
            return
        _fail(
            "`train` goes on when `on_progress` raises: let whatever it raises pass, because that is how an erasure "
            "stops a training that stands in its way"
        )

    def test_answers_are_probabilities_of_the_right_shape(self, trial: Trial) -> None:
        """(constituents, n, classes), for any number of rows, and a row's answer does not depend on the others'."""
        states = [trial.train(trial.job(trial.start(s), trial.points(40, s), s)) for s in (41, 42, 43)]
        x = trial.points(5, draw=4).x
        for constituents, rows in ((3, 5), (3, 1), (1, 5), (1, 1), (2, 0)):
            answers = trial.answer(states[:constituents], x[:rows])
            _check_answers(answers, (constituents, rows, trial.classes))
        together = trial.answer(states, x)
        for number, state in enumerate(states):
            _check(
                np.allclose(together[number], trial.answer([state], x)[0], atol=1e-4),
                "constituents answer differently together than alone: answer for each state by itself, in their order",
            )
        _check(
            np.allclose(together[:, :1], trial.answer(states, x[:1]), atol=1e-4),
            "a row is answered differently alone than among others: answers may depend on the row alone",
        )

    def test_features_depend_on_the_point_alone(
        self, trial: Trial, feature_settings: Mapping[str, object], base: State | None
    ) -> None:
        """What a base makes of a point has the same bits alone, among others and in any order, and can be learned."""
        able = trial.backend
        if not isinstance(able, FeatureBackend):
            pytest.skip(f"backend '{trial.backend.name}' trains on points, and on no features of a base")
        given = json.loads(json.dumps(_ask("settings", trial.backend.settings, feature_settings)))
        _check(
            isinstance(_ask("features_key", able.features_key, given), str),
            "`features_key` returns no text for the settings tried: give settings that train on features in the "
            "fixture `feature_settings`, and the tensors of their base in the fixture `base`",
        )

        def see(x: NDArray[Any], backend: FeatureBackend = able) -> NDArray[Any]:
            return _ask(f"features of {len(x)} points", backend.features, given, base, x, trial.device)

        points = trial.points(21, draw=6)
        x = points.x.copy()
        seen = see(points.x)
        _check(np.array_equal(x, points.x), "`features` writes to the points it is given: copy them")
        _check(
            isinstance(seen, np.ndarray) and seen.dtype == np.float32 and len(seen) == len(x) and seen.ndim > 1,
            f"`features` must return one float32 array for each of {len(x)} points, not {_shown(seen)}",
        )
        _check(bool(np.isfinite(seen).all()), "`features` are not finite")
        none = see(x[:0])
        _check(none.shape == (0, *seen.shape[1:]), f"`features` of no points have the shape {none.shape}")
        if trial.backend.deterministic:
            other = trial.fresh()
            assert isinstance(other, FeatureBackend)
            ways = {
                "one at a time": np.concatenate([see(x[row : row + 1]) for row in range(len(x))]),
                "in another order": see(np.ascontiguousarray(x[::-1]))[::-1],
                "a part at a time": np.concatenate([see(x[:5]), see(x[5:])]),
                "at another address": see(_moved(x, 4)),
                "by a new backend": see(x, other),
            }
            for how, again in ways.items():
                _check(
                    again.shape == seen.shape and again.tobytes() == seen.tobytes(),
                    f"`features` have other bits when computed {how}: they are kept beside points, and points around "
                    "them come and go. Look at always as many points together, filled up where there are fewer",
                )
        start = _ask(
            "initial_state_on", able.initial_state_on, given, base, trial.shape, trial.classes, _fixed_seed(61)
        )
        on = replace(trial, settings=given)
        after = on.train(on.job(start, Points(seen, points.y), 62))
        _check(_bytes_of(after) != _bytes_of(start), "training on features changes nothing")
        _check_answers(on.answer([after, start], seen), (2, len(x), trial.classes))

    # Little data

    def test_a_step_without_points_passes_the_state_on(self, trial: Trial) -> None:
        """Nothing to train on is nothing to learn: the state comes back as it was."""
        state = trial.start()
        if trial.backend.sliceable:
            state = trial.train(trial.job(state, trial.points(20)))
        said: list[int] = []
        after = trial.train(trial.job(state, trial.points(0)), said.append)
        _check_same(state, after, "a step without points changes the state: return `job.state` when there are none")
        _check(not sum(said), f"a step without points reports {sum(said)} samples: report none")

    def test_one_point_trains(self, trial: Trial) -> None:
        """A slice may have a single point, and its spread is zero."""
        state = trial.train(trial.job(trial.start(), trial.points(1)))
        _check_sane(trial, state, "one point")
        if trial.backend.sliceable:
            _check_sane(trial, trial.train(trial.job(state, trial.points(20))), "one point and then twenty")

    def test_points_of_one_class_train(self, trial: Trial) -> None:
        """A slice may lack classes; they are declared for the dataset, not counted in the points."""
        points = trial.points(20)
        only = Points(points.x, np.full_like(points.y, trial.classes - 1))
        state = trial.train(trial.job(trial.start(), only))
        _check_sane(trial, state, "points of a single class")
        if trial.backend.sliceable:
            _check_sane(trial, trial.train(trial.job(state, points)), "points of a single class and then of all")

    def test_fewer_points_than_a_batch_train(self, trial: Trial) -> None:
        """The last batch of an epoch may be smaller, and then it may be the only one."""
        points = trial.points(3)
        other = Points(points.x, (points.y + 1) % trial.classes)
        one, two = (trial.train(trial.job(trial.start(), given)) for given in (points, other))
        _check_sane(trial, one, "three points")
        _check(
            _bytes_of(one) != _bytes_of(two),
            "training on three points ends in the same whatever their labels, so it learned nothing from them: train "
            "the last batch of an epoch however small it is",
        )

    # In a store

    def test_a_build_goes_on_after_a_stop_at_each_slice(self, trial: Trial) -> None:
        """Stopped after each checkpoint and gone on with by a new backend, a build ends as if never stopped."""
        with trial.store("calm", trial.shards_to_stop) as calm:
            calm.build(device=trial.device)
            expected = _digests(calm)
        with trial.again().store("stopped", trial.shards_to_stop):
            pass
        done = 0
        while done < len(expected):
            with trial.again().reopened("stopped") as store:
                _stop_after_a_checkpoint(store, trial.device)
                before, done = done, len(_digests(store))
                _check(done > before, f"a build that went on from {before} checkpoints added none")
        with trial.again().reopened("stopped") as store:
            store.build(device=trial.device)
            _check_resumed(trial, expected, _digests(store))

    def test_a_build_goes_on_after_a_kill_at_each_slice(self, trial: Trial) -> None:
        """The same with processes that are really killed, against a backend that has trained other points before."""
        installed = load_plugins().backends.get(trial.backend.name)
        if type(installed) is not type(trial.backend) or installed.version != trial.backend.version:
            pytest.skip(
                f"backend '{trial.backend.name}' is not installed as a plugin in this environment, so that no other "
                "process could load it to be killed"
            )
        if not hasattr(signal, "SIGKILL"):
            pytest.skip("this system has no SIGKILL")
        with trial.store("everybody", trial.shards_to_stop) as everybody:
            everybody.build(device=trial.device)
        with trial.store("calm", trial.shards_to_stop, without=["u3", "u4"]) as calm:
            calm.build(device=trial.device)
            expected = _digests(calm)
        with trial.store("killed", trial.shards_to_stop, without=["u3", "u4"]):
            pass
        done = 0
        while done < len(expected) - 1:
            _build_and_die(trial.folder / "killed", trial.device)
            with trial.reopened("killed") as store:
                before, done = done, len(_digests(store))
                _check(done > before, f"a build that went on from {before} checkpoints added none")
        with trial.reopened("killed") as store:
            store.build(device=trial.device)
            _check_resumed(trial, expected, _digests(store))

    def test_erasing_gives_the_bits_of_a_store_that_never_met_them(self, trial: Trial) -> None:
        """Train, erase, build: every checkpoint is that of a store that was never given the erased."""
        self._only_if_deterministic(trial)
        with trial.store("met", SHARDS) as met:
            met.build(device=trial.device)
            places = {user: met.where_user(user)[0] for user in (f"u{number}" for number in range(USERS))}
            # One of the first slice, where things are fitted; and all of a middle one, so that it is left empty.
            single = next(user for user, place in places.items() if (place.shard, place.slice) == (1, 1))
            users = [single, *(user for user, place in places.items() if (place.shard, place.slice) == (2, 2))]
            before = _digests(met)
            met.erase(users, device=trial.device)
            after = _digests(met)
        with trial.again().store("never", SHARDS, without=users) as never:
            never.build(device=trial.device)
            expected = _digests(never)
        _check(before != after, "erasing users changes no checkpoint: `train` does not learn from the points it gets")
        differ = sorted(place for place in expected if after.get(place) != expected[place])
        _check(
            after == expected,
            f"after an erasure the checkpoints of (shard, slice) {differ} are not those of a store that never met "
            "the erased: something learned from their points outlived them outside the state. Keep no statistics, "
            "caches or vocabularies on the backend, least of all under a name that does not cover the points",
        )

    def _only_if_deterministic(self, trial: Trial) -> None:
        if not trial.backend.deterministic:
            pytest.skip(f"backend '{trial.backend.name}' does not call itself deterministic: its bits are not compared")


class _Stopped(Exception):
    """What a test raises from inside a training."""


class _CutOff(BaseException):
    """Stands in for a process that ends right after a checkpoint."""


def _fail(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


def _check(holds: bool, message: str) -> None:
    if not holds:
        _fail(message)


def _ask(what: str, call: Callable[..., T], *arguments: object) -> T:
    """Call the backend; what it raises is a failure that names the call and keeps the original as its cause."""
    try:
        return call(*arguments)
    except Exception as error:
        raise AssertionError(f"{what} raised {_said(error)}") from error


def _check_refusal(backend: Backend, given: Mapping[str, object], name: str) -> None:
    wanted = f"raise unlearnd.errors.InputError with one line that names the setting '{name}'"
    try:
        backend.settings(given)
    except InputError as error:
        _check(name in str(error), f"`settings` refuses '{name}' without naming it: {error}")
        _check("\n" not in str(error), f"`settings` refuses '{name}' in several lines: {wanted}")
        return
    except Exception as error:
        _fail(f"`settings` must {wanted}; it raised {_said(error)}")
    _fail(f"`settings` takes {name}={_shown(given[name])}: {wanted}")


def _check_progress(what: str, said: Sequence[int], expected: int) -> None:
    _check(bool(said), f"{what} never calls `on_progress`: call it with the samples trained since the last call")
    _check(
        all(isinstance(count, int | np.integer) and count >= 0 for count in said) and sum(said) == expected,
        f"{what} reports {sum(said)} samples, not {expected}: report samples since the last call, not in total; a "
        "partial epoch is the first ⌈fraction·n⌉ points of a fresh permutation",
    )


def _check_answers(answers: object, shape: tuple[int, ...]) -> None:
    _check(isinstance(answers, np.ndarray), f"a predictor must return a numpy array, not {_shown(answers)}")
    assert isinstance(answers, np.ndarray)
    _check(
        answers.shape == shape,
        f"a predictor returns shape {answers.shape} for (constituents, rows, classes) {shape}: keep all three axes, "
        "also where one of them is 1 or 0",
    )
    _check(answers.dtype == np.float32, f"a predictor must return float32, not {answers.dtype}")
    _check(
        bool(np.isfinite(answers).all() and (answers >= 0).all() and np.allclose(answers.sum(axis=2), 1, atol=1e-3)),
        "a predictor must return probabilities: no NaN, none below 0, those of a row summing to 1",
    )


def _check_sane(trial: Trial, state: State, what: str) -> None:
    for name, value in _arrays(state).items():
        _check(
            value.dtype.kind != "f" or bool(np.isfinite(value).all()),
            f"after training on {what}, '{name}' is not finite: guard divisions by a spread or a count of zero",
        )
    _check_answers(trial.answer([state], trial.points(4, draw=6).x), (1, 4, trial.classes))


def _check_same(one: State, other: State, message: str) -> None:
    first, second = _bytes_of(one), _bytes_of(other)
    differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    _check(not differ, f"{message} (differs: {', '.join(differ[:5])}{', …' if len(differ) > 5 else ''})")


def _check_resumed(trial: Trial, expected: Mapping[Any, str], found: Mapping[Any, str]) -> None:
    _check(expected.keys() == found.keys(), f"{len(found)} checkpoints after going on, not {len(expected)}")
    differ = sorted(place for place in expected if found[place] != expected[place])
    _check(
        not differ or not trial.backend.deterministic,
        f"a build that was stopped and gone on with ends in other bits at (shard, slice) {differ}: whatever the next "
        "step needs (momentum, counters, fitted statistics) must be in the state, not kept on the backend",
    )


def _bytes_of(state: State) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in _arrays(state).items()}


def _arrays(state: State) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(value) for name, value in state.items()}


def _through_file(state: State) -> State:
    read: State = load_tensors(b"".join(encode_state(state).pieces))
    return read


def _moved(array: NDArray[Any], by: int) -> NDArray[Any]:
    """Return a copy that begins `by` bytes behind a 64-byte boundary."""
    memory = np.zeros(array.nbytes + 64 + by, np.uint8)
    start = -memory.ctypes.data % 64 + by
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _fixed_seed(number: int) -> int:
    """Return a seed as wide as those a build draws."""
    return (number * 0x9E3779B97F4A7C15) & (2**63 - 1)


def _digests(store: Store) -> dict[tuple[int, int], str]:
    return {(checkpoint.shard, checkpoint.slice): checkpoint.tensors for checkpoint in store.checkpoints("m")}


def _plug_in(store: Store, backend: Backend) -> None:
    """Let a store use a backend, whether it is installed or not."""
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, backend.name: backend})


def _stop_after_a_checkpoint(store: Store, device: str) -> None:
    """Build until one checkpoint is in the ledger, and no further."""

    def stop(step: steps.Step) -> None:
        if step is steps.Step.BUILD_ENTERED:
            raise _CutOff

    before, steps.watcher = steps.watcher, stop
    try:
        store.build(device=device)
    except _CutOff:
        pass
    finally:
        steps.watcher = before


def _build_and_die(folder: Path, device: str) -> None:
    """Build in another process, which kills itself when its first checkpoint is in the ledger."""
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ended = subprocess.run(
        [sys.executable, "-c", _BUILD_AND_DIE, str(folder), device],
        env={**os.environ, **one_thread},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    _check(
        ended.returncode == -signal.SIGKILL,
        f"a build in a process of its own ended with {ended.returncode} before its first checkpoint: "
        f"{ended.stderr.strip()[-2000:]}",
    )


def _plain(settings: Mapping[str, Any]) -> str:
    """Return settings with their types told apart: True is not 1, and a tuple is not a list."""
    return repr(sorted(settings.items()))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
