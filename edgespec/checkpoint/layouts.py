"""Quantized weights as they stand on disk -> one layout, a Linear at a time.

Knows how ModelOpt 0.47, AutoAWQ (GEMM), GPTQ, DeepSeek's fp8 and compressed-tensors pack codes and
name their scales. Knows no graph, and needs no torch.
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
    """The settings of a checkpoint from config.json and hf_quant_config.json; None: it is not
    quantized."""
    beside = checkpoint.path / "hf_quant_config.json"
    settings = read_json(beside) if beside.exists() else None
    return quantization_of(checkpoint.config, settings, str(checkpoint.path / "config.json"))


def rule_at(checkpoint: Checkpoint, quantization: Quantization, module: str) -> Rule | None:
    """What the Linear `module` (model.layers.0.mlp.up_proj) is: settings and the tensors' names
    must agree.

    None: it stands as an ordinary floating-point `module`.weight. Reads headers only. Raises
    CheckpointError.
    """
    rule = quantization.rule(module)
    has = checkpoint.tensors.keys()
    marks = [f"{module}.{part}" for part in _MARKS if f"{module}.{part}" in has]
    plain = checkpoint.tensors.get(f"{module}.weight")
    if rule is None and marks:
        raise CheckpointError(
            f"{quantization.source} leaves {module} unquantized, but {checkpoint.path} has"
            f" {marks[0]}.",
            "Download the settings and the weights again: they do not belong together.",
        )
    if rule is not None and not marks and plain is not None and plain.dtype in _FLOATS:
        if quantization.tensors_decide:
            return None
        raise CheckpointError(
            f"{quantization.source} says that {module} is {rule.scheme.name}, but {plain.name} is"
            f" {plain.dtype} and has no scales.",
            "Download the settings and the weights again: they do not belong together.",
        )
    return rule


def tensor_names(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """The checkpoint's tensors that belong to the Linear's weight, in whatever layout; its bias is
    not among them."""
    return tuple(name for part in _PARTS if (name := f"{module}.{part}") in checkpoint.tensors)


def stored_shape(
    checkpoint: Checkpoint, quantization: Quantization, module: str
) -> tuple[int, int]:
    """[out, in] of a Linear, quantized or not, from headers alone. Raises CheckpointError."""
    rule = rule_at(checkpoint, quantization, module)
    parts = _Parts(checkpoint, quantization, module)
    if rule is None:
        return parts.matrix("weight", _FLOATS)
    return _SHAPES[quantization.layout](parts, rule)


def read_weight(
    checkpoint: Checkpoint, quantization: Quantization, module: str
) -> QuantizedWeight | None:
    """The weight of the Linear `module`; None where it is not quantized. Holds this one weight, a
    byte a code.

    Raises CheckpointError for missing, misshapen or impossible tensors (NaN, infinite or negative
    scales), and UnsupportedModel for what the settings did not tell; each names the tensor.
    """
    rule = rule_at(checkpoint, quantization, module)
    if rule is None:
        return None
    return _READERS[quantization.layout](_Parts(checkpoint, quantization, module), rule)


def logical_shapes(
    checkpoint: Checkpoint, quantization: Quantization | None
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, each quantized Linear as the floating-point weight that it stands for. Raises
    CheckpointError."""
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
    """Whether the tensors of the Linear `module` are quantized ones, by their names."""
    return any(f"{module}.{part}" in checkpoint.tensors for part in _MARKS)


def read_kv_scales(checkpoint: Checkpoint, attention: str) -> tuple[float, float] | None:
    """Scales of a quantized cache's keys and values for `attention` (model.layers.0.self_attn);
    None: there are none.

    ModelOpt writes them at k_proj and v_proj, compressed-tensors at the attention itself.
    """
    for keys, values in (
        (f"{attention}.{key}", f"{attention}.{value}") for key, value in _KV_SCALES
    ):
        if keys in checkpoint.tensors or values in checkpoint.tensors:
            return _scalar(checkpoint, keys), _scalar(checkpoint, values)
    return None


def all_kv_scales(checkpoint: Checkpoint) -> tuple[tuple[float, float], ...]:
    """read_kv_scales of every layer in order; empty where there are none."""
    attentions = {name.partition(".self_attn.")[0] for name in kv_scale_names(checkpoint)}
    ordered = sorted(attentions, key=lambda layer: int(layer.rpartition(".")[2]))
    pairs = (read_kv_scales(checkpoint, f"{layer}.self_attn") for layer in ordered)
    return tuple(pair for pair in pairs if pair is not None)


def kv_scale_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The checkpoint's tensors that are scales of a quantized cache."""
    ends = "|".join(re.escape(name) for pair in _KV_SCALES for name in pair)
    return tuple(
        name
        for name in checkpoint.tensors
        if re.search(rf"layers\.\d{{1,6}}\.self_attn\.({ends})$", name)
    )


