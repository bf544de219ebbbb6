"""Count days and months as a policy says: when a request is due, and until when it may be extended.

The day of receipt is not counted. A month ends on the same date of another month, or on its last day where it has no
such date; a period that ends on a day the policy names ends on the next that is none. A day ends when it ends where
the policy is at home. A pause adds the days it took before any rolling, so it never makes a deadline earlier. Nor does
it give more than a period that begins so many days later would: a month begun in February is a short one.
"""

from calendar import monthrange
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from unlearnd.errors import InputError
from unlearnd.policy import Counting, Period, Policy

_ONE = timedelta(days=1)
LAST_YEAR = 9000
"""Dates beyond are a slip of the pen, and calendars end."""


@dataclass(frozen=True)
class Dates:
    """What the clock of one request says."""

    received: date
    due: date
    extended_due: date | None
    """None where the policy knows no extension."""
    extend_by: date | None
    """The last day on which the person can be told of one."""
    acknowledge_by: date | None
    refuse_by: date
    target: date
    """What the operator aims at."""


def dates_of(policy: Policy, received: date, paused_days: int = 0) -> Dates:
    """Return all dates of a request received on a day, after pauses of so many days in all."""
    if not 1000 <= received.year <= LAST_YEAR:
        raise InputError(f"{received} is no day on which a request was received")
    clock, counting = policy.clock, policy.clock.counting

    def end(value: int, unit: str, pause: int = paused_days) -> date:
        stood_still = _add(received, value, unit, counting) + pause * _ONE
        begun_later = _add(received + pause * _ONE, value, unit, counting)
        return _roll(min(stood_still, begun_later), unit, counting)

    first = clock.respond_within
    extension = clock.extension
    return Dates(
        received=received,
        due=end(first.value, first.unit),
        # Both periods together from the day of receipt: a first one that rolled over a weekend is not counted twice.
        extended_due=end(first.value + extension.value, first.unit) if extension else None,
        extend_by=end(extension.notify_within.value, extension.notify_within.unit) if extension else None,
        # To confirm that a request came in needs nobody's identity: no pause moves this.
        acknowledge_by=end(clock.acknowledge_within.value, clock.acknowledge_within.unit, 0)
        if clock.acknowledge_within
        else None,
        refuse_by=end(policy.refusal.within.value, policy.refusal.within.unit),
        target=end(clock.internal_target.value, clock.internal_target.unit),
    )


def day_of(policy: Policy, moment: datetime) -> date:
    """Return the day a moment falls on where the policy is at home."""
    return moment.astimezone(_zone(policy)).date()


def end_of(policy: Policy, day: date) -> datetime:
    """Return the last minute of a day where the policy is at home, in UTC: what is done then is done that day."""
    return datetime.combine(day, time(23, 59), _zone(policy)).astimezone(UTC)


def noon_of(policy: Policy, day: date) -> datetime:
    """Return the noon of a day where the policy is at home, in UTC: for a day given without an hour."""
    return datetime.combine(day, time(12), _zone(policy)).astimezone(UTC)


def add_period(policy: Policy, start: date, period: Period) -> date:
    """Return the day on which a period from `start` ends, without rolling."""
    return _add(start, period.value, period.unit, policy.clock.counting)


def is_working_day(day: date, counting: Counting) -> bool:
    """Say whether a day counts as a business day: no weekend, and no public holiday where a calendar is named."""
    return day.weekday() < 5 and not _is_holiday(day, counting)


def paused_days(policy: Policy, pauses: Iterable[tuple[datetime, datetime]]) -> int:
    """Return how many days pauses took in all; one that ends on the day it began took none."""
    return sum(max(0, (day_of(policy, end) - day_of(policy, begin)).days) for begin, end in pauses)


def _add(start: date, value: int, unit: str, counting: Counting) -> date:
    if unit == "day":
        return start + value * _ONE
    if unit in ("month", "year"):
        months = start.month - 1 + value * (12 if unit == "year" else 1)
        year, month = start.year + months // 12, months % 12 + 1
        return date(year, month, min(start.day, monthrange(year, month)[1]))
    day = start
    while value:
        day += _ONE
        value -= is_working_day(day, counting)
    return day


def _roll(day: date, unit: str, counting: Counting) -> date:
    if unit == "business_day":
        while not is_working_day(day, counting):
            day += _ONE
        return day
    weekend = {5: "saturday", 6: "sunday"}
    rolling = counting.roll_forward_on
    while weekend.get(day.weekday()) in rolling or ("public_holiday" in rolling and _is_holiday(day, counting)):
        day += _ONE
    return day


def _is_holiday(day: date, counting: Counting) -> bool:
    where = counting.holidays
    return where is not None and day in _holidays(where.country, where.subdivision, day.year)


@cache
def _holidays(country: str, subdivision: str | None, year: int) -> frozenset[date]:
    from holidays import country_holidays  # heavy, and needed only where holidays count

    return frozenset(country_holidays(country, subdiv=subdivision, years=year))


def _zone(policy: Policy) -> ZoneInfo:
    return ZoneInfo(policy.clock.counting.timezone)
