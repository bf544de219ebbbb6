"""Hold leases for as long as a piece of work takes.

Whoever writes a shard holds its lease. A thread renews it while the work goes on; if the process dies, the
lease runs out, and a process on the same machine sees at once that the holder is gone. An erasure never waits
for a training to end: it asks for the lease, and the builder stops at its next word of progress.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from unlearnd.errors import BusyError, UnlearndError
from unlearnd.ledger import Ledger, leases

Clock = Callable[[], datetime]


class SteadyClock:
    """A clock that never tells an earlier time than before, whatever the machine's does.

    What is logged goes by it: a receipt dated before a leaf that it follows would be refused. After the machine's
    clock was set back, time stands still here until it has caught up. Leases go by the machine's clock, `raw`.
    """

    def __init__(self, raw: Clock) -> None:
        self.raw = raw
        self._latest = datetime.min.replace(tzinfo=UTC)

    def __call__(self) -> datetime:
        self.not_before(self.raw())
        return self._latest

    def not_before(self, moment: datetime | None) -> None:
        """Tell no time before this one from now on."""
        if moment is not None:
            self._latest = max(self._latest, moment)


_ended: set[str] = set()
"""Holders of this process that are done and could not say so."""

_SECONDS = 30.0
_RENEW_EVERY = 5.0
_LOOK_EVERY = 0.2


class Preempted(Exception):
    """Somebody with a better claim wants what this work holds: stop, let go, plan again."""


class Hold:
    """Leases that are being held."""

    def __init__(self, names: Sequence[str], holder: str) -> None:
        self.names = tuple(sorted(set(names)))
        self.holder = holder
        self._stop = threading.Event()
        self._lost = threading.Event()

    def check(self) -> None:
        """Raise `Preempted` when somebody wants these leases or has them already."""
        if self._lost.is_set():
            raise Preempted(", ".join(self.names))

    def _keep(self, ledger: Ledger, clock: Clock) -> None:
        renewed = time.monotonic()
        while not self._stop.wait(_LOOK_EVERY):
            try:
                if time.monotonic() - renewed > _RENEW_EVERY:
                    leases.renew(ledger, self.holder, _now(ledger, clock) + _SECONDS)
                    renewed = time.monotonic()
                left_alone = leases.left_alone(ledger, self.holder)
            except UnlearndError:
                # The ledger is busy or away. The lease lives on for a while; past that it may be another's.
                if time.monotonic() - renewed > _SECONDS:
                    self._lost.set()
                continue
            if left_alone < len(self.names):
                self._lost.set()


@contextmanager
def hold(
    ledger: Ledger, names: Sequence[str], clock: Clock, *, preempt: bool = False, patience: float = 120.0
) -> Iterator[Hold]:
    """Hold all of `names` for the length of a `with` block.

    All are taken together or none, so two holders never wait for each other. With `preempt`, whoever holds
    one is asked to let go. Raise `BusyError` when they cannot be had within `patience` seconds.
    """
    held = Hold(names, f"{_this_process()}/{secrets.token_hex(4)}")
    _take(ledger, held, clock, preempt, patience)
    keeper = threading.Thread(target=held._keep, args=(ledger, clock), name="lease keeper", daemon=True)
    keeper.start()
    try:
        yield held
    finally:
        held._stop.set()
        keeper.join()
        # If this fails, the lease runs out by itself, and this process need not wait for that.
        _ended.add(held.holder)
        leases.drop(ledger, held.holder)
        _ended.discard(held.holder)


def check_idle(ledger: Ledger, clock: Clock) -> None:
    """Raise `BusyError` while anybody holds a lease."""
    now = _now(ledger, clock)
    for lease in leases.all_leases(ledger):
        if lease.expires > now and not _is_dead(lease.holder):
            host, pid = lease.holder.split("/")[:2]
            raise BusyError(f"process {pid} on {host} is at work on {lease.name}; try again when it is done")


def _take(ledger: Ledger, held: Hold, clock: Clock, preempt: bool, patience: float) -> None:
    give_up = time.monotonic() + patience
    dead: list[str] = []
    while True:
        now = _now(ledger, clock)
        blocking = leases.take(ledger, held.names, held.holder, now + _SECONDS, now, dead)
        if not blocking:
            return
        gone = [lease.holder for lease in blocking if _is_dead(lease.holder)]
        if set(gone) - set(dead):
            dead = gone
            continue
        if preempt:
            leases.want(ledger, [lease.name for lease in blocking])
        if time.monotonic() > give_up:
            first = blocking[0]
            host, pid = first.holder.split("/")[:2]
            raise BusyError(f"process {pid} on {host} is at work on {first.name}; try again when it is done")
        time.sleep(0.05)


def _now(ledger: Ledger, clock: Clock) -> float:
    """Return the time that leases go by: the database's where it has a clock, since machines may disagree."""
    raw = clock.raw if isinstance(clock, SteadyClock) else clock
    return ledger.time(raw().timestamp())


def _this_process() -> str:
    pid = os.getpid()
    return f"{socket.gethostname().replace('/', '-')}/{pid}/{_started(pid)}"


def _is_dead(holder: str) -> bool:
    """Say whether the holder was a process of this machine that has ended, or work of this one that has."""
    host, pid, started = holder.split("/")[:3]
    if holder in _ended:
        return True
    if host != socket.gethostname().replace("/", "-"):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return started != _started(int(pid))


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, so that a reused pid is told apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "unknown"
    # A killed process that nobody has waited for is still listed, as a zombie.
    return "ended" if fields[0] in "ZX" else fields[19]
