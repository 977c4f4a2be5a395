"""Measures what it costs to have some weights of a canonical graph in 4 bits, all others in
float32: the divergence of the outputs on a short text.

All is measured in one pass, layer by layer: behind each layer one more sequence runs along, whose
layer had 4 bits. Products of the same rows are one group; what a layer costs is shared out among
its groups by what each alone changes of the layer's output. Knows windows of tokens and no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import atomic
from edgespec.backends.base import Listeners
from edgespec.backends.divergence import log_softmax
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.ort.calibration import (
    LONG_S,
    STREAM,
    embedded,
    noted_on_stop,
    put_whole,
)
from edgespec.backends.ort.layerwise import (
    Floats,
    LayerwiseGraph,
    Piece,
    StoredLinear,
    causal_feeds,
)
from edgespec.quantization.bit_budget import WeightGroup
from edgespec.quantization.block_forms import FORMS, FOUR_BITS
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize
from edgespec.quantization.super_blocks import quantize_super_blocks

TOKENS = 128  # 64, 128 and 512 chose equally well on the demo base
SEQUENCES = 16  # that run at a time
SAMPLED, PARTS = 512, 8  # rows of a weight by which its formats are compared, and where they stand
RUNS = 30  # of a piece for itself: about as long takes it to round and compare its weights
EXPERTS = "experts"  # the group of those of a layer
# (name, weights [out, in]) -> those of 4 bits
Rounded = Callable[[str, Floats], QuantizedWeight]


def measured_groups(
    onnx: OnnxDir,
    windows: NDArray[np.int64],
    capacity: int,
    names: Set[str],
    rounded: Rounded,
    directory: Path,
    progress: Listeners,
    *,
    tied: bool,
) -> list[WeightGroup]:
    """The groups of the weights `names`, on the first of the windows [count, rows]. Finished layers
    are kept in `directory`, from which a later run goes on.

    `tied`: the lm_head is the embedding too. Raises OSError where the disk is full, and
    CheckpointError for weights that are no numbers.
    """
    graph = LayerwiseGraph.open(onnx)
    state = State.resumed(directory, onnx, windows[:1, :TOKENS])
    measure = Measure(onnx, capacity, names, rounded)
    atomic.keep(directory, measure)
    head, coarse = graph.head.linear, None
    if head.name in names:
        coarse = rounded(head.name, head.read())
    if coarse is not None and tied and not state.done:
        rows = [dequantize(coarse, slice(token, token + 1)) for token in windows[0, :TOKENS]]
        state.x = np.concatenate([state.x, np.stack(rows, 1)])
    progress.start(graph.num_weights)
    progress.advance(sum(piece.num_weights for piece in graph.pieces[: state.done]))
    began, first = time.monotonic(), state.done
    with noted_on_stop(directory):
        for number, piece in enumerate(graph.pieces[first:], first):
            state = measure.behind(piece, state)
            state.keep(directory)
            progress.advance(piece.num_weights)
            if number == first + 1:
                seconds = (time.monotonic() - began) * num_runs(first, len(graph.pieces))
                seconds /= num_runs(first, number + 1)
                if seconds > LONG_S:
                    progress.warn(f"measuring which weights need more bits: about {seconds:.0f} s")
        return measure.groups(graph, state, coarse, tied=tied)


def num_runs(first: int, end: int) -> int:
    """How often pieces from one to another run a sequence: those behind a piece run again."""
    return sum(number + RUNS for number in range(first, end))


@dataclass(slots=True)
class LayerChange:
    """What a layer's group of weights changes: its share of the layer's sequence, which is number
    `sequence` of the stream."""

    group: WeightGroup
    sequence: int
    share: float


@dataclass(slots=True)
class State:
    """How far the pass is: the stream [sequences, rows, H] behind `done` pieces, the exact one
    first, and what was changed in the others."""

    done: int
    x: Floats
    changes: list[LayerChange] = field(default_factory=list)

    @classmethod
    def resumed(cls, directory: Path, onnx: OnnxDir, window: NDArray[np.int64]) -> State:
        """What an earlier run kept, or the beginning."""
        if not (directory / STREAM).exists():
            return cls(0, embedded(onnx, window))
        with np.load(directory / STREAM) as stored:
            rows = json.loads(str(stored["changes"]))
            changes = [LayerChange(WeightGroup.read(group), *rest) for group, *rest in rows]
            return cls(int(stored["done"]), stored["x"], changes)

    def keep(self, directory: Path) -> None:
        """Write it whole or not at all. Raises OSError."""
        rows = [[one.group.to_dict(), one.sequence, one.share] for one in self.changes]
        changes = np.array(json.dumps(rows))
        put_whole(directory / STREAM, done=np.array(self.done), x=self.x, changes=changes)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Measure:
    """What is measured of which weights, and how they are rounded."""

    onnx: OnnxDir
    capacity: int
    names: Set[str]
    rounded: Rounded

    def behind(self, piece: Piece, state: State) -> State:
        """The state behind a piece: the sequences so far, and that of the piece itself."""
        exact = {linear.name: linear.read() for linear in piece.linears}
        groups: dict[str, list[StoredLinear]] = {}
        for linear in piece.linears:
            if linear.name in self.names:
                key = linear.x if linear.share is None else EXPERTS
                groups.setdefault(key, []).append(linear)
        x = self.run(piece, state.x, exact)
        if not groups:
            return State(state.done + 1, x, state.changes)
        inputs = piece.inputs(state.x[:1], self.feeds(state.x[:1]))
        rounded = {
            linear.name: self.rounded(linear.name, exact[linear.name])
            for some in groups.values()
            for linear in some
        }
        coarse = {name: dequantize(weight) for name, weight in rounded.items()}
        sizes = np.square(x[0]).sum(-1) + np.finfo(np.float32).tiny
        changed, found = [], []
        for some in groups.values():
            names = [linear.name for linear in some]
            moved = self.run(piece, state.x[:1], exact | {name: coarse[name] for name in names})
            changed.append(float((np.square(moved[0] - x[0]).sum(-1) / sizes).mean()))
            errors = [
                output_errors(exact[linear.name], rounded[linear.name], read_by(linear, inputs))
                for linear in some
            ]
            found.append(group_of(some, np.sum(errors, 0)))
        total, sequence = sum(changed), len(x)
        changes = [
            LayerChange(group, sequence, one / total if total else 0.0)
            for group, one in zip(found, changed, strict=True)
        ]
        x = np.concatenate([x, self.run(piece, state.x[:1], exact | coarse)])
        return State(state.done + 1, x, [*state.changes, *changes])

    def groups(
        self, graph: LayerwiseGraph, state: State, coarse: QuantizedWeight | None, *, tied: bool
    ) -> list[WeightGroup]:
        """The groups with what each costs, the lm_head among them, which is `coarse` in 4 bits."""
        head = graph.head
        rows = np.concatenate(
            [head.rows(x[None], self.feeds(x[None]))[None] for x in state.x]
        )  # [sequences, rows, H]
        exact = log_softmax(head.logits(rows[0]))

        def loss(logits: Floats) -> float:
            other = log_softmax(logits)
            return max(float((np.exp(exact) * (exact - other)).sum(-1).mean()), 0.0)

        first = int(tied and coarse is not None)
        losses = {i: loss(head.logits(rows[i])) for i in range(1 + first, len(rows))}
        found = []
        for one in state.changes:
            found.append(replace(one.group, loss=losses[one.sequence] * one.share))
        if coarse is None:
            return found
        cost = loss(
            head.logits(rows[first], lambda low, high: dequantize(coarse, slice(low, high)))
        )
        errors = output_errors(head.linear.read(), coarse, rows[0])
        return [*found, replace(group_of([head.linear], errors), loss=cost)]

    def run(self, piece: Piece, x: Floats, weights: Mapping[str, Floats]) -> Floats:
        """A piece's output for sequences, some of them at a time."""
        parts = [x[i : i + SEQUENCES] for i in range(0, len(x), SEQUENCES)]
        return np.concatenate([piece.run(part, self.feeds(part), weights) for part in parts])

    def feeds(self, x: Floats) -> Mapping[str, NDArray[np.generic]]:
        """What a call over sequences reads beside them."""
        return causal_feeds(self.onnx.config, len(x), x.shape[1], self.capacity)


