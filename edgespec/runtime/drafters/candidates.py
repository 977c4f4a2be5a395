"""The most probable tokens of rows of logits, and the most probable tree of rows that do not know
of each other. Knows numbers alone."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, Ids, Logits


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
