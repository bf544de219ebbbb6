"""Find installed plugins, load them, and keep what they bring by name.

Every package with an entry point in the group `unlearnd` is a plugin, our own defaults among them. Loading
ends with a check for hooks nobody specified: a misspelt hook would otherwise be ignored without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from unlearnd import hookspecs
from unlearnd.errors import NotFoundError, PluginError, UnlearndError
from unlearnd.hookspecs import (
    Aggregator,
    Backend,
    Executor,
    KeyWrapperMaker,
    Petition,
    PlacementRule,
    PriorPlacement,
    Signer,
    SignerMaker,
    Veto,
)

GROUP = "unlearnd"
T = TypeVar("T")


@dataclass(frozen=True)
class Installed:
    """A plugin that was loaded."""

    name: str
    distribution: str
    version: str
    brings: tuple[str, ...]


@dataclass(frozen=True)
class Plugins:
    """What all plugins bring."""

    installed: tuple[Installed, ...]
    backends: Mapping[str, Backend]
    placements: Mapping[str, PlacementRule | PriorPlacement]
    executors: Mapping[str, Executor]
    aggregators: Mapping[str, Aggregator]
    signers: Mapping[str, SignerMaker]
    wrappers: Mapping[str, KeyWrapperMaker]
    manager: pluggy.PluginManager

    def vetoes(self, petitions: Sequence[Petition], folder: Path, today: date) -> list[tuple[str, Veto]]:
        """Return what plugins say against carrying these requests out, each with the plugin's name."""
        found: list[tuple[str, Veto]] = []
        for said in self.manager.hook.erasure_requested.get_hookimpls()[::-1]:
            try:
                both: dict[str, Any] = {"petitions": petitions, "folder": folder, "today": today}
                given: Any = said.function(*(both[name] for name in said.argnames))
                listed: list[Any] = list(given or ())
            except UnlearndError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plugin '{said.plugin_name}' failed over a request: {_in_one_line(error)}"
                ) from error
            for veto in listed:
                if not isinstance(veto, Veto) or not 0 <= veto.number < len(petitions):
                    raise PluginError(f"plugin '{said.plugin_name}' vetoes something that was not asked")
                found.append((said.plugin_name, veto))
        return found

    def tell(self, recipient: str, model: str, erasure: str, receipts: Sequence[str], folder: Path) -> tuple[str, str]:
        """Have a recipient told; return the outcome and by which plugin: `unanswered` where none does it."""
        given: dict[str, Any] = {"recipient": recipient, "model": model, "erasure": erasure}
        given |= {"receipts": receipts, "folder": folder}
        for said in self.manager.hook.recipient_told.get_hookimpls()[::-1]:
            try:
                outcome = said.function(*(given[name] for name in said.argnames))
            except Exception:
                # Not the message, which may hold an address.
                return "failed", said.plugin_name
            if outcome in ("written", "sent", "acknowledged", "impossible", "disproportionate"):
                return str(outcome), said.plugin_name
            if outcome is not None:
                raise PluginError(f"plugin '{said.plugin_name}' returns an outcome that there is not")
        return "unanswered", ""

    def backend(self, name: str) -> Backend:
        """Return the backend of that name or raise `NotFoundError`."""
        return _named(self.backends, "backend", name)

    def executor(self, name: str) -> Executor:
        """Return the executor of that name or raise `NotFoundError`."""
        return _named(self.executors, "executor", name)

    def signer(self, name: str) -> SignerMaker:
        """Return the maker of signers of that name or raise `NotFoundError`.

        What another signer than ours says is checked: a signature that does not hold is never handed out.
        """
        maker = _named(self.signers, "signer", name)
        return maker if name == "file" else partial(_make_checked, name, maker)

    def wrapper(self, name: str) -> KeyWrapperMaker:
        """Return the maker of key wrappers of that name or raise `NotFoundError`."""
        return _named(self.wrappers, "wrapper", name)

    def aggregator(self, name: str) -> Aggregator:
        """Return the aggregator of that name or raise `NotFoundError`."""
        return _named(self.aggregators, "aggregator", name)


@cache
def load_plugins() -> Plugins:
    """Load all installed plugins, once per process."""
    return gather(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


@dataclass
class _Shelf:
    """Things of one kind by name, each with the plugin that brought it."""

    kind: str
    things: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, thing: Any, owner: str) -> None:
        if name in self.owners:
            raise PluginError(
                f"the {self.kind} '{name}' is registered twice: by plugin '{self.owners[name]}' and by plugin '{owner}'"
            )
        self.things[name], self.owners[name] = thing, owner


