"""The exactness contract (DESIGN 2.2): erase, build, and every digest is that of a store never given the erased.

Each test makes two stores with one placement key and one model seed. `met` is given everybody and erases some;
`never` is only ever given the others, in the same calls. Their `tensors` digests must be the same for every
shard and slice. Shapes are tiny: what could break this (order, seeds, optimiser state, fitted statistics,
stacked training, empty slices) breaks at any size.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from unlearnd.errors import RefusedError

SMALL = {"hidden": [8], "batch_size": 8}
LEARNERS = {
    "sgd": ("mlp", {**SMALL, "optimizer": "sgd", "momentum": 0.9}),
    "adam": ("mlp", {**SMALL, "optimizer": "adam"}),
    "adamw": ("mlp", {**SMALL, "optimizer": "adamw"}),
    "dropout": ("mlp", {**SMALL, "optimizer": "sgd", "dropout": 0.3}),
    "linear": ("linear", {"batch_size": 8}),
    "scikit-learn": ("sgd", {"learning_rate": "invscaling", "eta0": 0.1}),
}
SHAPES = ("first slice", "middle slice", "last slice", "several users", "whole slice", "whole shard")


@pytest.fixture(params=LEARNERS)
def learner(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A backend with an optimiser, as `fit` takes it."""
    backend, settings = LEARNERS[request.param]
    return {"backend": backend, "settings": settings, "epochs": 3}


