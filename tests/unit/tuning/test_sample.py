"""What is sampled of an answer, and that a candidate leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.benchmark.slices import BenchPrompt, served
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import Tunable
from edgespec.runtime.drafters.dspark import DSparkOptions
from edgespec.runtime.loop.generation import Chunk, GenerationRequest
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.sample import run, steps_of, with_options
from tests.lossless.pairs import shared_pair


def chunk(drafted: int, accepted: int, reason: str | None = None) -> Chunk:
    tree = DraftTree(np.arange(drafted + 1), np.arange(-1, drafted))
    tokens = list(range(accepted + 1))
    return Chunk(tokens, [""] * len(tokens), accepted, reason, tree, range(accepted + 1))


def test_steps_that_the_end_cut_short_are_left_out() -> None:
    """A plan of 3 levels in an answer of 8 tokens: from 5 on, fewer may be drafted."""
    first = Chunk([7], [""], 0, None)  # of the prompt
    chunks = [first, chunk(3, 1), chunk(3, 2), chunk(2, 1), chunk(1, 0, "length")]
    found = list(steps_of(chunks, prompt_tokens=100, most=8 - 3))
    assert [(step.context, len(step.path)) for step in found] == [(101, 2), (103, 3)]


@dataclass
class Tuned(Tunable):
    """A drafter that remembers what it was tuned to."""

    to: list[Any] = field(default_factory=list)

    def tune(self, options: Any) -> None:
        self.to.append(options)


@pytest.mark.parametrize("fails", [False, True])
def test_options_of_a_candidate_are_those_of_its_runs_alone(*, fails: bool) -> None:
    drafter, default = Tuned(), DSparkOptions()
    own = SimpleNamespace(drafter=drafter, options=default)
    engine: Any = SimpleNamespace(drafting=SimpleNamespace(default=own))
    options = (("confidence_threshold", 0.3),)
    candidate = Candidate("dspark", DraftPlan(1, 3, 4), options=options)
    try:
        with with_options(engine, candidate):
            assert drafter.to == [DSparkOptions(confidence_threshold=0.3)]
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert drafter.to[-1] is default


NO_EOS = {0: -100.0, 2: -100.0}  # toys end by chance otherwise


def test_a_text_drafter_measured_again_does_not_know_the_answers() -> None:
    sampling = SamplingParams(temperature=0, max_generate_length=40, logit_bias=NO_EOS)
    prompt = BenchPrompt(0, [5, 6, 7, 8], sampling)
    options = {"enable_global_pool": True, "min_token_prob": 0.0}
    candidate = Candidate(
        "suffix", DraftPlan(1, 4, 5), own=False, options=tuple(sorted(options.items()))
    )
    with edgespec.load(Path(shared_pair("llama", "eagle")) / "engines", spec_decode=True) as engine:
        first, again = (
            run(engine, [prompt], candidate, lambda: False)[0].metrics[0] for _ in range(2)
        )
        assert first.per_step_accepted == again.per_step_accepted
        # There is something to know: with the answer at hand more is accepted
        request = GenerationRequest(
            prompt.ids, sampling, candidate.plan, drafter="suffix", drafter_options=options
        )
        served(engine, [request], lambda: False)
        known, _ = served(engine, [replace(request)], lambda: False)
        assert sum(known.metrics[0].per_step_accepted) > sum(first.per_step_accepted)
