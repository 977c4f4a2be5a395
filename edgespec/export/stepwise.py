"""Runs a canonical graph without writing it: one piece after the other, each with its weights.

A complete model runs in the memory, and on the disk, of one layer or of lm_head. All passes run
through a piece while it is loaded. Knows the pieces that `graphs.assembly` makes of a graph; each
pass starts with an empty cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts.atomic import writing
from edgespec.config import DecoderConfig
from edgespec.contract import INPUTS, Kind, graph_inputs, inputs_named
from edgespec.export.golden import empty_memory
from edgespec.export.pieces import OpenPiece, open_piece
from edgespec.export.writer import PaddedFile, place_weights
from edgespec.graphs.assembly import DecoderGraph, GraphPart, head_piece, layer_piece, stem_piece
from edgespec.graphs.builder import WeightPlan
from edgespec.rope import RopeTable, rotations

Array = NDArray[Any]
Feeds = dict[str, Array]
WEIGHTS = "weights"
HEAD_ROWS = 64  # through lm_head at a time: the logits of a large vocabulary need much memory
# (pass, gathered rows [1, G], their logits [1, G, V], states of all rows [1, S, H]) -> logits
Correct = Callable[[int, NDArray[np.int64], Array, Array | None], Array]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The outputs of one pass."""

    best: NDArray[np.int64]  # [G], the argmax token of each gathered row
    # [S, H] by layer: the residual stream before it; the last index is after all layers
    streams: dict[int, Array]
    state: Array | None  # [S, H], the hidden states that the head emits, if it does
    finite: bool = True  # no logit is NaN or Inf


def run_stepwise(
    graph: DecoderGraph,
    passes: Sequence[Feeds],
    keep: Collection[int] = (),
    done: Callable[[], None] = lambda: None,
    correct: Correct | None = None,
) -> list[PassOutput]:
    """Runs passes of one sequence each, and keeps the residual streams of the layers `keep`.
    `correct` changes the logits of gathered rows before the best token of each is taken.

    Calls `done` after each of the graph's num_layers + 2 pieces. Raises OutputError if the
    temporary directory has no space for the weights of a layer.
    """
    num_layers = graph.shape.num_layers
    streams: list[dict[int, Array]] = [{} for _ in passes]
    with TemporaryDirectory() as name, writing(Path(name)):
        place = Path(name)
        xs = through(lambda plan: stem_piece(graph, plan), "x", passes, place)
        done()
        for layer in range(num_layers):
            keep_streams(streams, xs, layer, keep)
            fed = [f | memory(graph, layer, f) | {"x": x} for f, x in zip(passes, xs, strict=True)]
            xs = through(lambda plan, i=layer: layer_piece(graph, plan, i), "x_out", fed, place)  # type: ignore[misc]
            done()
        keep_streams(streams, xs, num_layers, keep)
        heads = through_head(graph, passes, xs, place, correct)
        done()
    return [
        PassOutput(best, kept, state, finite)
        for (best, state, finite), kept in zip(heads, streams, strict=True)
    ]


def through(
    make: Callable[[WeightPlan], GraphPart], output: str, passes: Sequence[Feeds], place: Path
) -> list[Array]:
    """Returns one output of a piece for each pass.

    The outputs are copies, because an output of a session keeps the session's memory alive.
    """
    piece = opened(make, place)
    return [piece.run([output], [feeds])[0][0].copy() for feeds in passes]


def opened(make: Callable[[WeightPlan], GraphPart], place: Path) -> OpenPiece:
    """Returns a piece that runs; its weights replace those of the piece before on disk."""
    plan = WeightPlan(WEIGHTS)
    piece = make(plan)
    (place / WEIGHTS).unlink(missing_ok=True)
    with (place / WEIGHTS).open("wb") as file:
        place_weights(plan, PaddedFile(file))
    return open_piece(piece, place)


def memory(graph: DecoderGraph, layer: int, feeds: Feeds) -> Feeds:
    """Returns the empty cache inputs of a layer for the capacity of the attention mask, and the
    defaults of inputs that a pass does not give."""
    inputs = empty_memory(graph.shape, layer, feeds["attention_mask"].shape[-1])
    sizes = {"B": 1, "S": feeds["inputs_embeds"].shape[1]}
    for row in graph_inputs(graph.shape):
        if row.default is not None and row.name not in feeds:
            dims = row.spec(graph.shape).dims(**sizes)
            inputs[row.name] = np.full(dims, row.default, np.float32)
    return inputs


def keep_streams(
    streams: list[dict[int, Array]], xs: list[Array], layer: int, keep: Collection[int]
) -> None:
    """Keeps the residual streams [S, H] before a layer, if it is in `keep`."""
    if layer in keep:
        for kept, x in zip(streams, xs, strict=True):
            kept[layer] = x[0]


def through_head(
    graph: DecoderGraph,
    passes: Sequence[Feeds],
    xs: Sequence[Array],
    place: Path,
    correct: Correct | None = None,
) -> list[tuple[NDArray[np.int64], Array | None, bool]]:
    """Returns the argmax token of each gathered row, the emitted hidden states, and whether all
    logits are finite, per pass."""
    piece = opened(lambda plan: head_piece(graph, plan), place)
    outputs = []
    for number, (feeds, x) in enumerate(zip(passes, xs, strict=True)):
        best, state, finite = [], None, True
        for start in range(0, feeds["gather_idx"].shape[1], HEAD_ROWS):
            rows = feeds["gather_idx"][:, start : start + HEAD_ROWS]
            fed = {**feeds, "x": x, "gather_idx": rows}
            ((logits, *emitted),) = piece.run(piece.outputs, [fed])
            if correct is not None:
                logits = correct(number, rows, logits, emitted[0] if emitted else None)
            best.append(logits[0].argmax(-1))
            finite = finite and bool(np.isfinite(logits).all())
            state = emitted[0][0].copy() if emitted else None
        outputs.append((np.concatenate(best), state, finite))
    return outputs


def causal_feeds(
    embeds: Array, layers: DecoderConfig, positions: NDArray[np.int64] | None = None
) -> Feeds:
    """Returns the inputs of a causal pass over one sequence of embeddings [S, H].

    All rows go through lm_head. Includes all masks and rotary tables of the decoder `layers`.
    `positions` [S] or [S, 3] are those of the rotary tables, below S.
    """
    count = len(embeds)
    positions = np.arange(count) if positions is None else positions
    behind = np.arange(count)[:, None] - np.arange(count)
    masks = [(behind >= 0) & (behind < (window or count)) for window in layers.windows]
    tables = [RopeTable.of(rope, count) for rope in layers.ropes]
    names = inputs_named(Kind.MASK)
    return {
        "inputs_embeds": embeds[None],
        **rotations(INPUTS.values(), tables, {"S": positions[None]}),
        **{name: mask[None, None] for name, mask in zip(names, masks, strict=False)},
        "write_indices": np.zeros(1, np.int64),
        "gather_idx": np.arange(count)[None],
        "tree_mask": (behind >= 0)[None],
    }
