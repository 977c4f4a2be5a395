"""GPTQ's layout: qweight int32 [in / per_word, out], qzeros int32 [groups, out / per_word], scales
[groups, out], g_idx [in]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.layouts.parts import (
    FLOATS,
    Parts,
    input_order,
    integer_weight,
    unpack_words,
)
from edgespec.checkpoint.quantization import SchemeRule
from edgespec.errors import UnsupportedModel
from edgespec.quantization.quantized_weight import QuantizedWeight


def weight_shape(parts: Parts, rule: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers. Raises CheckpointError."""
    words, out_features = parts.matrix("qweight", ("int32",))
    return out_features, words * (32 // rule.scheme.bits)


def read_weight(parts: Parts, rule: SchemeRule) -> QuantizedWeight:
    """The weight. Raises CheckpointError for tensors that are missing or invalid."""
    bits = rule.scheme.bits
    per_word = 32 // bits
    out_features, in_features = weight_shape(parts, rule)
    count = parts.matrix("scales", FLOATS)[0]
    width = parts.width("scales", rule, in_features, count)
    scales = parts.scales("scales", FLOATS, (count, out_features))
    words = parts.read("qweight", ("int32",), (in_features // per_word, out_features))
    zero_words = parts.read("qzeros", ("int32",), (count, -(-out_features // per_word)))
    zeros = zero_points(parts, unpack_words(zero_words, bits)[:, :out_features], bits)
    order = input_order(parts, "g_idx", in_features, width)
    return integer_weight(parts, rule, unpack_words(words.T, bits), scales.T, zeros.T, width, order)


def zero_points(parts: Parts, zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Returns the zero points. The first format stores them minus one; 0 wraps around and is
    ambiguous there. Raises UnsupportedModel for it."""
    offset, top = parts.quantization.zero_offset, 2**bits - 1
    if offset and (zeros == top).any():
        raise UnsupportedModel(
            f"{parts.module}.qzeros stores the zero point {top} in GPTQ's first format, where it"
            f" means 0 to some readers and {top + 1} to others.",
            "Give a checkpoint in the format gptq_v2, or a symmetric one.",
        )
    return zeros + np.uint8(offset)
