"""Boolean masks -> additive ones in the compute type, one for each mask input.

All layers share the result. A boolean mask that several Attention nodes share breaks builds of the
11.x line ("more than one op named attention_mask.1_iota"); a mask that is added breaks none.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.canonical_attention import canonical_attentions
from edgespec.backends.rewriting import Constants, name_outputs, require, required
from edgespec.backends.tensorrt.target import Target

# What is added to the score of a slot that a row may not see. float16 has no numbers beyond 65504,
# and a score is added to it; -inf would make NaN of a row that sees nothing.
NEVER = -30000.0


def apply(model: ir.Model, target: Target) -> None:
    """Let each Attention add `Where(mask, 0, NEVER)` [B, 1, S, C] instead of reading the mask.

    ContractError for an Attention that export does not write.
    """
    del target  # `precision` gives the constants their type
    graph = model.graph
    attentions = canonical_attentions(graph)
    masks = dict.fromkeys(required(node.inputs[3]) for node in attentions)
    additive = {mask: additive_mask(graph, mask) for mask in masks}
    for node in attentions:
        node.replace_input_with(3, additive[required(node.inputs[3])])
    for mask in masks:
        require(len(mask.uses()) == 1, attentions[0], f"{mask.name} read by attention alone")


def additive_mask(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """0 where the mask is true, NEVER where it is false; a node behind the mask's own, or in front
    of all others."""
    constant, made_by = Constants(graph), mask.producer()
    node = ir.node(
        "Where", [mask, constant.number(0.0), constant.number(NEVER)], name=f"{mask.name}/additive"
    )
    name_outputs([node])
    if made_by is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(made_by, node)
    return node.outputs[0]
