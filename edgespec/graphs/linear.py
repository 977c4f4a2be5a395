"""One Linear, as it stands in a graph: a plain product, or standard QuantizeLinear and
DequantizeLinear around one.

Knows how a weight is stored and multiplied, and what is done to the activations before. Knows no
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.contract import ACTIVATIONS, INPUT_SCALE, KEEP_PRECISION, SCHEME
from edgespec.errors import UnsupportedModel
from edgespec.graphs.builder import DTYPES, GraphBuilder
from edgespec.graphs.packing import Packing
from edgespec.graphs.weights import WeightTable
from edgespec.quantized import dequantize_stored


def fp32(builder: GraphBuilder, value: ir.Value, name: str) -> ir.Value:
    """The value in float32; a stored half or bfloat16 goes through a Cast that every engine can
    fold."""
    if value.dtype == ir.DataType.FLOAT:
        return value
    return builder.op("Cast", value, name=f"{name}/fp32", to=int(ir.DataType.FLOAT))


def linear(
    builder: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """x [B, S, in] -> [B, S, out], for `weight`.weight stored as [out, in], with `weight`.bias
    where the table has it.

    Raises UnsupportedModel, naming the layer, for a quantized weight that has no form in the
    canonical graph.
    """
    packing = table.packing(weight)
    if packing is None:
        y = builder.op("MatMul", x, plain_weight(builder, table, weight, name), name=name)
    else:
        x = quantized_activations(builder, table, packing, x, weight, name)
        y = builder.op(
            "MatMul", x, quantized_weight(builder, table, packing, weight, name), name=name
        )
        mark(y, packing)
    if table.has(f"{weight}.bias"):
        bias = fp32(builder, table.value(builder, f"{weight}.bias"), f"{name}/bias")
        y = builder.op("Add", y, bias, name=f"{name}/add_bias")
    return y


def float32_linear(
    builder: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """The same for a Linear that nobody may round: not the checkpoint, and no build."""
    if table.packing(weight) is not None:
        what = (
            f"{weight} of {table.checkpoint.path} is quantized, and its values are too large to be"
            " rounded"
        )
        raise UnsupportedModel(
            what, "Give the original checkpoint, or one that was quantized without it."
        )
    y = builder.op("MatMul", x, plain_weight(builder, table, weight, name), name=name)
    node = y.producer()
    assert node is not None
    node.metadata_props[KEEP_PRECISION] = "true"
    return y


def plain_weight(builder: GraphBuilder, table: WeightTable, weight: str, name: str) -> ir.Value:
    """The stored layout stays: transposing is left to the build, which knows what its kernels
    want."""
    stored = fp32(builder, table.value(builder, f"{weight}.weight"), f"{name}/weight")
    return builder.op("Transpose", stored, name=f"{name}/weight/t", perm=(1, 0))


def quantized_weight(
    builder: GraphBuilder, table: WeightTable, packing: Packing, weight: str, name: str
) -> ir.Value:
    """[in, out] in float32, through DequantizeLinear."""
    if builder.feeds_weights:
        fed = builder.feed(f"{weight}.weight", dequantize_stored(packing.weight))
        return builder.op("Transpose", fed, name=f"{name}/weight/t", perm=(1, 0))
    codes = table.part(builder, weight, packing, "weight")
    scale = weight_scale(builder, table, packing, weight, name)
    attributes: dict[str, Any] = {}
    if packing.sharing != "tensor":
        attributes["axis"] = packing.axis
    if packing.block_size:
        attributes["block_size"] = packing.block_size
    if scale.dtype != ir.DataType.FLOAT:
        attributes["output_dtype"] = int(ir.DataType.FLOAT)
    dequantized = builder.op(
        "DequantizeLinear", codes, scale, name=f"{name}/weight/dequantize", **attributes
    )
    if packing.rows_are_outputs:
        dequantized = builder.op("Transpose", dequantized, name=f"{name}/weight/t", perm=(1, 0))
    return dequantized


def weight_scale(
    builder: GraphBuilder, table: WeightTable, packing: Packing, weight: str, name: str
) -> ir.Value:
    """Of nvfp4, block scales are themselves dequantized with the global one. Each Linear has
    scalars of its own: one that many nodes share brings TensorRT down."""
    if packing.sharing == "tensor":
        return builder.constant(f"{weight}.weight_scale", packing.array("weight_scale"))
    scale = table.part(builder, weight, packing, "weight_scale")
    if packing.weight.global_scale is None:
        return scale
    whole = builder.constant(
        f"{weight}.weight_global_scale", np.array(packing.weight.global_scale, np.float32)
    )
    return builder.op("DequantizeLinear", scale, whole, name=f"{name}/weight/scale")


def quantized_activations(
    builder: GraphBuilder, table: WeightTable, packing: Packing, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """What the weight multiplies: x smoothed, rounded to a static scale, and in the weight's order
    of inputs."""
    stored = packing.weight
    if stored.pre_quant_scale is not None:
        key = (x.name, stored.pre_quant_scale.tobytes())  # q, k and v often have one in common
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
    if (
        stored.input_order is not None and not builder.feeds_weights
    ):  # a fed weight is in the inputs' own order
        order = table.part(builder, weight, packing, "input_order")
        x = builder.op("Gather", x, order, name=f"{name}/x/order", axis=-1)
    return x


def mark(y: ir.Value, packing: Packing) -> None:
    """Say at the MatMul what it is, and what the backend has still to do to its activations."""
    node, stored = y.producer(), packing.weight
    assert node is not None
    node.metadata_props[SCHEME] = stored.scheme.name
    if stored.scheme.activations.startswith("dynamic"):
        node.metadata_props[ACTIVATIONS] = stored.scheme.activations
        if stored.input_scale is not None:
            node.metadata_props[INPUT_SCALE] = repr(stored.input_scale)


def products(model: ir.Model) -> Iterator[tuple[str, str | None, int | None]]:
    """Each Linear of a graph by its node's name: its scheme (None: not quantized) and its block
    (None: no blocks)."""
    for node in model.graph.all_nodes():
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        maker = weight.producer() if weight is not None else None
        while maker is not None and maker.op_type in ("Transpose", "Cast"):
            weight = maker.inputs[0]
            maker = weight.producer() if weight is not None else None
        if weight is None or not (
            weight.is_initializer() or (maker and maker.op_type == "DequantizeLinear")
        ):
            continue  # a product of two computed values
        block = maker.attributes.get("block_size") if maker is not None else None
        yield (
            node.name or "",
            node.metadata_props.get(SCHEME),
            block.as_int() if block is not None else None,
        )
