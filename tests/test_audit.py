"""What an audit says of honest stores, in every state they can be in, and that it changes nothing."""

import hashlib
import json
import runpy
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import unlearnd
from unlearnd import erasure, steps
from unlearnd.accounts import put_back
from unlearnd.audit import AuditReport, audit
from unlearnd.cli import main
from unlearnd.default_plugins.linear import LinearBackend
from unlearnd.erasure import carry_out, record_requests
from unlearnd.ledger import erasures
from unlearnd.replay import draw
from unlearnd.store import Store
from unlearnd.translog import sign_head
from unlearnd.verify.reports import Result


class WholeBackend(LinearBackend):
    """Trains a shard whole."""

    name = "whole"
    sliceable = False


class CasualBackend(LinearBackend):
    """Promises nothing about bits."""

    name = "casual"
    deterministic = False


class ElsewhereBackend(LinearBackend):
    """Finds itself in another environment each time it is asked."""

    name = "elsewhere"
    asked = 0

    def environment(self, device: str) -> Mapping[str, str]:
        ElsewhereBackend.asked += 1
        return {"numpy": np.__version__, "cpu": f"kind {ElsewhereBackend.asked}"}


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Make a store with 90 points of 30 users in 2 shards of 3 slices, and a model unless told otherwise."""
    made: list[Store] = []

    def make(
        backend: str | None = "linear", *, unit: str = "user", shards: int = 2, slices: int = 3, rows: int = 90
    ) -> Store:
        store = unlearnd.create_store(str(tmp_path / "store"))
        made.append(store)
        add_backends(store)
        x = np.random.default_rng(3).normal(size=(rows, 4)).astype(np.float32)
        user = np.array([f"u{number % 30}" for number in range(rows)])
        store.ingest("d", x, user=user, label=np.arange(rows) % 3, shards=shards, slices=slices, unit=unit)
        if backend:
            store.train("m", dataset="d", backend=backend, epochs=2)
        return store

    yield make
    for store in made:
        store.close()


def load_transfer() -> Any:
    return runpy.run_path(str(Path(__file__).parent / "backends" / "transfer.py"))["TransferBackend"]()


def add_backends(store: Store) -> None:
    more = {backend.name: backend for backend in (WholeBackend(), CasualBackend(), ElsewhereBackend(), load_transfer())}
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, **more})


def results(report: AuditReport) -> dict[str, str]:
    return {check.id: check.result.value for check in report.checks}


def check_all_pass(store: Store, **options: Any) -> AuditReport:
    """Check that an audit with replay and a tree head passes in all but what needs an opening."""
    report = audit(store, replay="all", head=sign_head(store.translog)[1].encode(), **options)
    lacking = [] if "opening" in options else ["D3"]
    assert [check for check in report.checks if check.result is not Result.PASS and check.id not in lacking] == []
    assert report.level == 5
    return report


def everything(folder: Path) -> dict[str, str]:
    """Return all that a store is: every file's digest, and the ledger by what it says."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "ledger.sqlite" not in path.name
    }
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        return {**found, "ledger": "\n".join(connection.iterdump())}


def test_what_was_not_given_is_not_checked_and_says_what_is_needed(new: Callable[..., Store]) -> None:
    report = audit(new())
    assert {id_ for id_, result in results(report).items() if result == "NOT CHECKED"} == {"L1", "D3", "P1"}
    assert "earlier tree head" in report["L1"].sentence
    assert "opening" in report["D3"].sentence
    assert "--replay" in report["P1"].sentence
    assert (report.level, report.exit_code) == (4, 0)


def test_a_store_passes_after_everything_that_can_happen_to_it(new: Callable[..., Store]) -> None:
    store = new()
    check_all_pass(store)
    erased = store.erase(["u1", "u2"])
    check_all_pass(store, opening=next(iter(erased.openings.values())).as_bytes())
    store.erase(["u3", "nobody"], build=False)
    check_all_pass(store)
    store.erase(["u4"], points=["d:5"])
    more = np.zeros((20, 4), np.float32)
    store.ingest("d", more, user=np.array([f"v{i % 7}" for i in range(20)]), label=np.arange(20) % 3)
    check_all_pass(store)
    store.erase(["v1"], build=False)
    check_all_pass(store)
    store.build()
    store.erase(["v2", "u5"])
    for role in ("log", "receipt"):
        store.rotate_key(role)
        store.erase([f"u{8 if role == 'log' else 9}"])
    check_all_pass(store)
    store.train("m2", dataset="d", backend="linear", epochs=1)
    check_all_pass(store)


def test_an_empty_store_passes_what_there_is_to_pass(tmp_path: Path) -> None:
    with unlearnd.create_store(str(tmp_path / "store")) as store:
        report = audit(store, replay="all")
    assert report.failed == ()
    assert report["P1"].result is Result.NOT_CHECKED


def test_points_scattered_and_erased_one_by_one(new: Callable[..., Store]) -> None:
    store = new(unit="point")
    store.erase(["u1"], points=["d:7", "d:8"])
    store.erase(points=["d:0", "d:89"], build=False)
    check_all_pass(store)


