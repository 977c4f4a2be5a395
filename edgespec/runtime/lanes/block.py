"""A block draft with memory: an engine whose cache holds what the draft made of the
base's aux hidden states at each committed position.

Knows lanes, slots and positions: committed slot i holds the context of position i, and a block
stands behind it for one call. Knows nothing of how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.base import Runner, Table
from edgespec.backends.call import (
    Attention,
    Call,
    HiddenStates,
    Ids,
    LaneAttention,
    Logits,
    Result,
    Value,
)
from edgespec.backends.host import stacked
from edgespec.contract import Kind, graph_inputs
from edgespec.rope import RopeTable, rotations
from edgespec.runtime.lanes.base import Lane, LaneDecoder, adjacent
from edgespec.runtime.text.prompt_value import on_all_axes

NO_TOKENS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """What the rows of a block see in one kind of layer: the context within `window`, and the block
    up to themselves where `causal`, else all of it."""

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class BlockRows:
    """One lane's part of a call: the aux hidden states of its next positions, k*H wide, and the
    tokens of a block behind them. Without `rope_positions` those of the L rows are their positions,
    moved by the lane's offset."""

    lane: int
    hidden_states: HiddenStates  # of L rows
    tokens: Ids  # [S]; none: no block
    rope_positions: Ids | None = None  # [L, 3]: time, height, width


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What an engine says of one lane's block: the slots that draft. It is valid until the next
    call."""

    logits: Logits  # [D, Vd]
    # of D rows, where the engine gives the states that its lm_head reads
    states: HiddenStates | None


class BlockLane(Lane):
    """Its rows are the positions whose context is in the cache."""

    def offset_behind(self, rope_positions: Ids | None) -> int:
        """The offset of what follows rows at the lane's next positions."""
        if rope_positions is None or not len(rope_positions):
            return self.offset
        return int(rope_positions[-1].max()) + 1 - self.length - len(rope_positions)


class BlockDecoder(LaneDecoder[BlockLane]):
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
        self.inputs = graph_inputs(runner.contract.shape)
        self.masks = graph_inputs(runner.contract.shape, Kind.MASK)
        super().__init__(runner, embedding, rope, BlockLane)
        self.mask_specs, self.first_slot = tuple(mask_specs), first_slot

    def run(self, parts: Sequence[BlockRows]) -> list[BlockOutput]:
        """One call: the context of each part is committed, its block is not.

        Lanes with fewer rows than others are filled up, and lanes between them that take no part
        run a row of nothing: what that writes lies behind their committed rows and is not
        visible.
        """
        assert all(len(p.hidden_states) + len(p.tokens) <= self.room(p.lane) for p in parts)
        nothing = parts[0].hidden_states.take(NO_TOKENS)
        whole = adjacent(parts, lambda lane: BlockRows(lane, nothing, NO_TOKENS))
        results = self.runner.run(self.call(whole))
        for part in parts:
            state = self.lanes[part.lane]
            state.offset = state.offset_behind(part.rope_positions)
            state.length += len(part.hidden_states)
        return [self.output(results[part.lane - whole[0].lane], part) for part in parts]

    def output(self, result: Result, part: BlockRows) -> BlockOutput:
        """What the result of a part's lane says of the slots that draft."""
        states = result.hidden_states
        own = None if states is None else states.take(self.drafting(part))
        return BlockOutput(result.logits, own)

    def drafting(self, part: BlockRows) -> Ids:
        """The slots of a part's block that draft."""
        return np.arange(self.first_slot, len(part.tokens))

    def call(self, parts: Sequence[BlockRows]) -> Call:
        """The parts of adjacent lanes as one call."""
        context = max(len(part.hidden_states) for part in parts)
        rows = max(1, *(len(part.tokens) for part in parts))
        starts = np.array([self.lanes[part.lane].length for part in parts], np.int64)
        tokens, blocks = (np.zeros((len(parts), rows), np.int64) for _ in range(2))
        for i, part in enumerate(parts):
            new, count, state = len(part.hidden_states), len(part.tokens), self.lanes[part.lane]
            tokens[i, :count] = part.tokens
            first = starts[i] + new + state.offset_behind(part.rope_positions)
            blocks[i, :count] = first + np.arange(count)
        positions = {"S": blocks, "L": self.context_positions(parts, context)}
        values: dict[str, Value] = {
            "inputs_embeds": self.embedding.rows(tokens),
            "target_hidden": [part.hidden_states for part in parts],
            **rotations(self.inputs, [self.rope], positions),
        }
        for mask, spec in zip(self.masks, self.mask_specs, strict=True):
            attended = [self.attended(part, spec) for part in parts]
            values[mask.name] = Attention(attended, spec.window)
        gathered = [self.drafting(part) for part in parts]
        return Call.of(values, starts, gathered, parts[0].lane)

    def context_positions(self, parts: Sequence[BlockRows], rows: int) -> Ids:
        """The rope positions of the context, filled up to `rows`: [B, L] where all have one axis,
        else [B, L, 3]."""
        positions = list[Ids]()
        for part in parts:
            state, own = self.lanes[part.lane], part.rope_positions
            if own is None:
                own = state.length + state.offset + np.arange(len(part.hidden_states))
            positions.append(own)
        if any(own.ndim > 1 for own in positions):
            positions = [on_all_axes(own) for own in positions]
        return stacked(positions, rows)

    def attended(self, part: BlockRows, spec: MaskSpec) -> LaneAttention:
        """What a lane's block sees: all of the context, and of itself what the mask says."""
        known, count = self.lanes[part.lane].length + len(part.hidden_states), len(part.tokens)
        visible = np.tri(count, dtype=bool) if spec.causal else np.ones((count, count), bool)
        return LaneAttention(known, visible, known + np.arange(count))
