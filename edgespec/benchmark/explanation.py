"""What the stored costs mean for drafting here, in plain sentences.

Knows the cost model and English. What was measured of a plan stands in `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgespec.benchmark.compare import words
from edgespec.errors import counted
from edgespec.runtime.cost_model import CostModel, StepCosts, best_chain, break_even
from edgespec.runtime.speedup import ms

ROWS = (2, 4, 8, 16, 32)
LEVELS = (1, 3)  # of the chains whose break-even is said
RATES = (0.3, 0.5, 0.7, 0.9)
DEEPEST = 8  # levels of the chains that are looked at
CLOSE = 0.1  # a prediction within so much of what was measured is said to hold


def explained(
    costs: CostModel, contexts: Sequence[int], batch_sizes: Sequence[int]
) -> Iterator[str]:
    """The sentences, for each context and batch size."""
    for context in contexts:
        for batch_size in batch_sizes:
            yield from of_place(costs.at(context, batch_size), context, batch_size)


def of_place(costs: StepCosts, context: int, batch_size: int) -> Iterator[str]:
    """What a step costs at one context and batch size, and from which acceptance on drafts pay."""
    where = f"Behind {counted(context, 'token')}"
    if batch_size > 1:
        where += f", {batch_size} sequences at a time"
    known = [rows for rows in ROWS if rows < len(costs.passes)]
    multiples = ", ".join(f"{rows} rows {costs.passes[rows] / costs.plain:.2f}" for rows in known)
    yield f"{where}, a plain step takes {ms(costs.plain)}; as a multiple of that, {multiples}."
    if not costs.propose[1]:
        yield "Drafts cost next to nothing here: they come from the text itself."
    for levels in LEVELS:
        yield of_chain(costs, levels)
    yield "By acceptance of a draft, the best chain: " + "; ".join(map(best(costs), RATES)) + "."


def of_chain(costs: StepCosts, levels: int) -> str:
    """What a step with a chain costs, and what it takes to pay."""
    step = costs.step(levels + 1, levels, 1.0)
    draft, more = costs.propose[levels] + costs.observe[1], costs.passes[levels + 1] - costs.plain
    found = break_even(costs, levels)
    pays = (
        "which no acceptance pays for"
        if found is None
        else f"which pays from an acceptance of {found:.2f} on"
    )
    return (
        f"A step with {counted(levels, 'draft')} takes {step / costs.plain:.2f} plain steps"
        f" ({ms(draft)} to draft, {ms(max(0.0, more))} more to verify), {pays}."
    )


def best(costs: StepCosts) -> Any:
    """What is said of the best chain at an acceptance."""

    def said(rate: float) -> str:
        choice = best_chain(costs, [rate] * DEEPEST)
        if not choice.levels:
            return f"at {rate:g} none"
        return f"at {rate:g} {counted(choice.levels, 'draft')}, {choice.over_plain:.2f} x plain"

    return said


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was predicted of each way of drafting, beside what was measured."""
    for row in rows:
        predicted, over = row["predicted_speed_over_plain"], row["speed_over_plain"]
        if predicted is None or over is None:
            continue
        apart = over["median"] / predicted - 1
        verdict = "as predicted" if abs(apart) <= CLOSE else f"{100 * apart:+.0f} % of it"
        yield (
            f"{words(row)}: {over['median']:.2f} x plain, predicted {predicted:.2f} ({verdict})."
        )
