"""EAGLE-3's search: EAGLE-2 dynamic trees, and chains as their narrowest form (arXiv 2406.16858, 2503.01840).

Knows the draft's engine, its vocabulary map and its pairs of (feature, next token). The draft's cache holds only rows
made from the base's true features; the rows of a tree are dropped when the tree is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.decoder import CachedDecoder
from edgespec.runtime.tree import DraftPlan, DraftTree, TreePool

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass
class EagleDrafter:
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id]."""

    decoder: CachedDecoder
    d2t: Ids
    last_logits: Floats | None = None  # [Vd], at the last true feature
    last_hidden: Floats | None = None  # [Hd]
    full: bool = False  # the cache could not take all features: no drafts for the rest of the sequence

    @property
    def engine_s(self) -> float:
        return self.decoder.engine_s

    def observe(self, features: Floats, tokens: Ids) -> None:
        """Extend the stable cache by true features [m, k*H] paired with their next tokens [m]."""
        if self.full or len(tokens) > self.decoder.room:
            self.full = True
            return
        result = self.decoder.causal(tokens, np.array([len(tokens) - 1]), features)
        assert result.hidden_states is not None
        self.last_logits, self.last_hidden = result.logits[0, 0].copy(), result.hidden_states[0, -1].copy()

    def propose(self, pending: int, plan: DraftPlan) -> DraftTree:
        """Grow K candidates a level, keep the K best of K*K as the next level, verify the best of all."""
        steps = self.affordable_steps(plan)
        if self.full or steps == 0 or plan.verify_size == 1:
            return DraftTree.root_only(pending)
        assert self.last_logits is not None
        assert self.last_hidden is not None
        pool = TreePool()
        ids, log_probs = top_log_probs(self.last_logits[None], plan.top_k)
        beam = pool.add_children(-1, self.to_base(ids[0]), log_probs[0])
        hidden = np.repeat(self.last_hidden[None], len(beam), 0)
        ancestors = np.zeros((len(beam), 0), bool)
        for level in range(1, steps):
            beam, hidden, ancestors = self.grow(pool, beam, hidden, ancestors, level, plan.top_k)
        self.decoder.drop_scratch()
        return pool.select(pending, min(plan.verify_size, 1 + len(pool.tokens)))

    def grow(
        self, pool: TreePool, beam: list[int], hidden: Floats, ancestors: NDArray[np.bool_], level: int, top_k: int
    ) -> tuple[list[int], Floats, NDArray[np.bool_]]:
        """Run the beam one level on: its children join the pool, the best of them are the next beam.

        `hidden` [K, Hd] are the states of the beam's parents, `ancestors` [K, scratch] the rows that each one sees.
        Returns the same for the next level.
        """
        count = len(beam)
        visible = np.concatenate([ancestors, np.eye(count, dtype=bool)], 1)
        tokens = np.array([pool.tokens[i] for i in beam], np.int64)
        positions = np.full(count, self.decoder.length + level - 1)
        result = self.decoder.run(tokens, positions, visible, np.arange(count), draft_hidden=hidden)
        assert result.hidden_states is not None
        ids, log_probs = top_log_probs(result.logits[0], top_k)
        children: list[int] = []
        row_of: dict[int, int] = {}
        for row, parent in enumerate(beam):
            born = pool.add_children(parent, self.to_base(ids[row]), log_probs[row])
            row_of |= dict.fromkeys(born, row)
            children += born
        chosen = pool.best(children, top_k)
        parents = [row_of[i] for i in chosen]
        return chosen, result.hidden_states[0][parents], visible[parents]

    def affordable_steps(self, plan: DraftPlan) -> int:
        """Levels that fit into the cache: each but the first writes top_k rows."""
        return min(plan.steps, 1 + self.decoder.room // plan.top_k)

    def to_base(self, ids: Ids) -> Ids:
        return ids + self.d2t[ids]

    def reset(self) -> None:
        self.decoder.reset()
        self.last_logits = self.last_hidden = None
        self.full = False


def top_log_probs(logits: Floats, count: int) -> tuple[Ids, Floats]:
    """The `count` best ids of each row [R, V] with their log-probabilities, descending; ties to the lowest id."""
    peak = logits.max(1, keepdims=True)
    norm = peak[:, 0] + np.log(np.exp(logits - peak).sum(1, dtype=np.float64)).astype(np.float32)
    count = min(count, logits.shape[1])
    if count == 1:
        best = logits.argmax(1)[:, None]
        return best, logits[np.arange(len(logits))[:, None], best] - norm[:, None]
    edges = np.partition(logits, logits.shape[1] - count, axis=1)[:, -count]
    ids = np.empty((len(logits), count), np.int64)
    for row, edge in enumerate(edges):
        found = np.flatnonzero(logits[row] >= edge)
        ids[row] = found[np.argsort(-logits[row][found], kind="stable")[:count]]
    return ids, np.take_along_axis(logits, ids, 1) - norm[:, None]
