"""Quantized products as TensorRT reads them: its own operators for what standard ONNX has none for.

- mxfp8: scales that are powers of two become UINT8, the same bytes, which TRT_MXFP8DequantizeLinear
  reads; a stored scale of type E8M0 is refused by every parser
- activations that the export leaves to the backend: TRT_FP4DynamicQuantize (nvfp4) and
  TRT_MXFP8DynamicQuantize in front of the product. For a scale per token TensorRT has no operator,
  and none for products of int4 with fp8 (the compiler fails on them): there activations stay in the
  compute type, which is more exact than the format
- nvfp4: scales of scales stay float32, and the result is cast: they are too small for float16
- float16: scales that it cannot hold are refused, and not rounded to zero
- a scalar scale that several nodes read becomes one for each: the compiler crashes on shared ones

Fp8, int4 and int8 are standard ONNX; `precision` gives their scales the compute type, which the
compiler wants of int4. Both dialects. Knows quantized products. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.backends.rewriting import Constants, name_outputs, producer, require, required
from edgespec.backends.tensorrt.lowering.precision import FLOATS, TYPES, keep_float32
from edgespec.backends.tensorrt.target import Target
from edgespec.contract import ACTIVATIONS, INPUT_SCALE, KEEP_PRECISION, SCHEME
from edgespec.errors import UnsupportedModel
from edgespec.quantization.schemes import SCHEMES
from edgespec.quantization.weight_nodes import weight_nodes

DOMAIN = "trt"  # of the operators that TensorRT's parser has beside ONNX's
FP4, FP8 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN
FLOAT16_MAX = float(np.finfo(np.float16).max)
MAX_ERROR = 2.0**-8  # of a scale in float16, relative: what bfloat16 has at most
E8M0, UINT8 = ir.DataType.FLOAT8E8M0, ir.DataType.UINT8


def apply(model: ir.Model, target: Target) -> None:
    """Rewrite the quantized weights and activations of all products. UnsupportedModel for a weight
    that TensorRT's parser does not take, ContractError for a form that export does not write."""
    graph, compute = model.graph, TYPES[target.compute]
    for node in list(graph):
        if SCHEME in node.metadata_props:
            check_weight(node)
    for node in list(graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            require(len(node.inputs) == 2, node, "a symmetric format, without zero points")
        if node.op_type == "DequantizeLinear":
            dequantize(node, compute)
    for node in [node for node in graph if node.op_type == "MatMul"]:
        if ACTIVATIONS in node.metadata_props:
            quantize_input(node, compute)
        elif weight_type(node) == ir.DataType.INT4:
            keep_input(node)
    own_scales(graph)
    if target.compute == "float16":
        check_range(graph)
    if any(node.domain == DOMAIN for node in graph):
        graph.opset_imports[DOMAIN] = 1
    check(graph)


# ---- weights


def check_weight(node: ir.Node) -> None:
    """UnsupportedModel where TensorRT's parser does not take the weight of a product."""
    weight, scheme = weight_nodes(node.inputs[1]), SCHEMES.get(node.metadata_props[SCHEME])
    if weight is None or scheme is None:
        return
    scales = weight.scales.stored
    reasons = {
        "zero points": weight.zero_points is not None,
        "minimums": weight.minimums is not None,
        "scales of super-blocks": weight.scales.group > 0,
        "FP4 by powers of two": weight.values.dtype == FP4 and scales.dtype == E8M0,
        "scales of zero or below": scheme.signed_scales and not bool((scales.numpy() > 0).all()),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is not None:
        message = f"{node.name} is {scheme.name} with {found}"
        raise UnsupportedModel(
            f"{message}, which TensorRT's ONNX parser does not take",
            "Build with `backend` ort, or export the unquantized checkpoint, or one that edgespec"
            " quantize made of it.",
        )


def dequantize(node: ir.Node, compute: ir.DataType) -> None:
    """Rewrite the DequantizeLinear of a weight where its format asks for it."""
    values, scale = (required(value) for value in node.inputs)
    if scale.dtype == E8M0:
        as_bytes(scale, node)
        block, axis = (node.attributes[name].as_int() for name in ("block_size", "axis"))
        out = mxfp8_dequantized(Before(node), values, scale, axis, block, compute)
        node.outputs[0].replace_all_uses_with(out)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    elif values.dtype == FP4:
        keep_float32(node)
        keep_float32(producer(scale, "DequantizeLinear", node))


def as_bytes(scale: ir.Value, where: ir.Node) -> None:
    """Let stored powers of two be read as the bytes that they are: the exponents, plus 127."""
    stored = scale.const_value
    require(isinstance(stored, ir.ExternalTensor), where, "scales in the data file")
    assert isinstance(stored, ir.ExternalTensor)
    scale.const_value = ir.ExternalTensor(
        stored.location,
        stored.offset,
        stored.length,
        UINT8,
        shape=stored.shape,
        name=stored.name,
        base_dir=stored.base_dir,
    )
    scale.type = ir.TensorType(UINT8)


# ---- activations


def weight_type(node: ir.Node) -> ir.DataType | None:
    """The stored type of a MatMul's quantized weight; None where it is not quantized."""
    made_by = required(node.inputs[1]).producer()
    if made_by is not None and made_by.op_type == "Transpose":
        made_by = required(made_by.inputs[0]).producer()
    if made_by is None or made_by.op_type != "DequantizeLinear":
        return None
    return required(made_by.inputs[0]).dtype


def keep_input(node: ir.Node) -> None:
    """Let a MatMul read its activations as they were before they were rounded."""
    made_by = required(node.inputs[0]).producer()
    if made_by is not None and made_by.op_type == "DequantizeLinear":
        rounded = producer(required(made_by.inputs[0]), "QuantizeLinear", node)
        node.replace_input_with(0, required(rounded.inputs[0]))


def quantize_input(node: ir.Node, compute: ir.DataType) -> None:
    """Round what a MatMul reads, by TensorRT's own operator for the scheme."""
    scheme = SCHEMES.get(node.metadata_props.get(SCHEME, ""))
    require(scheme is not None, node, "a known scheme")
    assert scheme is not None
    require(
        scheme.activations == node.metadata_props[ACTIVATIONS],
        node,
        f"the activations of {scheme.name}",
    )
    if scheme.name in DYNAMIC:
        x = required(node.inputs[0])
        node.replace_input_with(0, DYNAMIC[scheme.name](node, x, scheme.block, compute))
    else:
        require(scheme.activations == "dynamic token", node, f"an operator for {scheme.name}")


def nvfp4_input(node: ir.Node, x: ir.Value, block: int, compute: ir.DataType) -> ir.Value:
    """x [B, S, in] rounded to FP4 in blocks, and dequantized by their FP8 scales and the global
    one."""
    del compute  # `precision` casts the result
    make, outer = Before(node), node.metadata_props.get(INPUT_SCALE)
    require(outer is not None, node, "the global scale of its activations")
    assert outer is not None
    step = np.array(outer, np.float32)
    values, scale = make(
        "TRT_FP4DynamicQuantize",
        [x, make.constant(f"{node.name}/x/global", step)],
        {"axis": -1, "block_size": block, "scale_type": int(FP8)},
        label="quantize",
        types=(FP4, FP8),
    )
    own = make.constant(f"{node.name}/x/global/scale", step)
    (scale,) = make("DequantizeLinear", [scale, own], {}, label="scale", types=(ir.DataType.FLOAT,))
    (dequantized,) = make(
        "DequantizeLinear",
        [values, scale],
        {"axis": -1, "block_size": block},
        label="dequantize",
        types=(ir.DataType.FLOAT,),
    )
    for value in (scale, dequantized):
        keep_float32(producer(value, "DequantizeLinear", node))
    return dequantized


def mxfp8_input(node: ir.Node, x: ir.Value, block: int, compute: ir.DataType) -> ir.Value:
    """x [B, S, in] rounded to FP8 in blocks, and dequantized by their scales, powers of two."""
    make = Before(node)
    values, scale = make(
        "TRT_MXFP8DynamicQuantize",
        [x],
        {"axis": -1, "block_size": block, "output_dtype": int(FP8)},
        label="quantize",
        types=(FP8, UINT8),
    )
    return mxfp8_dequantized(make, values, scale, -1, block, compute)


DYNAMIC: dict[str, Callable[[ir.Node, ir.Value, int, ir.DataType], ir.Value]] = {
    "nvfp4": nvfp4_input,
    "mxfp8": mxfp8_input,
}


# ---- parts of them


class Before:
    """New nodes in front of one that is there, with outputs of known types."""

    def __init__(self, node: ir.Node) -> None:
        assert node.graph is not None
        self.node, self.graph = node, node.graph
        self.constant = Constants(node.graph)

    def __call__(
        self,
        op_type: str,
        inputs: list[ir.Value],
        attributes: dict[str, Any],
        *,
        label: str,
        types: tuple[ir.DataType, ...],
    ) -> tuple[ir.Value, ...]:
        """The outputs of a new node, one for each type."""
        domain = DOMAIN if op_type.startswith("TRT_") else ""
        name = f"{self.node.name}/x/{label}"
        node = ir.node(
            op_type, inputs, attributes, domain=domain, num_outputs=len(types), name=name
        )
        name_outputs([node])
        for output, dtype in zip(node.outputs, types, strict=True):
            output.type = ir.TensorType(dtype)
        self.graph.insert_before(self.node, node)
        return tuple(node.outputs)


def mxfp8_dequantized(
    make: Before, values: ir.Value, scale: ir.Value, axis: int, block: int, compute: ir.DataType
) -> ir.Value:
    """FP8 values times their powers of two, in the compute type."""
    (dequantized,) = make(
        "TRT_MXFP8DequantizeLinear",
        [values, scale],
        {"axis": axis, "block_size": block, "output_dtype": int(compute)},
        label="dequantize",
        types=(compute,),
    )
    return dequantized


def own_scales(graph: ir.Graph) -> None:
    """Give each node that quantizes or dequantizes by a scalar constant one of its own."""
    constant = Constants(graph)
    for value in list(graph.initializers.values()):
        stored = value.const_value
        readers = [node for node, index in value.uses() if index == 1 and quantizes(node)]
        if stored is None or stored.size != 1 or len(readers) < 2:
            continue
        for count, node in enumerate(readers[1:], start=1):
            node.replace_input_with(1, constant(f"{value.name}/{count}", stored.numpy()))


def quantizes(node: ir.Node) -> bool:
    """Whether the second input of a node is a scale."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear", "TRT_FP4DynamicQuantize")


# ---- what float16 holds


def check_range(graph: ir.Graph) -> None:
    """UnsupportedModel where float16 does not hold the scales of weights or of activations. Those
    of weights that are zeros may be as small as they like."""
    for node in graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        values, scale = (required(value) for value in node.inputs[:2])
        if KEEP_PRECISION in node.metadata_props or scale.const_value is None:
            continue
        if scale.dtype not in FLOATS:
            continue
        scales = scale.const_value.numpy().astype(np.float32)
        lost = beyond = ~held(scales)
        if lost.any() and values.const_value is not None:
            stored = values.const_value.numpy().astype(np.float32)
            lost = per_value(lost, node, stored.shape) & (stored != 0)
            lost |= bool((scales > FLOAT16_MAX).any())  # of which zeros become NaN
        if lost.any():
            few = scales[beyond]
            message = f"{scale.name}: float16 does not hold scales of {few.min():.1e} to"
            remedy = "Build with `compute` bf16, or with `compute` fp32."
            raise UnsupportedModel(f"{message} {few.max():.1e}", remedy)


def held(scales: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which scales float16 has with no larger error than bfloat16."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16).astype(np.float32)
    same: NDArray[np.bool_] = np.abs(rounded - scales) <= MAX_ERROR * np.abs(scales)
    return same


def per_value(marks: NDArray[np.bool_], node: ir.Node, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Marks of scales as marks of the values that have them: of a tensor, a channel or a block."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    if marks.ndim == len(shape) and "block_size" in node.attributes:
        marks = np.repeat(marks, node.attributes["block_size"].as_int(), axis)
    elif marks.size > 1:
        marks = marks.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
    else:
        marks = marks.reshape([1] * len(shape))
    return np.broadcast_to(marks, shape)


# ---- postcondition


def check(graph: ir.Graph) -> None:
    """ContractError where a scale of a type that no parser takes, or a shared one, is left."""
    for value in graph.initializers.values():
        readers = [node for node, _ in value.uses()]
        if not readers:
            continue
        require(value.dtype != E8M0, readers[0], f"{value.name} as UINT8")
        shared = value.const_value is not None and value.const_value.size == 1
        scales = [node for node in readers if quantizes(node)]
        require(not shared or len(scales) < 2, readers[0], f"{value.name} for itself")
