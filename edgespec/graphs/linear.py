"""One Linear, as it stands in a graph. Knows how a weight is stored and multiplied; the schemes of quantised weights
will have their forms here. Knows no layer."""

from __future__ import annotations

import onnx_ir as ir

from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.weights import WeightTable


def fp32(builder: GraphBuilder, value: ir.Value, name: str) -> ir.Value:
    """The value in float32; a stored half or bfloat16 goes through a Cast that every engine can fold."""
    if value.dtype == ir.DataType.FLOAT:
        return value
    return builder.op("Cast", value, name=f"{name}/fp32", to=int(ir.DataType.FLOAT))


def linear(builder: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str) -> ir.Value:
    """x [B, S, in] -> [B, S, out], for `weight`.weight stored as [out, in], with `weight`.bias where the table has it.

    The stored layout stays: transposing is left to the build, which knows what its kernels want.
    """
    stored = table.value(builder, f"{weight}.weight")
    turned = builder.op("Transpose", fp32(builder, stored, f"{name}/weight"), name=f"{name}/weight/t", perm=(1, 0))
    y = builder.op("MatMul", x, turned, name=name)
    if table.has(f"{weight}.bias"):
        bias = fp32(builder, table.value(builder, f"{weight}.bias"), f"{name}/bias")
        y = builder.op("Add", y, bias, name=f"{name}/add_bias")
    return y
