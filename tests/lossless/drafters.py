"""Drafters that need no model: one that lies, one that is always right, one that is both by turns.

Knows the tokens that plain decoding gives (`truth`) and how many of them the base has taken. Right
or wrong, none of them may change what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.backends.base import LaneRows
from edgespec.backends.call import Logits
from edgespec.backends.ort.lane_rows import OrtLaneRows
from edgespec.runtime.acceptance.verify import ACCEPT_RULES, AcceptResult, AcceptRow, walk
from edgespec.runtime.drafters.base import DraftRequest, Observation, Snapshot
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan, DraftTree


@dataclass
class Memory:
    """What a lane's drafter observed."""

    hidden_states: list[np.ndarray] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the one after each position


class ScriptedDrafter:
    """Random trees; where a node stands on the true path, its child carries the true token with
    probability `right`.

    `right` 0 never proposes the true token, `right` 1 always does, as a chain. Between them true
    tokens are seldom the first among their siblings, so that what is accepted lies scattered over
    the tree. `scripts` are prompts with what plain decoding says after them; a lane follows the one
    that begins with what it was told.
    """

    needs_hidden_states = True
    capacity: int | None = None
    num_lanes: int | None = None
    engine_s = 0.0

    def __init__(
        self,
        scripts: Sequence[tuple[Sequence[int], Sequence[int]]],
        vocab: int,
        right: float,
        seed: int = 0,
    ) -> None:
        self.scripts_of = scripts
        self.scripts = [[*prompt, *truth] for prompt, truth in scripts]
        self.vocab, self.right = vocab, right
        self.rng = np.random.default_rng(seed)
        self.lanes: dict[int, Memory] = {}
        self.ended: dict[int, Memory] = {}  # by lane, of the last sequence that ended there
        self.trees: list[DraftTree] = []
        self.plans: list[DraftPlan] = []

    @property
    def hidden_states(self) -> list[np.ndarray]:
        return self.last.hidden_states

    @property
    def tokens(self) -> list[int]:
        return self.last.tokens

    @property
    def last(self) -> Memory:
        """Of the first lane: its sequence, or the one that ended there."""
        return self.lanes[0] if self.lanes[0].tokens else self.ended[0]

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None: ...

    def close(self) -> None: ...

    def reset(self, lane: int) -> None:
        if lane in self.lanes and self.lanes[lane].tokens:
            self.ended[lane] = self.lanes[lane]
        self.lanes[lane] = Memory()

    def move(self, source: int, target: int) -> None:
        self.lanes[target] = self.lanes.pop(source)

    def snapshot(self, lane: int, count: int) -> LaneRows | None:
        tokens = np.array(self.lanes[lane].tokens[:count], np.float32)
        return OrtLaneRows(tokens[None, None, :, None])

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, OrtLaneRows)
        tokens = snapshot.kv[0, 0, :, 0].astype(int).tolist()
        self.lanes[lane] = Memory([np.zeros(0)] * len(tokens), tokens)

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            assert item.hidden_states is not None
            assert len(item.hidden_states) == len(item.tokens)
            self.lanes[item.lane].hidden_states += list(item.hidden_states.numpy().copy())
            self.lanes[item.lane].tokens += item.tokens.tolist()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self.proposed(request) for request in requests]

    def proposed(self, request: DraftRequest) -> DraftTree:
        tokens = self.lanes[request.lane].tokens
        assert tokens[-1] == request.pending
        self.plans.append(request.plan)
        told = (
            script[len(tokens) + 1 :]
            for script in self.scripts
            if script[1 : len(tokens) + 1] == tokens
        )
        coming = next(told, [])
        make = self.chain if self.right == 1 else self.tree
        self.trees.append(make(request.pending, coming, request.plan))
        return self.trees[-1]

    def chain(self, pending: int, coming: list[int], plan: DraftPlan) -> DraftTree:
        tokens = [pending, *coming[: min(plan.steps, plan.verify_size - 1)]]
        return DraftTree(np.array(tokens, np.int64), np.arange(-1, len(tokens) - 1))

    def tree(self, pending: int, coming: list[int], plan: DraftPlan) -> DraftTree:
        tokens, parents, depths, taken = [pending], [-1], [0], [set[int]()]
        true_node = {0: 0}  # depth -> the node on the true path
        for _ in range(1, int(self.rng.integers(1, plan.verify_size + 1))):
            parent = int(
                self.rng.choice([n for n in range(len(depths)) if depths[n] < plan.steps] or [-1])
            )
            if parent < 0:
                break
            depth = depths[parent] + 1
            true = (
                coming[depth - 1]
                if true_node.get(depth - 1) == parent and depth <= len(coming)
                else None
            )
            is_right = (
                true is not None and true not in taken[parent] and self.rng.random() < self.right
            )
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


class Stateless(ScriptedDrafter):
    """The same without hidden states: it has the prompt by `begin`, and keeps nothing for later
    prompts."""

    needs_hidden_states = False

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        assert self.lanes[lane] == Memory(), "the lane was reset"
        self.lanes[lane].tokens = [*tokens[1:]]

    def snapshot(self, lane: int, count: int) -> None:
        return None

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            assert item.hidden_states is None
            self.lanes[item.lane].tokens += item.tokens.tolist()


PlantedRule = Callable[[DraftTree, np.ndarray, Sampler, Sequence[int]], AcceptResult]


def rule_row(rule: PlantedRule) -> AcceptRow:
    """The exact rule's row with another rule in it."""
    return replace(ACCEPT_RULES["exact"], accept=lambda *given: rule(*given[:4]))


def accept_one_more(
    tree: DraftTree, logits: Logits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    """A planted bug: `walk` with one node more than the base agreed to."""
    result = walk(tree, logits, sampler, before)
    child = np.flatnonzero(tree.parents == result.path[-1])
    if not len(child):
        return result
    path = [*result.path, int(child[0])]
    told = [*before, *result.emitted[:-1], int(tree.tokens[child[0]])]
    last = sampler.pick_from(logits, int(child[0]), told)
    return AcceptResult(path, [*result.emitted[:-1], int(tree.tokens[child[0]]), last])
