"""One test against each defect of the paper's own code; the numbers are those of notes/sisa.md, section 2.

Left out: 12 (its options `algo` and `exponential` have no counterpart here yet) and 14 (a wrong count in a file that
it ships).
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import unlearnd
from unlearnd.hookspecs import Job, Points
from unlearnd.recipes import SCHEDULES, Spec, epochs_at, recipes, samples_at
from unlearnd.steps import Step

SPEC = Spec(
    backend="linear",
    backend_version="1",
    settings={"lr": 0.1, "optimizer": "sgd", "hidden": [8]},
    shape=(5,),
    dtype="float32",
    classes=(0, 1),
    shards=3,
    slices=4,
    epochs=Fraction(20),
    schedule="uniform",
)


@pytest.fixture
def trained(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
):
    """Make a store with a model trained on 121 points: a number that no count of shards or slices divides."""

    def make(name: str = "store", **options: Any) -> tuple[Any, Any]:
        store, rows = new_store(name), people(40, 121)
        add(store, rows)
        fit(store, **options)
        return store, rows

    return make


def test_every_trained_row_is_covered_by_a_root(trained: Callable[..., Any]) -> None:
    # 1: the last rows of a shard were trained and not hashed; requests to erase them were ignored.
    store, rows = trained()
    before = {s.shard: s.recipes for s in store.model("m").constituents()}
    last = {}
    for position in range(len(rows)):
        (where,) = store.where_point(f"d:{position}")
        last[where.shard, where.slice] = position
    for (shard, slice_), position in last.items():
        plan = store.plan_erasure(points=[f"d:{position}"])
        assert plan.points == 1
        (outcome,) = store.erase(points=[f"d:{position}"], build=False).outcomes
        assert [(t.shard, t.slice, t.points) for t in outcome.slices] == [(shard, slice_, 1)]
        assert outcome.slices[0].root_before != outcome.slices[0].root_after
        now = {s.shard: s.recipes for s in store.model("m").constituents()}
        assert now[shard][slice_] != before[shard][slice_]
        before = now
    assert len(last) == 12


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_optimisers_state_is_saved_with_the_weights(trained: Callable[..., Any], optimizer: str) -> None:
    # 2: Adam's state was neither saved nor reset, so going on from a checkpoint gave another model.
    store, _ = trained(backend="mlp", settings={"optimizer": optimizer, "hidden": [8]})
    last = store.checkpoints("m")[3]
    state = load_file(store.folder / "storage" / last.path)
    weights = {name for name in state if sorted(state[name].shape) == [5, 8]}
    # A weight and at least one thing of the same shape that the optimiser keeps about it: two for Adam.
    assert len(weights) >= (2 if optimizer == "sgd" else 3)


@pytest.mark.parametrize("step", [Step.BUILD_ENTERED, Step.BUILD_WRITTEN])
@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        ("linear", {}),
        *(("mlp", {"optimizer": name, "hidden": [8], "dropout": 0.2}) for name in ("sgd", "adam", "adamw")),
    ],
)
def test_going_on_after_a_crash_gives_the_bits_of_running_through(
    step: Step,
    backend: str,
    chosen: dict[str, Any],
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    cut_off_at: Callable[..., None],
    digests: Callable[..., Any],
) -> None:
    # 2 and 7: recovery lost the optimiser's state and repeated the last epoch.
    through, stopped = new_store("through"), new_store("stopped")
    for store in (through, stopped):
        add(store, people())
    whole = fit(through, backend, settings=chosen)
    cut_off_at(step, lambda: fit(stopped, backend, settings=chosen))
    with unlearnd.open_store(str(stopped.folder)) as opened:
        done = sum(c.samples for c in opened.checkpoints("m"))
        rest = fit(opened, backend, settings=chosen)
        assert digests(opened) == digests(through)
        # Nothing is trained twice but what had not been saved.
        assert done + rest.samples == whole.samples == sum(c.samples for c in opened.checkpoints("m"))


def test_one_seed_trains_one_model_and_another_seed_another(
    trained: Callable[..., Any], digests: Callable[..., Any]
) -> None:
    # 3: no seed anywhere; two runs differed.
    options = {"backend": "mlp", "settings": {"hidden": [8], "dropout": 0.3}}
    same, again, other = (
        digests(trained(name, seed=seed, **options)[0]) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same == again
    assert not set(same.values()) & set(other.values())


def test_a_seed_is_drawn_where_none_is_given_and_never_changes(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> None:
    # 3, too.
    store = new_store()
    add(store, people())
    first = store.declare("m", dataset="d", backend="linear")
    assert store.declare("m", dataset="d", backend="linear") == first
    assert store.declare("n", dataset="d", backend="linear").seed != first.seed


@pytest.mark.parametrize("backend", ["linear", "mlp"])
def test_batches_have_no_holes_where_somebody_was_erased(backend: str, trained: Callable[..., Any]) -> None:
    # 4: batches were cut before removal, so an erased row left a batch of 15 and other weights.
    store, _ = trained(backend=backend, settings={"batch_size": 16})
    learner = store.plugins.backend(backend)
    settings = learner.settings({"batch_size": 16})
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(48, 5)).astype(np.float32), generator.integers(0, 3, 48)
    start = learner.initial_state(settings, (5,), 3, 7)
    counts: list[int] = []
    erased, never = np.delete(np.arange(48), 20), np.r_[0:20, 21:48]
    states = [
        learner.train(settings, Job(start, Points(x[rows], y[rows]), Fraction(2), 9), "cpu", counts.append)
        for rows in (erased, never)
    ]
    assert {n: v.tobytes() for n, v in states[0].items()} == {n: v.tobytes() for n, v in states[1].items()}
    assert sum(counts) == 2 * 2 * 47


def test_nothing_made_from_the_erased_stays_on_disk(
    trained: Callable[..., Any], files_holding: Callable[..., list[str]]
) -> None:
    # 5: nothing was ever deleted; 8: and epoch files of finished slices were left behind.
    store, rows = trained()
    (place,) = store.where_user("u7")
    tainted = [
        (store.folder / "storage" / c.path)
        for c in store.checkpoints("m")
        if c.shard == place.shard and c.slice >= place.slice
    ]
    contents = [path.read_bytes() for path in tainted]
    assert contents
    store.erase(["u7"], build=False)
    assert not any(path.exists() for path in tainted)
    assert not any(files_holding(store.folder, content[-64:]) for content in contents)
    for row in rows.only(["u7"]).x:
        assert files_holding(store.folder, row.tobytes()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": Fraction(21)},
        {"settings": {**SPEC.settings, "lr": 0.2}},
        {"settings": {**SPEC.settings, "optimizer": "adam"}},
        {"settings": {**SPEC.settings, "hidden": [9]}},
        {"backend": "mlp"},
        {"backend_version": "2"},
        {"shape": (6,)},
        {"dtype": "uint8"},
        {"classes": (0, 2)},
        {"shards": 4},
        {"slices": 5},
        {"schedule": "equal-work"},
    ],
    ids=lambda change: next(iter(change)) + str(next(iter(change.values())))[:40],
)
def test_a_checkpoints_name_covers_all_it_is_made_from(change: dict[str, Any]) -> None:
    # 6: the key ignored epochs, learning rate, optimiser, architecture and data.
    roots = ["a" * 64, "b" * 64, "c" * 64]
    names = recipes(SPEC, 1, 1, roots, True)
    assert not set(names) & set(recipes(replace(SPEC, **change), 1, 1, roots, True))


def test_a_checkpoints_name_covers_seed_shard_and_every_slice_before_it() -> None:
    # 6, too.
    roots = ["a" * 64, "b" * 64, "c" * 64]
    names = recipes(SPEC, 1, 1, roots, True)
    assert not set(names) & set(recipes(SPEC, 2, 1, roots, True))
    assert not set(names) & set(recipes(SPEC, 1, 2, roots, True))
    changed = recipes(SPEC, 1, 1, ["a" * 64, "d" * 64, "c" * 64], True)
    assert [one == other for one, other in zip(names, changed, strict=True)] == [True, True, False, False]


def test_a_checkpoints_name_covers_the_content_of_the_rows(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    # 6: rows were named by their index, so other data under the same index was the same checkpoint.
    store, rows = new_store(), people()
    add(store, rows)
    fit(store)
    dataset_roots = {s.shard: s.recipes for s in store.model("m").constituents()}
    (place,) = store.where_point("d:0")
    other = new_store("other")
    rows.x[0, 0] += 1
    add(other, rows)
    fit(other)
    for checkpoint, again in zip(store.checkpoints("m"), other.checkpoints("m"), strict=True):
        touched = checkpoint.shard == place.shard and checkpoint.slice >= place.slice
        assert (checkpoint.tensors != again.tensors) == touched
    assert dataset_roots[place.shard][place.slice] not in {
        r for s in other.model("m").constituents() for r in s.recipes
    }


def test_storage_holds_one_file_for_each_state_and_nothing_else(
    trained: Callable[..., Any], check_no_orphans: Callable[[Path], None]
) -> None:
    # 8: 893 of 2,032 files were left-overs.
    store, _ = trained(backend="mlp", settings={"hidden": [8]})
    check_no_orphans(store.folder)
    assert len(list((store.folder / "storage" / "checkpoints").rglob("*.*"))) == 12
    store.erase(["u1", "u2"])
    check_no_orphans(store.folder)
    assert len(list((store.folder / "storage" / "checkpoints").rglob("*.*"))) == 12


def test_the_same_request_again_is_answered_and_trains_nothing(trained: Callable[..., Any]) -> None:
    # 9: the same label twice ended in FileExistsError, after the training.
    store, _ = trained()
    first = store.erase(["u3"])
    again = store.erase(["u3"])
    assert again.outcomes == first.outcomes
    assert sum(build.checkpoints for build in again.builds) == 0


def test_seconds_and_samples_are_counted_for_every_slice(trained: Callable[..., Any]) -> None:
    # 10: the time reported was the last slice's.
    store, _ = trained(epochs=30)
    checkpoints, (build,) = store.checkpoints("m"), store.builds("m")
    assert build.samples == sum(c.samples for c in checkpoints) == store.plan_build("m").from_scratch
    assert all(c.seconds > 0 for c in checkpoints if c.samples)
    assert 0 < sum(c.seconds for c in checkpoints) <= build.seconds


def test_users_with_different_numbers_of_points_are_no_trouble(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    # 11: ragged arrays of requests raised on today's numpy.
    store, rows = new_store(), people()
    rows.user[:30] = "u0"
    add(store, rows)
    fit(store)
    users = ["u0", "u1", "u2", "nobody"]
    assert [o.points for o in store.erase(users).outcomes] == [len(rows.only([user])) for user in users]


def test_answers_are_given_with_dropout_off(trained: Callable[..., Any]) -> None:
    # 13: no eval() at prediction: dropout and batch norm in training mode.
    store, rows = trained(backend="mlp", settings={"hidden": [8], "dropout": 0.5})
    first, again = (store.model("m").predict(rows.x, "mean").scores for _ in range(2))
    np.testing.assert_array_equal(first, again)
    # A row is answered the same alone as among others, up to rounding.
    np.testing.assert_allclose(store.model("m").predict(rows.x[:1], "mean").scores, first[:1], rtol=1e-4)


@pytest.mark.parametrize("aggregate", ["vote", "mean"])
def test_both_ways_to_aggregate_work(trained: Callable[..., Any], aggregate: str) -> None:
    # 13: softmax output ended in NameError.
    store, rows = trained(epochs=10)
    answers = store.model("m").predict(rows.x, aggregate)
    np.testing.assert_allclose(answers.scores.sum(axis=1), 1, rtol=1e-6)
    assert (answers.labels == rows.y).mean() > 0.5


@pytest.mark.parametrize("backend", ["linear", "mlp"])
def test_what_is_fitted_on_data_is_fitted_on_the_constituents_own(
    backend: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    # 15: every label depended on every row. Here, whatever shards 2 and 3 hold, shard 1 does not notice.
    one, other, rows = new_store("one"), new_store("other"), people()
    add(one, rows)
    elsewhere = np.array([one.where_user(user)[0].shard != 1 for user in rows.user])
    wild = type(rows)(np.where(elsewhere[:, None], rows.x * 1000 + 77, rows.x), rows.y, rows.user)
    add(other, wild)
    for store in (one, other):
        fit(store, backend)
    same = {place for place, digest in digests(one).items() if digests(other)[place] == digest}
    assert same == {(1, slice_) for slice_ in (1, 2, 3, 4)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epochs", [Fraction(20), Fraction(1), Fraction(1, 3)])
def test_every_slice_is_trained_on(schedule: str, epochs: Fraction) -> None:
    # 16: with R = 50 and e' = 20, 11 slices got no epoch; with e' = 1, all but one.
    spec = replace(SPEC, slices=50, epochs=epochs, schedule=schedule)
    points = 5607
    seen = [samples_at(epochs_at(spec, step), points * step) for step in range(1, 51)]
    assert min(seen) >= 1
    # And all together cost what e' epochs over the whole shard cost, but for rounding up.
    assert 0 <= sum(seen) - epochs * points * 50 <= 50
    assert samples_at(epochs_at(spec, 1), 1) >= 1


def test_fifty_slices_and_twenty_epochs_make_fifty_different_states(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    # 16: checkpoints of untrained slices were duplicates.
    for name, epochs in (("twenty", 20), ("one", 1)):
        store = new_store(name)
        add(store, people(400, 400), shards=1, slices=50)
        fit(store, epochs=epochs)
        filled = {where.slice for user in range(400) for where in store.where_user(f"u{user}")}
        assert filled == set(range(1, 51))
        assert len(set(digests(store).values())) == 50
        assert all(c.samples >= 1 for c in store.checkpoints("m"))


def test_an_unaffected_shard_costs_nothing(trained: Callable[..., Any]) -> None:
    # "Also": every shard's process read the whole training set, even where nothing had changed.
    store, _ = trained()
    (place,) = store.where_user("u7")
    for path in (store.folder / "storage" / "data" / "d").glob("*/*/*"):
        if int(path.parts[-3]) != place.shard:
            path.write_bytes(b"not to be read")
    (build,) = store.erase(["u7"]).builds
    assert build.checkpoints == 4 - place.slice + 1


def test_a_build_runs_from_a_clean_interpreter_without_torch() -> None:
    # "Also": the fixed cost of a process. Only a backend that needs torch loads it.
    script = (
        "import sys, json, unlearnd.store, unlearnd.plugins; unlearnd.plugins.load_plugins(); "
        "print(json.dumps('torch' in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(told.stdout) is False
