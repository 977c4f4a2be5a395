"""Golden inputs and outputs: a short prompt and a small tree through the canonical graph.

A device whose memory cannot hold the canonical graph compares its engine with these. Knows the
pieces that `graphs.assembly` makes of a graph, and runs them one by one: memory stays near one
layer (or lm_head) as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.config import RopeConfig
from edgespec.contract import GraphShape, memory_inputs, memory_outputs
from edgespec.export.pieces import open_piece
from edgespec.graphs.assembly import DecoderGraph, head_piece, layer_piece, stem_piece
from edgespec.graphs.builder import WeightPlan
from edgespec.rope import RopeTable

PROMPT_TOKENS = 12
# Parents are not always the row before: an engine that runs the tree as a chain must fail
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3)
BLOCK_ROWS = len(TREE_PARENTS)
NEW_CONTEXT = 3  # context rows between the two blocks of a block draft
GOLDEN_WINDOW = 4  # tokens visible in the sliding-window mask, if there is one
Array = NDArray[Any]


@dataclass(frozen=True)
class Pass:
    """One call of the graph: its inputs without the cache, and its aux hidden states by layer."""

    feeds: dict[str, Array]
    aux_layers: dict[int, Array] = field(default_factory=dict)


def golden_ids(vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns token ids of the prompt [12] and of the tree [7], spread over the vocabulary."""
    total = PROMPT_TOKENS + len(TREE_PARENTS)
    ids = (np.arange(1, total + 1, dtype=np.int64) * 7919) % vocab_size
    return ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]


