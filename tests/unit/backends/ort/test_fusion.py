"""Only what computes the same as one node becomes one. That it does is a claim of
tests/parity/test_fusion.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.backends.ort.fusion import fuse_residuals
from edgespec.contract import OPSET

WIDTH = 4


def value(name: str, array: np.ndarray | None = None) -> ir.Value:
    """An input, or with an array an initializer."""
    tensor = None if array is None else ir.tensor(array, name=name)
    shape = ir.Shape(("rows", WIDTH) if array is None else array.shape)
    return ir.Value(
        name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor
    )


def sum_and_norm(
    *, bias: bool = False, state_is_output: bool = False, norm_is_output: bool = False, **norm: Any
) -> ir.Graph:
    """y = norm(a + b) * 2, with the sum's other user beside it."""
    a, weight = value("a"), value("weight", np.ones(WIDTH, np.float32))
    b = value("b", np.ones(WIDTH, np.float32)) if bias else value("b")
    total = ir.node("Add", [a, b], name="total")
    normed = ir.node(
        "RMSNormalization", [total.outputs[0], weight], {"epsilon": 1e-6} | norm, name="norm"
    )
    end = ir.node("Add", [normed.outputs[0], normed.outputs[0]], name="end")
    also = ir.node("Neg", [total.outputs[0]], name="also")
    nodes = [total, normed, end, also]
    for node in nodes:
        node.outputs[0].name = f"{node.name}:0"
    outputs = [end.outputs[0], also.outputs[0]]
    outputs += [total.outputs[0]] * state_is_output + [normed.outputs[0]] * norm_is_output
    return ir.Graph(
        [a] if bias else [a, b],
        outputs,
        nodes=nodes,
        initializers=[weight, b] if bias else [weight],
        opset_imports={"": OPSET},
        name="residual",
    )


def operators(graph: ir.Graph) -> list[str]:
    return sorted(node.op_type for node in graph)


APART = ["Add", "Add", "Neg", "RMSNormalization"]


def test_a_sum_of_two_computed_values_is_joined_with_its_norm() -> None:
    graph = sum_and_norm()
    fuse_residuals(graph)
    assert operators(graph) == ["Add", "Neg", "SkipSimplifiedLayerNormalization"]
    joined, *users = graph
    assert [v.name for v in joined.inputs if v is not None] == ["a", "b", "weight"]
    assert joined.attributes["epsilon"].as_float() == pytest.approx(1e-6)
    read = {node.op_type: node.inputs[0] for node in users}
    assert (read["Add"], read["Neg"]) == (joined.outputs[0], joined.outputs[3])


@pytest.mark.parametrize(
    "form",
    [
        {"bias": True},  # one row for all: no residual
        {"state_is_output": True},
        {"norm_is_output": True},
        {"axis": 0},
    ],
    ids=str,
)
def test_what_would_compute_something_else_stays_apart(form: dict[str, Any]) -> None:
    graph = sum_and_norm(**form)
    fuse_residuals(graph)
    assert operators(graph) == APART
