"""What a plugin may implement: hooks, and the roles they register.

A plugin is an installed package with an entry point in the group `unlearnd`. Hooks named `register_…` are
called once when plugins are loaded and take a function to call with each thing brought along; the things
themselves satisfy the protocols below and are then called directly, without pluggy in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pluggy

if TYPE_CHECKING:
    from datetime import date
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from unlearnd.layouts import Risk

hookspec = pluggy.HookspecMarker("unlearnd")
hookimpl = pluggy.HookimplMarker("unlearnd")

State = Mapping[str, "NDArray[Any]"]
"""All that a constituent is after a step: weights, optimiser state, fitted statistics, by name."""

Settings = Mapping[str, Any]
"""A backend's settings after validation: JSON values only, every default filled in."""

OnProgress = Callable[[int], None]
"""Called with the number of samples trained since the last call. It may raise to stop the training: let it."""


@dataclass(frozen=True)
class Points:
    """The live points of slices 1…r of one shard, slice after slice, each slice in ingestion order."""

    x: NDArray[Any]
    """Features, (n, *shape), float32 or uint8, C-contiguous. Not to be written to."""
    y: NDArray[np.int64]
    """Class indices, (n,)."""


@dataclass(frozen=True)
class Job:
    """One train-from-slice step of one constituent."""

    state: State
    """The state before the slice."""
    points: Points
    epochs: Fraction
    """How often to go through `points`; 0.78 is the first ⌈0.78·n⌉ points of a fresh permutation."""
    seed: int
    """The step's own seed, drawn from (model seed, shard, slice). Derive every stream from it."""


@runtime_checkable
class Backend(Protocol):
    """A way of learning: state in, state out.

    Nothing may be kept between calls that changes a result: the same arguments give the same bytes, in this
    process or another, whatever was trained before. A backend that promises this says `deterministic`.
    A backend may also have `train_many(settings, jobs, device, on_progress) -> list[State]`, which does what
    `train` does for several constituents at once; it must give the same bytes as one by one. And it may have
    `devices(device) -> Sequence[str]`: which devices the workers of a build take in turn when that one was named.
    One that can train on top of a frozen base model also satisfies `FeatureBackend`.
    """

    name: str
    version: str
    sliceable: bool
    """False when a step cannot start from a state (a decision tree): the shard is then trained whole."""
    deterministic: bool

    def settings(self, given: Mapping[str, object]) -> Settings:
        """Check what a person set and fill in the defaults; raise `InputError` naming the setting."""
        ...

    def initial_state(self, settings: Settings, shape: tuple[int, ...], classes: int, seed: int) -> State:
        """Return the state before slice 1. `seed` is drawn from (model seed, shard)."""
        ...

    def train(self, settings: Settings, job: Job, device: str, on_progress: OnProgress) -> State:
        """Train on from `job.state` and return the state after the slice. `device` may be `auto`."""
        ...

    def predictor(self, settings: Settings, states: Sequence[State], device: str) -> Predictor:
        """Make constituents ready to answer together: stack them once, answer many times."""
        ...

    def environment(self, device: str) -> Mapping[str, str]:
        """Return whatever changes bits here: library versions, device, threads, CPU capability, flags."""
        ...


@runtime_checkable
class FeatureBackend(Protocol):
    """The part of a backend that trains on features instead of points: what a frozen base model makes of them.

    Features are computed once per point, kept beside it, and erased with it. So those of a point must depend on
    nothing but the point, the base, the settings and the environment: the same bits in whatever company the point
    comes. Where `features_key` returns a key, `train` and predictors are given features in the place of points.

    A setting named `base` is the core's to fill in: a person gives a URI, and `settings` is given the digest of the
    safetensors file behind it, with `base_public` as the person set it.
    """

    def features_key(self, settings: Settings) -> str | None:
        """Return text that names all that features depend on but base, point, version and environment; None when
        these settings train on the points themselves."""
        ...

    def features(self, settings: Settings, base: State | None, x: NDArray[Any], device: str) -> NDArray[np.float32]:
        """Return the features of points (n, *shape), one float32 array per point. `base` has the tensors of the file
        that the setting `base` names; None when there is none."""
        ...

    def initial_state_on(
        self, settings: Settings, base: State | None, shape: tuple[int, ...], classes: int, seed: int
    ) -> State:
        """Do what `initial_state` does, for a model that trains on features. `shape` is that of a point. Leave what is
        frozen out of the state: it is kept once, as the base."""
        ...


class Predictor(Protocol):
    """Constituents ready to answer."""

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return probabilities (constituents, n, classes) for features (n, *shape)."""
        ...


class Aggregator(Protocol):
    """A way of making one answer of many."""

    def __call__(
        self, probabilities: NDArray[np.float32], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return class indices (n,) and scores (n, classes), best class highest, from (constituents, n,
        classes). A weight is the share of its shard that a constituent has seen; none is zero."""
        ...


@dataclass(frozen=True)
class Task:
    """Work for one worker: build these shards of a model. URIs travel, tensors do not."""

    store: str
    model: str
    shards: tuple[int, ...]
    device: str


@dataclass(frozen=True)
class Progress:
    """What a worker tells while it works."""

    shard: int
    """0 when a group of shards advances together."""
    slice: int
    samples: int
    """Samples trained since the last word."""
    steps: int = 0
    """Checkpoints finished since the last word."""


