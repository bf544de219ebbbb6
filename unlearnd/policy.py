"""Policies: what a law or a house rule says about requests, as data.

A policy is a YAML file that opens with the clause it encodes. It is read by `yaml.safe_load` into frozen models;
a key nobody knows is an error, every legal value carries its citation and every file the day it was reviewed. One
file may extend another. The digest of what results is in every receipt. Nothing here counts days: `clocks` does.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from unlearnd.digests import Digest, digest_of_json
from unlearnd.errors import InputError, NotFoundError, RefusedError

DEFAULT = "default"
STALE_DAYS = 365
"""A review older than this is worth a warning."""

Text = Annotated[str, Field(min_length=1, max_length=500)]
Code = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Part(BaseModel):
    """Part of a policy: fixed once read, and nothing in it that is not written down here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cited(Part):
    cite: Text
    """Where this is from; `operator's own` for a choice that no law makes."""


class Period(Cited):
    """A length of time, counted by the policy's rules."""

    value: Annotated[StrictInt, Field(ge=1, le=1000)]
    unit: Literal["day", "business_day", "month", "year"]


class Item(Cited):
    """A ground, an exemption or a reason, by a code that goes into ledger and log."""

    id: Code


class Law(Part):
    name: Text
    reviewed_on: date
    """The day somebody last held this file against the law."""
    unread: tuple[Text, ...] = ()
    """Citations that were written from memory: nobody has yet held them against a text of the law."""


class InScope(Cited):
    value: Literal[True]
    """A rule that leaves models out has no need of this store."""
    why: Text


class Right(Cited):
    name: Code
    model_in_scope: InScope
    grounds: tuple[Item, ...] = Field(min_length=1)


class Extension(Cited):
    """One more period, for a reason, if the person is told in time."""

    value: Annotated[StrictInt, Field(ge=1, le=1000)]
    unit: Literal["day", "month"]
    notify_within: Period
    reasons: tuple[Code, ...] = Field(min_length=1)


class Holidays(Part):
    """Whose public holidays count, in the codes of ISO 3166."""

    country: Annotated[str, Field(pattern=r"^[A-Z]{2}$")]
    subdivision: Annotated[str, Field(pattern=r"^[A-Z0-9]{1,3}$")] | None = None

    @model_validator(mode="after")
    def _known(self) -> "Holidays":
        from holidays import list_supported_countries  # heavy, and needed only where holidays count

        known = list_supported_countries(include_aliases=True)
        if self.country not in known:
            raise ValueError(f"no holidays are known for country '{self.country}'")
        if self.subdivision is not None and self.subdivision not in known[self.country]:
            raise ValueError(f"no holidays are known for '{self.subdivision}' in '{self.country}'")
        return self


class Counting(Cited):
    """How days and months are counted. The day of receipt is never counted."""

    missing_day: Literal["last_day_of_month"]
    """Where a month has no such date."""
    roll_forward_on: tuple[Literal["saturday", "sunday", "public_holiday"], ...]
    """A period that would end on such a day ends on the next that is none."""
    timezone: Text
    holidays: Holidays | None

    @field_validator("timezone")
    @classmethod
    def _exists(cls, name: str) -> str:
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"there is no time zone '{name}'") from None
        return name


class Pause(Cited):
    state: Literal["awaiting_identity"]


class Silence(Cited):
    means: Literal["refused", "breach"]


class Clock(Part):
    respond_within: Period
    acknowledge_within: Period | None
    extension: Extension | None
    counting: Counting
    pause_while: tuple[Pause, ...]
    internal_target: Period
    own_date: StrictBool
    """The request itself may name the day it is due, as an order does."""
    silence: Silence | None

    @model_validator(mode="after")
    def _adds_up(self) -> "Clock":
        extension = self.extension
        if extension is not None and extension.unit != self.respond_within.unit:
            raise ValueError("an extension is counted in the unit of the period that it extends")
        return self


class Identity(Cited):
    level: Literal["none", "reasonable_doubt_only", "reasonable"]
    authorised_agent: StrictBool
    keep_proof: Literal[False]
    """How identity was checked is kept, the proof never."""


class Refusal(Part):
    within: Period
    must_state: tuple[Code, ...]
    reasons: tuple[Item, ...] = Field(min_length=1)


class Hold(Cited):
    effect: Literal["restrict"]
    max_review_interval: Period


class HeldOut(Part):
    """A file of points that no model is trained on, and its label column."""

    file: Text
    label: Text


