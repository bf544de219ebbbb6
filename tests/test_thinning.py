"""Thinned checkpoints: fewer states saved, the same chain, the same bits, and nothing that an erasure leaves behind."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from click.testing import CliRunner

from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import InputError, RefusedError
from unlearnd.ledger import models
from unlearnd.steps import Step

LEARNERS = {"linear": {"batch_size": 8}, "mlp": {"hidden": [8], "batch_size": 8, "optimizer": "adam"}}
SLICES = 8


@pytest.fixture
def thin(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a store with a model that keeps three checkpoints of eight."""

    def make(name: str, without: Iterable[str] = (), backend: str = "linear", **options: Any) -> Any:
        store = new_store(name)
        add(store, people(80, 240).without(without), shards=2, slices=SLICES)
        fit(store, backend, **{"settings": LEARNERS[backend], "keep": 3, **options})
        return store

    return make


def slices_of(store: Any, shard: int = 1) -> list[int]:
    return [c.slice for c in store.checkpoints("m") if c.shard == shard]


@pytest.mark.parametrize("backend", LEARNERS)
def test_kept_checkpoints_are_those_of_the_whole_chain(
    backend: str, thin: Callable[..., Any], digests: Callable[..., Any]
) -> None:
    few, all_of_them = thin("few", backend=backend), thin("all", backend=backend, keep="all")
    kept = models.model_named(few.ledger, "m").kept
    assert kept is not None
    assert len(kept) == 3
    assert kept[-1] == SLICES
    assert slices_of(few) == slices_of(few, 2) == list(kept)
    whole = digests(all_of_them)
    assert len(whole) == 2 * SLICES
    assert digests(few) == {place: digest for place, digest in whole.items() if place[1] in kept}
    # The chain is the same too: thinning has no part in what a state is called.
    specs = [models.model_named(store.ledger, "m").spec.as_json() for store in (few, all_of_them)]
    assert specs[0] == specs[1]
    # And every sample is accounted for.
    assert sum(c.samples for c in few.checkpoints("m")) == sum(c.samples for c in all_of_them.checkpoints("m"))


@pytest.mark.parametrize("backend", LEARNERS)
@pytest.mark.parametrize("where", ["in the first gap", "in a later gap", "just after a kept one", "in the last slice"])
def test_erasing_gives_the_bits_of_a_store_that_never_met_them(
    where: str,
    backend: str,
    thin: Callable[..., Any],
    people: Callable[..., Any],
    users_at: Callable[..., list[str]],
    digests: Callable[..., Any],
) -> None:
    met = thin("met", backend=backend)
    first, second, last = models.model_named(met.ledger, "m").kept
    slice_ = {
        "in the first gap": 1,
        "in a later gap": second,
        "just after a kept one": first + 1,
        "in the last slice": last,
    }[where]
    (user,) = users_at(met, people(80, 240), 1, [slice_])[:1]
    planned = met.plan_erasure([user]).models[0]
    before = digests(met)
    met.erase([user], build=False)
    clean = max([s for s in (first, second, last) if s < slice_], default=0)
    assert met.model("m").constituents()[0].prefix == clean
    assert set(slices_of(met)) == {s for s in (first, second, last) if s <= clean}
    assert met.status().models[0].samples_missing == planned.samples
    (built,) = met.build()
    assert built.samples == planned.samples
    assert built.checkpoints == planned.checkpoints == sum(s > clean for s in (first, second, last))
    never = thin("never", [user], backend)
    assert digests(met) == digests(never)
    changed = {place for place, digest in digests(met).items() if digest != before[place]}
    assert changed == {(1, s) for s in (first, second, last) if s > clean}
    assert audit(met, replay="all").failed == ()


@pytest.mark.parametrize("placement", ["aware", "aware-both"])
def test_thinned_and_placed_by_risk_workers_make_the_bits_of_one_process_that_never_met_them(
    placement: str,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
) -> None:
    rows, users = people(80, 240), ["u1", "u2", "u30"]
    made = []
    for name, some, how in (
        ("met", rows, {"executor": "processes", "workers": 2}),
        ("never", rows.without(users), {}),
    ):
        store = new_store(name)
        country = ["eu" if int(user[1:]) % 4 else "ca" for user in some.user]
        risk = {"eu": (1e-5, 0.75), "ca": (1e-4, 0.25)}
        add(store, some, shards=2, slices=SLICES, group=country, placement=placement, risk=risk)
        fit(store, keep=3, **how)
        made.append(store)
    met, never = made
    met.erase(users, executor="processes", workers=2)
    assert digests(met) == digests(never)
    assert len(digests(met)) == 6


def test_a_build_that_was_cut_off_goes_on_from_the_last_kept_checkpoint(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    thin: Callable[..., Any],
    digests: Callable[..., Any],
    cut_off_at: Callable[..., Any],
) -> None:
    store = new_store()
    add(store, people(80, 240), shards=2, slices=SLICES)
    cut_off_at(Step.BUILD_ENTERED, lambda: fit(store, settings=LEARNERS["linear"], keep=3))
    entered = len(store.checkpoints("m"))
    assert 0 < entered < 6
    assert audit(store).failed == ()
    (built,) = store.build()
    assert built.checkpoints == 6 - entered
    assert digests(store) == digests(thin("whole"))
    assert audit(store, replay="all").failed == ()


