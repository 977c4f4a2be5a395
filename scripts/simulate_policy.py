"""Simulates the adaptive policy without an engine: its speed beside the best fixed chain's, both by
a cost model and by drafts that are right at random.

    python scripts/simulate_policy.py                        # costs of a 0.6 B model in INT4 on two cores
    python scripts/simulate_policy.py --engine-dir ENGINES   # costs as they were measured there

A draft at `sure` knows how likely each of its tokens is: the probability is drawn anew for each, with
the acceptance as its mean. One at `blind` gives no probabilities. All figures are exact functions of
the seed: no clock is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from edgespec.contract import Role
from edgespec.runtime.costs.cost_model import CostModel, best_chain, chain_tokens
from edgespec.runtime.costs.cost_profile import (
    CostProfile,
    ObserveTime,
    PassTime,
    ProposeTime,
    read_profiles,
)
from edgespec.runtime.plans.policy import MOST, AdaptivePolicy, AdaptiveState, Asking, Decision
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

PROMPT = 128
# Measured on Qwen3-0.6B's shape in INT4 with an EAGLE-3 draft, two cores of an AMD Zen 5: seconds of
# rows, by context
ROWS = (1, 2, 4, 8, 16, 32, 60)
BASE = {
    128: (10.5e-3, 1.0, 1.02, 1.04, 1.12, 1.69, 3.0, 5.5),
    2048: (21.3e-3, 1.0, 1.1, 1.20, 1.34, 2.04, 3.6, 6.6),
}
BATCH = {1: 1.0, 4: 1.04, 8: 1.12}
DRAFT_S, OBSERVE_S = 1.0e-3, 0.9e-3


def made_profile() -> CostProfile:
    """Returns the costs of a 0.6 B model; a batch costs as a pass of as many rows."""
    base, propose, observe = [], [], []
    for context, (plain, *factors) in BASE.items():
        for batch in BATCH:
            for rows in ROWS:
                factor = float(np.interp(rows * batch, ROWS, factors))
                if rows * batch > ROWS[-1]:
                    factor = factors[-1] * rows * batch / ROWS[-1]
                seconds = plain * factor
                base.append(PassTime(rows=rows, context=context, batch=batch, seconds=seconds))
    for batch, factor in BATCH.items():
        for levels in (1, 2, 4, 8):
            seconds = factor * DRAFT_S * (levels - 1) + 5e-5
            propose.append(
                ProposeTime(levels=levels, top_k=1, context=128, batch=batch, seconds=seconds)
            )
        for rows in (1, 2, 4, 8):
            seconds = factor * OBSERVE_S * (1 + 0.02 * rows)
            observe.append(ObserveTime(rows=rows, context=128, batch=batch, seconds=seconds))
    return CostProfile(
        role=Role.BASE, base=tuple(base), propose=tuple(propose), observe=tuple(observe)
    )


class SimulatedDraft:
    """Drafts of one sequence, each right with the probability that it is given."""

    def __init__(self, rate: float, spread: float, seed: int) -> None:
        self.rate, self.spread, self.rng = rate, spread, np.random.default_rng(seed)

    def probs(self, count: int) -> list[float]:
        """Returns how likely each draft of a chain is to be right."""
        if not self.spread or self.rate in (0.0, 1.0):
            return [self.rate] * count
        a, b = self.rate / self.spread, (1 - self.rate) / self.spread
        return [float(p) for p in self.rng.beta(a, b, count)]

    def chain(self, decision: Decision) -> tuple[DraftTree, int, int]:
        """Returns the chain of a decision, the levels that were drafted, and how many are right."""
        probs, drafted = self.probs(decision.levels), decision.levels
        budget = decision.budget
        kept = len(probs)
        if budget is not None:
            drafted = 1
            survival = budget.survival(range(-1, len(probs) - 1), probs)
            while drafted < decision.levels and budget.goes_on(
                survival[drafted - 1], drafted, 1 + drafted, 1
            ):
                drafted += 1
            kept = budget.num_nodes(survival[:drafted]) - 1
        right = 0
        while right < kept and self.rng.random() < probs[right]:
            right += 1
        found = np.array([1.0, *probs[:kept]], np.float32) if budget is not None else None
        tree = DraftTree(np.arange(kept + 1), np.arange(-1, kept), found, levels=drafted)
        return tree, drafted, right


def simulated(
    model: CostModel, rate: float, batch: int, context: int, tokens: int, *, sure: bool, seed: int
) -> float:
    """Returns tokens a second of a batch of answers over those of plain decoding."""
    policy, plan = AdaptivePolicy(model), DraftPlan(1, MOST.steps, MOST.steps + 1, adaptive=True)
    drafts = [SimulatedDraft(rate, 0.5 if sure else 0.0, seed * batch + i) for i in range(batch)]
    states, done, waiting = [AdaptiveState() for _ in drafts], [0] * batch, [0] * batch
    spent, plain = 0.0, 0.0
    while min(done) < tokens:
        running = [i for i in range(batch) if done[i] < tokens]
        place = context + sum(done[i] for i in running) // len(running)
        asking = [Asking(states[i], plan, place, plan.steps, sure) for i in running]
        decisions = policy.decide(asking, len(running))
        costs = model.at(place, len(running))
        nodes, levels, observed = 1, 0, []
        for i, decision in zip(running, decisions, strict=True):
            tree, drafted, right = DraftTree.root_only(0), 0, 0
            if decision.levels:
                observed.append(waiting[i])  # all that was committed since the last draft
                waiting[i] = 0
                tree, drafted, right = drafts[i].chain(decision)
            nodes, levels = max(nodes, len(tree)), max(levels, drafted)
            policy.learn(states[i], decision, tree, list(range(right + 1)))
            done[i] += right + 1
            waiting[i] += right + 1
        spent += costs.passes[nodes] + costs.propose[levels]
        spent += costs.observed(max(observed)) if observed else 0
    for i in range(tokens):
        plain += model.at(context + i, batch).plain
    return plain / spent * sum(done) / (batch * tokens)


def main() -> None:
    """Prints one JSON object per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--batch", type=int, action="append")
    args = parser.parse_args()
    profile = made_profile()
    if args.engine_dir is not None:
        profile = next(p for p in read_profiles(args.engine_dir) if p.propose)
    model = CostModel(profile)
    for context in args.context or (128, 2048):
        for batch in args.batch or (1, 4, 8):
            for rate in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9):
                best = best_chain(model.at(context + args.tokens // 2, batch), [rate] * MOST.steps)
                assert best.tokens == chain_tokens([rate] * best.levels)[-1]
                row = {"context": context, "batch": batch, "acceptance": rate}
                row |= {"best_levels": best.levels, "best": round(best.over_plain, 3)}
                for name, sure in (("blind", False), ("sure", True)):
                    runs = [
                        simulated(model, rate, batch, context, args.tokens, sure=sure, seed=seed)
                        for seed in range(args.answers)
                    ]
                    row[name] = round(float(np.mean(runs)), 3)
                row["blind_over_best"] = round(row["blind"] / row["best"], 3)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
