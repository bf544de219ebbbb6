import gzip
import io
import os
import subprocess
import sys
import tracemalloc
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from unlearnd.errors import InputError, NotFoundError, UnlearndError
from unlearnd.sources import Batch, Column, as_labels, decide_labels, read_batches

SECRET = "SECRET"
NOBODY: dict[str, Any] = {"user": None, "label": None}
PEOPLE: dict[str, Any] = {"user": "user", "label": "label"}
NAN, INFINITE = "not a number (NaN)", "infinite, or too large for float32"


def unfold(column: Column | None) -> list[str | int]:
    assert column is not None
    assert len(set(column.values)) == len(column.values)
    assert column.codes.dtype == np.int64
    return [column.values[code] for code in column.codes]


def joined(batches: Iterator[Batch], part: str) -> list[str | int]:
    return [value for batch in batches for value in unfold(getattr(batch, part))]


def features(batches: Iterator[Batch]) -> np.ndarray[Any, Any]:
    xs = [batch.x for batch in batches]
    assert all(x.flags.c_contiguous for x in xs)
    return np.concatenate(xs)


def refusal(data: Any, kind: Any = InputError, **asked: Any) -> str:
    """Return the message, having checked that neither it nor a cause can carry a value into a log."""
    with pytest.raises(kind) as caught:
        list(read_batches(data, **NOBODY | asked))
    error, message = caught.value, str(caught.value)
    assert type(error) is kind
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    assert SECRET not in message
    assert "\n" not in message
    if isinstance(data, Path | str):
        assert message.startswith(str(data))
    return message.removeprefix(str(data))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_long_csv(path: Path, changed: dict[int, str]) -> Path:
    """Write 40,000 rows of some 60 bytes, which are more than two blocks; `changed` counts from 1."""
    lines = [f"user-{number},{'pad' * 12},1,{number}.25" for number in range(1, 40_001)]
    for row, line in changed.items():
        lines[row - 1] = line
    return write(path, "\n".join(["user,note,label,age", *lines, ""]))


# Batches


def test_a_csv_an_npz_a_parquet_file_and_arrays_give_the_same_batch(tmp_path: Path) -> None:
    x = np.array([[0.5, 1], [2, 3], [4, 5]], np.float32)
    users, labels, groups = np.array([7, 8, 7]), np.array([1, 0, 1]), np.array([3, 3, 4])
    files = [tmp_path / f"a.{ending}" for ending in ("npz", "parquet", "csv")]
    write_npz(files[0], x=x, user=users, label=labels, group=groups)
    write_parquet(files[1], user=users, a=x[:, 0], label=labels, b=x[:, 1], group=groups)
    write(files[2], "user,label,group,a,b\n7,1,3,0.5,1\n8,0,3,2,3\n7,1,4,4,5\n")
    batches = [next(read_batches(x, user=users, label=labels, group=groups))]
    batches += [next(read_batches(file, **PEOPLE, group="group")) for file in files]
    for batch in batches:
        np.testing.assert_array_equal(batch.x, x)
        assert batch.x.dtype == np.float32
        assert unfold(batch.user) == ["7", "8", "7"]
        assert as_labels(unfold(batch.label), "int") == (1, 0, 1)
        assert unfold(batch.group) == ["3", "3", "4"]
        assert batch.first_row == 1
    assert [batch.columns for batch in batches] == [None, None, ("a", "b"), ("a", "b")]
    assert [batch.source for batch in batches] == ["array", *map(str, files)]


@pytest.mark.parametrize("ending", ["csv", "npz", "parquet", "array"])
def test_no_batch_holds_more_features_than_asked_and_rows_go_on_counting(tmp_path: Path, ending: str) -> None:
    x, users, path = np.arange(4000.0).reshape(1000, 4), np.arange(1000), tmp_path / f"a.{ending}"
    table = pa.table({"user": users, **{name: x[:, i] for i, name in enumerate("abcd")}})
    if ending == "csv":
        arrow_csv.write_csv(table, path)
    elif ending == "parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif ending == "npz":
        write_npz(path, x=x, user=users)
    data, user = (x, users) if ending == "array" else (path, "user")
    batches = list(read_batches(data, user=user, label=None, batch_bytes=1000))
    assert max(batch.x.nbytes for batch in batches) <= 1000
    starts = np.cumsum([1, *(len(batch.x) for batch in batches)])
    assert [batch.first_row for batch in batches] == starts[:-1].tolist()
    np.testing.assert_array_equal(features(iter(batches)), x)
    assert joined(iter(batches), "user") == [str(number) for number in range(1000)]


def test_a_row_larger_than_a_batch_is_a_batch_of_its_own() -> None:
    assert [len(batch.x) for batch in read_batches(np.ones((3, 9)), **NOBODY, batch_bytes=1)] == [1, 1, 1]


