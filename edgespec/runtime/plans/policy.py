"""How far to draft in each step: by what a step costs here, and by what the sequence's own drafts
brought.

Knows sequences, costs and estimates. Asks no clock: the same request gives the same drafts, however
busy the machine is. What is emitted does not depend on it, unless the accept rule is one that
changes the answer.

One sequence drafts while that brings more tokens for the measured cost than plain decoding, each
step as far as its draft is sure (see `draft_budget`); else it decodes plainly, and tries again
after a while, each time it fails after twice as long. Sequences of a batch, and drafters that give
no probabilities, draft the number of levels that the acceptance by depth says is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.backends.base import PlanHints
from edgespec.contract import MAX_BLOCK_NODES
from edgespec.runtime.costs.cost_model import CostModel, StepCosts, best_chain, chain_tokens
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.draft_budget import DraftBudget
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

# The most that is drafted where no sizes are given: how much of it pays is seen step by step
MOST = PlanHints(steps=8, block_nodes=MAX_BLOCK_NODES)

FIRST_WAIT, LONGEST_WAIT = 8, 128  # plain steps before drafts are tried again
TRIAL_STEPS = 3  # steps that draft after a try that succeeded, whatever was before
TRIAL_LEVELS = 2
TRIAL_LEVELS_OF_BATCH = 1  # what a batch verifies costs more, and its sequences learn together
TRY_SHARE = 1 / 32  # of the time of the plain steps before it that a try of a batch may take
START_WEIGHT = 2.0  # steps that the model's own expectation counts for at the start
DECAY = 0.97  # of tokens and seconds, a step
MARGIN = 0.01  # by which drafting must be faster before it begins again


@dataclass(slots=True)
class AdaptiveState:
    """What the policy remembers of one sequence. `tokens` and `seconds` are those of its drafting
    steps by the model, old ones counting less; `waited` counts plain steps since the last draft."""

    estimate: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    drafting: bool = True
    tokens: float = 0.0
    seconds: float = 0.0
    waited: int = 0
    patience: int = FIRST_WAIT
    trial: int = 0  # steps that still draft, whatever the estimates say
    probing: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What a sequence may draft in a step: no levels are no draft, and `pauses` says that more were
    allowed. `costs` are those of the step, and a `budget` says of each draft whether it pays.
    `alone`: no other sequence runs."""

    levels: int
    costs: StepCosts
    budget: DraftBudget | None = None
    alone: bool = True
    pauses: bool = False


@dataclass(frozen=True, slots=True)
class Asking:
    """A sequence that may draft up to `levels` levels of its plan. `budgeted`: its drafter asks a
    budget which drafts pay."""

    state: AdaptiveState
    plan: DraftPlan
    context: int
    levels: int
    budgeted: bool


