"""Norms, residuals and gates by operators of our own: as parts of the product that reads them,
which rounds their rows at once, or by themselves.

- x = norm(residual + mixed), LowBitMatMul(x) -> NormLowBitMatMul, which gives the sum as well
- x = activation(gate) * up, LowBitMatMul(x) -> GatedLowBitMatMul
- LowBitMatMul(x) + bias, behind either of them -> a part of it
- norms and gates that others read -> RmsNorm, Gate

Their rows have the same bits in every call. Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgespec.backends.ort.fusion import is_over_rows, is_residual
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.rewriting import replace_value, required

PRODUCT = "LowBitMatMul"
# As norm_gate.h numbers them
SILU, GELU_TANH, SIGMOID = range(3)


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows that nodes make of `inputs`; `total` is the Add in front of a norm."""

    node: ir.Node
    inputs: list[ir.Value | None]
    attributes: Mapping[str, Any]
    total: ir.Node | None = None


def fuse_norms(model: ir.Model) -> None:
    """Replace the norms and gates of a lowered graph, and the products that alone read one of
    them."""
    for product in [node for node in model.graph.all_nodes() if is_product(node)]:
        made = required(product.inputs[0]).producer()
        if made is None or not is_read_once(made) or made.graph is not product.graph:
            continue
        if is_norm(made):
            join(product, rows_of_norm(made), "NormLowBitMatMul")
        elif (gate := rows_of_gate(made)) is not None:
            join(product, gate, "GatedLowBitMatMul")
    for node in list(model.graph.all_nodes()):
        if is_norm(node):
            write_alone(rows_of_norm(node), "RmsNorm")
    for node in list(model.graph.all_nodes()):
        gate = rows_of_gate(node)
        if gate is not None and gate.attributes["activation"] != SIGMOID:
            write_alone(gate, "Gate")
    model.graph.sort()  # a sum stands behind its norm's weight now


# ---- what there is


def is_product(node: ir.Node) -> bool:
    """Whether it is a LowBitMatMul."""
    return node.op_type == PRODUCT and node.domain == DOMAIN


def is_norm(node: ir.Node) -> bool:
    """Whether it is an RMSNormalization of the last axis."""
    return node.op_type == "RMSNormalization" and node.domain == "" and is_over_rows(node)


def is_read_once(node: ir.Node) -> bool:
    """Whether one node alone reads the first output of this one."""
    output = node.outputs[0]
    return len(output.uses()) == 1 and not output.is_graph_output()


def rows_of_norm(norm: ir.Node) -> RowSource:
    """The rows of an RMSNormalization, with the sum in front of it if there is one."""
    x, weight = required(norm.inputs[0]), norm.inputs[1]
    attributes = {"epsilon": norm.attributes["epsilon"].as_float()}
    total = x.producer()
    if total is None or not isinstance(norm.graph, ir.Graph) or not is_residual(total, norm.graph):
        return RowSource(norm, [x, None, None, weight], attributes)
    residual, mixed = (required(value) for value in total.inputs)
    for other, one in ((residual, mixed), (mixed, residual)):
        inner = one.producer()
        if inner is not None and is_inner(inner, norm):
            inputs = [inner.inputs[0], inner.inputs[1], other, weight]
            return RowSource(norm, inputs, attributes, total)
    return RowSource(norm, [mixed, None, residual, weight], attributes, total)


def is_inner(node: ir.Node, norm: ir.Node) -> bool:
    """Whether it is a norm of what is added in front of another one, alike but for its weight."""
    return (
        is_norm(node)
        and is_read_once(node)
        and node.graph is norm.graph
        and node.attributes["epsilon"].as_float() == norm.attributes["epsilon"].as_float()
    )


def rows_of_gate(node: ir.Node) -> RowSource | None:
    """The rows of activation(gate) * up; None where a node is something else."""
    if node.op_type != "Mul" or node.domain != "":
        return None
    a, b = (required(value) for value in node.inputs)
    for active, up in ((a, b), (b, a)):
        activated = activation_of(active)
        if activated is not None and not up.is_initializer():
            activation, gate = activated
            return RowSource(node, halves(gate, up), {"activation": activation})
    return None


