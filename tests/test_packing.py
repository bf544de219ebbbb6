"""The pure parts: packing positions, placing, Merkle roots, recipes. Small, and held against plainer code."""

import hashlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnd.digests import derive_seed, digest_of_tensors
from unlearnd.merkle import EMPTY_ROOT, root_of
from unlearnd.packing import pack, pack_many, unpack, unpack_flat, unpack_many
from unlearnd.placement import numbers_of_points, numbers_of_users, place
from unlearnd.recipes import Spec, epochs_at, recipes, samples_at, step_seed

KEY = bytes(range(32))
ascending = st.sets(st.one_of(st.integers(0, 300), st.integers(0, 2**62)), min_size=1, max_size=40).map(sorted)


@given(ascending)
def test_what_is_packed_comes_back(positions: list[int]) -> None:
    assert unpack(pack(np.array(positions, np.int64))).tolist() == positions


def test_nothing_packs_to_nothing() -> None:
    assert pack(np.array([], np.int64)) == b""
    assert unpack(b"").tolist() == []


@given(st.lists(ascending, min_size=1, max_size=12))
def test_many_lists_pack_as_each_does_alone(lists: list[list[int]]) -> None:
    flat = np.concatenate([np.array(one, np.int64) for one in lists])
    bounds = np.cumsum([0, *map(len, lists)])
    packed = pack_many(flat, bounds)
    assert packed == [pack(np.array(one, np.int64)) for one in lists]
    assert [one.tolist() for one in unpack_many(packed)] == lists
    together, edges = unpack_flat(packed)
    assert together.tolist() == flat.tolist()
    assert edges.tolist() == bounds.tolist()


@given(ascending)
def test_packing_is_leb128_of_gaps(positions: list[int]) -> None:
    expected = b""
    for gap in (b - a for a, b in zip([0, *positions], positions, strict=False)):
        while gap >= 0x80:
            expected += bytes([gap & 0x7F | 0x80])
            gap >>= 7
        expected += bytes([gap])
    assert pack(np.array(positions, np.int64)) == expected


def test_empty_lists_among_others_come_back_empty() -> None:
    packed = [pack(np.array([3, 9])), b"", pack(np.array([0]))]
    assert [one.tolist() for one in unpack_many(packed)] == [[3, 9], [], [0]]


def merkle_by_the_book(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, as it is written there."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + merkle_by_the_book(leaves[:k]) + merkle_by_the_book(leaves[k:])).digest()


@pytest.mark.parametrize("count", [*range(0, 20), 31, 32, 33, 100])
def test_a_root_is_that_of_rfc_6962(count: int) -> None:
    leaves = [number.to_bytes(4, "big") for number in range(count)]
    assert root_of(leaves) == merkle_by_the_book(leaves)


def test_roots_of_the_rfcs_test_vectors() -> None:
    # From Certificate Transparency's own tests: eight leaves, and none.
    leaves = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    root = root_of(bytes.fromhex(leaf) for leaf in leaves)
    assert root.hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=20), st.data())
def test_a_root_changes_with_every_leaf_and_its_place(leaves: list[bytes], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(leaves) - 1))
    changed = [*leaves[:number], leaves[number] + b"!", *leaves[number + 1 :]]
    assert root_of(changed) != root_of(leaves)
    assert root_of(leaves[:number] + leaves[number + 1 :]) != root_of(leaves)
    turned = leaves[number:] + leaves[:number]
    assert (root_of(turned) == root_of(leaves)) == (turned == leaves)


