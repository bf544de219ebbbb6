"""What the section `[executor]` of a store's settings file may say to the executor `ray`."""

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.functional_validators import AfterValidator

from unlearnd.errors import InputError


def _check_amount(amount: float) -> float:
    # Ray's own rule, said before anything is started.
    if amount > 1 and amount != int(amount):
        raise ValueError("above 1 it should be a whole number")
    return amount


Amount = typing.Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_check_amount)]


class RaySettings(BaseModel):
    """Where to find a cluster, and what of it each task takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    address: str = ""
    """Of the cluster, as HOST:PORT or `auto`; empty: as RAY_ADDRESS says, else one that is started for the while."""
    num_cpus: Amount = 1
    num_gpus: Amount = 0
    resources: dict[str, Amount] = {}
    """Amounts of resources that the cluster's nodes were given names for."""
    shards: int = Field(1, ge=1)
    """Shards that a task builds together."""
    retries: int = Field(3, ge=0)
    """How often a task that was lost with its worker or node is begun again."""
    wait: float = Field(0, ge=0, allow_inf_nan=False)
    """Seconds to wait for a node that has what a task needs, in a cluster that grows on demand."""

    @property
    def needs(self) -> dict[str, float]:
        """What a task takes, by Ray's names."""
        given = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in given.items() if amount}


def check_settings(given: Mapping[str, Any]) -> RaySettings:
    """Return what `[executor]` says; raise `InputError` naming the entry that cannot be used."""
    names = sorted(RaySettings.model_fields)
    for name in given:
        if name not in names:
            raise InputError(f"[executor] {name} is no setting of the executor 'ray'; settings: {', '.join(names)}")
    try:
        settings = RaySettings.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise InputError(f"[executor] {where} cannot be {first['input']!r}: {said}") from None
    if settings.address.startswith("ray://"):
        raise InputError(
            "[executor] address: builds do not go through Ray Client; run the command on a machine of the cluster, "
            "with its HOST:PORT or `auto`"
        )
    return settings
