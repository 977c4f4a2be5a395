"""What methods that draft from the text alone would bring: their drafts, held against answers that
are known.

Knows drafters without an engine. No base runs: what is emitted does not depend on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgespec.benchmark.slices import BenchPrompt
from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from edgespec.tuning.replay import DraftedStep

LANE = 0


def simulated(
    drafter: Drafter, plan: DraftPlan, prompts: Sequence[BenchPrompt]
) -> tuple[list[DraftedStep], float]:
    """The steps of all answers, and the seconds of a step that the drafter itself takes. `prompts`
    have their plain answers."""
    drafted, began = list[DraftedStep](), perf_counter()
    for prompt in prompts:
        answer = [] if prompt.truth is None else [*prompt.truth.tokens]
        drafted += answered(drafter, plan, prompt.ids, answer)
    return drafted, (perf_counter() - began) / max(1, len(drafted))


def answered(
    drafter: Drafter, plan: DraftPlan, prompt: Sequence[int], answer: Sequence[int]
) -> list[DraftedStep]:
    """The steps of one answer."""
    drafter.reset(LANE)
    drafter.begin(LANE, prompt, 0)
    drafted, emitted = list[DraftedStep](), 1
    observe(drafter, answer[:1])
    while emitted < len(answer):
        most = plan.within(len(answer) - emitted - 1, plan.verify_size)
        tree = drafter.propose([DraftRequest(LANE, answer[emitted - 1], most)])[0]
        tokens = min(1 + followed(tree, answer[emitted:]), len(answer) - emitted)
        levels = int(tree.depths[-1]) if len(tree) > 1 else 0
        drafted.append(DraftedStep(len(tree), levels, tokens))
        observe(drafter, answer[emitted : emitted + tokens])
        emitted += tokens
    drafter.reset(LANE)
    return drafted


def observe(drafter: Drafter, tokens: Sequence[int]) -> None:
    """Show it what was emitted."""
    drafter.observe([Observation(LANE, None, np.array(tokens, np.int64))])


def followed(tree: DraftTree, tokens: Sequence[int]) -> int:
    """Drafts of a tree that begin a continuation."""
    node, count = 0, 0
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            return count
        node, count = child, count + 1
    return count
