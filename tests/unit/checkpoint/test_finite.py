"""NaN and Inf are found in every format, whatever the pieces in which the bytes come."""

from __future__ import annotations

import io
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgespec.checkpoint.finite import FORMATS, PIECE_BYTES, FiniteSink, is_finite
from edgespec.checkpoint.source import TensorInfo
from edgespec.errors import CheckpointError


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", [name for name in FORMATS if dtype_of(name).itemsize <= 2])
def test_every_bit_pattern_is_judged_as_numpy_judges_it(name: str) -> None:
    integer = FORMATS[name][0]
    patterns = np.arange(2 ** (8 * np.dtype(integer).itemsize), dtype=np.uint32).astype(integer)
    with np.errstate(invalid="ignore"):
        values = patterns.view(dtype_of(name)).astype(np.float64)
    found = [is_finite(pattern.tobytes(), name) for pattern in patterns]
    np.testing.assert_array_equal(found, np.isfinite(values))


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_wide_formats_are_judged_at_their_limits(name: str) -> None:
    info, dtype = np.finfo(name), dtype_of(name)
    for value in (info.max, info.min, info.tiny, info.smallest_subnormal, -0.0):
        assert is_finite(np.array([value], dtype).tobytes(), name)
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        assert not is_finite(np.array([value], dtype).tobytes(), name)


@pytest.mark.parametrize("at", [0, 1, PIECE_BYTES // 2 - 1, PIECE_BYTES // 2, -1])
def test_one_value_is_found_anywhere(at: int) -> None:
    values = np.ones(PIECE_BYTES + 5, np.float16)
    assert is_finite(values.tobytes(), "float16")
    values[at] = np.nan
    assert not is_finite(values.tobytes(), "float16")


def test_integers_have_no_such_value() -> None:
    assert is_finite(b"\xff" * 64, "int8")
    assert is_finite(b"\xff" * 3, "int4")


def sink(name: str) -> tuple[io.BytesIO, FiniteSink]:
    out = io.BytesIO()
    return out, FiniteSink(out, TensorInfo("a.weight", name, (4,), None, 0, 16))


def write_in_pieces(checked: FiniteSink, data: bytes, step: int) -> None:
    for start in range(0, len(data), step):
        checked.write(data[start : start + step])


@pytest.mark.parametrize("step", [1, 3, 4, 5, 16])
def test_pieces_may_end_in_the_middle_of_a_number(step: int) -> None:
    fine = np.array([1, 2, 3, 4], np.float32).tobytes()
    out, checked = sink("float32")
    write_in_pieces(checked, fine, step)
    assert checked.write(b"") == 0
    assert out.getvalue() == fine
    bad = np.array([1, 2, np.inf, 4], np.float32).tobytes()
    _, checked = sink("float32")
    with pytest.raises(CheckpointError, match=r"the tensor a\.weight has NaN or Inf"):
        write_in_pieces(checked, bad, step)


def test_reused_buffer_is_looked_at_before_it_changes() -> None:
    out, checked = sink("float32")
    buffer = bytearray(np.array([1, 2], np.float32).tobytes())
    checked.write(memoryview(buffer)[:6])
    held = memoryview(buffer)
    held[4:8] = b"\xff" * 4
    checked.write(np.array([2], np.float32).tobytes()[2:])
    assert out.getvalue() == np.array([1, 2], np.float32).tobytes()
