"""Reads quantized weights from every layout on disk into `QuantizedWeight`, one Linear at a time.

Knows how ModelOpt 0.47, AutoAWQ (GEMM), GPTQ, DeepSeek's fp8 and compressed-tensors pack values and
name scales. Knows no graph, and needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint, TensorInfo, read_json
from edgespec.checkpoint.quantization import Quantization, Rule, quantization_of
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.quantized import QuantizedWeight
from edgespec.schemes import Scheme

_FLOATS = ("float32", "float16", "bfloat16")


def read_quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Returns the settings in config.json and hf_quant_config.json; None: not quantized.

    Raises as `quantization_of` does.
    """
    beside = checkpoint.path / "hf_quant_config.json"
    settings = read_json(beside) if beside.exists() else None
    return quantization_of(checkpoint.config, settings, str(checkpoint.path / "config.json"))


def rule_at(checkpoint: Checkpoint, quantization: Quantization, module: str) -> Rule | None:
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
            f"{quantization.source} declares {module} as not quantized, but {checkpoint.path} has"
            f" {marks[0]}.",
            "Download the settings and the weights again: they do not belong together.",
        )
    if rule is not None and not marks and plain is not None and plain.dtype in _FLOATS:
        if quantization.tensors_decide:
            return None
        raise CheckpointError(
            f"{quantization.source} declares {module} as {rule.scheme.name}, but {plain.name} is"
            f" {plain.dtype} and has no scales.",
            "Download the settings and the weights again: they do not belong together.",
        )
    return rule