class AdaptivePolicy:
    """Decides by a cost model, step by step."""

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def decide(self, asking: Sequence[Asking], batch: int) -> list[Decision]:
        """A decision for each of the sequences that ask, of `batch` that run."""
        if not asking:
            return []
        context = sum(one.context for one in asking) // len(asking)
        costs = self.model.at(context, batch, max(one.plan.top_k for one in asking))
        if batch == 1 and asking[0].budgeted:
            return [self.alone(asking[0], costs)]
        return together(asking, costs, batch)

    def alone(self, one: Asking, costs: StepCosts) -> Decision:
        """One sequence whose drafter knows how sure it is."""
        state = one.state
        if not state.seconds:
            begin(state, costs, one.plan.steps)
        if not one.levels:
            return Decision(0, costs)  # nothing may be drafted: it says nothing of the drafts
        rate = max(state.tokens / state.seconds, 1 / costs.plain)
        levels = one.levels
        state.probing = False
        if not state.drafting:
            state.waited += 1
            if state.waited <= state.patience:
                return Decision(0, costs, pauses=True)
            state.probing, levels, rate = True, min(levels, TRIAL_LEVELS), 1 / costs.plain
        return Decision(levels, costs, DraftBudget(state.estimate, costs, rate, levels))

    def learn(
        self, state: AdaptiveState, decision: Decision, tree: DraftTree, path: Sequence[int]
    ) -> None:
        """Take in what a step with this decision verified and accepted, the root first. Forced
        tokens are nobody's drafts: plain decoding has them too."""
        state.estimate.learn(tree, path)
        if not decision.levels:
            return
        forced = sum(0 < node <= tree.num_forced for node in path)
        emitted, nodes = len(path) - forced, len(tree) - tree.num_forced
        accepted = emitted - 1
        if decision.budget is None:
            # One success says little: a few steps more do
            if decision.alone and state.probing and accepted:
                state.trial, state.patience = TRIAL_STEPS, max(FIRST_WAIT, state.patience // 4)
            return
        costs = decision.costs
        if state.probing:
            state.waited = 0
            if not accepted:
                state.patience = longer(state.patience)
                return
            state.patience = max(FIRST_WAIT, state.patience // 2)
            state.drafting = True
            state.seconds = START_WEIGHT * costs.plain
            state.tokens = START_WEIGHT * (1 + MARGIN)
        spent = costs.step(nodes, tree.drafted_levels, emitted)
        state.tokens = DECAY * state.tokens + emitted
        state.seconds = DECAY * state.seconds + spent
        if state.tokens * costs.plain < (1 - MARGIN) * state.seconds:
            state.drafting, state.waited = False, 0


def begin(state: AdaptiveState, costs: StepCosts, levels: int) -> None:
    """Where a sequence did not draft alone before: as the model expects by its estimates, or by
    their prior."""
    choice = best_chain(costs, state.estimate.rates(levels))
    state.tokens, state.seconds = START_WEIGHT * choice.tokens, START_WEIGHT * choice.seconds
    state.drafting = choice.levels > 0


def together(asking: Sequence[Asking], costs: StepCosts, batch: int) -> list[Decision]:
    """Sequences that draft the same number of levels: a pass costs by the longest. The number that
    brings most tokens for the time, or none; then from time to time one level, to try again."""
    most = max(one.levels for one in asking)
    if not most:
        return [Decision(0, costs, alone=batch == 1) for _ in asking]
    tokens = [float(batch)] * (most + 1)
    for one in asking:
        own = chain_tokens(one.state.estimate.rates(one.levels))
        for levels in range(1, most + 1):
            tokens[levels] += own[min(levels, one.levels)] - 1
    values = [batch / costs.plain]
    for levels in range(1, most + 1):
        nodes = max(one.plan.within(levels, len(costs.passes) - 1).verify_size for one in asking)
        values.append(tokens[levels] / costs.step(nodes, levels, tokens[levels] / batch))
    best = max(range(most + 1), key=values.__getitem__)
    if not any(one.state.drafting for one in asking) and values[best] < (1 + MARGIN) * values[0]:
        best = 0
    states = [one.state for one in asking]
    for state in states:
        tell(state, pays=best > 0)
    if not best and is_due(states, costs, batch):
        best = min(most, TRIAL_LEVELS if batch == 1 else TRIAL_LEVELS_OF_BATCH)
        for state in states:
            state.probing, state.trial = not state.trial, max(0, state.trial - 1)
    return [
        Decision(min(best, one.levels), costs, alone=batch == 1, pauses=not best and one.levels > 0)
        for one in asking
    ]


def is_due(states: Sequence[AdaptiveState], costs: StepCosts, batch: int) -> bool:
    """Whether drafts are to be tried, which do not pay by the estimates: in a batch also where none
    of its sequences has drafted yet, and not before TRY_SHARE of the time has paid for it."""
    if batch == 1:
        shortest = 0.0
    elif not any(state.estimate.has_seen for state in states):
        return True
    else:
        levels = TRIAL_LEVELS_OF_BATCH
        shortest = (costs.step(levels + 1, levels, 1) / costs.plain - 1) / TRY_SHARE
    return any(state.trial or state.waited > max(state.patience, shortest) for state in states)


def tell(state: AdaptiveState, *, pays: bool) -> None:
    """Whether drafts pay for all that run: where they do not, and a try did not change that, the
    next one comes after twice as long."""
    if state.probing:
        state.patience = max(FIRST_WAIT, state.patience // 2) if pays else longer(state.patience)
        state.waited = 0
    state.probing, state.drafting = False, pays
    state.waited = 0 if pays else state.waited + 1


def longer(patience: int) -> int:
    """The wait after a try that failed."""
    return min(2 * patience, LONGEST_WAIT)
