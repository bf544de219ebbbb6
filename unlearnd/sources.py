"""Read arrays, npz, CSV and Parquet as checked batches.

Whatever the data comes in, the same batches come out: finite features as float32 or uint8, users and groups
as text, class labels as integers or text. Reading streams, so memory does not grow with the file. Whoever
reads on may rely on what is checked here and need not look again.

Messages name the file, the row and the column and never hold a value, as they end up in logs. Foreign
exceptions quote the line they choked on, so none of them is kept as a cause. Rows count from 1 in each file,
without the header. A fault in row one million is found after the batches before it were handed out, so
whoever stores batches must store all of a source or nothing.
"""

from __future__ import annotations

import csv
import io
import lzma
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlearnd.columns import (
    Column,
    arrow_of,
    as_labels,
    bytes_of_row,
    check_feature_type,
    decide_labels,
    encode,
    from_lists,
    from_scalars,
    is_nested,
    looks_like_number,
)
from unlearnd.errors import InputError, NotFoundError, behind_absence

__all__ = ["Batch", "Column", "Data", "as_labels", "decide_labels", "read_batches"]

Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | NDArray[Any]
"""One path or URL, several of them, or an array of features."""

_CSV_CELL = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)")
_CSV_CELLS = re.compile(r"CSV parse error: Row #(\d+): Expected \d+ columns, got (\d+)")
_DAMAGED_ZIP = (zipfile.BadZipFile, NotImplementedError, zlib.error, lzma.LZMAError)
_DAMAGED = "cannot be read; the file is cut short, damaged or of another format"


@dataclass(frozen=True)
class Batch:
    """Some rows of one source, checked.

    `x` is C-contiguous float32 or uint8 with one point per row, and may be a view of the array given.
    `columns` names the features when each is a column of its own; None when they came as one array or list.
    `user` and `group` hold text, `label` integers or text; each is None when it was not asked for.
    """

    source: str
    first_row: int
    x: NDArray[Any]
    user: Column | None
    label: Column | None
    group: Column | None
    columns: tuple[str, ...] | None


def read_batches(
    data: Data,
    *,
    user: str | ArrayLike | None,
    label: str | ArrayLike | None,
    group: str | ArrayLike | None = None,
    features: str | Sequence[str] | None = None,
    batch_bytes: int = 64 << 20,
) -> Iterator[Batch]:
    """Yield the rows of `data` in order, each batch with at most `batch_bytes` of features or a single row.

    For files `user`, `label` and `group` are names of columns, or of arrays in an npz; for an array they are
    one value per row. `features` are the feature columns in the order wanted, or the one that holds lists;
    None takes every other column of CSV and Parquet, and `x` of an npz. Nothing is read before the first
    batch is asked for. Raise `InputError` or `NotFoundError`; every file must be shaped like the first.
    """
    given = {"user": user, "label": label, "group": group}
    given = {role: value for role, value in given.items() if value is not None}
    if not isinstance(data, str | os.PathLike | Sequence):
        if features is not None:
            raise InputError("features names columns of a file, and an array has none")
        yield from _read_array(data, given, batch_bytes)
        return
    files = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not files or not all(isinstance(file, str | os.PathLike) for file in files):
        raise InputError("the data is neither a file, nor several, nor a numpy array")
    roles = {role: name for role, name in given.items() if isinstance(name, str)}
    for role in given.keys() - roles.keys():
        raise InputError(f"{role} must be the name of a column when the data is in files")
    names = (features,) if isinstance(features, str) else None if features is None else tuple(features)
    if names == ():
        raise InputError("features names no column, and at least one is needed")
    ask, like = _Ask(roles, names, batch_bytes), None
    for file in files:
        source = os.fspath(file)
        for batch in _reader_of(source)(source, ask):
            like = like or _Like.of(batch)
            like.check(batch)
            yield batch


