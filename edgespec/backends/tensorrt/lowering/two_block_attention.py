"""TensorScatter and Attention as basic operators over a cache that is read and not written.

A call's rows see two blocks: the slots of the cache before `write_indices`, and the rows of the
call itself, which the canonical graph writes behind them. The scores of both stand side by side
under one softmax, so that each probability is what it would be over one cache; then each block is
mixed on its own and the two are added. No row is copied into a cache, and no key is repeated for
the heads that share it: the G query heads of a key head are G * S rows of one product.

`present_key_i` and `present_value_i` are the call's rows alone: who runs the engine copies them, or
those that were accepted, into the cache. Knows no model.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.canonical_attention import AttentionParts, check_cache, head_shape
from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    count,
    producer,
    replace_output,
    require,
    required,
)
from edgespec.backends.tensorrt.lowering.basic_ropes import END, elements
from edgespec.backends.tensorrt.lowering.float32_nodes import Float32Nodes
from edgespec.backends.tensorrt.lowering.masks import NEVER
from edgespec.backends.tensorrt.lowering.precision import keep_float32
from edgespec.backends.tensorrt.target import Target
from edgespec.contract import Kind, inputs_named


def apply(model: ir.Model, target: Target) -> None:
    """Replace every Attention and the caches that it writes. ContractError for an attention that
    export does not write, or whose mask `masks` has not made additive."""
    graph = model.graph
    blocks = BlockMasks(graph, target.capacity)
    for node in [n for n in graph if n.op_type == "Attention"]:
        replace_attention(graph, node, blocks)
    for op_type in ("Attention", "TensorScatter"):
        require(not count(graph, op_type), graph[0], f"no {op_type} left after the rewrites")


def replace_attention(graph: ir.Graph, node: ir.Node, blocks: BlockMasks) -> None:
    """One Attention, and its two caches: the mixed rows [B, N, S, D] and the new rows."""
    parts = AttentionParts.of(node)
    for scatter in (parts.k_scatter, parts.v_scatter):
        check_cache(scatter)
        require(scatter.inputs[0] in graph.inputs, scatter, "a cache that is an input of the graph")
    require(set(node.attributes) == {"scale"}, node, "no attribute but scale")
    require(node.attributes["scale"].as_float() == 1.0, node, "scale 1.0")
    make = Nodes(node, Constants(graph), "blocks")
    keep_float32(producer(required(node.inputs[0]), "Mul", node))  # the scaling of the queries
    heads, dim = heads_of(parts.q_rope, node)
    groups, _ = heads_of(parts.k_rope, node)
    require(heads % groups == 0, node, "as many query heads for each key head")
    q, mask = required(node.inputs[0]), blocks.of(node, heads // groups)
    if heads != groups:
        q = make("Reshape", q, make.constant.int64(0, groups, -1, dim), label="q/grouped")
    past = [required(scatter.inputs[0]) for scatter in (parts.k_scatter, parts.v_scatter)]
    rows = [required(scatter.inputs[1]) for scatter in (parts.k_scatter, parts.v_scatter)]
    mixed = attend(make, q, past, rows, mask, blocks.capacity)
    if heads != groups:
        mixed = make("Reshape", mixed, make.constant.int64(0, heads, -1, dim), label="out/heads")
    node.outputs[0].replace_all_uses_with(mixed)
    graph.remove(node, safe=True)
    for scatter, new in zip((parts.k_scatter, parts.v_scatter), rows, strict=True):
        replace_output(graph, scatter.outputs[0], new)
        graph.remove(scatter, safe=True)


def attend(
    make: Nodes,
    q: ir.Value,
    past: list[ir.Value],
    rows: list[ir.Value],
    mask: ir.Value,
    capacity: int,
) -> ir.Value:
    """The values mixed by the scaled queries q [B, Hkv, G*S, D]: of `past`, the keys and values
    [B, Hkv, C, D], and of `rows`, those of the call [B, Hkv, R, D], under the mask
    [B, 1, G*S, C+R]."""
    scores = [
        make("MatMul", q, make("Transpose", key, label=f"{of}/t", perm=(0, 1, 3, 2)), label=of)
        for key, of in ((past[0], "past"), (rows[0], "rows"))
    ]
    both = make("Concat", *scores, label="scores", axis=3)
    shares = make("Softmax", make("Add", both, mask, label="seen"), label="shares", axis=-1)
    sides = (((0, capacity), past[1], "past"), ((capacity, END), rows[1], "rows"))
    mixed = [
        make("MatMul", elements(make, shares, *span, f"{of}/shares"), value, label=f"{of}/mixed")
        for span, value, of in sides
    ]
    return make("Add", *mixed, label="mixed")


def heads_of(rope: ir.Node, where: ir.Node) -> tuple[int, int]:
    """(N, D) of what a RotaryEmbedding rotates."""
    transpose = producer(required(rope.inputs[0]), "Transpose", where)
    return head_shape(producer(required(transpose.inputs[0]), None, where), where)


# ---- masks


class BlockMasks:
    """The additive masks of the two blocks side by side, [B, 1, G*S, C+R], each made once: for all
    layers with the same mask and the same number of query heads to a key head."""

    def __init__(self, graph: ir.Graph, capacity: int) -> None:
        self.graph, self.capacity = graph, capacity
        self.inputs = {value.name: value for value in graph.inputs}
        self.made: dict[tuple[ir.Value, int], ir.Value] = {}

    def of(self, node: ir.Node, group: int) -> ir.Value:
        """The mask of an Attention's two blocks, for `group` query heads to a key head."""
        additive = required(node.inputs[3])
        where = producer(additive, "Where", node)
        keep_float32(where)  # scores are float32 where the mask is added to them
        name = required(where.inputs[0]).name
        require(name in inputs_named(Kind.MASK), node, "attention_mask as its mask")
        key = (additive, group)
        if key not in self.made:
            mask = self.of_blocks(node, additive)
            if group > 1:
                make = Float32Nodes(node, Constants(self.graph), "mask")
                mask = make("Concat", *[mask] * group, label="grouped", axis=2)
            self.made[key] = mask
        return self.made[key]

    def of_blocks(self, node: ir.Node, additive: ir.Value) -> ir.Value:
        """[B, 1, S, C] -> [B, 1, S, C+R]: the slots before `write_indices`, and then those from
        there on in which the canonical graph writes the call's R rows."""
        if (additive, 1) in self.made:
            return self.made[additive, 1]
        constant = Constants(self.graph)
        make, places = Float32Nodes(node, constant, "mask"), Nodes(node, constant, "mask")
        write = self.inputs["write_indices"]
        start = places("Unsqueeze", write, constant.int64(1, 2, 3), label="start")  # [B, 1, 1, 1]
        slots = np.arange(self.capacity, dtype=np.int64)
        every = constant(f"lowered/slots/{self.capacity}", slots)
        before = places("Less", every, start, label="before")
        never = constant.number(NEVER)
        past = make("Where", before, additive, never, label="past")
        index = self.rows_of(places, start)
        rows = make("GatherElements", additive, index, label="rows", axis=3)
        self.made[additive, 1] = make("Concat", past, rows, label="both", axis=3)
        return self.made[additive, 1]

    def rows_of(self, make: Nodes, start: ir.Value) -> ir.Value:
        """The slots of the call's rows, for each of the S rows that look: [B, 1, S, R]."""
        constant = make.constant
        given = [self.inputs["inputs_embeds"]]
        if "target_hidden" in self.inputs:  # a block draft writes the rows of its context first
            given.append(self.inputs["target_hidden"])
        counts = [make("Shape", x, label=f"{x.name}/rows", start=1, end=2) for x in given]
        total = counts[0] if len(counts) == 1 else make("Add", *counts, label="rows/total")
        count = make("Squeeze", total, label="rows/count")
        zero, one = (constant.number(number, np.int64) for number in (0, 1))
        order = make("Range", zero, count, one, label="rows/order")
        slots = make("Add", order, start, label="rows/slots")  # [B, 1, 1, R]
        shape = make(
            "Concat", constant.int64(1, 1), counts[0], constant.int64(1), label="rows/of", axis=0
        )
        return make("Expand", slots, shape, label="rows/index")
