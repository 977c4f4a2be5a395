"""JetSpec's search (arXiv 2606.18394): a block in one pass of a causal head, as a chain or as the
tree that is grown best node first.

Each slot's candidates are the same below every node of its depth. The node with the greatest sum of
log-probabilities is taken out, and all its children are added at once, until the tree is full
(hao-ai-lab/JetSpec, tree/baselines/accum_logp.py). So the tree differs from DDTree's, which adds
nodes one by one.
"""

from __future__ import annotations

import heapq
from functools import partial

import numpy as np

from edgespec.backends.call import Floats, Ids
from edgespec.methods.jetspec import NAME
from edgespec.runtime.drafters.block_drafter import limits, open_tree_drafter, trained_with_thinking
from edgespec.runtime.drafters.row import DrafterRow

__all__ = ["NAME", "ROW", "grown_best_first"]


def grown_best_first(log_probs: Floats, size: int) -> tuple[Ids, Ids]:
    """The tree of `size` nodes, the root included, that grows by all children of its best leaf;
    `log_probs` [depths, K] descend.

    Parents [N], the root's -1, and the (depth - 1, rank) of each node but the root [N-1, 2], in the
    order in which nodes are added; of equal leaves the earlier one goes first, and of the last
    leaf's children those that still fit are its best.
    """
    depths, width = log_probs.shape
    parents, chosen = [-1], [(-1, 0)]
    leaves = [(-0.0, 0)]  # minus the sum of log-probabilities, node
    while leaves and len(parents) < size:
        minus, node = heapq.heappop(leaves)
        depth = chosen[node][0] + 1
        if depth == depths:
            continue
        for rank in range(min(width, size - len(parents))):
            heapq.heappush(leaves, (minus - float(log_probs[depth, rank]), len(parents)))
            parents.append(node)
            chosen.append((depth, rank))
    return np.array(parents, np.int64), np.array(chosen[1:], np.int64).reshape(-1, 2)


ROW = DrafterRow(
    open=partial(open_tree_drafter, search=grown_best_first),
    limits=limits,
    trained_with_thinking=trained_with_thinking,
)
