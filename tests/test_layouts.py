"""Layouts by risk: made from priors alone, in whole numbers, and where they put people."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearnd.errors import InputError
from unlearnd.layouts import (
    AXIS,
    FrozenLayout,
    Risk,
    complete_shares,
    constant_for,
    freeze,
    masses,
    place_by_risk,
    shard_by_risk,
)

COUNTRIES = (Risk("c1", 3e-6, 0.7717), Risk("c2", 3e-5, 0.1001), Risk("c3", 6e-6, 0.1282))
SVHN = 604_833
KINDS = [(True, None), (False, 1.0), (False, 0.5), (True, 1.0)]


def literally(probabilities: list[float], most: float) -> list[int]:
    """Algorithm 1 as the paper prints it, a point at a time."""
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    shards, shard, here = [0] * len(order), 0, []
    for point in order:
        here.append(probabilities[point])
        if sum(here) >= most and len(here) > 1:
            shard, here = shard + 1, [probabilities[point]]
        shards[point] = shard
    return shards


@given(st.lists(st.integers(0, 64), min_size=1, max_size=60), st.integers(1, 128))
def test_algorithm_1_does_what_the_paper_prints(eighths: list[int], most: int) -> None:
    # In 64ths, which floats add without rounding.
    probabilities = [n / 64 for n in eighths]
    assert shard_by_risk(probabilities, most / 64).tolist() == literally(probabilities, most / 64)


def test_the_papers_three_countries_make_nineteen_shards() -> None:
    sizes = [round(risk.share * SVHN) for risk in COUNTRIES if risk.share]
    each = np.repeat([risk.probability for risk in COUNTRIES], sizes)
    expected = float(each.sum())
    assert expected == pytest.approx(3.682, abs=0.001)
    derived = constant_for(expected, 19)
    assert derived == pytest.approx(0.199, abs=0.001)
    for most in (derived, 0.2):
        shards = shard_by_risk(each, most)
        assert shards.max() + 1 == 19
        # Every full shard is just below the constant, and those with the likeliest to leave are the smallest.
        requests = np.bincount(shards, each)
        assert (requests < most).all()
        assert (requests[:-1] > most - 3e-5 - 1e-12).all()
        points = np.bincount(shards)
        assert points[:7].min() == pytest.approx(10 * points[10:18].max(), rel=0.01)


def test_algorithm_1_as_a_layout_gives_every_shard_the_same_requests() -> None:
    points, requests = masses(freeze(COUNTRIES, 19, ordered=False, power=1.0), 19, 4)
    assert requests.sum(axis=1) == pytest.approx(np.full(19, 1 / 19))
    assert points.sum() == pytest.approx(1)
    assert points.sum(axis=1).max() / points.sum(axis=1).min() == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("ordered", "power"), KINDS)
def test_people_land_where_the_masses_say(ordered: bool, power: float | None) -> None:
    layout = freeze(COUNTRIES, 6, ordered=ordered, power=power)
    generator = np.random.Generator(np.random.PCG64(2))
    count = 60_000
    groups = generator.choice([risk.group for risk in COUNTRIES], count, p=[risk.share for risk in COUNTRIES])
    numbers = generator.integers(0, 2**64, count, dtype=np.uint64)
    shard, slice_ = place_by_risk(numbers, groups.tolist(), layout, 6, 5)
    assert shard.min() == slice_.min() == 1
    assert (shard.max(), slice_.max()) == (6, 5)
    found = np.bincount((shard - 1) * 5 + slice_ - 1, minlength=30).reshape(6, 5)
    wanted, _ = masses(layout, 6, 5)
    assert np.abs(found - count * wanted).max() < 5 * np.sqrt(count * wanted.max())


def test_slices_by_risk_put_the_likeliest_to_leave_last() -> None:
    layout = freeze(COUNTRIES, 5, ordered=True, power=None)
    numbers = np.random.Generator(np.random.PCG64(3)).integers(0, 2**64, 5000, dtype=np.uint64)
    of = {group: place_by_risk(numbers, [group] * 5000, layout, 5, 10)[1] for group in ("c1", "c2", "c3")}
    assert of["c1"].max() == of["c3"].min() == 8
    assert of["c3"].max() == of["c2"].min() == 9
    # And shards stay even for every group.
    assert np.bincount(place_by_risk(numbers, ["c2"] * 5000, layout, 5, 10)[0])[1:].min() > 850


def test_the_ends_of_the_axis_are_places_too() -> None:
    ends = np.array([0, 2**64 - 1], np.uint64)
    for ordered, power in KINDS:
        layout = freeze(COUNTRIES, 7, ordered=ordered, power=power)
        for group in layout.groups:
            shard, slice_ = place_by_risk(ends, [group] * 2, layout, 7, 3)
            assert set(shard.tolist()) <= set(range(1, 8))
            assert set(slice_.tolist()) <= {1, 2, 3}


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 100)), min_size=1, max_size=8), st.integers(1, 40))
def test_a_layout_covers_the_axis_and_survives_being_stored(drawn: list[tuple[int, int]], shards: int) -> None:
    total = sum(share for _, share in drawn)
    risks = [Risk(f"g{i}", p / 1000 + 1e-6, share / total) for i, (p, share) in enumerate(drawn)]
    for ordered, power in KINDS:
        layout = freeze(risks, shards, ordered=ordered, power=power)
        assert (layout.edges[0], layout.edges[-1]) == (0, AXIS)
        assert list(layout.probabilities) == sorted(layout.probabilities)
        assert FrozenLayout.from_json(layout.as_json()) == layout
        assert freeze(risks[::-1], shards, ordered=ordered, power=power) == layout


def test_a_group_that_is_not_named_goes_where_the_others_go_or_is_refused() -> None:
    numbers = np.arange(4, dtype=np.uint64)
    named = freeze([Risk("ca", 0.1), Risk("*", 0.01)], 2, ordered=True, power=None)
    assert place_by_risk(numbers, ["fr"] * 4, named, 2, 4)[1].max() <= 2
    strict = freeze([Risk("ca", 0.1), Risk("us", 0.01)], 2, ordered=True, power=None)
    with pytest.raises(InputError, match="the group 'fr' has no erasure probability"):
        place_by_risk(numbers, ["ca", "fr", "us", "us"], strict, 2, 4)


@pytest.mark.parametrize(
    ("risks", "says"),
    [
        ([], "at least one group"),
        ([Risk("a", 0.1), Risk("a", 0.2)], "two erasure probabilities"),
        ([Risk("", 0.1)], "needs a name"),
        ([Risk("a", 1.5)], "from 0 to 1"),
        ([Risk("a", float("nan"))], "from 0 to 1"),
        ([Risk("a", 0.1, 0.0)], "share"),
        ([Risk("a", 0.0), Risk("b", 0.0)], "above 0"),
        ([Risk("a", 0.1, 0.5), Risk("b", 0.1, 0.2)], "add up to 0.7"),
        ([Risk("a", 0.1, 0.9), Risk("b", 0.1, 0.9)], "add up to 1.8"),
        ([Risk("a", 0.1, 1.0), Risk("b", 0.1)], "add up to 1"),
    ],
)
def test_priors_that_make_no_sense_are_refused(risks: list[Risk], says: str) -> None:
    with pytest.raises(InputError, match=says):
        complete_shares(risks)


def test_shares_nobody_said_are_what_is_left_in_equal_parts() -> None:
    filled = complete_shares([Risk("a", 0.1, 0.5), Risk("b", 0.2), Risk("c", 0.3)])
    assert [risk.share for risk in filled] == [0.5, 0.25, 0.25]


def test_more_shards_than_the_axis_can_be_cut_into_are_refused() -> None:
    with pytest.raises(InputError, match="too many"):
        freeze([Risk("a", 1e-12, 1 - 1e-6), Risk("b", 1.0, 1e-6)], 1_000_000, ordered=False, power=1.0)
