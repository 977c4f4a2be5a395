"""A decoder with memory: an engine, its embedding and rotary tables, and how much of its KV cache is committed.

Knows slots and positions: committed slot i holds position i; behind them stand scratch rows that are kept or dropped.
Knows nothing of how tokens are chosen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Call, Result, Runner
from edgespec.rope import RopeTable
from edgespec.runtime.embedding import EmbeddingTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
NO_ROWS: Ids = np.empty(0, np.int64)


@dataclass
class CachedDecoder:
    """One sequence in one engine. `length` counts committed rows; `scratch` are the positions of the uncommitted ones
    behind them, slot by slot."""

    runner: Runner
    embedding: EmbeddingTable
    rope: RopeTable
    sliding_window: int | None = None
    length: int = 0
    scratch: Ids = field(default_factory=lambda: NO_ROWS)
    engine_s: float = field(default=0.0)  # seconds spent inside the engine

    @property
    def capacity(self) -> int:
        return self.runner.capacity

    @property
    def room(self) -> int:
        """Rows that can still be written."""
        return self.capacity - self.length - len(self.scratch)

    def run(
        self, tokens: Ids, positions: Ids, visible: Mask, rows: Ids,
        base_hidden: Floats | None = None, draft_hidden: Floats | None = None,
    ) -> Result:  # fmt: skip
        """Run tokens [S] at absolute positions [S] into scratch rows.

        `visible` [S, scratch + S] says which uncommitted rows, earlier scratch first, each token sees; committed rows
        are all seen. A sliding window hides what is behind it of both. `rows` [G] go through the head. Hidden inputs
        are [S, width].
        """
        assert len(tokens) <= self.room
        cos, sin = self.rope.rows(positions[None])
        call = Call(
            self.embedding.rows(tokens)[None], cos, sin, self.mask(positions, visible), rows[None],
            None if base_hidden is None else base_hidden[None], None if draft_hidden is None else draft_hidden[None],
        )  # fmt: skip
        began = time.perf_counter()
        result = self.runner.run(call)
        self.engine_s += time.perf_counter() - began
        self.scratch = np.concatenate([self.scratch, positions])
        return result

    def mask(self, positions: Ids, visible: Mask) -> Mask:
        """[1, 1, S, T] over the committed rows and the scratch rows of this call and before it."""
        mask = np.ones((1, 1, len(positions), self.length + visible.shape[1]), bool)
        mask[0, 0, :, self.length :] = visible
        if self.sliding_window is not None:
            slots = np.concatenate([np.arange(self.length), self.scratch, positions])
            mask[0, 0] &= positions[:, None] - slots < self.sliding_window
        return mask

    def causal(self, tokens: Ids, rows: Ids, base_hidden: Floats | None = None) -> Result:
        """Run tokens [S] behind the committed ones in a row and commit them all."""
        count = len(tokens)
        order = np.arange(count)
        result = self.run(tokens, self.length + order, order[:, None] >= order, rows, base_hidden)
        self.commit(order)
        return result

    def commit(self, path: Ids) -> None:
        """Keep the scratch rows `path` (ascending, counted from the first scratch row) and drop the others."""
        self.runner.move_rows(self.length + path, self.length)
        self.length += len(path)
        self.drop_scratch()

    def drop_scratch(self) -> None:
        self.scratch = NO_ROWS

    def reset(self) -> None:
        """Forget the sequence. Old rows stay in memory and are not seen."""
        self.length = 0
        self.drop_scratch()
