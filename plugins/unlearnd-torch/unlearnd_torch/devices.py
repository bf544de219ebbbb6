"""Everything that depends on where and how torch computes, in one place.

Training and answering happen between `steady` and its end: one thread, deterministic kernels, no reduced
precision. What was set before is restored, because the process belongs to somebody else.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from unlearnd.errors import InputError


def resolve_device(device: str) -> torch.device:
    """Return the device by that name, or raise `InputError`; `auto` is cuda, then mps, then cpu."""
    present = [name for name, here in _devices().items() if here]
    if device == "auto":
        return torch.device(present[0])
    kind = device.partition(":")[0]
    if kind not in present:
        raise InputError(f"no device {device!r} here; devices: auto, {', '.join(present)}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"no device {device!r} here; devices: auto, {', '.join(present)}") from None
    if kind == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InputError(f"no device {device!r} here; there are {torch.cuda.device_count()} CUDA devices")
    return found


@contextmanager
def steady() -> Iterator[None]:
    """Compute with one thread and deterministic kernels until the end of the block, then restore.

    These switches are the whole process's: two threads of a process should not train at once.
    """
    # Read by cuBLAS when it starts; without it deterministic mode refuses to multiply matrices on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    precision = torch.get_float32_matmul_precision()
    cudnn_tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        # We read no memory before it is written, and filling it first costs as much as a layer.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, False
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn_tf32, benchmark


class OneThread:
    """Answer with one thread until the end of the block: `steady` without what only training needs.

    A class, because entering a generator costs as much as a layer when one row is asked about.
    """

    __slots__ = ("_threads",)

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads != 1:
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self._threads != 1:
            torch.set_num_threads(self._threads)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators until the end of the block, then restore them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = torch.mps.get_rng_state() if device.type == "mps" else None
        torch.manual_seed(seed)
        try:
            yield
        finally:
            if before is not None:
                torch.mps.set_rng_state(before)


def stack_bytes(device: torch.device) -> int:
    """Return how much of parameters, gradients and optimiser state to train at once.

    On a CPU a stack beyond the cache is slower than one by one: measured, 4 MB is best from 100-64-10 to
    784-512-10. Elsewhere a larger stack is a fuller device.
    """
    return 4 << 20 if device.type == "cpu" else 256 << 20


def fingerprint(device: str) -> dict[str, str]:
    """Return whatever changes bits here. Two equal fingerprints promise equal bits."""
    where = resolve_device(device)
    found = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": where.type,
        "device_name": _name_device(where),
        "threads": "1",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "mkldnn": str(_uses_mkldnn()),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "deterministic": "True",
        "tf32": "False",
    }
    if where.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return found


def _uses_mkldnn() -> bool:
    backend = torch.backends.mkldnn
    return bool(backend.is_available() and backend.enabled)  # type: ignore[no-untyped-call]


def _devices() -> dict[str, bool]:
    return {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
