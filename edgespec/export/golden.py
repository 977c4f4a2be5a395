"""Golden inputs and outputs: a short prompt and a small tree through the canonical graph.

A device whose memory cannot hold the canonical graph compares its engine with these. Knows the
pieces that `graphs.assembly` makes of a graph, and runs them one by one: memory stays near one
layer (or lm_head) as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.config import RopeConfig
from edgespec.contract import (
    INPUTS,
    GraphShape,
    Kind,
    graph_inputs,
    memory_inputs,
    memory_outputs,
)
from edgespec.export.pieces import open_piece
from edgespec.graphs.assembly import DecoderGraph, head_piece, layer_piece, stem_piece
from edgespec.graphs.builder import WeightPlan
from edgespec.rope import RopeTable, rotations

PROMPT_TOKENS = 12
# Parents are not always the row before: an engine that runs the tree as a chain must fail
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3)
BLOCK_ROWS = len(TREE_PARENTS)
NEW_CONTEXT = 3  # context rows between the two blocks of a block draft
GOLDEN_WINDOW = 4  # tokens visible in the sliding-window mask, if there is one
Array = NDArray[Any]


@dataclass(frozen=True)
class GoldenPass:
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
    passes, capacity = passes_of(graph.shape, embed, ropes, vocab_size)
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
    shape: GraphShape,
    embed: Callable[[Array], Array],
    ropes: Sequence[RopeConfig],
    vocab_size: int,
) -> tuple[tuple[GoldenPass, GoldenPass], int]:
    """Returns the passes over the prompt and over the tree, and the slots of the cache."""
    capacity = PROMPT_TOKENS + len(TREE_PARENTS) + (NEW_CONTEXT if shape.block else 0)
    tables = [RopeTable.golden(rope, capacity) for rope in ropes]
    calls = block_calls if shape.block else prompt_and_tree
    rng = np.random.default_rng(0)
    prompt, tree = (
        GoldenPass(feeds_of(shape, call, embed, tables, rng))
        for call in calls(vocab_size, capacity)
    )
    return (prompt, tree), capacity


@dataclass(frozen=True)
class GoldenCall:
    """What a pass is made of: S tokens at their positions from a slot on, which attend to what each
    of `masks` [S, C] says, by the order of the graph's masks; of a block draft, L positions of
    context."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    start: int
    masks: tuple[NDArray[np.bool_], ...]
    context: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def feeds_of(
    shape: GraphShape,
    call: GoldenCall,
    embed: Callable[[Array], Array],
    tables: Sequence[RopeTable],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns the inputs of a pass, random where they are rows or hidden states: a draft reads the
    base's in the prompt and its own in the tree."""
    rows, masks, first = len(call.ids), iter(call.masks), call.start == 0
    sizes = {"B": 1, "S": rows, "L": len(call.context)}
    sizes |= {"S_base": rows * first, "S_draft": rows * (not first)}
    positions = {"S": call.positions[None], "L": call.context[None]}
    gathered = np.arange(rows, dtype=np.int64)[None]
    feeds: dict[str, Array] = {"gather_idx": gathered}
    if not shape.heads:
        seen = call.masks[0][None, :, call.start : call.start + rows]
        feeds |= {
            "ids": call.ids,
            "positions": call.positions,
            "inputs_embeds": embed(call.ids)[None],
        }
        feeds |= {"write_indices": np.array([call.start], np.int64), "tree_mask": seen}
        feeds |= rotations(INPUTS.values(), tables, positions)
    if shape.block:
        feeds["context_positions"] = call.context
    for row in graph_inputs(shape):
        if row.name in feeds:
            continue
        if row.kind is Kind.MASK:
            feeds[row.name] = next(masks)[None, None]
        elif row.kind is Kind.FLAG:
            feeds[row.name] = np.array(first)
        else:
            feeds[row.name] = rng.standard_normal(row.spec(shape).dims(**sizes), np.float32)
    return feeds


def keep_aux_layers(
    graph: DecoderGraph, layer: int, passes: tuple[GoldenPass, GoldenPass], streams: list[Array]
) -> None:
    """Keeps hidden_states[layer], the input of layer `layer`, if it is an aux layer.

    The last index is the output of the last layer.
    """
    if layer in graph.aux_layers:
        for p, x in zip(passes, streams, strict=True):
            p.aux_layers[layer] = x.copy()  # an output of a session keeps its memory alive


def prompt_and_tree(vocab_size: int, capacity: int) -> Iterator[GoldenCall]:
    """Yields the calls over the prompt and over the tree."""
    depths = tree_mask(TREE_PARENTS).sum(1) - 1
    places = np.concatenate([np.arange(PROMPT_TOKENS), PROMPT_TOKENS + depths])
    mask = prompt_and_tree_mask(capacity)
    near = mask & (places[:, None] - places < GOLDEN_WINDOW)
    for start, ids in zip((0, PROMPT_TOKENS), golden_ids(vocab_size), strict=True):
        rows = slice(start, start + len(ids))
        yield GoldenCall(ids, places[rows], start, (mask[rows], near[rows]))


def prompt_and_tree_mask(capacity: int) -> NDArray[np.bool_]:
    """What each row sees [C, C]: the prompt is causal; a tree node sees the prompt and its path."""
    mask = np.zeros((capacity, capacity), bool)
    mask[:PROMPT_TOKENS, :PROMPT_TOKENS] = np.tri(PROMPT_TOKENS, dtype=bool)
    mask[PROMPT_TOKENS:, :PROMPT_TOKENS] = True
    mask[PROMPT_TOKENS:, PROMPT_TOKENS:] = tree_mask(TREE_PARENTS)
    return mask


def block_calls(vocab_size: int, capacity: int) -> Iterator[GoldenCall]:
    """Yields the calls over the two blocks of a block draft."""
    _, ids = golden_ids(vocab_size)
    for start, count in ((0, PROMPT_TOKENS), (PROMPT_TOKENS, NEW_CONTEXT)):
        end = start + count
        every, near = np.zeros((2, BLOCK_ROWS, capacity), bool)
        every[:, : end + BLOCK_ROWS] = True
        near[:, end - GOLDEN_WINDOW : end] = True
        near[:, end : end + BLOCK_ROWS] = np.tri(BLOCK_ROWS, dtype=bool)
        context, positions = start + np.arange(count), end + np.arange(BLOCK_ROWS)
        yield GoldenCall(ids, positions, start, (every, near), context)


def run_layer(
    graph: DecoderGraph,
    plan: WeightPlan,
    directory: Path,
    layer: int,
    passes: tuple[GoldenPass, GoldenPass],
    streams: list[Array],
    capacity: int,
) -> list[Array]:
    """Runs one layer on both passes in turn. Returns its outputs [1, S, H]."""
    names = [spec.name for spec in memory_outputs(graph.shape, layer)]

    def carry(outputs: dict[str, Array]) -> dict[str, Array]:
        """The memory that a pass leaves for the next one, once it is there."""
        if not all(name in outputs for name in names):
            return {}
        return next_memory(graph.shape, layer, [outputs[name] for name in names])

    empty = empty_memory(graph.shape, layer, capacity)
    first, second = ({"x": x, **p.feeds} for p, x in zip(passes, streams, strict=True))
    piece = open_piece(layer_piece(graph, plan, layer), directory)
    return [out for (out,) in piece.run(["x_out"], [empty | first, second], carry)]


def empty_memory(shape: GraphShape, layer: int, capacity: int) -> dict[str, Array]:
    """Returns a layer's cache inputs before the first call."""
    sizes = {"B": 1, "C": capacity, "P": 1}
    return {
        spec.name: np.zeros(spec.dims(**sizes), np.float32) for spec in memory_inputs(shape, layer)
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
    passes: tuple[GoldenPass, GoldenPass],
    streams: list[Array],
) -> dict[str, Array]:
    """Runs lm_head on both passes. Returns the arrays to store."""
    piece = open_piece(head_piece(graph, plan), directory)
    feeds = [{**p.feeds, "x": x} for p, x in zip(passes, streams, strict=True)]
    outputs = piece.run(piece.outputs, feeds)
    stored: dict[str, Array] = {}
    keep = ["ids", "positions", "context_positions"]
    keep += [row.name for row in graph_inputs(graph.shape) if row.is_stored]
    for label, p, (logits, *recycled) in zip(("prompt", "tree"), passes, outputs, strict=True):
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
