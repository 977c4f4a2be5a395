"""Medusa's search: the heads' tokens for the next positions, in one pass over the last hidden state
of the base, as a Cartesian tree (arXiv 2401.10774).

Knows the engine of the heads and the last hidden state of each sequence. Head i draws the token at
depth i + 1 and knows nothing of those before it, so all nodes of a depth share their candidates:
which child of its parent a node is says its rank in the head's list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import PlanHints, Runner
from edgespec.backends.call import Call, HiddenStates, Logits
from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError, OptionError, Spellings, counted
from edgespec.methods.medusa import MAX_HEADS, NAME, MedusaSpec
from edgespec.runtime.drafters.base import DraftRequest, Observation, PacksSnapshots, Snapshot
from edgespec.runtime.drafters.candidates import side_by_side, top_log_probs
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.plans.plan import GUIDE_VERIFY_SIZE, exceeds_base
from edgespec.runtime.trees.static_tree import (
    CHOICES_SCHEMA,
    DEFAULT,
    MAX_NODES,
    NAMED,
    Choices,
    StaticPlan,
    checked_choices,
)
from edgespec.runtime.trees.tree import DraftPlan, DraftTree, full_tree_size

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass
class MedusaLane:
    """What the heads read next. None: nothing was observed yet, or it holds NaN or Inf."""

    hidden_state: HiddenStates | None = None  # of one row
    seen: int = 0  # pairs of a position and the token after it


@dataclass(frozen=True, slots=True)
class Seen:
    """All that is remembered of a prefix: how long it was. The state of its last position comes
    with the next observation."""

    count: int

    @property
    def nbytes(self) -> int:
        """It takes no memory to speak of."""
        return 0

    def __len__(self) -> int:
        return self.count

    def prefix(self, count: int) -> Seen:
        """The same of the first `count` pairs."""
        return Seen(min(count, self.count))


class MedusaDrafter(Budgeted, PacksSnapshots):
    """`num_heads` heads of one engine. A sequence may be of any length."""

    needs_hidden_states = True
    capacity = None

    def __init__(self, runner: Runner, num_heads: int) -> None:
        self.runner, self.num_heads = runner, num_heads
        self.lanes = [MedusaLane() for _ in range(runner.lanes)]

    @property
    def num_lanes(self) -> int:
        """Sequences of one call."""
        return len(self.lanes)

    @property
    def engine_s(self) -> float:
        """Seconds in the engine of the heads so far."""
        return self.runner.engine_s

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Nothing: the prompt comes with its hidden states, by `observe`."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the hidden state of the last position."""
        for item in observations:
            assert item.hidden_states is not None
            last = item.hidden_states.take(np.array([len(item.tokens) - 1]))
            seen = self.lanes[item.lane].seen + len(item.tokens)
            self.lanes[item.lane] = MedusaLane(last if last.finite() else None, seen)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The heads of all lanes in one call, and a tree of each lane's candidates."""
        trees = {request.lane: DraftTree.root_only(request.pending) for request in requests}
        able = [request for request in requests if self.drafts(request)]
        states = [self.lanes[request.lane].hidden_state for request in able]
        if states:
            logits = self.run(cast(list[HiddenStates], states))
            for request, heads in zip(able, logits, strict=True):
                if heads.finite():
                    trees[request.lane] = cartesian_tree(request, heads)
        return [trees[request.lane] for request in requests]

    def drafts(self, request: DraftRequest) -> bool:
        """Whether a lane has a state, and a plan with room for a draft."""
        plan, state = request.plan, self.lanes[request.lane].hidden_state
        return state is not None and plan.verify_size > 1 and plan.steps > 0

    def run(self, states: Sequence[HiddenStates]) -> list[Logits]:
        """Logits [heads, V] of each lane's state."""
        results = self.runner.run(Call.of_states(states))
        return [result.logits for result in results]

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence."""
        self.lanes[lane] = MedusaLane()

    def move(self, source: int, target: int) -> None:
        """The state of `source` goes to `target`."""
        self.lanes[target], self.lanes[source] = self.lanes[source], MedusaLane()

    def snapshot(self, lane: int, count: int) -> Seen:
        """How much of a prefix was seen, which is all that is needed to go on behind it."""
        return Seen(min(count, self.lanes[lane].seen))

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Begin a lane behind a prefix; the state comes with the next observation."""
        self.lanes[lane] = MedusaLane(seen=len(snapshot))

    def pack(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """Nothing: how many pairs were seen is all of it."""
        return {}

    def unpack(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Seen:
        """So many pairs were seen."""
        return Seen(count)

    def close(self) -> None:
        """Free the engine of the heads."""
        self.runner.close()


def cartesian_tree(request: DraftRequest, logits: Logits) -> DraftTree:
    """The tree of one lane from logits [heads, V]: of a static plan its choices, else the most
    probable nodes, where a node's probability is the product along its path."""
    plan = request.plan
    if isinstance(plan, StaticPlan) and (request.sampler is None or plan.top_k > 1):
        ids, _ = top_log_probs(logits.first_rows(plan.steps), plan.top_k)
        tokens = [int(ids[len(node) - 1, node[-1]]) for node in plan.choices]
        return plan.tree(request.pending, tokens)
    return side_by_side(request, logits.first_rows(plan.steps))


# ---- how much is drafted


@dataclass(frozen=True, slots=True)
class CartesianPlan(DraftPlan):
    """The `verify_size` most probable nodes of the tree in which each node has `top_k` children;
    with one child a chain."""

    def within(self, levels: int, nodes: int) -> CartesianPlan:
        """The plan cut down to `levels` levels and `nodes` nodes."""
        steps = max(0, min(self.steps, levels))
        size = max(1, min(self.verify_size, nodes))
        return CartesianPlan(self.top_k, steps, min(size, full_tree_size(self.top_k, steps, size)))


@dataclass(frozen=True, slots=True)
class MedusaLimits:
    """What the base was built for, and how many heads there are."""

    max_verify_tree_size: int
    num_heads: int
    vocab_size: int

    @property
    def max_levels(self) -> int:
        """Each head drafts one."""
        return self.num_heads

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> CartesianPlan:
        """The values given, and others chosen to go with them and with the device; a chain of all
        heads where none is given. LimitError where it cannot be."""
        k = 1 if top_k is None else top_k
        if steps is None:
            most = verify_size if k == 1 and verify_size is not None else hints.block_nodes
            steps = max(1, min(self.num_heads, most - 1))
        if verify_size is None:
            most = min(GUIDE_VERIFY_SIZE, self.max_verify_tree_size)
            verify_size = full_tree_size(max(k, 1), steps, most)
        plan = CartesianPlan(k, steps, verify_size)
        self.check(plan)
        return plan

    def check(self, plan: DraftPlan) -> None:
        """Raises LimitError for a plan that base and heads cannot do."""
        k, s, n = plan.top_k, plan.steps, plan.verify_size
        if min(k, s, n) < 1:
            message = f"draft top-k {k}, step {s} and verify size {n} must be at least 1"
            raise LimitError(message, "Raise it.")
        if s > self.num_heads:
            raise self.too_deep(plan)
        if k > self.vocab_size:
            message = (
                f"the tree has nodes of rank {k - 1}, and the vocabulary {self.vocab_size} tokens"
            )
            raise LimitError(message, "Lower `spec_draft_top_k`, or leave such nodes out.")
        if isinstance(plan, StaticPlan):
            if n > self.max_verify_tree_size:
                message = f"the static tree has {n} nodes, the root included"
                raise exceeds_base(n, self.max_verify_tree_size, message)
            return
        most = full_tree_size(k, s, n + 1)
        if n > most:
            message = (
                f"`spec_verify_size` {n}: with top-k {k} and step {s} only {most} nodes can exist"
            )
            raise LimitError(message, "Lower the verify size, or raise top-k or step.")
        if n > self.max_verify_tree_size:
            raise exceeds_base(n, self.max_verify_tree_size)

    def too_deep(self, plan: DraftPlan) -> LimitError:
        """The error for a plan with more levels than heads."""
        heads = counted(self.num_heads, "Medusa head")
        if isinstance(plan, StaticPlan):
            message = f"the choices are {counted(plan.steps, 'level')} deep, and there are {heads}"
            remedy = f"Give choices of at most {counted(self.num_heads, 'level')}; for"
            return LimitError(message, f"{remedy} {DEFAULT} `num_medusa_heads` {self.num_heads}.")
        message = f"`spec_draft_step` {plan.steps}: there are {heads}, one a level"
        return LimitError(message, f"Set it to {self.num_heads} or less.")


@dataclass(frozen=True, kw_only=True)
class MedusaKeys(DrafterOptions):
    """Which Cartesian tree, by TensorRT-LLM's keys, which its scripts and its LLM API share."""

    medusa_choices: str | Sequence[Sequence[int]] | None = option(
        None,
        "The Cartesian tree: paths of ranks such as [[0], [1], [0, 0]], or a published one by its"
        f" name; by default {DEFAULT}.",
        read=checked_choices,
        schema=CHOICES_SCHEMA,
    )
    num_medusa_heads: int | None = option(
        None,
        "Heads that draft; the default choices are cut down to as many levels.",
        low=1,
        high=MAX_HEADS,
    )


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(MedusaKeys):
    """Which Cartesian tree the heads make. Raises OptionError for choices that are no tree, and in
    `plan` for those that the other keys do not allow."""

    max_draft_len: int | None = option(
        None, "Nodes of the tree at most, without the root.", low=1, high=MAX_NODES
    )

    @property
    def spellings(self) -> Spellings:
        """None: the keys are the options' own."""
        return {}

    def plan(self, max_verify_tree_size: int, max_levels: int | None = None) -> StaticPlan:
        """The plan of the tree, whatever the base verifies. Raises LimitError for more heads than
        there are."""
        del max_verify_tree_size
        heads, most = self.num_medusa_heads, self.max_draft_len
        if heads is not None and max_levels is not None and heads > max_levels:
            there = counted(max_levels, "Medusa head")
            message = f"`num_medusa_heads` {heads}, and the draft has {there}"
            remedy = f"Set it to {max_levels} or less, or leave it out: the choices say how many"
            raise LimitError(message, f"{remedy} draft.")
        chosen = StaticPlan.of(cast(Choices | None, self.medusa_choices) or NAMED[DEFAULT])
        if self.medusa_choices is None and heads is not None:
            chosen = chosen.within(heads, 1 + len(chosen.choices))
        if heads is not None and chosen.steps > heads:
            message = (
                f"the choices are {counted(chosen.steps, 'level')} deep, `num_medusa_heads` {heads}"
            )
            remedy = f"Give choices of at most {counted(heads, 'level')}, or"
            raise OptionError(message, f"{remedy} `num_medusa_heads` {chosen.steps}.")
        if most is not None and len(chosen.choices) > most:
            nodes = counted(len(chosen.choices), "node")
            whose = "the choices" if self.medusa_choices else f"the default choices, {DEFAULT},"
            message = f"{whose} have {nodes}, `max_draft_len` is {most}"
            remedy = f"Raise `max_draft_len` to {len(chosen.choices)}"
            raise OptionError(message, f"{remedy}, or give choices of fewer nodes.")
        return chosen


# ---- the method's row


def spec_of(draft: EngineConfig | None) -> MedusaSpec:
    """What the config of the heads' engine says of them."""
    assert draft is not None
    assert isinstance(draft.component.spec, MedusaSpec)
    return draft.component.spec


def open_drafter(sources: DrafterSources) -> MedusaDrafter:
    """The drafter of the heads' engine."""
    assert sources.draft is not None
    return MedusaDrafter(sources.draft.runner, spec_of(sources.draft.config).num_heads)


def limits(base: EngineConfig, draft: EngineConfig | None) -> MedusaLimits:
    """The plans that base and heads were built for."""
    heads = spec_of(draft).num_heads
    return MedusaLimits(base.limits.verify_tree_size, heads, base.component.vocab_size)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    words=" of Medusa heads",
)
__all__ = ["NAME", "ROW"]
