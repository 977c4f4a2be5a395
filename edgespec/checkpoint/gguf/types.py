"""ggml's types of weights: a row of the table says how large a block is, and how raw blocks become
the fields of a quantized weight, or numbers.

Knows bytes. Where a type is held exactly, what `dequantize` makes of the fields is ggml's number to
the bit; types of fewer bits are rounded again, to int8 in blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.gguf import lattices
from edgespec.checkpoint.gguf.lattices import bits_of
from edgespec.quantization.quantized_weight import QuantizedWeight, quantize_rtn
from edgespec.quantization.schemes import SCHEMES, Scheme

Raw = NDArray[np.uint8]  # [rows, blocks, bytes of a block]
Array = NDArray[Any]
REROUNDED = 32  # the block of what is rounded again

# What 16 codes of IQ4 stand for
CODES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True, slots=True)
class BlockFields:
    """The fields of a QuantizedWeight, by its names; the values [rows, blocks, block]."""

    values: Array
    scales: Array  # [rows, blocks of scales]
    minimums: Array | None = None
    super_scales: Array | None = None
    super_minimums: Array | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type: `block` weights along a row are stored in `size_bytes`."""

    name: str
    block: int
    size_bytes: int
    dtype: str = ""  # of one that is not quantized, by numpy's name
    fields: Callable[[Raw], BlockFields] | None = None
    scale_block: int = 0  # weights that share a scale
    numbers: Callable[[Raw], Array] | None = None  # of one that is rounded again
    scheme_name: str = field(default="", kw_only=True)
    scaled: bool = field(default=False, kw_only=True)  # by a tensor of one number beside it

    @property
    def scheme(self) -> Scheme:
        """The scheme of a quantized one, as it is held here."""
        return SCHEMES[self.scheme_name or (self.name if self.fields else "int8_wo")]


def weight_of(name: str, kind: BlockType, raw: NDArray[np.uint8]) -> QuantizedWeight:
    """The weight [rows, in] of raw rows [rows, bytes] of a quantized type."""
    blocks = raw.reshape(len(raw), -1, kind.size_bytes)
    if kind.fields is None:
        return quantize_rtn(numbers_of(kind, raw), 8, REROUNDED, name)
    made = kind.fields(blocks)
    return QuantizedWeight(
        name,
        kind.scheme,
        made.values.reshape(len(raw), -1),
        made.scales,
        (1, kind.scale_block),
        minimums=made.minimums,
        super_block=1 if made.super_scales is None else kind.block // kind.scale_block,
        super_scales=made.super_scales,
        super_minimums=made.super_minimums,
    )


