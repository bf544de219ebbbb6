from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, load_file, save, save_file
from unlearnd_torch import NetworkBackend
from unlearnd_torch.networks import ResNet, WideResNet, blocks_of, build_network
from unlearnd_torch.settings import NETWORKS

from unlearnd.errors import InputError
from unlearnd.hookspecs import Backend, Job, Points

SMALL = {
    "convnet": {"channels": [4, 6], "kernel": 3, "hidden": 10, "dropout": 0.2, "batch_size": 8},
    "resnet": {"width": 2, "batch_size": 8},
    "wide_resnet": {"depth": 10, "width": 1, "dropout": 0.2, "batch_size": 8},
}
SHAPE = (8, 8, 3)


def ignore(samples):
    pass


def network(name, shape=SHAPE, classes=3, **given):
    settings = NETWORKS[name].model_validate({**SMALL[name], **given})
    return build_network(settings, shape, classes).eval()


@pytest.fixture(params=SMALL)
def backend(request):
    return NetworkBackend(request.param)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"crop_padding": 2, "flip": True, "optimizer": "adam", "label_smoothing": 0.1, "clip_norm": 1.0},
        {"channels_last": True, "schedule": "cosine", "nesterov": True, "weight_decay": 0.001},
    ],
)
def test_a_step_from_a_saved_state_equals_going_through(backend, given, make_job, same):
    settings = backend.settings({**SMALL[backend.name], **given})
    job = make_job(backend, settings, n=19, shape=SHAPE, dtype=np.uint8)
    through = saved = job.state
    for seed in (5, 6):
        torch.rand(seed)  # where the global generator stands must not matter
        through = backend.train(settings, Job(through, job.points, Fraction(3, 2), seed), "cpu", ignore)
        again = Job(load(save(dict(saved))), job.points, Fraction(3, 2), seed)
        saved = backend.train(settings, again, "cpu", ignore)
    assert same(through, saved)
    if backend.name != "convnet":
        assert through["module.bn1.num_batches_tracked"] > 0
        assert not np.array_equal(through["module.bn1.running_mean"], job.state["module.bn1.running_mean"])


