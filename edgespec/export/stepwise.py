"""Runs a canonical graph from beginning to end without writing it: one piece after the other, each
with its weights.

So a whole model runs in the memory, and on the disk, of one layer or of the head. Several passes go
through each piece while it is there. Knows the pieces that `graphs.assembly` makes of a graph; each
pass starts with nothing remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.bundle import writing
from edgespec.config import DecoderConfig
from edgespec.export.golden import empty_memory, open_piece
from edgespec.export.writer import write_weights
from edgespec.graphs.assembly import DecoderGraph, Piece, head_piece, layer_piece, stem_piece
from edgespec.graphs.builder import WeightPlan
from edgespec.rope import RopeTable

Array = NDArray[Any]
Feeds = dict[str, Array]
WEIGHTS = "weights"
HEAD_ROWS = 64  # that go through the head at a time: logits of a large vocabulary take their room


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass gave: the best token of each gathered row, the residual stream before the layers
    asked for (the last index is the one behind them all), and the state that the head emits, if it
    does.
    """

    best: NDArray[np.int64]  # [G]
    streams: dict[int, Array]  # [S, H]
    state: Array | None  # [S, H]


def run_stepwise(
    graph: DecoderGraph,
    passes: Sequence[Feeds],
    keep: Collection[int] = (),
    done: Callable[[], None] = lambda: None,
) -> list[Passed]:
    """Run passes of one sequence each; `done` is called after each of the graph's num_layers + 2
    pieces.

    Raises OutputError where the temporary directory has no room for a layer.
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
        found = through_head(graph, passes, xs, place)
        done()
    return [Passed(best, kept, state) for (best, state), kept in zip(found, streams, strict=True)]


def through(
    make: Callable[[WeightPlan], Piece], output: str, passes: Sequence[Feeds], place: Path
) -> list[Array]:
    """One output of a piece for each pass. Copies: what a session returns keeps all of its memory
    alive."""
    piece, session = opened(make, place)
    return [session.run([output], needed(piece, feeds))[0].copy() for feeds in passes]


def opened(make: Callable[[WeightPlan], Piece], place: Path) -> tuple[Piece, ort.InferenceSession]:
    """A piece, ready to run; its weights take the place of those of the piece before."""
    plan = WeightPlan(WEIGHTS)
    piece = make(plan)
    (place / WEIGHTS).unlink(missing_ok=True)
    write_weights(plan, place / WEIGHTS, lambda _: None)
    return piece, open_piece(piece, place)


def needed(piece: Piece, feeds: Feeds) -> Feeds:
    return {name: feeds[name] for name in piece.inputs} | piece.fed


def memory(graph: DecoderGraph, layer: int, feeds: Feeds) -> Feeds:
    return empty_memory(graph.shape, layer, feeds["attention_mask"].shape[-1])


def keep_streams(
    streams: list[dict[int, Array]], xs: list[Array], layer: int, keep: Collection[int]
) -> None:
    if layer in keep:
        for kept, x in zip(streams, xs, strict=True):
            kept[layer] = x[0]


def through_head(
    graph: DecoderGraph, passes: Sequence[Feeds], xs: Sequence[Array], place: Path
) -> list[tuple[NDArray[np.int64], Array | None]]:
    """The best token of each gathered row, and the state that the head emits, for each pass."""
    piece, session = opened(lambda plan: head_piece(graph, plan), place)
    found = []
    for feeds, x in zip(passes, xs, strict=True):
        best, state = [], None
        for start in range(0, feeds["gather_idx"].shape[1], HEAD_ROWS):
            rows = feeds["gather_idx"][:, start : start + HEAD_ROWS]
            logits, *emitted = session.run(None, {"x": x, "gather_idx": rows} | piece.fed)
            best.append(logits[0].argmax(-1))
            state = emitted[0][0].copy() if emitted else None
        found.append((np.concatenate(best), state))
    return found


def causal_feeds(embeds: Array, layers: DecoderConfig) -> Feeds:
    """One sequence [S, H] from its first token on, all rows through the head, for a decoder with
    such layers; what a graph with fewer masks or rotary tables does not read is there as well."""
    count = len(embeds)
    behind = np.arange(count)[:, None] - np.arange(count)
    masks = [(behind >= 0) & (behind < (window or count)) for window in layers.windows]
    rows = [RopeTable.of(r, count).rows(np.arange(count)[None]) for r in layers.ropes]
    return {
        "inputs_embeds": embeds[None],
        "rope_cos": rows[0][0],
        "rope_sin": rows[0][1],
        "attention_mask": masks[0][None, None],
        "local_rope_cos": rows[-1][0],
        "local_rope_sin": rows[-1][1],
        "sliding_attention_mask": masks[-1][None, None],
        "write_indices": np.zeros(1, np.int64),
        "gather_idx": np.arange(count)[None],
        "tree_mask": (behind >= 0)[None],
    }
