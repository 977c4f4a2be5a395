"""A mixture of experts in the canonical graph (arXiv 2101.03961): a router, and every expert's MLP.

The graph is plain ONNX: all experts see all rows, and what a row did not choose is multiplied by 0.
Experts are added in their order. A backend with a kernel for it computes the chosen ones alone.
Knows the names of the tensors under a layer's `mlp`. Knows no family.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from edgespec.config import ExpertsSpec, MlpSpec
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.linear import float32_linear
from edgespec.graphs.mlp import mlp
from edgespec.graphs.weights import WeightTable


def experts(
    b: GraphBuilder, table: WeightTable, spec: MlpSpec, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """The sum [B, S, H] of the experts that the router chooses for each row of x [B, S, H], and of
    the expert that all rows take."""
    mixture = spec.experts
    assert mixture is not None
    shares = shares_of(b, mixture, *routed(b, table, mixture, x, weight, name), name)
    one = replace(spec, experts=None)
    outputs = []
    for e in range(mixture.count):
        called = f"{name}/experts/{e}"
        y = mlp(b, table, one, x, f"{weight}.experts.{e}", called)
        index = b.constant(f"expert/{e}", np.array([e], np.int64))
        share = b.op("Gather", shares, index, name=f"{called}/share", axis=-1)
        outputs.append(b.op("Mul", y, share, name=f"{called}/scaled"))
    out = b.op("Sum", *outputs, name=f"{name}/experts")
    if not mixture.shared_size:
        return out
    wide = replace(one, intermediate_size=mixture.shared_size)
    shared = shared_expert(b, table, wide, x, weight, name)
    return b.op("Add", out, shared, name=f"{name}/experts_and_shared")


def routed(
    b: GraphBuilder,
    table: WeightTable,
    spec: ExpertsSpec,
    x: ir.Value,
    weight: str,
    name: str,
) -> tuple[ir.Value, ir.Value]:
    """The weights [B, S, k] of each row's experts, the largest first, and their numbers as
    float32."""
    logits = float32_linear(b, table, x, f"{weight}.gate", f"{name}/router")
    probabilities = b.op("Softmax", logits, name=f"{name}/router/softmax", axis=-1)
    node = ir.node(
        "TopK",
        [probabilities, b.shape(spec.per_token)],
        {"axis": -1},
        num_outputs=2,
        name=f"{name}/router/top",
    )
    weights, ids = b.parts(node)
    if spec.normalized:
        axis = b.constant("last_axis", np.array([-1], np.int64))
        total = b.op("ReduceSum", weights, axis, name=f"{name}/router/total", keepdims=1)
        weights = b.op("Div", weights, total, name=f"{name}/router/normalized")
    numbers = b.op("Cast", ids, name=f"{name}/router/ids", to=int(ir.DataType.FLOAT))
    return weights, numbers


def shares_of(
    b: GraphBuilder, spec: ExpertsSpec, weights: ir.Value, numbers: ir.Value, name: str
) -> ir.Value:
    """What each expert's output is multiplied by in each row: [B, S, E], 0 where it is not
    chosen."""
    last = b.constant("last_axis", np.array([-1], np.int64))
    before_last = b.constant("axis_before_last", np.array([-2], np.int64))
    all_numbers = np.arange(spec.count, dtype=np.float32)
    every = b.constant(f"experts/{spec.count}", all_numbers)
    column = b.op("Unsqueeze", numbers, last, name=f"{name}/router/ids/column")
    chosen = b.op("Equal", column, every, name=f"{name}/router/chosen")
    ones = b.op("Cast", chosen, name=f"{name}/router/chosen/fp32", to=int(ir.DataType.FLOAT))
    row = b.op("Unsqueeze", weights, before_last, name=f"{name}/router/row")
    shares = b.op("MatMul", row, ones, name=f"{name}/router/shares")
    return b.op("Squeeze", shares, before_last, name=f"{name}/router/shares/flat")


def shared_expert(
    b: GraphBuilder, table: WeightTable, spec: MlpSpec, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """What the expert that all rows take gives, times the sigmoid of its gate."""
    y = mlp(b, table, spec, x, f"{weight}.shared_expert", f"{name}/shared")
    logit = float32_linear(b, table, x, f"{weight}.shared_expert_gate", f"{name}/shared_gate")
    gate = b.op("Sigmoid", logit, name=f"{name}/shared_gate/sigmoid")
    return b.op("Mul", y, gate, name=f"{name}/shared/gated")