def tensor_names(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """Returns the names of the tensors of the Linear's weight in any layout, without its bias."""
    return tuple(name for part in _PARTS if (name := f"{module}.{part}") in checkpoint.tensors)


def stored_shape(
    checkpoint: Checkpoint, quantization: Quantization, module: str
) -> tuple[int, int]:
    """Returns [out, in] of a Linear, quantized or not, from headers. Raises CheckpointError."""
    rule = rule_at(checkpoint, quantization, module)
    parts = _Parts(checkpoint, quantization, module)
    if rule is None:
        return parts.matrix("weight", _FLOATS)
    return _SHAPES[quantization.layout](parts, rule)


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
    return _READERS[quantization.layout](_Parts(checkpoint, quantization, module), rule)


def logical_shapes(
    checkpoint: Checkpoint, quantization: Quantization | None
) -> dict[str, tuple[int, ...]]:
    """Returns shapes by name; a quantized Linear has the shape of its dequantized weight.

    Raises CheckpointError.
    """
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    if quantization is None:
        return shapes
    modules = {name.rpartition(".")[0] for name in shapes if name.rpartition(".")[2] in _MARKS}
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
            return _scalar(checkpoint, keys), _scalar(checkpoint, values)
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
)
_MARKS = ("weight_scale", "weight_scale_inv", "qweight", "weight_packed")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one Linear. Each is checked when it is read."""

    checkpoint: Checkpoint
    quantization: Quantization
    module: str

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.checkpoint.tensors

    def info(self, part: str, dtypes: tuple[str, ...]) -> TensorInfo:
        name = f"{self.module}.{part}"
        if name not in self.checkpoint.tensors:
            raise CheckpointError(
                f"{self.checkpoint.path} has no tensor {name!r}, which {self.quantization.source}"
                f" requires ({self.quantization.layout}).",
                "Download the settings and the weights again: they do not belong together, or a"
                " part is missing.",
            )
        info = self.checkpoint.tensors[name]
        if info.dtype not in dtypes:
            _refuse(info, f"is {info.dtype}; expected {' or '.join(dtypes)}")
        return info

    def matrix(self, part: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        info = self.info(part, dtypes)
        if len(info.shape) != 2 or 0 in info.shape:
            _refuse(info, f"has the shape {list(info.shape)}; expected a matrix")
        return info.shape[0], info.shape[1]

    def read(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        """Reads a tensor of one of `shapes` and reshapes it to the first of them."""
        info = self.info(part, dtypes)
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            _refuse(info, f"has the shape {list(info.shape)}; expected {wanted}")
        return self.checkpoint.read(info.name).reshape(shapes[0])

    def scales(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        return _checked(f"{self.module}.{part}", self.read(part, dtypes, *shapes))

    def float8(self, part: str, shape: tuple[int, int]) -> NDArray[Any]:
        """Reads FP8 values. E4M3 has no Inf, and one encoding of NaN apart from its sign."""
        values = self.read(part, ("float8_e4m3fn",), shape)
        if ((values.view(np.uint8) & 0x7F) == 0x7F).any():
            _refuse(self.info(part, ("float8_e4m3fn",)), "has NaN values")
        return values

    def scalar(self, part: str) -> float:
        return _scalar(self.checkpoint, self.info(part, _FLOATS).name)

    def columns(self, part: str, dtypes: tuple[str, ...], rows: int) -> int:
        """Returns the number of scales per row."""
        found = self.matrix(part, dtypes)
        if found[0] != rows:
            _refuse(self.info(part, dtypes), f"has the shape {list(found)}; expected {rows} rows")
        return found[1]

    def width(self, part: str, rule: Rule, in_features: int, count: int) -> int:
        """Returns the weights per scale, which must be the declared group size."""
        declared = rule.group_size
        width = in_features // count
        matches = declared is None or width == min(declared, in_features)
        if width * count != in_features or not matches:
            expected = f"groups of {declared}" if declared else "equal groups"
            raise CheckpointError(
                f"{self.module}.{part} has {count} scales per row for {in_features} inputs; "
                f"{self.quantization.source} declares {expected}.",
                "Download the settings and the weights again: they do not belong together.",
            )
        return width


def _refuse(info: TensorInfo, fault: str) -> NoReturn:
    raise CheckpointError(
        f"tensor {info.name!r} {fault}.",
        "Download the checkpoint again, or quantize the original again.",
    )


def _checked(name: str, scales: NDArray[Any]) -> NDArray[Any]:
    """Scales must be finite and not negative. Zero is a block of zeros."""
    values = scales.astype(np.float32)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(
            f"tensor {name!r} has {values[at]} at {list(at)} ({int(bad.sum())} such values); "
            "scales are finite and not negative.",
            "Download the checkpoint again, or quantize the original again.",
        )
    return scales


def _scalar(checkpoint: Checkpoint, name: str) -> float:
    """One scale per tensor, which must be positive."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.path} has no tensor {name!r}, but it has its counterpart."
        )
    if info.dtype not in _FLOATS or info.shape not in ((), (1,)):
        _refuse(info, f"is {info.dtype} {list(info.shape)}; expected one floating-point number")
    value = float(checkpoint.read(name).astype(np.float32).reshape(()))
    if not 0 < value < float("inf"):
        _refuse(info, f"is {value}; a scale is a positive number")
    return value


# ModelOpt: `weight` [out, in]; a byte holds two rows of INT4, or two columns of FP4


def _modelopt_shape(parts: _Parts, rule: Rule) -> tuple[int, int]:
    dtype, rows, columns = _MODELOPT_PACKING[rule.scheme.weight]
    stored = parts.matrix("weight", (dtype,))
    return stored[0] * rows, stored[1] * columns


# Weight type -> stored dtype, rows and columns per byte
_MODELOPT_PACKING: dict[str, tuple[str, int, int]] = {
    "int8": ("int8", 1, 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1, 1),
    "int4": ("uint8", 2, 1),
    "float4_e2m1fn": ("uint8", 1, 2),
}


