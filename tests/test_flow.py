"""The whole journey through one store, and what each verb promises along the way."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.aggregation import mean, vote
from unlearnd.errors import InputError, NotFoundError, RefusedError

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


pytestmark = pytest.mark.both_databases


@pytest.fixture
def trained(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
):
    """Return a store with the model `m` trained on 120 points of 40 people, and those people."""
    store, rows = new_store(), people()
    add(store, rows)
    fit(store)
    return store, rows


def test_the_whole_journey(
    people: Callable[..., Any], tmp_path: Path, files_holding: Callable[..., Any], new_store: Callable[..., Any]
) -> None:
    rows = people(60, 300, seed=4)
    ada = str(rows.user[10])
    store = new_store("shop", clock=lambda: NOON)

    # Points go in, each user to one place.
    added = store.ingest("baskets", rows.x, user=rows.user, label=rows.y, shards=4, slices=5)
    assert (added.points, added.first, added.slices) == (300, 0, (1, 5))
    (place,) = store.where_user(ada)
    assert len(place.positions) == len(rows.only([ada]))
    assert store.where_point(f"baskets:{place.positions[0]}")[0].shard == place.shard

    # A model is trained, all of it at once.
    build = store.train("churn", dataset="baskets", backend="linear", epochs=4, seed=1)
    assert build.checkpoints == 4 * 5
    assert build.samples == build.from_scratch > 0
    assert store.train("churn", dataset="baskets", backend="linear").checkpoints == 0
    assert store.evaluate("churn", rows.x, label=rows.y).top1 > 0.6

    # Ada asks to be erased. What it would do is known beforehand.
    plan = store.plan_erasure([ada])
    erased = store.erase([ada], build=False)
    (outcome,) = erased.outcomes
    assert outcome.found
    assert outcome.points == plan.points == len(place.positions)
    assert [(t.dataset, t.shard, t.slice) for t in outcome.slices] == [("baskets", place.shard, place.slice)]
    assert outcome.slices[0].root_before != outcome.slices[0].root_after
    assert {c.slice for c in outcome.checkpoints} == set(range(place.slice, 6))
    assert outcome.received_at == outcome.influence_removed_at == "2026-03-01T12:00:00Z"
    assert outcome.rebuilt_at is None

    # From now on nothing of her is used; the others answer, her shard from its clean prefix.
    prefixes = store.status().models[0].prefixes
    assert prefixes == tuple(place.slice - 1 if shard == place.shard else 5 for shard in (1, 2, 3, 4))
    assert store.where_user(ada) == []
    assert not files_holding(store.folder, rows.only([ada]).x[0].tobytes())
    assert store.model("churn").predict(rows.x).labels.shape == (300,)

    # A build brings the model back to full strength, and costs less than training it anew.
    (rebuilt,) = store.build()
    assert rebuilt.samples == plan.models[0].samples < rebuilt.from_scratch
    assert store.status().to_rebuild == 0
    assert store.erase([ada]).outcomes[0].rebuilt_at == "2026-03-01T12:00:00Z"
    assert [one.samples for one in store.builds("churn")] == [build.samples, rebuilt.samples]

    # And what stands there now is what a store that never met her has.
    never, others = new_store("never"), rows.without([ada])
    never.ingest("baskets", others.x, user=others.user, label=others.y, shards=4, slices=5)
    never.train("churn", dataset="baskets", backend="linear", epochs=4, seed=1)
    assert [c.tensors for c in store.checkpoints("churn")] == [c.tensors for c in never.checkpoints("churn")]


def test_erasing_a_user_retrains_only_the_shard_that_held_them(trained: Any, place_of: Callable[..., Any]) -> None:
    store, _ = trained
    shard, slice_ = place_of(store, "u5")
    before = {(c.shard, c.slice): c.id for c in store.checkpoints("m")}
    store.erase(["u5"])
    after = {(c.shard, c.slice): c.id for c in store.checkpoints("m")}
    assert {place for place in after if after[place] != before[place]} == {(shard, r) for r in range(slice_, 5)}


def test_a_dry_run_changes_nothing_and_tells_what_then_happens(trained: Any, ask_ledger: Callable[..., Any]) -> None:
    store, rows = trained
    users = ["u1", "u8", "u13", "nobody"]
    before = ask_ledger(store.folder, "SELECT count(*), (SELECT count(*) FROM request) FROM holding")
    plan = store.plan_erasure(users, points=["d:3"])
    assert ask_ledger(store.folder, "SELECT count(*), (SELECT count(*) FROM request) FROM holding") == before
    assert store.status().models[0].samples_missing == 0

    erased = store.erase(users, points=["d:3"])
    destroyed = {(c.model, c.shard, c.slice) for outcome in erased.outcomes for c in outcome.checkpoints}
    (planned,) = plan.models
    assert (plan.found, plan.not_found) == (4, 1)
    assert plan.points == sum(outcome.points for outcome in erased.outcomes) == len(rows.only(users)) + 1
    assert {(p.shard, p.slice, p.points) for p in plan.places} == {
        (
            shard,
            slice_,
            sum(t.points for o in erased.outcomes for t in o.slices if (t.shard, t.slice) == (shard, slice_)),
        )
        for shard, slice_ in {(t.shard, t.slice) for o in erased.outcomes for t in o.slices}
    }
    assert planned.checkpoints == len(destroyed) == erased.builds[0].checkpoints
    assert planned.samples == erased.builds[0].samples
    assert planned.from_scratch == erased.builds[0].from_scratch
    assert set(planned.shards) == {shard for _, shard, _ in destroyed}


def test_a_dry_run_knows_what_an_erasure_before_it_left_to_rebuild(trained: Any) -> None:
    store, _ = trained
    store.erase(["u1"], build=False)
    plan = store.plan_erasure(["u2", "u3"])
    erased = store.erase(["u2", "u3"], build=False)
    destroyed = {(c.shard, c.slice) for outcome in erased.outcomes for c in outcome.checkpoints}
    assert plan.models[0].checkpoints == len(destroyed)


def test_several_erasures_cost_one_build(trained: Any) -> None:
    store, _ = trained
    users = ["u1", "u2", "u3", "u4", "u5", "u6"]
    erased = store.erase(users)
    assert len(erased.builds) == 1
    assert len({outcome.erasure for outcome in erased.outcomes}) == 1
    assert len({outcome.request for outcome in erased.outcomes}) == 6
    assert len(store.builds("m")) == 2
    assert erased.builds[0].checkpoints <= 3 * 4


def test_erasures_without_builds_are_made_good_by_one_build_later(trained: Any) -> None:
    store, _ = trained
    for user in ("u1", "u2", "u3"):
        assert store.erase([user], build=False).builds == ()
    assert store.status().to_rebuild == 3
    assert len(store.build()) == 1
    assert store.status().to_rebuild == 0
    assert len(store.builds("m")) == 2


def test_train_after_an_erasure_without_a_build_makes_it_good_too(trained: Any) -> None:
    store, _ = trained
    store.erase(["u1"], build=False)
    store.train("m", dataset="d", backend="linear", epochs=2)
    assert store.status().models[0].samples_missing == 0
    assert store.status().to_rebuild == 0


def test_somebody_unknown_gets_an_outcome_that_says_so_and_costs_nothing(trained: Any) -> None:
    store, _ = trained
    before = {(c.shard, c.slice): c.id for c in store.checkpoints("m")}
    (outcome,) = store.erase(["nobody"]).outcomes
    assert not outcome.found
    assert (outcome.points, outcome.erased_root, outcome.slices, outcome.checkpoints) == (0, None, (), ())
    assert outcome.influence_removed_at is not None
    assert {(c.shard, c.slice): c.id for c in store.checkpoints("m")} == before
    assert len(store.builds("m")) == 1


def test_the_same_request_twice_gives_the_first_outcome(trained: Any, ask_ledger: Callable[..., Any]) -> None:
    store, _ = trained
    first = store.erase(["u1", "nobody"], points=["d:5"])
    again = store.erase(["nobody", "u1", "u1"], points=["d:5"])
    assert again.outcomes[:2] == (first.outcomes[1], first.outcomes[0])
    assert len(again.outcomes) == 3
    assert again.outcomes[2] == first.outcomes[2]
    assert ask_ledger(store.folder, "SELECT count(*) FROM request WHERE handle IS NOT NULL") == [(2,)]
    assert len(store.builds("m")) == 2


def test_whoever_comes_back_is_a_new_user_and_can_be_erased_again(trained: Any, add: Callable[..., Any]) -> None:
    store, rows = trained
    first = store.erase(["u1"]).outcomes[0]
    assert add(store, rows.only(["u1"]), slices=1, readmit=True).slices == (5, 5)
    store.build()
    assert [where.slice for where in store.where_user("u1")] == [5]
    second = store.erase(["u1"]).outcomes[0]
    assert second.request != first.request
    assert second.points == first.points == len(rows.only(["u1"]))
    # The same rows under a new key: nobody can tell that they are the same.
    assert second.erased_root != first.erased_root
    assert store.where_user("u1") == []
    assert store.erase(["u1"]).outcomes[0] == second


def test_a_point_asked_for_before_it_was_there_is_erased_when_it_is(trained: Any, add: Callable[..., Any]) -> None:
    store, rows = trained
    assert not store.erase(points=["d:125"]).outcomes[0].found
    add(store, rows[:10], slices=1)
    store.build()
    assert store.where_point("d:125")
    assert store.erase(points=["d:125"]).outcomes[0].points == 1
    assert store.where_point("d:125") == []


def test_a_user_given_as_a_number_is_the_one_ingested_as_a_number(
    people: Callable[..., Any], new_store: Callable[..., Any]
) -> None:
    rows, store = people(), new_store()
    numbers = np.array([int(user[1:]) for user in rows.user])
    store.ingest("d", rows.x, user=numbers, label=rows.y, shards=2, slices=2)
    expected = [int((numbers == user).sum()) for user in (7, 8)]
    assert [outcome.points for outcome in store.erase([7, "8"]).outcomes] == expected


def test_a_constituent_set_back_counts_less_and_one_set_back_to_nothing_abstains(
    trained: Any, users_at: Callable[..., list[str]]
) -> None:
    store, rows = trained
    model = store.model("m")
    assert store.evaluate("m", rows.x, label=rows.y).constituents == 3
    store.erase(users_at(store, rows, 1, [1])[:1], build=False)
    store.erase(users_at(store, rows, 2, [2])[:1], build=False)
    told = model.evaluate(rows.x, rows.y)
    assert (told.constituents, told.abstaining) == (2, 1)
    assert model.constituents()[1].prefix == 1
    # Votes are shares of what counts: they add up to one, and the one set back counts less than a half.
    scores = model.predict(rows.x).scores
    np.testing.assert_allclose(scores.sum(axis=1), 1)
    assert 0 < scores[(scores > 0) & (scores < 1)].min() < 0.5
    store.build()
    assert model.evaluate(rows.x, rows.y).abstaining == 0


def test_when_every_constituent_abstains_the_model_refuses_to_answer(trained: Any) -> None:
    store, rows = trained
    model = store.model("m")
    model.predict(rows.x)
    store.erase(sorted(set(rows.user.tolist())), build=False)
    with pytest.raises(RefusedError, match="every constituent abstains"):
        model.predict(rows.x)
    store.build()
    with pytest.raises(RefusedError, match="every constituent abstains"):
        model.predict(rows.x)
    assert store.status().datasets[0].points == 0


def test_a_model_declared_and_not_built_refuses_to_answer(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, people())
    store.declare("m", dataset="d", backend="linear")
    with pytest.raises(RefusedError):
        store.model("m").predict(people().x)


def test_a_tied_vote_goes_to_the_higher_mean_and_then_to_the_lower_class() -> None:
    probabilities = np.array(
        [
            [[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.2, 0.3, 0.5]],
            [[0.2, 0.8, 0.0], [0.4, 0.6, 0.0], [0.3, 0.5, 0.2]],
        ],
        np.float32,
    )
    best, scores = vote(probabilities, np.ones(2))
    assert best.tolist() == [0, 0, 1]
    assert scores.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    # A constituent that has seen half of its shard is outvoted by a whole one.
    assert vote(probabilities, np.array([0.5, 1.0]))[0].tolist() == [1, 1, 1]
    assert mean(probabilities, np.ones(2))[0].tolist() == [0, 0, 1]


def test_evaluation_counts_what_is_right(trained: Any, tmp_path: Path) -> None:
    store, rows = trained
    labels = store.model("m").predict(rows.x).labels
    assert store.evaluate("m", rows.x, label=labels).top1 == 1.0
    wrong = (labels + 1) % 3
    assert store.evaluate("m", rows.x, label=wrong).top1 == 0.0
    told = store.evaluate("m", rows.x, label=np.where(np.arange(120) < 30, labels, wrong), aggregate="vote")
    assert told.top1 == pytest.approx(0.25)
    assert (told.points, told.top5) == (120, None)


def test_top_five_is_told_where_there_are_more_than_five_classes(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store, rows = new_store(), people(40, 200, classes=8)
    add(store, rows)
    fit(store)
    told = store.evaluate("m", rows.x, label=rows.y, aggregate="mean")
    assert told.top5 is not None
    assert told.top1 <= told.top5 <= 1


def test_status_tells_how_everything_stands(trained: Any, add: Callable[..., Any], people: Callable[..., Any]) -> None:
    store, rows = trained
    (data,), (model,) = store.status().datasets, store.status().models
    assert (data.name, data.points, data.shards, data.slices, data.open_slices, data.classes) == ("d", 120, 3, 4, 0, 3)
    assert (model.name, model.dataset, model.prefixes, model.samples_missing) == ("m", "d", (4, 4, 4), 0)
    add(store, people(10, 30, seed=9), slices=2)
    (data,), (model,) = store.status().datasets, store.status().models
    assert (data.points, data.slices, data.open_slices) == (150, 6, 2)
    assert (model.slices, model.prefixes) == (6, (4, 4, 4))
    assert model.samples_missing == store.plan_build("m").samples
    store.build()
    store.erase(["u1"])
    assert store.status().datasets[0].points == 150 - len(rows.only(["u1"])) - len(people(10, 30, seed=9).only(["u1"]))
    assert (store.status().unfinished, store.status().to_rebuild) == (0, 0)


def test_a_store_can_be_closed_moved_and_opened_again(
    trained: Any, tmp_path: Path, digests: Callable[..., Any]
) -> None:
    store, rows = trained
    before, answers = digests(store), store.model("m").predict(rows.x, "mean").scores
    store.close()
    store.folder.rename(tmp_path / "elsewhere")
    with unlearnd.open_store(str(tmp_path / "elsewhere")) as moved:
        assert digests(moved) == before
        np.testing.assert_array_equal(moved.model("m").predict(rows.x, "mean").scores, answers)
        assert moved.erase(["u1"]).outcomes[0].found


def test_a_refused_training_leaves_the_slices_open(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store, rows = new_store(), people()
    add(store, rows[:60])
    for wrong in (
        {"settings": {"lrr": 1}},
        {"epochs": 0},
        {"schedule": "never"},
        {"seed": -1},
        {"backend": "oracle"},
        {"executor": "thin air"},
        {"workers": 0},
    ):
        with pytest.raises((InputError, NotFoundError)):
            fit(store, **wrong)
    assert store.status().models == ()
    assert store.status().datasets[0].open_slices == 4
    assert add(store, rows[60:]).slices == (1, 4)


def test_a_model_never_changes(trained: Any, fit: Callable[..., Any]) -> None:
    store, _ = trained
    for other in (
        {"epochs": 3},
        {"seed": 1},
        {"settings": {"lr": 0.5}},
        {"schedule": "equal-work"},
        {"backend": "mlp"},
    ):
        with pytest.raises(RefusedError):
            fit(store, **other)
    assert fit(store).checkpoints == 0


def test_an_ingest_that_fails_leaves_nothing(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    tmp_path: Path,
    check_no_orphans: Callable[[Path], None],
    ask_ledger: Callable[..., Any],
) -> None:
    store, rows = new_store(), people()
    add(store, rows)
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("who,label,a,b,c,d,e\nnew,1,1,2,3,4,5\n")
    bad.write_text("who,label,a,b,c,d,e\nnew,1,1,2,3,4,\n")
    with pytest.raises(InputError, match=r"bad\.csv, row 1"):
        store.ingest("d", [good, bad], user="who", label="label")
    assert store.where_user("new") == []
    assert store.status().datasets[0].points == 120
    assert ask_ledger(store.folder, "SELECT count(*) FROM ingest WHERE committed_at IS NULL") == [(0,)]
    check_no_orphans(store.folder)


def test_names_that_are_not_there_are_told_with_those_that_are(trained: Any) -> None:
    store, _ = trained
    with pytest.raises(NotFoundError, match="no model 'x'; there are: m"):
        store.model("x")
    with pytest.raises(NotFoundError, match="no dataset 'x'; there are: d"):
        store.where_point("x:1")
    with pytest.raises(NotFoundError, match=r"no backend 'x'; installed: .*linear"):
        store.train("n", dataset="d", backend="x")
    with pytest.raises(InputError, match="nobody to erase"):
        store.erase()
    with pytest.raises(NotFoundError, match="no store"):
        unlearnd.open_store("/nowhere")


def test_a_place_is_told_once_however_many_ingests_filled_it(new_store: Callable[..., Any]) -> None:
    store = new_store()
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    for _ in range(2):
        store.ingest("d", x, label=[0, 1] * 3, user=["ada", "ben", "cy"] * 2, shards=2, slices=2)
    (where,) = store.where_user("ada")
    assert where.positions == (0, 3, 6, 9)