class Build(Cited):
    """When to spend compute on what erasures set back; their influence is gone at once either way."""

    when: Literal["now", "degraded", "accuracy", "schedule", "deadline"]
    constituents: Annotated[StrictInt, Field(ge=1)] | None = None
    """`degraded`: build once so many constituents of a model answer from less than all their slices."""
    floor: Probability | None = None
    """`accuracy`: build once a model is right less often than this on the held-out points."""
    held_out: HeldOut | None = None
    every_days: Annotated[StrictInt, Field(ge=1)] | None = None
    """`schedule`: build once the oldest erasure that waits for it is so old."""
    margin_days: Annotated[StrictInt, Field(ge=0)] | None = None
    """`deadline`: build once a request that waits for it is due within so many days."""

    @model_validator(mode="after")
    def _complete(self) -> "Build":
        needs = {
            "now": (),
            "degraded": ("constituents",),
            "accuracy": ("floor", "held_out"),
            "schedule": ("every_days",),
            "deadline": ("margin_days",),
        }[self.when]
        given = {name for name in ("constituents", "floor", "held_out", "every_days", "margin_days")
                 if getattr(self, name) is not None}  # fmt: skip
        if given != set(needs):
            named = ", ".join(needs) or "nothing else"
            raise ValueError(f"to build `when: {self.when}` takes {named}, not {', '.join(sorted(given)) or 'nothing'}")
        return self


class Placement(Cited):
    erasure_probability: Mapping[Annotated[str, Field(min_length=1)], Probability]
    """By group of the dataset: how likely a user of it is to ask for erasure."""


class TellUser(Cited):
    upon: tuple[Literal["received", "extended", "refused", "completed"], ...]
    """What the person must be told of: the commands that do these things say so."""


class TellRecipients(Cited):
    upon: tuple[Literal["completed"], ...]
    """Empty: nobody who was given a model need be told."""
    unless: tuple[Literal["impossible", "disproportionate"], ...]
    """The only reasons that there may be for not telling one."""


class Notify(Part):
    user: TellUser
    recipients: TellRecipients


class Records(Cited):
    keep_request: Period
    """How long what ties a closed request to a person is kept; `unlearnd requests expire` takes it away then."""
    suppression_list: StrictBool
    """Whether an erased user's data is refused when it is ingested again."""


class Policy(Part):
    """A policy, complete: what it extends is in it."""

    api_version: Literal["unlearnd.policy/v1"] = Field(alias="apiVersion")
    id: Code
    version: Text
    title: Text
    jurisdictions: tuple[Text, ...]
    not_legal_advice: Literal[True]
    law: Law
    right: Right
    clock: Clock
    identity: Identity
    refusal: Refusal
    exemptions: tuple[Item, ...]
    hold: Hold
    build: Build
    placement: Placement
    notify: Notify
    records: Records

    def as_json(self) -> dict[str, Any]:
        """Return the policy as JSON values; what its digest is of."""
        return self.model_dump(mode="json", by_alias=True)

    @cached_property
    def digest(self) -> Digest:
        """The SHA-256 of the canonical JSON: what receipts name the policy by."""
        return digest_of_json(self.as_json())

    def grounds(self) -> tuple[str, ...]:
        """Return the codes of what a request may rest on."""
        return tuple(ground.id for ground in self.right.grounds)

    def pauses_for(self, state: str) -> bool:
        """Say whether the clock stands still in a state."""
        return any(pause.state == state for pause in self.clock.pause_while)


def shipped_folder() -> Path:
    """Return the folder of the policies that come with unlearnd: inside the package, or beside it in a checkout."""
    inside = Path(__file__).parent / "policies"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "policies"


def policy_files(own: Path | None = None) -> dict[str, Path]:
    """Return all policy files by name: those shipped, and those of a store's own folder where there is one."""
    found = {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}
    for path in sorted(own.glob("*.yaml")) if own is not None and own.is_dir() else ():
        if path.stem in found:
            raise InputError(f"{path} has the name of a policy that comes with unlearnd: call it something else")
        found[path.stem] = path
    return found


def load_policy(name: str, own: Path | None = None) -> Policy:
    """Return the policy of that name, with what it extends; raise `NotFoundError` or `InputError` naming the file."""
    files = policy_files(own)
    if name not in files:
        raise NotFoundError(f"no policy '{name}'; there are: {', '.join(sorted(files))}")
    return _validated(files[name], merged(name, files))


def with_holidays(policy: Policy, where: str) -> Policy:
    """Return a policy that counts a country's public holidays; `where` is like `DE` or `US-CA`."""
    country, _, subdivision = where.upper().partition("-")
    counting = policy.clock.counting.model_dump(by_alias=True)
    counting["holidays"] = {"country": country, "subdivision": subdivision or None}
    values = _laid_over(policy.as_json(), {"clock": {"counting": counting}})
    return _validated(Path(f"--country {where}"), values)