def _read_modelopt(parts: _Parts, rule: Rule) -> QuantizedWeight:
    """Formats as in unified_export_hf and quant_utils of nvidia-modelopt 0.47.0."""
    scheme, shape = rule.scheme, _modelopt_shape(parts, rule)
    scales, block = _modelopt_scales(parts, rule, shape)
    fp4 = scheme.weight == "float4_e2m1fn"
    needs_input = scheme.activations == "static tensor" or (fp4 and scheme.activations != "none")
    return QuantizedWeight(
        parts.module,
        scheme,
        _modelopt_values(parts, scheme, shape),
        scales,
        block,
        global_scale=parts.scalar("weight_scale_2") if fp4 else None,
        input_scale=parts.scalar("input_scale") if needs_input else None,
        pre_quant_scale=_pre_quant_scale(parts, scheme, shape[1]),
    )


def _modelopt_values(parts: _Parts, scheme: Scheme, shape: tuple[int, int]) -> NDArray[Any]:
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


def _modelopt_scales(
    parts: _Parts, rule: Rule, shape: tuple[int, int]
) -> tuple[NDArray[Any], tuple[int, int]]:
    out_features, in_features = shape
    part, scheme = "weight_scale", rule.scheme
    if scheme.scaling == "tensor":
        return parts.scales(part, _FLOATS, (1, 1), (), (1,)), shape
    if scheme.scaling == "channel":
        return parts.scales(part, _FLOATS, (out_features, 1), (out_features,)), (1, in_features)
    if scheme.scaling == "square":
        side = scheme.block
        rows, columns = -(-out_features // side), -(-in_features // side)
        return parts.scales(part, _FLOATS, (rows, columns), (rows, 1, columns, 1)), (side, side)
    dtypes = {"float4_e2m1fn": ("float8_e4m3fn",), "float8_e4m3fn": ("uint8", "float8_e8m0fnu")}
    allowed = dtypes.get(scheme.weight, _FLOATS)
    count = parts.columns(part, allowed, out_features)
    # only INT4 has more than one group size
    declared = rule if scheme.weight == "int4" else Rule(scheme, scheme.block)
    width = parts.width(part, declared, in_features, count)
    scales = parts.read(part, allowed, (out_features, count))
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return _checked(f"{parts.module}.{part}", scales), (1, width)


def _pre_quant_scale(parts: _Parts, scheme: Scheme, in_features: int) -> NDArray[np.float32] | None:
    """Zeros are refused: they would remove an input, and folding divides by the scale."""
    if not parts.has("pre_quant_scale"):
        return None
    if not scheme.pre_quant_scale:
        raise UnsupportedModel(
            f"{parts.module} is {scheme.name} and has a pre_quant_scale, which it should not have."
        )
    scale = parts.scales("pre_quant_scale", _FLOATS, (in_features,)).astype(np.float32)
    if not scale.all():
        _refuse(parts.info("pre_quant_scale", _FLOATS), "has zeros")
    return scale


# AutoAWQ, GEMM: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]

# The column in each nibble of a word, lowest nibble first
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq_shape(parts: _Parts, _: Rule) -> tuple[int, int]:
    in_features, words = parts.matrix("qweight", ("int32",))
    return words * 8, in_features


def _read_awq(parts: _Parts, rule: Rule) -> QuantizedWeight:
    out_features, in_features = _awq_shape(parts, rule)
    count = parts.matrix("scales", _FLOATS)[0]
    width = parts.width("scales", rule, in_features, count)
    scales = parts.scales("scales", _FLOATS, (count, out_features))
    values = _awq_columns(parts.read("qweight", ("int32",), (in_features, out_features // 8)))
    zeros = _awq_columns(parts.read("qzeros", ("int32",), (count, out_features // 8)))
    return _integers(parts, rule, values.T, scales.T, zeros.T, width)


def _awq_columns(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    rows, words = packed.shape
    nibbles = unpack_nibbles(packed.view(np.uint8)).reshape(rows, words, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, _AWQ_ORDER] = nibbles
    return columns.reshape(rows, words * 8)


# GPTQ: qweight int32 [in / per_word, out], qzeros int32 [groups, out / per_word],
# scales [groups, out], g_idx [in]


def _gptq_shape(parts: _Parts, rule: Rule) -> tuple[int, int]:
    words, out_features = parts.matrix("qweight", ("int32",))
    return out_features, words * (32 // rule.scheme.bits)


def _read_gptq(parts: _Parts, rule: Rule) -> QuantizedWeight:
    bits = rule.scheme.bits
    per_word = 32 // bits
    out_features, in_features = _gptq_shape(parts, rule)
    count = parts.matrix("scales", _FLOATS)[0]
    width = parts.width("scales", rule, in_features, count)
    scales = parts.scales("scales", _FLOATS, (count, out_features))
    words = parts.read("qweight", ("int32",), (in_features // per_word, out_features))
    zero_words = parts.read("qzeros", ("int32",), (count, -(-out_features // per_word)))
    zeros = _gptq_zeros(parts, unpack_words(zero_words, bits)[:, :out_features], bits)
    order = _input_order(parts, "g_idx", in_features, width)
    return _integers(parts, rule, unpack_words(words.T, bits), scales.T, zeros.T, width, order)


def _gptq_zeros(parts: _Parts, zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The first format stores zero points minus one; 0 wraps around and is ambiguous there."""
    offset, top = parts.quantization.zero_offset, 2**bits - 1
    if offset and (zeros == top).any():
        raise UnsupportedModel(
            f"{parts.module}.qzeros stores the zero point {top} in GPTQ's first format, where it"
            f" means 0 to some readers and {top + 1} to others.",
            "Give a checkpoint in the format gptq_v2, or a symmetric one.",
        )
    return zeros + np.uint8(offset)


def _input_order(parts: _Parts, part: str, in_features: int, width: int) -> NDArray[np.intp] | None:
    """Sorts the inputs of a weight with desc_act by group, so that groups are blocks again."""
    if not parts.has(part):
        return None
    groups = parts.read(part, ("int32", "int64"), (in_features,))
    if np.array_equal(groups, np.arange(in_features) // width):
        return None
    inside = groups.min() >= 0 and groups.max() < in_features // width
    if not inside or (np.bincount(groups) != width).any():
        _refuse(
            parts.info(part, ("int32", "int64")),
            f"does not have {width} inputs in each group",
        )
    return np.argsort(groups, kind="stable")


# DeepSeek's fp8: weight float8 [out, in], one weight_scale_inv per 128 by 128 weights (a factor,
# despite its name)


def _fp8_shape(parts: _Parts, _: Rule) -> tuple[int, int]:
    return parts.matrix("weight", ("float8_e4m3fn",))


def _read_fp8(parts: _Parts, rule: Rule) -> QuantizedWeight:
    shape, side = _fp8_shape(parts, rule), rule.scheme.block
    scales = parts.scales("weight_scale_inv", _FLOATS, (-(-shape[0] // side), -(-shape[1] // side)))
    return QuantizedWeight(
        parts.module, rule.scheme, parts.float8("weight", shape), scales, (side, side)
    )


# compressed-tensors: packed integers are offset by half their range; `weight` holds others as is


def _compressed_shape(parts: _Parts, rule: Rule) -> tuple[int, int]:
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


def _read_compressed(parts: _Parts, rule: Rule) -> QuantizedWeight:
    shape = _compressed_shape(parts, rule)
    if parts.has("weight_packed"):
        return _read_packed(parts, rule, shape)
    fp8 = rule.scheme.weight == "float8_e4m3fn"
    values = parts.float8("weight", shape) if fp8 else parts.read("weight", ("int8",), shape)
    zeros = f"{parts.module}.weight_zero_point"
    if parts.has("weight_zero_point") and parts.checkpoint.read(zeros).any():
        raise UnsupportedModel(f"{zeros}: signed weights with a zero point.")
    scales, block = _compressed_scales(parts, rule.scheme, shape)
    static = rule.scheme.activations == "static tensor"
    return QuantizedWeight(
        parts.module,
        rule.scheme,
        values,
        scales,
        block,
        input_scale=parts.scalar("input_scale") if static else None,
    )


def _compressed_scales(
    parts: _Parts, scheme: Scheme, shape: tuple[int, int]
) -> tuple[NDArray[Any], tuple[int, int]]:
    """One scale per tensor, row or square; the tensor's shape decides, not the scheme."""
    part = "weight_scale"
    out_features, in_features = shape
    if scheme.scaling == "square":
        side = scheme.block
        squares = (-(-out_features // side), -(-in_features // side))
        return parts.scales(part, _FLOATS, squares), (side, side)
    if parts.info(part, _FLOATS).shape in ((), (1,)):
        return parts.scales(part, _FLOATS, (1, 1), (), (1,)), shape
    return parts.scales(part, _FLOATS, (out_features, 1), (out_features,)), (1, in_features)


def _read_packed(parts: _Parts, rule: Rule, shape: tuple[int, int]) -> QuantizedWeight:
    out_features, in_features = shape
    bits, per_word = rule.scheme.bits, 32 // rule.scheme.bits
    count = parts.columns("weight_scale", _FLOATS, out_features)
    width = parts.width("weight_scale", rule, in_features, count)
    scales = parts.scales("weight_scale", _FLOATS, (out_features, count))
    words = parts.read("weight_packed", ("int32",), (out_features, -(-in_features // per_word)))
    values = unpack_words(words, bits)[:, :in_features]
    zeros = np.full((out_features, count), 2 ** (bits - 1), np.uint8)
    if parts.has("weight_zero_point"):
        packed = parts.read("weight_zero_point", ("int32",), (-(-out_features // per_word), count))
        zeros = unpack_words(packed.T, bits)[:, :out_features].T
    order = _input_order(parts, "weight_g_idx", in_features, width)
    return _integers(parts, rule, values, scales, zeros, width, order)


# Common to several layouts


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the nibbles [..., 2n] of bytes [..., n], the low nibble first."""
    nibbles = np.empty((*packed.shape, 2), np.uint8)
    nibbles[..., 0], nibbles[..., 1] = packed & 0xF, packed >> 4
    return nibbles.reshape(*packed.shape[:-1], -1)


def unpack_words(packed: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Returns the values [rows, n * 32 / bits] of words [rows, n], the lowest bits first.

    `bits` is 4 or 8.
    """
    stored = np.ascontiguousarray(packed).view(np.uint8)
    return unpack_nibbles(stored) if bits == 4 else stored


def _integers(
    parts: _Parts,
    rule: Rule,
    values: NDArray[np.uint8],  # [out, in]
    scales: NDArray[Any],  # [out, groups]
    zeros: NDArray[np.uint8],  # [out, groups]
    width: int,
    order: NDArray[np.intp] | None = None,
) -> QuantizedWeight:
    """Returns unsigned values with zero points, or signed ones if all of them are the middle."""
    four, middle = rule.scheme.bits == 4, 2 ** (rule.scheme.bits - 1)
    values = np.ascontiguousarray(values if order is None else values[:, order])
    points: NDArray[Any] | None = None
    if (zeros == middle).all():
        values = values ^ np.uint8(middle)  # value - middle, in two's complement
        dtype = ml_dtypes.int4 if four else np.int8
    else:
        dtype = ml_dtypes.uint4 if four else np.uint8
        points = np.ascontiguousarray(zeros).view(dtype)
    return QuantizedWeight(
        parts.module,
        rule.scheme,
        values.view(dtype),
        np.ascontiguousarray(scales),
        (1, width),
        zero_points=points,
        input_order=order,
    )


_SHAPES: Mapping[str, Callable[[_Parts, Rule], tuple[int, int]]] = {
    "modelopt": _modelopt_shape,
    "awq": _awq_shape,
    "gptq": _gptq_shape,
    "fp8": _fp8_shape,
    "compressed-tensors": _compressed_shape,
}
_READERS: Mapping[str, Callable[[_Parts, Rule], QuantizedWeight]] = {
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
}
