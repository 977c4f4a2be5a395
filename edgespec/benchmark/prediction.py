"""What the cost model says of a plan, beside what was measured.

Knows stored costs and measured acceptance. What a step costs stands in `runtime.cost_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.benchmark.cases import ADAPTIVE, Cell, Variant
from edgespec.methods import METHODS
from edgespec.runtime.cost_model import CostModel, best_chain, chosen
from edgespec.runtime.cost_profile import find_profile
from edgespec.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model of what was measured on this machine; None with the reason where there is none."""

    model: CostModel | None
    why: str | None = None

    @classmethod
    def of(cls, engine_dir: Path, engine: Engine) -> Prediction:
        """By the stored costs of an engine directory."""
        method = engine.method
        has_engine = method is not None and METHODS[method].needs_engine
        found = find_profile(engine_dir, engine.config.role, method, has_engine=has_engine)
        return cls(None if found.profile is None else CostModel(found.profile), found.why)

    def over_plain(
        self,
        variant: Variant,
        cell: Cell,
        *,
        prompt_tokens: float,
        acceptance_length: float | None,
        acceptance: Sequence[float],
    ) -> float | None:
        """The speed of a plan over plain decoding, from the acceptance that was measured: tokens a
        step, or for an adaptive plan the best chain by the `acceptance` of each position where all
        before it were accepted. None without costs or acceptance."""
        plan = variant.plan
        if self.model is None or plan is None or acceptance_length is None:
            return None
        context = int(prompt_tokens + cell.output_tokens / 2)
        costs = self.model.at(context, cell.batch_size, plan.top_k)
        if variant.policy == ADAPTIVE:
            dial = variant.dial
            rates = acceptance if dial is None else [dial.at(d + 1) for d in range(plan.steps)]
            return best_chain(costs, rates).over_plain
        return chosen(costs, plan.steps, plan.verify_size, acceptance_length).over_plain
