"""The most probable tokens of rows of logits, and the tree of rows that do not know of each
other."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, Ids, Logits
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.trees.tree import DraftTree

# From log-probabilities [depths, K], descending, and a size to the parents [N] of a tree's nodes,
# and the (depth - 1, rank) of each but the root [N-1, 2]
Search = Callable[[Floats, int], tuple[Ids, Ids]]


def top_log_probs(logits: Logits, count: int) -> tuple[Ids, Floats]:
    """The `count` best ids of each row with their log-probabilities, descending, [R, K] each; ties
    to the lowest id."""
    top = logits.top(count)
    return top.ids, top.values - top.logsumexp[:, None]


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


def side_by_side(
    request: DraftRequest, logits: Logits, d2t: Ids | None = None, search: Search = best_first
) -> DraftTree:
    """The draft of one lane from logits [D, V], a row a depth: the tree that `search` chooses, its
    chain, or where drafts are drawn a chain each of whose tokens is drawn by itself. `d2t` [V] are
    offsets to the base's ids."""
    if request.sampler is not None and request.plan.top_k == 1:
        own = None if d2t is None else np.arange(len(d2t)) + d2t
        tokens, drawn = list[int](), list[Distribution]()
        for row in logits.first_rows(request.plan.verify_size - 1).rows():
            token, distribution = request.sampler.draw(row, tokens, own)
            tokens.append(token)
            drawn.append(distribution)
        return DraftTree.chain(request.pending, tokens, drawn)
    ids, log_probs = top_log_probs(logits, request.plan.top_k)
    tokens_of = ids if d2t is None else ids + d2t[ids]
    parents, chosen = search(log_probs, request.plan.verify_size)
    places = chosen[:, 0], chosen[:, 1]
    tree = DraftTree(np.concatenate([[request.pending], tokens_of[places]]), parents)
    if request.budget is None:
        return tree
    return request.budget.cut(tree, np.exp(log_probs[places]).tolist())
