"""What a person may set about training, checked, with every default filled in.

Settings leave here as JSON values: they are hashed into the model's recipe, so that two spellings of the same
settings must come out equal, and a default is written down rather than implied.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from unlearnd.errors import InputError

Rate = typing.Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Finite = typing.Annotated[float, Field(allow_inf_nan=False)]
Count = typing.Annotated[int, Field(ge=1, le=65536)]
NotNegative = typing.Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = typing.Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainingSettings(BaseModel):
    """Settings of every backend that trains with our optimisers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    batch_size: int = Field(32, ge=1, le=65536)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.05
    momentum: Rate = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: Positive = 1e-8
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int = Field(1000, ge=1)
    gamma: Positive = 0.1
    standardize: Literal["auto", "feature", "global", "off"] = "auto"
    clip_norm: NotNegative = 0.0
    label_smoothing: Rate = 0.0
    tf32: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_in_by_optimizer(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        usual = {"adam": {"lr": 0.001}, "adamw": {"lr": 0.001, "weight_decay": 0.01}}
        return {**usual.get(str(given.get("optimizer")), {}), **given}

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class ModuleSettings(TrainingSettings):
    """Settings of every backend that trains an `nn.Module`."""

    mixed_precision: Literal["off", "bfloat16"] = "off"


class ImageSettings(ModuleSettings):
    """Settings of every network for images."""

    layout: Literal["auto", "hw", "hwc", "chw"] = "auto"
    crop_padding: int = Field(0, ge=0, le=256)
    flip: bool = False
    channels_last: bool = False
    standardize: Literal["auto", "channel", "feature", "global", "fixed", "off"] = "auto"  # type: ignore[assignment]
    mean: tuple[Finite, ...] = ()
    std: tuple[Positive, ...] = ()
    base: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    base_public: bool = False
    train: str = Field("all", pattern=r"^(all|head|last-[1-9][0-9]{0,3})$")

    @model_validator(mode="before")
    @classmethod
    def _train_the_head_of_a_base(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("base") is not None:
            return {"train": "head", **given}
        return given

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if self.base is None:
            if self.train != "all" or self.base_public:
                raise ValueError("train and base_public are for a model on a base")
            return self
        if self.train == "all":
            raise ValueError("a base is frozen: train the head, or last-1, last-2, … blocks below it")
        if self.crop_padding or self.flip or self.channels_last:
            raise ValueError("on a base, features are computed once: no crop_padding, flip or channels_last")
        if self.standardize not in ("fixed", "off"):
            raise ValueError(
                "a base wants images as it was shown them: standardize must be 'fixed', with its mean and std, or 'off'"
            )
        return self

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _accept_one_number(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int | float) and not isinstance(given, bool) else given

    @model_validator(mode="after")
    def _check_fixed(self) -> Self:
        if self.standardize == "fixed" and not (self.mean and len(self.mean) == len(self.std)):
            raise ValueError("standardize 'fixed' needs mean and std, one number each or one per channel")
        if self.standardize != "fixed" and (self.mean or self.std):
            raise ValueError("mean and std are for standardize 'fixed'")
        return self


class ConvNetSettings(ImageSettings):
    """Settings of `convnet`."""

    channels: tuple[Count, Count] = (16, 32)
    kernel: int = Field(5, ge=1, le=31)
    hidden: Count = 128
    dropout: Rate = 0.0

    @field_validator("kernel")
    @classmethod
    def _check_odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError("should be odd, so that an image keeps its size")
        return kernel


class ResNetSettings(ImageSettings):
    """Settings of `resnet`."""

    depth: Literal[18, 34, 50] = 18
    stem: Literal["auto", "small", "large"] = "auto"
    width: Count = 64


class WideResNetSettings(ImageSettings):
    """Settings of `wide_resnet`."""

    depth: int = Field(16, ge=10, le=1000)
    width: Count = 4
    dropout: Rate = 0.0

    @field_validator("depth")
    @classmethod
    def _check_depth(cls, depth: int) -> int:
        if depth % 6 != 4:
            raise ValueError("should be 4 more than a multiple of 6: 10, 16, 22, 28, 40")
        return depth


NETWORKS: dict[str, type[ImageSettings]] = {
    "convnet": ConvNetSettings,
    "resnet": ResNetSettings,
    "wide_resnet": WideResNetSettings,
}
"""Settings of the networks by the name of their backend."""


class MlpSettings(TrainingSettings):
    """Settings of `mlp`."""

    hidden: tuple[typing.Annotated[int, Field(ge=1)], ...] = (128,)
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu"
    dropout: Rate = 0.0

    @field_validator("hidden", mode="before")
    @classmethod
    def _accept_one_width(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int) and not isinstance(given, bool) else given


def check_settings(backend: str, model: type[BaseModel], given: Mapping[str, object]) -> dict[str, Any]:
    """Return `given` as JSON values with every default filled in; raise `InputError` naming the setting."""
    names = sorted(model.model_fields)
    for name in given:
        if name not in names:
            raise InputError(f"backend {backend!r} has no setting {name!r}; settings: {', '.join(names)}")
    try:
        return model.model_validate(dict(given)).model_dump(mode="json")
    except ValidationError as error:
        raise InputError(_describe(backend, error)) from None


@lru_cache(maxsize=64)
def settings_of_build(build: Callable[..., Any]) -> type[ModuleSettings]:
    """Return the common settings with the keyword parameters of `build` added.

    Raise `InputError` when a parameter has no default or takes the name of a common setting.
    """
    shape_and_classes = 2
    try:
        hints = typing.get_type_hints(build)
    except (NameError, TypeError):  # annotations that cannot be looked up; the defaults tell the types then
        hints = {}
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(build).parameters.values())[shape_and_classes:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.default is parameter.empty:
            raise InputError(f"parameter {parameter.name!r} of build needs a default: it is a setting")
        if parameter.name in ModuleSettings.model_fields:
            raise InputError(f"parameter {parameter.name!r} of build takes the name of a training setting")
        told_by_default = Any if parameter.default is None else type(parameter.default)
        fields[parameter.name] = (hints.get(parameter.name, told_by_default), parameter.default)
    return create_model("BuildSettings", __base__=ModuleSettings, **fields)


def _describe(backend: str, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if not first["loc"]:
        return f"backend {backend!r}: {problem}"
    name = ".".join(str(part) for part in first["loc"])
    return f"backend {backend!r}: setting {name!r} {problem}, not {first['input']!r}"
