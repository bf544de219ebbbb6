"""Everything that depends on where and how torch computes, in one place.

Training happens between `steady` and its end: one thread, deterministic kernels, no reduced precision unless asked
for. What was set before is restored, because the process belongs to somebody else. `Feed` brings points to the
device, `spread` shares several devices out to several workers, and `fingerprint` says what changes bits here.
"""

from __future__ import annotations

import os
import platform
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlearnd.errors import InputError

_STAGE_BYTES = 64 << 20
"""Points copied to a device at a time."""
_COMPILER = "TORCHINDUCTOR_DETERMINISTIC"
"""Read by torch's compiler when it is loaded."""
_REFUSE = 2
"""The mode in which torch refuses what it has only kernels for that are not deterministic."""


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


def spread(device: str) -> list[str]:
    """Return the devices that workers should take in turn: every CUDA device, unless one was named."""
    found = resolve_device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.device_count() > 1:
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [device]


@contextmanager
def steady(device: torch.device, tf32: bool = False) -> Iterator[None]:
    """Compute with one thread and deterministic kernels until the end of the block, then restore.

    With `tf32`, CUDA may round the factors of float32 products to 10 bits; elsewhere it means nothing. These
    switches are the whole process's: two threads of a process should not train at once.
    """
    # Read by cuBLAS when it starts; without it deterministic mode refuses to multiply matrices on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    deterministic, compiler = torch.get_deterministic_debug_mode(), os.environ.get(_COMPILER)
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    precision = torch.get_float32_matmul_precision()
    cudnn_tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        torch.set_num_threads(1)
        os.environ[_COMPILER] = "1"
        _set_deterministic(_REFUSE)
        # We read no memory before it is written, and filling it first costs as much as a layer.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        rounded = tf32 and device.type == "cuda"
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = rounded, False
        yield
    finally:
        torch.set_num_threads(threads)
        _set_deterministic(deterministic)
        if compiler is None:
            os.environ.pop(_COMPILER, None)
        else:
            os.environ[_COMPILER] = compiler
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn_tf32, benchmark


def _set_deterministic(mode: int) -> None:
    """Set what `torch.get_deterministic_debug_mode` returned, for torch and for its compiler.

    Not by `torch.use_deterministic_algorithms` alone: it imports the compiler, more than a second in every process that
    trains, to tell it. A compiler that is loaded is told; one that is not, because nobody compiles, stays away.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    else:
        torch.set_deterministic_debug_mode(mode)


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


def answering(device: torch.device, tf32: bool = False) -> AbstractContextManager[None]:
    """Compute answers until the end of the block as `steady` would; on the CPU threads are all there is to it."""
    return OneThread() if device.type == "cpu" else steady(device, tf32)


def mixed(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Run products and convolutions in `bfloat16` until the end of the block, the rest in float32; or `off`."""
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's global generators until the end of the block, then restore them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = torch.mps.get_rng_state() if device.type == "mps" else None
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # this one only: other devices are somebody else's
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        try:
            yield
        finally:
            if before is not None:
                torch.mps.set_rng_state(before)


def frozen_batch(device: torch.device) -> int:
    """Return how many points a frozen base looks at together, always: bits depend on it.

    A batch is filled up, so few rows cost as much as that many. A CPU gains little from more; another device does.
    """
    return 8 if device.type == "cpu" else 64


def stack_bytes(device: torch.device) -> int:
    """Return how much of parameters, gradients and optimiser state to train at once.

    On a CPU a stack beyond the cache is slower than one by one: measured, 4 MB is best from 100-64-10 to
    784-512-10. Elsewhere a larger stack is a fuller device.
    """
    return 4 << 20 if device.type == "cpu" else 256 << 20


FeedKind = Literal["host", "resident", "streamed"]


def choose_feed(device: str, size: int, free: int | None) -> FeedKind:
    """Return how points of `size` bytes get to a kind of device with `free` bytes (None: unknown).

    On the CPU they are there already. Elsewhere they move once and stay, if they take no more than half of what is
    free: the rest is for the network. If they take more, batches are sent one ahead of the training.
    """
    if device == "cpu":
        return "host"
    return "resident" if free is None or size <= free // 2 else "streamed"


