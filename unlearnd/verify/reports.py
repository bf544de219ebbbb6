"""What a verification found: one result per check, the level of assurance they add up to, and what remains unproven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from unlearnd.verify.values import Value


class Result(Enum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_CHECKED = "NOT CHECKED"


class Check(Value):
    """One check, which stands alone."""

    id: str
    title: str
    result: Result
    sentence: str
    """What was seen, what is wrong, or what would be needed."""


TITLES: Mapping[str, str] = {
    "R1": "signature",
    "R2": "form",
    "R3": "inclusion",
    "R4": "log signature",
    "R5": "witness quorum",
    "R6": "dates and deadline",
    "L1": "consistency",
    "L2": "log replay",
    "L3": "same log",
    "D0": "opening",
    "D1": "detail",
}
NEEDED = ("R1", "R2", "R3", "R4", "R6")
"""The checks that a receipt and a trust file alone must stand."""

LEVELS = (
    "a claim: the operator signed this statement and a tree head that holds it; other people may be shown another log",
    "one history: the statement is part of the log that was shown, and that log was replayed or compared",
    "a witnessed history: others saw the same log, too",
)
FURTHER = "Levels 3 to 5 need the store, the data and retraining: `unlearnd audit`."

LIMITS = (
    "that no copy is left elsewhere: backups, caches, exports, models distilled or fine-tuned outside the store",
    "that keys, salts and files said to be destroyed are really gone",
    "that a request was logged when it arrived; only the person's own proof of sending it can contradict the log",
    "that every row about a person was registered under that person; copies or quotes under other names remain",
    "from weights alone, that a row had no influence; replay shows that this recipe on these rows gives these weights",
    "anything on hardware where training cannot be repeated bit for bit",
    "that the model being served is the one in the log, unless the server attests its digest",
    "that no choice made while looking at the data (features, settings, shard count) still reflects it",
    "anything against an operator together with all witnesses, before the first tree head kept by somebody independent",
    "who made the request, whether refusing one was lawful, or anything else that is law",
    "that nobody can tell that an erasure took place, if they saw the model before and after",
)


class Report(Value):
    """What a verification found."""

    checks: tuple[Check, ...]
    about: Mapping[str, Any]
    """What the receipt says of itself; only filled when its form holds."""
    limits: tuple[str, ...] = LIMITS

    @property
    def failed(self) -> tuple[str, ...]:
        """The ids of the checks that failed."""
        return tuple(check.id for check in self.checks if check.result is Result.FAIL)

    @property
    def level(self) -> int | None:
        """The level of assurance; None when a check failed or one that is always needed could not run."""
        passed = {check.id for check in self.checks if check.result is Result.PASS}
        if self.failed or not passed.issuperset(NEEDED):
            return None
        if not passed.issuperset(("L2", "L3")) and "L1" not in passed:
            return 0
        return 2 if "R5" in passed else 1

    @property
    def exit_code(self) -> int:
        """0, or 3 when this receipt must not be relied on."""
        return 0 if self.level is not None else 3

    def __getitem__(self, check_id: str) -> Check:
        return next(check for check in self.checks if check.id == check_id)

    def as_json(self) -> dict[str, Any]:
        """Return the report for a script."""
        return {
            "failed": list(self.failed),
            "level": self.level,
            "levelMeans": None if self.level is None else LEVELS[self.level],
            "about": dict(self.about),
            "checks": [
                {"id": check.id, "title": check.title, "result": check.result.value, "sentence": check.sentence}
                for check in self.checks
            ],
            "limits": list(self.limits),
        }

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        for check in self.checks:
            yield f"{check.id}  {check.result.value:<11}  {check.title}: {check.sentence}"
        yield ""
        if self.level is None:
            broken = ", ".join(self.failed) or "a check that is always needed"
            yield f"DO NOT RELY ON THIS RECEIPT: {broken} did not hold. Assurance level: none."
        else:
            yield f"Assurance level {self.level}: {LEVELS[self.level]}. {FURTHER}"
        kept = self.about.get("objectsKept")
        if kept:
            yield f"NOT ALL IS DESTROYED: the receipt says that storage did not let go {kept} versions of objects."
        yield ""
        yield "No receipt can prove:"
        for limit in self.limits:
            yield f"- {limit}"