def test_several_files_are_read_one_after_the_other_and_rows_count_from_1_in_each(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.csv", f"a\n{name}\n5\n") for name in "12"]
    batches = list(read_batches(files, **NOBODY))
    assert [(batch.source, batch.first_row) for batch in batches] == [(str(file), 1) for file in files]
    assert features(iter(batches)).tolist() == [[1], [5], [2], [5]]


def test_features_come_in_the_order_asked_for_and_in_file_order_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "c,user,a,b\n1,u,2,3\n")
    for file in (path, write_parquet(tmp_path / "a.pq", c=[1], user=["u"], a=[2], b=[3])):
        some = next(read_batches(file, user="user", label=None, features=["b", "c"]))
        assert (some.x.tolist(), some.columns) == ([[3, 1]], ("b", "c"))
        every = next(read_batches(file, user="user", label=None))
        assert (every.x.tolist(), every.columns) == ([[1, 2, 3]], ("c", "a", "b"))
        one = next(read_batches(file, **NOBODY, features="a"))
        assert (one.x.tolist(), one.columns) == ([[2]], ("a",))


def test_what_was_not_asked_for_is_none(tmp_path: Path) -> None:
    batch = next(read_batches(write(tmp_path / "a.csv", "a\n1\n"), **NOBODY))
    assert (batch.user, batch.label, batch.group) == (None, None, None)


def test_one_column_may_be_both_user_and_group(tmp_path: Path) -> None:
    for file in (write(tmp_path / "a.csv", "u,a\n7,1\n"), write_parquet(tmp_path / "a.pq", u=[7], a=[1.0])):
        batch = next(read_batches(file, user="u", label=None, group="u"))
        assert (unfold(batch.user), unfold(batch.group)) == (["7"], ["7"])


# Where files are and what they are called


def test_urls_that_fsspec_knows_are_read(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4()}/a.csv"
    with fsspec.open(url, "wb") as file:
        file.write(b"a\n1\n")
    npz, pq = write_npz(tmp_path / "a.npz", x=np.ones((1, 1))), write_parquet(tmp_path / "a.pq", a=[1.0])
    for source in (url, f"file://{npz}", f"file://{pq}"):
        assert features(read_batches(source, **NOBODY)).tolist() == [[1]]


def test_the_query_of_a_url_does_not_hide_its_format() -> None:
    for url in ("nosuch://bucket/a.csv?signature=b.bin", "nosuch://bucket/a.npz#b.bin"):
        assert refusal(url) == ": cannot be opened: Protocol not known: nosuch"


def test_gzipped_csv_and_tab_separated_files_are_read(tmp_path: Path) -> None:
    for name, content in (
        ("a.CSV.gz", gzip.compress(b"a,b\n1,2\n")),
        ("a.tsv", b"a\tb\n1\t2\n"),
        ("a.tsv.gz", gzip.compress(b"a\tb\n1\t2\n")),
    ):
        assert features(read_batches(write(tmp_path / name, content), **NOBODY)).tolist() == [[1, 2]]


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.xlsx", "a"))
    assert message == ": unknown format; known are .csv, .csv.gz, .tsv, .npz, .parquet and .pq"


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "npz", "parquet"])
def test_a_missing_file_is_not_found(tmp_path: Path, ending: str) -> None:
    assert refusal(tmp_path / f"a.{ending}", NotFoundError) == ": no such file"
    assert refusal(f"memory://{uuid.uuid4()}/a.{ending}", NotFoundError) == ": no such file"


@pytest.mark.parametrize("name", ["people", "a.csv", "a.npz", "a.parquet"])
def test_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert refusal(tmp_path / name) == ": is a directory, not a file"


@pytest.mark.parametrize("data", [[], [1.0, 2.0], [[1.0], [2.0]], b"a.csv", range(3)])
def test_data_that_is_neither_files_nor_an_array_is_refused(data: Any) -> None:
    assert refusal(data) == "the data is neither a file, nor several, nor a numpy array"


# Features


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i8"])
def test_numbers_of_any_kind_become_float32(tmp_path: Path, dtype: str) -> None:
    x = np.array([[0, 1], [1, 0]]).astype(dtype)
    sources: list[Any] = [x, write_npz(tmp_path / "a.npz", x=x)]
    if not dtype.startswith(">"):  # Arrow has none of these
        sources.append(write_parquet(tmp_path / "a.parquet", a=x[:, 0], b=x[:, 1]))
    for data in sources:
        batch = next(read_batches(data, **NOBODY))
        assert (batch.x.dtype.str, batch.x.tolist()) == ("<f4", [[0, 1], [1, 0]])