@given(
    st.lists(st.text(min_size=1).filter(lambda t: t.isprintable()), min_size=1, max_size=30, unique=True),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_a_users_place_depends_on_nobody_else(names: list[str], shards: int, slices: int) -> None:
    together = place(numbers_of_users(names, KEY), shards, slices)
    for number, name in enumerate(names):
        alone = place(numbers_of_users([name], KEY), shards, slices)
        assert (int(alone[0][0]), int(alone[1][0])) == (int(together[0][number]), int(together[1][number]))
    assert together[0].min() >= 1
    assert together[0].max() <= shards
    assert together[1].min() >= 1
    assert together[1].max() <= slices


@pytest.mark.parametrize(("shards", "slices"), [(4, 6), (5, 10), (8, 8)])
def test_places_fill_evenly_even_where_the_counts_share_a_factor(shards: int, slices: int) -> None:
    numbers = numbers_of_users(map(str, range(20_000)), KEY)
    filled = Counter(zip(*(column.tolist() for column in place(numbers, shards, slices)), strict=True))
    expected = 20_000 / (shards * slices)
    assert len(filled) == shards * slices
    # Six standard deviations of a count.
    assert all(abs(count - expected) < 6 * expected**0.5 for count in filled.values())


def test_another_key_places_differently() -> None:
    numbers = [numbers_of_users(map(str, range(1000)), key) for key in (KEY, KEY[::-1])]
    same = np.mean(place(numbers[0], 10, 10)[0] == place(numbers[1], 10, 10)[0])
    assert 0.05 < same < 0.15


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (5,)), ("float32", (1,)), ("uint8", (3, 3, 1)), ("uint8", (1,))]
)
def test_a_points_place_depends_on_its_content_label_and_owner_alone(dtype: str, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 250, (40, *shape)).astype(dtype)
    labels, owners = [str(n % 3) for n in range(40)], numbers_of_users([str(n % 7) for n in range(40)], KEY)
    together = numbers_of_points(x, labels, owners, KEY)
    for rows in (np.arange(39, -1, -1), np.arange(3, 40, 5), np.array([8])):
        alone = numbers_of_points(x[rows], [labels[row] for row in rows], owners[rows], KEY)
        assert alone.tolist() == together[rows].tolist()
    changed = x.copy()
    changed.reshape(40, -1)[:, -1] += 1
    assert not (numbers_of_points(changed, labels, owners, KEY) == together).any()
    assert not (numbers_of_points(x, ["9"] * 40, owners, KEY) == together).any()
    assert not (numbers_of_points(x, labels, owners + np.uint64(1), KEY) == together).any()


fractions = st.fractions(Fraction(1, 1000), 50)


@given(fractions, st.integers(0, 10_000))
def test_samples_are_rounded_up_to_a_whole_point_within_an_epoch(epochs: Fraction, points: int) -> None:
    samples = samples_at(epochs, points)
    assert 0 <= samples - epochs * points < 1
    assert samples_at(Fraction(int(epochs)), points) == int(epochs) * points


def spec(schedule: str, slices: int, epochs: Fraction) -> Spec:
    return Spec("b", "1", {}, (1,), "float32", (0, 1), 1, slices, epochs, schedule)


@given(st.sampled_from(["uniform", "equal-work"]), st.integers(1, 60), fractions)
def test_all_steps_together_cost_the_epochs_asked_for(schedule: str, slices: int, epochs: Fraction) -> None:
    made = spec(schedule, slices, epochs)
    # In units of one slice: step r trains on r of them.
    assert sum(epochs_at(made, step) * step for step in range(1, slices + 1)) == epochs * slices


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 2**63 - 1), st.integers(1, 20))
def test_a_recipe_depends_on_all_slices_up_to_its_own_and_none_after(slices: int, seed: int, shard: int) -> None:
    made, roots = spec("uniform", 6, Fraction(3)), [f"{n:064x}" for n in range(slices)]
    names = recipes(made, seed, shard, roots, True)
    assert len(set(names)) == slices + 1
    assert recipes(made, seed, shard, roots[:-1], True) == names[:-1]
    swapped = recipes(made, seed, shard, ["f" * 64, *roots[1:]], True)
    assert swapped[0] == names[0]
    assert not set(swapped[1:]) & set(names)


def test_a_spec_written_down_and_read_again_is_the_same() -> None:
    made = Spec(
        "mlp", "1.2", {"hidden": [8, 4], "lr": 0.1}, (28, 28, 1), "uint8", ("a", "b"), 4, 5, Fraction(7, 3), "uniform"
    )
    assert Spec.from_json(made.as_json()) == made
    assert recipes(Spec.from_json(made.as_json()), 1, 1, [], True) == recipes(made, 1, 1, [], True)


@given(st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(0, 9))
def test_seeds_of_steps_are_63_bits_and_apart(seed: int, shard: int, step: int) -> None:
    assert 0 <= step_seed(seed, shard, step) < 2**63
    others = {step_seed(seed, a, b) for a in range(3) for b in range(3)} | {
        derive_seed(seed, 1),
        derive_seed(seed, "1"),
    }
    assert len(others) == 11


def test_the_digest_of_tensors_knows_name_type_shape_and_bytes_but_not_order() -> None:
    one, two = ("a", "<f4", (2,), b"12345678"), ("b", "<f4", (1,), b"1234")
    whole = digest_of_tensors([one, two])
    assert digest_of_tensors([two, one]) == whole
    others = [
        [("c", *one[1:]), two],
        [("a", "<i4", *one[2:]), two],
        [("a", "<f4", (1, 2), one[3]), two],
        [("a", "<f4", (2,), b"12345679"), two],
        [one],
        # The same bytes cut elsewhere.
        [("a", "<f4", (1,), b"1234"), ("b", "<f4", (2,), b"56781234")],
    ]
    assert len({whole, *map(digest_of_tensors, others)}) == 7
