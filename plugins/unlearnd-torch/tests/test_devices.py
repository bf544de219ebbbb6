"""What `devices` chooses. Where a choice needs hardware that is not here, torch's own questions about it are answered
for it; what is present is used for real."""

from __future__ import annotations

import gc
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from unlearnd_torch import MlpBackend, NetworkBackend, devices
from unlearnd_torch.devices import Feed, choose_feed, fingerprint, resolve_device, spread, steady

from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, Points

PRESENT = [name for name, here in devices._devices().items() if here]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def ignore(samples):
    pass


@pytest.fixture
def cuda(monkeypatch):
    """Return a function after which torch says that there are so many CUDA devices."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)

    return pretend


def test_auto_takes_cuda_then_mps_then_cpu(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto").type == "mps"
    cuda(1)
    assert resolve_device("auto").type == "cuda"


def test_a_device_that_is_not_there_is_named_with_those_there_are(cuda):
    with pytest.raises(InputError, match="no device 'gpu' here; devices: auto, "):
        resolve_device("gpu")
    cuda(2)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(InputError, match="no device 'cuda:2' here; there are 2 CUDA devices"):
        resolve_device("cuda:2")
    with pytest.raises(InputError, match="no device 'cuda:x' here"):
        resolve_device("cuda:x")


def test_workers_take_the_cuda_devices_in_turn_unless_one_is_named(cuda):
    assert spread("cpu") == ["cpu"]
    cuda(1)
    assert spread("auto") == ["auto"]
    cuda(3)
    assert spread("auto") == spread("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert spread("cuda:1") == ["cuda:1"]
    assert spread("cpu") == ["cpu"]
    assert MlpBackend().devices("auto") == NetworkBackend("resnet").devices("auto") == spread("auto")


@pytest.mark.parametrize(("device", "asked", "rounded"), [(CPU, True, False), (CUDA, True, True), (CUDA, False, False)])
def test_products_are_rounded_only_where_it_is_asked_for_on_cuda(device, asked, rounded, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = flags()
    with steady(device, asked):
        inside = flags()
        assert devices.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert inside == {
        "threads": 1,
        "deterministic": True,
        "matmul": "high" if rounded else "highest",
        "convolutions": rounded,
        "benchmark": False,
    }
    assert flags() == before


def flags():
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
    }


COMPILER = """
import os, sys
from fractions import Fraction
import numpy as np, torch
from unlearnd.hookspecs import Job, Points
from unlearnd_torch import MlpBackend
from unlearnd_torch.devices import steady

backend = MlpBackend()
settings = backend.settings({})
state = backend.initial_state(settings, (3,), 2, 1)
points = Points(np.ones((4, 3), np.float32), np.array([0, 1, 0, 1]))
backend.train(settings, Job(state, points, Fraction(1), 1), "cpu", lambda samples: None)
assert not {"torch._inductor", "torch._dynamo"} & set(sys.modules)
for mode in (0, 1):
    torch.set_deterministic_debug_mode(mode)
    with steady(torch.device("cpu")):
        import torch._inductor.config as compiler  # the first time round it was not there before

        assert compiler.deterministic and torch.get_deterministic_debug_mode() == 2
    assert compiler.deterministic == bool(mode) and torch.get_deterministic_debug_mode() == mode
