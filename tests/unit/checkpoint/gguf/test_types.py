"""Every type of ggml, held against gguf-py's dequantization to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as theirs
from numpy.typing import NDArray

from edgespec.checkpoint.gguf.types import TYPES, BlockType, numbers_of, weight_of
from edgespec.quantization.quantized_weight import dequantize

QUANTIZED = {row.name: (code, row) for code, row in TYPES.items() if not row.dtype}


def raw_rows(kind: BlockType, code: int) -> NDArray[np.uint8]:
    """Random blocks, without the few whose scales are NaN or Inf."""
    raw = np.random.default_rng(code).integers(0, 256, (64, kind.size_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(theirs(raw, GGMLQuantizationType(code))).all(1)
    assert finite.sum() >= 30
    return np.asarray(raw[finite][:30].reshape(10, -1))


@pytest.mark.parametrize("name", QUANTIZED)
def test_numbers_are_those_of_gguf_py_to_the_bit(name: str) -> None:
    code, kind = QUANTIZED[name]
    raw = raw_rows(kind, code)
    wanted = theirs(raw, GGMLQuantizationType(code))
    weight = weight_of("layer", kind, raw)
    if kind.fields is None:
        np.testing.assert_array_equal(numbers_of(kind, raw).view(np.uint32), wanted.view(np.uint32))
        assert weight.scheme.name == "int8_wo"
        assert weight.block == (1, 32)
        # int8 in blocks of 32 adds half a step at most
        steps = np.repeat(weight.scales.astype(np.float32), 32, 1)
        assert (np.abs(dequantize(weight) - wanted) <= steps * 0.5001).all()
    else:
        np.testing.assert_array_equal(dequantize(weight).view(np.uint32), wanted.view(np.uint32))
        assert weight.scheme.name == {"nvfp4": "w4a16_nvfp4"}.get(name, name)


def test_sizes_are_those_of_gguf_py() -> None:
    for code, kind in TYPES.items():
        theirs = GGMLQuantizationType(code)
        assert (theirs.name.lower(), GGML_QUANT_SIZES[theirs]) == (
            kind.name,
            (kind.block, kind.size_bytes),
        )
