"""The backends as the core sees them: names, versions, and methods that load scikit-learn when they are called.

Nothing here trains: `sgd` and `forest` do, and `settings` checks what was given.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, OnProgress, Predictor, Settings

if TYPE_CHECKING:
    from unlearnd.hookspecs import State


class SgdBackend:
    """Linear models by stochastic gradient descent: scikit-learn's `SGDClassifier`, step by step."""

    name = "sgd"
    version = "1"
    sliceable = True
    deterministic = True

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what was set and fill in the defaults; raise `InputError` naming the setting."""
        from unlearnd_sklearn.settings import SgdSettings, check_settings  # heavy: pydantic

        return check_settings(self.name, SgdSettings, given)

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return zero weights: the problem is convex, nothing is gained by a random start."""
        from unlearnd_sklearn import sgd  # heavy: numpy

        return sgd.zero_state(shape, classes)

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state` and return the state after the slice."""
        from unlearnd_sklearn import sgd  # heavy: scikit-learn
        from unlearnd_sklearn.settings import SgdSettings  # heavy: pydantic

        return sgd.train(SgdSettings.model_validate(dict(settings)), job, on_progress)

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Stack constituents once, to answer many times."""
        from unlearnd_sklearn import sgd  # heavy: numpy

        self.environment(device)
        return sgd.LinearPredictor(str(settings["loss"]), states)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here; raise for a device there is not."""
        return _fingerprint(self.name, device)


class ForestBackend:
    """A random forest or gradient boosting. Trees cannot go on from a state: a shard is trained whole."""

    name = "forest"
    version = "1"
    sliceable = False
    deterministic = True

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what was set and fill in the defaults; raise `InputError` naming the setting."""
        from unlearnd_sklearn.settings import ForestSettings, check_settings  # heavy: pydantic

        return check_settings(self.name, ForestSettings, given)

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return a forest without trees, to which all classes are alike."""
        from unlearnd_sklearn import forest  # heavy: numpy

        return forest.no_trees(classes)

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Grow a forest on `job.points`; of `job.state` only the number of classes is used."""
        from unlearnd_sklearn import forest  # heavy: scikit-learn
        from unlearnd_sklearn.settings import ForestSettings  # heavy: pydantic

        return forest.train(ForestSettings.model_validate(dict(settings)), job, on_progress)

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Make forests ready to answer."""
        from unlearnd_sklearn import forest  # heavy: numpy

        self.environment(device)
        return forest.ForestPredictor(states)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here; raise for a device there is not."""
        return _fingerprint(self.name, device)


def _fingerprint(backend: str, device: str) -> dict[str, str]:
    if device not in ("auto", "cpu"):
        raise InputError(f"no device '{device}'; backend '{backend}' has: auto, cpu")
    from importlib.metadata import version

    return {
        "scikit-learn": version("scikit-learn"),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "machine": platform.machine(),
    }
