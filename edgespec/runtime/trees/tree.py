"""A draft as a tree: its tokens, who descends from whom, and what each node may see.

Knows tokens, parents and, where the drafter gives them, probabilities. Knows no engine. A chain is
a tree of width 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.contract import tree_pool_size
from edgespec.runtime.sampling.draft_sampler import Distribution

Ids = NDArray[np.int64]


def constant(array: NDArray[Any]) -> NDArray[Any]:
    """An array that nobody writes to."""
    array.setflags(write=False)
    return array


# Of the tree of a plain step, which every sequence has in every step
NO_PARENT, ROOT = constant(np.array([-1])), constant(np.array([0]))
ROOT_MASK = constant(np.ones((1, 1), bool))


@dataclass(frozen=True)
class DraftTree:
    """Nodes in an order where parents precede children; node 0 is the pending token, with parent
    -1.

    `probs` are the probabilities with which the draft would draw each node's token after its
    parent, 1 for the root; they are shown. `drawn_from` are those that a node's token was drawn
    from, None where it was chosen without chance; for accept rules that compare them with the
    base's. `lost` says why there are no drafts where a drafter failed to make some. `levels` is how
    many were drafted, where some of them may have been left out. Nodes 1 to `num_forced` are a
    chain that a grammar leaves no choice: no drafter made them.
    """

    tokens: Ids  # [N]
    parents: Ids  # [N]
    probs: NDArray[np.float32] | None = None  # [N]
    drawn_from: Sequence[Distribution | None] | None = None  # [N]
    lost: str | None = None
    levels: int | None = None
    num_forced: int = 0

    @classmethod
    def root_only(cls, pending: int, lost: str | None = None) -> DraftTree:
        """No draft: verifying this is a plain decoding step."""
        return cls(np.array([pending], np.int64), NO_PARENT, lost=lost)

    @classmethod
    def chain(
        cls, pending: int, drafts: Sequence[int], drawn: Sequence[Distribution] = ()
    ) -> DraftTree:
        """The drafts one behind the other; `drawn` is what each was drawn from, where they were."""
        tokens = np.array([pending, *drafts], np.int64)
        drawn_from = [None, *drawn] if drawn else None
        return cls(tokens, np.arange(-1, len(drafts)), drawn_from=drawn_from)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> Ids:
        """[N], the root at 0."""
        if len(self.tokens) == 1:
            return ROOT
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int64)

    @property
    def drafted_levels(self) -> int:
        """Levels that were drafted for it."""
        if self.levels is None:
            return 0 if len(self.tokens) == 1 else int(self.depths.max())
        return self.levels

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[N, N], True where the column is the row's node or an ancestor of it."""
        if len(self.tokens) == 1:
            return ROOT_MASK
        parents = self.parents.tolist()
        if parents == [*range(-1, len(parents) - 1)]:  # a chain
            order = np.arange(len(parents))
            return order[:, None] >= order
        mask = np.eye(len(parents), dtype=bool)
        for node, parent in enumerate(parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of some nodes, each behind its parent."""
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        drawn = self.drawn_from
        return replace(
            self,
            tokens=self.tokens[[*nodes]],
            parents=np.array([place[parent] for parent in self.parents[[*nodes]].tolist()]),
            probs=None if self.probs is None else self.probs[[*nodes]],
            drawn_from=None if drawn is None else [drawn[node] for node in nodes],
            num_forced=sum(0 < node <= self.num_forced for node in nodes),
        )

    def behind(self, forced: Sequence[int], size: int) -> DraftTree:
        """The forced tokens as a chain, and behind them what this tree has there: at most `size`
        nodes."""
        path = [0]
        for token in forced:
            child = self.child(path[-1], token)
            if child is None:
                chain = DraftTree.chain(int(self.tokens[0]), forced)
                return replace(
                    chain, num_forced=len(forced), levels=self.drafted_levels, lost=self.lost
                )
            path.append(child)
        below, parents = {path[-1]}, self.parents.tolist()
        for node in range(path[-1] + 1, len(parents)):
            if parents[node] in below and len(path) + len(below) <= size:
                below.add(node)
        order = [*path, *sorted(below - {path[-1]})]
        tree = replace(self.only(order), num_forced=len(forced), levels=self.drafted_levels)
        if tree.drawn_from is None:
            return tree
        return replace(tree, drawn_from=[None] * len(path) + [*tree.drawn_from[len(path) :]])

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`; siblings carry different tokens."""
        if node + 1 == len(self.tokens):
            return None
        parents, tokens = self.parents.tolist(), self.tokens.tolist()
        for place in range(node + 1, len(tokens)):
            if tokens[place] == token and parents[place] == node:
                return place
        return None

    def distribution(self, node: int) -> Distribution:
        """What the token of `node` was drawn from; all on it where it was chosen without chance."""
        drawn = None if self.drawn_from is None else self.drawn_from[node]
        return Distribution.point(int(self.tokens[node])) if drawn is None else drawn


class Plain(Enum):
    """As a request's plan: decode without drafts. It has this one value."""

    PLAIN = "plain"

    def __repr__(self) -> str:
        return "edgespec.PLAIN"


PLAIN: Final = Plain.PLAIN


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How much to draft: beam width K, levels S, and nodes to verify with the root (arXiv
    2406.16858). `adaptive`: up to so much, each step as it pays."""

    top_k: int
    steps: int
    verify_size: int
    adaptive: bool = field(default=False, kw_only=True)

    @property
    def depth_words(self) -> str:
        """How deep it drafts, as a user gives it."""
        return f"step {self.steps}"

    def levels_within(self, rows: int) -> int:
        """Levels that a drafter can make level by level with that many KV rows: each but the first
        runs the nodes of the one before."""
        return min(self.steps, 1 + rows // self.top_k)

    def within(self, levels: int, nodes: int) -> DraftPlan:
        """The plan cut down to at most `levels` levels and `nodes` nodes; no levels or one node is
        no draft."""
        steps = max(0, min(self.steps, levels))
        pool = tree_pool_size(self.top_k, steps) if steps else 1
        size = max(1, min(self.verify_size, nodes, pool))
        return DraftPlan(self.top_k, steps, size, adaptive=self.adaptive)


@dataclass(frozen=True, slots=True)
class BlockPlan(DraftPlan):
    """The same where a block is drafted at once: `steps` are the slots that draft, and every path
    may go on. `first_slot` is the first of them: 0 is the anchor's own."""

    first_slot: int = 1

    @property
    def depth_words(self) -> str:
        """How long its blocks are, as a user gives it."""
        return f"blocks of {self.steps + self.first_slot}"

    def within(self, levels: int, nodes: int) -> BlockPlan:
        """The plan cut down to `levels` slots that draft and `nodes` nodes."""
        steps = max(0, min(self.steps, levels))
        size = max(1, min(self.verify_size, nodes))
        nodes = min(size, full_tree_size(self.top_k, steps, size))
        return BlockPlan(self.top_k, steps, nodes, self.first_slot, adaptive=self.adaptive)


def full_tree_size(top_k: int, levels: int, most: int) -> int:
    """Nodes of the tree in which every node has `top_k` children, the root included; `most` where
    there are more."""
    size, level = 1, 1
    for _ in range(levels):
        level *= top_k
        size += level
        if size >= most:
            return most
    return size


class TreePool:
    """All candidates of one dynamic tree, level by level; `select` keeps the best of them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # pool index, -1: child of the root
        self.depths: list[int] = []
        self.scores: list[float] = []  # cumulative log-probability

    def add_children(self, parent: int, tokens: Ids, log_probs: NDArray[np.float32]) -> list[int]:
        """Add the children of pool entry `parent` (-1: of the root); returns their pool indices."""
        first = len(self.tokens)
        above, depth = (self.scores[parent], self.depths[parent] + 1) if parent >= 0 else (0.0, 1)
        self.tokens += tokens.tolist()
        self.scores += [above + float(p) for p in log_probs]
        self.parents += [parent] * len(tokens)
        self.depths += [depth] * len(tokens)
        return list(range(first, len(self.tokens)))

    def best(
        self, among: list[int], count: int, scores: Sequence[float] | None = None
    ) -> list[int]:
        """The `count` best of some entries: by score, or by the `scores` given for all, then the
        shallower, then the earlier."""
        by = self.scores if scores is None else scores
        return sorted(among, key=lambda i: (-by[i], self.depths[i], i))[:count]

    def probs(self, first: int) -> list[float]:
        """The probabilities of all entries from one on, each after its parent."""
        return [self.prob(entry) for entry in range(first, len(self.tokens))]

    def prob(self, entry: int) -> float:
        """The probability of an entry after its parent."""
        parent = self.parents[entry]
        above = self.scores[parent] if parent >= 0 else 0.0
        return math.exp(self.scores[entry] - above)

    def select(self, pending: int, size: int) -> DraftTree:
        """The tree of the root and the `size` - 1 best entries.

        No child scores above its parent and ties go to the shallower one, so that with a node its
        ancestors are in.
        """
        return self.tree(pending, self.best(list(range(len(self.tokens))), size - 1))

    def tree(self, pending: int, entries: Sequence[int]) -> DraftTree:
        """The tree of the root and of entries with all their ancestors."""
        kept = sorted(entries)
        place = {entry: node for node, entry in enumerate(kept, start=1)} | {-1: 0}
        tokens = [pending, *(self.tokens[i] for i in kept)]
        parents = [-1, *(place[self.parents[i]] for i in kept)]
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
