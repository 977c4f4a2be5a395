"""Graphs of another form than export writes: what lowering must refuse.

Knows canonical graphs. Knows no lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

Tamper = Callable[[ir.Model], None]


def first(model: ir.Model, op_type: str, part: str = "") -> ir.Node:
    """The first node of a type whose name has `part`."""
    return next(n for n in model.graph if n.op_type == op_type and part in (n.name or ""))


def set_attribute(op_type: str, name: str, value: Any) -> Tamper:
    def tamper(model: ir.Model) -> None:
        first(model, op_type).attributes[name] = ir.convenience.convert_attribute(name, value)

    return tamper


def without(op_type: str) -> Tamper:
    """Let its readers read what the first such node in front of an attention reads."""

    def tamper(model: ir.Model) -> None:
        node = first(model, op_type, "attn")
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)

    return tamper


def cache_at_slot_zero(model: ir.Model) -> None:
    node = first(model, "TensorScatter")
    zero = ir.node("Sub", [node.inputs[2], node.inputs[2]], name="tampered/zero")
    model.graph.insert_before(node, zero)
    node.replace_input_with(2, zero.outputs[0])


def cache_that_is_computed(model: ir.Model) -> None:
    node = first(model, "TensorScatter")
    twice = ir.node("Add", [node.inputs[0], node.inputs[0]], name="tampered/twice")
    model.graph.insert_before(node, twice)
    node.replace_input_with(0, twice.outputs[0])


def other_mask(model: ir.Model) -> None:
    node = first(model, "Attention")
    turned = ir.node("Not", [node.inputs[3]], name="tampered/not")
    model.graph.insert_before(node, turned)
    node.replace_input_with(3, turned.outputs[0])


def wide_table(model: ir.Model) -> None:
    """A rotation of more elements than the tables have columns for."""
    set_attribute("RotaryEmbedding", "rotary_embedding_dim", 14)(model)


def read_attention_twice(model: ir.Model) -> None:
    node = first(model, "Attention")
    model.graph.append(ir.node("Identity", [node.outputs[0]], name="tampered/identity"))


# What is changed, and what the refusal says of it
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "scale": (set_attribute("Attention", "scale", 0.5), "scale 1.0"),
    "softcap": (set_attribute("Attention", "softcap", 30.0), "no attribute but scale"),
    "no-scaling-of-q": (without("Mul"), "made by Mul"),
    "no-rope": (without("RotaryEmbedding"), "made by"),
    "interleaved-rope": (set_attribute("RotaryEmbedding", "interleaved", 1), "rotated halves"),
    "rope-beyond-its-tables": (wide_table, "tables as wide as half"),
    "no-cache": (without("TensorScatter"), "the contract.s names"),
    "cache-at-slot-zero": (cache_at_slot_zero, "write_indices as its index"),
    "cache-that-is-computed": (cache_that_is_computed, "a cache that is an input"),
    "circular-cache": (set_attribute("TensorScatter", "mode", "circular"), "mode linear"),
    "other-mask": (other_mask, "attention_mask as its mask"),
    "norm-of-rows": (set_attribute("RMSNormalization", "axis", 1), "the last axis"),
    "norm-in-float16": (set_attribute("RMSNormalization", "stash_type", 10), "float32 inside"),
}
