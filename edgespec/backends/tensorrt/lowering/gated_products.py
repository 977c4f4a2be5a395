"""Room for the product of a gated MLP in float16, both dialects.

`activation(gate) * up` of Llama-class models goes beyond 65504 at some tokens, and `down_proj` must
read it in the compute type. So it is made smaller in float32, by a power of two, and the output of
`down_proj` larger again: no bit is lost but those of numbers far below the others. Products that
are quantized next are clipped instead, as quantizers do. Knows the form of a gated MLP. Knows no
scheme.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.rewriting import Constants, Nodes, required
from edgespec.backends.tensorrt.lowering.precision import keep_float32
from edgespec.backends.tensorrt.target import Target

SHIFT = 64.0  # products of up to 4e6
LARGEST = 65504.0  # of float16


def apply(model: ir.Model, target: Target) -> None:
    """Keep the input of each product behind a gate below what float16 holds."""
    if target.compute != "float16":
        return
    for node in [node for node in model.graph if is_gated_product(node)]:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        matmul = product_behind(node)
        if matmul is not None:
            make_smaller(matmul)
        elif len(readers) == 1:
            clip(model.graph, node, readers[0])


def is_gated_product(node: ir.Node) -> bool:
    """Whether it multiplies an activation function's value by another computed value."""
    if node.op_type != "Mul" or any(required(v).is_initializer() for v in node.inputs):
        return False
    return any(is_activation(required(value).producer()) for value in node.inputs)


def is_activation(node: ir.Node | None) -> bool:
    """Whether it is a GELU, or a SiLU: x * sigmoid(x)."""
    if node is None or node.op_type != "Mul":
        return node is not None and node.op_type == "Gelu"
    x, gate = (required(value) for value in node.inputs)
    sigmoid = gate.producer()
    return sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is x


def product_behind(node: ir.Node) -> ir.Node | None:
    """The MatMul that reads a node's output by way of moves and scales alone; None: it is
    quantized first, or read by others."""
    while True:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        if len(readers) != 1:
            return None
        (node,) = readers
        if node.op_type == "MatMul":
            return node
        scaled = node.op_type == "Mul" and required(node.inputs[1]).is_initializer()
        if not scaled and node.op_type not in ("Gather", "Reshape"):
            return None


def make_smaller(matmul: ir.Node) -> None:
    """Divide what a MatMul reads, and multiply what it makes."""
    assert isinstance(matmul.graph, ir.Graph)
    constant = Constants(matmul.graph)
    small = Nodes(matmul, constant)("Mul", required(matmul.inputs[0]), 1 / SHIFT, label="smaller")
    matmul.replace_input_with(0, small)
    made, (reader, *_) = matmul.outputs[0], (user for user, _ in matmul.outputs[0].uses())
    large = Nodes(reader, constant)("Mul", made, SHIFT, label="larger")
    grown = large.producer()
    for user, index in list(made.uses()):
        if user is not grown:
            user.replace_input_with(index, large)


def clip(graph: ir.Graph, node: ir.Node, reader: ir.Node) -> None:
    """Let what reads the product see no number beyond float16."""
    clipped = Nodes(reader, Constants(graph))(
        "Clip", node.outputs[0], -LARGEST, LARGEST, label="clipped"
    )
    made = clipped.producer()
    assert made is not None
    keep_float32(made)
    for user, index in list(node.outputs[0].uses()):
        if user is not made:
            user.replace_input_with(index, clipped)
