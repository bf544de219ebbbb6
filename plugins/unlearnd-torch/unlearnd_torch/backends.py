"""The backends as the core sees them: names, versions, and methods that load torch when they are called.

Nothing here trains. `settings` checks what was given, `mlp` and `module` hold the two ways of training, `networks`
what can be trained out of the box, and `harness` what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unlearnd.hookspecs import Job, OnProgress, Predictor, Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from unlearnd.hookspecs import State
    from unlearnd_torch.settings import ImageSettings, ModuleSettings


class MlpBackend:
    """A multilayer perceptron whose constituents train and answer as one stack."""

    name = "mlp"
    version = "1"
    sliceable = True
    deterministic = True

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what was set and fill in the defaults; raise `InputError` naming the setting."""
        from unlearnd_torch.settings import MlpSettings, check_settings  # heavy: pydantic

        return check_settings(self.name, MlpSettings, given)

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return the state before slice 1."""
        from unlearnd_torch import mlp  # heavy: torch
        from unlearnd_torch.settings import MlpSettings  # heavy: pydantic

        return mlp.draw_initial_state(MlpSettings.model_validate(settings), shape, classes, seed)

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state` and return the state after the slice."""
        return self.train_many(settings, [job], device, on_progress)[0]

    def train_many(self, settings: Settings, jobs: Sequence[Job], device: str, on_progress: OnProgress) -> list[State]:
        """Do what `train` does for several constituents at once; the same bytes as one by one."""
        from unlearnd_torch import mlp  # heavy: torch
        from unlearnd_torch.settings import MlpSettings  # heavy: pydantic

        return mlp.train_stacked(MlpSettings.model_validate(settings), jobs, device, on_progress)

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Stack constituents once, to answer many times."""
        from unlearnd_torch import mlp_answering  # heavy: torch
        from unlearnd_torch.settings import MlpSettings  # heavy: pydantic

        return mlp_answering.StackedPredictor(MlpSettings.model_validate(settings), states, device)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here."""
        from unlearnd_torch.devices import fingerprint  # heavy: torch

        return fingerprint(device)

    def devices(self, device: str) -> Sequence[str]:
        """Return the devices that workers take in turn: all CUDA devices, unless one was named."""
        from unlearnd_torch.devices import spread  # heavy: torch

        return spread(device)