class Executor(Protocol):
    """A place where tasks run: this process, child processes, a cluster.

    It may have a method `check(settings)`, which raises where `[executor]` says what it cannot use: called before
    anything is declared, erased or built with it.
    """

    def __call__(
        self,
        tasks: Sequence[Task],
        work: Callable[[Task, Callable[[Progress], None]], None],
        report: Callable[[Progress], None],
        workers: int,
    ) -> None:
        """Run every task to its end; raise what the first failing one raised.

        `work` is the function to call in this process; elsewhere, run `python -m unlearnd.worker` with the
        task as JSON on standard input.
        """
        ...


class Signer(Protocol):
    """Something that signs: a key file, a key service, a hardware module."""

    @property
    def public(self) -> bytes:
        """The raw Ed25519 public key, 32 bytes."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of `message`."""
        ...


class SignerMaker(Protocol):
    """Gives the signer of a role (`log` or `receipt`) of the store whose keys are in `folder`."""

    def __call__(self, folder: Path, role: str) -> Signer:
        """Return the signer; raise an `UnlearndError` where there is none."""
        ...


class KeyWrapper(Protocol):
    """Something that keeps keys safe by encrypting them: a key file, a key service, a hardware module."""

    def wrap(self, key: bytes) -> bytes:
        """Return a key of 32 bytes encrypted."""
        ...

    def unwrap(self, wrapped: bytes) -> bytes:
        """Return the key that was wrapped; raise `ValueError` where that is none of ours."""
        ...


class KeyWrapperMaker(Protocol):
    """Gives the wrapper of keys of the store whose keys are in `folder`."""

    def __call__(self, folder: Path) -> KeyWrapper:
        """Return the wrapper; raise an `UnlearndError` where there is none."""
        ...


class PlacementRule(Protocol):
    """A way of deciding where users go. It sees keyed numbers, never other points, counts or order."""

    def __call__(
        self, numbers: NDArray[np.uint64], groups: Sequence[str] | None, shards: int, slices: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return shards 1…S and slices 1…R for each keyed number. `groups` has one for each, or is None."""
        ...


@runtime_checkable
class PriorPlacement(Protocol):
    """A way of deciding where users go that is laid out beforehand, by how likely each group is to leave."""

    def freeze(self, risks: Sequence[Risk], shards: int) -> Mapping[str, Any]:
        """Return the layout that these priors give, as JSON without floats; raise `InputError` naming what is wrong.

        Called once, when a dataset is created; what it returns is logged and never changes.
        """
        ...

    def rule(self, layout: Mapping[str, Any]) -> PlacementRule:
        """Return the rule of a frozen layout. It is always given groups."""
        ...


@dataclass(frozen=True)
class Petition:
    """A request that is about to be carried out, as plugins see it."""

    request: str
    """Its id; empty where it is received and carried out in one step."""
    asked: str
    """`user`, `point`, `dataset` or `model`."""
    handle: str
    """The user's keyed handle in hexadecimal; empty where no user is meant. The user id is in no store."""
    name: str
    """The dataset or model that is meant; empty for a user."""
    policy: str
    ground: str


@dataclass(frozen=True)
class Veto:
    """Why a request must not be carried out yet."""

    number: int
    """Which of the petitions, from 0."""
    basis: str
    """One of the policy's exemptions."""
    until: date | None = None
    """When to look again; None for the last day that the policy allows."""


@hookspec
def erasure_requested(petitions: Sequence[Petition], folder: Path, today: date) -> Sequence[Veto] | None:
    """Say which requests must not be carried out yet: a legal hold, an exemption.

    Called before requests pass the point of no return, once for all that are carried out together, last registered
    plugin first; `folder` is the store's, `today` the day by its clock. For an order to destroy a dataset it is called
    again with a petition for each user with data in it, 10,000 at a time, and a veto of any holds the order. Every veto
    that any plugin returns puts its request on hold with the plugin as approver; None and an empty list veto nothing.
    Raising is a `PluginError`, and nothing is carried out.
    """


@hookspec
def recipient_told(recipient: str, model: str, erasure: str, receipts: Sequence[str], folder: Path) -> str | None:
    """Tell somebody who was given a model that people were erased from it, by mail or a call to their service.

    Called once per recipient and erasure by `unlearnd recipients tell`, last registered plugin first, until one
    returns an outcome: `sent`, `acknowledged`, `impossible`, `disproportionate`, or `written` where somebody must yet
    deliver it. None leaves it to the next. `folder` is the store's. Raising is recorded as `failed`, and it is tried
    again the next time; a process that was killed may ask twice about the same.
    """


@hookspec
def register_backends(register: Callable[[Backend], None]) -> None:
    """Bring backends: call `register` with each.

    Called once per process when plugins are loaded, in any order; the return value is ignored. A name that
    another plugin brought already is a `PluginError` naming both; so is whatever this hook raises.
    Do not import anything heavy here: do that in the backend's methods.
    """


@hookspec
def register_placements(register: Callable[[str, PlacementRule | PriorPlacement], None]) -> None:
    """Bring placement rules under a name. When, order, return value and errors: as `register_backends`."""


@hookspec
def register_executors(register: Callable[[str, Executor], None]) -> None:
    """Bring executors under a name. When, order, return value and errors: as `register_backends`."""


@hookspec
def register_signers(register: Callable[[str, SignerMaker], None]) -> None:
    """Bring makers of signers under a name. When, order, return value and errors: as `register_backends`."""


@hookspec
def register_wrappers(register: Callable[[str, KeyWrapperMaker], None]) -> None:
    """Bring makers of key wrappers under a name. When, order, return value and errors: as `register_backends`."""


@hookspec
def register_aggregators(register: Callable[[str, Aggregator], None]) -> None:
    """Bring aggregators under a name. When, order, return value and errors: as `register_backends`."""