@dataclass(frozen=True)
class _Ask:
    """What all readers are asked: which column is what, and how much at a time."""

    roles: dict[str, str]
    features: tuple[str, ...] | None
    batch_bytes: int


@dataclass(frozen=True)
class _Like:
    """What every batch must be like: the first one, without holding on to its rows."""

    source: str
    columns: tuple[str, ...] | None
    x: str

    @classmethod
    def of(cls, batch: Batch) -> _Like:
        return cls(batch.source, batch.columns, f"{batch.x.dtype} of shape {batch.x.shape[1:]}")

    def check(self, batch: Batch) -> None:
        here, where = _Like.of(batch), f"{batch.source}, row {batch.first_row}"
        if here.columns != self.columns:
            raise InputError(f"{batch.source}: its feature columns are not those of {self.source}, in order")
        if here.x != self.x:
            raise InputError(f"{where}: features are {here.x}, but {self.x} in {self.source}, row 1")


def _reader_of(source: str) -> Callable[[str, _Ask], Iterator[Batch]]:
    name = _file_name(source)
    for endings, reader in (
        ((".csv", ".csv.gz", ".tsv", ".tsv.gz"), _read_csv),
        ((".parquet", ".pq"), _read_parquet),
        ((".npz",), _read_npz),
    ):
        if name.endswith(endings):
            return reader
    if os.path.isdir(source):
        raise InputError(f"{source}: is a directory, not a file")
    raise InputError(f"{source}: unknown format; known are .csv, .csv.gz, .tsv, .npz, .parquet and .pq")


def _file_name(source: str) -> str:
    # Only URLs have a query; a local file may well be called "why?.csv".
    return (re.split(r"[?#]|::", source)[0] if "://" in source else source).lower()


