"""A decoder with memory: an engine, its embedding and rotary tables, and how much of each lane is
committed.

Knows lanes, slots and positions: a lane is the KV cache of one sequence; its committed slot i holds
position i, and behind the committed slots stand scratch rows that are kept or dropped. Knows
nothing of how tokens are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Call, LaneRows, Runner, Table
from edgespec.component import ComponentConfig
from edgespec.contract import RECURRENT_CHUNK
from edgespec.rope import RopeTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
PREFILL_CHUNK = 256  # tokens a call: bounds the mask and the activations of a long prompt
NO_ROWS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """One lane's part of a call: S tokens at absolute positions, into its next scratch rows.

    `visible` says which uncommitted rows, earlier scratch first, each token sees; committed rows
    are all seen, and a sliding window hides what is behind it of both. `gather` are the rows that
    go through the lm_head.
    """

    lane: int
    tokens: Ids  # [S]
    positions: Ids  # [S]
    visible: Mask  # [S, scratch + S]
    gather: Ids  # [G]
    base_hidden: Floats | None = None  # drafts: exactly one of the two, [S, width]
    draft_hidden: Floats | None = None


@dataclass(frozen=True, slots=True)
class LaneResult:
    """One lane's part of the outputs: views that the next call overwrites."""

    logits: Floats  # [G, V]
    hidden_states: Floats | None  # [S, width]


@dataclass
class Lane:
    """`length` counts committed rows; `scratch` are the positions of the uncommitted ones behind
    them, slot by slot."""

    length: int = 0
    scratch: Ids = field(default_factory=lambda: NO_ROWS)

    @property
    def end(self) -> int:
        """The next slot to be written."""
        return self.length + len(self.scratch)