def tree_mask(parents: tuple[int, ...]) -> NDArray[np.bool_]:
    """Returns [N, N], True where the column is the row itself or one of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def make_golden(
    graph: DecoderGraph,
    plan: WeightPlan,
    directory: Path,
    embed: Callable[[Array], Array],
    ropes: Sequence[RopeConfig],
    vocab_size: int,
    done: Callable[[], None],
) -> dict[str, Array]:
    """Returns the inputs and outputs to store.

    `prompt_*` belong to a causal pass over an empty cache, `tree_*` to a tree after it. `ropes` are
    the rotary embeddings of the graph's tables, `embed` maps ids [S] to embeddings [S, H]; `done`
    is called after each piece. A draft reads random aux hidden states in the prompt and random
    hidden states of its own in the tree; rows of images are random. For a block draft, `prompt_*`
    is a block after the prompt's context, and `tree_*` a block after three further context rows,
    which overwrite the first block. Heads read random hidden states alone, as many rows in each
    pass.
    """
    passes, capacity = passes_of(graph, embed, ropes, vocab_size)
    stem = open_piece(stem_piece(graph, plan), directory)
    streams = [x for (x,) in stem.run(["x"], [p.feeds for p in passes])]
    done()
    for layer in range(graph.shape.num_layers):
        keep_aux_layers(graph, layer, passes, streams)
        streams = run_layer(graph, plan, directory, layer, passes, streams, capacity)
        done()
    keep_aux_layers(graph, graph.shape.num_layers, passes, streams)
    outputs = run_head(graph, plan, directory, passes, streams)
    done()
    return outputs


def passes_of(
    graph: DecoderGraph,
    embed: Callable[[Array], Array],
    ropes: Sequence[RopeConfig],
    vocab_size: int,
) -> tuple[tuple[Pass, Pass], int]:
    """Returns the passes over the prompt and over the tree, and the slots of the cache."""
    block = graph.shape.block
    capacity = PROMPT_TOKENS + len(TREE_PARENTS) + (NEW_CONTEXT if block else 0)
    if graph.shape.heads:
        return state_passes(graph), capacity
    make = block_passes if block else golden_passes
    return make(graph, embed, ropes, vocab_size, capacity), capacity


def keep_aux_layers(
    graph: DecoderGraph, layer: int, passes: tuple[Pass, Pass], streams: list[Array]
) -> None:
    """Keeps hidden_states[layer], the input of layer `layer`, if it is an aux layer.

    The last index is the output of the last layer.
    """
    if layer in graph.aux_layers:
        for p, x in zip(passes, streams, strict=True):
            p.aux_layers[layer] = x.copy()  # an output of a session keeps its memory alive


def golden_passes(
    graph: DecoderGraph,
    embed: Callable[[Array], Array],
    ropes: Sequence[RopeConfig],
    vocab_size: int,
    capacity: int,
) -> tuple[Pass, Pass]:
    """Returns the passes over the prompt and over the tree."""
    tables = [RopeTable.golden(rope, capacity) for rope in ropes]
    depths = tree_mask(TREE_PARENTS).sum(1) - 1
    places = np.concatenate([np.arange(PROMPT_TOKENS), PROMPT_TOKENS + depths])
    mask = prompt_and_tree_mask(capacity)
    near = mask & (places[:, None] - places < GOLDEN_WINDOW)
    rng = np.random.default_rng(0)

    def one(start: int, ids: Array) -> Pass:
        rows = slice(start, start + len(ids))
        cos, sin = tables[0].rows(places[None, rows])
        feeds: dict[str, Array] = {
            "ids": ids,
            "positions": places[rows],
            "inputs_embeds": embed(ids)[None],
            "rope_cos": cos,
            "rope_sin": sin,
            "attention_mask": mask[None, None, rows],
            "write_indices": np.array([start], np.int64),
            "gather_idx": np.arange(len(ids), dtype=np.int64)[None],
            "tree_mask": mask[None, rows, rows],
        }
        if graph.shape.sliding:
            feeds["sliding_attention_mask"] = near[None, None, rows]
        if graph.shape.local_rotary_dim:
            local = tables[1].rows(places[None, rows])
            feeds |= dict(zip(("local_rope_cos", "local_rope_sin"), local, strict=True))
        if width := graph.shape.deepstack_width:
            feeds["deepstack_embeds"] = rng.standard_normal((1, len(ids), width), np.float32)
        if graph.shape.reads_hidden_states:
            feeds |= hidden_feeds(graph, rng, len(ids), own=start > 0)
        return Pass(feeds)

    prompt, tree = golden_ids(vocab_size)
    return one(0, prompt), one(PROMPT_TOKENS, tree)


def prompt_and_tree_mask(capacity: int) -> NDArray[np.bool_]:
    """What each row sees [C, C]: the prompt is causal; a tree node sees the prompt and its path."""
    mask = np.zeros((capacity, capacity), bool)
    mask[:PROMPT_TOKENS, :PROMPT_TOKENS] = np.tri(PROMPT_TOKENS, dtype=bool)
    mask[PROMPT_TOKENS:, :PROMPT_TOKENS] = True
    mask[PROMPT_TOKENS:, PROMPT_TOKENS:] = tree_mask(TREE_PARENTS)
    return mask


def hidden_feeds(
    graph: DecoderGraph, rng: np.random.Generator, rows: int, *, own: bool
) -> dict[str, Array]:
    """The hidden states that a draft reads in a pass: its own, or the base's."""
    base, draft = (0, rows) if own else (rows, 0)
    return {
        "base_hidden": rng.standard_normal((1, base, graph.shape.base_features), np.float32),
        "draft_hidden": rng.standard_normal((1, draft, graph.shape.features), np.float32),
        "use_base_hidden": np.array(not own),
    }


def state_passes(graph: DecoderGraph) -> tuple[Pass, Pass]:
    """Returns the passes of heads over hidden states, which have nothing in common."""
    rng = np.random.default_rng(0)

    def one(rows: int) -> Pass:
        states = rng.standard_normal((1, rows, graph.shape.base_features), np.float32)
        return Pass({"base_hidden": states, "gather_idx": np.arange(rows, dtype=np.int64)[None]})

    return one(PROMPT_TOKENS), one(len(TREE_PARENTS))


