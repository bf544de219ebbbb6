"""The end of a network on a frozen base: what features depend on, what a state holds, what is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from unlearnd_torch import NetworkBackend, transfer
from unlearnd_torch.networks import build_network
from unlearnd_torch.settings import NETWORKS

import unlearnd
from unlearnd.audit import audit
from unlearnd.errors import InputError
from unlearnd.hookspecs import FeatureBackend, Job, Points
from unlearnd.verify.reports import Result

SMALL = {
    "convnet": {"channels": [4, 6], "kernel": 3, "hidden": 10},
    "resnet": {"width": 2},
    "wide_resnet": {"depth": 10, "width": 1},
}
CUTS = {"convnet": ("head", "last-1"), "resnet": ("head", "last-2"), "wide_resnet": ("head", "last-1")}
CASES = [(name, train) for name, cuts in CUTS.items() for train in cuts]
SHAPE = (8, 8, 3)
DIGEST = "0" * 64


def network_of(name, classes=7):
    """Return a network such as somebody may have published, its batch statistics not those of a fresh one."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = build_network(NETWORKS[name].model_validate(SMALL[name]), SHAPE, classes)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def base_of(name):
    return {key: tensor.numpy() for key, tensor in network_of(name).state_dict().items()}


def settings_of(name, train, **given):
    fixed = {"standardize": "fixed", "mean": 128, "std": 64, "batch_size": 8}
    return NetworkBackend(name).settings(
        {**SMALL[name], **fixed, "base": DIGEST, "base_public": True, "train": train, **given}
    )


def images(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *SHAPE)).astype(np.uint8)


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    transfer._newest.clear()


@pytest.mark.parametrize(("name", "train"), CASES)
def test_features_of_a_point_are_the_same_bits_in_whatever_company(name, train):
    backend, settings, base, x = NetworkBackend(name), settings_of(name, train), base_of(name), images(21)
    assert isinstance(backend, FeatureBackend)
    whole = backend.features(settings, base, x, "cpu")
    assert whole.dtype == np.float32
    alone = np.concatenate([backend.features(settings, base, x[i : i + 1], "cpu") for i in range(len(x))])
    assert alone.tobytes() == whole.tobytes()
    order = np.random.default_rng(2).permutation(len(x))
    assert backend.features(settings, base, x[order], "cpu").tobytes() == whole[order].tobytes()
    assert backend.features(settings, base, x[3:], "cpu").tobytes() == whole[3:].tobytes()
    assert backend.features(settings, base, x[:0], "cpu").shape == (0, *whole.shape[1:])
    transfer._newest.clear()
    assert backend.features(settings, base, x, "cpu").tobytes() == whole.tobytes()


def test_where_the_place_in_a_batch_makes_a_difference_points_go_alone(monkeypatch):
    class Uneven(transfer.Frozen):
        def _forward(self, x):
            made = super()._forward(x)
            return made + torch.arange(len(made)).view(-1, *[1] * (made.dim() - 1))

    checked = NETWORKS["convnet"].model_validate(settings_of("convnet", "head"))
    uneven, even = (kind(checked, base_of("convnet"), SHAPE, "cpu") for kind in (Uneven, transfer.Frozen))
    assert (uneven._size, even._size) == (1, 8)
    x = images(10)
    assert np.array_equal(uneven.features(x), np.concatenate([uneven.features(x[i : i + 1]) for i in range(10)]))


@pytest.mark.parametrize(("name", "train"), CASES)
def test_features_and_the_end_together_are_the_network(name, train):
    backend, settings, base, x = NetworkBackend(name), settings_of(name, train), base_of(name), images(9)
    state = dict(backend.initial_state_on(settings, base, SHAPE, 7, 1))
    # With the head of the base instead of a fresh one, and no scaling in front of it, it is the base.
    assert not np.array_equal(state["module.fc.weight"], base["fc.weight"])
    state |= {f"module.{key}": base[key] for key in ("fc.weight", "fc.bias")}
    answers = backend.predictor(settings, [state], "cpu")(backend.features(settings, base, x, "cpu"))[0]
    with torch.inference_mode():
        inputs = (torch.from_numpy(x).float() - 128) / 64
        whole = torch.softmax(network_of(name)(inputs.permute(0, 3, 1, 2)), 1).numpy()
    assert np.allclose(answers, whole, atol=1e-5)


@pytest.mark.parametrize(("name", "train"), CASES)
def test_a_state_holds_only_what_trains(name, train):
    backend, settings, base = NetworkBackend(name), settings_of(name, train), base_of(name)
    state = backend.initial_state_on(settings, base, SHAPE, 3, 1)
    held = {key.removeprefix("module.").split(".")[0] for key in state if key.startswith("module.")}
    assert "conv1" not in held
    assert "fc" in held
    assert (held == {"fc"}) == (train == "head")
    x = backend.features(settings, base, images(12), "cpu")
    job = Job(state, Points(x, np.arange(12) % 3), Fraction(2), 5)
    trained = backend.train(settings, job, "cpu", lambda samples: None)
    assert trained.keys() == state.keys()
    assert not np.array_equal(trained["module.fc.weight"], state["module.fc.weight"])