class CachedDecoder:
    """As many sequences in one engine as it has lanes.

    `sliding_window` is that of the layers that have one: all of them, or where the engine has a
    second mask, those that read it. `local_rope` is the second rotary table, where there is one.

    A call has `min_rows` rows at least: kernels for one row alone round otherwise than those for
    many.
    """

    def __init__(
        self,
        runner: Runner,
        embedding: Table,
        rope: RopeTable,
        sliding_window: int | None = None,
        min_rows: int = 1,
        local_rope: RopeTable | None = None,
    ) -> None:
        self.min_rows, self.local_rope = min_rows, local_rope
        self.runner, self.embedding, self.rope, self.sliding_window = (
            runner,
            embedding,
            rope,
            sliding_window,
        )
        self.lanes = [Lane() for _ in range(runner.lanes)]
        self.engine_s = 0.0  # seconds spent inside the engine

    @classmethod
    def of(
        cls, runner: Runner, embedding: Table, config: ComponentConfig, min_rows: int = 1
    ) -> CachedDecoder:
        """The decoder of an open engine, by what its config says of positions."""
        local = config.local_rope
        assert config.rope is not None
        return cls(
            runner,
            embedding,
            RopeTable.of(config.rope, runner.capacity),
            config.sliding_window,
            min_rows,
            local_rope=RopeTable.of(local, runner.capacity) if local else None,
        )

    @property
    def capacity(self) -> int:
        """Rows of a lane, one a token."""
        return self.runner.capacity

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state, which holds all that is committed."""
        return self.runner.contract.shape.recurrent is not None

    @property
    def croppable(self) -> bool:
        """Whether what a lane holds can be cut to a shorter prefix: rows can, a recurrent state
        cannot."""
        return not self.recurrent

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a prompt that one call reads at most."""
        return min(PREFILL_CHUNK, RECURRENT_CHUNK) if self.recurrent else PREFILL_CHUNK

    def room(self, lane: int) -> int:
        """Rows of a lane that can still be written."""
        return self.capacity - self.lanes[lane].end

    def run(self, parts: Sequence[Rows]) -> list[LaneResult]:
        """One call over the lanes of `parts`, whose rows become scratch.

        Lanes with fewer rows than others are filled up, and lanes between them that take no part
        run one row: what that writes lies behind their scratch rows and is not visible.
        """
        assert all(len(part.tokens) <= self.room(part.lane) for part in parts)
        of = {part.lane: part for part in parts}
        lanes = range(min(of), max(of) + 1)
        whole = [of.get(lane) or self.idle(lane, like=parts[0]) for lane in lanes]
        call = self.call(whole, lanes[0])
        began = time.perf_counter()
        result = self.runner.run(call)
        self.engine_s += time.perf_counter() - began
        for part in parts:
            state = self.lanes[part.lane]
            state.scratch = np.concatenate([state.scratch, part.positions])
        hidden = result.hidden_states
        return [
            LaneResult(
                result.logits[part.lane - lanes[0], : len(part.gather)],
                None if hidden is None else hidden[part.lane - lanes[0], : len(part.tokens)],
            )
            for part in parts
        ]

    def call(self, parts: Sequence[Rows], first_lane: int) -> Call:
        """The parts of adjacent lanes as one call, filled up to the longest."""
        positions = stacked([part.positions for part in parts], self.min_rows)
        cos, sin = self.rope.rows(positions)
        local_cos, local_sin = self.local_rope.rows(positions) if self.local_rope else (None, None)
        sliding = self.runner.contract.shape.sliding
        return Call(
            self.embedding.rows(stacked([part.tokens for part in parts], self.min_rows)),
            cos,
            sin,
            self.mask(parts, None if sliding else self.sliding_window),
            np.array([self.lanes[part.lane].end for part in parts], np.int64),
            stacked([part.gather for part in parts]),
            stacked_hidden([part.base_hidden for part in parts], self.min_rows),
            stacked_hidden([part.draft_hidden for part in parts], self.min_rows),
            self.tree_mask(parts) if self.recurrent else None,
            first_lane,
            sliding_attention_mask=self.mask(parts, self.sliding_window) if sliding else None,
            local_rope_cos=local_cos,
            local_rope_sin=local_sin,
        )

    def mask(self, parts: Sequence[Rows], window: int | None) -> Mask:
        """[B, 1, S, T], of layers that see `window` tokens; a row that only fills up sees
        itself."""
        rows = max(self.min_rows, *(len(part.tokens) for part in parts))
        width = max(self.lanes[part.lane].end for part in parts) + rows
        mask = np.zeros((len(parts), 1, rows, width), bool)
        for lane_mask, part in zip(mask[:, 0], parts, strict=True):
            state, count = self.lanes[part.lane], len(part.tokens)
            end = state.end + count
            lane_mask[:count, : state.length] = True
            lane_mask[:count, state.length : end] = part.visible
            if window is not None:
                slots = np.concatenate([np.arange(state.length), state.scratch, part.positions])
                lane_mask[:count, :end] &= part.positions[:, None] - slots < window
            filling = np.arange(count, rows)
            lane_mask[filling, state.end + filling] = True
        return mask

    def tree_mask(self, parts: Sequence[Rows]) -> Mask:
        """[B, S, S]: which rows of the call each row follows; recurrent layers continue what is
        committed."""
        assert not any(len(self.lanes[part.lane].scratch) for part in parts)
        rows = max(self.min_rows, *(len(part.tokens) for part in parts))
        mask = np.broadcast_to(np.eye(rows, dtype=bool), (len(parts), rows, rows)).copy()
        for lane_mask, part in zip(mask, parts, strict=True):
            lane_mask[: len(part.tokens), : len(part.tokens)] = part.visible
        return mask

    def idle(self, lane: int, like: Rows) -> Rows:
        """One padding row for a lane that takes no part in a call."""
        none = np.zeros(1, np.int64)
        visible = np.zeros((1, len(self.lanes[lane].scratch) + 1), bool)
        visible[0, -1] = True
        base, own = (
            None if x is None else np.zeros_like(x[:1])
            for x in (like.base_hidden, like.draft_hidden)
        )
        return Rows(lane, none, none, visible, none, base, own)

    def causal(
        self, lane: int, tokens: Ids, gather: Ids, base_hidden: Floats | None = None
    ) -> Rows:
        """Tokens [S] behind the committed ones in a row; the lane must have no scratch rows."""
        order = np.arange(len(tokens))
        positions = self.lanes[lane].length + order
        return Rows(lane, tokens, positions, order[:, None] >= order, gather, base_hidden)

    def extend(self, parts: Sequence[Rows]) -> list[LaneResult]:
        """Run `causal` parts and commit all their rows."""
        results = self.run(parts)
        for part in parts:
            self.commit(part.lane, np.arange(len(part.tokens)))
        return results

    def read(self, lane: int, tokens: Ids) -> LaneResult:
        """Commit tokens in calls of a bounded size; the result is that of the last token."""
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            (result,) = self.extend([self.causal(lane, chunk, np.array([len(chunk) - 1]))])
        return result

    def commit(self, lane: int, path: Ids) -> None:
        """Keep the scratch rows `path` (ascending, counted from the first scratch row) and drop the
        others."""
        state = self.lanes[lane]
        self.runner.keep_rows(lane, state.length + path, state.length)
        state.length += len(path)
        self.drop_scratch(lane)

    def drop_scratch(self, lane: int) -> None:
        """Forget the uncommitted rows of a lane; the next call overwrites them."""
        self.lanes[lane].scratch = NO_ROWS

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence. Old rows stay in memory and are not seen."""
        self.lanes[lane] = Lane()
        self.runner.free(lane)

    def zero(self, lane: int) -> None:
        """Forget a lane's sequence, whose rows may hold NaN or Inf."""
        self.lanes[lane] = Lane()
        self.runner.zero(lane)

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """A copy of a lane's first `count` committed rows; of recurrent layers, only of all of
        them."""
        assert count <= self.lanes[lane].length
        return self.runner.read_rows(lane, count)

    def restore(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with rows that `snapshot` took."""
        self.runner.write_rows(lane, rows)
        self.lanes[lane] = Lane(len(rows))

    def move(self, source: int, target: int) -> None:
        """Let a lane's sequence go on in another lane."""
        assert not len(self.lanes[source].scratch)
        self.runner.copy_lane(source, target, self.lanes[source].length)
        self.lanes[target] = self.lanes[source]
        self.reset(source)


def stacked(arrays: Sequence[NDArray[np.generic]], min_rows: int = 1) -> NDArray:  # type: ignore[type-arg]
    """[B, longest, ...], the shorter ones filled up with zeros."""
    longest = max(min_rows, *(len(array) for array in arrays))
    if len(arrays) == 1 and len(arrays[0]) == longest:
        return np.ascontiguousarray(arrays[0])[None]
    out = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


def stacked_hidden(arrays: Sequence[Floats | None], min_rows: int = 1) -> Floats | None:
    """The lanes' hidden states as one array, as `stacked`; None where no lane has any."""
    given = [array for array in arrays if array is not None]
    assert len(given) in (0, len(arrays))
    return stacked(given, min_rows) if given else None
