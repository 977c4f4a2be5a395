"""Reads quantized weights from every layout on disk into `QuantizedWeight`, one Linear at a time.

Knows the names of tensors, and a file per layout: ModelOpt 0.47, AutoAWQ (GEMM), GPTQ, DeepSeek's
fp8, compressed-tensors and GGUF. Knows no graph, and needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import awq, compressed_tensors, fp8, gguf, gptq, modelopt
from edgespec.checkpoint.layouts.parts import (
    FLOATS,
    Parts,
    read_scalar,
    unpack_nibbles,
    unpack_words,
)
from edgespec.checkpoint.quantization import Quantization, SchemeRule, quantization_of
from edgespec.checkpoint.source import read_json
from edgespec.errors import CheckpointError
from edgespec.quantization.quantized_weight import QuantizedWeight

__all__ = [
    "LAYOUTS",
    "all_kv_scales",
    "is_quantized",
    "kv_scale_names",
    "logical_shapes",
    "read_kv_scales",
    "read_quantization",
    "read_weight",
    "rule_at",
    "stored_shape",
    "tensor_names",
    "unpack_nibbles",
    "unpack_words",
]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a layout is read: [out, in] of a Linear from headers, and its weight."""

    weight_shape: Callable[[Parts, SchemeRule], tuple[int, int]]
    read_weight: Callable[[Parts, SchemeRule], QuantizedWeight]


def read_quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Returns the settings in config.json and hf_quant_config.json; None: not quantized.

    Raises as `quantization_of` does.
    """
    beside = checkpoint.path / "hf_quant_config.json"
    settings = read_json(beside) if beside.exists() else None
    return quantization_of(checkpoint.config, settings, checkpoint.config_source)


def rule_at(checkpoint: Checkpoint, quantization: Quantization, module: str) -> SchemeRule | None:
    """Returns the rule of the Linear `module` (model.layers.0.mlp.up_proj).

    None: it is an ordinary floating-point `module`.weight. Reads headers only. Raises
    CheckpointError if the settings and the tensors' names do not agree.
    """
    rule = quantization.rule(module)
    has = checkpoint.tensors.keys()
    marks = [f"{module}.{part}" for part in _MARKS if f"{module}.{part}" in has]
    plain = checkpoint.tensors.get(f"{module}.weight")
    if rule is None and marks:
        raise CheckpointError(
            f"{quantization.source} declares {module} as not quantized, but {checkpoint.place} has"
            f" {marks[0]}.",
            "Download the settings and the weights again: they do not belong together.",
        )
    if rule is not None and not marks and plain is not None and plain.dtype in FLOATS:
        if quantization.tensors_decide:
            return None
        raise CheckpointError(
            f"{quantization.source} declares {module} as {rule.scheme.name}, but {plain.name} is"
            f" {plain.dtype} and has no scales.",
            "Download the settings and the weights again: they do not belong together.",
        )
    # A tensor's name says its own type where types are mixed as they come
    return gguf.RULES.get(marks[0].rpartition(".")[2], rule) if marks else rule


def tensor_names(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """Returns the names of the tensors of the Linear's weight in any layout, without its bias."""
    return tuple(name for part in _PARTS if (name := f"{module}.{part}") in checkpoint.tensors)


def stored_shape(
    checkpoint: Checkpoint, quantization: Quantization, module: str
) -> tuple[int, int]:
    """Returns [out, in] of a Linear, quantized or not, from headers. Raises CheckpointError."""
    rule = rule_at(checkpoint, quantization, module)
    parts = Parts(checkpoint, quantization, module)
    if rule is None:
        return parts.matrix("weight", FLOATS)
    return LAYOUTS[quantization.layout].weight_shape(parts, rule)


