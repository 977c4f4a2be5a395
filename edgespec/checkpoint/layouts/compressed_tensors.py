"""compressed-tensors: packed integers are offset by half their range; `weight` holds others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import Scheme


def weight_shape(parts: Parts, rule: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers. Raises CheckpointError."""
    if not parts.has("weight_packed"):
        return parts.matrix("weight", ("int8", "float8_e4m3fn"))
    rows, words = parts.matrix("weight_packed", ("int32",))
    out_features, in_features = map(int, parts.read("weight_shape", ("int64", "int32"), (2,)))
    per_word = 32 // rule.scheme.bits
    if out_features != rows or in_features <= 0 or -(-in_features // per_word) != words:
        raise CheckpointError(
            f"{parts.module}.weight_shape declares [{out_features}, {in_features}], but"
            f" weight_packed has the shape [{rows}, {words}], {per_word} weights per word.",
            "Download the checkpoint again: its tensors do not belong together.",
        )
    return out_features, in_features


def read_weight(parts: Parts, rule: SchemeRule) -> QuantizedWeight:
    """The weight. Raises CheckpointError for tensors that are missing or invalid."""
    shape = weight_shape(parts, rule)
    if parts.has("weight_packed"):
        return read_packed(parts, rule, shape)
    fp8 = rule.scheme.weight == "float8_e4m3fn"
    values = parts.float8("weight", shape) if fp8 else parts.read("weight", ("int8",), shape)
    scales, block = read_scales(parts, rule.scheme, shape)
    static = rule.scheme.activations == "static tensor"
    weight = QuantizedWeight(
        parts.module,
        rule.scheme,
        values,
        scales,
        block,
        input_scale=parts.scalar("input_scale") if static else None,
    )
    name = f"{parts.module}.weight_zero_point"
    if not parts.has("weight_zero_point") or not parts.checkpoint.read(name).any():
        return weight
    if fp8 or rule.scheme.activations != "none":
        raise UnsupportedModel(f"{name}: weights with a zero point, and rounded activations.")
    shapes = (-1, 1), (shape[0], 1), (shape[0],), (1,), ()
    return unsigned(weight, parts.read("weight_zero_point", ("int8",), *shapes))


def unsigned(weight: QuantizedWeight, zeros: NDArray[np.int8]) -> QuantizedWeight:
    """An int8 weight with zero points [out or 1, 1], as an unsigned one with a scale a row."""
    middle, rows = np.uint8(128), (weight.shape[0], 1)
    return replace(
        weight,
        values=weight.values.view(np.uint8) ^ middle,
        scales=np.broadcast_to(weight.scales, rows),
        block=(1, weight.shape[1]),
        zero_points=np.broadcast_to(zeros.view(np.uint8) ^ middle, rows),
    )


def read_scales(
    parts: Parts, scheme: Scheme, shape: tuple[int, int]
) -> tuple[NDArray[Any], tuple[int, int]]:
    """One scale per tensor, row or square; the tensor's shape decides, not the scheme."""
    part = "weight_scale"
    out_features, in_features = shape
    if scheme.scaling == "square":
        side = scheme.block
        squares = (-(-out_features // side), -(-in_features // side))
        return parts.scales(part, FLOATS, squares), (side, side)
    if parts.info(part, FLOATS).shape in ((), (1,)):
        return parts.scales(part, FLOATS, (1, 1), (), (1,)), shape
    return parts.scales(part, FLOATS, (out_features, 1), (out_features,)), (1, in_features)


def read_packed(parts: Parts, rule: SchemeRule, shape: tuple[int, int]) -> QuantizedWeight:
    """A weight of packed integers."""
    out_features, in_features = shape
    bits, per_word = rule.scheme.bits, 32 // rule.scheme.bits
    count = parts.columns("weight_scale", FLOATS, out_features)
    width = parts.width("weight_scale", rule, in_features, count)
    scales = parts.scales("weight_scale", FLOATS, (out_features, count))
    words = parts.read("weight_packed", ("int32",), (out_features, -(-in_features // per_word)))
    values = unpack_words(words, bits)[:, :in_features]
    zeros = np.full((out_features, count), 2 ** (bits - 1), np.uint8)
    if parts.has("weight_zero_point"):
        packed = parts.read("weight_zero_point", ("int32",), (-(-out_features // per_word), count))
        zeros = unpack_words(packed.T, bits)[:, :out_features].T
    order = input_order(parts, "weight_g_idx", in_features, width)
    return integer_weight(parts, rule, values, scales, zeros, width, order)
