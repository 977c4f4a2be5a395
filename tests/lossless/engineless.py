"""Drafts made of the text itself beside the drafts of an engine, in one batch.

Knows requests. Knows nothing of which draft the engine has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest
from tests.lossless.answers import assert_as_alone, served

DRAWN = range(3, 15)  # few tokens, so that texts repeat themselves
GREEDY = SamplingParams(temperature=0.0, seed=0, logit_bias=dict.fromkeys(DRAWN, 50.0))
# None is the engine's own draft
DRAFTERS = [
    (None, None),
    ("suffix", {"min_token_prob": 0.0}),
    ("ngram", {"max_draft_len": 4, "is_public_pool": False}),
]


def assert_same_beside_a_draft(one: Engine, four: Engine) -> None:
    """Twelve requests, greedy and sampled: the engine's own draft, suffixes, n-grams and none take
    turns, more of them than lanes. Each says what it says plainly, and drafts of the text are
    accepted."""
    jobs = []
    for number in range(12):
        prompt = np.random.default_rng([3, number]).choice(DRAWN, 1 + 7 * (number % 5)).tolist()
        params = replace(
            GREEDY,
            max_generate_length=8 + 3 * (number % 4),
            temperature=float(number % 3 == 2),
            seed=number,
        )
        if number % 4 == 3:
            jobs.append(GenerationRequest(prompt, params))
            continue
        name, options = DRAFTERS[number % 4]
        plan = four.planner.limits(name, options).plan(None, None, None, four.planner.hints)
        jobs.append(GenerationRequest(prompt, params, plan, drafter=name, drafter_options=options))
    found = served(four, jobs)
    assert_as_alone(one, jobs, found)
    texts = [answer for job, answer in zip(jobs, found, strict=True) if job.drafter]
    assert sum(sum(answer.metrics.per_step_accepted) for answer in texts) > 0
