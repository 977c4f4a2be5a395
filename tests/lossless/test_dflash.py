"""Block drafts on real engines: chains and trees, greedy and sampled, alone and in batches, right
and wrong.

What comes out is what plain decoding says; and every block was drafted from what the base really
says of the tokens that were kept, by the slow reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import Observation
from edgespec.runtime.drafters.block_drafter import BlockTreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.block import BlockDecoder
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from tests import toys
from tests.lossless.answers import VOCAB, assert_same, served
from tests.lossless.engineless import assert_same_beside_a_draft
from tests.lossless.steering import (
    CAPACITY,
    GREEDY,
    LANES,
    SAMPLED,
    Pair,
    near,
    plainly,
    prompt_of,
    steered,
)
from tests.parity.dflash_reference import DFlashReference

BLOCK = 8
LIMITS = Limits(
    max_input_len=60,
    max_kv_cache_capacity=CAPACITY,
    max_verify_tree_size=40,
    max_draft_tree_size=BLOCK,
)
CHAIN, SHORT, NARROW, WIDE = (
    BlockPlan(1, 7, 8),
    BlockPlan(1, 2, 3),
    BlockPlan(2, 7, 12),
    BlockPlan(8, 7, 40),
)


BASES: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: toys.make_base(path, "qwen3", layers=8, vocab=VOCAB),
    "hybrid": lambda path: toys.make_qwen3_5(path, layers=8, vocab=VOCAB),
}


@pytest.fixture(scope="module", params=BASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dflash")
    base, kinds = BASES[request.param](path / "base"), ["sliding_attention", "full_attention"]
    draft = toys.make_dflash(path / "draft", base, block_size=BLOCK, layer_types=kinds, window=10)
    export(str(base), path, ExportOptions(base_for="dflash", draft_dir=str(draft)))
    export(str(draft), path, ExportOptions(base_model_dir=str(base)))
    for name, lanes, capacity in (
        ("one", 1, CAPACITY),
        ("four", LANES, CAPACITY),
        ("short", 1, 40),
    ):
        build(path / "llm", path / name, replace(LIMITS, max_batch_size=lanes))
        mine = replace(
            LIMITS, max_batch_size=lanes, max_kv_cache_capacity=capacity, max_input_len=40
        )
        build(
            path / "dflash_draft",
            path / name,
            mine if name == "short" else replace(LIMITS, max_batch_size=lanes),
        )
    return path


@pytest.fixture(scope="module")
def opened(made: Path) -> Iterator[Pair]:
    with Engine(made / "one") as one, Engine(made / "four") as four:
        for engine in (one, four):
            engine.stop_ids = frozenset()
        # In double precision: a hybrid's reference in float32 is off by more than its engine
        model = toys.load_base(made / "base").double()
        yield Pair(one, four, DFlashReference(made / "draft", made / "base"), model)


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    yield opened
    opened.restored()


knowing = partial(steered, turn=near)  # the drafter knows what is true, mostly

CASES = [(plan, how, 0.7) for plan in (CHAIN, SHORT, NARROW, WIDE) for how in (GREEDY, SAMPLED)]
CASES += [(plan, GREEDY, right) for plan in (CHAIN, WIDE) for right in (None, 0, 1)]
CASES += [(plan, SAMPLED, right) for plan in (CHAIN, WIDE) for right in (None, 1)]


@pytest.mark.parametrize(("plan", "sampling", "right"), CASES)
def test_one_sequence_says_what_it_says_plainly(
    pair: Pair, plan: DraftPlan, sampling: SamplingParams, right: float | None
) -> None:
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, sampling, 30)
    if right is None:
        found = pair.one.generate(prompt, replace(sampling, max_generate_length=30), plan)
        assert_same(pair.one, plain, found, sampling)
        return
    with knowing(pair.one, [[*prompt, *plain.token_ids]], right) as drafter:
        found = pair.one.generate(prompt, replace(sampling, max_generate_length=30), plan)
    assert_same(pair.one, plain, found, sampling)
    accepted = found.metrics.per_step_accepted
    if right == 1:  # nothing is turned down: the fewest steps that there can be
        assert len(accepted) == -(-29 // (plan.steps + 1))
    if right == 0.7:
        assert len(set(accepted)) > 1
    pair.assert_true(drafter.blocks)
    assert len(drafter.blocks) >= len(accepted) - 1


@pytest.mark.parametrize("right", [None, 0.6])
def test_a_batch_says_what_each_says_alone(pair: Pair, right: float | None) -> None:
    """Ten sequences through four lanes: plain ones, chains and trees, of lengths that end at
    different times."""
    sizes = [
        (1, 9),
        (30, 22),
        (12, 30),
        (5, 1),
        (22, 5),
        (3, 16),
        (17, 27),
        (9, 12),
        (40, 20),
        (52, 12),
    ]
    plans = [CHAIN, None, NARROW, SHORT, WIDE]
    jobs = [
        GenerationRequest(
            prompt_of(n), replace((GREEDY, SAMPLED)[i % 2], max_generate_length=new), plans[i % 5]
        )
        for i, (n, new) in enumerate(sizes)
    ]
    plain = [
        plainly(pair, job.prompt_ids, job.sampling, job.sampling.max_generate_length)
        for job in jobs
    ]
    if right is None:
        for job, wanted, found in zip(jobs, plain, served(pair.four, jobs), strict=True):
            assert_same(pair.one, wanted, found, job.sampling)
        return
    scripts = [[*job.prompt_ids, *one.token_ids] for job, one in zip(jobs, plain, strict=True)]
    with (
        knowing(pair.four, scripts, right) as drafter,
        mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run,
    ):
        answers = served(pair.four, jobs)
    for job, wanted, found in zip(jobs, plain, answers, strict=True):
        assert_same(pair.one, wanted, found, job.sampling)
    pair.assert_true(drafter.blocks)
    assert max(len(call.args[1]) for call in run.mock_calls) >= 3
    assert sum(sum(one.metrics.per_step_accepted) for one in answers) > 20


def test_one_call_of_the_draft_a_step(pair: Pair) -> None:
    """The context of a short prompt goes with the first block."""
    prompt = prompt_of(9)
    with mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run:
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    steps = len(found.metrics.per_step_accepted)
    assert len(run.mock_calls) == steps - 1  # in the last one there is nothing left to draft
    assert len(run.mock_calls[0].args[1][0].hidden_states) == len(prompt)


def test_a_long_context_goes_in_pieces(pair: Pair) -> None:
    prompt = prompt_of(41)
    plain = plainly(pair, prompt, GREEDY, 12)
    with (
        mock.patch.object(BlockDecoder, "prefill_chunk", 16),
        knowing(pair.one, [[*prompt, *plain.token_ids]], 0.5) as drafter,
        mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run,
    ):
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    assert [len(call.args[1][0].hidden_states) for call in run.mock_calls[:3]] == [16, 16, 9]
    assert_same(pair.one, plain, found, GREEDY)
    pair.assert_true(drafter.blocks)


@pytest.mark.parametrize("four", [False, True], ids=["one lane", "four lanes"])
def test_rows_kept_of_an_earlier_prompt_serve_the_next(pair: Pair, *, four: bool) -> None:
    """A system prompt's, as the first request left them; then a whole turn's, where that was
    kept."""
    engine = pair.four if four else pair.one
    cut = not engine.base.recurrent
    engine.session.prefixes = PrefixCache(2**24)
    head = prompt_of(20)
    prompts = [[*head, *prompt_of(4)], [*head, *prompt_of(9)]]
    plain = [plainly(pair, prompt, GREEDY, 12) for prompt in prompts]
    longer = [*prompts[1], *plain[1].token_ids, 5, 6, 7]
    prompts.append(longer)
    plain.append(plainly(pair, longer, GREEDY, 12))
    scripts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, plain, strict=True)]
    sampling = replace(GREEDY, max_generate_length=12)
    with knowing(engine, scripts, 0.6) as drafter:
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafter.scripts = [[*prompt, *wanted.token_ids]]
            (answer,) = served(
                engine, [GenerationRequest(prompt, sampling, CHAIN, len(head), keep_all=True)]
            )
            assert_same(pair.one, wanted, answer, GREEDY)
            reused = answer.metrics.reused_tokens
            if prompt is prompts[0]:
                assert reused == 0
            elif prompt is longer and cut:
                assert reused > len(prompts[1])
            else:
                assert reused >= len(head) - 1
    pair.assert_true(drafter.blocks)


def test_nothing_is_drafted_beyond_the_drafts_cache(made: Path, pair: Pair) -> None:
    prompt = prompt_of(20)
    plain = plainly(pair, prompt, GREEDY, 40)
    with Engine(made / "short") as short:
        short.stop_ids = frozenset()
        assert "beyond 40 nothing is drafted" in " ".join(short.notes)
        with knowing(short, [[*prompt, *plain.token_ids]], 0.5) as drafter:
            found = short.generate(prompt, replace(GREEDY, max_generate_length=40), CHAIN)
    assert found.token_ids == plain.token_ids
    pair.assert_true(drafter.blocks)
    ends = [len(block.before) + len(block.logits) for block in drafter.blocks]
    assert max(ends) == 40


def test_hidden_states_that_are_nan_draft_nothing(pair: Pair) -> None:
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, GREEDY, 12)
    drafter = pair.one.drafter
    assert isinstance(drafter, BlockTreeDrafter)

    full = []

    def spoilt_states(item: Observation) -> HostStates:
        assert item.hidden_states is not None
        return HostStates(item.hidden_states.numpy() * np.float32(np.nan))

    def spoilt(seen: Sequence[Observation]) -> None:
        BlockTreeDrafter.observe(
            drafter,
            [replace(item, hidden_states=spoilt_states(item)) for item in seen],
        )
        full.append(drafter.lanes[0].full)

    with mock.patch.object(drafter, "observe", spoilt):
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    assert found.token_ids == plain.token_ids
    assert not any(found.metrics.per_step_accepted)
    assert full[-1]


def test_a_lane_that_held_nan_serves_the_next_sequence(pair: Pair) -> None:
    """Rows that nobody sees are multiplied by nought all the same, and a NaN by nought is a NaN."""
    test_hidden_states_that_are_nan_draft_nothing(pair)
    prompt = prompt_of(4)
    plain = plainly(pair, prompt, GREEDY, 12)
    with knowing(pair.one, [[*prompt, *plain.token_ids]], 0.6) as drafter:
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    assert_same(pair.one, plain, found, GREEDY)
    assert drafter.blocks
    pair.assert_true(drafter.blocks)


def test_drafts_of_the_text_stand_beside_the_blocks(pair: Pair) -> None:
    assert_same_beside_a_draft(pair.one, pair.four)
