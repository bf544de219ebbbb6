"""Ingest: all or nothing, in bounded memory, every point in the one place that is its own."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unlearnd.errors import InputError, RefusedError, UnlearndError
from unlearnd.ledger import points
from unlearnd.packing import unpack, unpack_flat
from unlearnd.store import Store

Make = Callable[..., Store]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes stores which all place users alike."""
    made: list[Store] = []
    key = tmp_path / "placement.key"
    key.write_text("5eed" * 16)

    def create() -> Store:
        made.append(Store.create(tmp_path / f"store-{len(made)}", placement_key=key))
        return made[-1]

    yield create
    for store in made:
        store.close()


@pytest.fixture
def store(make: Make) -> Store:
    return make()


def people(rows: int = 300, count: int = 60, seed: int = 1) -> dict[str, Any]:
    """Return `rows` points of `count` people as `Store.ingest` takes them."""
    generator = np.random.default_rng(seed)
    return {
        "data": generator.normal(size=(rows, 4)).astype(np.float32),
        "label": generator.integers(0, 3, rows),
        "user": np.array([f"p{i}" for i in generator.integers(0, count, rows)]),
    }


def taken(given: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: values[rows] for name, values in given.items()}


def places(store: Store, dataset: str = "d") -> dict[int, tuple[int, int]]:
    """Return the (shard, slice) of every position, having checked that ledger and slice data agree on them."""
    found: dict[int, tuple[int, int]] = {}
    with store.ledger.read() as connection:
        rows = connection.exec_driver_sql(
            "SELECT holding.shard, slice, first, positions FROM holding JOIN dataset ON dataset.id = dataset_id "
            "WHERE name = ? ",
            (dataset,),
        ).all()
    for shard, slice_, first, positions in rows:
        held = unpack(positions).tolist()
        assert held[0] == first
        for position in held:
            assert position not in found
            found[position] = (shard, slice_)
    written = {
        int(position): (int(path.parent.parent.name), int(path.parent.name))
        for path, columns in segments(store, dataset)
        for position in columns["position"]
    }
    assert written == found
    return found


def segments(store: Store, dataset: str = "d") -> list[tuple[Path, Any]]:
    """Return every slice file of a dataset with its columns."""
    paths = sorted((store.folder / "storage" / "data" / dataset).rglob("*.safetensors"))
    return [(path, load_file(path)) for path in paths]


def content(store: Store) -> tuple[dict[str, bytes], list[str]]:
    """Return every file in storage and every row of the ledger but leases."""
    storage = store.folder / "storage"
    files = {str(path.relative_to(storage)): path.read_bytes() for path in storage.rglob("*") if path.is_file()}
    with closing(sqlite3.connect(store.folder / "ledger.sqlite")) as ledger:
        return files, [line for line in ledger.iterdump() if '"lease"' not in line]


# All or nothing


def write_csv(path: Path, given: dict[str, Any]) -> str:
    rows = zip(given["user"], given["data"].tolist(), given["label"], strict=True)
    lines = [f"{who},{','.join(map(repr, x))},{label}" for who, x, label in rows]
    path.write_text("\n".join(["who,a,b,c,d,label", *lines]) + "\n")
    return str(path)


CSV = {"user": "who", "label": "label"}


