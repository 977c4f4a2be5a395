"""Block drafts on real engines, those of DFlash, JetSpec and DSpark: chains and trees, greedy and
sampled, alone and in batches, right and wrong.

What comes out is what plain decoding says; and every block was drafted from what the base really
says of the tokens that were kept, by the slow references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
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
from edgespec.runtime.drafters.dspark import DSparkDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.block import BlockDecoder
from edgespec.runtime.loop.generation import GenerationRequest
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
    Turn,
    far,
    near,
    plainly,
    prompt_of,
)
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference

LIMITS = Limits(
    max_input_len=60, max_kv_cache_capacity=CAPACITY, max_verify_tree_size=40, max_draft_tree_size=8
)
CHAIN = BlockPlan(1, 7, 8)  # of DFlash
WINDOWED = {
    "block_size": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "window": 10,
}


@dataclass(frozen=True)
class Kind:
    """How a draft and its base are made, how far its logits are turned, and its trees: widths and
    sizes."""

    method: str
    make_draft: Callable[..., Path]
    keys: dict[str, Any]
    trees: tuple[tuple[int, int], ...]
    hybrid: bool = False
    reference: type[DFlashReference] = DFlashReference
    turn: Turn = far


KINDS = {
    "dense": Kind("dflash", toys.make_dflash, WINDOWED, ((2, 12), (8, 40)), turn=near),
    "hybrid": Kind(
        "dflash", toys.make_dflash, WINDOWED, ((2, 12), (8, 40)), hybrid=True, turn=near
    ),
    "jetspec": Kind("jetspec", toys.make_jetspec, {"block_size": 6}, ((3, 20),)),
    "dspark": Kind(
        "dspark",
        toys.make_dspark,
        {"block_size": 5, "kind": "gated"},
        (),
        reference=DSparkReference,
    ),
}
of_dflash = pytest.mark.parametrize("made", ["dense", "hybrid"], indirect=True)


@dataclass(frozen=True)
class Made:
    """Where a kind's components and engines are."""

    kind: Kind
    path: Path

    def build(self, name: str, base: Limits, draft: Limits) -> Path:
        for component, limits in (("llm", base), (f"{self.kind.method}_draft", draft)):
            build(self.path / component, self.path / name, limits)
        return self.path / name


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path, kind = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    if kind.hybrid:
        base = toys.make_qwen3_5(path / "base", layers=8, vocab=VOCAB)
    else:
        base = toys.make_base(path / "base", "qwen3", layers=8, vocab=VOCAB)
    draft = kind.make_draft(path / "draft", base, **kind.keys)
    export(str(base), path, ExportOptions(base_for=kind.method, draft_dir=str(draft)))
    export(str(draft), path, ExportOptions(base_model_dir=str(base)))
    return Made(kind, path)


@pytest.fixture(scope="module")
def opened(made: Made) -> Iterator[Pair]:
    of_four = replace(LIMITS, max_batch_size=LANES)
    with (
        Engine(made.build("one", LIMITS, LIMITS)) as one,
        Engine(made.build("four", of_four, of_four)) as four,
    ):
        for engine in (one, four):
            engine.stop_ids = frozenset()
            if isinstance(engine.drafter, DSparkDrafter):
                engine.drafter.threshold = 0.0
        # In double precision: a hybrid's reference in float32 is off by more than its engine
        model = toys.load_base(made.path / "base").double()
        reference = made.kind.reference(made.path / "draft", made.path / "base")
        yield Pair(one, four, reference, model, made.kind.turn)


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    yield opened
    opened.restored()


@pytest.fixture
def plans(made: Made, pair: Pair) -> list[BlockPlan]:
    """A chain, a short one, and trees where the method has trees."""
    drafts = pair.ref.block_size - pair.first_slot
    chain = BlockPlan(1, drafts, drafts + 1, pair.first_slot)
    trees = [BlockPlan(top_k, drafts, size) for top_k, size in made.kind.trees]
    return [chain, replace(chain, steps=2, verify_size=3), *trees]


CASES = [(GREEDY, None), (GREEDY, 0), (GREEDY, 0.7), (GREEDY, 1)]
CASES += [(SAMPLED, None), (SAMPLED, 0.7), (SAMPLED, 1)]


