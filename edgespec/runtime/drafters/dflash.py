"""DFlash's search: a block of drafts in one pass (arXiv 2602.06036), as a chain or as a DDTree
(arXiv 2604.12989).

Knows the draft's engine, its vocabulary map and the base's features that the engine has not read
yet. The slots of a block are drafted side by side and do not know of each other, so all nodes of a
depth share their candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.runtime.block import NO_TOKENS, BlockDecoder, BlockRows
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.eagle import top_log_probs
from edgespec.runtime.tree import DraftTree

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
CONTEXT_CHUNK = 256  # rows of context a call: bounds the mask and the activations of a long prompt


@dataclass
class LaneState:
    """The features that wait for the next call."""

    waiting: list[Floats] = field(default_factory=list)  # each [m, k*H]
    # the cache could not take all features, or they gave no numbers: no drafts from there on
    full: bool = False

    @property
    def count(self) -> int:
        return sum(map(len, self.waiting))


class DFlashDrafter:
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id]; None where draft and base share
    the vocabulary.

    `max_block` bounds a block, and the context that lanes of one call may differ by.
    """

    def __init__(
        self, decoder: BlockDecoder, mask_token: int, max_block: int, d2t: Ids | None = None
    ) -> None:
        self.decoder, self.mask_token, self.max_block, self.d2t = (
            decoder,
            mask_token,
            max_block,
            d2t,
        )
        self.lanes = [LaneState() for _ in decoder.lanes]

    @property
    def engine_s(self) -> float:
        return self.decoder.engine_s

    def observe(self, seen: Sequence[Observation]) -> None:
        """Keep the new features; the engine reads them with the next block, or by themselves where
        they are many."""
        for one in seen:
            state = self.lanes[one.lane]
            fits = state.count + len(one.features) <= self.decoder.room(one.lane)
            # What is no number must not get into the cache: it would poison the lane's next
            # sequence too
            state.full = state.full or not fits or not np.isfinite(one.features).all()
            if state.full:
                state.waiting = []
                continue
            state.waiting.append(one.features.copy())
            if state.count >= CONTEXT_CHUNK:
                self.flush(one.lane)

    def flush(self, lane: int) -> None:
        """Let the engine read what waits, without a block."""
        state = self.lanes[lane]
        if not state.count:
            return
        features = np.concatenate(state.waiting)
        for start in range(0, len(features), CONTEXT_CHUNK):
            self.decoder.run([BlockRows(lane, features[start : start + CONTEXT_CHUNK], NO_TOKENS)])
        state.waiting = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One call for all wishes: the new context of each, and behind it the pending token and its
        masks."""
        trees = {request.lane: DraftTree.root_only(request.pending) for request in requests}
        able = [request for request in requests if self.block_size(request) > 1]
        if len(able) > 1:
            for request in able:
                if (
                    self.lanes[request.lane].count > self.max_block
                ):  # its mates would run as many rows of nothing
                    self.flush(request.lane)
        parts = [self.block(request) for request in able]
        for request, logits in zip(able, self.decoder.run(parts) if parts else [], strict=True):
            state = self.lanes[request.lane]
            state.waiting, state.full = [], not np.isfinite(logits).all()
            if state.full:
                self.decoder.zero(request.lane)
            else:
                trees[request.lane] = self.tree(request, logits)
        return [trees[request.lane] for request in requests]

    def block_size(self, request: DraftRequest) -> int:
        """Slots of a lane's block, the pending token's included; 1 is no draft."""
        state, plan = self.lanes[request.lane], request.plan
        if state.full:
            return 1
        room = self.decoder.room(request.lane) - state.count
        return max(1, min(self.max_block, plan.steps + 1, plan.verify_size, room))

    def block(self, request: DraftRequest) -> BlockRows:
        tokens = np.full(self.block_size(request), self.mask_token, np.int64)
        tokens[0] = request.pending
        return BlockRows(request.lane, self.features(request.lane), tokens)

    def features(self, lane: int) -> Floats:
        waiting = self.lanes[lane].waiting
        none = np.zeros((0, self.decoder.runner.contract.shape.base_features), np.float32)
        return np.concatenate([none, *waiting])

    def tree(self, request: DraftRequest, logits: Floats) -> DraftTree:
        """The best of the tokens of each slot [R, K]: the chain of the first ones, or the most
        probable tree."""
        ids, log_probs = top_log_probs(logits, request.plan.top_k)
        tokens = ids if self.d2t is None else ids + self.d2t[ids]
        parents, chosen = best_first(log_probs, request.plan.verify_size)
        return DraftTree(
            np.concatenate([[request.pending], tokens[chosen[:, 0], chosen[:, 1]]]), parents
        )

    def reset(self, lane: int) -> None:
        self.decoder.reset(lane)
        self.lanes[lane] = LaneState()

    def move(self, source: int, target: int) -> None:
        self.decoder.move(source, target)
        self.lanes[target] = self.lanes[source]
        self.lanes[source] = LaneState()

    def snapshot(self, lane: int, count: int) -> LaneRows:
        if self.decoder.lanes[lane].length < count:
            self.flush(lane)
        return self.decoder.snapshot(lane, count)

    def restore(self, lane: int, rows: LaneRows) -> None:
        self.reset(lane)
        self.decoder.restore(lane, rows)


def best_first(log_probs: Floats, size: int) -> tuple[Ids, NDArray[np.int64]]:
    """The `size` most probable nodes, the root included, of the tree that `log_probs` [depths, K],
    descending, span.

    Parents [N], the root's -1, and the (depth - 1, rank) of each node but the root [N-1, 2]. Nodes
    come in the order of their probability, so a parent stands before its children; ties go to the
    earlier parent, then to the better rank.
    """
    depths, width = log_probs.shape
    parents, chosen, scores = [-1], [(-1, 0)], [0.0]
    heap: list[tuple[float, int, int]] = []  # minus score, parent, rank

    def offer(parent: int, rank: int) -> None:
        depth = chosen[parent][0] + 1
        if depth < depths and rank < width:
            heapq.heappush(heap, (-(scores[parent] + float(log_probs[depth, rank])), parent, rank))

    offer(0, 0)
    while heap and len(parents) < size:
        minus, parent, rank = heapq.heappop(heap)
        parents.append(parent)
        chosen.append((chosen[parent][0] + 1, rank))
        scores.append(-minus)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return np.array(parents, np.int64), np.array(chosen[1:], np.int64).reshape(-1, 2)
