"""The sample: how often drafts are accepted on the user's prompts, drafted as widely as the engines
allow, every node with the probability that the draft gives it.

Knows an open engine and its session. What follows from the sample stands in `ranking`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.benchmark.slices import BenchPrompt, Slice, Stopping, served
from edgespec.runtime.drafters.base import Tunable
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.draft_budget import DraftBudget
from edgespec.runtime.plans.policy import AdaptivePolicy, AdaptiveState, Asking, Decision
from edgespec.runtime.trees.tree import DraftPlan, DraftTree, TreePool
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.steps import SampledStep


class WholeBudget(DraftBudget):
    """All drafts pay: the tree of a fixed plan, with the probabilities of its nodes."""

    def goes_on(self, reached: float, level: int, nodes: int, width: int) -> bool:
        """Always."""
        return True

    def select(
        self, pool: TreePool, pending: int, size: int, survival: list[float] | None = None
    ) -> DraftTree:
        """The best entries by the draft's own probabilities."""
        kept = sorted(pool.best([*range(len(pool.tokens))], size - 1))
        probs = np.array([1.0, *(pool.prob(entry) for entry in kept)], np.float32)
        return replace(pool.tree(pending, kept), probs=probs)

    def cut(self, tree: DraftTree, probs: Sequence[float]) -> DraftTree:
        """The whole tree."""
        return replace(tree, probs=np.array([1.0, *probs], np.float32))


class WholePolicy(AdaptivePolicy):
    """Drafts all of a plan in every step."""

    def decide(self, asking: Sequence[Asking], batch: int) -> list[Decision]:
        """All levels."""
        costs = self.model.at(0, batch)
        return [
            Decision(one.levels, costs, WholeBudget(AcceptanceEstimate(), costs, 0.0, one.levels))
            for one in asking
        ]

    def learn(
        self, state: AdaptiveState, decision: Decision, tree: DraftTree, path: Sequence[int]
    ) -> None:
        """Nothing: it decides by nothing."""


def run(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    candidate: Candidate | None,
    stopping: Stopping,
    prior: Sequence[float] | None = None,
) -> tuple[Slice, list[list[Chunk]]]:
    """One batch of prompts, plainly where `candidate` is None, and the chunks of each; `prior` is
    that of the requests. Raises Interrupted, and the first error of a request."""
    drafts: dict[str, Any] = {"prior": prior}
    if candidate is not None:
        drafts["plan"] = candidate.plan
        if not candidate.own:
            drafts |= {"drafter": candidate.method, "drafter_options": dict(candidate.options)}
    now = perf_counter()
    asked = [GenerationRequest(p.ids, p.sampling, arrived_s=now, **drafts) for p in prompts]
    with with_options(engine, candidate):
        answers = served(engine, asked, stopping)
    if candidate is not None and not candidate.own:
        engine.forget_answers()  # no answer is known when it is asked for again
    return answers


@contextmanager
def with_options(engine: Engine, candidate: Candidate | None) -> Iterator[None]:
    """The engine's own drafter with a candidate's options, meanwhile."""
    default = engine.drafting.default
    if candidate is None or not candidate.own or not candidate.options or default is None:
        yield
        return
    kind = DRAFTERS[candidate.method].options
    assert isinstance(default.drafter, Tunable)
    assert kind is not None
    assert default.options is not None
    default.drafter.tune(kind(**dict(candidate.options)))
    try:
        yield
    finally:
        default.drafter.tune(default.options)


def sampled(
    engine: Engine,
    prompt: BenchPrompt,
    plan: DraftPlan,
    options: tuple[tuple[str, Any], ...],
    stopping: Stopping,
) -> list[SampledStep]:
    """The steps of one answer by a wide plan, with options of the drafter, without those that its
    end cut short. Raises Interrupted, and the error of the request."""
    assert engine.costs is not None
    assert engine.method is not None
    session, policy = engine.session, engine.session.policy
    session.policy = WholePolicy(engine.costs)
    candidate = Candidate(engine.method, replace(plan, adaptive=True), options=options)
    try:
        _, chunks = run(engine, [prompt], candidate, stopping)
    finally:
        session.policy = policy
    return list(steps_of(chunks[0], len(prompt.ids), most_of(prompt) - plan.steps))


def most_of(prompt: BenchPrompt) -> int:
    """Tokens of its answer, at most."""
    return prompt.sampling.max_generate_length


def steps_of(chunks: Sequence[Chunk], prompt_tokens: int, most: int) -> Iterator[SampledStep]:
    """The steps that began with fewer than `most` tokens emitted, but for one that ended the
    answer."""
    emitted = 0
    for chunk in chunks:
        whole = chunk.tree is not None and chunk.finish_reason is None and emitted < most
        if whole and chunk.tree is not None:
            yield SampledStep.of(chunk.tree, [*chunk.path], prompt_tokens + emitted)
        emitted += len(chunk.token_ids)