def test_a_backend_that_trains_a_shard_whole(new: Callable[..., Store]) -> None:
    store = new("whole")
    store.erase(["u1"])
    more = np.zeros((20, 4), np.float32)
    store.ingest("d", more, user=np.array([f"v{i % 7}" for i in range(20)]), label=np.arange(20) % 3)
    store.build()
    store.erase(["u2"], build=False)
    check_all_pass(store)
    store.build()
    check_all_pass(store)


def test_more_shards_than_fit_in_one_leaf(new: Callable[..., Store]) -> None:
    store = new(shards=101, slices=1, rows=120)
    store.erase(["u1"])
    report = audit(store)
    assert report.failed == (), "\n".join(report.lines())


def test_a_damaged_checkpoint_that_was_trained_anew(new: Callable[..., Store]) -> None:
    store = new()
    path = Path(store.storage.url) / store.checkpoints("m")[1].path
    path.write_bytes(b"rubbish")
    assert audit(store).failed == ("S1",)
    assert store.discard_damaged() == 2, "it and what follows it"
    store.build()
    check_all_pass(store)
    store.erase(["u1"])
    check_all_pass(store)


def test_erasures_that_overlap_and_end_in_another_order(new: Callable[..., Store]) -> None:
    """The slice changes in the order of marking, the receipts come in the order of ending."""
    store = new(shards=1, slices=1)
    first, second = (
        record_requests(store.ledger, [handle], store.clock(), named={handle: user})
        for user in ("u1", "u2")
        for handle in store.keys.handles([user])
    )
    assert first
    assert second
    erasure._mark(store.ledger, store.storage, erasures.erasure_by_id(store.ledger, first), store.clock)
    report = audit(store)
    assert report.failed == ()
    assert (report["D1"].result, report["D2"].result) == (Result.NOT_CHECKED, Result.NOT_CHECKED)
    carry_out(store.translog, {}, second, store.clock)
    carry_out(store.translog, {}, first, store.clock)
    store.build()
    check_all_pass(store)


def train_on_base(store: Store, model: str) -> None:
    """Train a model on a frozen base, so that there are features beside the data."""
    base = store.folder.parent / "base.safetensors"
    save_file({"weight": np.arange(12, dtype=np.float32).reshape(4, 3) - 6}, base)
    settings = {"base": str(base), "base_public": True}
    store.train(model, dataset="d", backend="transfer", epochs=1, settings=settings)


def set_the_scene(store: Store, story: str) -> None:
    if story == "erase":
        train_on_base(store, "m2")


STORIES: dict[str, Callable[[Store], Any]] = {
    "ingest": lambda store: store.ingest(
        "d", np.zeros((9, 4), np.float32), user=np.array([f"v{i}" for i in range(9)]), label=np.arange(9) % 3
    ),
    "train": lambda store: train_on_base(store, "m2"),
    "erase": lambda store: store.erase(["u1", "u2"]),
}


@pytest.mark.parametrize("story", STORIES)
def test_an_audit_in_the_middle_of_anything_finds_nothing_wrong(new: Callable[..., Store], story: str) -> None:
    """At every durable step, with whoever works still at it."""
    store = new()
    set_the_scene(store, story)
    seen: dict[steps.Step, tuple[str, ...]] = {}

    def look(step: steps.Step) -> None:
        steps.watcher = None
        with Store.open(store.folder) as other:
            report = audit(other)
        seen.setdefault(step, tuple(f"{id_}: {report[id_].sentence}" for id_ in report.failed))
        steps.watcher = look

    steps.watcher = look
    try:
        STORIES[story](store)
    finally:
        steps.watcher = None
    assert len(seen) >= 3
    assert {step: failed for step, failed in seen.items() if failed} == {}


class _CutOffError(BaseException):
    """Stands in for a process that ends."""


CUT_OFF = [
    (story, step)
    for story in STORIES
    for step in steps.Step
    if step.value.partition(":")[0]
    in {"ingest": ["ingest"], "train": ["train", "build"], "erase": ["erase", "log", "receipt"]}[story]
    # Everything is sealed and has roots when these stories begin.
    and step not in (steps.Step.BUILD_SEALED, steps.Step.BUILD_ROOTS)
]


@pytest.mark.parametrize(("story", "step"), CUT_OFF, ids=[step.name for _, step in CUT_OFF])
def test_what_is_cut_off_anywhere_is_no_offence_and_run_again_passes(
    new: Callable[..., Store], story: str, step: steps.Step
) -> None:
    store = new()
    set_the_scene(store, story)

    def stop(here: steps.Step) -> None:
        if here is step:
            raise _CutOffError

    steps.watcher = stop
    try:
        with pytest.raises(_CutOffError):
            STORIES[story](store)
    finally:
        steps.watcher = None
    report = audit(store)
    assert report.failed == (), "\n".join(report.lines())
    STORIES[story](store)
    store.build()
    check_all_pass(store)


