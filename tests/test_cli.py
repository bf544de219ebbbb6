"""The command line as people and scripts meet it: the journey, and every way to get it wrong.

Whatever is run here, in this process or in a child, is checked for two things on the way: no traceback, and no
user id on standard output or standard error.
"""

import csv
import io
import json
import os
import pty
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from unlearnd.cli import main
from unlearnd.ledger.database import SCHEMA

ROWS, PEOPLE, SHARDS, SLICES = 120, 20, 2, 3
SECRET = "secret.example"
"""Part of every user id, and so never to be seen."""


def user(number: int) -> str:
    return f"person-{number}@{SECRET}"


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process, in a folder, on a store."""

    def __init__(self, folder: Path, store: Path | None) -> None:
        self.folder, self.store = folder, store

    def __call__(self, *arguments: object, code: int = 0, stdin: str | bytes | None = None) -> Said:
        given = [str(argument) for argument in arguments]
        prefix = ["--store", str(self.store)] if self.store else []
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            ended = CliRunner().invoke(main, [*prefix, *given], input=stdin, catch_exceptions=False)
        finally:
            os.chdir(before)
        said = Said(ended.exit_code, ended.stdout, ended.stderr)
        assert said.code == code, (given, said)
        assert SECRET not in said.out + said.err
        return said

    def refused(self, *arguments: object, says: str = "", stdin: str | bytes | None = None) -> str:
        """Run what must fail with one sentence and change nothing; return the sentence."""
        before = snapshot(self.store)
        said = self(*arguments, code=1, stdin=stdin)
        assert said.out == ""
        assert said.err.startswith("unlearnd: ")
        assert said.err.count("\n") == 1
        assert said.err.endswith("\n")
        assert says in said.err
        assert snapshot(self.store) == before
        return said.err

    def misused(self, *arguments: object, says: str = "") -> str:
        """Run what is wrong usage: exit 2, nothing on standard output, nothing changed."""
        before = snapshot(self.store)
        said = self(*arguments, code=2)
        assert said.out == ""
        assert says in said.err
        assert snapshot(self.store) == before
        return said.err


def snapshot(store: Path | None) -> dict[str, str]:
    """Return all that is in a store: its files by digest, and its ledger as SQL without leases."""
    if store is None or not store.exists():
        return {}
    found = {
        str(path.relative_to(store)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and not path.name.startswith("ledger.sqlite")
    }
    try:
        with closing(sqlite3.connect(f"file:{store / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
            found["ledger"] = "\n".join(line for line in ledger.iterdump() if '"lease"' not in line)
    except sqlite3.DatabaseError:
        found["ledger"] = "unreadable"
    return found


def rows_of() -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(7)
    x = generator.normal(size=(ROWS, 3)).astype(np.float32)
    return x, np.where(x[:, 0] > 0, "yes", "no"), np.array([user(i % PEOPLE) for i in range(ROWS)])


def write_csv(path: Path, x: Any, label: Any, who: Any) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "a", "b", "c", "label"])
        writer.writerows([w, *map(float, row), answer] for row, answer, w in zip(x, label, who, strict=True))
    return path


def write_npz(path: Path, x: Any, label: Any, who: Any) -> Path:
    np.savez(path, x=x, label=label, who=who)
    return path


def write_parquet(path: Path, x: Any, label: Any, who: Any) -> Path:
    columns = {"who": who, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": label}
    parquet.write_table(pa.table(columns), path)
    return path


WRITERS: dict[str, Callable[..., Path]] = {"csv": write_csv, "npz": write_npz, "parquet": write_parquet}
INGEST = ("--user", "who", "--label", "label", "--shards", SHARDS, "--slices", SLICES)
TRAIN = ("--dataset", "people", "--backend", "linear", "--epochs", 2, "--seed", 1)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `rows.csv` and a store with the dataset `people`; copied for every test that wants one."""
    folder = tmp_path_factory.mktemp("origin")
    write_csv(folder / "rows.csv", *rows_of())
    init(folder)("ingest", "people", "rows.csv", *INGEST)
    return folder