class TorchBackend:
    """A platform's own `nn.Module` as a backend.

    `build(shape, classes, **settings)` returns a fresh module that maps (n, *shape) float32 features to
    (n, classes) logits. Its keyword parameters, which must have defaults, become settings next to the common
    ones (batch_size, optimizer, lr, …). Raise the version whenever `build` changes what it returns: stored
    checkpoints belong to the version that made them. Declare `deterministic=False` if the module draws
    randomness that torch does not seed.
    """

    sliceable = True

    def __init__(self, name: str, version: str, *, build: Callable[..., nn.Module], deterministic: bool = True) -> None:
        self.name = name
        self.version = version
        self.deterministic = deterministic
        self.build = build

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what was set and fill in the defaults; raise `InputError` naming the setting."""
        from unlearnd_torch.settings import check_settings, settings_of_build  # heavy: pydantic

        return check_settings(self.name, settings_of_build(self.build), given)

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return the state before slice 1."""
        from unlearnd_torch import module  # heavy: torch

        common, own = self._split(settings)
        build = partial(self.build, shape, classes, **own)
        return module.draw_initial_state(build, common, shape, classes, seed)

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state` and return the state after the slice."""
        from unlearnd_torch import module  # heavy: torch

        common, own = self._split(settings)
        shape, classes = module.form_of(job.state)
        return module.train(partial(self.build, shape, classes, **own), common, job, device, on_progress)

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Load each constituent once, to answer many times."""
        from unlearnd_torch import module  # heavy: torch

        common, own = self._split(settings)
        shape, classes = module.form_of(states[0])
        return module.ModulePredictor(partial(self.build, shape, classes, **own), common, states, device)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here."""
        from unlearnd_torch.devices import fingerprint  # heavy: torch

        return fingerprint(device)

    def devices(self, device: str) -> Sequence[str]:
        """Return the devices that workers take in turn: all CUDA devices, unless one was named."""
        from unlearnd_torch.devices import spread  # heavy: torch

        return spread(device)

    def _split(self, settings: Settings) -> tuple[Any, dict[str, Any]]:
        from unlearnd_torch.settings import ModuleSettings, settings_of_build  # heavy: pydantic

        checked = settings_of_build(self.build).model_validate(settings)
        own = {name: value for name, value in checked if name not in ModuleSettings.model_fields}
        return checked, own


class NetworkBackend:
    """A network of ours for images: `convnet`, `resnet` or `wide_resnet`; whole, or its end on a frozen base.

    Constituents train and answer one after the other: convolutions in a stack are slower on a CPU than one by one.
    """

    version = "1"
    sliceable = True
    deterministic = True

    def __init__(self, name: str) -> None:
        self.name = name

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what was set and fill in the defaults; raise `InputError` naming the setting."""
        from unlearnd_torch.settings import NETWORKS, check_settings  # heavy: pydantic

        return check_settings(self.name, NETWORKS[self.name], given)

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return the state before slice 1; raise `InputError` when points of that shape are no images."""
        from unlearnd_torch import module  # heavy: torch

        checked = self._check(settings)
        return module.draw_initial_state(self._build(checked, shape, classes), checked, shape, classes, seed)

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state` and return the state after the slice."""
        from unlearnd_torch import module  # heavy: torch

        build, checked = self._trained_part(settings, job.state)
        trained = module.train(build, checked, job, device, on_progress)
        return {**trained, **{name: job.state[name] for name in job.state if name == "base.shape"}}

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Load each constituent once, to answer many times."""
        from unlearnd_torch import module  # heavy: torch

        build, checked = self._trained_part(settings, states[0])
        return module.ModulePredictor(build, checked, states, device)

    def features_key(self, settings: Settings) -> str | None:
        """Return what features depend on beside base, point and environment; None without a base."""
        checked = self._check(settings)
        if checked.base is None:
            return None
        from unlearnd.digests import canonical_json
        from unlearnd_torch.settings import ModuleSettings, TrainingSettings  # heavy: pydantic

        # All but what is about learning: that comes after the cut.
        learning = {*TrainingSettings.model_fields, *ModuleSettings.model_fields, "base_public"} - {
            "standardize",
            "tf32",
        }
        return canonical_json({name: value for name, value in settings.items() if name not in learning}).decode()

    def features(self, settings: Settings, base: State | None, x: NDArray[Any], device: str) -> NDArray[np.float32]:
        """Return what the frozen part of the network makes of points."""
        from unlearnd_torch import transfer  # heavy: torch

        assert base is not None
        return transfer.features(self._check(settings), settings, base, x, device)

    def initial_state_on(
        self, settings: Settings, base: State | None, shape: tuple[int, ...], classes: int, seed: int
    ) -> State:
        """Return the state before slice 1 of what trains on top of a base."""
        from unlearnd_torch import transfer  # heavy: torch

        assert base is not None
        return transfer.draw_state(self._check(settings), base, shape, classes, seed)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here."""
        from unlearnd_torch.devices import fingerprint  # heavy: torch

        return fingerprint(device)

    def devices(self, device: str) -> Sequence[str]:
        """Return the devices that workers take in turn: all CUDA devices, unless one was named."""
        from unlearnd_torch.devices import spread  # heavy: torch

        return spread(device)

    def _check(self, settings: Settings) -> ImageSettings:
        from unlearnd_torch.settings import NETWORKS  # heavy: pydantic

        return NETWORKS[self.name].model_validate(settings)

    def _trained_part(self, settings: Settings, state: State) -> tuple[Callable[[], nn.Module], ModuleSettings]:
        """Return what builds the network that a state belongs to, or its end, and how that trains."""
        from unlearnd_torch import module, transfer  # heavy: torch

        checked, (shape, classes) = self._check(settings), module.form_of(state)
        if checked.base is None:
            return self._build(checked, shape, classes), checked
        return transfer.build_tail(checked, state, classes), transfer.tail_settings(checked)

    def _build(self, settings: ImageSettings, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
        from unlearnd_torch.networks import build_network  # heavy: torch

        return partial(build_network, settings, shape, classes)