@pytest.fixture
def doomed(users_at: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Pick whom to erase in a shard of four slices."""

    def pick(store: Any, rows: Any, shape: str, shard: int) -> list[str]:
        match shape:
            case "first slice":
                users = users_at(store, rows, shard, [1])[:1]
            case "middle slice":
                users = users_at(store, rows, shard, [2, 3])[:1]
            case "last slice":
                users = users_at(store, rows, shard, [4])[:1]
            case "several users":
                users = [users_at(store, rows, shard, [slice_])[0] for slice_ in (2, 3, 4)]
            case "whole slice":
                users = users_at(store, rows, shard, [2])
            case _:
                users = users_at(store, rows, shard, [1, 2, 3, 4])
        assert users
        return users

    return pick


@pytest.fixture
def check_exact(digests: Callable[..., Any]) -> Callable[..., None]:
    """Check that two stores hold the same models, to the bit, and that there are as many states as there must be."""

    def check(met: Any, never: Any, states: int) -> None:
        assert digests(met) == digests(never)
        assert len(digests(met)) == states
        assert met.status().models[0].samples_missing == 0

    return check


@pytest.mark.parametrize("shape", SHAPES)
def test_erasing_gives_the_bits_of_a_store_that_never_met_them(
    shape: str,
    learner: dict[str, Any],
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
    doomed: Callable[..., list[str]],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    add(met, rows)
    fit(met, **learner)
    users = doomed(met, rows, shape, shard=2)
    before, first = digests(met), min(met.where_user(user)[0].slice for user in users)
    erased = met.erase(users)
    assert all(outcome.found for outcome in erased.outcomes)

    add(never, rows.without(users))
    fit(never, **learner)
    check_exact(met, never, states=12)
    # And the erasure was one: what had seen them is other bits now, what had not is untouched.
    changed = {place for place, digest in digests(met).items() if digest != before[place]}
    assert changed == {(2, slice_) for slice_ in range(first, 5)}


# A worker is a fresh Python with torch, some seconds each. So all six shapes go into one store, a shard each, and
# one erasure; first training is serial there and once, below, in processes: bits must not depend on the executor.
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "dropout"])
def test_erasing_with_two_worker_processes_gives_the_bits_of_a_store_that_never_met_them(
    name: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    doomed: Callable[..., list[str]],
    check_exact: Callable[..., None],
) -> None:
    backend, settings = LEARNERS[name]
    options = {"backend": backend, "settings": settings, "epochs": 3}
    rows, met, never = people(100, 240), new_store("met"), new_store("never")
    add(met, rows, shards=6)
    fit(met, **options)
    users = [user for shard, shape in enumerate(SHAPES, start=1) for user in doomed(met, rows, shape, shard)]
    met.erase(users, executor="processes", workers=2)

    add(never, rows.without(users), shards=6)
    fit(never, **options)
    check_exact(met, never, states=24)


def test_two_worker_processes_train_the_same_bits_as_one(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    backend, settings = LEARNERS["dropout"]
    options = {"backend": backend, "settings": {**settings, "optimizer": "adamw"}}
    one, two = new_store("one"), new_store("two")
    for store, how in ((one, {}), (two, {"executor": "processes", "workers": 2})):
        add(store, people())
        fit(store, **options, **how)
    check_exact(one, two, states=12)


@pytest.mark.parametrize("backend", ["linear", "mlp"])
def test_a_dataset_of_scattered_points_is_exact_too(
    backend: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(12, 120), new_store("met"), new_store("never")
    add(met, rows, unit="point")
    fit(met, backend)
    assert len(met.where_user("u1")) > 1
    met.erase(["u1", "u5"])
    add(never, rows.without(["u1", "u5"]), unit="point")
    fit(never, backend)
    check_exact(met, never, states=12)


@pytest.mark.parametrize("unit", ["user", "point"])
def test_single_points_are_erased_exactly(
    unit: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    add(met, rows, unit=unit)
    fit(met)
    erased = met.erase(points=["d:12", "d:77", "d:119"])
    assert [outcome.points for outcome in erased.outcomes] == [1, 1, 1]
    add(never, rows[np.delete(np.arange(len(rows)), [12, 77, 119])], unit=unit)
    fit(never)
    check_exact(met, never, states=12)
    assert met.where_point("d:12") == []
    assert met.where_point("d:13")


def test_a_point_and_the_rest_of_its_user_can_be_erased_in_one_go(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    add(met, rows)
    fit(met)
    erased = met.erase([rows.user[12]], points=["d:12", "d:40"])
    assert sum(outcome.points for outcome in erased.outcomes) == len(rows.only([rows.user[12]])) + 1
    add(never, rows[np.delete(np.arange(len(rows)), 40)].without([rows.user[12]]))
    fit(never)
    check_exact(met, never, states=12)


def test_the_schedule_of_equal_work_is_exact(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    options = {"schedule": "equal-work", "epochs": 2.7}
    add(met, rows)
    fit(met, **options)
    met.erase(["u3", "u30"])
    add(never, rows.without(["u3", "u30"]))
    fit(never, **options)
    check_exact(met, never, states=12)


@pytest.mark.parametrize("backend", ["linear", "mlp"])
def test_images_of_bytes_and_labels_of_text_are_exact(
    backend: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    given = people()
    pixels = np.random.default_rng(3).integers(0, 256, (len(given), 4, 4, 1), np.uint8)
    labels = np.array(["cat", "dog", "ibex"])[given.y]
    rows = type(given)(pixels, labels, given.user)
    # Whoever is erased brought the first row: labels are met in another order without them.
    users = [str(rows.user[0]), "u9"]
    met, never = new_store("met"), new_store("never")
    add(met, rows)
    fit(met, backend)
    met.erase(users)
    add(never, rows.without(users))
    fit(never, backend)
    check_exact(met, never, states=12)
    assert met.model("m").classes == ("cat", "dog", "ibex")
    np.testing.assert_array_equal(
        met.model("m").predict(pixels, "mean").scores, never.model("m").predict(pixels, "mean").scores
    )


def test_two_ingests_before_training_fill_the_same_slices_and_are_exact(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    users = ["u2", "u21"]
    for store, given in ((met, lambda part: part), (never, lambda part: part.without(users))):
        add(store, given(rows[:70]))
        add(store, given(rows[70:]))
        fit(store, "mlp")
    met.erase(users)
    check_exact(met, never, states=12)


def test_how_rows_were_cut_into_ingests_before_training_does_not_matter(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, once, twice = people(), new_store("once"), new_store("twice")
    add(once, rows)
    add(twice, rows[:33])
    add(twice, rows[33:])
    for store in (once, twice):
        fit(store)
    check_exact(once, twice, states=12)


def test_points_added_after_training_go_to_new_slices_and_only_those_are_trained(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
) -> None:
    rows, store = people(), new_store()
    add(store, rows[:80])
    first = fit(store, "mlp")
    before = {(c.shard, c.slice): (c.recipe, c.file, c.built_at, c.id) for c in store.checkpoints("m")}
    added = add(store, rows[80:], slices=2)
    assert added.slices == (5, 6)
    (build,) = store.build()
    after = {(c.shard, c.slice): (c.recipe, c.file, c.built_at, c.id) for c in store.checkpoints("m")}
    assert build.checkpoints == 3 * 2
    assert len(after) == 3 * 6
    assert {place: after[place] for place in before} == before
    assert first.checkpoints == 3 * 4


@pytest.mark.parametrize("name", LEARNERS)
def test_erase_then_add_then_erase_again_is_exact(
    name: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    backend, settings = LEARNERS[name]
    rows, met, never = people(), new_store("met"), new_store("never")
    add(met, rows[:80])
    fit(met, backend, settings=settings)
    met.erase(["u1", "u2"])
    # u1 comes back: what they bring now is a new user's, and stays.
    add(met, rows[80:].without(["u2"]), slices=2, readmit=True)
    met.build()
    met.erase(["u3", "u4"])
    met.erase(["u5"])

    gone = ["u2", "u3", "u4", "u5"]
    add(never, rows[:80].without([*gone, "u1"]))
    fit(never, backend, settings=settings)
    add(never, rows[80:].without(gone), slices=2)
    never.build()
    assert "u1" in rows[80:].user
    check_exact(met, never, states=18)


def test_a_user_in_two_datasets_leaves_both_and_every_model_of_them(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    rows, other = people(), people(40, 90, features=3, seed=2)
    met, never = new_store("met"), new_store("never")
    for store, leave in ((met, []), (never, ["u7"])):
        one, two = rows.without(leave), other.without(leave)
        add(store, one)
        store.ingest("e", two.x, user=two.user, label=two.y, shards=2, slices=3)
        fit(store)
        store.train("wide", dataset="d", backend="mlp", seed=4, epochs=1, settings=SMALL)
        store.train("small", dataset="e", backend="linear", seed=5, epochs=1)
    erased = met.erase(["u7"])
    assert {touched.dataset for touched in erased.outcomes[0].slices} == {"d", "e"}
    assert {destroyed.model for destroyed in erased.outcomes[0].checkpoints} == {"m", "small", "wide"}
    for model in ("m", "wide", "small"):
        assert {(c.shard, c.slice): c.tensors for c in met.checkpoints(model)} == {
            (c.shard, c.slice): c.tensors for c in never.checkpoints(model)
        }


def test_one_erasure_of_many_is_the_same_as_one_by_one(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    users = ["u0", "u8", "u15", "u16", "u23", "u39"]
    together, single = new_store("together"), new_store("single")
    for store in (together, single):
        add(store, people())
        fit(store)
    together.erase(users)
    for user in reversed(users):
        single.erase([user], build=user in users[:2])
    check_exact(together, single, states=12)


TRAIN = """
import sys, unlearnd
with unlearnd.open_store(sys.argv[1]) as store:
    print(store.train("m", dataset="d", backend=sys.argv[2], epochs=float(sys.argv[3]), seed=20210523))
"""


@pytest.mark.parametrize(("backend", "epochs"), [("linear", 2500), ("mlp", 300)])
def test_erasing_while_another_process_trains_ends_right_and_does_not_wait_for_it(
    backend: str,
    epochs: int,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    users_at: Callable[..., list[str]],
    start_python: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    check_exact: Callable[..., None],
    check_no_orphans: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    add(met, rows, shards=2, slices=8)
    users = [users_at(met, rows, 1, [1])[0], users_at(met, rows, 1, [2])[0], users_at(met, rows, 2, [5])[0]]
    trainer = start_python(TRAIN, met.folder, backend, epochs)
    wait_for_checkpoint(met, ask_ledger)
    for user in users:
        erased = met.erase([user], build=False)
        assert erased.outcomes[0].influence_removed_at is not None
        # Whatever the trainer has made by now, nothing of it saw the user and is still there.
        assert clean(met, ask_ledger)
        if user == users[0]:
            assert trainer.poll() is None, "the trainer was to be at work still"
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
    met.build()

    add(never, rows.without(users), shards=2, slices=8)
    fit(never, backend, epochs=epochs)
    check_exact(met, never, states=16)
    check_no_orphans(met.folder)


def wait_for_checkpoint(store: Any, ask_ledger: Callable[..., Any]) -> None:
    end = time.monotonic() + 60
    while not ask_ledger(store.folder, "SELECT 1 FROM checkpoint"):
        assert time.monotonic() < end, "the trainer does not get anywhere"
        time.sleep(0.02)


def clean(store: Any, ask_ledger: Callable[..., Any]) -> bool:
    """Say whether every checkpoint in the ledger has a recipe of today."""
    known: Iterable[tuple[str]] = ask_ledger(store.folder, "SELECT recipe FROM checkpoint WHERE destroyed_at IS NULL")
    today = {recipe for standing in store.model("m").constituents() for recipe in standing.recipes}
    return {recipe for (recipe,) in known} <= today


def test_an_erasure_does_not_close_slices_that_are_open(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    for store, leave in ((met, []), (never, ["u7"])):
        add(store, rows[:60].without(leave))
        fit(store)
        add(store, rows[60:90].without(leave), slices=None)
        if store is met:
            store.erase(["u7"])
        add(store, rows[90:].without(["u7"]), slices=None)
        store.build()
    check_exact(met, never, states=15)


@pytest.mark.xfail(strict=True, reason="classes are taken from the whole dataset unless they are declared")
def test_a_class_that_only_the_erased_had_goes_with_them(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    rows.y[rows.user == "u7"] = 9
    add(met, rows)
    fit(met)
    met.erase(["u7"])
    add(never, rows.without(["u7"]))
    fit(never)
    check_exact(met, never, states=12)


def test_with_declared_classes_even_the_only_one_of_a_class_is_erased_exactly(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    check_exact: Callable[..., None],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    rows.y[rows.user == "u7"] = 9
    add(met, rows, classes=10)
    fit(met)
    met.erase(["u7"])
    add(never, rows.without(["u7"]), classes=10)
    fit(never)
    check_exact(met, never, states=12)


def test_a_shard_that_nobody_is_left_in_abstains_and_passes_its_first_state_on(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
    doomed: Callable[..., list[str]],
) -> None:
    rows, store = people(), new_store()
    add(store, rows)
    fit(store, "mlp")
    store.erase(doomed(store, rows, "whole shard", 1))
    assert len({digests(store)[1, slice_] for slice_ in (1, 2, 3, 4)}) == 1
    assert store.evaluate("m", rows.x, label=rows.y).abstaining == 1
    store.erase(sorted(set(rows.user.tolist())))
    with pytest.raises(RefusedError, match="every constituent abstains"):
        store.model("m").predict(rows.x)