class Feed:
    """A constituent's points on their way to the device. Which way they go changes no bit."""

    def __init__(
        self, x: NDArray[Any], y: NDArray[np.int64], device: torch.device, kind: FeedKind | None = None
    ) -> None:
        owner = _owner_of(x)
        self.kind = kind or choose_feed(device.type, owner.nbytes, _free_bytes(device))
        self._x, self._y, self._device = x, y, device
        self._there: Tensor | None = None
        if self.kind == "resident":
            self._there = _resident(owner, device).view(len(owner), *x.shape[1:])
        elif self.kind == "host" and x.flags.writeable and x.flags.c_contiguous:
            # Of an array that is not writeable torch says so, in a warning.
            self._there = torch.from_numpy(x)

    def points(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the points in those rows, (*rows.shape, *shape of a point), in memory of their own."""
        if self._there is not None:
            where = torch.from_numpy(rows.reshape(-1)).to(self._device)
            return self._there.index_select(0, where).view(*rows.shape, *self._x.shape[1:])
        if self.kind == "streamed":
            return _Sent((self._x,), rows, self._device).wait()[0]
        return torch.from_numpy(np.take(self._x, rows, axis=0)).to(self._device)

    def labels(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the class indices in those rows."""
        return torch.from_numpy(np.take(self._y, rows)).to(self._device)

    def batches(self, order: NDArray[np.int64], cuts: Iterable[slice]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each cut of an epoch's order with its points and labels."""
        if self.kind != "streamed":
            for cut in cuts:
                yield cut, self.points(order[cut]), self.labels(order[cut])
            return
        ahead: tuple[slice, _Sent] | None = None
        for cut in cuts:
            sent = _Sent((self._x, self._y), order[cut], self._device)
            if ahead is not None:
                yield _arrived(*ahead)
            ahead = cut, sent
        if ahead is not None:
            yield _arrived(*ahead)


class _Sent:
    """Rows that are being copied from pinned memory while the device computes."""

    def __init__(self, arrays: Sequence[NDArray[Any]], rows: NDArray[np.int64], device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        here = [_pinned((*rows.shape, *array.shape[1:]), array.dtype, cuda) for array in arrays]
        for array, host in zip(arrays, here, strict=True):
            np.take(array, rows, axis=0, out=host.numpy(), mode="clip")  # without `clip` numpy copies twice
        if cuda:
            stream = _copy_stream(device)
            with torch.cuda.stream(stream):
                self._there = [host.to(device, non_blocking=True) for host in here]
                self._done = stream.record_event()
        else:
            self._there = [host.to(device) for host in here]

    def wait(self) -> list[Tensor]:
        """Return what was sent; whatever is computed next waits until it has arrived."""
        if self._device.type == "cuda":
            now = torch.cuda.current_stream(self._device)
            now.wait_event(self._done)
            for tensor in self._there:
                tensor.record_stream(now)
        return self._there


def _arrived(cut: slice, sent: _Sent) -> tuple[slice, Tensor, Tensor]:
    x, y = sent.wait()
    return cut, x, y


@lru_cache(maxsize=64)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_residents: dict[tuple[int, torch.device], Tensor] = {}


def _resident(owner: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy of an array on the device, made once and kept for as long as the array is."""
    key = (id(owner), device)
    if key not in _residents:
        there = torch.empty(owner.shape, dtype=_dtype_of(owner.dtype), device=device)
        at_once = max(1, _STAGE_BYTES // max(1, owner.nbytes // max(1, len(owner))))
        for start in range(0, len(owner), at_once):
            some = owner[start : start + at_once]
            stage = _pinned(some.shape, some.dtype, device.type == "cuda")
            stage.numpy()[...] = some
            there[start : start + at_once].copy_(stage)
        _residents[key] = there
        weakref.finalize(owner, _residents.pop, key, None)
    return _residents[key]


def _owner_of(x: NDArray[Any]) -> NDArray[Any]:
    """Return the whole shard that `x` is the beginning of, so that every slice finds it on the device; or `x`."""
    owner = x.base
    if (
        isinstance(owner, np.ndarray)
        and owner.dtype == x.dtype
        and owner.flags.c_contiguous
        and owner.ndim > 1
        and len(x)
        and len(owner)
        and owner.ctypes.data == x.ctypes.data
        and owner.nbytes // len(owner) == x.nbytes // len(x)
        and x.flags.c_contiguous
    ):
        return owner
    return x


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any], pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=_dtype_of(dtype), pin_memory=pinned)


def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


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
        "tf32": "False" if where.type != "cuda" else "as set",  # it is a setting, and so part of the recipe
    }
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"):
        if name in os.environ:
            found[name.lower()] = os.environ[name]
    if where.type == "mps":
        found["macos"] = platform.mac_ver()[0]
    if where.type == "cuda":
        found["driver"] = _driver_version()
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return found


def _uses_mkldnn() -> bool:
    backend = torch.backends.mkldnn
    return bool(backend.is_available() and backend.enabled)  # type: ignore[no-untyped-call]


def _devices() -> dict[str, bool]:
    return {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return "unknown"
    words = [word for word in text.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else "unknown"


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