assert "TORCHINDUCTOR_DETERMINISTIC" not in os.environ
"""


def test_training_loads_no_compiler_and_one_that_is_there_is_deterministic(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    ended = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_points_move_once_if_they_leave_room_for_the_network():
    assert choose_feed("cpu", 10**12, None) == "host"
    assert choose_feed("cuda", 500, 1000) == "resident"
    assert choose_feed("cuda", 501, 1000) == "streamed"
    assert choose_feed("mps", 10**9, None) == "resident"


@pytest.mark.parametrize("device", PRESENT)
@pytest.mark.parametrize("kind", ["resident", "streamed"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_whichever_way_points_take_they_arrive_the_same(device, kind, dtype, monkeypatch):
    monkeypatch.setattr(devices, "_STAGE_BYTES", 100)  # several copies
    whole = np.random.default_rng(0).integers(0, 255, (40, 3, 4)).astype(dtype)
    x, y = whole[:33], np.arange(33)
    x.flags.writeable = y.flags.writeable = False
    order = np.random.default_rng(1).permutation(33)
    cuts = [slice(0, 8), slice(8, 16), slice(16, 33)]
    feed = Feed(x, y, torch.device(device), kind)
    arrived = list(feed.batches(order, iter(cuts)))
    assert [cut for cut, _, _ in arrived] == cuts
    for cut, points, labels in arrived:
        assert points.device.type == device
        assert np.array_equal(points.cpu().numpy(), x[order[cut]])
        assert np.array_equal(labels.cpu().numpy(), y[order[cut]])
    assert np.array_equal(feed.points(order[:6].reshape(2, 3)).cpu().numpy(), x[order[:6].reshape(2, 3)])
    assert list(feed.batches(order, iter([]))) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_on_the_cpu_points_are_gathered_from_where_they_lie(dtype, writeable):
    x = np.random.default_rng(0).integers(0, 255, (40, 3, 4)).astype(dtype)
    x.flags.writeable = writeable
    rows = np.random.default_rng(1).permutation(40)[:6].reshape(2, 3)
    for points in (x, x[:, ::2]):
        gathered = Feed(points, np.arange(40), CPU).points(rows)
        assert np.array_equal(gathered.numpy(), points[rows])
        gathered.zero_()
    assert x.any()


def test_a_shard_moves_once_for_all_its_slices_and_leaves_with_its_array():
    whole = np.arange(60, dtype=np.float32).reshape(10, 6).copy()
    y = np.arange(10)
    first = Feed(whole[:4], y[:4], CPU, "resident")
    assert len(devices._residents) == 1
    (kept,) = devices._residents.values()
    for end in (7, 10):
        assert Feed(whole[:end], y[:end], CPU, "resident")._there.data_ptr() == kept.data_ptr()
    # The flat form that `mlp` reads is the same memory; an array that only looks alike is not.
    assert Feed(whole.reshape(10, 2, 3)[:4], y[:4], CPU, "resident")._there.shape == (10, 2, 3)
    assert len(devices._residents) == 1
    other = whole.copy()
    Feed(other[:4], y[:4], CPU, "resident")
    assert len(devices._residents) == 2
    middle = Feed(whole[2:6], y[2:6], CPU, "resident")
    assert np.array_equal(middle.points(np.arange(4)).numpy(), whole[2:6])
    del whole, other, first, middle
    gc.collect()
    assert not devices._residents


def test_a_fingerprint_says_what_changes_bits(cuda, monkeypatch):
    here = fingerprint("cpu")
    assert (here["device"], here["threads"], here["tf32"], here["deterministic"]) == ("cpu", "1", "False", "True")
    assert here["device_name"]
    assert "onednn_max_cpu_isa" not in here
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert fingerprint("cpu")["onednn_max_cpu_isa"] == "AVX2"
    cuda(2)
    there = fingerprint("cuda:1")
    assert {"driver", "cuda", "cudnn", "cublas_workspace"} <= there.keys()
    assert there["device_name"] == "Some GPU"
    assert fingerprint("cuda:0") == there
    assert all(isinstance(value, str) for value in there.values())


@pytest.mark.parametrize(
    "text", ["NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56", None]
)
def test_the_driver_is_told_where_it_can_be(text, monkeypatch, tmp_path):
    def read(path, **options):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(devices.Path, "read_text", read)
    assert devices._driver_version() == ("550.54.15" if text else "unknown")


@pytest.mark.parametrize("device", PRESENT)
@pytest.mark.parametrize("name", ["mlp", "convnet", "wide_resnet"])
@pytest.mark.parametrize("given", [{}, {"optimizer": "adam", "dropout": 0.2}])
def test_every_device_here_trains_the_same_bits_twice(device, name, given, make_job, same):
    backend = MlpBackend() if name == "mlp" else NetworkBackend(name)
    small = {"mlp": {}, "convnet": {"channels": [3, 4]}, "wide_resnet": {"depth": 10, "width": 1}}[name]
    if name != "mlp":
        small |= {"crop_padding": 1, "flip": True}
    settings = backend.settings({"batch_size": 8, **small, **given})
    job = make_job(backend, settings, n=17, shape=(6, 6, 1), dtype=np.uint8)
    once = backend.train(settings, job, device, ignore)
    again = backend.train(
        settings, Job(job.state, Points(job.points.x.copy(), job.points.y), Fraction(2), 1), device, ignore
    )
    assert same(once, again)
    assert backend.predictor(settings, [once], device)(job.points.x).shape == (1, 17, 3)


@pytest.mark.parametrize("device", PRESENT)
def test_streaming_and_moving_once_train_the_same_bits(device, make_job, same, monkeypatch):
    backend = NetworkBackend("convnet")
    settings = backend.settings({"batch_size": 8, "crop_padding": 1})
    job = make_job(backend, settings, n=21, shape=(8, 8), dtype=np.uint8)
    states = []
    for kind in ("host", "resident", "streamed"):
        monkeypatch.setattr(devices, "choose_feed", lambda *asked, kind=kind: kind)
        states.append(backend.train(settings, job, device, ignore))
    assert same(states[0], states[1])
    assert same(states[0], states[2])
