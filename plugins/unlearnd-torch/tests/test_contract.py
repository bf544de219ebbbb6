"""Every backend of this plugin keeps the contract, on every device that is here."""

from __future__ import annotations

import pytest
from torch import nn
from unlearnd_torch import MlpBackend, TorchBackend

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
