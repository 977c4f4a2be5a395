"""A block draft with memory: an engine whose cache holds what the draft made of the
base's aux hidden states at each committed position.

Knows lanes, slots and positions: committed slot i holds the context of position i, and a block
stands behind it for one call. Knows nothing of how tokens are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Call, LaneRows, Result, Runner, Table
from edgespec.rope import RopeTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
NO_TOKENS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """What the rows of a block see in one kind of layer: the context within `window`, and the block
    up to themselves where `causal`, else all of it."""

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class BlockRows:
    """One lane's part of a call: the aux hidden states of its next positions, and the tokens of a
    block behind them."""

    lane: int
    hidden_states: Floats  # [L, k*H]
    tokens: Ids  # [S]; none: no block


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What an engine says of one lane's block: the slots that draft. Views that the next call
    overwrites."""

    logits: Floats  # [D, Vd]
    states: Floats | None  # [D, H], where the engine gives the states that its lm_head reads


@dataclass
class BlockLane:
    """`length` counts the positions whose context is in the cache."""

    length: int = 0


class BlockDecoder:
    """As many sequences as the engine has lanes. `mask_specs` are those of the engine's masks, the
    first one's first; `first_slot` is the first slot of a block that drafts."""

    def __init__(
        self,
        runner: Runner,
        embedding: Table,
        rope: RopeTable,
        mask_specs: Sequence[MaskSpec],
        first_slot: int = 1,
    ) -> None:
        assert len(mask_specs) == 1 + runner.contract.shape.sliding
        self.runner, self.embedding, self.rope, self.mask_specs = (
            runner,
            embedding,
            rope,
            tuple(mask_specs),
        )
        self.first_slot = first_slot
        self.lanes = [BlockLane() for _ in range(runner.lanes)]
        self.engine_s = 0.0  # seconds spent inside the engine

    @property
    def capacity(self) -> int:
        """Rows of a lane, one a token."""
        return self.runner.capacity

    def room(self, lane: int) -> int:
        """Rows of a lane that can still be written."""
        return self.capacity - self.lanes[lane].length

    def run(self, parts: Sequence[BlockRows]) -> list[BlockOutput]:
        """One call: the context of each part is committed, its block is not.

        Lanes with fewer rows than others are filled up, and lanes between them that take no part
        run a row of nothing: what that writes lies behind their committed rows and is not
        visible.
        """
        assert all(len(p.hidden_states) + len(p.tokens) <= self.room(p.lane) for p in parts)
        of = {part.lane: part for part in parts}
        lanes = range(min(of), max(of) + 1)
        whole = [
            of.get(lane) or BlockRows(lane, parts[0].hidden_states[:0], NO_TOKENS) for lane in lanes
        ]
        call = self.call(whole)
        began = time.perf_counter()
        result = self.runner.run(call)
        self.engine_s += time.perf_counter() - began
        for part in parts:
            self.lanes[part.lane].length += len(part.hidden_states)
        return [self.output(result, part, part.lane - lanes[0]) for part in parts]

    def output(self, result: Result, part: BlockRows, row: int) -> BlockOutput:
        """What the result says of one part, which is its row `row`."""
        first, count = self.first_slot, max(0, len(part.tokens) - self.first_slot)
        states = result.hidden_states
        own = None if states is None else states[row, first : first + count]
        return BlockOutput(result.logits[row, :count], own)

    def call(self, parts: Sequence[BlockRows]) -> Call:
        """The parts of adjacent lanes as one call."""
        context = max(len(part.hidden_states) for part in parts)
        rows = max(1, *(len(part.tokens) for part in parts))
        starts = np.array([self.lanes[part.lane].length for part in parts], np.int64)
        hidden_states = np.zeros(
            (len(parts), context, self.runner.contract.shape.base_features), np.float32
        )
        tokens = np.zeros((len(parts), rows), np.int64)
        places, blocks = (
            np.zeros((len(parts), context), np.int64),
            np.zeros((len(parts), rows), np.int64),
        )
        for i, part in enumerate(parts):
            new, count = len(part.hidden_states), len(part.tokens)
            hidden_states[i, :new], tokens[i, :count] = part.hidden_states, part.tokens
            places[i, :new] = starts[i] + np.arange(new)
            blocks[i, :count] = starts[i] + new + np.arange(count)
        cos, sin = self.rope.rows(blocks)
        context_cos, context_sin = self.rope.rows(places)
        masks = [self.mask(parts, spec, context, rows) for spec in self.mask_specs]
        drafting = np.arange(self.first_slot, rows)
        gather = np.tile(drafting if drafting.size else np.zeros(1, np.int64), (len(parts), 1))
        return Call(
            self.embedding.rows(tokens),
            cos,
            sin,
            masks[0],
            starts,
            gather,
            first_lane=parts[0].lane,
            target_hidden=hidden_states,
            context_cos=context_cos,
            context_sin=context_sin,
            sliding_attention_mask=masks[1] if len(masks) > 1 else None,
        )

    def mask(self, parts: Sequence[BlockRows], spec: MaskSpec, context: int, rows: int) -> Mask:
        """[B, 1, S, T]; a row that only fills up sees itself."""
        width = max(self.lanes[part.lane].length for part in parts) + context + rows
        mask = np.zeros((len(parts), 1, rows, width), bool)
        for lane_mask, part in zip(mask[:, 0], parts, strict=True):
            start, count = self.lanes[part.lane].length, len(part.tokens)
            known, block = start + len(part.hidden_states), start + context
            lane_mask[np.arange(rows), block + np.arange(rows)] = True
            lane_mask[:count, :known] = True
            if spec.window is not None:
                distance = known + np.arange(count)[:, None] - np.arange(known)
                lane_mask[:count, :known] = distance < spec.window
            lane_mask[:count, block : block + count] = (
                np.tri(count, dtype=bool) if spec.causal else True
            )
        return mask

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence. Old rows stay in memory and are not seen."""
        self.lanes[lane] = BlockLane()
        self.runner.free(lane)

    def zero(self, lane: int) -> None:
        """Forget a lane's sequence, whose rows may hold NaN or Inf."""
        self.lanes[lane] = BlockLane()
        self.runner.zero(lane)

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """A copy of the first `count` committed rows, or of as many as there are."""
        return self.runner.read_rows(lane, min(count, self.lanes[lane].length))

    def restore(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with rows that `snapshot` took."""
        self.runner.write_rows(lane, rows)
        self.lanes[lane] = BlockLane(len(rows))

    def move(self, source: int, target: int) -> None:
        """Let a lane's sequence go on in another lane."""
        self.runner.copy_lane(source, target, self.lanes[source].length)
        self.lanes[target] = self.lanes[source]
        self.reset(source)
