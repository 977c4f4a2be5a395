"""Declares the lowest opset that a graph needs: parsers that know no newer one then take it.

Basic operators are those of opset 20 or older. Weights of 4 bits need 21, those of FP4 need 23: the
operators that read them were extended then. Knows the schemas of ONNX. Knows no parser.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx import defs
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.rewriting import require
from edgespec.backends.tensorrt.target import Target

LOWEST = 20  # what TensorRT 10.0's parser, the oldest that reads these graphs, says it knows


def apply(model: ir.Model, target: Target) -> None:
    """Declare the opset. ContractError for an operator that no opset up to the graph's own has."""
    del target  # the same for each
    RemoveUnusedNodesPass()(model)  # what nobody reads needs nothing
    declared = model.graph.opset_imports[""]
    needed = [opset_of(node, declared) for node in model.graph.all_nodes() if node.domain == ""]
    model.graph.opset_imports[""] = max([LOWEST, *needed])


def opset_of(node: ir.Node, newest: int) -> int:
    """The lowest opset, from LOWEST on, whose operator has this node's inputs and attributes."""
    for opset in range(LOWEST, newest + 1):
        if defs.has(node.op_type) and fits(node, opset):
            return opset
    require(False, node, f"an operator of opset {newest} or older, not {node.op_type}")
    raise AssertionError


def fits(node: ir.Node, opset: int) -> bool:
    """Whether the node is one of the operator as this opset has it, as far as types are known."""
    try:
        schema = defs.get_schema(node.op_type, max_inclusive_version=opset)
    except defs.SchemaError:
        return False
    formal = schema.inputs
    if not set(node.attributes) <= set(schema.attributes) or len(node.inputs) > schema.max_input:
        return False
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype is None:
            continue
        types = formal[min(i, len(formal) - 1)].types
        if f"tensor({value.dtype.name.lower()})" not in types:
            return False
    return True
