"""AutoAWQ's GEMM layout: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales
[groups, out]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.layouts.parts import FLOATS, Parts, integer_weight, unpack_nibbles
from edgespec.checkpoint.quantization import SchemeRule
from edgespec.quantization.quantized_weight import QuantizedWeight

# The column in each nibble of a word, lowest nibble first
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def weight_shape(parts: Parts, _: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers. Raises CheckpointError."""
    in_features, words = parts.matrix("qweight", ("int32",))
    return words * 8, in_features


def read_weight(parts: Parts, rule: SchemeRule) -> QuantizedWeight:
    """The weight. Raises CheckpointError for tensors that are missing or invalid."""
    out_features, in_features = weight_shape(parts, rule)
    count = parts.matrix("scales", FLOATS)[0]
    width = parts.width("scales", rule, in_features, count)
    scales = parts.scales("scales", FLOATS, (count, out_features))
    values = unpack_columns(parts.read("qweight", ("int32",), (in_features, out_features // 8)))
    zeros = unpack_columns(parts.read("qzeros", ("int32",), (count, out_features // 8)))
    return integer_weight(parts, rule, values.T, scales.T, zeros.T, width)


def unpack_columns(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Values [rows, n * 8] of words [rows, n], in AutoAWQ's order."""
    rows, words = packed.shape
    nibbles = unpack_nibbles(packed.view(np.uint8)).reshape(rows, words, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, NIBBLE_ORDER] = nibbles
    return columns.reshape(rows, words * 8)