def test_uint8_stays_uint8_unless_another_column_is_wider(tmp_path: Path) -> None:
    a, b = np.array([1, 255], np.uint8), np.array([2, 3], np.uint8)
    x = np.stack([a, b], axis=1)
    same = write_parquet(tmp_path / "a.parquet", a=a, b=b)
    for data in (x, write_npz(tmp_path / "a.npz", x=x), same):
        batch = next(read_batches(data, **NOBODY))
        assert (batch.x.dtype.str, batch.x.tolist()) == ("|u1", [[1, 2], [255, 3]])
    mixed = write_parquet(tmp_path / "b.parquet", a=a, b=b.astype(np.int16))
    assert next(read_batches(mixed, **NOBODY)).x.dtype == np.float32


def test_float32_and_uint8_arrays_are_not_copied() -> None:
    for x in (np.ones((4, 2), np.float32), np.ones((4, 2, 2), np.uint8)):
        assert all(np.shares_memory(batch.x, x) for batch in read_batches(x, **NOBODY, batch_bytes=16))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 3)])
def test_features_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).random((100, *shape), np.float32)
    fixed = pa.array(x.ravel())
    for length in reversed(shape):
        fixed = pa.FixedSizeListArray.from_arrays(fixed, length)
    write_parquet(tmp_path / "fixed.parquet", user=range(100), x=fixed)
    write_parquet(tmp_path / "loose.parquet", user=range(100), x=x.tolist())
    tensors = pa.table({"user": range(100), "x": pa.FixedShapeTensorArray.from_numpy_ndarray(x)})
    parquet.write_table(tensors, tmp_path / "tensor.parquet", row_group_size=7)
    write_npz(tmp_path / "c.npz", user=range(100), x=x)
    write_npz(tmp_path / "f.npz", user=range(100), x=np.asfortranarray(x))
    np.savez_compressed(tmp_path / "z.npz", user=range(100), x=x)
    for name in ("fixed.parquet", "loose.parquet", "tensor.parquet", "c.npz", "f.npz", "z.npz"):
        small = list(read_batches(tmp_path / name, user="user", label=None, features="x", batch_bytes=240))
        np.testing.assert_array_equal(features(iter(small)), x, err_msg=name)
        assert {batch.columns for batch in small} == {None}
        assert max(batch.x.nbytes for batch in small) <= 240
        np.testing.assert_array_equal(features(read_batches(tmp_path / name, user="user", label=None)), x)