def block_passes(
    graph: DecoderGraph,
    embed: Callable[[Array], Array],
    ropes: Sequence[RopeConfig],
    vocab_size: int,
    capacity: int,
) -> tuple[Pass, Pass]:
    """Returns the passes over the two blocks of a block draft."""
    table, rng = RopeTable.golden(ropes[0], capacity), np.random.default_rng(0)
    _, ids = golden_ids(vocab_size)
    passes = []
    for start, count in ((0, PROMPT_TOKENS), (PROMPT_TOKENS, NEW_CONTEXT)):
        end = start + count
        positions, context = end + np.arange(BLOCK_ROWS), start + np.arange(count)
        mask = np.zeros((2, BLOCK_ROWS, capacity), bool)
        mask[0, :, : end + BLOCK_ROWS] = True
        mask[1, :, end - GOLDEN_WINDOW : end] = True
        mask[1, :, end : end + BLOCK_ROWS] = np.tri(BLOCK_ROWS, dtype=bool)
        cos, sin = table.rows(positions[None])
        context_cos, context_sin = table.rows(context[None])
        feeds: dict[str, Array] = {
            "ids": ids,
            "positions": positions,
            "inputs_embeds": embed(ids)[None],
            "rope_cos": cos,
            "rope_sin": sin,
            "target_hidden": rng.standard_normal((1, count, graph.shape.base_features), np.float32),
            "context_positions": context,
            "context_cos": context_cos,
            "context_sin": context_sin,
            "attention_mask": mask[None, :1],
            "write_indices": np.array([start], np.int64),
            "gather_idx": np.arange(BLOCK_ROWS, dtype=np.int64)[None],
        }
        if graph.shape.sliding:
            feeds["sliding_attention_mask"] = mask[None, 1:]
        passes.append(Pass(feeds))
    return passes[0], passes[1]


def run_layer(
    graph: DecoderGraph,
    plan: WeightPlan,
    directory: Path,
    layer: int,
    passes: tuple[Pass, Pass],
    streams: list[Array],
    capacity: int,
) -> list[Array]:
    """Runs one layer on both passes in turn. Returns its outputs [1, S, H]."""
    names = [spec.name for spec in memory_outputs(graph.shape, layer)]

    def carry(found: dict[str, Array]) -> dict[str, Array]:
        """The memory that a pass leaves for the next one, once it is there."""
        if not all(name in found for name in names):
            return {}
        return next_memory(graph.shape, layer, [found[name] for name in names])

    empty = empty_memory(graph.shape, layer, capacity)
    first, second = ({"x": x, **p.feeds} for p, x in zip(passes, streams, strict=True))
    piece = open_piece(layer_piece(graph, plan, layer), directory)
    return [out for (out,) in piece.run(["x_out"], [empty | first, second], carry)]


def empty_memory(shape: GraphShape, layer: int, capacity: int) -> dict[str, Array]:
    """Returns a layer's cache inputs before the first call."""
    sizes = {"B": 1, "C": capacity, "P": 1}
    return {
        spec.name: np.zeros(
            [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape], np.float32
        )
        for spec in memory_inputs(shape, layer)
    }


def next_memory(shape: GraphShape, layer: int, left: list[Array]) -> dict[str, Array]:
    """Returns a layer's cache inputs after a call whose rows were all accepted.

    The convolution reads only its last inputs.
    """
    names = [spec.name for spec in memory_inputs(shape, layer)]
    if layer in shape.recurrent_layers and shape.recurrent:
        left = [left[0][:, -(shape.recurrent.conv_kernel - 1) :], *left[1:]]
    return dict(zip(names, left, strict=True))


def run_head(
    graph: DecoderGraph,
    plan: WeightPlan,
    directory: Path,
    passes: tuple[Pass, Pass],
    streams: list[Array],
) -> dict[str, Array]:
    """Runs lm_head on both passes. Returns the arrays to store."""
    piece = open_piece(head_piece(graph, plan), directory)
    feeds = [
        {"x": x, "gather_idx": p.feeds["gather_idx"]} for p, x in zip(passes, streams, strict=True)
    ]
    found = piece.run(piece.outputs, feeds)
    stored: dict[str, Array] = {}
    keep = (
        "ids",
        "positions",
        "inputs_embeds",
        "attention_mask",
        "base_hidden",
        "draft_hidden",
        "use_base_hidden",
        "target_hidden",
        "context_positions",
        "sliding_attention_mask",
        "deepstack_embeds",
    )
    for label, p, (logits, *recycled) in zip(("prompt", "tree"), passes, found, strict=True):
        if graph.aux_layers:
            recycled = [np.concatenate([p.aux_layers[t] for t in graph.aux_layers], -1)]
        stored |= {
            f"{label}_{name}": np.ascontiguousarray(p.feeds[name])
            for name in keep
            if name in p.feeds
        }
        stored[f"{label}_logits"] = logits
        if recycled:
            stored[f"{label}_hidden_states"] = recycled[0]
    return stored
