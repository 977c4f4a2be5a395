"""llama.cpp's blocks in a GGUF file: `weight_TYPE`, bytes [out, bytes of a row], one tensor a
Linear.

Mixed as they come: a tensor's name says its type, and the type its scheme.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.checkpoint.gguf.types import BY_NAME, QUANTIZED, REROUNDED, BlockType, weight_of
from edgespec.checkpoint.layouts.parts import Parts
from edgespec.checkpoint.quantization import SchemeRule
from edgespec.checkpoint.source import TensorInfo
from edgespec.errors import CheckpointError
from edgespec.quantization.quantized_weight import QuantizedWeight

PARTS = tuple(f"weight_{name}" for name in QUANTIZED)
SCALE = "weight_scale_2"  # of the whole tensor, beside NVFP4
# Part -> the rule of a Linear that has it
RULES = {
    f"weight_{name}": SchemeRule(BY_NAME[name].scheme, BY_NAME[name].scale_block or REROUNDED)
    for name in QUANTIZED
}


def weight_shape(parts: Parts, _: SchemeRule) -> tuple[int, int]:
    """[out, in] of the Linear, from headers."""
    kind, info = _stored(parts)
    return info.shape[0], info.shape[1] // kind.size_bytes * kind.block


def read_weight(parts: Parts, _: SchemeRule) -> QuantizedWeight:
    """The weight. Raises CheckpointError for scales that are not finite."""
    kind, info = _stored(parts)
    weight = weight_of(parts.module, kind, parts.checkpoint.read(info.name))
    for numbers in (weight.scales, weight.minimums, weight.super_scales, weight.super_minimums):
        if numbers is not None and not np.isfinite(numbers.astype(np.float32)).all():
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has scales that are NaN or Inf.",
                "Download it again, or another quantization of the model.",
            )
    if kind.scaled:
        weight = replace(weight, global_scale=parts.scalar(SCALE) if parts.has(SCALE) else 1.0)
    columns = info.encoding.columns if info.encoding is not None else None
    return weight if columns is None else replace(weight, input_order=np.argsort(columns))


def _stored(parts: Parts) -> tuple[BlockType, TensorInfo]:
    """The type of a Linear, and its tensor, by its name."""
    part = next(part for part in PARTS if parts.has(part))
    return BY_NAME[part.removeprefix("weight_")], parts.info(part, ("uint8",))