@pytest.mark.parametrize(("sampling", "right"), CASES)
def test_one_sequence_says_what_it_says_plainly(
    pair: Pair, plans: list[BlockPlan], sampling: SamplingParams, right: float | None
) -> None:
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, sampling, 30)
    every = (sampling, right) == (GREEDY, 0.7)
    for plan in plans if every else (plans[0], plans[-1]):
        asked = replace(sampling, max_generate_length=30)
        if right is None:
            assert_same(pair.one, plain, pair.one.generate(prompt, asked, plan), sampling)
            continue
        with pair.steered(pair.one, [[*prompt, *plain.token_ids]], right) as drafter:
            found = pair.one.generate(prompt, asked, plan)
        assert_same(pair.one, plain, found, sampling)
        accepted = found.metrics.per_step_accepted
        if right == 1:  # nothing is turned down: the fewest steps that there can be
            assert len(accepted) == -(-29 // (plan.steps + 1))
        if right == 0.7:
            assert len(set(accepted)) > 1
        pair.assert_true(drafter.blocks)
        assert len(drafter.blocks) >= len(accepted) - 1


@pytest.mark.parametrize("right", [None, 0.6])
def test_a_batch_says_what_each_says_alone(
    pair: Pair, plans: list[BlockPlan], right: float | None
) -> None:
    """Ten sequences through four lanes: plain ones, chains and trees, of lengths that end at
    different times."""
    sizes = [(1, 9), (30, 22), (12, 30), (5, 1), (22, 5), (3, 16), (17, 27), (9, 12), (40, 20)]
    taken: list[DraftPlan | None] = [*plans, None]
    jobs = [
        GenerationRequest(
            prompt_of(n),
            replace((GREEDY, SAMPLED)[i % 2], max_generate_length=new),
            taken[i % len(taken)],
        )
        for i, (n, new) in enumerate([*sizes, (52, 12)])
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
        pair.steered(pair.four, scripts, right) as drafter,
        mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run,
    ):
        answers = served(pair.four, jobs)
    for job, wanted, found in zip(jobs, plain, answers, strict=True):
        assert_same(pair.one, wanted, found, job.sampling)
    pair.assert_true(drafter.blocks)
    assert max(len(call.args[1]) for call in run.mock_calls) >= 3
    assert sum(sum(one.metrics.per_step_accepted) for one in answers) > 20


@of_dflash
def test_one_call_of_the_draft_a_step(pair: Pair) -> None:
    """The context of a short prompt goes with the first block."""
    prompt = prompt_of(9)
    with mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run:
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    steps = len(found.metrics.per_step_accepted)
    assert len(run.mock_calls) == steps - 1  # in the last one there is nothing left to draft
    assert len(run.mock_calls[0].args[1][0].hidden_states) == len(prompt)


@of_dflash
def test_a_long_context_goes_in_pieces(pair: Pair) -> None:
    prompt = prompt_of(41)
    plain = plainly(pair, prompt, GREEDY, 12)
    with (
        mock.patch.object(BlockDecoder, "prefill_chunk", 16),
        pair.steered(pair.one, [[*prompt, *plain.token_ids]], 0.5) as drafter,
        mock.patch.object(BlockDecoder, "run", autospec=True, side_effect=BlockDecoder.run) as run,
    ):
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    assert [len(call.args[1][0].hidden_states) for call in run.mock_calls[:3]] == [16, 16, 9]
    assert_same(pair.one, plain, found, GREEDY)
    pair.assert_true(drafter.blocks)


@pytest.mark.parametrize("four", [False, True], ids=["one lane", "four lanes"])
def test_rows_kept_of_an_earlier_prompt_serve_the_next(
    pair: Pair, plans: list[BlockPlan], *, four: bool
) -> None:
    """A system prompt's, as the first request left them; then a whole turn's, where that was
    kept."""
    engine = pair.four if four else pair.one
    cut = not engine.base.recurrent
    head = prompt_of(20)
    prompts = [[*head, *prompt_of(4)], [*head, *prompt_of(9)]]
    plain = [plainly(pair, prompt, GREEDY, 12) for prompt in prompts]
    longer = [*prompts[1], *plain[1].token_ids, 5, 6, 7]
    prompts.append(longer)
    plain.append(plainly(pair, longer, GREEDY, 12))
    scripts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, plain, strict=True)]
    sampling = replace(GREEDY, max_generate_length=12)
    with pair.steered(engine, scripts, 0.6) as drafter:
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafter.scripts = [[*prompt, *wanted.token_ids]]
            (answer,) = served(
                engine, [GenerationRequest(prompt, sampling, plans[0], len(head), keep_all=True)]
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


@of_dflash
def test_nothing_is_drafted_beyond_the_drafts_cache(made: Made, pair: Pair) -> None:
    prompt = prompt_of(20)
    plain = plainly(pair, prompt, GREEDY, 40)
    smaller = replace(LIMITS, max_kv_cache_capacity=40, max_input_len=40)
    with Engine(made.build("short", LIMITS, smaller)) as short:
        short.stop_ids = frozenset()
        assert "beyond 40 nothing is drafted" in " ".join(short.notes)
        with pair.steered(short, [[*prompt, *plain.token_ids]], 0.5) as drafter:
            found = short.generate(prompt, replace(GREEDY, max_generate_length=40), CHAIN)
    assert found.token_ids == plain.token_ids
    pair.assert_true(drafter.blocks)
    ends = [len(block.before) + len(block.logits) for block in drafter.blocks]
    assert max(ends) == 40


@of_dflash
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


@of_dflash
def test_a_lane_that_held_nan_serves_the_next_sequence(pair: Pair) -> None:
    """Rows that nobody sees are multiplied by nought all the same, and a NaN by nought is a NaN."""
    test_hidden_states_that_are_nan_draft_nothing(pair)
    prompt = prompt_of(4)
    plain = plainly(pair, prompt, GREEDY, 12)
    with pair.steered(pair.one, [[*prompt, *plain.token_ids]], 0.6) as drafter:
        found = pair.one.generate(prompt, replace(GREEDY, max_generate_length=12), CHAIN)
    assert_same(pair.one, plain, found, GREEDY)
    assert drafter.blocks
    pair.assert_true(drafter.blocks)


@of_dflash
def test_drafts_of_the_text_stand_beside_the_blocks(pair: Pair) -> None:
    assert_same_beside_a_draft(pair.one, pair.four)


@pytest.mark.parametrize("made", ["dspark"], indirect=True)
def test_a_sequence_whose_length_the_confidences_set(pair: Pair, plans: list[BlockPlan]) -> None:
    assert isinstance(pair.one.drafter, DSparkDrafter)
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, SAMPLED, 30)
    with pair.steered(pair.one, [[*prompt, *plain.token_ids]], 0.8) as steering:
        steering.threshold = 0.5
        found = pair.one.generate(prompt, replace(SAMPLED, max_generate_length=30), plans[0])
    assert_same(pair.one, plain, found, SAMPLED)
    assert len(set(steering.lengths)) > 2
    pair.assert_true(steering.blocks)