def test_the_feature_array_of_an_npz_may_have_another_name(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", pixels=np.ones((1, 2)), x=np.zeros((1, 2)))
    assert features(read_batches(path, **NOBODY, features=["pixels"])).tolist() == [[1, 1]]


@pytest.mark.parametrize(("value", "fault"), [(np.nan, NAN), (-np.inf, INFINITE), (1e300, INFINITE)])
def test_a_feature_that_is_not_finite_is_refused_by_place(tmp_path: Path, value: float, fault: str) -> None:
    x = np.zeros((9, 2, 3))
    x[6, 1, 2] = value
    for data in (x, write_npz(tmp_path / "a.npz", x=x), write_parquet(tmp_path / "a.pq", x=x.tolist())):
        assert refusal(data, batch_bytes=120).endswith(f", row 7, feature [1, 2]: {fault}")
    path = write_parquet(tmp_path / "a.parquet", a=x[:, 0, 0], b=x[:, 1, 2])
    assert refusal(path, batch_bytes=64) == f", row 7, column 'b': {fault}"
    path = write(tmp_path / "a.csv", f"a,b\n1,2\n3,{value}\n")
    assert refusal(path) == f", row 2, column 'b': {fault}"


@pytest.mark.parametrize("cell", [SECRET, "NA", "0x10", "true", "1;5", f"Row #3: {SECRET}"])
def test_a_cell_that_is_no_number_is_refused_by_row_and_column(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path / "a.csv", f"user,a,b\nu,1,2\nu,2,{cell}\n")
    assert refusal(path, user="user") == ", row 2, column 'b': not a number"


@pytest.mark.parametrize("cell", ["", '""'])
def test_an_empty_feature_is_refused_by_row_and_column(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path / "a.csv", f"user,a,b\nu,1,2\nu,{cell},3\n")
    assert refusal(path, user="user") == ", row 2, column 'a': empty"
    path = write_parquet(tmp_path / "a.parquet", user=["u", "u"], a=[1.0, None], b=[1, 2])
    assert refusal(path, user="user") == ", row 2, column 'a': empty"


def test_lists_of_another_length_missing_lists_and_holes_in_lists_are_refused(tmp_path: Path) -> None:
    def of(*rows: Any) -> str:
        return refusal(write_parquet(tmp_path / "a.parquet", x=[*rows]))

    assert of([1, 2], [1, 2], [1]) == ", row 3, column 'x': a list unlike the first in length"
    assert of([[1, 2]], [[1, 2]], [[1]]) == ", row 3, column 'x': a list unlike the first in length"
    assert of([1, 2], None) == ", row 2, column 'x': empty"
    assert of([1, 2], [1, None]) == ", row 2, column 'x': empty"
    assert of([[1], [2]], [[1], None]) == ", row 2, column 'x': empty"
    assert of([1.5], [float("nan")]) == f", row 2, feature [0]: {NAN}"
    nothing = write_parquet(tmp_path / "b.parquet", x=pa.array([[], []], pa.list_(pa.int8())))
    assert refusal(nothing) == ", row 1, column 'x': an empty list, so no features"


def test_lists_that_change_length_between_batches_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", x=[[1, 2]] * 64 + [[1, 2, 3]] * 64)
    assert refusal(path, batch_bytes=8 * 20).startswith(", row 65")


def test_a_column_of_lists_must_be_the_only_feature(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", x=[[1, 2]], a=[1])
    assert refusal(path) == ": column 'x' holds lists, so it must be the only feature"


@pytest.mark.parametrize("value", [SECRET, date(2020, 1, 1), Decimal("1.5"), {"a": 1}, [SECRET], b"a"])
def test_a_parquet_feature_that_is_no_number_is_refused_by_its_type(tmp_path: Path, value: Any) -> None:
    message = refusal(write_parquet(tmp_path / "a.parquet", a=[1], city=[value]), features="city")
    assert message.startswith(": column 'city' holds ")
    assert message.endswith(", and a feature is a number")


@pytest.mark.parametrize("dtype", ["U", "c16", "O", "M8[D]"])
def test_an_array_of_no_numbers_is_refused_by_its_type(dtype: str) -> None:
    x = np.array([["2020"]]).astype(dtype)
    assert refusal(x) == f"array: holds {x.dtype}, and a feature is a number"


@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_array_without_columns_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for data in (np.ones(shape), write_npz(tmp_path / "a.npz", x=np.ones(shape))):
        assert refusal(data).endswith("needs a row per point and a column per feature")


@pytest.mark.parametrize(("shape", "lacking"), [((3, 0), "features"), ((0, 3), "rows")])
def test_an_array_without_features_or_rows_is_refused(tmp_path: Path, shape: Any, lacking: str) -> None:
    for data in (np.ones(shape), write_npz(tmp_path / "a.npz", x=np.ones(shape))):
        assert refusal(data).endswith(f"so no {lacking}")


# Users and groups


def test_a_user_is_the_same_text_wherever_the_number_comes_from(tmp_path: Path) -> None:
    x = np.ones((1, 1))
    given: list[Any] = [np.array([7]).astype(kind) for kind in ("i1", "u8", "i8", ">i4", "U", "S", "O")]
    given += [[7], ["7"], (np.int16(7),), [b"7"]]
    for user in given:
        assert joined(read_batches(x, user=user, label=None), "user") == ["7"]
    files = [write(tmp_path / "a.csv", "u,a\n7,1\n"), write_parquet(tmp_path / "a.pq", u=[7], a=[1])]
    for number, kind in enumerate(("u1", "U4", "S4", ">U4", ">i8")):
        files.append(write_npz(tmp_path / f"{number}.npz", x=x, u=np.array([7]).astype(kind)))
    for file in files:
        assert joined(read_batches(file, user="u", label=None), "user") == ["7"]


def test_a_csv_keeps_users_as_they_are_written(tmp_path: Path) -> None:
    users = ["007", "NA", "null", "nan", "1.0", " x ", "7", 'say "hi"', "Zoë", "a,b", "two\nlines", "None"]
    cells = ['1,"{}"\n'.format(user.replace('"', '""')) for user in users]
    path = write(tmp_path / "a.csv", "a,user\n" + "".join(cells))
    assert joined(read_batches(path, user="user", label=None), "user") == users


def test_a_csv_may_have_a_byte_order_mark_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    raw = b'\xef\xbb\xbfuser,"a"\r\n\r\nann,1\r\n\r\n"bob"," 2 "\r\ncy,-5e-1'
    batch = next(read_batches(write(tmp_path / "a.csv", raw), user="user", label=None))
    assert (unfold(batch.user), batch.x.tolist()) == (["ann", "bob", "cy"], [[1], [2], [-0.5]])


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"])
def test_parquet_users_may_be_text_of_any_kind(tmp_path: Path, kind: str) -> None:
    dictionary = pa.dictionary(pa.int8(), pa.string())
    users = pa.array(["Zoë", "bob", "Zoë"]).cast(dictionary if kind == "dictionary" else getattr(pa, kind)())
    path = write_parquet(tmp_path / "a.parquet", user=users, a=[1, 2, 3])
    assert joined(read_batches(path, user="user", label=None), "user") == ["Zoë", "bob", "Zoë"]


@pytest.mark.parametrize("role", ["user", "group", "label"])
def test_an_empty_or_missing_user_group_or_label_is_refused_by_row(tmp_path: Path, role: str) -> None:
    fault, x = ", row 2, column 'who': empty", np.ones((2, 1))
    path = write(tmp_path / "a.csv", f"who,a\n{SECRET},1\n,2\n")
    assert refusal(path, **{role: "who"}).startswith(fault)
    for missing in (None, ""):
        path = write_parquet(tmp_path / "a.parquet", who=[SECRET, missing], a=[1, 2])
        assert refusal(path, **{role: "who"}).startswith(fault)
        assert refusal(x, **{role: [SECRET, missing]}).startswith(f"array, row 2, column '{role}': empty")
    assert refusal(x, **{role: [None, None]}).startswith(f"array, row 1, column '{role}': empty")
    path = write_npz(tmp_path / "a.npz", x=x, who=np.array([SECRET, ""]))
    assert refusal(path, **{role: "who"}).startswith(fault)


@pytest.mark.parametrize("values", [[1.0], [1.5], [True], np.array(["2020-01-01"], "M8[D]")])
def test_a_user_or_group_that_is_neither_string_nor_integer_is_refused(tmp_path: Path, values: Any) -> None:
    x, rule = np.ones((1, 1)), ", column 'who': a user id is a string or an integer, not"
    assert "a user id is a string or an integer, not" in refusal(x, user=values)
    assert "a group is a string or an integer, not" in refusal(x, group=values)
    assert refusal(write_parquet(tmp_path / "a.pq", who=values, a=[1]), user="who").startswith(rule)
    assert refusal(write_npz(tmp_path / "a.npz", x=x, who=values), user="who").startswith(rule)


@pytest.mark.parametrize(
    "values",
    [[1, SECRET], [SECRET, 1], [2**70], ["\ud800"], np.array(["\ud800"]), [object()], np.array([SECRET, 3], "O")],
)
def test_users_of_mixed_or_unknown_kinds_are_refused(values: Any) -> None:
    message = refusal(np.ones((len(values), 1)), user=values)
    assert message == "array: user is neither all strings nor all integers of 64 bits"


def test_users_that_are_not_utf8_are_refused_by_row(tmp_path: Path) -> None:
    fault = ", row 2, column 'user': not UTF-8 text"
    assert refusal(np.ones((2, 1)), user=np.array([b"a", b"SECRET\xff"])) == f"array{fault}"
    path = write_parquet(tmp_path / "a.parquet", user=[b"a", b"SECRET\xff"], a=[1, 2])
    assert refusal(path, user="user") == fault
    assert refusal(write(tmp_path / "a.csv", b"user,a\nx,1\nSECRET\xff,2\n"), user="user") == fault


# Labels


@pytest.mark.parametrize(
    ("labels", "expected"), [([3, -1], [3, -1]), (["cat", "007"], ["cat", "007"]), ([True, False], [1, 0])]
)
def test_labels_are_integers_or_text_and_truth_counts_as_integer(
    tmp_path: Path, labels: list[Any], expected: list[Any]
) -> None:
    x = np.ones((2, 1))
    files = [write_parquet(tmp_path / "a.pq", label=labels, a=[1, 2]), write_npz(tmp_path / "a.npz", label=labels, x=x)]
    sources: list[tuple[Any, Any]] = [*((file, "label") for file in files), (x, labels), (x, np.array(labels))]
    for data, label in sources:
        found = joined(read_batches(data, user=None, label=label), "label")
        assert found == expected
        assert [type(value) for value in found] == [type(value) for value in expected]


def test_a_csv_gives_labels_as_text_and_the_whole_ingest_decides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label,a\n1,0\n-2,0\n")
    assert joined(read_batches(path, user=None, label="label"), "label") == ["1", "-2"]
    assert decide_labels(["1", "-2", 3, "0"]) == "int"
    assert as_labels(["1", "-2", 3, "0"], "int") == (1, -2, 3, 0)
    assert decide_labels(["cat", 3]) == "str"
    assert as_labels(["cat", 3], "str") == ("cat", "3")


@pytest.mark.parametrize("text", ["cat", "007", "+1", "-0", " 1", "1\n", "١", "1_0", "", "9" * 19])
def test_text_that_str_would_not_write_for_an_integer_keeps_labels_text(text: str) -> None:
    assert decide_labels(["1", text]) == "str"


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_every_integer_of_18_digits_is_the_same_label_as_its_text(number: int) -> None:
    assert decide_labels([str(number)]) == "int"
    assert as_labels([str(number), number], "int") == (number, number)


FRACTIONS = ["1.5", "1.0", "1.", ".5", "1e3", "-1E-3", "nan", "NaN", "inf", "-Infinity", " 2.5 ", "+1.5"]


@pytest.mark.parametrize("text", FRACTIONS)
def test_a_label_with_a_fraction_is_refused_by_row(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", f"a,label\n1,cat\n2,{text}\n")
    rule = "a class label is an integer or a string, not a number with a fraction"
    assert refusal(path, label="label") == f", row 2, column 'label': {rule}"


@pytest.mark.parametrize("text", ["v1.5", "1.5.2", "e3", "1e", "nano", "info", "-", ".", "1,5", "NA"])
def test_a_label_that_only_resembles_a_number_is_text(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", f'label,a\n"{text}",1\n')
    assert joined(read_batches(path, user=None, label="label"), "label") == [text]


@pytest.mark.parametrize(
    ("value", "kind"), [(1.0, "double"), (date(2020, 1, 1), "date32[day]"), ([1], "list<"), (Decimal("1.5"), "decimal")]
)
def test_a_label_of_another_type_is_refused_by_the_name_of_the_type(tmp_path: Path, value: Any, kind: str) -> None:
    rule = f"column 'label': a class label is an integer or a string, not {kind}"
    path = write_parquet(tmp_path / "a.parquet", label=[value], a=[1])
    assert refusal(path, label="label").startswith(f", {rule}")
    assert refusal(np.ones((1, 1)), label=[value]).startswith(f"array, {rule}")
    if kind == "double":
        path = write_npz(tmp_path / "a.npz", x=np.ones((1, 1)), label=[value])
        assert refusal(path, label="label") == f", {rule}"


# Names


def test_a_missing_column_is_refused_with_the_columns_there_are(tmp_path: Path) -> None:
    csv = write(tmp_path / "a.csv", "user,age\nu,1\n")
    for file in (csv, write_parquet(tmp_path / "a.pq", user=["u"], age=[1])):
        assert refusal(file, user="usr") == ": no column 'usr'; there are: user, age"
        assert refusal(file, features=["age", "size"]) == ": no column 'size'; there are: user, age"
    path = write_npz(tmp_path / "a.npz", x=np.ones((1, 1)), y=[1])
    assert refusal(path, user="user") == ": no array 'user'; there are: x, y"


def test_a_first_line_of_data_is_not_repeated_as_names(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.csv", f"{SECRET},1.5\nu,2\n"), user="user")
    assert message.endswith("there are 2, and the first line seems to hold numbers instead of names")


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.csv", "a,b,a\n1,2,3\n")) == ": columns 1 and 3 have the same name"
    parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == ": columns 1 and 2 have the same name"
    path = write(tmp_path / "b.csv", "a,b\n1,2\n")
    assert refusal(path, features=["a", "a"]) == ": features names a column twice"


@pytest.mark.parametrize("role", ["user", "label", "group"])
def test_a_user_label_or_group_column_is_no_feature(tmp_path: Path, role: str) -> None:
    for file in (write(tmp_path / "a.csv", "a,b\n1,2\n"), write_parquet(tmp_path / "a.pq", a=[1], b=[2])):
        message = refusal(file, **{role: "a"}, features=["a", "b"])
        assert message == f": column 'a' is the {role} and cannot be a feature as well"
    path = write_npz(tmp_path / "a.npz", x=np.ones((1, 1)))
    assert "array 'x' cannot hold the features and something else" in refusal(path, **{role: "x"})


def test_a_file_without_feature_columns_is_refused(tmp_path: Path) -> None:
    for file in (write(tmp_path / "a.csv", "user\nu\n"), write_parquet(tmp_path / "a.pq", user=["u"])):
        assert refusal(file, user="user") == ": no feature columns are left; there are: user"
        assert refusal([file], features=[]) == "features names no column, and at least one is needed"


def test_the_row_numbers_that_pandas_writes_are_refused_unless_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ",a\n0,5\n")
    assert refusal(path).startswith(": column 1 looks like row numbers")
    assert features(read_batches(path, **NOBODY, features="a")).tolist() == [[5]]
    path = write_parquet(tmp_path / "a.pq", a=[5], __index_level_0__=[0])
    assert refusal(path).startswith(": column 2 looks like row numbers")


def test_names_are_for_files_and_values_for_arrays(tmp_path: Path) -> None:
    x = np.ones((2, 1))
    assert refusal(x, user="user") == "array: user must hold one value per row"
    assert refusal(x, user=np.ones((2, 1), int)) == "array: user has shape (2, 1) instead of one value per row"
    assert refusal(x, features="x") == "features names columns of a file, and an array has none"
    path = write(tmp_path / "a.csv", "a\n1\n")
    assert refusal([path], user=[7]) == "user must be the name of a column when the data is in files"
    assert "an npz holds all in one" in refusal(write_npz(tmp_path / "a.npz", x=x), features=["x", "y"])


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    x = np.ones((3, 1))
    assert refusal(x, user=[1, 2]) == "array: 3 rows of features, but 2 values for user"
    assert refusal(x, label=[1, 2, 3, 4]) == "array: 3 rows of features, but 4 values for label"
    path = write_npz(tmp_path / "a.npz", x=x, user=[1, 2])
    assert refusal(path, user="user") == ": array 'user' has shape (2,), but there are 3 rows of features"


# Files that do not hold what they should


def test_a_csv_row_with_more_or_fewer_cells_is_refused_by_row(tmp_path: Path) -> None:
    for line, cells in ((b"SECRET,1", 2), (b"SECRET,1,2,3", 4), (b"SECRET\xff,1", 2)):
        path = write(tmp_path / "a.csv", b"user,a,b\nu,1,2\n\n\n" + line + b"\nu,3,4\n")
        assert refusal(path, user="user") == f", row 2: {cells} cells, but there are 3 columns"


@pytest.mark.parametrize("row", [1, 17_000, 17_600, 35_123, 39_999, 40_000])
def test_rows_are_numbered_right_in_every_block_of_a_csv(tmp_path: Path, row: int) -> None:
    blank_and_quoted = {} if row < 9 else {8: '"a\nb","c\nd",1,9.25\n\n'}
    for line, fault in (
        (f"user,x,1,{SECRET}", f", row {row}, column 'age': not a number"),
        ("user,x,1,nan", f", row {row}, column 'age': {NAN}"),
        ("user,x,1,", f", row {row}, column 'age': empty"),
        (",x,1,1", f", row {row}, column 'user': empty; a user id is a string or an integer"),
        (f"{SECRET},1", f", row {row}: 2 cells, but there are 4 columns"),
    ):
        path = write_long_csv(tmp_path / "a.csv", {**blank_and_quoted, row: line})
        for batch_bytes in (10_000, 64 << 20):
            assert refusal(path, **PEOPLE, features="age", batch_bytes=batch_bytes) == fault


def test_a_csv_of_many_blocks_keeps_every_row_in_order(tmp_path: Path) -> None:
    path = write_long_csv(tmp_path / "a.csv", {})
    batches = list(read_batches(path, **PEOPLE, features="age", batch_bytes=50_001))
    assert [batch.first_row for batch in batches] == list(range(1, 40_001, 12_500))
    assert features(iter(batches))[:, 0].tolist() == [number + 0.25 for number in range(1, 40_001)]
    assert joined(iter(batches), "user") == [f"user-{number}" for number in range(1, 40_001)]


def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path) -> None:
    path = write_long_csv(tmp_path / "a.csv", {5: f'u,"{SECRET},1,2'})
    assert refusal(path, **PEOPLE, features="age").endswith("perhaps a quote is not closed")


def test_a_csv_row_may_have_many_thousand_cells(tmp_path: Path) -> None:
    row = np.random.default_rng(2).random(60_000)
    header, cells = ",".join(f"f{i}" for i in range(60_000)), ",".join(map(repr, row.tolist()))
    path = write(tmp_path / "a.csv", f"{header}\n{cells}\n{cells}\n")
    np.testing.assert_array_equal(features(read_batches(path, **NOBODY)), np.array([row, row], np.float32))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for content in ("", "\n\n"):
        assert refusal(write(tmp_path / "a.csv", content)) == ": is empty"
    for name in ("a.npz", "a.parquet"):
        assert refusal(write(tmp_path / name, "")).startswith(": cannot be read")


def test_a_file_with_a_header_but_no_rows_is_refused(tmp_path: Path) -> None:
    for content in ("user,a", "user,a\n", "user,a\r\n\r\n"):
        assert refusal(write(tmp_path / "a.csv", content), user="user") == ": has a header but no rows"
    path = write_parquet(tmp_path / "a.parquet", user=pa.array([], pa.string()), a=pa.array([], pa.float32()))
    assert refusal(path, user="user") == ": has a header but no rows"


def test_a_header_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for raw in (b"us\xffer,a\nu,1\n", "user,a\nu,1\n".encode("utf-16")):
        assert refusal(write(tmp_path / "a.csv", raw)) == ": the first line is not a header in UTF-8"


@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "a.csv.gz"])
def test_a_file_cut_short_or_of_another_format_is_refused(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(3).random((5000, 4))
    if name == "a.npz":
        write_npz(tmp_path / name, x=x)
    elif name == "a.parquet":
        write_parquet(tmp_path / name, **{column: x[:, i] for i, column in enumerate("abcd")})
    else:
        text = "\n".join(["a,b,c,d", *(",".join(map(repr, row)) for row in x.tolist())])
        write(tmp_path / name, gzip.compress(text.encode()))
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"something else entirely"):
        assert refusal(write(tmp_path / name, damaged)).startswith(": cannot be read")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_an_npz_with_pickled_objects_is_refused_and_never_loaded(tmp_path: Path) -> None:
    trap, fault = Trap(tmp_path / "sprung"), "holds pickled Python objects, which are never loaded"
    path = write_npz(tmp_path / "a.npz", x=np.ones((1, 1)), user=np.array([trap], object))
    assert refusal(path, user="user") == f", array 'user': {fault}"
    path = write_npz(tmp_path / "b.npz", x=np.array([[trap]], object))
    assert refusal(path) == f", array 'x': {fault}"
    assert not trap.path.exists()


@pytest.mark.parametrize("shape", [(10**12, 4), (1, 10**12), (3, 4), (-2, -4)])
def test_an_npz_whose_header_lies_about_its_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member.getvalue() + bytes(64))
    assert refusal(tmp_path / "a.npz").endswith("its size is not what its header says")


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, x = tmp_path_factory.mktemp("small"), np.arange(40.0).reshape(10, 4)
    users, labels = np.array([f"user{i}" for i in range(10)]), np.arange(10) % 3
    table = pa.table({"user": users, "label": labels, **{f"f{i}": x[:, i] for i in range(4)}})
    arrow_csv.write_csv(table, folder / "a.csv")
    write(folder / "a.csv.gz", gzip.compress((folder / "a.csv").read_bytes()))
    parquet.write_table(table, folder / "a.parquet")
    write_npz(folder / "a.npz", x=x, user=users, label=labels)
    np.savez_compressed(folder / "b.npz", x=x, user=users, label=labels)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_give_batches_or_one_of_our_errors(
    tmp_path: Path, small_files: dict[str, bytes], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(small_files)))
    damaged = bytearray(small_files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path / name, bytes(damaged))
    with suppress(UnlearndError):
        for batch in read_batches(path, **PEOPLE):
            assert np.isfinite(batch.x).all()
            assert len(unfold(batch.user)) == len(unfold(batch.label)) == len(batch.x)


