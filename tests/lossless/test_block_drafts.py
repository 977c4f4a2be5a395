"""JetSpec and DSpark on real engines: chains and trees, greedy and sampled, alone and in batches,
with rows that were kept of earlier prompts.

What comes out is what plain decoding says, and every block was drafted from what the base really
says of the tokens that were kept, by the slow references. What all block drafts share is claimed in
`test_dflash`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.dspark import DSparkDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from tests import toys
from tests.lossless.answers import VOCAB, assert_same, served
from tests.lossless.steering import (
    CAPACITY,
    GREEDY,
    LANES,
    SAMPLED,
    Pair,
    plainly,
    prompt_of,
    steered,
)
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference

LIMITS = Limits(
    max_input_len=60, max_kv_cache_capacity=CAPACITY, max_verify_tree_size=40, max_draft_tree_size=8
)


def chain_of(pair: Pair) -> BlockPlan:
    drafts = pair.ref.block_size - pair.first_slot
    return BlockPlan(1, drafts, drafts + 1, pair.first_slot)


def plans_of(pair: Pair) -> list[BlockPlan]:
    """A chain, a short one, and a tree where the method has trees."""
    chain = chain_of(pair)
    short, wide = replace(chain, steps=2, verify_size=3), BlockPlan(3, chain.steps, 20)
    return [chain, short, *([] if isinstance(pair.ref, DSparkReference) else [wide])]


METHODS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "jetspec": (toys.make_jetspec, {"block_size": 6}),
    "dspark": (toys.make_dspark, {"block_size": 5, "kind": "gated"}),
}


@pytest.fixture(scope="module", params=METHODS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    path, (make, keys) = tmp_path_factory.mktemp(request.param), METHODS[request.param]
    base = toys.make_base(path / "base", "qwen3", layers=8, vocab=VOCAB)
    draft = make(path / "draft", base, **keys)
    export(str(base), path, ExportOptions(base_for=request.param, draft_dir=str(draft)))
    export(str(draft), path, ExportOptions(base_model_dir=str(base)))
    for name, lanes in (("one", 1), ("four", LANES)):
        for component in ("llm", f"{request.param}_draft"):
            build(path / component, path / name, replace(LIMITS, max_batch_size=lanes))
    kind = DSparkReference if request.param == "dspark" else DFlashReference
    with Engine(path / "one") as one, Engine(path / "four") as four:
        for engine in (one, four):
            engine.stop_ids = frozenset()
            if isinstance(engine.drafter, DSparkDrafter):
                engine.drafter.threshold = 0.0
        yield Pair(one, four, kind(draft, base), toys.load_base(base))


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    yield opened
    opened.restored()


@pytest.mark.parametrize("right", [None, 0.7, 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_sequence_says_what_it_says_plainly(
    pair: Pair, sampling: SamplingParams, right: float | None
) -> None:
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, sampling, 30)
    for plan in plans_of(pair):
        asked = replace(sampling, max_generate_length=30)
        if right is None:
            assert_same(pair.one, plain, pair.one.generate(prompt, asked, plan), sampling)
            continue
        with steered(pair.one, [[*prompt, *plain.token_ids]], right) as drafter:
            found = pair.one.generate(prompt, asked, plan)
        assert_same(pair.one, plain, found, sampling)
        accepted = found.metrics.per_step_accepted
        if right == 1:  # nothing is turned down: the fewest steps that there can be
            assert len(accepted) == -(-29 // (plan.steps + 1))
        else:
            assert len(set(accepted)) > 1
        pair.assert_true(drafter.blocks)
        assert len(drafter.blocks) >= len(accepted) - 1


def test_a_batch_says_what_each_says_alone(pair: Pair) -> None:
    """Seven sequences through four lanes, with and without drafts, that end at different times."""
    sizes = [(1, 9), (30, 22), (12, 30), (5, 1), (3, 16), (40, 20), (52, 12)]
    plans: list[DraftPlan | None] = [*plans_of(pair), None]
    jobs = [
        GenerationRequest(
            prompt_of(n),
            replace((GREEDY, SAMPLED)[i % 2], max_generate_length=new),
            plans[i % len(plans)],
        )
        for i, (n, new) in enumerate(sizes)
    ]
    plain = [
        plainly(pair, job.prompt_ids, job.sampling, job.sampling.max_generate_length)
        for job in jobs
    ]
    scripts = [[*job.prompt_ids, *one.token_ids] for job, one in zip(jobs, plain, strict=True)]
    with steered(pair.four, scripts, 0.6) as drafter:
        answers = served(pair.four, jobs)
    for job, wanted, found in zip(jobs, plain, answers, strict=True):
        assert_same(pair.one, wanted, found, job.sampling)
    pair.assert_true(drafter.blocks)
    assert sum(sum(one.metrics.per_step_accepted) for one in answers) > 20


@pytest.mark.parametrize("four", [False, True], ids=["one lane", "four lanes"])
def test_rows_kept_of_an_earlier_prompt_serve_the_next(pair: Pair, *, four: bool) -> None:
    engine = pair.four if four else pair.one
    engine.session.prefixes = PrefixCache(2**24)
    head = prompt_of(20)
    prompts = [[*head, *prompt_of(4)], [*head, *prompt_of(9)]]
    plain = [plainly(pair, prompt, GREEDY, 12) for prompt in prompts]
    sampling = replace(GREEDY, max_generate_length=12)
    with steered(engine, [], 0.6) as drafter:
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafter.scripts = [[*prompt, *wanted.token_ids]]
            job = GenerationRequest(prompt, sampling, chain_of(pair), len(head), keep_all=True)
            (answer,) = served(engine, [job])
            assert_same(pair.one, wanted, answer, GREEDY)
            assert answer.metrics.reused_tokens >= (0 if prompt is prompts[0] else len(head) - 1)
    pair.assert_true(drafter.blocks)


@pytest.mark.parametrize("opened", ["dspark"], indirect=True)
def test_a_sequence_whose_length_the_confidences_set(pair: Pair) -> None:
    assert isinstance(pair.one.drafter, DSparkDrafter)
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, SAMPLED, 30)
    with steered(pair.one, [[*prompt, *plain.token_ids]], 0.8) as steering:
        steering.threshold = 0.5
        found = pair.one.generate(prompt, replace(SAMPLED, max_generate_length=30), chain_of(pair))
    assert_same(pair.one, plain, found, SAMPLED)
    assert len(set(steering.lengths)) > 2
    pair.assert_true(steering.blocks)