def test_a_fresh_process_trains_the_same_bits(backend, make_job):
    given = {**SMALL[backend.name], "crop_padding": 1, "flip": True}
    settings = backend.settings(given)
    job = make_job(backend, settings, n=19, shape=SHAPE, dtype=np.uint8)
    here = digest(backend.train(settings, job, "cpu", ignore))
    for tensor in (torch.rand(3, 5), torch.rand(40, 40)):  # other products first: kernels must not be chosen by history
        torch.nn.functional.conv2d(tensor.view(1, 1, *tensor.shape), torch.rand(2, 1, 2, 2))
    assert digest(backend.train(settings, job, "cpu", ignore)) == here
    plugin = Path(__file__).parents[1]
    code = (
        f"import sys; sys.path[:0] = {[str(plugin), str(plugin.parents[1]), str(plugin / 'tests')]!r}\n"
        "import json, test_networks as t\n"
        f"print(t.train_in_child({backend.name!r}, json.loads({json.dumps(given)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def train_in_child(name, given):
    backend = NetworkBackend(name)
    settings = backend.settings(given)
    random = np.random.default_rng(1)  # as `make_job` draws
    x = (random.standard_normal((19, *SHAPE)) * 40 + 120).clip(0, 255).astype(np.uint8)
    y = random.integers(0, 3, 19)
    job = Job(backend.initial_state(settings, SHAPE, 3, 1), Points(x, y), Fraction(2), 1)
    return digest(backend.train(settings, job, "cpu", ignore))


def digest(state):
    return hashlib.sha256(b"".join(name.encode() + state[name].tobytes() for name in sorted(state))).hexdigest()


@pytest.mark.parametrize("by", [8, 40])
def test_where_points_lie_in_memory_does_not_change_a_bit(backend, by, make_job, same, shifted):
    settings = backend.settings(SMALL[backend.name])
    job = make_job(backend, settings, n=19, shape=SHAPE)
    here, there = shifted(job, 0), shifted(job, by)
    after = backend.train(settings, here, "cpu", ignore)
    assert same(after, backend.train(settings, there, "cpu", ignore))
    predictor = backend.predictor(settings, [after, after], "cpu")
    assert np.array_equal(predictor(here.points.x[:7]), predictor(there.points.x[:7]))


def test_one_image_stored_in_three_ways_is_one_image(backend, make_job):
    settings = backend.settings({**SMALL[backend.name], "standardize": "off"})
    grey = np.random.default_rng(0).random((12, 8, 8), np.float32)
    y = np.arange(12) % 3
    states = []
    for x in (grey, grey[:, :, :, None], grey[:, None]):
        job = Job(backend.initial_state(settings, x.shape[1:], 3, 1), Points(x, y), Fraction(1), 1)
        states.append(backend.train(settings, job, "cpu", ignore))
    for state in states[1:]:
        assert all(np.array_equal(state[name], states[0][name]) for name in state if name.startswith("module."))
        answers = backend.predictor(settings, states[:1], "cpu")(grey)
        assert answers.shape == (1, 12, 3)


@pytest.mark.parametrize("n", [1, 9])
def test_single_points_train(backend, n, make_job):
    settings = backend.settings(SMALL[backend.name])
    said = []
    job = make_job(backend, settings, n=n, shape=SHAPE, epochs=Fraction(2))
    after = backend.train(settings, job, "cpu", said.append)
    assert sum(said) == 2 * n
    assert all(np.isfinite(array).all() for array in after.values())


def test_points_that_are_no_images_are_refused(backend):
    settings = backend.settings(SMALL[backend.name])
    with pytest.raises(InputError, match=r"points of shape \(784,\) are no images"):
        backend.initial_state(settings, (784,), 3, 1)
    with pytest.raises(InputError, match="set layout to 'hwc' or 'chw'"):
        backend.initial_state(settings, (8, 9, 8), 3, 1)


def test_it_learns(backend):
    random = np.random.default_rng(3)
    y = random.integers(0, 3, 150)
    x = random.integers(0, 60, (150, *SHAPE)).astype(np.uint8)
    x[np.arange(150), :, y * 2, :] += 120  # a bright column says which class
    settings = backend.settings({**SMALL[backend.name], "dropout": 0} if backend.name != "resnet" else SMALL["resnet"])
    job = Job(backend.initial_state(settings, SHAPE, 3, 1), Points(x[:120], y[:120]), Fraction(8), 1)
    answers = backend.predictor(settings, [backend.train(settings, job, "cpu", ignore)], "cpu")(x[120:])
    assert (answers[0].argmax(1) == y[120:]).mean() > 0.8


def test_it_is_a_backend_that_trains_one_by_one(backend):
    assert isinstance(backend, Backend)
    assert not hasattr(backend, "train_many")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [SHAPE, (3, 9, 12), (11, 8)])
def test_running_the_blocks_in_order_is_the_network(name, shape):
    net = network(name, shape)
    x = torch.rand(2, *(shape if len(shape) == 3 and shape[0] == 3 else (3, 8, 8) if len(shape) == 3 else (1, 11, 8)))
    blocks = blocks_of(net)
    values = x
    for block in blocks[:-1]:
        values = block.run(values)
    assert values.dim() == 2
    assert blocks[-1].name == "fc"
    assert torch.equal(blocks[-1].run(values), net(x))


@pytest.mark.parametrize("name", SMALL)
def test_every_tensor_belongs_to_one_block(name):
    net = network(name)
    for tensor in net.state_dict():
        owners = [b.name for b in blocks_of(net) if any(tensor.startswith(f"{part}.") for part in b.parts)]
        assert len(owners) == 1, tensor


