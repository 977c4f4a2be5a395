"""Drafters that need no model: one that lies, one that is always right, one that is both by turns.

Knows the tokens that plain decoding gives (`truth`) and how many of them the base has taken. Right or wrong, none of
them may change what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.runtime.sampling import Sampler
from edgespec.runtime.tree import DraftPlan, DraftTree
from edgespec.runtime.verify import Verdict, walk


class ScriptedDrafter:
    """Random trees; where a node stands on the true path, its child carries the true token with probability `right`.

    `right` 0 never proposes the true token, `right` 1 always does, as a chain. Between them true tokens are seldom the
    first among their siblings, so that what is accepted lies scattered over the tree.
    """

    engine_s = 0.0

    def __init__(self, prompt: Sequence[int], truth: Sequence[int], vocab: int, right: float, seed: int = 0) -> None:
        self.prompt, self.truth, self.vocab, self.right = list(prompt), list(truth), vocab, right
        self.rng = np.random.default_rng(seed)
        self.features: list[np.ndarray] = []
        self.tokens: list[int] = []  # the one after each feature
        self.trees: list[DraftTree] = []
        self.plans: list[DraftPlan] = []

    def reset(self) -> None:
        self.features, self.tokens = [], []

    def observe(self, features: np.ndarray, tokens: np.ndarray) -> None:
        assert len(features) == len(tokens)
        self.features += list(features.copy())
        self.tokens += tokens.tolist()

    def propose(self, pending: int, plan: DraftPlan) -> DraftTree:
        assert self.tokens[-1] == pending
        self.plans.append(plan)
        coming = self.truth[len(self.tokens) - len(self.prompt) + 1 :]
        tree = self.chain(pending, coming, plan) if self.right == 1 else self.tree(pending, coming, plan)
        self.trees.append(tree)
        return tree

    def chain(self, pending: int, coming: list[int], plan: DraftPlan) -> DraftTree:
        tokens = [pending, *coming[: min(plan.steps, plan.verify_size - 1)]]
        return DraftTree(np.array(tokens, np.int64), np.arange(-1, len(tokens) - 1))

    def tree(self, pending: int, coming: list[int], plan: DraftPlan) -> DraftTree:
        tokens, parents, depths, taken = [pending], [-1], [0], [set[int]()]
        true_node = {0: 0}  # depth -> the node on the true path
        for node in range(1, int(self.rng.integers(1, plan.verify_size + 1))):
            parent = int(self.rng.choice([n for n in range(node) if depths[n] < plan.steps] or [-1]))
            if parent < 0:
                break
            depth = depths[parent] + 1
            true = coming[depth - 1] if true_node.get(depth - 1) == parent and depth <= len(coming) else None
            is_right = true is not None and true not in taken[parent] and self.rng.random() < self.right
            wrong = [t for t in range(self.vocab) if t != true and t not in taken[parent]]
            if not is_right and not wrong:
                continue
            token = true if is_right else int(self.rng.choice(wrong))
            if is_right:
                true_node[depth] = len(tokens)
            taken[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            taken.append(set())
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))


def accept_one_more(tree: DraftTree, logits: np.ndarray, sampler: Sampler, position: int) -> Verdict:
    """A planted bug: `walk` with one node more than the base agreed to."""
    verdict = walk(tree, logits, sampler, position)
    child = np.flatnonzero(tree.parents == verdict.path[-1])
    if not len(child):
        return verdict
    path = [*verdict.path, int(child[0])]
    last = sampler.pick(logits[child[0]], position + len(path))
    return Verdict(path, [*verdict.emitted[:-1], int(tree.tokens[child[0]]), last])
