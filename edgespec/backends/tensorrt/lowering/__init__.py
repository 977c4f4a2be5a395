"""Lowers a canonical graph to a dialect of TensorRT: small passes in a fixed order, one a file.

Each pass is `apply(model, target)`: it rewrites the model in place and raises ContractError where
the graph has not the form that it needs, or where what it promises does not hold at its end. Knows
the order and what the whole must keep. Knows no operator.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.rewriting import require
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.lowering import (
    conditionals,
    gated_products,
    indexing,
    loops,
    masks,
    native,
    opset,
    portable,
    precision,
    quantization,
    recurrence,
)
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import Contract, GraphContract

Pass = Callable[[ir.Model, Target], None]

# Structure first; then `precision`, which gives types to what all others have made
PASSES: dict[Dialect, tuple[Pass, ...]] = {
    Dialect.NATIVE: (
        *(conditionals.apply, indexing.apply, loops.apply, recurrence.apply),
        *(native.apply, masks.apply, quantization.apply, gated_products.apply),
        precision.apply,
    ),
    Dialect.PORTABLE: (
        *(conditionals.apply, indexing.apply, loops.apply, recurrence.apply),
        *(masks.apply, portable.apply, quantization.apply, gated_products.apply),
        *(precision.apply, opset.apply),
    ),
}
DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
}


def lower(model: ir.Model, contract: GraphContract, target: Target) -> ir.Model:
    """Rewrite `model`, a canonical graph that keeps `contract`, in place; returns it.

    Its external weights stay where they are. ContractError where the graph is not one that export
    writes, or where the result does not keep `lowered_contract(contract, target)`.
    """
    lowered = lowered_contract(contract, target)
    declare(model.graph, lowered)
    for rewrite in PASSES[target.dialect]:
        rewrite(model, target)
    RemoveUnusedNodesPass()(model)
    check(model.graph, lowered)
    return model


def declare(graph: ir.Graph, lowered: Contract) -> None:
    """Give inputs and outputs the types and shapes of the lowered contract. ContractError where the
    graph has others than the contract."""
    for values, specs in ((graph.inputs, lowered.inputs), (graph.outputs, lowered.outputs)):
        names = [value.name for value in values]
        require(names == [s.name for s in specs], graph[0], f"the contract's names, not {names}")
        for value, spec in zip(values, specs, strict=True):
            value.type, value.shape = ir.TensorType(DTYPES[spec.dtype]), ir.Shape(spec.shape)


# ---- postconditions


def check(graph: ir.Graph, lowered: GraphContract) -> None:
    """ContractError where inputs and outputs are not those of the lowered contract, where control
    flow is left, or where attention reads a boolean mask."""
    for values, specs in ((graph.inputs, lowered.inputs), (graph.outputs, lowered.outputs)):
        for value, spec in zip(values, specs, strict=True):
            have, want = described(value), (spec.name, DTYPES[spec.dtype], spec.shape)
            require(have == want, graph[0], f"{want} after the rewrites, not {have}")
    for node in graph:
        require(node.op_type not in ("If", "Loop", "Scan"), node, f"no {node.op_type} left")
        boolean = any(value and value.dtype == ir.DataType.BOOL for value in node.inputs)
        require(not (boolean and node.op_type == "Attention"), node, "a mask that is added")


def described(value: ir.Value) -> tuple[object, ...]:
    """Name, type and shape of an input or output."""
    dims = () if value.shape is None else value.shape
    return (
        value.name,
        value.dtype,
        tuple(dim if isinstance(dim, int) else dim.value for dim in dims),
    )
