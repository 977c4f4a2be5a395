"""The nodes of a recurrent layer between its projections -> GatedDeltaNet, an operator of our own,
whose rows have the same bits in every call.

Knows the form that export writes, and the operator. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.backends.canonical_attention import head_shape
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.rewriting import (
    name_outputs,
    producer,
    replace_output,
    require,
    required,
)
from edgespec.contract import conv_names, delta_names, state_names

OPERATOR = "GatedDeltaNet"


@dataclass(frozen=True, slots=True)
class DeltaNetParts:
    """The values and sizes of one recurrent layer."""

    mixed: ir.Value  # queries, keys and values before the convolution
    gate: ir.Value
    decay: ir.Value  # as projected, and so is the rate
    rate: ir.Value
    taps: ir.Value  # [K, C]
    speed: ir.Value
    bias: ir.Value
    norm: ir.Node
    gated: ir.Node  # makes the output [B, S, Hv * dv]
    solve: ir.Node  # the Loop within
    q_unit: ir.Node
    k_unit: ir.Node
    num_key_heads: int
    num_value_heads: int

    @classmethod
    def of(cls, rows: ir.Node) -> DeltaNetParts:
        """The parts of the layer that gives these rows. ContractError where they are not as export
        writes them."""
        require(rows.op_type == "Concat" and len(rows.inputs) == 3, rows, "rows of three parts")
        keys, updates, decays = (required(value) for value in rows.inputs)
        k_unit = maker(rows, keys, "Reshape", "RMSNormalization")
        qkv = maker(rows, required(k_unit.inputs[0]), "Reshape", "Split")
        convolved = producer(required(qkv.inputs[0]), "Mul", rows)
        total = producer(silu_input(rows, convolved), "Sum", rows)
        own = producer(required(maker(rows, decays, "MatMul").inputs[1]), "Mul", rows)
        biased = maker(rows, required(own.inputs[0]), "Softplus", "Add")
        learnt = maker(rows, updates, "Reshape", "Transpose", "MatMul")
        error = producer(required(learnt.inputs[1]), "Mul", rows)
        beta = maker(rows, required(error.inputs[1]), "Unsqueeze", "Transpose", "Sigmoid")
        seen = reader(rows, learnt.outputs[0], "MatMul")
        norm = reader(rows, seen.outputs[0], "Add", "Transpose", "RMSNormalization")
        gated = reader(rows, norm.outputs[0], "Reshape", "Mul")
        silu = producer(required(gated.inputs[1]), "Mul", rows)
        q_unit = reader(rows, qkv.outputs[0], "Reshape", "RMSNormalization")
        values = reader(rows, qkv.outputs[2], "Reshape")
        return cls(
            mixed=required(producer(required(total.inputs[0]), "Mul", rows).inputs[0]),
            gate=silu_input(rows, silu),
            decay=required(biased.inputs[0]),
            rate=required(beta.inputs[0]),
            taps=taps_of(rows, total),
            speed=required(own.inputs[1]),
            bias=required(biased.inputs[1]),
            norm=norm,
            gated=gated,
            solve=producer(required(learnt.inputs[0]), "Loop", rows),
            q_unit=q_unit,
            k_unit=k_unit,
            num_key_heads=head_shape(k_unit, rows)[0],
            num_value_heads=head_shape(values, rows)[0],
        )


def maker(where: ir.Node, value: ir.Value, *op_types: str) -> ir.Node:
    """The last of the nodes of these types that lead to a value, each by its first input."""
    node = producer(value, op_types[0], where)
    for op_type in op_types[1:]:
        node = producer(required(node.inputs[0]), op_type, where)
    return node


def reader(where: ir.Node, value: ir.Value, *op_types: str) -> ir.Node:
    """The last of the nodes of these types that follow a value; of each type one reads it, and
    nodes of other types may too."""
    for op_type in op_types:
        readers = [node for node, _ in value.uses() if node.op_type == op_type]
        require(len(readers) == 1, where, f"{value.name} read by one {op_type}")
        value, node = readers[0].outputs[0], readers[0]
    return node


def silu_input(where: ir.Node, product: ir.Node) -> ir.Value:
    """What a product is the SiLU of."""
    x, sigmoid = (required(value) for value in product.inputs)
    node = producer(sigmoid, "Sigmoid", where)
    require(node.inputs[0] is x, where, "SiLU")
    return x


def taps_of(where: ir.Node, total: ir.Node) -> ir.Value:
    """The weight [K, C] of the convolution that adds up products, the row itself last."""
    products = [producer(required(value), "Mul", where) for value in total.inputs]
    split = producer(required(products[0].inputs[1]), "Split", where)
    taps = [product.inputs[1] for product in products]
    require(taps == list(reversed(split.outputs)), where, "a tap for each row that is convolved")
    return required(split.inputs[0])


def take_delta_nets(graph: ir.Graph) -> None:
    """Replace what recurrent layers are made of by GatedDeltaNet."""
    outputs = {value.name: value for value in graph.outputs}
    layers = [i for i in range(len(outputs)) if delta_names(i)[1] in outputs]
    if layers:
        graph.opset_imports[DOMAIN] = 1
    for layer in layers:
        replace_layer(graph, layer)


def replace_layer(graph: ir.Graph, layer: int) -> None:
    """Replace the nodes of one layer."""
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    (conv, _), (state, present), (taken, left) = (
        names(layer) for names in (conv_names, state_names, delta_names)
    )
    rows = outputs[left].producer()
    assert rows is not None
    parts = DeltaNetParts.of(rows)
    node = ir.node(
        OPERATOR,
        [
            parts.mixed,
            parts.gate,
            parts.decay,
            parts.rate,
            *(inputs[name] for name in ("tree_mask", conv, state, taken)),
            parts.taps,
            parts.speed,
            parts.bias,
            parts.norm.inputs[1],
        ],
        {
            "num_key_heads": parts.num_key_heads,
            "num_value_heads": parts.num_value_heads,
            "unit_epsilon": parts.k_unit.attributes["epsilon"].as_float(),
            "q_scale": scale_of(parts.q_unit),
            "k_scale": scale_of(parts.k_unit),
            "norm_epsilon": parts.norm.attributes["epsilon"].as_float(),
        },
        domain=DOMAIN,
        num_outputs=3,
        name=f"{parts.gated.name}/delta_net",
    )
    name_outputs([node])
    graph.insert_before(parts.gated, node)
    out, new_state, new_rows = node.outputs
    parts.gated.outputs[0].replace_all_uses_with(out)
    replace_output(graph, outputs[present], new_state)
    replace_output(graph, outputs[left], new_rows)
    read_nothing(parts.solve)


def read_nothing(loop: ir.Node) -> None:
    """Let the body of a Loop that is to be removed read nothing, so that what it reads of the graph
    around it is unused too."""
    for node in loop.attributes["body"].as_graph():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def scale_of(unit: ir.Node) -> float:
    """The length that a norm gives, the same for each element."""
    values = required(unit.inputs[1]).const_value
    require(values is not None and values.size > 0, unit, "a constant length")
    assert values is not None
    elements = values.numpy()
    require(bool((elements == elements[0]).all()), unit, "one length for all elements")
    return float(elements[0])
