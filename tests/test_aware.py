"""Placement that knows who will leave: frozen from priors, exact like any other, and what goes wrong with it."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unlearnd.audit import audit
from unlearnd.errors import InputError, RefusedError
from unlearnd.layouts import KINDS, FrozenLayout, Risk, place_by_risk
from unlearnd.ledger import points
from unlearnd.placement import numbers_of_users

RISK = {"ca": (0.01, 0.5), "eu": (0.4, 0.2), "us": (0.05, 0.3)}
LEARNERS = {"linear": {"batch_size": 8}, "mlp": {"hidden": [8], "batch_size": 8, "optimizer": "adam"}}


def group_of(users: Any) -> Any:
    """Everybody's country follows from their name."""
    return np.array([("ca", "ca", "eu", "us")[int(user[1:]) % 4] for user in users])


@pytest.fixture
def add_by(add: Callable[..., Any]) -> Callable[..., Any]:
    def add_by_risk(store: Any, rows: Any, placement: str = "aware", **options: Any) -> Any:
        return add(store, rows, **{"group": group_of(rows.user), "placement": placement, "risk": RISK, **options})

    return add_by_risk


@pytest.mark.parametrize("placement", KINDS)
@pytest.mark.parametrize(("backend", "schedule"), [("linear", "equal-work"), ("mlp", "uniform")])
def test_erasing_gives_the_bits_of_a_store_that_never_met_them(
    placement: str,
    schedule: str,
    backend: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add_by: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    how = {"backend": backend, "settings": LEARNERS[backend], "epochs": 3, "schedule": schedule}
    # One of each country, a whole country's worth of the likeliest, and the very first row, which names the groups.
    users = ["u0", "u3", *(f"u{n}" for n in range(2, 40, 4)), rows.user[0]]
    add_by(met, rows, placement)
    fit(met, **how)
    assert all(outcome.found for outcome in met.erase(set(users)).outcomes)
    add_by(never, rows.without(users), placement)
    fit(never, **how)
    assert digests(met) == digests(never)
    assert len(digests(met)) == 12
    assert audit(met, replay=3).failed == ()


def test_points_placed_one_by_one_follow_their_group_too(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add_by: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    for store, given in ((met, rows), (never, rows.without(["u2", "u5"]))):
        add_by(store, given, unit="point")
        fit(store)
    met.erase(["u2", "u5"])
    assert digests(met) == digests(never)
    for user in set(rows.user) - {"u2", "u5"}:
        slices = {place.slice for place in met.where_user(user)}
        assert slices <= {"ca": {1, 2}, "us": {3, 4}, "eu": {4}}[str(group_of([user])[0])]


def test_whoever_holds_the_key_and_the_logged_layout_can_recompute_every_place(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any]
) -> None:
    for placement in KINDS:
        rows, store = people(), new_store(placement)
        add_by(store, rows, placement, shards=5, slices=6)
        logged = leaf_of(store)
        assert logged["placement"] == placement
        layout = FrozenLayout.from_json(logged["layout"])
        users = sorted(set(rows.user))
        numbers = numbers_of_users(users, store.keys.placement)
        shards, slices = place_by_risk(numbers, group_of(users).tolist(), layout, logged["shards"], 6)
        for user, shard, slice_ in zip(users, shards.tolist(), slices.tolist(), strict=True):
            assert {(place.shard, place.slice) for place in store.where_user(user)} == {(shard, slice_)}


def leaf_of(store: Any) -> Any:
    """Return what the log says about the only dataset."""
    rows = store.ledger
    with rows.read() as connection:
        leaves = [json.loads(bytes(row[0])) for row in connection.exec_driver_sql("SELECT body FROM leaf")]
    found = [leaf["predicate"] for leaf in leaves if leaf["predicateType"].rsplit("/", 2)[-2] == "dataset"]
    assert len(found) == 1
    return found[0]


def test_a_layout_depends_on_the_priors_and_on_no_point(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any]
) -> None:
    layouts = []
    for name, rows in (("many", people(60, 300)), ("few", people(seed=9)[:25])):
        store = new_store(name)
        dataset = add_by(store, rows, "aware-both").dataset.name
        layouts.append(points.dataset_named(store.ledger, dataset).layout)
    assert layouts[0] == layouts[1] == leaf_of(store)["layout"]


def test_a_layout_changed_in_the_ledger_is_found_by_an_audit(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any]
) -> None:
    store = new_store()
    add_by(store, people())
    assert audit(store).failed == ()
    with store.ledger.write() as connection:
        connection.exec_driver_sql("UPDATE dataset SET layout = replace(layout, 'eu', 'uk')")
    report = audit(store)
    assert report.failed
    assert "another layout in the ledger than in the log" in str(report)


