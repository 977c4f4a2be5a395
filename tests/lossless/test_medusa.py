"""Medusa heads leave every token as it was: chains, Cartesian trees and the most probable nodes,
greedy and sampled, alone, in batches and behind a prefix that was kept."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.medusa import CartesianPlan
from edgespec.runtime.generation import GenerationRequest, Response
from edgespec.runtime.lossless_check import first_difference
from edgespec.runtime.static_tree import NAMED, StaticPlan
from edgespec.runtime.tree import DraftPlan
from tests import made, shared, toys
from tests.lossless.engines import LANES, Engines
from tests.lossless.pairs import LIMITS, make_base

VOCAB = 256
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0], [1, 0, 2], [2, 1, 0, 1]])
PLANS = [
    CartesianPlan(1, 4, 5),
    CartesianPlan(3, 4, 12),
    STATIC,
    StaticPlan.of(NAMED["mc_sim_7b_63"]).within(4, 40),
]
SAMPLINGS = [
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=2, repetition_penalty=1.2),
]


def make_engines(path: Path) -> Path:
    """Engines of a base and random heads for one sequence and for four. The matrices of the heads
    are near the base's lm_head: so are their tokens now and then."""
    base = make_base(path / "base", "llama", eos=[0])
    heads = toys.make_medusa(path / "heads", base, heads=4)
    components = [
        made.exported(base, ExportOptions(base_for="medusa")) / "llm",
        made.exported(heads, ExportOptions(base_model_dir=str(base))) / "medusa_draft",
    ]
    for name, lanes in (("one", 1), ("four", LANES)):
        engines = made.built(replace(LIMITS, max_batch_size=lanes), *components)
        shutil.copytree(engines, path / name)
    return path


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    path = shared.made_once("medusa engines", make_engines)
    with edgespec.load(path / "one") as one, edgespec.load(path / "four") as four:
        for engine in (one, four):
            engine.stop_ids = frozenset()
        yield Engines(one, four)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def assert_same(
    engines: Engines, plain: Response, drafted: Response, sampling: SamplingParams
) -> None:
    difference = first_difference(engines.one, plain, drafted, sampling)
    assert difference is None, difference.words
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.verify_size))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_drafts_leave_every_token_as_it_was(
    engines: Engines, plan: DraftPlan, sampling: SamplingParams
) -> None:
    drafted_nodes = 0
    for length in (1, 9, 40):
        asked = replace(sampling, max_generate_length=24)
        plain = engines.one.plainly(prompt_of(length), asked)
        drafted = engines.one.generate(prompt_of(length), asked, plan)
        assert_same(engines, plain, drafted, asked)
        drafted_nodes = max(drafted_nodes, *drafted.metrics.per_step_drafted)
    assert drafted_nodes == plan.verify_size - 1


def test_static_drafts_are_accepted_now_and_then(engines: Engines) -> None:
    """So that the claim above is one about trees that are walked."""
    counts: set[int] = set()
    for seed in range(8):
        asked = replace(SAMPLINGS[1], max_generate_length=24, seed=seed)
        found = engines.one.generate(prompt_of(12, seed), asked, PLANS[3])
        counts |= set(found.metrics.per_step_accepted)
    assert {0, 1} <= counts


def test_a_batch_of_static_and_dynamic_trees_gives_each_what_it_gets_alone(
    engines: Engines,
) -> None:
    shapes = [(1, 9), (30, 22), (12, 24), (5, 1), (22, 5), (3, 16), (17, 27), (9, 12), (40, 20)]
    plans = [STATIC, None, PLANS[1], PLANS[3], PLANS[0]]
    jobs = [
        GenerationRequest(
            prompt_of(length), replace(SAMPLINGS[i % 3], max_generate_length=new), plans[i % 5]
        )
        for i, (length, new) in enumerate(shapes)
    ]
    found = {
        id(request): event
        for request, event in engines.four.serve(deque(jobs), batch_size=LANES)
        if isinstance(event, Response)
    }
    for job in jobs:
        plain = engines.one.plainly(job.prompt_ids, job.sampling)
        assert_same(engines, plain, found[id(job)], job.sampling)


def test_behind_a_prefix_that_was_kept_the_drafts_are_the_same(engines: Engines) -> None:
    asked, plan = replace(SAMPLINGS[0], max_generate_length=12), PLANS[1]
    start = prompt_of(20, 7)
    for prompt in (start[:15] + prompt_of(9, 8), start + prompt_of(3, 9)):
        engines.one.session.prefixes.clear()
        whole = engines.one.generate(prompt, asked, plan)
        engines.one.session.prefixes.clear()
        engines.one.generate(start, asked, plan, keep=True)
        again = engines.one.generate(prompt, asked, plan)
        assert again.metrics.reused_tokens > 0
        assert again.token_ids == whole.token_ids
        assert again.metrics.per_step_accepted == whole.metrics.per_step_accepted