# Several files


def test_a_file_unlike_the_first_is_refused_by_name(tmp_path: Path) -> None:
    first, other = write(tmp_path / "1.csv", "a,b\n1,2\n"), write(tmp_path / "2.csv", "b,a\n1,2\n")
    assert refusal([first, other]) == f"{other}: its feature columns are not those of {first}, in order"
    two = write_npz(tmp_path / "2.npz", x=np.ones((9, 2)))
    three = write_npz(tmp_path / "3.npz", x=np.ones((9, 3)))
    fault = f"features are float32 of shape (3,), but float32 of shape (2,) in {two}, row 1"
    assert refusal([two, three]) == f"{three}, row 1: {fault}"
    small = write_npz(tmp_path / "small.npz", x=np.ones((9, 2), np.uint8))
    assert refusal([two, small]).startswith(f"{small}, row 1: features are uint8 of shape (2,)")


# Memory and speed


def peak_of_reading(path: Path) -> int:
    """Return the peak resident memory, in MiB, of a fresh interpreter that reads a file in small batches."""
    program = (
        "import sys; from unlearnd.sources import read_batches\n"
        "for batch in read_batches(sys.argv[1], user='user', label='label', batch_bytes=2 << 20,\n"
        "    features=None if sys.argv[1].endswith('npz') else [f'f{i}' for i in range(48)]): pass\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    # Allocators that give back what is freed, so that the peak is what was in use.
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", program, str(path)]
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout) >> 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux' /proc")
@pytest.mark.parametrize("ending", ["csv", "npz", "parquet", "groups.parquet"])
def test_a_file_ten_times_as_large_needs_no_more_memory(tmp_path: Path, ending: str) -> None:
    peaks, sizes = [], []
    for rows in (50_000, 500_000):
        rng, path = np.random.default_rng(4), tmp_path / f"{rows}.{ending}"
        x, users, labels = rng.random((rows, 48), np.float32), rng.integers(0, 5000, rows), rng.integers(0, 9, rows)
        table = pa.table({"user": users, "label": labels, **{f"f{i}": x[:, i] for i in range(48)}})
        if ending == "csv":
            # The smaller file fills what Arrow reads ahead, 32 MiB; the larger one is ten of it.
            arrow_csv.write_csv(table[:50_000].append_column("pad", pa.array(["p" * 300] * 50_000)), path)
            header, body = path.read_bytes().split(b"\n", 1)
            write(path, header + b"\n" + body * (rows // 50_000))
        elif ending == "npz":
            write_npz(path, x=x, user=users, label=labels)
        else:
            size = 4_000 if ending == "groups.parquet" else rows
            parquet.write_table(table, path, row_group_size=size, use_dictionary=False)
        peaks.append(peak_of_reading(path))
        sizes.append(path.stat().st_size >> 20)
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 3, (peaks, sizes)


def test_converting_an_array_needs_memory_for_a_few_batches_only() -> None:
    x = np.ones((200_000, 32))
    tracemalloc.start()
    try:
        for _ in read_batches(x, **NOBODY, batch_bytes=1 << 20):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_no_python_runs_per_row() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    users = np.arange(100_000) % 10
    sys.setprofile(count)
    try:
        list(read_batches(np.ones((100_000, 2), np.float32), user=users, label=users.astype("U")))
    finally:
        sys.setprofile(None)
    assert calls < 5000
