"""How erasure probabilities by group are given on the command line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unlearnd.cli.show import note
from unlearnd.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from unlearnd.layouts import Risk

policy_option = click.option("--policy", metavar="NAME", help="Take erasure probabilities by group from this policy.")
risk_option = click.option(
    "--risk",
    multiple=True,
    metavar="GROUP=P[:SHARE]|FILE",
    help="How likely users of a group are to be erased, and their share of the points; or a JSON file. Repeat it.",
)


def read_risks(given: tuple[str, ...], policy: str | None, own: Path | None, *, needed: bool = True) -> "list[Risk]":
    """Return risks as they are given: `group=probability[:share]`, JSON files of `{group: probability}` or `{group:
    [probability, share]}`, and of a policy what they do not say. `group=:share` leaves the probability to it. A policy
    that states none is an error where they are `needed`, else worth a note.
    """
    from unlearnd.layouts import Risk  # heavy: numpy

    known = _probabilities(policy, own, needed) if policy is not None else {}
    found: list[Risk] = []
    for text in given:
        group, equals, numbers = text.rpartition("=")
        if not equals:
            found.extend(Risk(name, *_numbers(name, value, known)) for name, value in _mapping(text).items())
        else:
            found.append(Risk(group, *_numbers(group, numbers.split(":"), known)))
    said = {risk.group for risk in found}
    return [*found, *(Risk(group, probability) for group, probability in known.items() if group not in said)]


def _probabilities(policy: str, own: Path | None, needed: bool) -> dict[str, float]:
    from unlearnd.policy import load_policy  # heavy: pydantic

    stated = load_policy(policy, own).placement.erasure_probability
    if not stated:
        said = (
            f"the policy '{policy}' states no erasure probabilities: add placement.erasure_probability to one of "
            "your own that extends it, or give --risk"
        )
        if needed:
            raise InputError(said)
        note(f"{said[0].upper()}{said[1:]}. Until then everybody counts as equally likely to leave.")
    return {group: float(probability) for group, probability in stated.items()}


def _mapping(file: str) -> dict[str, Any]:
    try:
        stored = json.loads(Path(file).read_text())
    except FileNotFoundError:
        raise NotFoundError(f"there is no file '{file}'; a risk is written group=probability[:share]") from None
    except (OSError, ValueError):
        raise InputError(f"{file} cannot be read as JSON") from None
    if not isinstance(stored, dict):
        raise InputError(f'{file}: risks are written {{"group": probability}} or {{"group": [probability, share]}}')
    return stored


def _numbers(group: str, given: Any, known: dict[str, float]) -> tuple[float, float | None]:
    parts = given if isinstance(given, list) else [given]
    if parts and parts[0] == "" and group in known:
        parts = [known[group], *parts[1:]]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(parts) or len(parts) not in (1, 2):
        raise InputError(f"the risk of '{group}' must be a probability, or a probability and a share")
    return numbers[0], numbers[1] if len(numbers) == 2 else None
