"""The law on a hybrid base with its own MTP head: with drafts or without, the same tokens, and a
state that goes back exactly to where the accepted ones end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import edgespec
from edgespec.errors import LimitError
from edgespec.prompts import SamplingParams
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.tree import DraftPlan
from tests.lossless.answers import (
    VOCAB,
    assert_as_alone,
    assert_same,
    plainly,
    prompt_of,
    served,
)
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engineless import assert_same_beside_a_draft
from tests.lossless.engines import LANES, Engines
from tests.lossless.pairs import make_mtp_pair

PLANS = [DraftPlan(1, 1, 2), DraftPlan(1, 3, 4), DraftPlan(1, 7, 8)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.5, top_k=0, top_p=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=1.0, seed=3, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    path = make_mtp_pair(tmp_path_factory.mktemp("mtp"), 1, LANES)
    with edgespec.load(path / "engines-1") as one, edgespec.load(path / f"engines-{LANES}") as four:
        yield Engines(one, four)


@pytest.fixture(autouse=True)
def as_they_were(engines: Engines) -> Iterator[None]:
    kept = engines.one.stop_ids
    for engine in (engines.one, engines.four):
        engine.stop_ids = frozenset()
    yield
    for engine in (engines.one, engines.four):
        engine.stop_ids, engine.session.drafter = kept, engine.drafter


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"step-{plan.steps}")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_head_s_drafts_leave_every_token_as_it_was(
    engines: Engines, plan: DraftPlan, sampling: SamplingParams
) -> None:
    counts: set[int] = set()
    for length in (1, 9, 30):
        asked = replace(sampling, max_generate_length=24)
        plain = plainly(engines.one, prompt_of(length), asked)
        drafted = engines.one.generate(prompt_of(length), asked, plan)
        assert_same(engines.one, plain, drafted, asked)
        counts |= set(drafted.metrics.per_step_accepted)
    assert {0, 1} <= counts  # something was thrown away, and something was kept


def test_greedy_drafts_are_accepted_in_part_and_in_whole(engines: Engines) -> None:
    """So that the claim above is one about states that go back by every number of rows."""
    counts: set[int] = set()
    for seed in range(6):
        asked = replace(SAMPLINGS[0], max_generate_length=24)
        counts |= set(
            engines.one.generate(prompt_of(12, seed), asked, PLANS[1]).metrics.per_step_accepted
        )
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("right", [0, 0.6, 1])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_drafts_right_or_wrong_leave_every_token_as_it_was(
    engines: Engines, right: float, sampling: SamplingParams
) -> None:
    asked, prompt = replace(sampling, max_generate_length=30), prompt_of(12)
    plain = plainly(engines.one, prompt, asked)
    engines.one.session.drafter = ScriptedDrafter([(prompt, plain.token_ids)], VOCAB, right)
    drafted = engines.one.generate(prompt, asked, PLANS[2])
    assert_same(engines.one, plain, drafted, asked)
    assert (sum(drafted.metrics.per_step_accepted) > 0) == (right > 0)


def test_batch_of_chains_and_plain_ones_gives_each_what_it_gets_alone(engines: Engines) -> None:
    shapes = [
        (1, 9),
        (30, 22),
        (12, 24),
        (5, 1),
        (22, 5),
        (3, 16),
        (17, 27),
        (9, 12),
        (40, 20),
        (2, 24),
    ]
    plans = [PLANS[1], None, PLANS[2], PLANS[0]]
    jobs = [
        GenerationRequest(
            prompt_of(length), replace(SAMPLINGS[i % 4], max_generate_length=new), plans[i % 4]
        )
        for i, (length, new) in enumerate(shapes)
    ]
    found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    assert sum(sum(one.metrics.per_step_accepted) for one in found) > 0


def test_trees_are_refused(engines: Engines) -> None:
    with pytest.raises(LimitError, match="top_k 4: an MTP head drafts a chain"):
        engines.one.plan(4, 3, 8)
    with pytest.raises(LimitError, match="top_k 2"):
        engines.one.generate([5, 6], SAMPLINGS[0], DraftPlan(2, 2, 4))
    assert engines.one.plan() == DraftPlan(1, 3, 4)
    assert engines.one.plan(steps=5) == DraftPlan(1, 5, 6)
    assert engines.one.plan(verify_size=6) == DraftPlan(1, 5, 6)


def test_drafts_of_the_text_stand_beside_the_head_s(engines: Engines) -> None:
    assert_same_beside_a_draft(engines.one, engines.four)