def test_published_weights_without_counters_and_in_half_precision_are_taken():
    backend, settings = NetworkBackend("resnet"), settings_of("resnet", "head")
    base = {k: v.astype(np.float16) if v.dtype.kind == "f" else v for k, v in base_of("resnet").items()}
    older = {key: value for key, value in base.items() if not key.endswith("num_batches_tracked")}
    assert backend.features(settings, older, images(3), "cpu").shape == (3, 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.pop("layer1.0.conv1.weight"), "the base has no tensor 'layer1.0.conv1.weight'"),
        (lambda b: b.update({"layer9.weight": np.zeros(1)}), "the base has a tensor 'layer9.weight'"),
        (lambda b: b.update({"conv1.weight": np.zeros((1, 2), np.float32)}), "'conv1.weight' of shape"),
        (lambda b: b.update({"bn1.bias": np.zeros(2, np.int64)}), "which is no float"),
    ],
)
def test_a_base_of_another_network_is_refused_in_one_sentence(change, says):
    base = base_of("resnet")
    change(base)
    backend, settings = NetworkBackend("resnet"), settings_of("resnet", "last-1")
    for ask in (
        lambda: backend.features(settings, base, images(1), "cpu"),
        lambda: backend.initial_state_on(settings, base, SHAPE, 3, 1),
    ):
        with pytest.raises(InputError, match=says) as raised:
            ask()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train": "all"}, "a base is frozen"),
        ({"train": "last-0"}, "train"),
        ({"train": "tail"}, "train"),
        ({"standardize": "channel", "mean": [], "std": []}, "standardize must be 'fixed'"),
        ({"flip": True}, "no crop_padding, flip or channels_last"),
        ({"crop_padding": 1}, "no crop_padding, flip or channels_last"),
        ({"base": "somewhere.safetensors"}, "base"),
        ({"base": None}, "for a model on a base"),
    ],
)
def test_settings_that_make_no_sense_on_a_base_are_refused(given, says):
    with pytest.raises(InputError, match=says):
        settings_of("convnet", "head", **given) if "train" not in given else settings_of("convnet", **given)


def test_a_base_trains_its_head_unless_told_otherwise_and_something_stays_frozen():
    assert NetworkBackend("convnet").settings({"base": DIGEST, "standardize": "off"})["train"] == "head"
    assert NetworkBackend("convnet").settings({})["train"] == "all"
    assert NetworkBackend("convnet").features_key(NetworkBackend("convnet").settings({})) is None
    with pytest.raises(InputError, match="say last-2 at most"):
        NetworkBackend("convnet").initial_state_on(settings_of("convnet", "last-3"), base_of("convnet"), SHAPE, 3, 1)


def test_features_are_shared_by_models_that_only_learn_otherwise():
    key = NetworkBackend("convnet").features_key
    assert key(settings_of("convnet", "head")) == key(settings_of("convnet", "head", lr=0.5, optimizer="adam"))
    assert key(settings_of("convnet", "head")) != key(settings_of("convnet", "last-1"))
    assert key(settings_of("convnet", "head")) != key(settings_of("convnet", "head", mean=0))


@pytest.mark.parametrize(("name", "train"), CASES)
def test_erasing_gives_the_bits_of_a_store_that_never_met_them(name, train, tmp_path):
    save_file(base_of(name), tmp_path / "base.safetensors")
    (tmp_path / "placement.key").write_text("5eed" * 16 + "\n")
    x, y, user = images(48), np.arange(48) % 3, np.array([f"u{i % 16}" for i in range(48)])
    settings = {**settings_of(name, train), "base": str(tmp_path / "base.safetensors")}
    digests = []
    for which in ("met", "never"):
        rows = slice(None) if which == "met" else ~np.isin(user, ["u1", "u5"])
        with unlearnd.create_store(tmp_path / which, placement_key=tmp_path / "placement.key") as store:
            store.ingest("d", x[rows], user=user[rows], label=y[rows], shards=2, slices=2)
            store.train("m", dataset="d", backend=name, epochs=2, seed=3, settings=settings)
            if which == "met":
                store.erase(["u1", "u5"])
                report = audit(store, replay="all")
                assert [report[check].result for check in ("S1", "S2", "P1")] == [Result.PASS] * 3
                assert store.model("m").predict(x[:3]).scores.shape == (3, 3)
                frozen = base_of(name)["conv1.weight"].tobytes()
                holding = [p for p in Path(store.folder).rglob("*") if p.is_file() and frozen in p.read_bytes()]
                assert [path.parent.name for path in holding] == ["bases"]
            digests.append({(c.shard, c.slice): c.tensors for c in store.checkpoints("m")})
    assert digests[0] == digests[1]


def test_processes_train_on_a_base_with_the_bits_of_one_process(tmp_path):
    save_file(base_of("convnet"), tmp_path / "base.safetensors")
    settings = {**SMALL["convnet"], "standardize": "fixed", "mean": 128, "std": 64, "batch_size": 8}
    settings |= {"base": str(tmp_path / "base.safetensors"), "base_public": True}
    x, y = images(24), np.arange(24) % 3
    found = []
    for executor, workers in (("serial", 1), ("processes", 2)):
        with unlearnd.create_store(tmp_path / executor, placement_key=_key(tmp_path)) as store:
            store.ingest("d", x, user=np.arange(24), label=y, shards=2, slices=2)
            how = {"seed": 3, "settings": settings, "executor": executor, "workers": workers}
            store.train("m", dataset="d", backend="convnet", epochs=2, **how)
            # The children left features beside the data; what is erased in them goes, too.
            kept = sorted(path.name for path in tmp_path.joinpath(executor).rglob("*.features"))
            store.erase([4, 9])
            assert kept
            assert audit(store).failed == ()
            found.append([checkpoint.tensors for checkpoint in store.checkpoints("m")])
    assert found[0] == found[1]


def _key(folder):
    path = folder / "placement.key"
    path.write_text("5eed" * 16 + "\n")
    return path