def test_an_audit_changes_nothing(new: Callable[..., Store]) -> None:
    store = new()
    erased = store.erase(["u1"])
    opening = next(iter(erased.openings.values())).as_bytes()
    folder = store.folder
    store.close()
    before = everything(folder)
    with Store.open(folder) as again:
        report = audit(again, replay="all", opening=opening)
    assert report.failed == ()
    assert everything(folder) == before


def test_the_draw_is_the_roots_and_nobody_elses() -> None:
    recipes = [hashlib.sha256(bytes([n])).hexdigest() for n in range(40)]
    root = b"r" * 32
    drawn = draw(root, recipes, 5)
    assert drawn == draw(root, reversed(recipes), 5), "not the order given"
    assert drawn == draw(root, recipes, 6)[:5]
    assert drawn != draw(b"s" * 32, recipes, 5)
    assert sorted(draw(root, recipes, 100)) == sorted(recipes)
    hits = [draw(bytes([n]) * 32, recipes, 1)[0] for n in range(200)]
    assert len(set(hits)) > 30


def test_a_sample_says_how_many_of_how_many(new: Callable[..., Store]) -> None:
    store = new()
    report = audit(store, replay=2)
    assert report["P1"].result is Result.PASS
    assert "2 of 6 checkpoints" in report["P1"].sentence


def test_what_promises_no_bits_is_not_replayed(new: Callable[..., Store]) -> None:
    report = audit(new("casual"), replay="all")
    assert report["P1"].result is Result.NOT_CHECKED
    assert "does not promise the same bits" in report["P1"].sentence
    assert report.failed == ()


def test_what_was_trained_in_another_environment_is_not_replayed_and_the_difference_named(
    new: Callable[..., Store],
) -> None:
    report = audit(new("elsewhere"), replay="all")
    assert report["P1"].result is Result.NOT_CHECKED
    assert "cpu (kind" in report["P1"].sentence
    assert "numpy" not in report["P1"].sentence


def test_a_backend_of_another_version_is_not_replayed(new: Callable[..., Store]) -> None:
    store = new()
    other = LinearBackend()
    other.version = "0.0.1"
    store.plugins = replace(store.plugins, backends={**store.plugins.backends, "linear": other})
    report = audit(store, replay=1)
    assert report["P1"].result is Result.NOT_CHECKED
    assert "0.0.1" in report["P1"].sentence


def test_a_tree_head_that_cannot_be_read_fails_only_its_own_check(new: Callable[..., Store]) -> None:
    assert audit(new(), head=b"rubbish").failed == ("L1",)


def test_an_opening_that_cannot_be_read_fails_only_its_own_check(new: Callable[..., Store]) -> None:
    assert audit(new(), opening=b"{}").failed == ("D3",)


def test_a_trust_file_of_another_store_fails(new: Callable[..., Store], tmp_path: Path) -> None:
    with unlearnd.create_store(str(tmp_path / "other")) as other:
        trust = (other.folder / "keys" / "trust.json").read_bytes()
    assert "L2" in audit(new(), trust=trust).failed


def test_points_are_put_back_where_they_stood() -> None:
    letters = [bytes([n]) for n in b"abcdef"]
    for gone in ([], [0], [5], [0, 1, 2], [1, 3, 5], [0, 1, 2, 3, 4, 5]):
        now = [letter for n, letter in enumerate(letters) if n not in gone]
        assert put_back(now, [(n, letters[n]) for n in reversed(gone)]) == letters
    assert put_back([b"a"], [(2, b"b")]) is None
    assert put_back([b"a"], [(0, b"b"), (0, b"c")]) is None


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_the_command_prints_every_check_and_the_level(new: Callable[..., Store], tmp_path: Path) -> None:
    store = new()
    erased = store.erase(["u1"])
    (tmp_path / "head").write_text(sign_head(store.translog)[1])
    (tmp_path / "opening").write_bytes(next(iter(erased.openings.values())).as_bytes())
    options = ["--replay", "1", "--head", str(tmp_path / "head"), "--opening", str(tmp_path / "opening")]
    shown = run("audit", "--store", str(store.folder), *options)
    assert shown.exit_code == 0
    assert [line[:2] for line in shown.stdout.splitlines()[:8]] == ["L1", "L2", "S1", "S2", "D1", "D2", "D3", "P1"]
    assert "Assurance level 5" in shown.stdout
    said = json.loads(run("audit", "--store", str(store.folder), *options, "--json").stdout)
    assert (said["failed"], said["level"]) == ([], 5)
    assert "u1" not in json.dumps(said).replace(store.config.store_id, ""), "an audit names nobody"


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--replay", "0"], 2), (["--replay", "-1"], 2), (["--replay", "some"], 2), (["--head", "/no/file"], 1)],
)
def test_wrong_usage_is_not_a_verdict(new: Callable[..., Store], options: Sequence[str], code: int) -> None:
    result = run("audit", "--store", str(new(None).folder), *options)
    assert result.exit_code == code
    assert "PASS" not in result.output
