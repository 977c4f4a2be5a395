"""DeepSeek's fp8: weight float8 [out, in], one weight_scale_inv per 128 by 128 weights.

It is a factor, despite its name.
"""

from __future__ import annotations

from edgespec.checkpoint.layouts.parts import FLOATS, Parts
from edgespec.checkpoint.quantization import SchemeRule
from edgespec.quantization.quantized_weight import QuantizedWeight


def weight_shape(parts: Parts, _: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers. Raises CheckpointError."""
    return parts.matrix("weight", ("float8_e4m3fn",))


def read_weight(parts: Parts, rule: SchemeRule) -> QuantizedWeight:
    """The weight. Raises CheckpointError for tensors that are missing or invalid."""
    shape, side = weight_shape(parts, rule), rule.scheme.block
    scales = parts.scales("weight_scale_inv", FLOATS, (-(-shape[0] // side), -(-shape[1] // side)))
    return QuantizedWeight(
        parts.module, rule.scheme, parts.float8("weight", shape), scales, (side, side)
    )