def test_an_audit_finds_a_kept_state_that_was_trained_otherwise(thin: Callable[..., Any]) -> None:
    store = thin("store")
    assert audit(store, replay="all").level == 5
    with store.ledger.write() as connection:
        connection.exec_driver_sql("UPDATE model SET kept = '[1, 2, 8]'")
    assert audit(store).failed


def test_slices_added_later_are_all_kept(
    thin: Callable[..., Any], people: Callable[..., Any], add: Callable[..., Any], digests: Callable[..., Any]
) -> None:
    met, never = thin("met"), thin("never", ["u3", "u7"])
    kept = list(models.model_named(met.ledger, "m").kept)
    later = people(30, 60, seed=4)
    add(met, later, shards=None, slices=2)
    add(never, later.without(["u3", "u7"]), shards=None, slices=2)
    met.build()
    never.build()
    assert slices_of(met) == [*kept, 9, 10]
    met.erase(["u3", "u7"])
    assert digests(met) == digests(never)
    assert audit(met, replay="all").failed == ()


def test_answers_come_from_the_longest_kept_prefix(
    thin: Callable[..., Any], people: Callable[..., Any], users_at: Callable[..., list[str]]
) -> None:
    store, rows = thin("store"), people(80, 240)
    kept = models.model_named(store.ledger, "m").kept
    store.erase(users_at(store, rows, 1, [1])[:1], build=False)
    # Nothing before the first kept one: shard 1 abstains.
    assert store.evaluate("m", rows.x, label=rows.y).abstaining == 1
    store.build()
    store.erase(users_at(store, rows, 1, [kept[1]])[:1], build=False)
    assert store.model("m").constituents()[0].prefix == kept[0]
    assert store.evaluate("m", rows.x, label=rows.y).abstaining == 0


def test_the_last_alone_may_be_kept_and_all_of_them_is_the_same_as_not_saying(thin: Callable[..., Any]) -> None:
    assert slices_of(thin("one", keep=1)) == [SLICES]
    store = thin("all", keep=SLICES)
    assert slices_of(store) == list(range(1, SLICES + 1))
    assert models.model_named(store.ledger, "m").kept is None


def test_a_model_keeps_what_it_was_declared_to_keep(thin: Callable[..., Any], fit: Callable[..., Any]) -> None:
    store = thin("store")
    assert fit(store, settings=LEARNERS["linear"]).checkpoints == 0
    assert fit(store, settings=LEARNERS["linear"], keep=3).checkpoints == 0
    for other in (2, "all"):
        with pytest.raises(RefusedError, match="declared with other checkpoints to keep"):
            fit(store, settings=LEARNERS["linear"], keep=other)
    assert store.planning_facts("m").keep == 3


@pytest.mark.parametrize("wrong", [0, -1, 9, "few", 2.5, True])
def test_what_cannot_be_kept_is_refused_before_anything_is_declared(
    wrong: Any,
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
) -> None:
    store = new_store()
    add(store, people(), slices=SLICES)
    with pytest.raises(InputError, match="keep"):
        fit(store, keep=wrong)
    assert store.status().models == ()


def test_which_are_kept_follows_from_the_layout_and_the_schedule(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    rows, chosen = people(), {}
    groups = ["often" if int(user[1:]) % 5 == 0 else "seldom" for user in rows.user]
    for name, options in (
        ("uniform", {}),
        ("aware", {"group": groups, "placement": "aware", "risk": {"often": (0.9, 0.2), "seldom": (0.01, 0.8)}}),
    ):
        store = new_store(name)
        add(store, rows, slices=20, **options)
        fit(store, keep=5)
        chosen[name] = models.model_named(store.ledger, "m").kept
    # Requests fall into the last fifth, and so do the checkpoints to go back to.
    assert sum(slice_ >= 16 for slice_ in chosen["aware"]) == 5
    assert sum(slice_ >= 16 for slice_ in chosen["uniform"]) < 3


def test_the_log_says_what_is_kept_and_the_shell_takes_it(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, people(), shards=2, slices=SLICES)
    given = ["train", "m", "--store", str(store.folder), "--dataset", "d", "--backend", "linear", "--keep"]
    for wrong in ("few", "0", "9"):
        said = CliRunner().invoke(main, [*given, wrong])
        assert said.exit_code == 1
        assert said.stderr.count("\n") == 1
    said = CliRunner().invoke(main, [*given, "3", "--json"])
    assert json.loads(said.stdout)["checkpoints"] == 6
    with store.ledger.read() as connection:
        leaves = [json.loads(bytes(row[0])) for row in connection.exec_driver_sql("SELECT body FROM leaf")]
    (declared,) = [leaf["predicate"] for leaf in leaves if "seed" in leaf["predicate"]]
    assert tuple(declared["kept"]) == models.model_named(store.ledger, "m").kept