def test_a_uniform_dataset_is_logged_as_ever(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> None:
    store = new_store()
    rows = people()
    add(store, rows, group=group_of(rows.user))
    assert "layout" not in leaf_of(store)


def test_later_ingests_go_by_the_frozen_layout(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add_by: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    later = people(30, 60, seed=4)
    for store, gone in ((met, []), (never, ["u2", "u6"])):
        add_by(store, rows.without(gone))
        fit(store)
        # The same priors may be said again, or left out.
        options = {"shards": None, "slices": 2, "group": group_of(later.without(gone).user)}
        add(store, later.without(gone), **options, **({"risk": RISK} if gone else {}))
        store.build()
    met.erase(["u2", "u6"])
    assert digests(met) == digests(never)
    late = {place.slice for user in set(later.user) for place in met.where_user(user)}
    assert max(late) == 6
    with pytest.raises(RefusedError, match="frozen by its first ingest"):
        add_by(met, later, shards=None, slices=None, risk={**RISK, "ca": (0.02, 0.5)})
    with pytest.raises(RefusedError, match="has placement aware"):
        add(met, later, shards=None, slices=None, group=group_of(later.user), placement="uniform")


def test_somebody_in_two_groups_has_a_place_for_each_and_leaves_both(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add_by: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    rows, met, never = people(), new_store("met"), new_store("never")
    groups = group_of(rows.user)
    mine = np.flatnonzero(rows.user == "u4")
    assert len(mine) > 1
    groups[mine[0]] = "eu"
    add_by(met, rows, group=groups)
    fit(met)
    assert len(met.where_user("u4")) == 2
    met.erase("u4")
    add_by(never, rows.without(["u4"]), group=groups[rows.user != "u4"])
    fit(never)
    assert digests(met) == digests(never)


def test_what_cannot_be_laid_out_is_refused_and_leaves_nothing(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], add_by: Callable[..., Any]
) -> None:
    store, rows = new_store(), people()
    groups = group_of(rows.user)
    with pytest.raises(InputError, match="needs erasure probabilities by group, and the policy states none"):
        add(store, rows, group=groups, placement="aware")
    with pytest.raises(InputError, match="places users by group: name the group column"):
        add(store, rows, placement="aware", risk=RISK)
    with pytest.raises(InputError, match=r"from row 1: the group 'us' has no erasure probability"):
        add_by(store, rows, risk={"ca": 0.1, "eu": 0.2})
    with pytest.raises(InputError, match="placement 'uniform' takes no erasure probabilities"):
        add(store, rows, group=groups, risk=RISK)
    with pytest.raises(InputError, match="the risk of 'ca' must be"):
        add_by(store, rows, risk={"ca": "often"})
    with pytest.raises(InputError, match="more than the 40,000 that the log holds"):
        add_by(store, rows, "aware-algorithm-1", shards=9000)
    assert store.status().datasets == ()
    add_by(store, rows, risk={"ca": 0.1, "*": 0.2})
    assert store.status().datasets[0].points == 120


def test_probabilities_come_from_the_stores_policy(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> None:
    store, rows = new_store(), people()
    folder = store.folder / "policies"
    folder.mkdir(exist_ok=True)
    (folder / "ours.yaml").write_text(
        "apiVersion: unlearnd.policy/v1\nid: ours\nextends: gdpr\nversion: '1'\ntitle: ours\nnot_legal_advice: true\n"
        "law: {reviewed_on: 2026-11-01}\n"
        "placement: {erasure_probability: {ca: 0.01, eu: 0.2, us: 0.1}, cite: our own requests of last year}\n"
    )
    dataset = add(store, rows, group=group_of(rows.user), placement="aware", policy="ours").dataset
    assert dataset.layout is not None
    assert dataset.layout["groups"] == ["ca", "us", "eu"]


def test_the_likeliest_to_leave_cost_least(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store, rows = new_store(), people(80, 400)
    add_by(store, rows, shards=2, slices=10)
    fit(store)
    cost = {
        group: np.mean([store.plan_erasure([u]).models[0].samples for u in set(rows.user) if group_of([u])[0] == group])
        for group in RISK
    }
    assert cost["eu"] < cost["us"] < cost["ca"]
    assert store.planning_facts("m").risks == tuple(
        Risk(group, RISK[group][0], pytest.approx(RISK[group][1], abs=1e-9)) for group in ("ca", "us", "eu")
    )


def test_a_large_shard_outvotes_a_small_one_where_the_layout_makes_them_unequal(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    rows = people(80, 400)
    for placement in ("aware", "aware-algorithm-1"):
        store = new_store(placement)
        add_by(store, rows, placement, shards=4, slices=2)
        fit(store)
        model = store.model("m")
        model.predict(rows.x[:3])
        weights = model._serving.weights
        counts = points.counts_of(store.ledger, 1)
        held = np.array([sum(n for (shard, _), n in counts.items() if shard == k) for k in range(1, 5)])
        if placement == "aware":
            assert weights.tolist() == [1, 1, 1, 1]
        else:
            assert weights == pytest.approx(held / held.mean())
            assert held.max() > 3 * held.min()


def test_accuracy_is_measured_for_each_group_by_itself(
    people: Callable[..., Any], new_store: Callable[..., Any], add_by: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store, rows = new_store(), people()
    add_by(store, rows)
    fit(store)
    groups = group_of(rows.user)
    found = store.evaluate_groups("m", rows.x, label=rows.y, group=groups)
    assert {name: result.points for name, result in found.items()} == {
        name: int((groups == name).sum()) for name in ("ca", "eu", "us")
    }
    right = store.model("m").predict(rows.x).labels == rows.y
    for name, result in found.items():
        assert result.top1 == pytest.approx(right[groups == name].mean())
    whole = store.evaluate("m", rows.x, label=rows.y)
    assert sum(r.top1 * r.points for r in found.values()) / whole.points == pytest.approx(whole.top1)
