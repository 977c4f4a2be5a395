"""One quantized weight as the table of weights that a graph is built from, and weights of the forms
that AWQ, GPTQ and GGUF have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from edgespec.graphs.packing import Packing, PackingSource, without_numbers
from edgespec.graphs.weights import WeightTable
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES

NAME = "model.layers.0.mlp.up_proj"


class OneWeight(PackingSource):
    """A source that has one weight at hand."""

    def __init__(self, stored: QuantizedWeight) -> None:
        self.last = (NAME, Packing(stored))
        self.known = {NAME: Packing(without_numbers(stored))}


def table_of(stored: QuantizedWeight) -> WeightTable:
    table = WeightTable(None, {f"{NAME}.weight": f"{NAME}.weight"})  # type: ignore[arg-type]
    source = OneWeight(stored)
    source.quantization = object()  # type: ignore[assignment]
    object.__setattr__(table, "packed", source)
    return table


def weights_of_forms(shape: tuple[int, int]) -> Mapping[str, QuantizedWeight]:
    """A random weight [out, in] of each form; `in` is a multiple of 32."""
    rng, (outputs, inputs) = np.random.default_rng(2), shape
    whole, small = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-32, 32), "uint8": (0, 32)}, 0.05

    def blocks(count: int, dtype: Any, low: float, high: float) -> Any:
        return rng.uniform(low, high, (outputs, count)).astype(dtype)

    def made(scheme: str, dtype: str, width: int, scales: Any, **more: Any) -> QuantizedWeight:
        values = rng.integers(*whole[dtype], shape).astype(getattr(ml_dtypes, dtype, dtype))
        return QuantizedWeight(NAME, SCHEMES[scheme], values, scales, (1, width), **more)

    few, many, half = inputs // 32, inputs // 16, np.float16
    points = rng.integers(0, 16, (outputs, few)).astype(ml_dtypes.uint4)
    supers = {"super_block": 3, "super_scales": blocks(-(-few // 3), half, -0.001, 0.001)}
    least = {"minimums": blocks(few, np.uint8, 0, 64)}
    least |= {"super_minimums": blocks(-(-few // 3), half, -0.001, 0.001)}
    signed = blocks(few, half, -small, small)
    signed[0, 0] = 0
    table = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    iq4 = made("iq4_nl", "int8", 32, signed / 50)
    iq4.values[...] = table[rng.integers(0, 16, shape)]
    powers = np.exp2(rng.integers(-8, -4, (outputs, few))).astype(ml_dtypes.float8_e8m0fnu)
    fp4 = (rng.standard_normal(shape) * 3).astype(ml_dtypes.float4_e2m1fn)
    return {
        "zero points": made(
            "int4_wo", "uint4", 32, blocks(few, half, 0.01, small), zero_points=points
        ),
        "zero points a channel": made(
            *("int8_wo", "uint8", inputs, blocks(1, np.float32, 0.01, small)),
            zero_points=blocks(1, np.uint8, 10, 22),
        ),
        "either sign": made("q4_0", "int4", 32, signed),
        "minimums": made("q4_1", "uint4", 32, signed, minimums=blocks(few, half, -1, 1)),
        "super-blocks less minimums": made(
            "q4_k", "uint4", 32, blocks(few, np.uint8, 0, 64), **supers, **least
        ),
        "5 bits": made("q5_k", "uint8", 32, blocks(few, np.uint8, 0, 64), **supers, **least),
        "6 bits": made(
            *("q6_k", "int8", 16, blocks(many, np.int8, -128, 128)),
            super_block=16,
            super_scales=blocks(-(-many // 16), half, -0.0001, 0.0001),
        ),
        "a table": iq4,
        "fp4 by powers of two": QuantizedWeight(NAME, SCHEMES["mxfp4"], fp4, powers, (1, 32)),
    }