@pytest.mark.parametrize(
    ("depth", "tensors", "numbers"), [(18, 122, 11_689_512), (34, 218, 21_797_672), (50, 320, 25_557_032)]
)
def test_resnets_have_the_names_and_sizes_of_published_weights(depth, tensors, numbers):
    # torchvision's networks for ImageNet: entries of the state_dict, and parameters, as its documentation counts them.
    with torch.device("meta"):
        net = ResNet((3, 224, 224), 1000, depth, "auto", 64)
    names = net.state_dict()
    assert (len(names), sum(p.numel() for p in net.parameters())) == (tensors, numbers)
    known = {"conv1.weight": (64, 3, 7, 7), "bn1.running_var": (64,), "layer2.0.downsample.0.weight": None}
    known |= {"layer4.1.bn2.num_batches_tracked": (), "layer2.0.downsample.1.bias": None, "fc.weight": None}
    for name, shape in known.items():
        assert shape is None or tuple(names[name].shape) == shape, name
    assert ("layer1.0.downsample.0.weight" in names) == (depth == 50)


# The tensors of ResNet-18 for ImageNet as torchvision and timm publish it. A line that ends in `bn` and a number, or in
# `downsample.1`, is a batch normalisation: weight, bias, running_mean, running_var and num_batches_tracked.
RESNET_18 = """
conv1.weight 64 3 7 7
bn1 64
layer1.0.conv1.weight 64 64 3 3
layer1.0.bn1 64
layer1.0.conv2.weight 64 64 3 3
layer1.0.bn2 64
layer1.1.conv1.weight 64 64 3 3
layer1.1.bn1 64
layer1.1.conv2.weight 64 64 3 3
layer1.1.bn2 64
layer2.0.conv1.weight 128 64 3 3
layer2.0.bn1 128
layer2.0.conv2.weight 128 128 3 3
layer2.0.bn2 128
layer2.0.downsample.0.weight 128 64 1 1
layer2.0.downsample.1 128
layer2.1.conv1.weight 128 128 3 3
layer2.1.bn1 128
layer2.1.conv2.weight 128 128 3 3
layer2.1.bn2 128
layer3.0.conv1.weight 256 128 3 3
layer3.0.bn1 256
layer3.0.conv2.weight 256 256 3 3
layer3.0.bn2 256
layer3.0.downsample.0.weight 256 128 1 1
layer3.0.downsample.1 256
layer3.1.conv1.weight 256 256 3 3
layer3.1.bn1 256
layer3.1.conv2.weight 256 256 3 3
layer3.1.bn2 256
layer4.0.conv1.weight 512 256 3 3
layer4.0.bn1 512
layer4.0.conv2.weight 512 512 3 3
layer4.0.bn2 512
layer4.0.downsample.0.weight 512 256 1 1
layer4.0.downsample.1 512
layer4.1.conv1.weight 512 512 3 3
layer4.1.bn1 512
layer4.1.conv2.weight 512 512 3 3
layer4.1.bn2 512
fc.weight 1000 512
fc.bias 1000
"""


def published_resnet_18():
    """Return tensors of those names and shapes."""
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for line in RESNET_18.split("\n")[1:-1]:
        name, *shape = line.split()
        shape = [int(size) for size in shape]
        if name.rpartition(".")[2] in ("weight", "bias"):
            tensors[name] = torch.randn(shape, generator=random) / max(1, int(np.prod(shape[1:]))) ** 0.5
            continue
        for part in ("weight", "bias", "running_mean", "running_var"):
            drawn = torch.rand(shape, generator=random)
            tensors[f"{name}.{part}"] = drawn + 0.5 if part in ("weight", "running_var") else drawn - 0.5
        tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)
    return tensors


