"""Puts a family's parts together: into the whole graph of a role, or into one piece of it at a
time.

The pieces let the exporter compute golden outputs layer by layer, in the memory of one layer, by
the very definitions that make the whole graph. Knows no family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from edgespec.contract import (
    INPUTS,
    GraphContract,
    GraphShape,
    Part,
    TensorSpec,
    canonical_contract,
    graph_inputs,
    memory_inputs,
    memory_outputs,
    past_names,
)
from edgespec.graphs.builder import GraphBuilder, WeightPlan
from edgespec.graphs.layers import LayerCache, StepInputs
from edgespec.graphs.weights import WeightTable

Inputs = dict[str, ir.Value]
# What a layer leaves for later calls, in the order of `contract.memory_outputs`
Memory = tuple[ir.Value, ...]


class DecoderGraph(Protocol):
    """A family's graph in three parts. `aux_layers` are the hidden_states indices that a base
    emits; empty elsewhere."""

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the graph's contract follows."""

    @property
    def table(self) -> WeightTable:
        """The weights of the graph by their own names."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of hidden_states that the graph emits, as Hugging Face counts them."""

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The residual stream [B, S, H] that the first layer reads."""

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """The residual stream [B, S, H] behind layer `index`, and what the layer leaves for later
        calls."""

    def head(
        self, b: GraphBuilder, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, ir.Value | None]:
        """Logits [B, G, V] of the gathered rows, and the state that a draft recycles."""


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A part of a graph that runs alone: a model with external weights, and its inputs by name."""

    model: ir.Model
    inputs: tuple[str, ...]


def step_inputs(inputs: Inputs, *, sliding: bool = False, local: bool = False) -> StepInputs:
    """The inputs that a layer reads of the call: the mask of layers with a window if `sliding`, the
    second rotary table if `local`."""
    rope = "local_rope" if local else "rope"
    mask = "sliding_attention_mask" if sliding else "attention_mask"
    return StepInputs(
        inputs[f"{rope}_cos"], inputs[f"{rope}_sin"], inputs[mask], inputs["write_indices"]
    )


def layer_cache(inputs: Inputs, index: int) -> LayerCache:
    """The keys and values that layer `index` has written so far."""
    return LayerCache(*(inputs[name] for name in past_names(index)))


def build_graph(graph: DecoderGraph, plan: WeightPlan) -> tuple[ir.Model, GraphContract]:
    """The canonical graph of a role, and the contract that it keeps."""
    contract = canonical_contract(graph.shape)
    b = GraphBuilder(graph.shape.role.value, plan)
    inputs = {spec.name: b.input(spec) for spec in contract.inputs}
    specs = {spec.name: spec for spec in contract.outputs}
    x, hidden_states = graph.stem(b, inputs), {}
    kept: list[tuple[TensorSpec, ir.Value]] = []
    for i in range(graph.shape.num_layers):
        hidden_states[i] = x
        x, memory = graph.layer(b, i, x, inputs)
        kept += zip(memory_outputs(graph.shape, i), memory, strict=True)
    hidden_states[graph.shape.num_layers] = x
    logits, recycled = graph.head(b, x, inputs)
    b.output(logits, specs["logits"])
    if graph.aux_layers:
        recycled = b.op(
            "Concat", *(hidden_states[t] for t in graph.aux_layers), name="taps", axis=-1
        )
    if recycled is not None:
        b.output(recycled, specs["hidden_states"])
    for spec, value in kept:
        b.output(value, spec)
    return b.model(), contract


def stem_piece(graph: DecoderGraph, plan: WeightPlan) -> GraphPart:
    """The piece inputs_embeds (and a draft's states) -> x, the input of the first layer."""
    b = GraphBuilder("stem", plan)
    inputs = inputs_of(b, graph.shape, Part.STEM)
    x = graph.stem(b, inputs)
    b.output(x, TensorSpec("x", "float32", ("B", "S", graph.shape.hidden_size)))
    return GraphPart(b.model(), tuple(inputs))


def layer_piece(graph: DecoderGraph, plan: WeightPlan, index: int) -> GraphPart:
    """The piece x, memory -> x_out, memory, of layer `index`."""
    b, shape = GraphBuilder(f"layer{index}", plan), graph.shape
    inputs = inputs_of(b, shape, Part.LAYERS)
    inputs |= {spec.name: b.input(spec) for spec in memory_inputs(shape, index)}
    x = b.input(TensorSpec("x", "float32", ("B", "S", shape.hidden_size)))
    out, memory = graph.layer(b, index, x, inputs)
    b.output(out, TensorSpec("x_out", "float32", ("B", "S", shape.hidden_size)))
    for spec, value in zip(memory_outputs(shape, index), memory, strict=True):
        b.output(value, spec)
    return GraphPart(b.model(), ("x", *inputs))


def head_piece(graph: DecoderGraph, plan: WeightPlan) -> GraphPart:
    """The piece x, gather_idx and what else the head reads -> logits (and hidden_states of a
    draft)."""
    b = GraphBuilder("head", plan)
    x = b.input(TensorSpec("x", "float32", ("B", "S", graph.shape.hidden_size)))
    inputs = inputs_of(b, graph.shape, Part.HEAD)
    if graph.shape.heads:  # whose graph gives the logits of all rows
        inputs["gather_idx"] = b.input(INPUTS["gather_idx"].spec(graph.shape))
    logits, recycled = graph.head(b, x, inputs)
    b.output(logits, TensorSpec("logits", "float32", ("B", "G", graph.shape.logits_width)))
    if recycled is not None:
        b.output(recycled, TensorSpec("hidden_states", "float32", ("B", "S", graph.shape.features)))
    return GraphPart(b.model(), ("x", *inputs))


def inputs_of(b: GraphBuilder, shape: GraphShape, part: Part) -> Inputs:
    """The inputs of a graph that one part of it reads, by name."""
    return {row.name: b.input(row.spec(shape)) for row in graph_inputs(shape) if part in row.parts}
