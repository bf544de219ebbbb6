"""Find a Ray cluster or start one, and see that it can do the work.

A process that has called `ray.init` keeps the cluster it chose. Otherwise the address comes from the settings or
from RAY_ADDRESS; without either, a cluster of this machine alone is started, which ends with the process. It
reports nothing to anybody, has no dashboard, and answers nobody who does not know the token drawn for it: Ray
listens on all of a machine's addresses, and runs whatever it is sent.
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from unlearnd.config import Config
from unlearnd.errors import InputError, PluginError, RefusedError
from unlearnd_ray.settings import RaySettings

_OBJECT_STORE_BYTES = 100_000_000
"""Nothing but words goes through Ray's object store."""


def connect(settings: RaySettings) -> Any:
    """Return the module `ray`, connected to a cluster; the connection stays until the process ends."""
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    if "ray" not in sys.modules:
        _prepare(own=address in ("", "local"))
    import ray  # heavy

    if ray.is_initialized():
        return ray
    _check_there(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address in ("", "local"):
        quiet |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        if sys.platform == "linux":
            # Ray replaces 127.0.0.1 by an address that others can reach, and leaves this one.
            quiet["_node_ip_address"] = "127.0.0.2"
    try:
        ray.init(address=address or "local", **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = " ".join(str(error).split())
        raise PluginError(
            f"the executor 'ray' cannot use the cluster at {address or 'this machine'}: {type(error).__name__}: {said}"
        ) from error
    return ray


def _check_there(address: str) -> None:
    """Raise `PluginError` where nobody answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise PluginError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def _prepare(own: bool) -> None:
    """Set what Ray reads from the environment when it is loaded, as far as nobody has."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Of a lost worker Ray tells on standard output, where results go; we say it ourselves if it matters.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    if own:
        # Ray would have its workers stand back behind everything else on the machine; `processes` does not, either.
        os.environ.setdefault("RAY_worker_niceness", "0")
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def check_reach(ray: Any, config: Config) -> None:
    """Raise `RefusedError` for a ledger that the machines of the cluster cannot all open."""
    others = {node["NodeManagerHostname"] for node in _nodes(ray)} - {socket.gethostname()}
    if others and config.ledger.startswith("sqlite"):
        raise RefusedError(
            f"the ledger is an SQLite file, which one machine alone can open, and the Ray cluster has {len(others)} "
            "others; keep the ledger in PostgreSQL and the storage where all of them reach it"
        )


class Room:
    """Whether the cluster has a node on which a task fits."""

    def __init__(self, ray: Any, settings: RaySettings) -> None:
        self._ray, self._needs, self._patience = ray, settings.needs, settings.wait
        self._last_seen, self._next_look = time.monotonic(), 0.0

    def check(self) -> None:
        """Raise `InputError` when there has been no such node for longer than one is waited for."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1
        nodes = _nodes(self._ray)
        if any(_fits(self._needs, node["Resources"]) for node in nodes):
            self._last_seen = now
        elif now - self._last_seen >= self._patience:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
            there = "; ".join(_shown(node["Resources"]) for node in nodes) or "none"
            raise InputError(
                f"no node of the Ray cluster has {wanted} for a task (nodes: {there}); mend [executor], or let it "
                "wait for a node with `wait`"
            )


def _nodes(ray: Any) -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _fits(needs: Mapping[str, float], has: Mapping[str, float]) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def _shown(resources: Mapping[str, float]) -> str:
    left_out = ("memory", "object_store_memory")
    shown = [f"{v:g} {k}" for k, v in sorted(resources.items()) if k not in left_out and not k.startswith("node:")]
    return ", ".join(shown) or "nothing"