def _rows(batch_bytes: int, row_bytes: float) -> int:
    return max(1, int(batch_bytes // max(row_bytes, 1)))


def _read_array(data: ArrayLike, given: dict[str, Any], batch_bytes: int) -> Iterator[Batch]:
    x = np.asarray(data)
    row_bytes = _check_features("array", x.dtype, x.shape)
    columns = {role: arrow_of("array", role, values) for role, values in given.items()}
    for role, column in columns.items():
        if len(column) != len(x):
            raise InputError(f"array: {len(x)} rows of features, but {len(column)} values for {role}")
    step = _rows(batch_bytes, row_bytes)
    for start in range(0, len(x), step):
        parts = {role: column.slice(start, step) for role, column in columns.items()}
        yield _batch("array", start + 1, x[start : start + step], parts, {})


def _read_npz(source: str, ask: _Ask) -> Iterator[Batch]:
    if ask.features and len(ask.features) > 1:
        raise InputError(f"{source}: features names {len(ask.features)} arrays, but an npz holds all in one")
    name = ask.features[0] if ask.features else "x"
    if name in ask.roles.values():
        raise InputError(f"{source}: array {name!r} cannot hold the features and something else as well")
    with _opened(source) as file, zipfile.ZipFile(file) as archive:
        x = _Member(source, name, archive)
        row_bytes = _check_features(f"{source}, array {name!r}", x.dtype, x.shape)
        members = {role: _Member(source, column, archive) for role, column in ask.roles.items()}
        for member in members.values():
            if member.shape != x.shape[:1]:
                found = f"array {member.name!r} has shape {member.shape}"
                raise InputError(f"{source}: {found}, but there are {x.shape[0]} rows of features")
        step = _rows(ask.batch_bytes, row_bytes)
        for start in range(0, x.shape[0], step):
            rows = min(step, x.shape[0] - start)
            parts = {role: arrow_of(source, m.name, m.read(rows)) for role, m in members.items()}
            yield _batch(source, start + 1, x.read(rows), parts, ask.roles)


class _Member:
    """An array inside an npz, open for reading a few rows at a time. Nothing in it is ever unpickled."""

    def __init__(self, source: str, name: str, archive: zipfile.ZipFile) -> None:
        there = [entry.removesuffix(".npy") for entry in archive.namelist()]
        if name not in there:
            raise InputError(f"{source}: no array {name!r}; there are: {', '.join(there)}")
        where = f"{source}, array {name!r}"
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        try:
            self._stream: Any = archive.open(f"{name}.npy")
            self.shape, fortran, self.dtype = headers[np.lib.format.read_magic(self._stream)](self._stream)
        except (KeyError, ValueError, RuntimeError):
            raise InputError(f"{where}: cannot be read; it is encrypted, or its header damaged") from None
        if self.dtype.hasobject:
            raise InputError(f"{where}: holds pickled Python objects, which are never loaded")
        size = archive.getinfo(f"{name}.npy").file_size - self._stream.tell()
        expected = math.prod(self.shape) * self.dtype.itemsize
        if size != expected or not self.dtype.itemsize or min(self.shape, default=0) < 0:
            raise InputError(f"{where}: cannot be read; its size is not what its header says")
        self.name = name
        self._rest: NDArray[Any] | None = None
        if fortran and len(self.shape) > 1:
            # Its rows lie scattered over the whole member, so this one has to be in memory.
            self._rest = self._take((math.prod(self.shape),)).reshape(self.shape, order="F")

    def read(self, rows: int) -> NDArray[Any]:
        """Return the next `rows` rows."""
        if self._rest is None:
            return self._take((rows, *self.shape[1:]))
        taken, self._rest = self._rest[:rows], self._rest[rows:]
        return taken

    def _take(self, shape: tuple[int, ...]) -> NDArray[Any]:
        raw = bytearray(math.prod(shape) * self.dtype.itemsize)
        view, position = memoryview(raw), 0
        while position < len(raw):
            count = self._stream.readinto(view[position : position + (1 << 20)])
            if not count:
                raise EOFError
            position += count
        return np.frombuffer(raw, self.dtype).reshape(shape)


def _read_csv(source: str, ask: _Ask) -> Iterator[Batch]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    delimiter = "\t" if _file_name(source).removesuffix(".gz").endswith(".tsv") else ","
    with _opened(source) as file:
        names = _header(source, file, delimiter)
    features = _choose_features(source, names, ask)
    types = dict.fromkeys(features, pa.float32()) | dict.fromkeys(ask.roles.values(), pa.string())
    # No row may be longer than a block, and Arrow reads 32 of them ahead. Small ones are also quicker, as they
    # stay in the processor's cache; `_gather` makes batches of them.
    block = max(1 << 20, 64 * len(names))
    read = arrow_csv.ReadOptions(use_threads=False, block_size=block)  # with threads no error has a row
    # Not `invalid_row_handler`: it loses a row that is not UTF-8 without a word, instead of handing it over.
    parse = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = arrow_csv.ConvertOptions(
        column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=False
    )
    with _opened(source) as file:
        try:
            records = arrow_csv.open_csv(file, read, parse, convert)
            yield from _table_batches(source, records, features, ask, 4 * len(features))
        except pa.ArrowException as error:
            raise InputError(_say_csv_fault(source, str(error), names, block)) from None


def _header(source: str, file: IO[bytes], delimiter: str) -> list[str]:
    # What is not UTF-8 becomes lone surrogates: the rows behind the header have a message of their own.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    try:
        names = next((row for row in csv.reader(text, delimiter=delimiter) if row), None)
        "".join(names or ()).encode()
    except (csv.Error, UnicodeEncodeError):
        raise InputError(f"{source}: the first line is not a header in UTF-8") from None
    finally:
        text.detach()  # or it would close the file that somebody else closes
    if names is None:
        raise InputError(f"{source}: is empty")
    return names


def _say_csv_fault(source: str, said: str, names: list[str], block: int) -> str:
    """Return our sentence for Arrow's, which quotes the row. Arrow counts the header as row 1."""
    if found := _CSV_CELLS.match(said):
        return f"{source}, row {int(found[1]) - 1}: {found[2]} cells, but there are {len(names)} columns"
    if found := _CSV_CELL.match(said):
        fault = "not UTF-8 text" if found[3] == "string" else "not a number"
        return f"{source}, row {int(found[2]) - 1}, column {names[int(found[1])]!r}: {fault}"
    if said.startswith("straddling object"):
        return f"{source}: a row is longer than {block} bytes; perhaps a quote is not closed"
    if said.startswith(("Empty CSV file", "CSV parse error: Empty CSV file")):
        return f"{source}: has a header but no rows"
    return f"{source}: {_DAMAGED}"


def _read_parquet(source: str, ask: _Ask) -> Iterator[Batch]:
    from pyarrow import parquet

    with _opened(source) as file:
        about = parquet.read_metadata(file)
        schema = about.schema.to_arrow_schema()
        features = _choose_features(source, schema.names, ask)
        for name in features:
            check_feature_type(source, name, schema.field(name).type)
            if is_nested(schema.field(name).type) and len(features) > 1:
                raise InputError(f"{source}: column {name!r} holds lists, so it must be the only feature")
        columns = [*dict.fromkeys((*features, *ask.roles.values()))]

        def records(rows: int, buffer: int, names: Sequence[str]) -> Iterator[Any]:
            # Never `pre_buffer`: what Arrow reads ahead, it keeps until the file is closed.
            opened = parquet.ParquetFile(file, metadata=about, buffer_size=buffer, pre_buffer=False)
            yield from opened.iter_batches(rows, columns=names)

        # One row tells the length of lists. So would the metadata, but where that is damaged, asking it about
        # a column takes the whole process down.
        row_bytes = next(map(bytes_of_row, records(1, 1 << 14, features)), 0)
        # Without a buffer Arrow reads a row group's columns whole, and a group may be the whole file.
        largest = max((about.row_group(n).total_byte_size for n in range(about.num_row_groups)), default=0)
        buffer = min(1 << 20, max(1 << 14, ask.batch_bytes // about.num_columns))
        buffer = buffer if largest > ask.batch_bytes else 0
        rows = _rows(ask.batch_bytes, row_bytes)
        yield from _table_batches(source, records(rows, buffer, columns), features, ask, row_bytes)


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, and say in our words what goes wrong while it is open."""
    import fsspec
    import pyarrow as pa

    compression = "gzip" if _file_name(source).endswith(".gz") else None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(fsspec.open(source, "rb", compression=compression))
        except FileNotFoundError as error:
            if (cause := behind_absence(error)) is not None:
                raise InputError(f"{source}: cannot be opened: {cause}") from None
            raise NotFoundError(f"{source}: no such file") from None
        except IsADirectoryError:
            raise InputError(f"{source}: is a directory, not a file") from None
        except Exception as error:  # file systems are plugins of fsspec, and raise what they like
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(f"{source}: cannot be opened: {reason}") from None
        try:
            yield file
        except (pa.ArrowException, UnicodeDecodeError, OSError, EOFError, *_DAMAGED_ZIP):
            raise InputError(f"{source}: {_DAMAGED}") from None


def _choose_features(source: str, names: Sequence[str], ask: _Ask) -> tuple[str, ...]:
    """Return the feature columns among the columns there are, having checked all names."""
    positions: dict[str, int] = {}
    for position, name in enumerate(names, 1):
        if positions.setdefault(name, position) != position:
            raise InputError(f"{source}: columns {positions[name]} and {position} have the same name")
    for name in (*ask.roles.values(), *(ask.features or ())):
        if name not in positions:
            raise InputError(f"{source}: no column {name!r}; {_there_are(names)}")
    for role, name in ask.roles.items():
        if name in (ask.features or ()):
            raise InputError(f"{source}: column {name!r} is the {role} and cannot be a feature as well")
    chosen = ask.features or tuple(name for name in names if name not in ask.roles.values())
    if not chosen:
        raise InputError(f"{source}: no feature columns are left; {_there_are(names)}")
    if len(set(chosen)) < len(chosen):
        raise InputError(f"{source}: features names a column twice")
    for name in () if ask.features else chosen:
        # What pandas calls its row numbers, in CSV and in Parquet. They would train without a word.
        if not name or name.startswith("__index_level_"):
            found = f"column {positions[name]} looks like row numbers"
            raise InputError(f"{source}: {found}; leave it out of the file, or name the features")
    return chosen


def _there_are(names: Sequence[str]) -> str:
    if any(map(looks_like_number, names)):  # then these are somebody's data, and not to be repeated
        return f"there are {len(names)}, and the first line seems to hold numbers instead of names"
    return f"there are: {', '.join(names[:20])}{' and more' * (len(names) > 20)}"


def _table_batches(
    source: str, records: Iterable[Any], features: tuple[str, ...], ask: _Ask, row_bytes: float
) -> Iterator[Batch]:
    first_row = 1
    for table in _gather(records, _rows(ask.batch_bytes, row_bytes)):
        columns = {
            name: chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
            for name, chunks in zip(table.column_names, table.columns, strict=True)
        }
        parts = {role: columns[name] for role, name in ask.roles.items()}
        if is_nested(columns[features[0]].type):
            x, names = from_lists(source, first_row, features[0], columns[features[0]]), None
        else:
            x, names = from_scalars(source, first_row, {name: columns[name] for name in features}), features
        yield _batch(source, first_row, x, parts, ask.roles, names)
        first_row += len(x)
    if first_row == 1:
        raise InputError(f"{source}: has a header but no rows")


def _gather(records: Iterable[Any], rows: int) -> Iterator[Any]:
    """Yield Arrow's record batches put together or cut to tables of `rows` rows, the last one shorter."""
    import pyarrow as pa

    held: list[Any] = []
    count = 0
    for record in records:
        while count + record.num_rows >= rows:
            held.append(record.slice(0, rows - count))
            yield pa.Table.from_batches(held)
            record, held, count = record.slice(rows - count), [], 0
        if record.num_rows:
            held.append(record)
            count += record.num_rows
    if held:
        yield pa.Table.from_batches(held)


def _check_features(where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Check that an array may hold features, and return the bytes of a row before or after conversion."""
    if dtype.kind not in "buif":
        raise InputError(f"{where}: holds {dtype}, and a feature is a number")
    if len(shape) < 2:
        raise InputError(f"{where}: has shape {shape}, but needs a row per point and a column per feature")
    if not math.prod(shape):
        raise InputError(f"{where}: has shape {shape}, so no {'features' if shape[0] else 'rows'}")
    return math.prod(shape[1:]) * (1 if dtype == np.uint8 else max(4, dtype.itemsize))


def _batch(
    source: str,
    first_row: int,
    x: NDArray[Any],
    parts: dict[str, Any],
    names: dict[str, str],
    columns: tuple[str, ...] | None = None,
) -> Batch:
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found below, as an infinite feature
        x = np.ascontiguousarray(x, np.uint8 if x.dtype == np.uint8 else np.float32)
    if x.dtype != np.uint8 and not (finite := np.isfinite(x)).all():
        at = tuple(map(int, np.unravel_index(int(np.argmin(finite)), x.shape)))
        feature = f"column {columns[at[1]]!r}" if columns else f"feature {list(at[1:])}"
        fault = "not a number (NaN)" if np.isnan(x[at]) else "infinite, or too large for float32"
        raise InputError(f"{source}, row {first_row + at[0]}, {feature}: {fault}")
    user, label, group = (
        encode(source, first_row, role, names.get(role, role), parts[role]) if role in parts else None
        for role in ("user", "label", "group")
    )
    return Batch(source, first_row, x, user, label, group, columns)
