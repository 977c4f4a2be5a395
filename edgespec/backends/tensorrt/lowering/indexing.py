"""Rewrites the operators that choose and place, where TensorRT's parser refuses them.

- EyeLike of a matrix with a dynamic number of rows -> the comparison of two ranges
- Compress of the sizes of a call's blocks -> the sizes that the longest call needs, as a constant

Both dialects. Knows these operators. Knows no layer.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.backends.rewriting import Constants, Nodes, count, producer, require, required
from edgespec.backends.tensorrt.target import Target

FLOAT = int(ir.DataType.FLOAT)


def apply(model: ir.Model, target: Target) -> None:
    """Replaces each EyeLike and each Compress. ContractError for a form that export does not
    write."""
    graph, constant = model.graph, Constants(model.graph)
    for node in list(graph):
        if node.op_type == "EyeLike":
            replace(node, identity_matrix(node, Nodes(node, constant, "range")))
        elif node.op_type == "Compress":
            replace(node, needed_sizes(node, constant, target.max_rows))
    left = [name for name in ("EyeLike", "Compress") if count(graph, name)]
    require(not left, graph[0], f"no {', '.join(left)} left after the rewrites")


def replace(node: ir.Node, value: ir.Value) -> None:
    """Let `value` stand for the output of a node, and remove the node."""
    node.outputs[0].replace_all_uses_with(value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def identity_matrix(node: ir.Node, make: Nodes) -> ir.Value:
    """[S, S] in float32 of the S rows of what EyeLike reads, 1 on the diagonal."""
    require(not node.attributes, node, "no attribute")
    source = required(node.inputs[0])
    size = make("Shape", source, label="size", start=0, end=1)
    rows = make("Squeeze", size, label="rows")
    zero, one = (make.constant.number(value, np.int64) for value in (0, 1))
    index = make("Range", zero, rows, one, label="index")
    row = make("Unsqueeze", index, make.constant.int64(1), label="row")
    column = make("Unsqueeze", index, make.constant.int64(0), label="column")
    return make("Cast", make("Equal", row, column, label="same"), label="itself", to=FLOAT)


def needed_sizes(node: ir.Node, constant: Constants, max_rows: int) -> ir.Value:
    """Those of the constant sizes 1, 2, 4, ... that are smaller than `max_rows`. A call of fewer
    rows has masks of zeros for what it does not need."""
    require(not node.attributes, node, "no attribute")
    stored, smaller = required(node.inputs[0]).const_value, required(node.inputs[1])
    less = producer(smaller, "Less", node)
    require(less.inputs[0] is node.inputs[0], node, "its sizes compared with a number of rows")
    require(stored is not None and stored.shape.rank() == 1, node, "constant sizes")
    assert stored is not None
    sizes: NDArray[np.int64] = stored.numpy()
    require(
        sizes.dtype == np.int64 and bool((sizes == 2 ** np.arange(len(sizes))).all()),
        node,
        "the powers of two as its sizes",
    )
    require(max_rows <= 2 * int(sizes[-1]), node, f"calls of at most {2 * int(sizes[-1])} rows")
    return constant(f"lowered/{node.name}", sizes[sizes < max_rows])
