"""What a person may set, by scikit-learn's names, checked, with every default filled in.

Settings leave here as JSON values: they are hashed into the model's recipe, so a default is written down rather
than implied.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unlearnd.errors import InputError

NotNegative = typing.Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = typing.Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = typing.Annotated[float, Field(gt=0, le=1)]


class SgdSettings(BaseModel):
    """Settings of `sgd`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    loss: Literal["log_loss", "hinge", "modified_huber", "squared_hinge", "perceptron"] = "log_loss"
    penalty: Literal["l2", "l1", "elasticnet"] | None = "l2"
    alpha: NotNegative = 1e-4
    l1_ratio: typing.Annotated[float, Field(ge=0, le=1)] = 0.15
    fit_intercept: bool = True
    learning_rate: Literal["optimal", "constant", "invscaling"] = "optimal"
    eta0: Positive = 0.01
    power_t: typing.Annotated[float, Field(allow_inf_nan=False)] = 0.5
    standardize: bool = True

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if self.learning_rate == "optimal" and self.alpha == 0:
            raise ValueError("learning_rate 'optimal' needs an alpha above 0")
        return self


class ForestSettings(BaseModel):
    """Settings of `forest`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    kind: Literal["random_forest", "gradient_boosting"] = "random_forest"
    n_estimators: int = Field(100, ge=1, le=100_000)
    max_depth: typing.Annotated[int, Field(ge=1)] | None = None
    min_samples_leaf: int = Field(1, ge=1)
    max_features: Literal["sqrt", "log2", "all"] = "sqrt"
    bootstrap: bool = True
    learning_rate: Positive = 0.1
    subsample: Share = 1.0

    @model_validator(mode="before")
    @classmethod
    def _fill_in_by_kind(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("kind") != "gradient_boosting":
            return given
        return {"max_depth": 3, "max_features": "all", **given}


def check_settings(backend: str, model: type[BaseModel], given: Mapping[str, object]) -> dict[str, Any]:
    """Return `given` as JSON values with every default filled in; raise `InputError` naming the setting."""
    names = sorted(model.model_fields)
    for name in given:
        if name not in names:
            raise InputError(f"backend '{backend}' has no setting '{name}'; settings: {', '.join(names)}")
    try:
        return model.model_validate(dict(given)).model_dump(mode="json")
    except ValidationError as error:
        raise InputError(_describe(backend, error)) from None


def _describe(backend: str, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if not first["loc"]:
        return f"backend '{backend}': {problem}"
    return f"backend '{backend}': setting '{first['loc'][0]}' {problem}, not {first['input']!r}"