def read_weight(
    checkpoint: Checkpoint, quantization: Quantization, module: str
) -> QuantizedWeight | None:
    """Returns the weight of the Linear `module`, one byte per value; None if it is not quantized.

    Raises CheckpointError for missing or invalid tensors (shape, NaN, Inf, negative scales), and
    UnsupportedModel for unsupported forms that the settings do not declare. Both name the tensor.
    """
    rule = rule_at(checkpoint, quantization, module)
    if rule is None:
        return None
    parts = Parts(checkpoint, quantization, module)
    return LAYOUTS[quantization.layout].read_weight(parts, rule)


def logical_shapes(
    checkpoint: Checkpoint, quantization: Quantization | None
) -> dict[str, tuple[int, ...]]:
    """Returns shapes by name; a quantized Linear has the shape of its dequantized weight.

    Raises CheckpointError.
    """
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    if quantization is None:
        return shapes
    marked = (name.rpartition(".") for name in shapes)
    modules = dict.fromkeys(module for module, _, part in marked if part in _MARKS)
    parts = {name for module in modules for name in tensor_names(checkpoint, module)}
    kept = {name: shape for name, shape in shapes.items() if name not in parts}
    return kept | {
        f"{module}.weight": stored_shape(checkpoint, quantization, module) for module in modules
    }


def is_quantized(checkpoint: Checkpoint, module: str) -> bool:
    """Returns whether the Linear `module` is quantized, by the names of its tensors."""
    return any(f"{module}.{part}" in checkpoint.tensors for part in _MARKS)


def read_kv_scales(checkpoint: Checkpoint, attention: str) -> tuple[float, float] | None:
    """Returns the KV cache scales (keys, values) of an attention module, or None.

    `attention` is a name such as model.layers.0.self_attn. ModelOpt writes the scales at k_proj and
    v_proj, compressed-tensors at the attention itself. Raises CheckpointError if one is missing or
    invalid.
    """
    for keys, values in (
        (f"{attention}.{key}", f"{attention}.{value}") for key, value in _KV_SCALES
    ):
        if keys in checkpoint.tensors or values in checkpoint.tensors:
            return read_scalar(checkpoint, keys), read_scalar(checkpoint, values)
    return None


def all_kv_scales(checkpoint: Checkpoint) -> tuple[tuple[float, float], ...]:
    """Returns the KV cache scales (keys, values) of every layer in order; empty without scales."""
    attentions = {name.partition(".self_attn.")[0] for name in kv_scale_names(checkpoint)}
    ordered = sorted(attentions, key=lambda layer: int(layer.rpartition(".")[2]))
    pairs = (read_kv_scales(checkpoint, f"{layer}.self_attn") for layer in ordered)
    return tuple(pair for pair in pairs if pair is not None)


def kv_scale_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the names of the tensors that are KV cache scales."""
    ends = "|".join(re.escape(name) for pair in _KV_SCALES for name in pair)
    return tuple(
        name
        for name in checkpoint.tensors
        if re.search(rf"layers\.\d{{1,6}}\.self_attn\.({ends})$", name)
    )


_KV_SCALES = (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"))


# All tensors of a weight, and those of them that only a quantized weight has
_PARTS = (
    *(
        "weight",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "input_scale",
        "pre_quant_scale",
    ),
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *gguf.PARTS,
)
_MARKS = ("weight_scale", "weight_scale_inv", "qweight", "weight_packed", *gguf.PARTS)

# Layout -> the module that reads it
LAYOUTS: Mapping[str, TensorLayout] = {
    "modelopt": TensorLayout(modelopt.weight_shape, modelopt.read_weight),
    "awq": TensorLayout(awq.weight_shape, awq.read_weight),
    "gptq": TensorLayout(gptq.weight_shape, gptq.read_weight),
    "fp8": TensorLayout(fp8.weight_shape, fp8.read_weight),
    "compressed-tensors": TensorLayout(
        compressed_tensors.weight_shape, compressed_tensors.read_weight
    ),
    "gguf": TensorLayout(gguf.weight_shape, gguf.read_weight),
}
