"""Answers: how constituents are put together, who abstains, what is checked, what is reloaded."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unlearnd.aggregation import mean, vote
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError
from unlearnd.serving import Evaluation, join_evaluations
from unlearnd.store import Store

ONES = np.ones(3)


def probabilities(*constituents: list[float]) -> Any:
    """Return what constituents say about a single row."""
    return np.array([[row] for row in constituents], np.float32)


# Aggregation


def test_the_class_most_constituents_think_best_wins_the_vote() -> None:
    said = probabilities([0.9, 0.1], [0.4, 0.6], [0.45, 0.55])
    best, scores = vote(said, ONES)
    assert best.tolist() == [1]
    assert scores.tolist() == [pytest.approx([1 / 3, 2 / 3])]
    best, scores = mean(said, ONES)
    assert best.tolist() == [0]
    assert scores[0] == pytest.approx([1.75 / 3, 1.25 / 3])


def test_a_tie_of_votes_goes_to_the_higher_mean_probability() -> None:
    said = probabilities([0.55, 0.45, 0.0], [0.0, 0.9, 0.1])
    best, scores = vote(said, np.ones(2))
    assert best.tolist() == [1]
    assert scores[0].tolist() == [0.5, 0.5, 0.0]


def test_a_tie_of_votes_and_means_goes_to_the_lower_class() -> None:
    assert vote(probabilities([0.2, 0.8, 0.0], [0.8, 0.2, 0.0]), np.ones(2))[0].tolist() == [0]
    assert vote(probabilities([0.0, 0.2, 0.8], [0.0, 0.8, 0.2]), np.ones(2))[0].tolist() == [1]
    assert mean(probabilities([0.2, 0.8], [0.8, 0.2]), np.ones(2))[0].tolist() == [0]


def test_a_constituent_that_cannot_tell_votes_for_the_lower_class() -> None:
    assert vote(probabilities([0.5, 0.5]), np.ones(1))[0].tolist() == [0]


def test_a_class_without_a_vote_never_wins_by_its_mean() -> None:
    # Second everywhere: the highest mean and not one vote.
    said = probabilities([0.51, 0.0, 0.49], [0.0, 0.51, 0.49])
    assert vote(said, np.ones(2))[0].tolist() == [0]
    assert mean(said, np.ones(2))[0].tolist() == [2]


def test_a_constituent_counts_with_its_weight() -> None:
    said = probabilities([1.0, 0.0], [0.0, 1.0], [0.0, 1.0])
    assert vote(said, np.array([1.0, 0.3, 0.3]))[0].tolist() == [0]
    assert vote(said, np.array([1.0, 0.6, 0.6]))[0].tolist() == [1]
    assert mean(said, np.array([1.0, 0.3, 0.3]))[1][0] == pytest.approx([1 / 1.6, 0.6 / 1.6])
    assert vote(said, np.array([1.0, 0.3, 0.3]))[1][0] == pytest.approx([1 / 1.6, 0.6 / 1.6])


def test_scores_sum_to_one_and_rows_do_not_mix() -> None:
    generator = np.random.default_rng(2)
    raw = generator.random((7, 50, 4)).astype(np.float32)
    said = raw / raw.sum(axis=2, keepdims=True)
    weights = generator.uniform(0.1, 1, 7)
    for combine in (vote, mean):
        best, scores = combine(said, weights)
        assert scores.sum(axis=1) == pytest.approx(np.ones(50))
        assert (scores[np.arange(50), best] == scores.max(axis=1)).all()
        for row in range(0, 50, 9):
            alone, its = combine(said[:, row : row + 1], weights)
            assert alone[0] == best[row]
            assert its[0] == pytest.approx(scores[row])


# A store


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 200 points of 40 people in 3 shards of 3 slices, with the model `m`; copied for every test."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "placement.key").write_text("5eed" * 16)
    with Store.create(folder / "store", placement_key=folder / "placement.key") as made:
        x, y, who = people()
        made.ingest("people", x, label=y, user=who, shards=3, slices=3)
        made.train("m", dataset="people", backend="linear", epochs=3, seed=1)
    return folder / "store"


@pytest.fixture
def store(origin: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(origin, tmp_path / "store")
    with Store.open(tmp_path / "store") as opened:
        yield opened


def people() -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(4)
    x = generator.normal(size=(200, 2, 2)).astype(np.float32)
    return x, np.where(x[:, 0, 0] > 0, "yes", "no"), np.array([f"p{i % 40}" for i in range(200)])


def in_slice(store: Store, wanted: int, count: int = 40) -> list[str]:
    """Return the users whose points are in this slice."""
    return [f"p{n}" for n in range(count) for place in store.where_user(f"p{n}") if place.slice == wanted]


def test_a_single_row_may_be_asked_without_a_batch_around_it(store: Store) -> None:
    x, _, _ = people()
    model = store.model("m")
    one, many = model.predict(x[5]), model.predict(x)
    assert one.labels.tolist() == [many.labels[5]]
    assert one.scores.shape == (1, 2)
    assert one.scores[0] == pytest.approx(many.scores[5])
    assert model.predict(x[5:6]).labels.tolist() == one.labels.tolist()


def test_labels_come_back_as_they_were_given(store: Store) -> None:
    x, y, who = people()
    answers = store.model("m").predict(x)
    assert answers.classes == ("no", "yes")
    assert set(answers.labels.tolist()) == {"no", "yes"}
    assert float(np.mean(answers.labels == y)) > 0.8
    store.ingest("numbered", x, label=np.where(y == "yes", 10, -3), user=who, shards=2, slices=2)
    store.train("n", dataset="numbered", backend="linear", epochs=2)
    numbers = store.model("n").predict(x)
    assert numbers.classes == (-3, 10)
    assert set(numbers.labels.tolist()) == {-3, 10}


def test_no_rows_get_no_answers(store: Store) -> None:
    answers = store.model("m").predict(np.empty((0, 2, 2), np.float32))
    assert len(answers.labels) == 0
    assert answers.scores.shape == (0, 2)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.zeros((3, 4)), r"takes features of shape \(n, 2, 2\), not \(3, 4\)"),
        (np.zeros((3, 2, 3)), r"not \(3, 2, 3\)"),
        (np.zeros(4), r"not \(4,\)"),
        (np.float32(1), r"not \(\)"),
        (np.full((1, 2, 2), np.nan), "finite"),
        (np.full((1, 2, 2), np.inf), "finite"),
        (np.full((1, 2, 2), 1e300), "finite"),
        (np.full((1, 2, 2), "a"), "number"),
        (np.full((1, 2, 2), None), "number"),
        (np.zeros((1, 2, 2), complex), "number"),
        ([[1, 2], [3]], "number|shape"),
    ],
    ids=[
        "flat",
        "wider",
        "a row too flat",
        "a scalar",
        "NaN",
        "infinite",
        "overflow",
        "text",
        "None",
        "complex",
        "ragged",
    ],
)
@pytest.mark.filterwarnings("error")
def test_features_that_cannot_be_answered_for_are_refused(store: Store, x: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        store.model("m").predict(x)


def test_numbers_of_any_kind_are_answered_for_as_float32(store: Store) -> None:
    x = np.arange(16).reshape(4, 2, 2)
    model = store.model("m")
    for kind in (np.float64, np.int64, np.uint8, np.float16):
        assert model.predict(x.astype(kind)).labels.tolist() == model.predict(x.astype(np.float32)).labels.tolist()
    assert model.predict(np.asfortranarray(x)).labels.tolist() == model.predict(x).labels.tolist()


def test_a_model_of_bytes_takes_bytes_only(store: Store) -> None:
    x, y, who = people()
    pixels = (np.abs(x) * 80).clip(0, 255).astype(np.uint8)
    store.ingest("pixels", pixels, label=y, user=who, shards=2, slices=2)
    store.train("p", dataset="pixels", backend="linear", epochs=1)
    assert len(store.model("p").predict(pixels).labels) == 200
    for other in (pixels.astype(np.float32), pixels.astype(np.int64), pixels / 255):
        with pytest.raises(InputError, match="takes uint8 features"):
            store.model("p").predict(other)


def test_an_unknown_aggregate_is_named_before_anything_is_loaded(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no aggregator 'median'; installed: mean, vote"):
        store.model("m").predict(people()[0], aggregate="median")


# Who answers, and with what weight


def test_a_constituent_that_was_set_back_counts_by_what_it_has_seen(store: Store) -> None:
    who = in_slice(store, 2)[0]
    shard = store.where_user(who)[0].shard
    store.erase([who], build=False)
    model = store.model("m")
    model.predict(people()[0])
    assert model._serving is not None
    weights = dict(zip([s.shard for s in model.constituents()], model._serving.weights, strict=True))
    held = [len(p.positions) for n in range(40) for p in store.where_user(f"p{n}") if p.shard == shard]
    seen = [len(p.positions) for n in range(40) for p in store.where_user(f"p{n}") if p.shard == shard and p.slice == 1]
    assert weights.pop(shard) == pytest.approx(sum(seen) / sum(held))
    assert set(weights.values()) == {1.0}


def test_a_constituent_without_a_clean_checkpoint_abstains(store: Store) -> None:
    x, y, _ = people()
    who = in_slice(store, 1)[0]
    store.erase([who], build=False)
    right = np.where(y == "yes", 1, 0)
    found = store.model("m").evaluate(x, right)
    assert (found.constituents, found.abstaining) == (2, 1)
    assert len(store.model("m").predict(x).labels) == 200
    store.build()
    found = store.model("m").evaluate(x, right)
    assert (found.constituents, found.abstaining) == (3, 0)


def test_when_all_abstain_the_model_says_so_and_a_build_brings_it_back(store: Store) -> None:
    x, _, _ = people()
    first = {store.where_user(who)[0].shard: who for who in in_slice(store, 1)}
    assert len(first) == 3
    model = store.model("m")
    model.predict(x)
    store.erase(list(first.values()), build=False)
    with pytest.raises(RefusedError, match="every constituent abstains; run `unlearnd build m`"):
        model.predict(x)
    store.build()
    assert len(model.predict(x).labels) == 200


def test_a_shard_whose_points_are_all_erased_abstains_for_good(store: Store) -> None:
    x, _, _ = people()
    gone = [f"p{n}" for n in range(40) if store.where_user(f"p{n}")[0].shard == 1]
    store.erase(gone)
    found = store.model("m").evaluate(x, np.zeros(200, np.int64))
    assert (found.constituents, found.abstaining) == (2, 1)


def test_a_model_declared_and_not_built_cannot_answer(store: Store) -> None:
    store.declare("later", dataset="people", backend="linear")
    with pytest.raises(RefusedError, match="run `unlearnd build later`"):
        store.model("later").predict(people()[0])


# What is reloaded


def test_constituents_are_loaded_once_while_nothing_changes(store: Store) -> None:
    x, _, _ = people()
    model = store.model("m")
    model.predict(x)
    serving = model._serving
    assert serving is not None
    model.predict(x[:3])
    model.predict(x[:3], "mean")
    store.where_user("p1")
    store.status()
    assert model._serving is serving


def test_the_predictor_is_kept_when_something_else_changed(store: Store) -> None:
    x, y, who = people()
    model = store.model("m")
    model.predict(x)
    assert model._serving is not None
    before = model._serving
    # New points are in no checkpoint yet: the same constituents answer.
    store.ingest("people", x, label=y, user=who)
    model.predict(x)
    assert model._serving.version != before.version
    assert model._serving.predictor is before.predictor


def test_an_erasure_by_another_process_is_seen_before_the_next_answer(store: Store) -> None:
    x, _, _ = people()
    model = store.model("m")
    model.predict(x)
    assert model._serving is not None
    before = dict(model._serving.states)
    who = in_slice(store, 3)[0]
    with Store.open(store.folder) as other:
        other.erase([who], build=False)
    model.predict(x)
    after = model._serving.states
    assert len(after.keys() - before.keys()) == 1
    # Those that did not change are not read again.
    assert all(after[recipe] is before[recipe] for recipe in after.keys() & before.keys())


def test_the_answer_after_a_rebuild_is_that_of_the_new_weights(store: Store) -> None:
    x, _, _ = people()
    model = store.model("m")
    before = model.predict(x, "mean").scores
    store.erase(["p1", "p2", "p3"])
    after = model.predict(x, "mean").scores
    assert not np.array_equal(before, after)
    assert np.array_equal(after, store.model("m").predict(x, "mean").scores)


def test_a_checkpoint_that_is_gone_stops_the_answer_instead_of_thinning_the_ensemble(store: Store) -> None:
    last = next(c for c in store.checkpoints("m") if c.slice == 3)
    (store.folder / "storage" / last.path).unlink()
    with pytest.raises(DamagedStoreError, match=last.path):
        store.model("m").predict(people()[0])


# Evaluation


def test_top_1_and_top_5_count_what_they_say(tmp_path: Path) -> None:
    generator = np.random.default_rng(9)
    y = np.arange(400) % 8
    x = (np.eye(8)[y] * 3 + generator.normal(size=(400, 8))).astype(np.float32)
    with Store.create(tmp_path / "eight") as store:
        store.ingest("d", x, label=y, user=np.arange(400) % 50, shards=5, slices=2)
        store.train("m", dataset="d", backend="linear", epochs=3, seed=2)
        answers = store.model("m").predict(x, "mean")
        order = np.argsort(-answers.scores, axis=1, kind="stable")
        found = store.evaluate("m", x, label=y, aggregate="mean")
        assert found.top1 == pytest.approx(float(np.mean(order[:, 0] == y)))
        assert found.top5 == pytest.approx(float(np.mean([y[i] in order[i, :5] for i in range(400)])))
        assert found.top5 >= found.top1 > 0.6
        votes = store.evaluate("m", x, label=y)
        assert votes.top1 == pytest.approx(float(np.mean(store.model("m").predict(x).labels == y)))
        assert votes.top5 is not None
        assert votes.top5 >= votes.top1


def test_evaluations_of_batches_add_up_by_their_size() -> None:
    parts = [Evaluation(10, 0.5, 0.8, 3, 0), Evaluation(30, 1.0, 1.0, 2, 1)]
    assert join_evaluations(parts) == Evaluation(40, 0.875, pytest.approx(0.95), 2, 1)
    assert join_evaluations([Evaluation(5, 0.2, None, 1, 0)]).top5 is None