def read_by(linear: StoredLinear, inputs: Mapping[str, Floats]) -> Floats:
    """The rows [N, in] that a product multiplies; of an expert those that a router sent to it."""
    rows = inputs[linear.x]
    return rows if linear.share is None else rows[inputs[linear.share][:, 0] != 0]


def group_of(linears: Sequence[StoredLinear], errors: NDArray[np.float64]) -> WeightGroup:
    """A group by the squared errors of its outputs with each of FORMS."""
    relative = errors / max(float(errors[0]), np.finfo(np.float64).tiny)
    return WeightGroup(
        tuple(linear.name for linear in linears),
        tuple(linear.shape for linear in linears),
        0.0,
        dict(zip(FORMS, relative.tolist(), strict=True)),
    )


def output_errors(exact: Floats, coarse: QuantizedWeight, x: Floats) -> NDArray[np.float64]:
    """The squared errors of a product's outputs for rows `x` [N, in] with each of FORMS, by some of
    the weight's rows; `coarse` are those of 4 bits."""
    width = max(1, SAMPLED // PARTS)
    starts = np.unique(np.linspace(0, max(len(exact) - width, 0), PARTS).astype(int))
    found = np.zeros(len(FORMS))
    for low in starts:
        rows = slice(int(low), int(low) + width)
        for number, form in enumerate(FORMS.values()):
            some = exact[rows]
            four = form is FOUR_BITS
            kept = (
                dequantize(coarse, rows) if four else dequantize(quantize_super_blocks(some, form))
            )
            found[number] += np.square(x @ (some - kept).T).sum(dtype=np.float64)
    return found * (len(exact) / (len(starts) * width))
