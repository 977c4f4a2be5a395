"""One Linear in the canonical graph: a MatMul, with QuantizeLinear and DequantizeLinear around it.

Knows how a weight is stored and multiplied, and how the activations are quantized. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.contract import ACTIVATIONS, INPUT_SCALE, KEEP_PRECISION, SCHEME
from edgespec.errors import UnsupportedModel
from edgespec.graphs.builder import DTYPES, GraphBuilder
from edgespec.graphs.packing import BlockPart, Packing
from edgespec.graphs.weights import WeightTable
from edgespec.quantization.weight_nodes import weight_nodes


def fp32(builder: GraphBuilder, value: ir.Value, name: str) -> ir.Value:
    """Returns the value in float32, through a Cast that every engine can fold."""
    if value.dtype == ir.DataType.FLOAT:
        return value
    return builder.op("Cast", value, name=f"{name}/fp32", to=int(ir.DataType.FLOAT))


def linear(
    builder: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """Returns the output [B, S, out] of a Linear for x [B, S, in].

    `weight`.weight is stored as [out, in]; `weight`.bias is added if the table has it. Raises
    UnsupportedModel that names a quantized layer that the canonical graph cannot represent.
    """
    packing = table.packing(weight)
    if packing is None:
        y = builder.op("MatMul", x, plain_weight(builder, table, weight, name), name=name)
    else:
        x = quantized_activations(builder, table, packing, x, weight, name)
        w = quantized_weight(builder, table, packing, weight, name)
        y = builder.op("MatMul", x, w, name=name)
        mark(y, packing)
    if table.has(f"{weight}.bias"):
        bias = fp32(builder, table.value(builder, f"{weight}.bias"), f"{name}/bias")
        y = builder.op("Add", y, bias, name=f"{name}/add_bias")
    return y


def float32_linear(
    builder: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """Returns the output [B, S, out] of a Linear that must stay in float32, without bias.

    Its node is marked so that no build quantizes it. Raises UnsupportedModel if the checkpoint
    quantized it.
    """
    if table.packing(weight) is not None:
        raise UnsupportedModel(
            f"{weight} of {table.checkpoint.place} is quantized, but it must keep its precision",
            "Give the original checkpoint, or one in which this layer is not quantized.",
        )
    y = builder.op("MatMul", x, plain_weight(builder, table, weight, name), name=name)
    node = y.producer()
    assert node is not None
    node.metadata_props[KEEP_PRECISION] = "true"
    return y


def plain_weight(builder: GraphBuilder, table: WeightTable, weight: str, name: str) -> ir.Value:
    """Returns the weight [in, out] in float32.

    Its stored layout [out, in] is unchanged: a build transposes as its kernels require.
    """
    stored = fp32(builder, table.value(builder, f"{weight}.weight"), f"{name}/weight")
    return builder.op("Transpose", stored, name=f"{name}/weight/t", perm=(1, 0))


def quantized_weight(
    builder: GraphBuilder, table: WeightTable, packing: Packing, weight: str, name: str
) -> ir.Value:
    """Returns the dequantized weight [in, out] in float32."""
    values = table.part(builder, weight, packing, "weight")
    scale = weight_scale(builder, table, packing, weight, name)
    inputs = [values, scale]
    if packing.has("weight_zero_point"):
        inputs.append(table.part(builder, weight, packing, "weight_zero_point"))
    attributes: dict[str, Any] = {}
    if packing.sharing != "tensor":
        attributes["axis"] = packing.axis
    if packing.block_size:
        attributes["block_size"] = packing.block_size
    if packing.weight.scales.dtype.name.startswith("float8"):
        attributes["output_dtype"] = int(ir.DataType.FLOAT)
    dequantized = builder.op(
        "DequantizeLinear", *inputs, name=f"{name}/weight/dequantize", **attributes
    )
    if packing.has("weight_minimum"):
        dequantized = less_minimums(builder, table, packing, dequantized, weight, name)
    if packing.rows_are_outputs:
        dequantized = builder.op("Transpose", dequantized, name=f"{name}/weight/t", perm=(1, 0))
    return dequantized


def weight_scale(
    builder: GraphBuilder, table: WeightTable, packing: Packing, weight: str, name: str
) -> ir.Value:
    """Returns the scales of a weight; those of nvfp4 are dequantized with the global scale, those
    of super-blocks with their factors.

    Each Linear has its own scalar constants: TensorRT crashes on one that many nodes share.
    """
    if packing.sharing == "tensor":
        return builder.constant(f"{weight}.weight_scale", packing.array("weight_scale"))
    if packing.weight.global_scale is None:
        parts: tuple[BlockPart, BlockPart] = "weight_scale", "weight_super_scale"
        return of_blocks(builder, table, packing, parts, weight, f"{name}/weight/scale")
    scale = table.part(builder, weight, packing, "weight_scale")
    global_scale = np.array(packing.weight.global_scale, np.float32)
    factor = builder.constant(f"{weight}.weight_global_scale", global_scale)
    return builder.op("DequantizeLinear", scale, factor, name=f"{name}/weight/scale")


def of_blocks(
    builder: GraphBuilder,
    table: WeightTable,
    packing: Packing,
    parts: tuple[BlockPart, BlockPart],
    weight: str,
    name: str,
) -> ir.Value:
    """Returns numbers of blocks: the first of `parts`, times the second where there is one."""
    numbers = table.part(builder, weight, packing, parts[0])
    if not packing.has(parts[1]):
        halves = numbers.dtype == ir.DataType.FLOAT16
        return fp32(builder, numbers, name) if halves else numbers
    factors = fp32(builder, table.part(builder, weight, packing, parts[1]), f"{name}/super")
    axis, block = packing.axis, packing.weight.super_block
    return builder.op("DequantizeLinear", numbers, factors, name=name, axis=axis, block_size=block)


def less_minimums(
    builder: GraphBuilder,
    table: WeightTable,
    packing: Packing,
    dequantized: ir.Value,
    weight: str,
    name: str,
) -> ir.Value:
    """Returns the weight [in, out] less the minimum of each block."""
    out_features, in_features = packing.weight.shape
    block, label = packing.block_size, f"{name}/weight/minimum"
    parts: tuple[BlockPart, BlockPart] = "weight_minimum", "weight_super_minimum"
    minimums = of_blocks(builder, table, packing, parts, weight, label)
    minimums = builder.op("Unsqueeze", minimums, builder.shape(1), name=f"{label}/repeat")
    blocks = builder.shape(in_features // block, block, out_features)
    dequantized = builder.op("Reshape", dequantized, blocks, name=f"{label}/blocks")
    less = builder.op("Sub", dequantized, minimums, name=f"{label}/less")
    whole = builder.shape(in_features, out_features)
    return builder.op("Reshape", less, whole, name=f"{label}/whole")


def quantized_activations(
    builder: GraphBuilder, table: WeightTable, packing: Packing, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """Returns the activations [B, S, in] that the weight multiplies.

    x is smoothed, quantized with a static scale, and put into the weight's order of inputs.
    """
    stored = packing.weight
    if stored.pre_quant_scale is not None:
        key = (x.name, stored.pre_quant_scale.tobytes())  # q, k and v often share one
        if key not in builder.shared:
            scale = table.part(builder, weight, packing, "pre_quant_scale")
            builder.shared[key] = builder.op("Mul", x, scale, name=f"{name}/x/smooth")
        x = builder.shared[key]
    if stored.scheme.activations == "static tensor":
        assert stored.input_scale is not None
        to = DTYPES["int8" if stored.scheme.weight == "int8" else "float8_e4m3fn"]
        step = builder.constant(f"{weight}.input_scale", np.array(stored.input_scale, np.float32))
        x = builder.op("QuantizeLinear", x, step, name=f"{name}/x/quantize", output_dtype=int(to))
        x = builder.op("DequantizeLinear", x, step, name=f"{name}/x/dequantize")
    if stored.input_order is not None:
        order = table.part(builder, weight, packing, "input_order")
        x = builder.op("Gather", x, order, name=f"{name}/x/order", axis=-1)
    return x


def mark(y: ir.Value, packing: Packing) -> None:
    """Records the scheme at the MatMul, and the activation quantization left to the backend."""
    node, stored = y.producer(), packing.weight
    assert node is not None
    node.metadata_props[SCHEME] = stored.scheme.name
    if stored.scheme.activations.startswith("dynamic"):
        node.metadata_props[ACTIVATIONS] = stored.scheme.activations
        if stored.input_scale is not None:
            node.metadata_props[INPUT_SCALE] = repr(stored.input_scale)


def products(model: ir.Model) -> Iterator[tuple[str, str | None, int | None]]:
    """Yields node name, scheme and block size of each Linear; None: not quantized, no blocks."""
    for node in model.graph.all_nodes():
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        quantized = weight_nodes(weight)
        producer = weight.producer() if weight is not None else None
        while producer is not None and producer.op_type in ("Transpose", "Cast"):
            weight = producer.inputs[0]
            producer = weight.producer() if weight is not None else None
        if weight is None or not (weight.is_initializer() or quantized):
            continue  # a product of two computed values
        block_size = quantized.block or None if quantized is not None else None
        yield node.name or "", node.metadata_props.get(SCHEME), block_size
