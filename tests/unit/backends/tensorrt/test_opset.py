"""The opset that a lowered graph declares, by what its nodes need."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.lowering import opset
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.errors import ContractError

TARGET = Target(dialect=Dialect.PORTABLE, compute="float16", capacity=8, max_rows=8)
INT8, INT4, FP8, FP4 = (
    ir.DataType.INT8,
    ir.DataType.INT4,
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT4E2M1,
)
HALF = ir.DataType.FLOAT16


def declared(
    op_type: str, kinds: tuple[ir.DataType, ...], attributes: Mapping[str, int] | None = None
) -> int:
    """What is declared for a graph of one node with inputs of these types."""
    inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(kind)) for i, kind in enumerate(kinds)]
    node = ir.node(op_type, inputs, dict(attributes or {}), name="node")
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=11)
    opset.apply(model, TARGET)
    return model.graph.opset_imports[""]


@pytest.mark.parametrize(
    ("op_type", "kinds", "attributes", "wanted"),
    [
        ("MatMul", (HALF, HALF), {}, 20),
        ("Concat", (HALF, HALF, HALF), {"axis": 0}, 20),
        ("DequantizeLinear", (INT8, HALF), {"axis": 0}, 20),
        ("DequantizeLinear", (FP8, HALF), {}, 20),
        ("DequantizeLinear", (INT4, HALF), {"axis": 0, "block_size": 32}, 21),
        ("DequantizeLinear", (INT8, HALF), {"axis": 0, "block_size": 32}, 21),
        ("QuantizeLinear", (HALF, HALF), {"output_dtype": int(FP8)}, 21),
        ("DequantizeLinear", (FP4, HALF), {"axis": 0, "block_size": 16}, 23),
        ("DequantizeLinear", (INT8, HALF), {"output_dtype": int(HALF)}, 23),
        ("RMSNormalization", (HALF, HALF), {}, 23),
        ("TensorScatter", (HALF, HALF, ir.DataType.INT64), {}, 24),
    ],
)
def test_the_lowest_that_has_all_of_a_node(
    op_type: str, kinds: tuple[ir.DataType, ...], attributes: Mapping[str, int], wanted: int
) -> None:
    assert declared(op_type, kinds, attributes) == wanted


def test_an_operator_of_no_opset_is_refused() -> None:
    with pytest.raises(ContractError, match="not Unheard"):
        declared("Unheard", (HALF,))
