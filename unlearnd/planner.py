"""Compare ways of cutting a dataset up by what erasures will cost, and recommend one.

All of it is arithmetic on `costs`; nothing is measured and nothing is trained here. Accuracy is not computed either:
what is known about it (more than about twenty shards hurt) is a limit on what is recommended, and is said.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unlearnd.costs import (
    Scheme,
    even_scheme,
    exact_speedup,
    expected_batch,
    formula_speedup,
    scheme_of,
    storage_bytes,
    thinned,
)
from unlearnd.errors import InputError
from unlearnd.layouts import KINDS, Risk, freeze

SHARDS = (5, 10, 20, 50)
SLICES = (1, 10, 50)
MOST_SHARDS = 20
"""More cost over 5 points of accuracy even on simple tasks (Bourtoule et al., section VII-B)."""
FEWEST_POINTS = 100
"""A shard with fewer points than this is not recommended."""
SPARED = 0.05
"""How much more retraining is worth less storage, where no prices are given."""
DAYS = 30
MOST_PLACES = 1_000_000
MOST_THINNED = 2_000
"""Checkpoints of more slices than this are not thinned: choosing takes time and memory with their square."""


@dataclass(frozen=True)
class Question:
    """What is known beforehand."""

    points: int
    requests: float | None = None
    """Requests that one build takes together; None where `per_day` says how many come in."""
    per_day: float | None = None
    every: float = 1.0
    """Days between builds."""
    shards: int | None = None
    slices: int | None = None
    keep: int | None = None
    epochs: float = 10.0
    schedule: str = "uniform"
    points_each: float = 1.0
    """Points of one user."""
    scattered: bool = False
    """Whether those lie in as many places: the unit of placement is the point."""
    risks: Sequence[Risk] = ()
    state_bytes: float | None = None
    samples_per_second: float | None = None
    compute_price: float | None = None
    """Of an hour."""
    storage_price: float | None = None
    """Of a gigabyte for a month."""

    @property
    def batch(self) -> float:
        """Requests that a build takes together, on average."""
        return self.per_day * self.every if self.per_day is not None else self.requests or 1.0


@dataclass(frozen=True)
class Option:
    """One way of cutting a dataset up, and what erasures cost with it."""

    shards: int
    slices: int
    placement: str
    kept: tuple[int, ...] | None
    """The checkpoints of a shard that are kept; None for all."""
    samples_per_erasure: float
    speedup: float
    """Over training on everybody else from scratch, once for the same requests."""
    checkpoints: int
    storage_bytes: float | None
    seconds_per_erasure: float | None
    money: float | None
    """Of a month: of its builds, or of one where nothing says how many; and of storage."""


@dataclass(frozen=True)
class Plan:
    """Ways to choose from, and the one recommended."""

    options: tuple[Option, ...]
    recommended: Option
    sentence: str
    formula_speedup: float | None
    """The paper's product; None unless points, requests, shards and slices are all given."""
    exact_speedup: float | None


def make_plan(question: Question) -> Plan:
    """Return what to choose from and what to choose."""
    check_question(question)
    options = tuple(_options(question))
    fewest = min(option.shards for option in options)
    sound = [option for option in options if _is_sound(question, option)]
    best = _best(sound or [option for option in options if option.shards == fewest])
    formula = exact = None
    if question.requests is not None and question.shards is not None and question.slices is not None:
        formula = formula_speedup(question.points, question.shards, question.slices, question.requests)
        even = even_scheme(question.points, question.shards, question.slices, question.epochs)
        exact = exact_speedup(even, question.requests)
    return Plan(options, best, _sentence(question, best, options), formula, exact)


