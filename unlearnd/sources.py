"""Read arrays, npz, CSV and Parquet as checked batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Column:
    """A column of repeated values: the distinct ones, and which of them each row has."""

    values: tuple[str | int, ...]
    codes: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Some rows of one source, checked."""

    source: str
    first_row: int
    x: NDArray[Any]
    user: Column | None
    label: Column | None
    group: Column | None
    columns: tuple[str, ...] | None
