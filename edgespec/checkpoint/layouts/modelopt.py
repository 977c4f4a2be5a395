"""ModelOpt's layout: `weight` [out, in]; a byte holds two rows of INT4, or two columns of FP4."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.layouts.parts import FLOATS, Parts, checked_scales, refuse, unpack_nibbles
from edgespec.checkpoint.quantization import SchemeRule
from edgespec.errors import UnsupportedModel
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import Scheme


def weight_shape(parts: Parts, rule: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers. Raises CheckpointError."""
    dtype, rows, columns = PACKING[rule.scheme.weight]
    stored = parts.matrix("weight", (dtype,))
    return stored[0] * rows, stored[1] * columns


# Weight type -> stored dtype, rows and columns per byte
PACKING: dict[str, tuple[str, int, int]] = {
    "int8": ("int8", 1, 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1, 1),
    "int4": ("uint8", 2, 1),
    "float4_e2m1fn": ("uint8", 1, 2),
}


def read_weight(parts: Parts, rule: SchemeRule) -> QuantizedWeight:
    """Formats as in unified_export_hf and quant_utils of nvidia-modelopt 0.47.0."""
    scheme, shape = rule.scheme, weight_shape(parts, rule)
    scales, block = read_scales(parts, rule, shape)
    fp4 = scheme.weight == "float4_e2m1fn"
    needs_input = scheme.activations == "static tensor" or (fp4 and scheme.activations != "none")
    return QuantizedWeight(
        parts.module,
        scheme,
        read_values(parts, scheme, shape),
        scales,
        block,
        global_scale=parts.scalar("weight_scale_2") if fp4 else None,
        input_scale=parts.scalar("input_scale") if needs_input else None,
        pre_quant_scale=read_pre_quant_scale(parts, scheme, shape[1]),
    )


def read_values(parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> NDArray[Any]:
    """Values [out, in], one per element."""
    out_features, in_features = shape
    if scheme.weight == "float8_e4m3fn":
        return parts.float8("weight", shape)
    if scheme.weight == "int8":
        return parts.read("weight", ("int8",), shape)
    if scheme.weight == "float4_e2m1fn":
        packed = parts.read("weight", ("uint8",), (out_features, in_features // 2))
        return unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)
    packed = parts.read("weight", ("uint8",), (out_features // 2, in_features))
    values = np.empty((out_features // 2, 2, in_features), np.uint8)
    values[:, 0], values[:, 1] = packed & 0xF, packed >> 4
    # ml_dtypes.int4 is two's complement in the low nibble
    return values.reshape(shape).view(ml_dtypes.int4)


def read_scales(
    parts: Parts, rule: SchemeRule, shape: tuple[int, int]
) -> tuple[NDArray[Any], tuple[int, int]]:
    """Scales, and how many weights [out, in] share one."""
    out_features, in_features = shape
    part, scheme = "weight_scale", rule.scheme
    if scheme.scaling == "tensor":
        return parts.scales(part, FLOATS, (1, 1), (), (1,)), shape
    if scheme.scaling == "channel":
        return parts.scales(part, FLOATS, (out_features, 1), (out_features,)), (1, in_features)
    if scheme.scaling == "square":
        side = scheme.block
        rows, columns = -(-out_features // side), -(-in_features // side)
        return parts.scales(part, FLOATS, (rows, columns), (rows, 1, columns, 1)), (side, side)
    dtypes = {"float4_e2m1fn": ("float8_e4m3fn",), "float8_e4m3fn": ("uint8", "float8_e8m0fnu")}
    allowed = dtypes.get(scheme.weight, FLOATS)
    count = parts.columns(part, allowed, out_features)
    # only INT4 has more than one group size
    declared = rule if scheme.weight == "int4" else SchemeRule(scheme, scheme.block)
    width = parts.width(part, declared, in_features, count)
    scales = parts.read(part, allowed, (out_features, count))
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return checked_scales(f"{parts.module}.{part}", scales), (1, width)


def read_pre_quant_scale(
    parts: Parts, scheme: Scheme, in_features: int
) -> NDArray[np.float32] | None:
    """Returns the factors [in] of the inputs; None where there are none.

    Raises CheckpointError for zeros, which would remove an input: folding divides by the scale.
    Raises UnsupportedModel for a scheme without such factors.
    """
    if not parts.has("pre_quant_scale"):
        return None
    if not scheme.pre_quant_scale:
        raise UnsupportedModel(
            f"{parts.module} is {scheme.name} and has a pre_quant_scale, which it should not have."
        )
    scale = parts.scales("pre_quant_scale", FLOATS, (in_features,)).astype(np.float32)
    if not scale.all():
        refuse(parts.info("pre_quant_scale", FLOATS), "has zeros")
    return scale