@pytest.fixture(scope="module")
def trained_origin(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "origin"
    shutil.copytree(origin, folder)
    Shell(folder, folder / "store")("train", "m", *TRAIN)
    return folder


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A folder with `rows.csv` and an empty store."""
    write_csv(tmp_path / "rows.csv", *rows_of())
    return init(tmp_path)


@pytest.fixture
def filled(origin: Path, tmp_path: Path) -> Shell:
    """A store with the dataset `people` and no model."""
    shutil.copytree(origin, tmp_path / "filled")
    return Shell(tmp_path / "filled", tmp_path / "filled" / "store")


@pytest.fixture
def trained(trained_origin: Path, tmp_path: Path) -> Shell:
    """A store with the dataset `people` and the model `m`."""
    shutil.copytree(trained_origin, tmp_path / "trained")
    return Shell(tmp_path / "trained", tmp_path / "trained" / "store")


def write(shell: Shell, name: str, text: str | bytes) -> str:
    (shell.folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return name


def init(folder: Path) -> Shell:
    """Make `store` in a folder, with a placement that is the same every time."""
    (folder / "placement.key").write_text("5eed" * 16 + "\n")
    Shell(folder, None)("init", "store", "--placement-key", "placement.key")
    (folder / "placement.key").unlink()
    return Shell(folder, folder / "store")


def positions_of(shell: Shell, who: str) -> list[int]:
    return [position for place in shell("where", "--user", who, "--json").json for position in place["positions"]]


def live_points(shell: Shell) -> int:
    return sum(dataset["points"] for dataset in shell("status", "--json").json["datasets"])


def count_of(shell: Shell, table: str) -> int:
    with closing(sqlite3.connect(f"file:{shell.store / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


# The journey


def test_init_makes_a_store_that_only_its_owner_can_read(tmp_path: Path) -> None:
    shell = Shell(tmp_path, None)
    said = shell("init", "shop")
    assert said.out.startswith(f"Made a store in {tmp_path / 'shop'}.")
    assert said.err == ""
    for secret in ("keys/placement.key", "keys/pepper.key", "ledger.sqlite"):
        assert (tmp_path / "shop" / secret).stat().st_mode & 0o077 == 0
    assert (tmp_path / "shop" / "keys").stat().st_mode & 0o077 == 0
    assert (tmp_path / "shop" / "storage").stat().st_mode & 0o077 == 0


def test_init_json_names_the_store(tmp_path: Path) -> None:
    made = Shell(tmp_path, None)("init", "shop", "--json").json
    assert made["store"] == str(tmp_path / "shop")
    assert len(made["id"]) == 32


def test_init_takes_the_placement_key_of_another_store(tmp_path: Path, origin: Path) -> None:
    key = origin / "store" / "keys" / "placement.key"
    Shell(tmp_path, None)("init", "shop", "--placement-key", key)
    assert (tmp_path / "shop" / "keys" / "placement.key").read_text() == key.read_text()
    assert (tmp_path / "shop" / "keys" / "pepper.key").read_text() != (key.parent / "pepper.key").read_text()


@pytest.mark.parametrize("kind", WRITERS)
def test_the_journey_goes_the_same_way_from_every_format(shell: Shell, kind: str) -> None:
    rows = WRITERS[kind](shell.folder / f"data.{kind}", *rows_of())
    added = shell("ingest", "people", rows, *INGEST, "--json").json
    assert added == {
        "dataset": "people",
        "points": ROWS,
        "left_out": 0,
        "first": 0,
        "shards": SHARDS,
        "slices": [1, SLICES],
        "classes": added["classes"],
    }
    assert sorted(added["classes"]) == ["no", "yes"]
    built = shell("train", "m", *TRAIN, "--json").json
    assert built["checkpoints"] == SHARDS * SLICES
    assert built["samples"] == built["from_scratch"] > 0
    right = shell("evaluate", "m", rows, "--label", "label", "--json").json
    assert right["top1"] > 0.9
    assert (right["points"], right["constituents"], right["abstaining"], right["top5"]) == (ROWS, SHARDS, 0, None)
    answers = shell("predict", "m", rows, "--json").json
    assert [answer["row"] for answer in answers] == list(range(1, ROWS + 1))
    assert {answer["label"] for answer in answers} == {"no", "yes"}
    assert all(0 < answer["score"] <= 1 for answer in answers)
    erased = shell("erase", "--user", user(3), "--json").json
    assert [(o["found"], o["points"], o["asked"]) for o in erased["outcomes"]] == [(True, ROWS // PEOPLE, "user")]
    assert erased["outcomes"][0]["rebuilt_at"] is not None
    assert positions_of(shell, user(3)) == []
    assert live_points(shell) == ROWS - ROWS // PEOPLE
    assert shell("build", "--json").json[0]["samples"] == 0


def test_all_formats_train_the_same_bits(shell: Shell) -> None:
    tensors = {}
    for kind, writer in WRITERS.items():
        rows = writer(shell.folder / f"data.{kind}", *rows_of())
        store = Shell(shell.folder, shell.folder / f"store-{kind}")
        key = shell.folder / "store" / "keys" / "placement.key"
        Shell(shell.folder, None)("init", f"store-{kind}", "--placement-key", key)
        store("ingest", "people", rows, *INGEST)
        store("train", "m", *TRAIN)
        found = store("checkpoints", "m", "--json").json["checkpoints"]
        tensors[kind] = [(c["shard"], c["slice"], c["tensors"]) for c in found]
    assert tensors["csv"] == tensors["npz"] == tensors["parquet"]


def test_what_people_read_says_what_happened(shell: Shell) -> None:
    assert shell("status").out.endswith(
        "No dataset yet: `unlearnd ingest DATASET FILE… --user COL --label COL` adds points.\n"
    )
    said = shell("ingest", "people", "rows.csv", *INGEST)
    assert said.out == f"Added {ROWS} points to 'people': {SHARDS} shards, slices 1 to {SLICES}, 2 classes.\n"
    assert "No model yet" in shell("status").out
    said = shell("train", "m", *TRAIN)
    assert said.out.startswith("Trained ")
    assert f"{SHARDS * SLICES} checkpoints" in said.out
    assert said.err == ""
    assert "Nothing to train: every checkpoint is there." in shell("build").out
    assert "top-1 " in shell("evaluate", "m", "rows.csv", "--label", "label").out
    planned = shell("erase", "--user", user(3), "--dry-run").out
    assert f"Would erase {ROWS // PEOPLE} points" in planned
    assert "nothing has changed" in planned
    assert live_points(shell) == ROWS
    waiting = shell("erase", "--user", user(3), "--no-build").out
    assert f"Erased {ROWS // PEOPLE} points" in waiting
    assert "`unlearnd build` trains" in waiting
    assert "run `unlearnd build`" in shell("status").out
    assert shell("build").out.startswith("Trained ")
    assert "run `unlearnd build`" not in shell("status").out
    assert "all 2 complete (3 slices)" in shell("status").out
    assert "Nothing found" in shell("where", "--user", user(3)).out
    assert "people" in shell("where", "--user", user(4)).out


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "another"),
        ("ingest", "more", "rows.csv", "--user", "who", "--label", "label"),
        ("train", "n", *TRAIN),
        ("build",),
        ("build", "m"),
        ("predict", "m", "rows.csv"),
        ("evaluate", "m", "rows.csv", "--label", "label"),
        ("where", "--user", user(1)),
        ("where", "--user", "nobody"),
        ("where", "--point", "people:5"),
        ("where", "--point", "people:99999"),
        ("erase", "--user", user(1), "--dry-run"),
        ("erase", "--user", user(1), "--no-build"),
        ("erase", "--user", user(1)),
        ("erase", "--user", "nobody"),
        ("erase", "--point", "people:7"),
        ("status",),
        ("checkpoints", "m"),
        ("plugins",),
        ("migrate",),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)).replace(SECRET, "…"),
)
def test_json_is_one_document_on_standard_output_and_nothing_else_anywhere(
    trained: Shell, arguments: tuple[object, ...]
) -> None:
    said = trained(*arguments, "--json")
    json.loads(said.out)
    assert said.err == ""


def test_the_store_may_be_named_before_or_after_the_command_by_variable_or_by_where_one_is(
    filled: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nowhere = filled.store, Shell(filled.folder, None)
    nowhere.refused("status", says="no store here")
    assert "people" in filled("status").out
    assert "people" in nowhere("status", "--store", store).out
    below = store / "storage" / "data"
    assert "people" in Shell(below, None)("status").out
    monkeypatch.setenv("UNLEARND_STORE", str(store))
    assert "people" in nowhere("status").out
    # What is said on the command line goes before the variable.
    monkeypatch.setenv("UNLEARND_STORE", "/nowhere")
    assert "people" in nowhere("status", "--store", store).out
    assert "people" in nowhere("--store", store, "migrate").out or "schema" in nowhere("--store", store, "migrate").out


def test_predict_writes_csv_to_standard_output_or_to_a_file(trained: Shell) -> None:
    printed = trained("predict", "m", "rows.csv")
    said = trained("predict", "m", "rows.csv", "-o", "out.csv")
    assert said.out == ""
    assert "120 rows" in said.err
    written = (trained.folder / "out.csv").read_text()
    assert written.splitlines() == printed.out.splitlines()
    rows = list(csv.DictReader(io.StringIO(written)))
    assert list(rows[0]) == ["row", "label", "score"]
    assert len(rows) == ROWS
    answers = trained("predict", "m", "rows.csv", "--json").json
    assert [row["label"] for row in rows] == [answer["label"] for answer in answers]


def test_a_label_with_a_comma_or_a_quote_is_still_one_cell(shell: Shell) -> None:
    x, label, who = rows_of()
    write_csv(shell.folder / "odd.csv", x, np.where(label == "yes", 'yes, "please"', "no"), who)
    shell("ingest", "people", "odd.csv", *INGEST)
    shell("train", "m", *TRAIN)
    for text in (shell("predict", "m", "odd.csv").out, None):
        if text is None:
            shell("predict", "m", "odd.csv", "-o", "out.csv")
            text = (shell.folder / "out.csv").read_text()
        found = {row["label"] for row in csv.DictReader(io.StringIO(text))}
        assert found == {'yes, "please"', "no"}


def test_predict_needs_neither_user_nor_label_and_takes_columns_in_any_order(trained: Shell) -> None:
    x, _, _ = rows_of()
    lines = ["c,extra,a,b", *(f"{row[2]},7,{row[0]},{row[1]}" for row in x.astype(float))]
    write(trained, "bare.csv", "\n".join(lines) + "\n")
    assert trained("predict", "m", "bare.csv").out == trained("predict", "m", "rows.csv").out


def test_mean_and_vote_both_answer(trained: Shell) -> None:
    vote = trained("predict", "m", "rows.csv", "--json").json
    mean = trained("predict", "m", "rows.csv", "--aggregate", "mean", "--json").json
    assert {answer["score"] for answer in vote} <= {0.5, 1.0}
    assert len({answer["score"] for answer in mean}) > 10
    assert trained("evaluate", "m", "rows.csv", "--label", "label", "--aggregate", "mean", "--json").json["top1"] > 0.8


def test_a_label_the_model_never_saw_counts_as_wrong(trained: Shell) -> None:
    write(trained, "odd.csv", "a,b,c,label\n1,2,3,perhaps\n")
    assert trained("evaluate", "m", "odd.csv", "--label", "label", "--json").json["top1"] == 0


def test_train_run_again_has_nothing_to_do(trained: Shell) -> None:
    again = trained("train", "m", *TRAIN, "--json").json
    assert (again["samples"], again["checkpoints"]) == (0, 0)


def test_settings_given_as_key_and_value_reach_the_backend(filled: Shell) -> None:
    filled("train", "m", *TRAIN, "--set", "lr=0.5", "--set", "batch_size=8", "--schedule", "equal-work")
    filled.refused("train", "m", *TRAIN, "--set", "lr=0.5", says="settings")
    with closing(sqlite3.connect(filled.store / "ledger.sqlite")) as ledger:
        spec = json.loads(ledger.execute("SELECT spec FROM model").fetchone()[0])
    assert (spec["settings"]["lr"], spec["settings"]["batch_size"]) == (0.5, 8)
    assert spec["schedule"] == "equal-work"


def test_two_workers_train_the_same_bits_as_one(filled: Shell) -> None:
    filled("train", "one", *TRAIN)
    filled("train", "two", *TRAIN, "--workers", 2)
    one, two = (filled("checkpoints", name, "--json").json["checkpoints"] for name in ("one", "two"))
    assert [c["tensors"] for c in one] == [c["tensors"] for c in two]
    assert len(one) == SHARDS * SLICES


def test_new_points_after_training_open_a_slice_and_build_trains_only_that(trained: Shell) -> None:
    added = trained("ingest", "people", "rows.csv", "--user", "who", "--label", "label", "--json").json
    assert (added["slices"], added["first"]) == ([SLICES + 1, SLICES + 1], ROWS)
    built = trained("build", "--json").json[0]
    assert built["checkpoints"] == SHARDS
    assert 0 < built["samples"] < built["from_scratch"]


# Erasing


def test_several_users_are_erased_together_and_answered_in_order(trained: Shell) -> None:
    said = trained("erase", "--user", user(3), "--user", "nobody", "--user", user(4), "--json").json
    assert [outcome["found"] for outcome in said["outcomes"]] == [True, False, True]
    assert len({outcome["erasure"] for outcome in said["outcomes"]}) == 1
    assert len({outcome["request"] for outcome in said["outcomes"]}) == 3
    assert live_points(trained) == ROWS - 2 * ROWS // PEOPLE
    assert positions_of(trained, user(3)) == positions_of(trained, user(4)) == []
    assert len(positions_of(trained, user(5))) == ROWS // PEOPLE


@pytest.mark.parametrize(
    "text",
    [
        f"{user(3)}\n{user(4)}\n",
        f"{user(3)}\r\n\r\n{user(4)}",
        f"\ufeff{user(3)}\n\n\n{user(4)}\n",
        f"{user(3)}\n{user(4)}\n{user(3)}\n",
    ],
    ids=["lines", "Windows", "byte order mark", "twice"],
)
def test_a_file_of_users_erases_each_of_them(trained: Shell, text: str) -> None:
    write(trained, "leavers.txt", text)
    said = trained("erase", "--file", "leavers.txt", "--no-build", "--json").json
    assert [outcome["points"] for outcome in said["outcomes"]] == [6, 6]
    assert live_points(trained) == ROWS - 12


def test_users_may_come_from_a_column_of_a_csv(trained: Shell) -> None:
    write(trained, "leavers.csv", f'when,who\n2026-01-01,{user(3)}\n2026-01-02,"{user(4)}"\n2026-01-03,\n')
    said = trained("erase", "--file", "leavers.csv", "--column", "who", "--no-build", "--json").json
    assert [outcome["points"] for outcome in said["outcomes"]] == [6, 6]


def test_users_may_come_from_standard_input(trained: Shell) -> None:
    said = trained("erase", "--file", "-", "--no-build", "--json", stdin=f"{user(3)}\n").json
    assert [outcome["points"] for outcome in said["outcomes"]] == [6]
    said = trained("erase", "--file", "-", "--column", "who", "--no-build", "--json", stdin=f"who\n{user(4)}\n").json
    assert [outcome["points"] for outcome in said["outcomes"]] == [6]


def test_a_file_and_users_on_the_command_line_go_together(trained: Shell) -> None:
    write(trained, "leavers.txt", f"{user(3)}\n")
    said = trained("erase", "--file", "leavers.txt", "--user", user(4), "--point", "people:0", "--no-build", "--json")
    assert [outcome["asked"] for outcome in said.json["outcomes"]] == ["user", "user", "point"]
    assert live_points(trained) == ROWS - 13


def test_a_single_point_is_erased_and_its_neighbours_stay(trained: Shell) -> None:
    assert positions_of(trained, user(3)) == [3, 23, 43, 63, 83, 103]
    said = trained("erase", "--point", "people:43", "--json").json
    assert [(outcome["points"], outcome["asked"]) for outcome in said["outcomes"]] == [(1, "point")]
    assert positions_of(trained, user(3)) == [3, 23, 63, 83, 103]
    assert trained("where", "--point", "people:43", "--json").json == []
    assert trained("where", "--point", "people:63", "--json").json[0]["positions"] == [63]


def test_a_dry_run_tells_what_a_run_does_and_changes_nothing(trained: Shell) -> None:
    before = snapshot(trained.store)
    plan = trained("erase", "--user", user(3), "--user", "nobody", "--dry-run", "--json").json
    assert snapshot(trained.store) == before
    assert (plan["found"], plan["not_found"], plan["points"]) == (1, 1, 6)
    done = trained("erase", "--user", user(3), "--json").json
    model = plan["models"][0]
    assert model["checkpoints"] == len(done["outcomes"][0]["checkpoints"])
    assert model["samples"] == done["builds"][0]["samples"]
    assert model["from_scratch"] == done["builds"][0]["from_scratch"]
    places = [(place["dataset"], place["shard"], place["slice"], place["points"]) for place in plan["places"]]
    slices = [(s["dataset"], s["shard"], s["slice"], s["points"]) for s in done["outcomes"][0]["slices"]]
    assert places == slices


def test_without_a_build_the_model_goes_on_answering_and_build_catches_up(trained: Shell) -> None:
    done = trained("erase", "--user", user(3), "--no-build", "--json").json
    assert done["builds"] == []
    assert done["outcomes"][0]["influence_removed_at"] is not None
    assert done["outcomes"][0]["rebuilt_at"] is None
    status = trained("status", "--json").json
    assert (status["to_rebuild"], status["unfinished"]) == (1, 0)
    assert status["models"][0]["samples_missing"] > 0
    assert trained("evaluate", "m", "rows.csv", "--label", "label", "--json").json["points"] == ROWS
    assert trained("build", "--json").json[0]["samples"] == status["models"][0]["samples_missing"]
    assert trained("status", "--json").json["to_rebuild"] == 0


def test_a_user_erased_before_gets_the_same_answer_and_nothing_is_trained(trained: Shell) -> None:
    first = trained("erase", "--user", user(3), "--json").json
    again = trained("erase", "--user", user(3), "--json").json
    assert [outcome.pop("again") for outcome in first["outcomes"] + again["outcomes"]] == [False, True]
    assert again["outcomes"] == first["outcomes"]
    assert sum(build["samples"] for build in again["builds"]) == 0


def test_nobody_of_that_name_is_an_answer_and_not_an_error(trained: Shell) -> None:
    before = trained("checkpoints", "m", "--json").json
    said = trained("erase", "--user", f"stranger@{SECRET}")
    assert "Nothing found" in said.out
    assert said.err == ""
    assert trained("erase", "--user", f"stranger@{SECRET}", "--dry-run").out.startswith("Nothing ")
    assert trained("where", "--user", f"stranger@{SECRET}").out == "Nothing found.\n"
    assert trained("checkpoints", "m", "--json").json == before


def test_a_position_asked_about_before_it_was_given_can_still_be_erased(filled: Shell) -> None:
    said = filled("erase", "--point", f"people:{ROWS}", "--json").json
    assert [outcome["found"] for outcome in said["outcomes"]] == [False]
    filled("ingest", "people", "rows.csv", "--user", "who", "--label", "label")
    assert filled("where", "--point", f"people:{ROWS}", "--json").json != []
    said = filled("erase", "--point", f"people:{ROWS}", "--json").json
    assert [outcome["points"] for outcome in said["outcomes"]] == [1]
    assert filled("where", "--point", f"people:{ROWS}", "--json").json == []


# Tables


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("plugins",), ["plugin", "package", "version", "brings"]),
        (("checkpoints", "m"), ["shard", "slice", "recipe", "file", "tensors", "bytes", "samples", "seconds"]),
        (("where", "--user", user(1)), ["dataset", "shard", "slice", "points", "positions"]),
        (("erase", "--user", user(1), "--dry-run"), ["model", "shards", "checkpoints", "samples", "retraining"]),
        (("erase", "--user", user(1)), ["request", "points", "slices", "checkpoints", "influence", "rebuilt"]),
        (("status",), ["dataset", "points", "shards", "slices", "open slices", "classes", "clean prefix"]),
    ],
    ids=["plugins", "checkpoints", "where", "dry run", "erase", "status"],
)
def test_a_table_in_a_pipe_is_whole(trained: Shell, arguments: tuple[str, ...], columns: list[str]) -> None:
    said = trained(*arguments).out
    assert [column for column in columns if column not in said] == []
    # "…" ends a long list of positions, and otherwise means that something was cut off.
    assert "…" not in said
    assert "\x1b" not in said


def test_plugins_names_what_each_brings(trained: Shell) -> None:
    plugins = trained("plugins", "--json").json
    default = next(plugin for plugin in plugins if plugin["name"] == "default")
    assert default["distribution"] == "unlearnd"
    assert "backend linear" in default["brings"]
    assert "aggregator mean" in default["brings"]
    assert "aggregator mean" in trained("plugins").out


def test_migrate_of_a_new_store_has_nothing_to_do(trained: Shell) -> None:
    before = snapshot(trained.store)
    assert trained("migrate").out == f"The ledger has schema {SCHEMA} already.\n"
    assert trained("migrate", "--json").json == {"before": SCHEMA, "after": SCHEMA}
    assert snapshot(trained.store) == before


# Wrong usage


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("status", "--frobnicate"),
        ("init",),
        ("ingest", "people"),
        ("ingest", "people", "rows.csv"),
        ("ingest", "people", "rows.csv", "--user", "who"),
        ("ingest", "people", "rows.csv", *INGEST[:4], "--shards", "many"),
        ("ingest", "people", "rows.csv", *INGEST[:4], "--unit", "row"),
        ("train", "m"),
        ("train", "m", "--dataset", "people"),
        ("train", "m", *TRAIN[:4], "--seed", "abc"),
        ("train", "m", *TRAIN[:4], "--workers", 0),
        ("predict", "m"),
        ("evaluate", "m", "rows.csv"),
        ("checkpoints",),
        ("where",),
        ("where", "--user", "a", "--point", "people:1"),
        ("erase",),
        ("erase", "--dry-run"),
        ("erase", "--column", "who", "--user", "a"),
        ("erase", "--user"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(trained: Shell, arguments: tuple[object, ...]) -> None:
    assert "Error: " in trained.misused(*arguments)


# Bad input: one sentence, exit 1, nothing changed


def test_a_command_outside_of_any_store_says_so(tmp_path: Path) -> None:
    nowhere = Shell(tmp_path, None)
    for arguments in (("status",), ("build",), ("migrate",), ("erase", "--user", user(1))):
        said = nowhere.refused(*arguments, says="no store here")
        assert "unlearnd init" in said
    nowhere.refused("status", "--store", tmp_path / "nothing", says=f"no store in {tmp_path / 'nothing'}")
    (tmp_path / "file").write_text("")
    nowhere.refused("status", "--store", tmp_path / "file", says=f"no store in {tmp_path / 'file'}")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_init_refuses_to_overwrite_a_store(filled: Shell) -> None:
    filled.refused("init", filled.store, says=f"there is a store in {filled.store} already")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--storage", "bogus://x"), "bogus"),
        (("--ledger", "bogus"), "ledger URL"),
        (("--ledger", "mysql://host/db"), "SQLite or PostgreSQL"),
        (("--ledger", "sqlite:///nowhere/ledger.sqlite"), "nowhere/ledger.sqlite"),
        (("--placement-key", "missing.key"), "no key file missing.key"),
        (("--placement-key", "short.key"), "64 hexadecimal digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_init_that_fails_can_be_run_again(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "short.key").write_text("abc\n")
    shell = Shell(tmp_path, None)
    shell.refused("init", "shop", *arguments, says=says)
    assert not (tmp_path / "shop" / "unlearnd.toml").exists()
    shell("init", "shop")


def test_init_where_a_file_is_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    Shell(tmp_path, None).refused("init", "taken", says="taken")
    Shell(tmp_path, None).refused("init", "taken/below", says="taken/below")


GOOD = "who,a,b,c,label\nx,1,2,3,yes\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.csv", None, "missing.csv: no such file"),
        ("empty.csv", "", "empty.csv: is empty"),
        ("header.csv", "who,a,b,c,label\n", "header.csv: has a header but no rows"),
        ("nan.csv", GOOD + f"{user(1)},1,nan,3,no\n", "nan.csv, row 2, column 'b': not a number (NaN)"),
        ("infinite.csv", GOOD + f"{user(1)},1,2,inf,no\n", "infinite.csv, row 2, column 'c'"),
        ("text.csv", GOOD + f"{user(1)},1,two,3,no\n", "text.csv, row 2, column 'b': not a number"),
        ("blank.csv", GOOD + f"{user(1)},1,,3,no\n", "blank.csv, row 2, column 'b': empty"),
        ("short.csv", GOOD + f"{user(1)},1,2\n", "short.csv, row 2: 3 cells"),
        ("nobody.csv", GOOD + ",1,2,3,no\n", "nobody.csv, row 2, column 'who': empty"),
        ("unlabelled.csv", GOOD + f"{user(1)},1,2,3,\n", "unlabelled.csv, row 2, column 'label': empty"),
        ("latin.csv", GOOD.encode() + b"\xe9\xff,1,2,3,no\n", "latin.csv, row 2, column 'who': not UTF-8"),
        ("columns.csv", "who,a,b,label\nx,1,2,yes\n", "columns.csv: no column 'c'"),
        ("cut.parquet", "PAR1", "cut.parquet: "),
        ("cut.npz", "PK\x03\x04", "cut.npz: "),
        ("rows.txt", GOOD, "rows.txt: unknown format"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:15] and "\n" not in value else "",
)
@pytest.mark.parametrize("where", ["alone", "second"])
def test_a_file_that_cannot_be_used_names_itself_and_adds_nothing(
    filled: Shell, name: str, content: str | bytes | None, says: str, where: str
) -> None:
    if content is not None:
        write(filled, name, content)
    files = [name] if where == "alone" else ["rows.csv", name]
    filled.refused("ingest", "people", *files, "--user", "who", "--label", "label", says=says)


def test_a_directory_is_no_file_of_rows(filled: Shell) -> None:
    (filled.folder / "rows.d.csv").mkdir()
    filled.refused("ingest", "people", "rows.d.csv", *INGEST[:4], says="is a directory")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--user", "nope", "--label", "label"), "no column 'nope'; there are: who, a, b, c, label"),
        (("--user", "who", "--label", "nope"), "no column 'nope'"),
        (("--user", "who", "--label", "label", "--features", "a,nope"), "no column 'nope'"),
        (("--user", "who", "--label", "label", "--group", "nope"), "no column 'nope'"),
        (("--user", "who", "--label", "label", "--features", "a,a"), "twice"),
        (("--user", "who", "--label", "label", "--features", "a,label"), "label"),
        (("--user", "who", "--label", "a", "--features", "b,c"), "integer or a string"),
        ((*INGEST[:4], "--shards", 0), "at least 1 shard"),
        ((*INGEST[:4], "--shards", -1), "at least 1 shard"),
        ((*INGEST[:4], "--slices", 0), "1 slice"),
        ((*INGEST[:4], "--slices", 99_999_999_999), "slices"),
        (
            (*INGEST[:4], "--placement", "nope"),
            "no placement 'nope'; installed: aware, aware-algorithm-1, aware-both, aware-square-root, uniform",
        ),
        ((*INGEST[:4], "--classes", "1"), "classes declared"),
        ((*INGEST[:4], "--classes", "no,no"), "only once"),
        ((*INGEST[:4], "--classes", "0"), "at least one class"),
        ((*INGEST[:4], "--classes", "no,perhaps"), "none of the 2 classes declared"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_a_new_dataset_is_refused_when_what_is_asked_makes_no_sense(
    shell: Shell, arguments: tuple[object, ...], says: str
) -> None:
    shell.refused("ingest", "people", "rows.csv", *arguments, says=says)
    assert shell("status", "--json").json["datasets"] == []


@pytest.mark.parametrize("name", ["a/b", "../up", "Upper", "", ".", "..", "-dash", "sp ace", "ä", "x" * 64, "a\nb"])
def test_names_that_cannot_be_folders_are_refused(filled: Shell, name: str) -> None:
    filled.refused("ingest", "--user", "who", "--label", "label", "--", name, "rows.csv", says="cannot name a dataset")
    filled.refused("train", *TRAIN, "--", name, says="cannot name a model")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shards", 3), "has shards 2, fixed by its first ingest"),
        (("--unit", "point"), "has unit user"),
        (("--slices", 5), "slices"),
        (("--classes", "no,yes,perhaps"), "classes"),
        (("--group", "label"), "group"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_the_layout_that_the_first_ingest_fixed_does_not_change(
    filled: Shell, arguments: tuple[object, ...], says: str
) -> None:
    filled.refused("ingest", "people", "rows.csv", *INGEST[:4], *arguments, says=says)


def test_labels_must_go_on_being_what_they_were(filled: Shell, trained: Shell) -> None:
    # A class may be new until a model is declared: its classes never change.
    new = GOOD.replace("yes", "perhaps")
    write(trained, "new.csv", new)
    trained.refused("ingest", "people", "new.csv", *INGEST[:4], says="new.csv, row 1, label column: the label is new")
    write(filled, "new.csv", new)
    assert filled("ingest", "people", "new.csv", *INGEST[:4], "--json").json["classes"][-1] == "perhaps"
    x, _, who = rows_of()
    write_npz(filled.folder / "numbers.npz", x, np.arange(ROWS) % 3, who)
    filled("ingest", "numbers", "numbers.npz", *INGEST)
    write_npz(filled.folder / "texts.npz", x, np.array(["1", "x"] * (ROWS // 2)), who)
    filled.refused(
        "ingest", "numbers", "texts.npz", *INGEST[:4], says="texts.npz, row 2, label column: the label is text"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[:, :2], "float32 of shape (2,), but dataset 'numbers' has float32 of shape (3,)"),
        (lambda x: x.astype(np.uint8), "uint8"),
        (lambda x: x.reshape(-1, 3, 1), "(3, 1)"),
    ],
    ids=["narrower", "uint8", "another shape"],
)
def test_features_must_go_on_being_shaped_as_they_were(filled: Shell, change: Any, says: str) -> None:
    x, label, who = rows_of()
    write_npz(filled.folder / "first.npz", x, label, who)
    filled("ingest", "numbers", "first.npz", *INGEST)
    write_npz(filled.folder / "other.npz", change(np.abs(x)), label, who)
    filled.refused("ingest", "numbers", "other.npz", *INGEST[:4], says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dataset", "nope", "--backend", "linear"), "no dataset 'nope'; there are: people"),
        (("--dataset", "people", "--backend", "nope"), "no backend 'nope'; installed: "),
        ((*TRAIN[:4], "--epochs", 0), "epochs must be more than 0"),
        ((*TRAIN[:4], "--epochs", "-1"), "epochs must be more than 0"),
        ((*TRAIN[:4], "--epochs", "abc"), "epochs must be a number"),
        ((*TRAIN[:4], "--epochs", "nan"), "epochs must be "),
        ((*TRAIN[:4], "--epochs", "1/0"), "epochs must be a number"),
        ((*TRAIN[:4], "--epochs", "1e40"), "epochs"),
        ((*TRAIN[:4], "--seed", "-1"), "a seed is a whole number from 0"),
        ((*TRAIN[:4], "--seed", 2**63), "a seed is a whole number from 0"),
        ((*TRAIN[:4], "--schedule", "nope"), "no schedule 'nope'; there are: uniform, equal-work"),
        ((*TRAIN[:4], "--executor", "nope"), "no executor 'nope'; installed: processes, "),
        ((*TRAIN[:4], "--device", "nonsense"), "no device 'nonsense'"),
        ((*TRAIN[:4], "--set", "lr"), "--set takes key=value"),
        ((*TRAIN[:4], "--set", "=1"), "--set takes key=value"),
        ((*TRAIN[:4], "--set", "lr=-1"), "lr"),
        ((*TRAIN[:4], "--set", "lr=NaN"), "lr"),
        ((*TRAIN[:4], "--set", "lr=fast"), "lr"),
        ((*TRAIN[:4], "--set", "batch_size=0"), "batch_size"),
        ((*TRAIN[:4], "--set", "nope=1"), "nope"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_a_training_that_cannot_be_leaves_no_model_and_closes_no_slice(
    filled: Shell, arguments: tuple[object, ...], says: str
) -> None:
    filled.refused("train", "m", *arguments, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--epochs", 3), "other epochs"),
        (("--seed", 2), "its seed"),
        (("--set", "lr=0.3"), "other settings"),
        (("--schedule", "equal-work"), "other schedule"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_a_model_never_changes(trained: Shell, arguments: tuple[object, ...], says: str) -> None:
    trained.refused("train", "m", *TRAIN, *arguments, says=says)


@pytest.mark.parametrize(
    "arguments",
    [("build", "nope"), ("predict", "nope", "rows.csv"), ("evaluate", "nope", "rows.csv", "--label", "label"),
     ("checkpoints", "nope")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_model_that_is_not_there_is_named_with_those_that_are(trained: Shell, arguments: tuple[str, ...]) -> None:
    trained.refused(*arguments, says="no model 'nope'; there are: m")


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ("a,b,label\n1,2,yes\n", (), "no column 'c'; there are: a, b, label"),
        ("a,b,c\n1,2,x\n", (), "row 1, column 'c': not a number"),
        ("a,b,c\n1,2,nan\n", (), "row 1, column 'c': not a number (NaN)"),
        ("a,b,c\n", (), "has a header but no rows"),
        ("", (), "is empty"),
        (None, (), "no such file"),
        ("a,b,c\n1,2,3\n", ("--aggregate", "nope"), "no aggregator 'nope'; installed: mean, vote"),
        ("a,b,c\n1,2,3\n", ("--device", "nonsense"), "no device 'nonsense'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
@pytest.mark.parametrize("to", ["standard output", "JSON", "a file"])
def test_a_prediction_that_cannot_be_prints_and_writes_nothing(
    trained: Shell, content: str | None, arguments: tuple[str, ...], says: str, to: str
) -> None:
    if content is not None:
        write(trained, "ask.csv", content)
    write(trained, "out.csv", "what was there before")
    options = {"standard output": (), "JSON": ("--json",), "a file": ("-o", "out.csv")}[to]
    trained.refused("predict", "m", "ask.csv", *options, *arguments, says=says)
    assert (trained.folder / "out.csv").read_text() == "what was there before"
    assert {path.name for path in trained.folder.iterdir()} <= {"ask.csv", "out.csv", "rows.csv", "store"}


def test_a_bad_row_far_down_leaves_no_half_file_behind(trained: Shell) -> None:
    write(trained, "ask.csv", "a,b,c\n" + "1,2,3\n" * 5000 + "1,2,nan\n")
    trained.refused("predict", "m", "ask.csv", "-o", "out.csv", says="ask.csv, row 5001, column 'c'")
    assert not (trained.folder / "out.csv").exists()
    trained.refused("predict", "m", "rows.csv", "-o", "nowhere/out.csv", says="nowhere/out.csv cannot be written")


def test_evaluate_wants_the_right_answers(trained: Shell) -> None:
    trained.refused("evaluate", "m", "rows.csv", "--label", "nope", says="no column 'nope'")
    write(trained, "blank.csv", "a,b,c,label\n1,2,3,\n")
    trained.refused("evaluate", "m", "blank.csv", "--label", "label", says="blank.csv, row 1, column 'label': empty")
    trained.refused("evaluate", "m", "rows.csv", "--label", "label", "--aggregate", "nope", says="no aggregator 'nope'")


@pytest.mark.parametrize("point", ["43", ":43", "people:", "people:x", "people:-1", "people:1.5", "people:²", user(3)])
@pytest.mark.parametrize("command", ["erase", "where"])
def test_a_malformed_point_is_explained_and_not_repeated(trained: Shell, command: str, point: str) -> None:
    # Not repeated, because somebody may have meant --user.
    trained.refused(command, "--point", point, says="a point is written dataset:position")


@pytest.mark.parametrize("command", ["erase", "where"])
def test_a_point_of_a_dataset_that_is_not_there_is_an_error_and_a_position_that_is_not_there_an_answer(
    trained: Shell, command: str
) -> None:
    trained.refused(command, "--point", "nope:1", says="no dataset 'nope'; there are: people")
    assert "Nothing found" in trained(command, "--point", f"people:{ROWS}").out
    trained.refused(command, "--point", f"people:{10**30}", says="a point is written dataset:position")


@pytest.mark.parametrize(
    ("name", "content", "column", "says"),
    [
        ("missing.txt", None, None, "no file missing.txt"),
        ("empty.txt", "", None, "empty.txt lists nobody"),
        ("blank.txt", "\n\n\r\n", None, "blank.txt lists nobody"),
        ("latin.txt", b"\xe9\xff\n", None, "latin.txt is not UTF-8 text"),
        ("missing.csv", None, "who", "no file missing.csv"),
        ("empty.csv", "", "who", "empty.csv has no column 'who'"),
        ("header.csv", "who\n", "who", "header.csv lists nobody"),
        ("other.csv", "name,when\na,b\n", "who", "other.csv has no column 'who'"),
        # Without a header the first user would be taken for one.
        ("headless.csv", f"{user(3)}\n{user(4)}\n", "who", "headless.csv has no column 'who'"),
        ("long.csv", "who\n" + "x" * 200_000 + "\n", "who", "long.csv"),
        ("quote.csv", 'who,when\n"' + "x\n" * 100_000, "who", "quote.csv"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 14 else "",
)
def test_a_list_of_users_that_cannot_be_read_erases_nobody(
    trained: Shell, name: str, content: str | bytes | None, column: str | None, says: str
) -> None:
    if content is not None:
        write(trained, name, content)
    trained.refused("erase", "--file", name, *(["--column", column] if column else []), says=says)


def test_a_list_of_users_on_standard_input_must_not_be_empty(trained: Shell) -> None:
    trained.refused("erase", "--file", "-", stdin="\n", says="lists nobody")
    trained.refused("erase", "--file", "-", stdin=b"\xff\xfe\n", says="not UTF-8")
    trained.refused("erase", "--file", trained.folder, says="cannot be read")


def test_an_empty_user_is_no_user(trained: Shell) -> None:
    trained.refused("erase", "--user", "", says="a user id is")
    trained.refused("where", "--user", "", says="a user id is")
    trained.refused("erase", "--user", user(3), "--user", "", says="a user id is")


def test_an_erasure_that_asks_for_an_unknown_executor_erases_nobody(trained: Shell) -> None:
    trained.refused("erase", "--user", user(3), "--executor", "nope", says="no executor 'nope'")
    trained.refused("erase", "--user", user(3), "--device", "nonsense", says="no device 'nonsense'")


# Damage


def damage(path: Path, how: str) -> None:
    """Do to a file what disks and people do."""
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "changed":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "content", [b"garbage" * 1000, b"", None, b"SQLite format 3\0" + b"x" * 5000, "cut", "foreign"]
)
def test_a_damaged_ledger_names_itself_and_is_not_replaced(trained: Shell, content: bytes | str | None) -> None:
    ledger = trained.store / "ledger.sqlite"
    for beside in trained.store.glob("ledger.sqlite-*"):
        beside.unlink()
    if content is None:
        ledger.unlink()
    elif content == "cut":
        os.truncate(ledger, 20_000)
    elif content == "foreign":
        ledger.unlink()
        with closing(sqlite3.connect(ledger)) as other:
            other.execute("CREATE TABLE shopping (thing TEXT)")
    else:
        assert isinstance(content, bytes)
        ledger.write_bytes(content)
    before = ledger.read_bytes() if ledger.exists() else None
    for arguments in (("status",), ("erase", "--user", user(1)), ("migrate",)):
        trained.refused(*arguments, says=str(ledger))
    assert (ledger.read_bytes() if ledger.exists() else None) == before


def test_a_ledger_of_another_release_asks_for_migrate(trained: Shell) -> None:
    with closing(sqlite3.connect(trained.store / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE alembic_version SET version_num = '9999'")
    trained.refused("status", says="schema 9999")
    # A newer one cannot be brought back: that too is a sentence.
    trained.refused("migrate", says="9999")


@pytest.mark.parametrize("key", ["pepper", "placement"])
def test_a_missing_or_broken_key_file_is_named(trained: Shell, key: str) -> None:
    path = trained.store / "keys" / f"{key}.key"
    path.write_text("abc")
    trained.refused("where", "--user", user(1), says=f"{path} does not hold 64 hexadecimal digits")
    path.write_bytes(b"\xff\xfe")
    trained.refused("status", says=str(path))
    path.unlink()
    trained.refused("status", says=f"no key file {path}")
    trained.refused("erase", "--user", user(1), says=f"no key file {path}")


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "emptied"])
def test_a_damaged_checkpoint_is_named_and_never_answers(trained: Shell, how: str) -> None:
    last = trained("checkpoints", "m", "--json").json["checkpoints"][-1]
    damage(trained.store / "storage" / last["path"], how)
    trained.refused("predict", "m", "rows.csv", says=last["path"])
    trained.refused("evaluate", "m", "rows.csv", "--label", "label", says=last["path"])


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "emptied"])
def test_build_makes_a_damaged_checkpoint_anew_from_the_one_before_and_says_so(trained: Shell, how: str) -> None:
    before = trained("checkpoints", "m", "--json").json["checkpoints"]
    last = before[-1]
    damage(trained.store / "storage" / last["path"], how)
    said = trained("build").out
    assert said.startswith("1 checkpoint damaged, or made from such, put away and made anew. Trained ")
    after = trained("checkpoints", "m", "--json").json["checkpoints"]
    assert [c["tensors"] for c in after] == [c["tensors"] for c in before]
    assert "Nothing to train" in trained("build").out
    trained("predict", "m", "rows.csv")
    trained("audit", "--replay", "all")


def test_a_storage_without_any_checkpoint_is_not_taken_for_damage(trained: Shell) -> None:
    shutil.rmtree(trained.store / "storage" / "checkpoints")
    trained.refused("build", says="is it the right one?")
    assert "Discarded 6 damaged checkpoints." in trained("build", "--retrain-damaged").err
    trained("audit")


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "emptied"])
def test_damaged_slice_data_is_named_and_never_trained_on(filled: Shell, how: str) -> None:
    segment = sorted((filled.store / "storage" / "data").rglob("*.safetensors"))[0]
    damage(segment, how)
    said = filled("train", "m", *TRAIN, code=1)
    assert said.err.startswith("unlearnd: ")
    assert segment.name in said.err
    assert said.err.count("\n") == 1
    assert filled("checkpoints", "m", "--json").json["checkpoints"] == []


def test_an_erasure_stopped_by_damage_goes_on_when_the_data_is_back(trained: Shell) -> None:
    place = trained("where", "--user", user(3), "--json").json[0]
    folder = trained.store / "storage" / "data" / "people" / f"{place['shard']:04d}" / f"{place['slice']:04d}"
    segment = next(folder.iterdir())
    good = segment.read_bytes()
    damage(segment, "changed")
    said = trained("erase", "--user", user(3), code=1)
    assert segment.name in said.err
    assert said.out == ""
    assert "not carried out" in trained("status").out
    segment.write_bytes(good)
    done = trained("erase", "--user", user(3), "--json").json
    assert [outcome["points"] for outcome in done["outcomes"]] == [6]
    assert trained("status", "--json").json["unfinished"] == 0


def test_an_erasure_whose_rebuild_fails_says_that_it_was_carried_out(trained: Shell) -> None:
    # Somebody in slice 2 or later, so that the rebuild starts from a checkpoint, which is not what it was.
    who, place = next(
        (who, place)
        for who in map(user, range(PEOPLE))
        for place in trained("where", "--user", who, "--json").json
        if place["slice"] > 1
    )
    found = trained("checkpoints", "m", "--json").json["checkpoints"]
    before = next(c for c in found if (c["shard"], c["slice"]) == (place["shard"], place["slice"] - 1))
    damage(trained.store / "storage" / before["path"], "changed")
    said = trained("erase", "--user", who, code=1)
    assert before["path"] in said.err
    assert "erasure is done" in said.err
    assert trained("status", "--json").json["unfinished"] == 0
    assert positions_of(trained, who) == []
    assert "put away and made anew" in trained("build").out
    trained("audit")


def test_storage_that_is_away_is_an_error_and_not_an_empty_storage(trained: Shell) -> None:
    storage = trained.store / "storage"
    storage.rename(trained.store / "elsewhere")
    for arguments in (
        ("predict", "m", "rows.csv"),
        ("ingest", "more", "rows.csv", *INGEST),
        ("erase", "--user", user(1)),
        ("build",),
    ):
        trained.refused(*arguments, says=str(storage))
        assert not storage.exists()
    (trained.store / "elsewhere").rename(storage)
    trained("erase", "--user", user(1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("workers = 1", "wrokers = 1", "wrokers"),
        ("workers = 1", 'workers = "1"', "workers"),
        ("workers = 1", "workers = true", "workers"),
        ("workers = 1", "workers = 0", "worker"),
        ("[build]", "[bulid]", "bulid"),
        ("[build]", "[build", "cannot be read"),
        ("storage = ", "# storage = ", "lacks storage"),
    ],
    ids=lambda value: value,
)
def test_a_wrong_settings_file_is_named_with_what_is_wrong(filled: Shell, old: str, new: str, says: str) -> None:
    path = filled.store / "unlearnd.toml"
    path.write_text(path.read_text().replace(old, new))
    said = filled.refused("build", says=says)
    assert str(path) in said


# Progress, for who looks at it


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "as JSON"])
def test_progress_is_drawn_on_a_terminal_and_never_on_standard_output(filled: Shell, as_json: bool) -> None:
    for arguments, begins in (
        (("ingest", "more", "rows.csv", *INGEST), "Added 120 points"),
        (("train", "m", *TRAIN[:4], "--epochs", 200), "Trained "),
        (("erase", "--user", user(3)), "Erased "),
    ):
        ours, theirs = pty.openpty()
        options = ["--store", str(filled.store), *(["--json"] if as_json else [])]
        child = subprocess.Popen(
            [sys.executable, "-c", "from unlearnd.cli import main; main()", *map(str, arguments), *options],
            cwd=filled.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(theirs)
        drawn = b""
        with suppress(OSError):  # a terminal whose other end is closed
            while chunk := os.read(ours, 65536):
                drawn += chunk
        os.close(ours)
        assert child.stdout is not None
        printed = child.stdout.read()
        child.stdout.close()
        assert child.wait(timeout=60) == 0
        assert b"Traceback" not in drawn
        assert SECRET.encode() not in drawn
        if as_json:
            json.loads(printed)
            assert drawn == b""
        else:
            assert printed.startswith(begins)
            assert "\x1b" not in printed
            assert drawn != b""


# Real processes: disks that fill up, Ctrl-C


def start(folder: Path, *arguments: object, **variables: str) -> "subprocess.Popen[str]":
    """Start the command as a terminal does, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from unlearnd.cli import main; main()", *map(str, arguments)],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        start_new_session=True,
    )


