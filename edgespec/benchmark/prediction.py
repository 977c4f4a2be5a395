"""What the cost model says of a plan, beside what was measured.

Knows costs and measured acceptance. What a step costs stands in `runtime.cost_model`.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.benchmark.cases import Cell, Variant
from edgespec.runtime.cost_model import CostModel, best_chain, chosen


def predicted_speed(
    costs: CostModel | None,
    variant: Variant,
    cell: Cell,
    *,
    prompt_tokens: float,
    acceptance_length: float | None,
    acceptance: Sequence[float],
) -> float | None:
    """The speed of a plan over plain decoding by the costs that are stored. None without costs or
    acceptance.

    A fixed plan is taken with the tokens a step that were measured. An adaptive one is the best
    chain by the `acceptance` of each position where all before it were accepted: as it was dialled,
    else as it was measured.
    """
    plan, dial = variant.plan, variant.dial
    if costs is None or plan is None or acceptance_length is None:
        return None
    context = int(prompt_tokens + cell.output_tokens / 2)
    here = costs.at(context, cell.batch_size, plan.top_k)
    if not plan.adaptive:
        return chosen(here, plan.steps, plan.verify_size, acceptance_length).over_plain
    dialled = [] if dial is None else [dial.at(depth) for depth in range(1, plan.steps + 1)]
    return best_chain(here, dialled or acceptance).over_plain
