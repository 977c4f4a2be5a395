"""One run of a candidate: nothing of it helps the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import edgespec
from edgespec.benchmark.slices import Prompt, served
from edgespec.prompts import SamplingParams
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.sample import run
from tests.lossless.pairs import shared_pair

NO_EOS = {0: -100.0, 2: -100.0}  # toys end by chance otherwise


def test_a_text_drafter_measured_again_does_not_know_the_answers() -> None:
    sampling = SamplingParams(temperature=0, max_generate_length=40, logit_bias=NO_EOS)
    prompt = Prompt(0, [5, 6, 7, 8], sampling)
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