def finish(child: "subprocess.Popen[str]") -> Said:
    out, err = child.communicate(timeout=60)
    assert "Traceback" not in err, err
    assert SECRET not in out + err
    return Said(child.returncode, out, err)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that makes or changes a small disk: `size=2m`, `ro`, `rw`."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = False

    def change(options: str) -> Path:
        nonlocal mounted
        how = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        ended = subprocess.run(["mount", *how, str(where)], capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"this machine lets nobody mount a disk: {ended.stderr.strip()}")
        mounted = True
        return where

    yield change
    if mounted:
        subprocess.run(["umount", str(where)], check=True)


def fill(path: Path) -> None:
    """Write to `path` until its disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def write_wide(path: Path, rows: int, width: int) -> Path:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(rows, width)).astype(np.float32)
    return write_npz(path, x, (x[:, 0] > 0).astype(int), np.array([user(i % 50) for i in range(rows)]))


def test_a_full_disk_stops_ingest_and_train_with_a_sentence_and_both_end_right_when_there_is_space(
    tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    rows = write_wide(tmp_path / "rows.npz", 1000, 1000)
    store = disk("size=2m") / "store"
    assert finish(start(tmp_path, "init", store)).code == 0
    shell = Shell(tmp_path, store)
    before = snapshot(store)
    ingest = ("ingest", "people", rows, *INGEST, "--store", store)
    said = finish(start(tmp_path, *ingest))
    assert said.code == 1
    assert said.err.startswith("unlearnd: ")
    assert "full" in said.err
    assert said.err.count("\n") == 1
    after = snapshot(store)
    assert {name for name in after if name != "ledger"} == {name for name in before if name != "ledger"}
    disk("size=12m")
    assert finish(start(tmp_path, *ingest)).code == 0
    assert live_points(shell) == 1000
    train = ("train", "m", "--dataset", "people", "--backend", "linear", "--epochs", 1, "--store", store)
    filler = disk("size=12m") / "filler"
    fill(filler)
    said = finish(start(tmp_path, *train))
    assert said.code == 1
    assert said.err.startswith("unlearnd: ")
    assert "full" in said.err
    assert said.err.count("\n") == 1
    filler.unlink()
    disk("size=24m")
    assert finish(start(tmp_path, *train)).code == 0
    assert shell("build", "--json").json[0]["samples"] == 0
    assert shell("status", "--json").json["models"][0]["prefixes"] == [SLICES] * SHARDS
    assert shell("evaluate", "m", rows, "--label", "label", "--json").json["points"] == 1000


def test_a_full_folder_for_temporary_files_does_not_matter(
    tmp_path: Path, disk: Callable[[str], Path], shell: Shell
) -> None:
    small = disk("size=64k")
    rows = write_wide(tmp_path / "rows.npz", 20_000, 2)
    child = start(tmp_path, "ingest", "people", rows, *INGEST, "--store", shell.store, TMPDIR=str(small))
    assert finish(child).code == 0
    assert shell("status", "--json").json["datasets"][0]["points"] == 20_000


def test_a_disk_that_cannot_be_written_to_is_said(tmp_path: Path, disk: Callable[[str], Path], trained: Shell) -> None:
    store = disk("size=8m") / "store"
    shutil.copytree(trained.store, store)
    shell = Shell(trained.folder, store)
    disk("ro")
    # SQLite needs to write beside a ledger even to read it.
    for arguments in (
        ("status",),
        ("ingest", "people", "rows.csv", *INGEST[:4]),
        ("erase", "--user", user(1)),
        ("train", "n", *TRAIN),
    ):
        shell.refused(*arguments, says=f"{store / 'ledger.sqlite'} or its folder cannot be written to")
    disk("rw")
    shell("erase", "--user", user(1))


def wait_for(there: Callable[[], bool], child: "subprocess.Popen[str]", seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [1, 2])
def test_control_c_stops_training_with_a_sentence_and_it_goes_on_from_there(filled: Shell, workers: int) -> None:
    train = ("train", "m", *TRAIN[:4], "--epochs", 2000, "--seed", 1, "--workers", workers, "--store", filled.store)
    child = start(filled.folder, *train)
    wait_for(lambda: count_of(filled, "checkpoint") > 0, child)
    # A terminal sends it to everybody in the foreground, workers too.
    os.killpg(child.pid, signal.SIGINT)
    said = finish(child)
    assert said.code in (1, 130)
    assert said.out == ""
    assert said.err == "unlearnd: stopped; nothing is lost, run the command again to go on\n"
    missing = filled("status", "--json").json["models"][0]
    again = finish(start(filled.folder, *train, "--json"))
    assert again.code == 0
    assert 0 < again.json["samples"] <= missing["samples_missing"] < again.json["from_scratch"]
    assert filled("build", "--json").json[0]["samples"] == 0


def test_control_c_stops_an_ingest_and_leaves_nothing_of_it(tmp_path: Path, shell: Shell) -> None:
    rows = write_wide(tmp_path / "wide.npz", 4000, 2000)
    before = snapshot(shell.store)
    child = start(
        tmp_path, "ingest", "people", rows, "--user", "who", "--label", "label", "--shards", 20, "--slices", 20,
        "--store", shell.store,
    )  # fmt: skip
    wait_for(lambda: any((shell.store / "storage").rglob("*.safetensors")), child)
    child.send_signal(signal.SIGINT)
    said = finish(child)
    assert said.code in (1, 130)
    assert said.err.startswith("unlearnd: stopped")
    assert said.err.count("\n") == 1
    assert snapshot(shell.store) == before


def test_output_into_a_closed_pipe_is_no_traceback(trained: Shell) -> None:
    write(trained, "many.csv", "a,b,c\n" + "1,2,3\n" * 20_000)
    child = start(trained.folder, "predict", "m", "many.csv", "--store", trained.store)
    assert child.stdout is not None
    assert child.stdout.readline() == "row,label,score\n"
    child.stdout.close()
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.wait(timeout=60)
    child.stderr.close()
