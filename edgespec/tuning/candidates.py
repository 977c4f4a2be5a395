"""What may draft, and how much: the plans that `tune` compares, within the limits that the engines
were built for.

Knows limits, plans and options. What a plan is worth stands in `ranking`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.backends.base import PlanHints
from edgespec.benchmark.cases import plan_kind, plan_words
from edgespec.errors import LimitError
from edgespec.methods import METHODS
from edgespec.runtime.costs.cost_model import CostModel, best_static_tree
from edgespec.runtime.drafters.block_drafter import BlockLimits
from edgespec.runtime.drafters.registry import DRAFTERS, engineless_methods
from edgespec.runtime.engine import Engine
from edgespec.runtime.opening.tuned_plan import plan_to_dict
from edgespec.runtime.plans.plan import PlanLimits
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan

DEPTHS = (10, 8, 6, 5, 4, 3, 2, 1)  # of the sample's tree, the first that fits
WIDTHS = (8, 6, 5, 4, 3, 2)
LONGEST = 16  # of chains
TREE_SIZES = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 60)
STATIC_SIZES = (60, 32, 16, 8)
NO_HINTS = PlanHints(steps=1, block_nodes=2)  # never asked: all sizes are given
KINDS = ("chain", "block", "tree", "static tree")  # the simplest first


@dataclass(frozen=True)
class Candidate:
    """A way to draft: with the engine's own drafter where `own`, else with a method that needs no
    engine; `options` are the method's."""

    method: str
    plan: DraftPlan
    own: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """Its name in a journal."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @property
    def words(self) -> str:
        """As a table has it."""
        up_to = "up to " if self.plan.adaptive else ""
        options = "".join(f", {name}={value}" for name, value in self.options)
        method = "" if self.own and not options else f"{METHODS[self.method].name}{options}: "
        return f"{method}{up_to}{plan_words(self.plan)}"

    @property
    def family(self) -> str:
        """What it is one of, so that several kinds are measured: the engine's own drafter by a
        fixed plan or as far as it pays, or another method."""
        if not self.own:
            return self.method
        return "adaptive" if self.plan.adaptive else "fixed"

    @property
    def complexity(self) -> tuple[int, bool, int, int]:
        """Less is simpler. A plan that adapts comes before one that does not: it is the default,
        and stops where drafts do not pay."""
        options = len(self.options) + (not self.own)
        kind = KINDS.index(plan_kind(self.plan))
        return options, not self.plan.adaptive, kind, self.plan.verify_size

    @property
    def twin(self) -> Candidate:
        """The same, adaptive where it is fixed and the other way round."""
        return replace(self, plan=replace(self.plan, adaptive=not self.plan.adaptive))

    def to_dict(self) -> dict[str, Any]:
        """As a journal and a report have it."""
        return {
            "method": self.method,
            "plan": plan_to_dict(self.plan),
            "own": self.own,
            "options": dict(self.options),
        }


def planned(
    limits: PlanLimits, top_k: int, levels: int, verify_size: int | None
) -> DraftPlan | None:
    """A plan of exactly these sizes; None where base and drafter cannot do it. A block's levels
    follow from its nodes."""
    steps = None if isinstance(limits, BlockLimits) else levels
    try:
        plan = limits.plan(top_k, steps, verify_size, NO_HINTS)
    except LimitError:
        return None
    return plan if top_k == 1 or isinstance(plan, BlockPlan) or plan.steps == levels else None


def wide_plan(limits: PlanLimits, *, trees: bool = True) -> DraftPlan:
    """The plan of the sample: a tree as deep and as wide as the engines were built for; a chain
    where there are no trees. Raises LimitError where nothing can be drafted."""
    plans = (planned(limits, k, depth, None) for depth in DEPTHS for k in WIDTHS)
    if trees and (tree := next(filter(None, plans), None)) is not None:
        return tree
    chains = (planned(limits, 1, n, n + 1) for n in range(LONGEST, 0, -1))
    if (chain := next(filter(None, chains), None)) is None:
        raise LimitError("the engines draft nothing", "Build with `max_verify_tree_size` 60.")
    return chain


def chains(limits: PlanLimits, longest: int) -> Iterator[DraftPlan]:
    """Chains of 1 to `longest` drafts."""
    for length in range(1, min(longest, LONGEST) + 1):
        if (plan := planned(limits, 1, length, length + 1)) is not None:
            yield plan


def trees(limits: PlanLimits, wide: DraftPlan) -> Iterator[DraftPlan]:
    """Dynamic trees that can be cut out of the sample's."""
    depths = [wide.steps] if isinstance(wide, BlockPlan) else range(2, wide.steps + 1)
    for top_k in range(2, wide.top_k + 1):
        for depth in depths:
            for size in TREE_SIZES:
                plan = planned(limits, top_k, depth, size) if size <= wide.verify_size else None
                if plan is not None:
                    yield plan


def static_trees(
    limits: PlanLimits,
    acceptance: Sequence[Sequence[float]],
    costs: CostModel,
    context: int,
    batch: int,
    most: int,
) -> list[StaticPlan]:
    """The static trees that the cost model holds best, of up to several sizes, by the acceptance of
    each rank at each depth; none where the drafter makes none."""
    plans = dict[tuple[tuple[int, ...], ...], StaticPlan]()
    for size in STATIC_SIZES:
        for ranks in {len(acceptance[0]), 4, 2} if acceptance else ():
            kept = [rates[:ranks] for rates in acceptance]
            here = costs.at(context, batch, min(ranks, len(acceptance[0])))
            choice = best_static_tree(here, kept, min(size, most))
            if len(choice.choices) < 2 or max(path[-1] for path in choice.choices) == 0:
                continue
            plan = StaticPlan.of(choice.choices)
            try:
                limits.check(plan)
            except LimitError:
                continue
            plans[plan.choices] = plan
    return [*plans.values()]


def of_text(engine: Engine) -> Iterator[Candidate]:
    """Methods without an engine, each with all options that its row says to try."""
    for method in engineless_methods():
        kind = DRAFTERS[method].options
        for tried in DRAFTERS[method].tries or ({},):
            options = None if kind is None else kind(**tried)
            try:
                limits = engine.planner.limits(method, options)
                plan = limits.plan(None, None, None, engine.planner.hints)
                limits.check(plan)
            except LimitError:
                continue
            yield Candidate(method, plan, own=False, options=tuple(sorted(tried.items())))
