"""LowBitHead, our own lm_head of 4 or 8 bits: what was asked of logits it finds while they are in
the processor's cache, and it writes those alone that are asked for in full.

Knows the node, and the graph's inputs and outputs that belong to it. Knows no model.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.ort.contract import FOUND, HEAD_ROWS, SEARCH, WRITTEN
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.rewriting import described, replace_output, required

LOGITS = "logits"


def search_logits(graph: ir.Graph) -> ir.Value | None:
    """Replace the LowBitMatMul that makes the logits by a LowBitHead. Returns its weight; None
    where another node makes them, or makes more."""
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    product = logits.producer()
    if product is None or product.op_type != "LowBitMatMul" or len(product.outputs) != 1:
        return None
    x, weight = (required(value) for value in product.inputs)
    if x.is_graph_output() or x.is_graph_input():  # it has a name of its own
        return None
    inputs = [described(ir.Value(), spec) for spec in (WRITTEN, SEARCH)]
    head = ir.node(
        "LowBitHead",
        [x, weight, *inputs],
        dict(product.attributes),
        domain=DOMAIN,
        num_outputs=1 + len(FOUND),
        name=str(product.name),
    )
    graph.insert_before(product, head)
    replace_output(graph, logits, head.outputs[0])
    graph.remove(product, safe=True)
    for value, spec in zip(head.outputs[1:], FOUND, strict=True):
        described(value, spec)
    assert logits.shape is not None
    batch, rows, _ = logits.shape.dims
    x.name, x.type = HEAD_ROWS, ir.TensorType(ir.DataType.FLOAT)
    x.shape = ir.Shape([batch, rows, head.attributes["K"].as_int()])
    graph.inputs.extend(inputs)
    graph.outputs.extend([*head.outputs[1:], x])
    return weight
