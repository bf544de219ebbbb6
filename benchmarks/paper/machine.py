"""What the machine is, and how much of it others took while we measured.

Seconds mean something only where nobody else was at work. What everybody took is in `/proc/stat`, the hypervisor's
other guests included; what this run and its workers took is taken off. Where there is no `/proc`, nothing is claimed.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# user, nice, system, irq, softirq, steal: all but idle, waiting for disks, and guests, who are in `user` already.
_BUSY = (0, 1, 2, 5, 6, 7)


class Watch:
    """How long a run has been measuring, and what others took of the CPU meanwhile; goes on from an earlier run."""

    def __init__(self, earlier: dict[str, Any] | None = None) -> None:
        self._earlier = earlier or {"seconds": 0.0, "others": 0.0}
        self._begun, self._others = time.perf_counter(), others_cpu()

    def so_far(self) -> dict[str, float | None]:
        """Return seconds by the clock and CPU seconds of others; None for these where they are not known."""
        seconds = self._earlier["seconds"] + time.perf_counter() - self._begun
        now = others_cpu()
        if now is None or self._others is None or self._earlier["others"] is None:
            return {"seconds": seconds, "others": None}
        return {"seconds": seconds, "others": self._earlier["others"] + max(0.0, now - self._others)}


def others_cpu() -> float | None:
    """Return CPU seconds that all but this process and its workers have taken since the machine started."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        everybody = sum(int(fields[at]) for at in _BUSY) / _TICK
        return everybody - sum(
            map(_cpu_of, [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid)])
        )
    except (OSError, IndexError, ValueError):
        return None


def _cpu_of(process: int) -> float:
    """Return CPU seconds of a process and of what it started and waited for."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime, stime; those of ended children only of workers: ours are the workers, and these are counted.
    return sum(int(ticks) for ticks in after_name[11 : 13 if process == os.getpid() else 15]) / _TICK


def describe_machine() -> dict[str, Any]:
    """Return what figures depend on: cores, Python and the libraries that compute."""
    names = ("unlearnd", "unlearnd-torch", "torch", "numpy")
    versions = {name: version(name) for name in names}
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": sys.version.split()[0], **versions}
