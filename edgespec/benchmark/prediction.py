"""What the cost model says of the steps of a plan, beside what was measured.

Knows costs, and how much was drafted and accepted. What a step costs stands in
`runtime.cost_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.benchmark.cases import Cell, DecodingVariant
from edgespec.runtime.costs.cost_model import CostModel, best_chain


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one sequence: levels and nodes that were drafted, the root left out, and the tokens
    that it emitted."""

    levels: int
    drafted: int
    tokens: int


def predicted_speed(
    costs: CostModel | None,
    variant: DecodingVariant,
    cell: Cell,
    *,
    prompt_tokens: float,
    steps: Sequence[Step],
    acceptance: Sequence[float],
) -> float | None:
    """The speed of a plan over plain decoding by the costs that are stored. None without costs or
    steps.

    Of a fixed plan the steps that were made, each with what it costs. An adaptive one is the best
    chain by the `acceptance` of each position where all before it were accepted: as it was dialled,
    else as it was measured.
    """
    plan, dial = variant.plan, variant.dial
    if costs is None or plan is None or not steps:
        return None
    context = int(prompt_tokens + cell.output_tokens / 2)
    here = costs.at(context, cell.batch_size, plan.top_k)
    if plan.adaptive:
        dialled = [] if dial is None else [dial.at(depth) for depth in range(1, plan.steps + 1)]
        return best_chain(here, dialled or acceptance).over_plain
    seconds = sum(here.step(1 + step.drafted, step.levels, step.tokens) for step in steps)
    return sum(step.tokens for step in steps) * here.plain / seconds