@pytest.mark.parametrize("first", [True, False], ids=["first ingest", "later ingest"])
@pytest.mark.parametrize(
    "bad",
    ["p1,1,2,nan,4,0", "p1,1,2,3,4", ",1,2,3,4,0", "p1,1,2,3,4,", "p1,1,2,x,4,0", "p1,1,2,3,4,0.5"],
    ids=["NaN", "a cell short", "no user", "no label", "text", "a fraction for a label"],
)
def test_a_bad_row_in_the_second_file_leaves_the_store_as_it_was(
    store: Store, tmp_path: Path, bad: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A buffer so small that the good rows before the bad one are on storage already.
    monkeypatch.setattr("unlearnd.ingest.BUFFER_BYTES", 100)
    good = write_csv(tmp_path / "good.csv", people())
    second = tmp_path / "bad.csv"
    second.write_text("who,a,b,c,d,label\n" + "p2,1,2,3,4,1\n" * 5 + bad + "\n")
    if not first:
        store.ingest("d", good, **CSV, shards=2, slices=2)
    before = content(store)
    with pytest.raises(InputError, match=r"bad\.csv, row 6"):
        store.ingest("d", [good, second], **CSV, **({"shards": 2, "slices": 2} if first else {}))
    assert content(store) == before
    store.ingest("d", good, **CSV, **({"shards": 2, "slices": 2} if first else {}))


def test_an_error_of_whoever_watches_leaves_the_store_as_it_was_too(store: Store) -> None:
    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    before = content(store)
    with pytest.raises(KeyboardInterrupt):
        store.ingest("d", **people(), on_progress=interrupt)
    assert content(store) == before


def test_nothing_to_ingest_is_an_error(store: Store) -> None:
    with pytest.raises(InputError, match="no rows"):
        store.ingest("d", np.empty((0, 4), np.float32), user=[], label=[])
    assert store.status().datasets == ()


# Memory

CHILD = """
import re, sys
import unlearnd.ingest, unlearnd.store
from unlearnd.sources import read_batches
from unlearnd.store import Store

# Batches and buffer much smaller than the smaller file, so that both runs fill them many times over.
unlearnd.ingest.BUFFER_BYTES = 4 << 20
unlearnd.store.read_batches = lambda *given, **asked: read_batches(*given, **{**asked, "batch_bytes": 2 << 20})
folder, rows = sys.argv[1:]
with Store.create(folder) as store:
    store.ingest("d", rows, user="user", label="label", shards=4, slices=4)
# Not `ru_maxrss`, which a child inherits from whoever started it.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def peak_megabytes(tmp_path: Path, megabytes: int, users: int) -> int:
    """Return the most memory that ingesting an npz of this size takes, in a process of its own."""
    rows, width = megabytes * 1000, 250
    path, folder = tmp_path / f"{megabytes}.npz", tmp_path / f"store-{megabytes}"
    x = np.ones((rows, width), np.float32)
    np.savez(path, x=x, user=np.arange(rows) % users, label=np.arange(rows) % 2)
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(path)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    path.unlink()
    shutil.rmtree(folder)
    return int(ended.stdout)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, large = peak_megabytes(tmp_path, 20, 500), peak_megabytes(tmp_path, 200, 500)
    assert large - small < 40  # of the 180 that the file is larger by


# Slices


def test_points_given_before_training_fill_the_same_slices(store: Store) -> None:
    given = people()
    one = store.ingest("d", **taken(given, slice(0, 200)), shards=3, slices=4)
    two = store.ingest("d", **taken(given, slice(200, 300)))
    assert (one.slices, one.first, one.points) == ((1, 4), 0, 200)
    assert (two.slices, two.first, two.points) == ((1, 4), 200, 100)
    status = store.status().datasets[0]
    assert (status.points, status.slices, status.open_slices) == (300, 4, 4)
    assert {slice_ for _, slice_ in places(store).values()} == {1, 2, 3, 4}


def test_points_given_after_training_open_new_slices_behind(store: Store) -> None:
    given = people()
    store.ingest("d", **given, shards=3, slices=4)
    before = places(store)
    store.train("m", dataset="d", backend="linear", epochs=1)
    added = store.ingest("d", **given)
    assert added.slices == (5, 5)
    again = store.ingest("d", **given)
    assert again.slices == (5, 5)
    now = places(store)
    assert {position: now[position] for position in before} == before
    assert {slice_ for position, (_, slice_) in now.items() if position >= 300} == {5}
    store.build()
    assert store.ingest("d", **given, slices=3).slices == (6, 8)
    assert {slice_ for position, (_, slice_) in places(store).items() if position >= 900} == {6, 7, 8}
    assert store.status().datasets[0].slices == 8


def test_a_user_found_again_goes_to_the_same_shard(store: Store) -> None:
    given = people()
    store.ingest("d", **given, shards=5, slices=2)
    store.train("m", dataset="d", backend="linear", epochs=1)
    store.ingest("d", **people(seed=2))
    shards: dict[str, set[int]] = {}
    for number in range(60):
        shards[f"p{number}"] = {place.shard for place in store.where_user(f"p{number}")}
    assert all(len(found) == 1 for found in shards.values())
    assert len(set.union(*shards.values())) == 5


def test_all_points_of_a_user_are_in_one_place(store: Store) -> None:
    given = people()
    store.ingest("d", **given, shards=4, slices=5)
    found = places(store)
    for who in set(given["user"]):
        assert len({found[position] for position in np.flatnonzero(given["user"] == who).tolist()}) == 1
    assert len(set(found.values())) > 12


def test_an_integer_and_its_digits_are_the_same_user(store: Store) -> None:
    given = people(20, 1)
    store.ingest("d", given["data"], label=given["label"], user=np.full(20, 7))
    store.ingest("d", given["data"], label=given["label"], user=np.full(20, "7"))
    assert store.where_user(7) == store.where_user("7")
    assert sum(len(place.positions) for place in store.where_user("7")) == 40
    assert store.erase([7], build=False).outcomes[0].points == 40
    assert store.where_user("7") == []


def test_a_user_in_two_datasets_is_found_and_erased_in_both(store: Store) -> None:
    given = people(60, 10)
    store.ingest("one", **given, shards=2, slices=2)
    store.ingest("two", **given, shards=3, slices=3)
    assert {place.dataset for place in store.where_user("p3")} == {"one", "two"}
    mine = int(np.sum(given["user"] == "p3"))
    assert store.erase(["p3"]).outcomes[0].points == 2 * mine
    assert store.where_user("p3") == []


# Placement


def by_content(given: dict[str, Any], found: dict[int, tuple[int, int]]) -> dict[bytes, tuple[int, int]]:
    return {given["data"][position].tobytes(): place for position, place in found.items()}


@pytest.mark.parametrize("unit", ["user", "point"])
def test_a_place_depends_on_nobody_else_and_not_on_the_order(make: Make, unit: str) -> None:
    given = people()
    layout: dict[str, Any] = {"shards": 3, "slices": 4, "unit": unit}
    whole = make()
    whole.ingest("d", **given, **layout)
    wanted = by_content(given, places(whole))
    shuffled = taken(given, np.random.default_rng(5).permutation(300))
    subset = taken(given, np.flatnonzero(np.arange(300) % 3 == 1))
    for other in (shuffled, subset):
        store = make()
        store.ingest("d", **other, **layout)
        found = by_content(other, places(store))
        assert found == {content: wanted[content] for content in found}
    pieces = make()
    for start in range(0, 300, 100):
        pieces.ingest("d", **taken(given, slice(start, start + 100)), **(layout if not start else {}))
    assert by_content(given, places(pieces)) == wanted


def test_another_placement_key_gives_other_places(make: Make, tmp_path: Path) -> None:
    given = people()
    one = make()
    one.ingest("d", **given, shards=3, slices=4)
    with Store.create(tmp_path / "other") as other:
        other.ingest("d", **given, shards=3, slices=4)
        assert places(other) != places(one)


def test_the_unit_point_spreads_a_users_points(store: Store) -> None:
    given = people(2000, 1)
    store.ingest("d", **given, shards=4, slices=5, unit="point")
    found = list(places(store).values())
    counts = np.array([found.count(place) for place in sorted(set(found))])
    assert len(counts) == 20
    # 100 expected in each; 60 and 140 are four standard deviations away.
    assert counts.min() > 60
    assert counts.max() < 140
    assert sum(len(place.positions) for place in store.where_user("p0")) == 2000


def test_the_unit_point_tells_points_apart_by_every_part_of_them(make: Make) -> None:
    base = people(1, 1)
    x, y = np.repeat(base["data"], 64, axis=0), np.repeat(base["label"], 64)
    changed = x.copy()
    changed[:, 3] = np.arange(64)
    cases = {
        "content": (changed, y, np.full(64, "p0")),
        "user": (x, y, np.array([f"p{i}" for i in range(64)])),
        "label": (x, np.arange(64), np.full(64, "p0")),
    }
    for data, label, user in cases.values():
        store = make()
        store.ingest("d", data, label=label, user=user, shards=4, slices=4, unit="point")
        assert len(set(places(store).values())) > 8
    store = make()
    store.ingest("d", x, label=y, user=np.full(64, "p0"), shards=4, slices=4, unit="point")
    assert len(set(places(store).values())) == 1


def test_the_type_a_label_came_in_does_not_move_a_point(make: Make) -> None:
    given = people()
    layout: dict[str, Any] = {"shards": 3, "slices": 4, "unit": "point"}
    numbers, texts = make(), make()
    numbers.ingest("d", **given, **layout)
    texts.ingest("d", **{**given, "label": given["label"].astype(str)}, **layout)
    assert places(numbers) == places(texts)


@pytest.mark.parametrize("unit", ["user", "point"])
def test_holdings_cover_every_position_exactly_once_however_it_was_buffered(
    store: Store, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unlearnd.ingest.BUFFER_BYTES", 1000)
    given = people(5000, 700)
    store.ingest("d", **given, shards=5, slices=6, unit=unit)
    store.ingest("d", **people(1000, 700, seed=2))
    assert sorted(places(store)) == list(range(6000))
    with store.ledger.read() as connection:
        packed = [row[0] for row in connection.exec_driver_sql("SELECT positions FROM holding")]
    flat, _ = unpack_flat(packed)
    assert np.array_equal(np.sort(flat), np.arange(6000))
    # And each with its owner: what the ledger says of a user is what was given.
    for who in ("p0", "p7", "p699"):
        mine = sorted(position for place in store.where_user(who) for position in place.positions)
        first = np.flatnonzero(given["user"] == who).tolist()
        assert [position for position in mine if position < 5000] == first


def test_the_ledger_takes_at_most_16_bytes_a_point_at_ten_points_a_user(store: Store) -> None:
    rows = 100_000
    generator = np.random.default_rng(3)
    user = generator.permutation(np.arange(rows) % (rows // 10))
    store.ingest("d", np.zeros((rows, 1), np.float32), label=np.arange(rows) % 2, user=user, shards=10, slices=10)
    store.ledger.scrub()
    with closing(sqlite3.connect(store.folder / "ledger.sqlite")) as ledger:
        pages, size = (ledger.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    assert pages * size <= 16 * rows
    assert (store.folder / "ledger.sqlite").stat().st_size == pages * size


def test_no_user_id_is_anywhere_in_the_store(store: Store, tmp_path: Path) -> None:
    given = people(50, 5)
    given["user"] = np.array([f"{who}@secret.example" for who in given["user"]])
    store.ingest("d", **given)
    store.train("m", dataset="d", backend="linear", epochs=1)
    store.erase(["p1@secret.example"])
    for path in store.folder.rglob("*"):
        if path.is_file():
            assert b"secret.example" not in path.read_bytes()


# What is kept of a point


def test_bytes_stay_bytes_and_everything_else_becomes_float32(store: Store) -> None:
    given = people(40, 8)
    pixels = np.arange(40 * 6).reshape(40, 2, 3).astype(np.uint8)
    store.ingest("pixels", pixels, label=given["label"], user=given["user"])
    for _, columns in segments(store, "pixels"):
        assert columns["x"].dtype == np.uint8
        assert np.array_equal(columns["x"], pixels[columns["position"]])
    for number, kind in enumerate((np.float64, np.int64, np.float16, bool)):
        store.ingest(f"k{number}", given["data"].astype(kind), label=given["label"], user=given["user"])
        for _, columns in segments(store, f"k{number}"):
            assert columns["x"].dtype == np.float32
            assert np.array_equal(columns["x"], given["data"].astype(kind).astype(np.float32)[columns["position"]])


def test_groups_are_kept_with_every_point(store: Store) -> None:
    given = people(100, 20)
    countries = np.array(["at", "be", "ch"])[np.arange(100) % 3]
    store.ingest("d", **taken(given, slice(0, 60)), group=countries[:60])
    store.ingest("d", **taken(given, slice(60, 100)), group=countries[60:])
    names = points.dataset_named(store.ledger, "d").groups
    assert sorted(names) == ["at", "be", "ch"]
    for _, columns in segments(store):
        assert [names[code] for code in columns["group"]] == countries[columns["position"]].tolist()
    with pytest.raises(InputError, match="group"):
        store.ingest("d", **given)


def test_labels_are_kept_and_sorted_only_by_models(store: Store) -> None:
    given = people(90, 20)
    labels = np.array(["zebra", "ant", "mole"])[np.arange(90) % 3]
    store.ingest("d", given["data"], label=labels, user=given["user"])
    names = points.dataset_named(store.ledger, "d").labels
    assert names == ("zebra", "ant", "mole")
    for _, columns in segments(store):
        assert [names[code] for code in columns["label"]] == labels[columns["position"]].tolist()
    assert store.declare("m", dataset="d", backend="linear").spec.classes == ("ant", "mole", "zebra")


# Classes


def test_declared_classes_are_there_before_any_point_has_them(store: Store) -> None:
    given = people(30, 5)
    added = store.ingest("d", **given, classes=5)
    assert added.dataset.labels == (0, 1, 2, 3, 4)
    assert store.declare("m", dataset="d", backend="linear").spec.classes == (0, 1, 2, 3, 4)
    # After a model, too: the class was declared, so the model knows it.
    store.ingest("d", given["data"], label=np.full(30, 4), user=given["user"])
    with pytest.raises(InputError, match="none of the 5 classes declared"):
        store.ingest("d", given["data"], label=np.full(30, 5), user=given["user"])


def test_declared_classes_may_be_text_and_numbers_in_any_order(store: Store) -> None:
    given = people(30, 5)
    texts = np.array(["a", "b"])[np.arange(30) % 2]
    store.ingest("texts", given["data"], label=texts, user=given["user"], classes=["c", "a", "b"])
    assert set(points.dataset_named(store.ledger, "texts").labels) == {"a", "b", "c"}
    store.ingest("numbers", given["data"], label=np.arange(30) % 2, user=given["user"], classes=[10, 0, 1])
    assert set(points.dataset_named(store.ledger, "numbers").labels) == {0, 1, 10}
    with pytest.raises(InputError, match="row 1, label column: the label is none of the 2 classes"):
        store.ingest("other", given["data"], label=texts, user=given["user"], classes=["b", "c"])


@pytest.mark.parametrize("classes", [0, -1, [], ["a", "a"], [1, "1"]])
def test_classes_that_make_no_sense_are_refused(store: Store, classes: Any) -> None:
    with pytest.raises(InputError):
        store.ingest("d", **people(30, 5), classes=classes)


def test_classes_cannot_be_declared_differently_later(store: Store) -> None:
    store.ingest("d", **people(30, 5), classes=3)
    store.ingest("d", **people(30, 5), classes=3)
    with pytest.raises(RefusedError, match="classes"):
        store.ingest("d", **people(30, 5), classes=4)


# Two at a time


def test_two_ingests_into_one_dataset_come_one_after_the_other(make: Make, tmp_path: Path) -> None:
    store = make()
    code = """
import sys
import numpy as np
from unlearnd.store import Store
with Store.open(sys.argv[1]) as store:
    for turn in range(3):
        rows = np.random.default_rng(turn).normal(size=(500, 4)).astype(np.float32)
        store.ingest("d", rows, user=np.arange(500) % 50, label=np.arange(500) % 2, shards=2)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(store.folder)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in children:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said
    assert sorted(places(store)) == list(range(3000))


def test_a_layout_too_large_to_train_is_refused(store: Store) -> None:
    for layout in ({"slices": 10**9}, {"shards": 10**9}, {"shards": 0}, {"slices": -1}, {"unit": "row"}):
        with pytest.raises(UnlearndError):
            store.ingest("d", **people(30, 5), **layout)
    assert json.dumps(store.status().datasets) == "[]"