def run_resnet_18(tensors, x):
    """Return the 512 features and the 1000 logits of He et al.'s network, written out once more, with no module."""
    F = torch.nn.functional

    def bn(x, name):
        mean, var, weight, bias = (tensors[f"{name}.{p}"] for p in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, mean, var, weight, bias)

    x = F.max_pool2d(F.relu(bn(F.conv2d(x, tensors["conv1.weight"], stride=2, padding=3), "bn1")), 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            y = F.relu(bn(F.conv2d(x, tensors[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn1"))
            y = bn(F.conv2d(y, tensors[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
            if stride == 2:
                x = bn(F.conv2d(x, tensors[f"{at}.downsample.0.weight"], stride=2), f"{at}.downsample.1")
            x = F.relu(y + x)
    seen = x.mean((2, 3))
    return seen, seen @ tensors["fc.weight"].T + tensors["fc.bias"]


def test_a_published_resnet_18_loads_from_safetensors_and_computes_what_it_computes_elsewhere(tmp_path):
    tensors, shape = published_resnet_18(), (64, 64, 3)
    save_file({name: tensor.numpy() for name, tensor in tensors.items()}, tmp_path / "resnet18.safetensors")
    base = load_file(tmp_path / "resnet18.safetensors")
    assert len(base) == 122
    whole = network("resnet", shape, 1000, stem="large", width=64)
    whole.load_state_dict({name: torch.from_numpy(value) for name, value in base.items()}, strict=True)
    images = np.random.default_rng(1).integers(0, 256, (3, *shape)).astype(np.uint8)
    given = (torch.from_numpy(images).float() - 128).div(64).permute(0, 3, 1, 2)
    seen, logits = run_resnet_18(tensors, given)
    with torch.no_grad():
        np.testing.assert_allclose(whole.eval()(given).numpy(), logits.numpy(), rtol=1e-4, atol=1e-4)
    backend = NetworkBackend("resnet")
    fixed = {"stem": "large", "standardize": "fixed", "mean": 128, "std": 64}
    settings = backend.settings({**fixed, "base": "0" * 64, "base_public": True})
    features = backend.features(settings, base, images, "cpu").reshape(3, -1)
    np.testing.assert_allclose(features, seen.numpy(), rtol=1e-4, atol=1e-4)
    state = backend.initial_state_on(settings, base, shape, 7, 1)
    assert state["module.fc.weight"].shape == (7, 512)


def test_wide_resnets_have_the_size_of_the_paper():
    # Zagoruyko and Komodakis 2016, table 4: WRN-40-4 8.9 M, WRN-16-8 11.0 M, WRN-28-10 36.5 M parameters.
    for depth, width, millions in ((40, 4, 8.9), (16, 8, 11.0), (28, 10, 36.5)):
        with torch.device("meta"):
            net = WideResNet((3, 32, 32), 10, depth, width, 0.0)
        assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == millions
    assert {"conv1.weight", "block1.layer.0.convShortcut.weight", "bn1.weight", "fc.bias"} <= set(net.state_dict())


@pytest.mark.parametrize(("size", "stem", "large"), [(32, "auto", False), (224, "auto", True), (32, "large", True)])
def test_the_stem_follows_the_size_unless_it_is_set(size, stem, large):
    with torch.device("meta"):
        net = ResNet((3, size, size), 10, 18, stem, 8)
    assert net.conv1.kernel_size == ((7, 7) if large else (3, 3))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("resnet", {"depth": 20}, "setting 'depth' should be 18, 34 or 50, not 20"),
        ("wide_resnet", {"depth": 20}, "setting 'depth' should be 4 more than a multiple of 6"),
        ("convnet", {"kernel": 4}, "setting 'kernel' should be odd"),
        ("convnet", {"crop_padding": -1}, "setting 'crop_padding' should be greater"),
        ("resnet", {"layout": "cwh"}, "setting 'layout' should be 'auto', 'hw', 'hwc' or 'chw', not 'cwh'"),
        ("resnet", {"mean": [0.5]}, "mean and std are for standardize 'fixed'"),
        ("resnet", {"standardize": "fixed", "mean": [1, 2], "std": 1}, "needs mean and std"),
        ("resnet", {"hidden": 3}, "backend 'resnet' has no setting 'hidden'; settings: base, base_public, batch_size"),
        ("resnet", {"mixed_precision": "float16"}, "setting 'mixed_precision' should be 'off' or 'bfloat16'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(name, given, message):
    with pytest.raises(InputError) as raised:
        NetworkBackend(name).settings(given)
    assert message in str(raised.value)
