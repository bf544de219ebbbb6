"""States as safetensors: what is written piece by piece is what the library would have written."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save

from unlearnd.checkpoints import encode_state
from unlearnd.digests import digest_of_tensors

_DTYPES = ("?", "i1", "u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8")

_STATES = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=8),
    st.sampled_from(_DTYPES).flatmap(lambda d: arrays.arrays(np.dtype(d), arrays.array_shapes(min_dims=0, min_side=0))),
    max_size=6,
)


@given(state=_STATES)
def test_the_pieces_of_a_state_are_the_file_that_safetensors_writes(state: Mapping[str, Any]) -> None:
    saved = encode_state(state)
    whole = b"".join(saved.pieces)
    assert whole == save(dict(state))
    assert saved.size == len(whole)
    assert saved.file == hashlib.sha256(whole).hexdigest()
    parts = [(name, value.dtype.str, value.shape, value.tobytes()) for name, value in state.items()]
    assert saved.tensors == digest_of_tensors(parts)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12, dtype="<f4").reshape(3, 4).T,
        np.arange(12, dtype="<f8")[::3],
        np.broadcast_to(np.float32(3), (2, 2)),
    ],
    ids=["big-endian", "transposed", "strided", "broadcast"],
)
def test_how_an_array_lies_in_memory_changes_no_byte_of_its_file(value: Any) -> None:
    laid_out = np.array(value, dtype=value.dtype.newbyteorder("<"), order="C")
    assert encode_state({"w": value}) == encode_state({"w": laid_out})
    assert (load(b"".join(encode_state({"w": value}).pieces))["w"] == value).all()


def test_order_of_names_changes_no_byte_of_a_file() -> None:
    state = {"b": np.ones(3, np.float32), "a": np.zeros((2, 2), np.int64)}
    turned = dict(reversed(state.items()))
    assert b"".join(encode_state(state).pieces) == b"".join(encode_state(turned).pieces)
    assert encode_state(state).tensors == encode_state(turned).tensors