def policy_from_json(given: Mapping[str, Any]) -> Policy:
    """Return a policy that was kept as JSON; what an earlier release let it say and this one does not is left out."""
    try:
        return Policy.model_validate(given)
    except ValidationError as error:
        faults = error.errors()
        if any(fault["type"] != "extra_forbidden" for fault in faults):
            raise RefusedError("a policy that the ledger keeps was made by another release: install that one") from None
        known = deepcopy(dict(given))
        for fault in faults:
            *above, last = fault["loc"]
            part: Any = known
            for name in above:
                part = part[name]
            del part[last]
        return Policy.model_validate(known)


def merged(name: str, files: Mapping[str, Path], below: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the values of a policy file laid over those it extends: objects are merged, all else is replaced."""
    given = read_file(files[name])
    if given.get("id") != name:
        raise InputError(f"{files[name]}: its id is {given.get('id')!r}, and must be the file's name, '{name}'")
    base = given.pop("extends", None)
    if base is None:
        return given
    if base in (*below, name):
        raise InputError(f"{files[name]}: policies extend each other in a circle: {' → '.join((*below, name, base))}")
    if base not in files:
        raise InputError(f"{files[name]}: it extends '{base}', and there are: {', '.join(sorted(files))}")
    return _laid_over(merged(base, files, (*below, name)), given)


def read_file(path: Path) -> dict[str, Any]:
    """Return what a policy file says, unchecked."""
    try:
        given = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path} is not YAML that can be used: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise InputError(f"{path} is not a policy: it holds no keys")
    return dict(given)


def check_file(path: Path, own: Path | None = None) -> Policy:
    """Return the policy in a file anywhere; raise `InputError` with all that is wrong in one sentence."""
    if not path.is_file():
        raise NotFoundError(f"no file {path}")
    files = {**policy_files(own), path.stem: path}
    policy = _validated(path, merged(path.stem, files))
    # What a base says counts for it alone: each file has its own day of review, and says what it is not.
    for key in ("law", "title", "not_legal_advice", "version"):
        if key not in read_file(path):
            raise InputError(f"{path}: it must say itself: {key}")
    return policy


def differences(one: Policy, other: Policy) -> list[tuple[str, str, str]]:
    """Return where two policies differ: the key, and both values; empty text where one has none."""
    left, right = _flat(one.as_json()), _flat(other.as_json())
    return [
        (key, left.get(key, ""), right.get(key, ""))
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key) != right.get(key)
    ]


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of a policy file: as of a policy, but that it may extend one and then say less."""
    schema: dict[str, Any] = Policy.model_json_schema(by_alias=True)
    for part in schema["$defs"].values():
        part.pop("required", None)
    schema["properties"]["extends"] = {"type": "string", "description": "The policy to which this one adds."}
    schema["required"] = ["apiVersion", "id", "version", "title", "not_legal_advice", "law"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, for which a key that is there twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not a text: put it in quotes")
            if keys.count(key) > 1:
                raise ValueError(f"the key '{key}' is there twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


@lru_cache(64)
def _parsed(text: str) -> Any:
    """Return what YAML says, read once per text: files are looked at before every request, and rarely change."""
    return yaml.load(text, Loader=_OnceLoader)


def _validated(path: Path, values: Mapping[str, Any]) -> Policy:
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'it'}: {_sentence(e)}" for e in error.errors(include_url=False)]
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise InputError(f"{path}: {'; '.join(wrong[:3])}{more}") from None


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such key"
    if error["type"] == "missing":
        return "is missing"
    return re.sub(r"^Value error, ", "", str(error["msg"]))


def _laid_over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in top.items():
        below = both.get(key)
        both[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _flat(value: Any, key: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        named = {f"{key}.{name}" if key else name: inner for name, inner in value.items()}
        return {k: v for name, inner in named.items() for k, v in _flat(inner, name).items()}
    if isinstance(value, list) and value and all(isinstance(entry, dict) and "id" in entry for entry in value):
        return {k: v for entry in value for k, v in _flat(entry["cite"], f"{key}.{entry['id']}").items()}
    if isinstance(value, list):
        return {key: ", ".join(map(str, value)) or "none"}
    return {key: "none" if value is None else str(value)}


def codes(items: Iterable[Item]) -> tuple[str, ...]:
    """Return the codes of grounds, exemptions or reasons."""
    return tuple(item.id for item in items)
