"""The native dialect: RotaryEmbedding, TensorScatter and Attention stay, in the form that TensorRT
10.15 and newer take.

Knows which of their inputs must not be rounded before their time. Masks are made in `masks`, types
are given in `precision`.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.canonical_attention import AttentionParts
from edgespec.backends.rewriting import producer, require, required
from edgespec.backends.tensorrt.lowering.precision import keep_float32
from edgespec.backends.tensorrt.target import Target


def apply(model: ir.Model, target: Target) -> None:
    """Rotate queries and keys in float32, and scale the queries before they are rounded.

    The parser multiplies queries and keys by the root of an Attention's scale, the whole cache
    with them: so the scale is 1.0 and the queries come scaled. What is rounded before it is rotated
    and scaled is rounded three times. ContractError for an attention that export does not write.
    """
    del target
    inputs = set(model.graph.inputs)
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        parts = AttentionParts.of(node)
        for rope in (parts.q_rope, parts.k_rope):
            require(len(rope.inputs) == 3, rope, "cos and sin of each row")
            require(set(rope.attributes) <= {"rotary_embedding_dim"}, rope, "rotated halves")
            keep_float32(rope)
        keep_float32(producer(required(node.inputs[0]), "Mul", node))
        for scatter in (parts.k_scatter, parts.v_scatter):
            require(scatter.inputs[0] in inputs, scatter, "a cache that is an input of the graph")
            require(scatter.outputs[0].is_graph_output(), scatter, "a cache that is an output")