def check_question(question: Question) -> None:
    """Raise `InputError` unless the numbers make sense together."""
    q = question
    if q.points < 2:
        raise InputError(f"a plan needs at least 2 points, not {q.points:,}")
    shards, slices = 1 if q.shards is None else q.shards, 1 if q.slices is None else q.slices
    if shards < 1 or slices < 1 or shards > q.points or shards * slices > MOST_PLACES:
        raise InputError(
            f"{shards:,} shards of {slices:,} slices cannot be made of {q.points:,} points: at least 1 and at most as "
            f"many shards as points, and {MOST_PLACES:,} slices in all shards"
        )
    for name, value in (
        ("requests", q.requests),
        ("requests per day", q.per_day),
        ("days between builds", q.every),
        ("points of a user", q.points_each),
        ("epochs", q.epochs),
        ("the size of a state", q.state_bytes),
        ("samples per second", q.samples_per_second),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{name} must be more than 0, not {value:g}")
    for name, value in (("the price of compute", q.compute_price), ("the price of storage", q.storage_price)):
        if value is not None and not 0 <= value < float("inf"):
            raise InputError(f"{name} must be a number from 0 up, not {value:g}")
    if q.requests is not None and q.per_day is not None:
        raise InputError("give either requests or requests per day, not both")
    if q.batch * q.points_each >= q.points:
        raise InputError(f"{q.batch:g} requests in one build would erase all of {q.points:,} points")
    check_keep(q.keep, q.slices)
    if q.compute_price is not None and q.samples_per_second is None:
        raise InputError("the price of compute needs samples per second: give them, or plan for a model of a store")
    if q.storage_price is not None and q.state_bytes is None:
        raise InputError("the price of storage needs the size of a state: give it, or plan for a model of a store")


def read_keep(given: int | str) -> int:
    """Return a number of checkpoints to keep, however it is written; raise `InputError` for what is none."""
    if isinstance(given, bool) or not str(given).isdecimal():
        raise InputError(f"keep takes a number of checkpoints or 'all', not '{given}'")
    return int(given)


def check_keep(keep: int | None, slices: int | None) -> None:
    """Raise `InputError` unless so many checkpoints can be kept of so many slices."""
    if keep is None:
        return
    if keep < 1 or (slices is not None and keep > slices):
        of = "" if slices is None else f" of {slices:,}"
        raise InputError(f"keep at least 1 checkpoint of each shard, and not more than it has slices, not {keep:,}{of}")
    if slices is not None and slices > MOST_THINNED and keep < slices:
        raise InputError(f"checkpoints of more than {MOST_THINNED:,} slices cannot be thinned; keep all of them")


def schemes(question: Question, shards: int, slices: int) -> dict[str, Scheme]:
    """Return by placement what costs depend on."""
    q = question
    found = {"uniform": even_scheme(q.points, shards, slices, q.epochs, q.schedule)}
    # Without slices there is nothing to order.
    if q.risks and (slices > 1 or q.slices):
        # All layouts where the cut is settled; else the table would not be read.
        names = KINDS if q.shards and q.slices else ("aware",)
        for name in names:
            ordered, power = KINDS[name]
            layout = freeze(q.risks, shards, ordered=ordered, power=power)
            found[name] = scheme_of(layout, q.points, shards, slices, q.epochs, q.schedule)
    return found


def cost_of_build(question: Question, scheme: Scheme) -> float:
    """Return the samples that one build retrains."""
    each, together = (question.points_each, 1.0) if question.scattered else (1.0, question.points_each)
    return expected_batch(scheme, question.batch * each, together, arriving=question.per_day is not None)


def _options(question: Question) -> Iterable[Option]:
    q = question
    all_shards = [q.shards] if q.shards else [s for s in SHARDS if s * 2 <= q.points] or [1]
    for shards in all_shards:
        for slices in [q.slices] if q.slices else SLICES:
            for placement, scheme in schemes(q, shards, slices).items():
                for keep in _keeps(q, slices):
                    yield _option(q, shards, slices, placement, thinned(scheme, keep))


def _keeps(question: Question, slices: int) -> list[int | None]:
    """Return how many checkpoints to keep: as asked, else all or a fifth."""
    if question.keep is not None:
        return [question.keep] if question.keep < slices else [None]
    return [None, -(-slices // 5)] if 20 <= slices <= MOST_THINNED else [None]


def _option(question: Question, shards: int, slices: int, placement: str, scheme: Scheme) -> Option:
    q = question
    samples = cost_of_build(q, scheme)
    left = 1 - q.batch * q.points_each / q.points
    states = int(storage_bytes(shards, slices, 1, len(scheme.kept) if scheme.kept else None))
    size = None if q.state_bytes is None else states * q.state_bytes
    money = None
    if q.compute_price is not None or q.storage_price is not None:
        builds = DAYS / q.every if q.per_day is not None else 1.0
        hours = builds * samples / (q.samples_per_second or 1.0) / 3600
        money = hours * (q.compute_price or 0.0) + (size or 0.0) / 1e9 * (q.storage_price or 0.0)
    return Option(
        shards=shards,
        slices=slices,
        placement=placement,
        kept=scheme.kept,
        samples_per_erasure=samples / q.batch,
        speedup=scheme.from_scratch * left / samples,
        checkpoints=states,
        storage_bytes=size,
        seconds_per_erasure=None if q.samples_per_second is None else samples / q.batch / q.samples_per_second,
        money=money,
    )


def _is_sound(question: Question, option: Option) -> bool:
    """Say whether accuracy is likely to survive so many shards."""
    given = question.shards is not None
    return given or (option.shards <= MOST_SHARDS and question.points / option.shards >= FEWEST_POINTS)


def _best(options: Sequence[Option]) -> Option:
    if options[0].money is not None:
        return min(options, key=lambda option: (option.money or 0.0, option.samples_per_erasure, option.checkpoints))
    enough = min(option.samples_per_erasure for option in options) * (1 + SPARED)
    near = [option for option in options if option.samples_per_erasure <= enough]
    return min(near, key=lambda option: (option.checkpoints, option.samples_per_erasure))


def _sentence(question: Question, best: Option, options: Sequence[Option]) -> str:
    """Return the recommendation as one sentence."""
    kept = f", keeping {len(best.kept)} of {best.slices} checkpoints" if best.kept else ""
    placed = f", placement {best.placement}" if question.risks else ""
    slices = "1 slice" if best.slices == 1 else f"{best.slices} slices"
    shards = "1 shard" if best.shards == 1 else f"{best.shards} shards"
    parts = [
        f"Take {shards} of {slices}{placed}{kept}: an erasure retrains {best.samples_per_erasure:,.0f} samples on "
        f"average, and a build {best.speedup:,.1f}× less than training anew"
    ]
    if best.money is not None:
        parts.append(f"for {best.money:,.{2 if best.money >= 1 else 4}f} a month")
    skipped = [option for option in options if not _is_sound(question, option) and option.speedup > best.speedup]
    if best.speedup < 1.2:
        parts.append(
            f"which is hardly less, because {question.batch:,.4g} request{'' if question.batch == 1 else 's'} in one "
            "build hit most of what there is"
        )
    elif best.shards > MOST_SHARDS:
        parts.append(f"though more than {MOST_SHARDS} shards cost accuracy even on simple tasks")
    elif skipped:
        parts.append("while more shards would retrain less and answer worse")
    return ", ".join(parts) + "."
