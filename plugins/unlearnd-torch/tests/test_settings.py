from __future__ import annotations

import json

import pytest
from unlearnd_torch import MlpBackend, TorchBackend

from unlearnd.errors import InputError


def build(shape, classes, width: int = 8, drop=0.5):
    raise NotImplementedError


def test_defaults_are_filled_in_and_settings_are_json():
    settings = MlpBackend().settings({"hidden": [64, 32], "optimizer": "adamw"})
    assert json.loads(json.dumps(settings)) == settings
    assert settings["hidden"] == [64, 32]
    assert (settings["lr"], settings["weight_decay"], settings["batch_size"]) == (0.001, 0.01, 32)
    assert MlpBackend().settings(settings) == settings


def test_an_unknown_setting_is_named_with_those_there_are():
    with pytest.raises(InputError, match=r"^backend 'mlp' has no setting 'lrr'; settings: activation, batch"):
        MlpBackend().settings({"lrr": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1}, "setting 'lr' should be greater than 0, not -1"),
        ({"lr": float("nan")}, "setting 'lr' should be"),
        ({"dropout": 1}, "setting 'dropout' should be less than 1, not 1"),
        ({"optimizer": "lion"}, "setting 'optimizer' should be 'sgd', 'adam' or 'adamw', not 'lion'"),
        ({"hidden": [8, 0]}, "setting 'hidden.1' should be greater than or equal to 1, not 0"),
        ({"batch_size": 0}, "setting 'batch_size'"),
        ({"nesterov": True, "momentum": 0}, "nesterov needs a momentum above 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(given, message):
    with pytest.raises(InputError) as raised:
        MlpBackend().settings(given)
    assert message in str(raised.value)
    assert str(raised.value).startswith("backend 'mlp'")


def test_parameters_of_build_are_settings():
    backend = TorchBackend("net", "1", build=build)
    assert backend.settings({"width": 16, "lr": 0.1})["width"] == 16
    assert backend.settings({})["drop"] == 0.5
    with pytest.raises(InputError, match="backend 'net' has no setting 'hidden'; settings: batch_size"):
        backend.settings({"hidden": 3})
    with pytest.raises(InputError, match="setting 'width'"):
        backend.settings({"width": "wide"})


def test_a_parameter_of_build_may_not_hide_a_training_setting():
    def hides(shape, classes, lr=1.0):
        raise NotImplementedError

    def lacks_default(shape, classes, depth):
        raise NotImplementedError

    with pytest.raises(InputError, match="'lr'"):
        TorchBackend("net", "1", build=hides).settings({})
    with pytest.raises(InputError, match="'depth'"):
        TorchBackend("net", "1", build=lacks_default).settings({})
