"""Every backend of this plugin keeps the contract, on every device that is here."""

from __future__ import annotations

import pytest
from torch import nn
from unlearnd_torch import MlpBackend, NetworkBackend, TorchBackend

from unlearnd.testing import BackendContract


class TestMlp(BackendContract):
    @pytest.fixture
    def backend(self):
        return MlpBackend()

    @pytest.fixture
    def settings(self):
        return {"hidden": [8], "batch_size": 16, "dropout": 0.2}


def build(shape, classes, channels: int = 4):
    return nn.Sequential(
        nn.Conv2d(shape[0], channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(channels * shape[1] * shape[2], classes),
    )


class TestModule(BackendContract):
    @pytest.fixture
    def backend(self):
        return TorchBackend("net", "1", build=build)

    @pytest.fixture
    def settings(self):
        return {"batch_size": 16, "optimizer": "adam"}

    @pytest.fixture
    def shape(self):
        return (1, 4, 4)

    @pytest.fixture
    def dtype(self):
        return "uint8"


class Images(BackendContract):
    @pytest.fixture
    def backend(self):
        return NetworkBackend(self.name)

    @pytest.fixture
    def settings(self):
        return {"batch_size": 16, "crop_padding": 1, "flip": True, **self.small}

    @pytest.fixture
    def feature_settings(self):
        frozen = {"base": "0" * 64, "base_public": True, "train": "head"}
        return {"batch_size": 16, "standardize": "fixed", "mean": 128, "std": 64, **frozen, **self.small}

    @pytest.fixture
    def base(self, backend, shape, classes):
        drawn = backend.initial_state(backend.settings(self.small), shape, classes, 9)
        return {name.removeprefix("module."): drawn[name] for name in drawn if name.startswith("module.")}

    @pytest.fixture
    def shape(self):
        return (6, 6, 1)

    @pytest.fixture
    def dtype(self):
        return "uint8"


class TestConvNet(Images):
    name, small = "convnet", {"channels": [3, 4], "kernel": 3, "hidden": 8, "dropout": 0.2}


class TestResNet(Images):
    name, small = "resnet", {"width": 2, "optimizer": "adam", "clip_norm": 1.0}


class TestWideResNet(Images):
    name, small = "wide_resnet", {"depth": 10, "width": 1, "label_smoothing": 0.1}
