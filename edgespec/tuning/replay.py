"""What a plan would have brought in the steps of a sample that was drafted with a wider one.

Knows trees, plans and the policy. A plan's tree is cut out of the one that was drafted, as its
drafter would have made it; a draft that is not in the wide tree counts as not accepted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.contract import tree_pool_size
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.draft_budget import DraftBudget
from edgespec.runtime.plans.policy import AdaptivePolicy, AdaptiveState, Asking
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree, TreePool
from edgespec.tuning.steps import LEAST_PROB, SampledStep


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step: nodes that are verified, the root included, levels that are drafted, and tokens that
    it emits. 1 node is a plain step."""

    nodes: int
    levels: int
    tokens: int


def replayed(
    steps: Sequence[SampledStep], plan: DraftPlan, *, beams: bool = True
) -> list[DraftedStep]:
    """A fixed plan. `beams`: the drafter goes on with the best `top_k` nodes of each level alone;
    without, with all of them, as where a block is drafted at once."""
    if isinstance(plan, StaticPlan):
        return [static_step(step, plan) for step in steps]
    if plan.top_k == 1:
        length = min(plan.steps, plan.verify_size - 1)
        return [chain_step(step, length) for step in steps]
    drafted = []
    for step in steps:
        kept = {0, *best_nodes(step, plan.top_k, plan.steps, beams=beams)[: plan.verify_size - 1]}
        size = plan.verify_size
        if beams:
            size = min(size, tree_pool_size(plan.top_k, plan.steps))
        drafted.append(DraftedStep(size, plan.steps, accepted(step.path, kept)))
    return drafted


def chain_step(step: SampledStep, length: int) -> DraftedStep:
    """A chain of the best draft at each depth."""
    tokens = 1
    for rank in step.ranks[:length]:
        if rank:
            break
        tokens += 1
    return DraftedStep(length + 1, length, tokens)


def static_step(step: SampledStep, plan: StaticPlan) -> DraftedStep:
    """A tree of chosen ranks."""
    chosen, tokens = set(plan.choices), 1
    while tokens <= len(step.ranks) and step.ranks[:tokens] in chosen:
        tokens += 1
    return DraftedStep(plan.verify_size, plan.steps, tokens)


def best_nodes(step: SampledStep, top_k: int, levels: int, *, beams: bool) -> list[int]:
    """The nodes that a drafter of this width and depth makes, the most probable first."""
    scores, depth_of = step.scores, {0: 0}
    beam, pool = [0], list[int]()
    for depth in range(1, levels + 1):
        born = [child for node in beam for child in step.children[node][:top_k]]
        if not born:
            break
        depth_of |= dict.fromkeys(born, depth)
        pool += born
        beam = sorted(born, key=lambda node: (-scores[node], node))[:top_k] if beams else born
    return sorted(pool, key=lambda node: (-scores[node], depth_of[node], node))


def accepted(path: Sequence[int], kept: set[int]) -> int:
    """Tokens of a step: the nodes of its path up to the first that is not kept."""
    return next((n for n, node in enumerate(path) if node not in kept), len(path))


# ---- as far as it pays


def adapted(
    answers: Sequence[Sequence[SampledStep]],
    plan: DraftPlan,
    policy: AdaptivePolicy,
    prior: Sequence[float] = (),
    *,
    budgeted: bool = True,
    beams: bool = True,
) -> list[DraftedStep]:
    """What the policy makes of the sample's answers, up to a plan, one sequence alone. Where it
    stands between two sampled steps it is given the later one's drafts."""
    return [
        drafted
        for steps in answers
        for drafted in adapted_answer(steps, plan, policy, prior, budgeted=budgeted, beams=beams)
    ]


def adapted_answer(
    steps: Sequence[SampledStep],
    plan: DraftPlan,
    policy: AdaptivePolicy,
    prior: Sequence[float],
    *,
    budgeted: bool,
    beams: bool,
) -> list[DraftedStep]:
    """`adapted`, of one answer."""
    if not steps:
        return []
    state, drafted = AdaptiveState(AcceptanceEstimate(prior)), list[DraftedStep]()
    starts = [step.context for step in steps]
    place, end = starts[0], starts[-1] + len(steps[-1].path)
    while place < end:
        step = steps[min(bisect_left(starts, place), len(steps) - 1)]
        budgeted = budgeted and step.probs is not None
        (decision,) = policy.decide([Asking(state, plan, place, plan.steps, budgeted)], 1)
        levels, nodes = 0, [0]
        if decision.levels and decision.budget is not None:
            levels, nodes = within_budget(step, plan, decision.budget, beams=beams)
        elif decision.levels:
            levels = decision.levels
            size = plan.within(levels, len(decision.costs.passes) - 1).verify_size
            nodes = [0, *best_nodes(step, plan.top_k, levels, beams=beams)[: size - 1]]
        nodes = sorted(nodes)
        renamed = {node: index for index, node in enumerate(nodes)}
        path = [renamed[node] for node in step.path[: accepted(step.path, set(nodes))]]
        policy.learn(state, decision, tree_of(step, nodes, renamed, levels), path)
        drafted.append(DraftedStep(len(nodes), levels, len(path)))
        place += len(path)
    return drafted


def tree_of(
    step: SampledStep, nodes: Sequence[int], renamed: dict[int, int], levels: int
) -> DraftTree:
    """Some nodes of a step as a tree, with their probabilities."""
    import numpy as np

    parents = [renamed.get(step.parents[node], -1) for node in nodes]
    probs = None
    if step.probs is not None:
        probs = np.array([step.probs[node] for node in nodes], np.float32)
    return DraftTree(np.array(nodes, np.int64), np.array(parents, np.int64), probs, levels=levels)


def within_budget(
    step: SampledStep, plan: DraftPlan, budget: DraftBudget, *, beams: bool
) -> tuple[int, list[int]]:
    """Levels that are drafted and nodes that are verified, the root among them."""
    pool = TreePool()
    entry_of, node_of = {0: -1}, list[int]()

    def grow(node: int) -> list[int]:
        import numpy as np

        children = step.children[node][: plan.top_k]
        if not children:
            return []
        assert step.probs is not None
        logs = [math.log(max(step.probs[child], LEAST_PROB)) for child in children]
        ids, scores = np.array(children, np.int64), np.array(logs, np.float32)
        born = pool.add_children(entry_of[node], ids, scores)
        entry_of.update(zip(children, born, strict=True))
        node_of.extend(children)
        return children

    beam, levels = [0], 0
    while levels < budget.levels:
        born = [child for node in beam for child in grow(node)]
        if not born:
            break
        levels += 1
        best = pool.best([entry_of[node] for node in born], plan.top_k)
        beam = [node_of[entry] for entry in best] if beams else born
        if beams and levels < budget.levels:
            probs = [pool.prob(entry) for entry in range(len(pool.tokens))]
            survival = budget.survival(pool.parents, probs)
            reached = sum(survival[entry_of[node]] for node in beam)
            size = min(1 + len(pool.tokens), plan.verify_size)
            if not budget.goes_on(reached, levels, size, len(beam)):
                break
    size = min(plan.verify_size, 1 + len(pool.tokens))
    kept = budget.select(pool, 0, size).tokens[1:].tolist() if node_of else []
    return max(levels, 1) if beams else budget.levels, [0, *kept]