def gather(entries: list[EntryPoint]) -> Plugins:
    """Load the plugins behind these entry points; raise `PluginError` naming the one at fault."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    for entry in entries:
        _register(manager, entry)
    _check_spelling(manager)
    shelves = {kind: _Shelf(kind) for kind in ("backend", "placement", "executor", "aggregator", "signer", "wrapper")}
    for entry in entries:
        others = [plugin for name, plugin in manager.list_name_plugin() if name != entry.name]
        for kind, shelf in shelves.items():
            caller = manager.subset_hook_caller(f"register_{kind}s", others)
            _call(caller, _registrar(shelf, entry.name), entry.name)
    installed = tuple(
        Installed(
            entry.name,
            entry.dist.name if entry.dist else "unknown",
            entry.dist.version if entry.dist else "unknown",
            tuple(
                f"{shelf.kind} {name}"
                for shelf in shelves.values()
                for name, owner in shelf.owners.items()
                if owner == entry.name
            ),
        )
        for entry in entries
    )
    brought: dict[str, Any] = {f"{kind}s": shelf.things for kind, shelf in shelves.items()}
    return Plugins(installed, manager=manager, **brought)


def _registrar(shelf: _Shelf, owner: str) -> Callable[..., None]:
    if shelf.kind != "backend":

        def put(name: str, thing: Any) -> None:
            usable = callable(thing) or (shelf.kind == "placement" and isinstance(thing, PriorPlacement))
            if not isinstance(name, str) or not name or not usable:
                raise PluginError(f"plugin '{owner}' registers {shelf.kind}s by a name and something to call")
            shelf.put(name, thing, owner)

        return put

    def register(backend: Backend) -> None:
        if isinstance(backend, type):
            raise PluginError(f"plugin '{owner}' registers the class {backend.__name__}; register an instance of it")
        if not isinstance(backend, Backend):
            missing = sorted(
                name
                for name in (
                    "name",
                    "version",
                    "sliceable",
                    "deterministic",
                    "settings",
                    "initial_state",
                    "train",
                    "predictor",
                    "environment",
                )
                if not hasattr(backend, name)
            )
            raise PluginError(f"plugin '{owner}' registers a backend that lacks {', '.join(missing)}")
        shelf.put(backend.name, backend, owner)

    return register


def _register(manager: pluggy.PluginManager, entry: EntryPoint) -> None:
    if manager.has_plugin(entry.name):
        other = getattr(manager.get_plugin(entry.name), "__name__", "another")
        raise PluginError(f"plugin '{entry.name}' is there twice: as {other} and as {entry.value}")
    try:
        manager.register(entry.load(), name=entry.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plugin '{entry.name}' ({entry.value}) has a hook with wrong arguments: {_in_one_line(error)}"
        ) from error
    except Exception as error:
        raise PluginError(f"plugin '{entry.name}' ({entry.value}) cannot be loaded: {_in_one_line(error)}") from error


def _check_spelling(manager: pluggy.PluginManager) -> None:
    known = sorted(name for name in vars(hookspecs) if name.startswith(("register_", "erasure_", "recipient_")))
    for name, plugin in manager.list_name_plugin():
        for caller in manager.get_hookcallers(plugin) or []:
            if not caller.has_spec():
                raise PluginError(
                    f"plugin '{name}' implements a hook '{caller.name}' that does not exist; hooks: {', '.join(known)}"
                )


def _call(caller: Callable[..., Any], register: Callable[..., None], owner: str) -> None:
    try:
        caller(register=register)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"plugin '{owner}' failed while registering: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _make_checked(name: str, maker: SignerMaker, folder: Path, role: str) -> Signer:
    signer = _ask_signer(name, partial(maker, folder, role))
    return _CheckedSigner(name, signer, bytes(_ask_signer(name, lambda: signer.public)))


@dataclass(frozen=True)
class _CheckedSigner:
    """A plugin's signer, asked with care."""

    name: str
    signer: Signer
    public: bytes

    def sign(self, message: bytes) -> bytes:
        from cryptography.exceptions import InvalidSignature  # heavy
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        signature = bytes(_ask_signer(self.name, partial(self.signer.sign, message)))
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise PluginError(f"the signer '{self.name}' gave a signature that does not hold under its key") from None
        return signature


def _ask_signer(name: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except UnlearndError:
        raise
    except Exception as error:
        raise PluginError(f"the signer '{name}' failed: {type(error).__name__}: {_in_one_line(error)}") from error


def _named(things: Mapping[str, T], kind: str, name: str) -> T:
    if name not in things:
        raise NotFoundError(f"no {kind} '{name}'; installed: {', '.join(sorted(things))}")
    return things[name]
