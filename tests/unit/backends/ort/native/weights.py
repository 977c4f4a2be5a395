"""Random quantized weights of every form that the kernels have, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort.native.layout import CODEBOOKS, WeightLayout
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES

PLAIN = [WeightLayout(bits, block, 1, 1) for bits in (4, 8) for block in (32, 128)]
FORMS = [
    *PLAIN,
    WeightLayout(4, 64, 1, 1),
    WeightLayout(8, 16, 1, 1),
    WeightLayout(6, 128, 1, 1),
    WeightLayout(4, 32, 1, 1, "float16"),
    WeightLayout(4, 32, 1, 1, "float16_min"),
    WeightLayout(4, 32, 1, 1, "super_min", 8),
    WeightLayout(4, 128, 1, 1, "super_min", 1),  # AWQ with zero points
    WeightLayout(6, 32, 1, 1, "super_min", 8),
    WeightLayout(6, 16, 1, 1, "super", 16),  # Q6_K
    WeightLayout(8, 16, 1, 1, "super_min", 3),
    WeightLayout(4, 32, 1, 1, "super", 8, "iq4_nl"),
    WeightLayout(4, 16, 1, 1, "float16", 1, "fp4", float(np.float32(0.3))),  # NVFP4
]


def named(form: WeightLayout) -> str:
    """A form as the name of a test."""
    return f"{form.codebook or form.bits}-{form.block}-{form.scales}"


def sized(form: WeightLayout, in_features: int, out_features: int) -> WeightLayout:
    """A form with sizes."""
    return replace(form, in_features=in_features, out_features=out_features)


def plain_weight(
    layout: WeightLayout, values: NDArray[np.integer[Any]], scales: NDArray[np.float32]
) -> QuantizedWeight:
    """A weight of signed values [out, in] and scales [out, blocks]."""
    scheme = replace(SCHEMES["int4_wo"], bits=layout.bits)
    return QuantizedWeight("weight", scheme, values.astype(np.int8), scales, (1, layout.block))


def some_weight(layout: WeightLayout, seed: int = 0) -> QuantizedWeight:
    """A weight of random values of all sizes, and scales that are not alike."""
    random = np.random.default_rng(seed)
    shape = layout.out_features, layout.in_features
    blocks, shared = (shape[0], layout.num_blocks), (shape[0], layout.num_super_blocks)
    values = random.integers(0, 1 << layout.bits, shape)

    def some(kind: str, size: tuple[int, int]) -> NDArray[Any]:
        if kind == "bytes":
            return random.integers(0, 256, size).astype(np.uint8)
        if kind == "signed":
            return random.integers(-128, 128, size).astype(np.int8)
        sign = random.choice([-1, 1], size) if kind == "float16" else 1
        return (random.uniform(0.5, 2, size) / 100 * sign).astype(kind)

    weight = plain_weight(layout, np.zeros(shape), np.zeros(blocks, np.float32))
    if layout.codebook == "fp4":
        weight = replace(weight, values=values.astype(np.uint8).view(ml_dtypes.float4_e2m1fn))
    elif layout.codebook:
        scheme = replace(weight.scheme, name="iq4_xs")
        weight = replace(weight, scheme=scheme, values=CODEBOOKS[layout.codebook][values])
    elif layout.has_minimums:
        weight = replace(weight, values=values.astype(np.uint8 if layout.bits > 4 else "uint4"))
    else:
        weight = replace(weight, values=(values - layout.middle).astype(np.int8))
    if layout.global_scale != 1:
        weight = replace(weight, global_scale=layout.global_scale * 2)
    if layout.scales in ("float32", "float16"):
        return replace(weight, scales=some(layout.scales, blocks))
    if layout.scales == "float16_min":
        return replace(weight, scales=some("float16", blocks), minimums=some("float16", blocks))
    factors, others = (some("float16", shared) / np.float16(64) for _ in range(2))
    weight = replace(weight, super_block=layout.super_block, super_scales=factors)
    if layout.scales == "super":
        return replace(weight, scales=some("signed", blocks))
    scales, minimums = some("bytes", blocks), some("bytes", blocks)
    return replace(weight, scales=scales, minimums=minimums, super_minimums=others)