_KV_SCALES = (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"))


# Everything that may stand beside a weight, and what of it tells that the weight is quantized
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
    """The tensors of one Linear; each is checked as it is asked for."""

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
                f" promises ({self.quantization.layout}).",
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
        """The tensor, which must have one of `shapes`; it comes in the first of them."""
        info = self.info(part, dtypes)
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            _refuse(info, f"has the shape {list(info.shape)}; expected {wanted}")
        return self.checkpoint.read(info.name).reshape(shapes[0])

    def scales(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        return _checked(f"{self.module}.{part}", self.read(part, dtypes, *shapes))

    def float8(self, part: str, shape: tuple[int, int]) -> NDArray[Any]:
        """FP8 codes; E4M3 has no infinities, and one magnitude that is no number."""
        codes = self.read(part, ("float8_e4m3fn",), shape)
        if ((codes.view(np.uint8) & 0x7F) == 0x7F).any():
            _refuse(self.info(part, ("float8_e4m3fn",)), "has values that are no numbers (NaN)")
        return codes

    def scalar(self, part: str) -> float:
        return _scalar(self.checkpoint, self.info(part, _FLOATS).name)

    def columns(self, part: str, dtypes: tuple[str, ...], rows: int) -> int:
        """How many scales a row has."""
        found = self.matrix(part, dtypes)
        if found[0] != rows:
            _refuse(self.info(part, dtypes), f"has the shape {list(found)}; expected {rows} rows")
        return found[1]

    def width(self, part: str, rule: Rule, in_features: int, count: int) -> int:
        """Weights that share a scale when `in_features` have `count` of them; must be the group
        size that was told."""
        told = rule.group_size
        width = in_features // count
        if width * count != in_features or (told is not None and width != min(told, in_features)):
            expected = f"groups of {told}" if told else "equal groups"
            raise CheckpointError(
                f"{self.module}.{part} has {count} scales a row for {in_features} inputs; "
                f"{self.quantization.source} tells of {expected}.",
                "Download the settings and the weights again: they do not belong together.",
            )
        return width


def _refuse(info: TensorInfo, fault: str) -> NoReturn:
    raise CheckpointError(
        f"tensor {info.name!r} {fault}.",
        "Download the checkpoint again, or quantize the original anew.",
    )


def _checked(name: str, scales: NDArray[Any]) -> NDArray[Any]:
    """Scales must be numbers, and not negative. Zero is a block of zeros."""
    values = scales.astype(np.float32)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(
            f"tensor {name!r} has {values[at]} at {list(at)} ({int(bad.sum())} such values); "
            "scales are finite and not negative.",
            "Download the checkpoint again, or quantize the original anew.",
        )
    return scales


def _scalar(checkpoint: Checkpoint, name: str) -> float:
    """One scale of a whole tensor, which must be above zero."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.path} has no tensor {name!r}, though its other half is there."
        )
    if info.dtype not in _FLOATS or info.shape not in ((), (1,)):
        _refuse(info, f"is {info.dtype} {list(info.shape)}; expected one floating-point number")
    value = float(checkpoint.read(name).astype(np.float32).reshape(()))
    if not 0 < value < float("inf"):
        _refuse(info, f"is {value}; a scale is a positive number")
    return value


# ModelOpt: [out, in] in `weight`, INT4 with two rows of `out` to a byte, FP4 with two columns


def _modelopt_shape(parts: _Parts, rule: Rule) -> tuple[int, int]:
    dtype, rows, columns = _MODELOPT_PACKING[rule.scheme.weight]
    stored = parts.matrix("weight", (dtype,))
    return stored[0] * rows, stored[1] * columns


# Weight type -> stored dtype, rows and columns to a byte
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
        _modelopt_codes(parts, scheme, shape),
        scales,
        block,
        global_scale=parts.scalar("weight_scale_2") if fp4 else None,
        input_scale=parts.scalar("input_scale") if needs_input else None,
        pre_quant_scale=_pre_quant_scale(parts, scheme, shape[1]),
    )


def _modelopt_codes(parts: _Parts, scheme: Scheme, shape: tuple[int, int]) -> NDArray[Any]:
    out_features, in_features = shape
    if scheme.weight == "float8_e4m3fn":
        return parts.float8("weight", shape)
    if scheme.weight == "int8":
        return parts.read("weight", ("int8",), shape)
    if scheme.weight == "float4_e2m1fn":
        packed = parts.read("weight", ("uint8",), (out_features, in_features // 2))
        return unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)
    packed = parts.read("weight", ("uint8",), (out_features // 2, in_features))
    codes = np.empty((out_features // 2, 2, in_features), np.uint8)
    codes[:, 0], codes[:, 1] = packed & 0xF, packed >> 4
    return codes.reshape(shape).view(
        ml_dtypes.int4
    )  # ml_dtypes keeps two's complement in the low nibble


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
    told = (
        rule if scheme.weight == "int4" else Rule(scheme, scheme.block)
    )  # the others have one size each
    width = parts.width(part, told, in_features, count)
    scales = parts.read(part, allowed, (out_features, count))
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return _checked(f"{parts.module}.{part}", scales), (1, width)


def _pre_quant_scale(parts: _Parts, scheme: Scheme, in_features: int) -> NDArray[np.float32] | None:
    """Zero would silence an input for good, and it is divided by where it is folded."""
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

_AWQ_ORDER = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # which of a word's eight columns stands in each nibble, lowest first


def _awq_shape(parts: _Parts, _: Rule) -> tuple[int, int]:
    in_features, words = parts.matrix("qweight", ("int32",))
    return words * 8, in_features


def _read_awq(parts: _Parts, rule: Rule) -> QuantizedWeight:
    out_features, in_features = _awq_shape(parts, rule)
    count = parts.matrix("scales", _FLOATS)[0]
    width = parts.width("scales", rule, in_features, count)
    scales = parts.scales("scales", _FLOATS, (count, out_features))
    codes = _awq_columns(parts.read("qweight", ("int32",), (in_features, out_features // 8)))
    zeros = _awq_columns(parts.read("qzeros", ("int32",), (count, out_features // 8)))
    return _integers(parts, rule, codes.T, scales.T, zeros.T, width)


def _awq_columns(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    rows, words = packed.shape
    nibbles = unpack_nibbles(packed.view(np.uint8)).reshape(rows, words, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, _AWQ_ORDER] = nibbles
    return columns.reshape(rows, words * 8)


# GPTQ: qweight int32 [in / per_word, out], qzeros int32 [groups, out / per_word], scales [groups,
# out], g_idx [in]


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
    codes = unpack_words(
        parts.read("qweight", ("int32",), (in_features // per_word, out_features)).T, bits
    )
    zeros = unpack_words(
        parts.read("qzeros", ("int32",), (count, -(-out_features // per_word))), bits
    )
    zeros = _gptq_zeros(parts, zeros[:, :out_features], bits)
    order = _input_order(parts, "g_idx", in_features, width)
    return _integers(parts, rule, codes, scales.T, zeros.T, width, order)


def _gptq_zeros(parts: _Parts, zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The first format stores them less one. What 0 became there, its readers understand as 0 or as
    2^bits."""
    offset, top = parts.quantization.zero_offset, 2**bits - 1
    if offset and (zeros == top).any():
        raise UnsupportedModel(
            f"{parts.module}.qzeros stores the zero point {top} in GPTQ's first format, where it"
            f" means 0 to some readers and {top + 1} to others.",
            "Give a checkpoint in the format gptq_v2, or a symmetric one.",
        )
    return zeros + np.uint8(offset)


def _input_order(parts: _Parts, part: str, in_features: int, width: int) -> NDArray[np.intp] | None:
    """With desc_act, the group of each input: the columns are sorted by it, so that groups are
    blocks again."""
    if not parts.has(part):
        return None
    groups = parts.read(part, ("int32", "int64"), (in_features,))
    if np.array_equal(groups, np.arange(in_features) // width):
        return None
    inside = groups.min() >= 0 and groups.max() < in_features // width
    if not inside or (np.bincount(groups) != width).any():
        _refuse(
            parts.info(part, ("int32", "int64")),
            f"does not put {width} inputs into each of its groups",
        )
    return np.argsort(groups, kind="stable")


# DeepSeek's fp8: weight float8 [out, in], weight_scale_inv one for 128 by 128 weights (it
# multiplies, despite its name)


def _fp8_shape(parts: _Parts, _: Rule) -> tuple[int, int]:
    return parts.matrix("weight", ("float8_e4m3fn",))


def _read_fp8(parts: _Parts, rule: Rule) -> QuantizedWeight:
    shape, side = _fp8_shape(parts, rule), rule.scheme.block
    scales = parts.scales("weight_scale_inv", _FLOATS, (-(-shape[0] // side), -(-shape[1] // side)))
    return QuantizedWeight(
        parts.module, rule.scheme, parts.float8("weight", shape), scales, (side, side)
    )


# compressed-tensors: packed integers have an offset of half their range; others stand in `weight`
# as they are


def _compressed_shape(parts: _Parts, rule: Rule) -> tuple[int, int]:
    if not parts.has("weight_packed"):
        return parts.matrix("weight", ("int8", "float8_e4m3fn"))
    rows, words = parts.matrix("weight_packed", ("int32",))
    out_features, in_features = (
        int(size) for size in parts.read("weight_shape", ("int64", "int32"), (2,))
    )
    per_word = 32 // rule.scheme.bits
    if (
        out_features != rows
        or not 0 < in_features <= words * per_word
        or -(-in_features // per_word) != words
    ):
        raise CheckpointError(
            f"{parts.module}.weight_shape tells of [{out_features}, {in_features}], and"
            f" weight_packed has the shape [{rows}, {words}], {per_word} weights to a word.",
            "Download the checkpoint again: its tensors do not belong together.",
        )
    return out_features, in_features


def _read_compressed(parts: _Parts, rule: Rule) -> QuantizedWeight:
    shape = _compressed_shape(parts, rule)
    if parts.has("weight_packed"):
        return _read_packed(parts, rule, shape)
    fp8 = rule.scheme.weight == "float8_e4m3fn"
    codes = parts.float8("weight", shape) if fp8 else parts.read("weight", ("int8",), shape)
    if (
        parts.has("weight_zero_point")
        and parts.checkpoint.read(f"{parts.module}.weight_zero_point").any()
    ):
        raise UnsupportedModel(
            f"{parts.module}.weight_zero_point: signed weights with a zero point."
        )
    scales, block = _compressed_scales(parts, rule.scheme, shape)
    static = rule.scheme.activations == "static tensor"
    return QuantizedWeight(
        parts.module,
        rule.scheme,
        codes,
        scales,
        block,
        input_scale=parts.scalar("input_scale") if static else None,
    )


def _compressed_scales(
    parts: _Parts, scheme: Scheme, shape: tuple[int, int]
) -> tuple[NDArray[Any], tuple[int, int]]:
    """One scale, one a row, or one a square: the tensor's shape tells; a scheme says only what is
    usual."""
    out_features, in_features = shape
    if scheme.scaling == "square":
        side = scheme.block
        return parts.scales(
            "weight_scale", _FLOATS, (-(-out_features // side), -(-in_features // side))
        ), (side, side)
    if parts.info("weight_scale", _FLOATS).shape in ((), (1,)):
        return parts.scales("weight_scale", _FLOATS, (1, 1), (), (1,)), shape
    return parts.scales("weight_scale", _FLOATS, (out_features, 1), (out_features,)), (
        1,
        in_features,
    )


def _read_packed(parts: _Parts, rule: Rule, shape: tuple[int, int]) -> QuantizedWeight:
    out_features, in_features = shape
    bits, per_word = rule.scheme.bits, 32 // rule.scheme.bits
    count = parts.columns("weight_scale", _FLOATS, out_features)
    width = parts.width("weight_scale", rule, in_features, count)
    scales = parts.scales("weight_scale", _FLOATS, (out_features, count))
    words = parts.read("weight_packed", ("int32",), (out_features, -(-in_features // per_word)))
    codes = unpack_words(words, bits)[:, :in_features]
    zeros = np.full((out_features, count), 2 ** (bits - 1), np.uint8)
    if parts.has("weight_zero_point"):
        packed = parts.read("weight_zero_point", ("int32",), (-(-out_features // per_word), count))
        zeros = unpack_words(packed.T, bits)[:, :out_features].T
    order = _input_order(parts, "weight_g_idx", in_features, width)
    return _integers(parts, rule, codes, scales, zeros, width, order)


# What these share


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [..., n] -> nibbles [..., 2n], the low one first."""
    nibbles = np.empty((*packed.shape, 2), np.uint8)
    nibbles[..., 0], nibbles[..., 1] = packed & 0xF, packed >> 4
    return nibbles.reshape(*packed.shape[:-1], -1)


def unpack_words(packed: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """int32 [rows, n] -> [rows, n * 32 / bits] of 4 or 8 bits, the lowest first."""
    stored = np.ascontiguousarray(packed).view(np.uint8)
    return unpack_nibbles(stored) if bits == 4 else stored


def _integers(
    parts: _Parts,
    rule: Rule,
    codes: NDArray[np.uint8],  # [out, in]
    scales: NDArray[Any],  # [out, groups]
    zeros: NDArray[np.uint8],  # [out, groups]
    width: int,
    order: NDArray[np.intp] | None = None,
) -> QuantizedWeight:
    """Unsigned codes and zero points; where all of these are the middle, signed codes without."""
    four, middle = rule.scheme.bits == 4, 2 ** (rule.scheme.bits - 1)
    codes = np.ascontiguousarray(codes if order is None else codes[:, order])
    points: NDArray[Any] | None = None
    if (zeros == middle).all():
        codes = codes ^ np.uint8(middle)  # code - middle, in two's complement
        dtype = ml_dtypes.int4 if four else np.int8
    else:
        dtype = ml_dtypes.uint4 if four else np.uint8
        points = np.ascontiguousarray(zeros).view(dtype)
    return QuantizedWeight(
        parts.module,
        rule.scheme,
        codes.view(dtype),
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