def numbers_of(kind: BlockType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers [rows, in] of raw rows [rows, bytes] of a type that is rounded again."""
    assert kind.numbers is not None
    with np.errstate(all="ignore"):  # what is not finite is refused where it is rounded
        numbers = kind.numbers(raw.reshape(len(raw), -1, kind.size_bytes))
    return np.asarray(numbers, np.float32).reshape(len(raw), -1)


def half(raw: Raw, at: int) -> Array:
    """The float16 at a byte of each block: [rows, blocks]."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0]


def nibbles(packed: Array, width: int) -> Array:
    """Values of bytes whose low halves are `width` values and whose high halves the next ones."""
    parts = packed.reshape(*packed.shape[:2], -1, 1, width)
    return np.concatenate([parts & 15, parts >> 4], -2).reshape(*packed.shape[:2], -1)


def _signed(values: Array, middle: int, dtype: Any = np.int8) -> Array:
    return (values - np.uint8(middle)).view(np.int8).astype(dtype, copy=False)


def _q4_0(raw: Raw) -> BlockFields:
    return BlockFields(_signed(nibbles(raw[..., 2:], 16), 8, ml_dtypes.int4), half(raw, 0))


def _q4_1(raw: Raw) -> BlockFields:
    values = nibbles(raw[..., 4:], 16).view(ml_dtypes.uint4)
    return BlockFields(values, half(raw, 0), np.negative(half(raw, 2)))  # ggml adds it


def _five(raw: Raw, at: int) -> Array:
    """Five bits a value: 32 high bits, then nibbles."""
    values: Array = nibbles(raw[..., at + 4 :], 16) | bits_of(raw[..., at : at + 4]) << 4
    return values


def _q5_0(raw: Raw) -> BlockFields:
    return BlockFields(_signed(_five(raw, 2), 16), half(raw, 0))


def _q5_1(raw: Raw) -> BlockFields:
    return BlockFields(_five(raw, 4), half(raw, 0), np.negative(half(raw, 2)))  # ggml adds it


def _q8_0(raw: Raw) -> BlockFields:
    return BlockFields(np.ascontiguousarray(raw[..., 2:]).view(np.int8), half(raw, 0))


def _scales_of_k(raw: Raw) -> tuple[Array, Array]:
    """The 8 scales and 8 minimums of 6 bits in the 12 bytes at 4: [rows, 8 * blocks] each."""
    first, second, high = (raw[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([first & 63, high & 15 | first >> 2 & 48], -1)
    minimums = np.concatenate([second & 63, high >> 4 | second >> 2 & 48], -1)
    return scales.reshape(len(raw), -1), minimums.reshape(len(raw), -1)


def _k(raw: Raw, values: Array) -> BlockFields:
    scales, minimums = _scales_of_k(raw)
    return BlockFields(values, scales, minimums, half(raw, 0), half(raw, 2))


def _q4_k(raw: Raw) -> BlockFields:
    return _k(raw, nibbles(raw[..., 16:], 32).view(ml_dtypes.uint4))


def _q5_k(raw: Raw) -> BlockFields:
    high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k(raw, nibbles(raw[..., 48:], 32) | high.reshape(*raw.shape[:2], -1) << 4)


def _q6_k(raw: Raw) -> BlockFields:
    low = nibbles(raw[..., :128], 64)
    high = lattices.crumbs(raw[..., 128:192], 32)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).reshape(len(raw), -1)
    return BlockFields(_signed(low | high << 4, 32), scales, super_scales=half(raw, 208))


def _iq4_nl(raw: Raw) -> BlockFields:
    return BlockFields(CODES[nibbles(raw[..., 2:], 16)], half(raw, 0))


def _iq4_xs(raw: Raw) -> BlockFields:
    high = raw[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], -1)
    scales = low.reshape(*raw.shape[:2], 8) | high.reshape(*raw.shape[:2], 8) << 4
    values = CODES[nibbles(raw[..., 8:], 16)]
    return BlockFields(values, _signed(scales, 32).reshape(len(raw), -1), super_scales=half(raw, 0))


def _mxfp4(raw: Raw) -> BlockFields:
    codes = nibbles(raw[..., 1:], 16)
    codes[codes == 8] = 0  # of its two zeros, ggml has the positive one
    scales = np.ascontiguousarray(raw[..., 0]).view(ml_dtypes.float8_e8m0fnu)
    return BlockFields(codes.view(ml_dtypes.float4_e2m1fn), scales)


def _nvfp4(raw: Raw) -> BlockFields:
    stored = raw[..., :4].reshape(len(raw), -1)
    # ggml reads no sign, the NaN as 0, and a negative one as a number that no float8 is: refused
    scales = np.where(stored == 255, stored, np.where(stored == 127, 0, stored & 127))
    codes = nibbles(raw[..., 4:], 8)
    codes[codes == 8] = 0
    return BlockFields(codes.view(ml_dtypes.float4_e2m1fn), scales.view(ml_dtypes.float8_e4m3fn))


_ROWS = {
    0: BlockType("f32", 1, 4, "float32"),
    1: BlockType("f16", 1, 2, "float16"),
    30: BlockType("bf16", 1, 2, "bfloat16"),
    24: BlockType("i8", 1, 1, "int8"),
    25: BlockType("i16", 1, 2, "int16"),
    26: BlockType("i32", 1, 4, "int32"),
    27: BlockType("i64", 1, 8, "int64"),
    28: BlockType("f64", 1, 8, "float64"),
    2: BlockType("q4_0", 32, 18, "", _q4_0, 32),
    3: BlockType("q4_1", 32, 20, "", _q4_1, 32),
    6: BlockType("q5_0", 32, 22, "", _q5_0, 32),
    7: BlockType("q5_1", 32, 24, "", _q5_1, 32),
    8: BlockType("q8_0", 32, 34, "", _q8_0, 32),
    12: BlockType("q4_k", 256, 144, "", _q4_k, 32),
    13: BlockType("q5_k", 256, 176, "", _q5_k, 32),
    14: BlockType("q6_k", 256, 210, "", _q6_k, 16),
    20: BlockType("iq4_nl", 32, 18, "", _iq4_nl, 32),
    23: BlockType("iq4_xs", 256, 136, "", _iq4_xs, 32),
    39: BlockType("mxfp4", 32, 17, "", _mxfp4, 32),
    40: BlockType("nvfp4", 64, 36, "", _nvfp4, 16, scheme_name="w4a16_nvfp4", scaled=True),
    10: BlockType("q2_k", 256, 84, numbers=lattices.q2_k),
    11: BlockType("q3_k", 256, 110, numbers=lattices.q3_k),
    16: BlockType("iq2_xxs", 256, 66, numbers=lattices.iq2_xxs),
    17: BlockType("iq2_xs", 256, 74, numbers=lattices.iq2_xs),
    22: BlockType("iq2_s", 256, 82, numbers=lattices.iq2_s),
    18: BlockType("iq3_xxs", 256, 98, numbers=lattices.iq3_xxs),
    21: BlockType("iq3_s", 256, 110, numbers=lattices.iq3_s),
    19: BlockType("iq1_s", 256, 50, numbers=lattices.iq1_s),
    29: BlockType("iq1_m", 256, 56, numbers=lattices.iq1_m),
    34: BlockType("tq1_0", 256, 54, numbers=lattices.tq1_0),
    35: BlockType("tq2_0", 256, 66, numbers=lattices.tq2_0),
}
TYPES: Mapping[int, BlockType] = _ROWS  # by ggml's number
BY_NAME: Mapping[str, BlockType] = {row.name: row for row in _ROWS.values()}
QUANTIZED = tuple(row.name for row in _ROWS.values() if not row.dtype)
