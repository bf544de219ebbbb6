"""Turn Arrow's columns into features and into distinct values, checked.

CSV, Parquet and arrays all pass through here, so that what counts as a feature, a user id or a class label is
decided once. Work is per column and per distinct value, never per row. `sources` opens the files and knows
which column is what; it tells the file's name and the number of the first row at hand, for the messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unlearnd.errors import InputError

_RULES = {
    "user": "a user id is a string or an integer",
    "label": "a class label is an integer or a string",
    "group": "a group is a string or an integer",
}
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
# At most 18 digits always fit 64 bits. No "-0", so that text and integer stand for each other one to one.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FRACTION = re.compile(r"\s*[+-]?(([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=e))(e[+-]?[0-9]+)?|nan|inf|infinity)\s*", re.I)


@dataclass(frozen=True)
class Column:
    """A column of repeated values: the distinct ones, and which of them each row has."""

    values: tuple[str | int, ...]
    codes: NDArray[np.int64]


def decide_labels(values: Iterable[str | int]) -> Literal["int", "str"]:
    """Return what the labels of a whole ingest are: "int" if every one is or reads as an integer, else "str".

    Text reads as an integer when it is written the one way `str` writes it, in up to 18 digits: "007" and
    "+7" are text. A CSV cannot know this before its last row, so ask once all distinct labels are in.
    """
    return "int" if all(isinstance(value, int) or _INTEGER.fullmatch(value) for value in values) else "str"


def as_labels(values: Iterable[str | int], kind: Literal["int", "str"]) -> tuple[int, ...] | tuple[str, ...]:
    """Return labels as what `decide_labels` decided."""
    return tuple(map(int, values)) if kind == "int" else tuple(map(str, values))


def looks_like_number(text: str) -> bool:
    """Return whether `text` is how a number is written, with a fraction or without."""
    return bool(_INTEGER.fullmatch(text) or _FRACTION.fullmatch(text))


def arrow_of(source: str, name: str, values: Any) -> Any:
    """Return an array or sequence of one value per row as an Arrow array."""
    import pyarrow as pa

    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise InputError(f"{source}: {name} must hold one value per row")
    if not isinstance(values, list | tuple):
        values = np.asarray(values)
        if values.ndim != 1:
            raise InputError(f"{source}: {name} has shape {values.shape} instead of one value per row")
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise InputError(f"{source}: {name} is neither all strings nor all integers of 64 bits") from None


def encode(source: str, first_row: int, role: str, name: str, column: Any) -> Column:
    """Return the distinct values of a user, label or group column, checked, and which each row has."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type) and role == "label":
        column = column.cast(pa.int8())
    text = str(column.type) in _TEXT_TYPES
    if not (text or pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise InputError(f"{source}, column {name!r}: {_RULES[role]}, not {column.type}")
    _check_no_null(source, first_row, name, column)
    if str(column.type).endswith("_view"):  # Arrow has no dictionaries of views
        column = column.cast(pa.large_binary())
    encoded = column.dictionary_encode()
    codes: NDArray[np.int64] = encoded.indices.to_numpy().astype(np.int64)
    if not text:
        numbers = encoded.dictionary.to_numpy().tolist()
        return Column(tuple(numbers if role == "label" else map(str, numbers)), codes)

    def refuse(number: int, fault: str) -> InputError:
        row = first_row + int(np.argmax(codes == number))
        return InputError(f"{source}, row {row}, column {name!r}: {fault}")

    values: list[str] = []
    for number, raw in enumerate(encoded.dictionary.cast(pa.large_binary()).to_numpy(zero_copy_only=False)):
        try:
            values.append(raw.decode())
        except UnicodeDecodeError:
            raise refuse(number, "not UTF-8 text") from None
        if not raw:
            raise refuse(number, f"empty; {_RULES[role]}")
        if role == "label" and _FRACTION.fullmatch(values[-1]):
            raise refuse(number, f"{_RULES[role]}, not a number with a fraction")
    return Column(tuple(values), codes)


def is_nested(kind: Any) -> bool:
    """Return whether a column of this Arrow type holds an array per row."""
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list or isinstance(kind, pa.FixedShapeTensorType))


def check_feature_type(source: str, name: str, kind: Any) -> None:
    """Check that a column of this Arrow type can be a feature, or hold all of them."""
    import pyarrow as pa

    leaf = kind.storage_type if isinstance(kind, pa.FixedShapeTensorType) else kind
    while is_nested(leaf):
        leaf = leaf.value_type
    if not (pa.types.is_boolean(leaf) or pa.types.is_integer(leaf) or pa.types.is_floating(leaf)):
        raise InputError(f"{source}: column {name!r} holds {leaf}, and a feature is a number")


def bytes_of_row(record: Any) -> int:
    """Return the bytes that one row of features takes before or after conversion, whichever is more."""
    import pyarrow as pa

    leaves = []
    for column in record.columns:
        inner = column.storage if isinstance(column.type, pa.FixedShapeTensorType) else column
        while is_nested(inner.type):
            inner = inner.flatten()
        leaves.append((len(inner), inner.type))
    least = 1 if all(kind == pa.uint8() for _, kind in leaves) else 4
    return sum(count * max(least, kind.bit_width // 8) for count, kind in leaves)


def from_scalars(source: str, first_row: int, columns: dict[str, Any]) -> NDArray[Any]:
    """Return columns of numbers side by side: uint8 if all of them are, else float32."""
    for name, column in columns.items():
        _check_no_null(source, first_row, name, column)
    arrays = [column.to_numpy(zero_copy_only=False) for column in columns.values()]
    dtype = np.uint8 if all(array.dtype == np.uint8 for array in arrays) else np.float32
    x = np.empty((len(arrays[0]), len(arrays)), dtype)
    # Turned over a few rows at a time: done in one go, each column would visit every cache line of `x`.
    step = max(64, (1 << 19) // x[:1].nbytes)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(x), step):
            for number, array in enumerate(arrays):
                x[start : start + step, number] = array[start : start + step]
    return x


def from_lists(source: str, first_row: int, name: str, column: Any) -> NDArray[Any]:
    """Return a column of lists, lists of lists or tensors as one array, if all rows have the same shape."""
    import pyarrow as pa

    tensors = column if isinstance(column.type, pa.FixedShapeTensorType) else None
    inner = column if tensors is None else column.storage
    shape: tuple[int, ...] = ()
    while is_nested(inner.type):
        each = math.prod(shape)
        _check_no_null(source, first_row, name, inner, each)
        if pa.types.is_fixed_size_list(inner.type):
            length = inner.type.list_size
        else:
            lengths = np.diff(inner.offsets.to_numpy())
            length = int(lengths[0])
            if len(others := np.flatnonzero(lengths != length)):
                row = first_row + int(others[0]) // each
                raise InputError(f"{source}, row {row}, column {name!r}: a list unlike the first in length")
        if not length:
            raise InputError(f"{source}, row {first_row}, column {name!r}: an empty list, so no features")
        inner, shape = inner.flatten(), (*shape, length)
    _check_no_null(source, first_row, name, inner, math.prod(shape))
    array: NDArray[Any] = tensors.to_numpy_ndarray() if tensors else inner.to_numpy(zero_copy_only=False)
    return array if tensors else array.reshape(len(column), *shape)


def _check_no_null(source: str, first_row: int, name: str, column: Any, each: int = 1) -> None:
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) // each
        raise InputError(f"{source}, row {row}, column {name!r}: empty")