def activation_of(value: ir.Value) -> tuple[int, ir.Value] | None:
    """The activation function that makes a value, and of what; None where none does."""
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Sigmoid":
        return SIGMOID, required(node.inputs[0])
    approximate = node.attributes.get("approximate")
    if node.op_type == "Gelu" and approximate is not None and approximate.as_string() == "tanh":
        return GELU_TANH, required(node.inputs[0])
    if node.op_type == "Mul":
        x, y = (required(one) for one in node.inputs)
        for gate, active in ((x, y), (y, x)):
            sigmoid = active.producer()
            if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is gate:
                return SILU, gate
    return None


def halves(gate: ir.Value, up: ir.Value) -> list[ir.Value | None]:
    """The inputs of a gate: the two, or what they are the halves of."""
    split = gate.producer()
    if split is None or split.op_type != "Split" or tuple(split.outputs) != (gate, up):
        return [gate, up]
    axis, sizes = split.attributes.get("axis"), required(split.inputs[1]).const_value
    if axis is None or axis.as_int() != -1 or sizes is None or len(set(sizes.numpy().tolist())) > 1:
        return [gate, up]
    return [split.inputs[0], None]


# ---- what becomes of it


def join(product: ir.Node, rows: RowSource, operator: str) -> None:
    """Let a product make its rows itself, and add its biases."""
    biased = biased_outputs(product)
    bias = bias_of(product, biased) if biased else None
    joined = made_node(operator, [*rows.inputs, bias, *product.inputs[1:]], rows, product)
    sums = len(joined.outputs) - len(product.outputs)
    given = [add.outputs[0] for add in biased] or product.outputs
    for old, new in zip(given, joined.outputs[sums:], strict=True):
        replace_value(new, old)
    for add in biased:
        drop(add)
    if rows.total is not None:
        replace_value(joined.outputs[0], rows.total.outputs[0])
        drop(rows.total)
    elif sums:
        joined.outputs[0].name = ""
    drop(product)


def biased_outputs(product: ir.Node) -> list[ir.Node]:
    """The Adds of a bias that alone read a product's outputs; none where one has no bias."""
    adds: list[ir.Node] = []
    for output, size in zip(product.outputs, product.attributes["N"].as_ints(), strict=True):
        users = [user for user, _ in output.uses()]
        if len(users) != 1 or output.is_graph_output() or users[0].op_type != "Add":
            return []
        (add,) = users
        bias = next((value for value in add.inputs if value is not output), None)
        if bias is None or not bias.is_initializer() or bias.shape != ir.Shape((size,)):
            return []
        adds.append(add)
    return adds


def bias_of(product: ir.Node, adds: Sequence[ir.Node]) -> ir.Value:
    """The biases of all outputs of a product, one behind the other."""
    biases = [
        next(value for value in add.inputs if value is not None and value.is_initializer())
        for add in adds
    ]
    if len(biases) == 1:
        return biases[0]
    joined = ir.node("Concat", biases, {"axis": 0}, name=f"{product.name}/bias")
    joined.outputs[0].name = f"{product.name}/bias:0"
    assert isinstance(product.graph, ir.Graph)
    product.graph.insert_before(product, joined)
    return joined.outputs[0]


def write_alone(rows: RowSource, operator: str) -> None:
    """Replace nodes that make rows by one."""
    alone = made_node(operator, rows.inputs, rows, rows.node)
    replace_value(alone.outputs[0], rows.node.outputs[0])
    if rows.total is not None:
        replace_value(alone.outputs[1], rows.total.outputs[0])
        drop(rows.total)
    drop(rows.node)


def made_node(
    operator: str, inputs: Sequence[ir.Value | None], rows: RowSource, before: ir.Node
) -> ir.Node:
    """A node that makes rows, in front of what it will replace and with its attributes and name."""
    sums = operator == "NormLowBitMatMul" or rows.total is not None
    node = ir.node(
        operator,
        inputs,
        {**before.attributes, **rows.attributes} if is_product(before) else rows.attributes,
        domain=DOMAIN,
        num_outputs=len(before.outputs) + sums,
        name=before.name,
    )
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    return node


def drop(node: ir.Node) -> None:
    """Remove a node that nothing reads, and what it alone read; one may be removed already."""
    graph, makers = node.graph, [value.producer() for value in node.inputs if value is not None]
    read = any(output.uses() or output.is_graph_output() for output in node.outputs)
    if graph is None or read:
        return
    assert isinstance(graph, ir.Graph)
    graph.remove(node, safe=True)
    for maker in makers:
        if maker is not None and maker.graph is graph:
            drop(maker)
