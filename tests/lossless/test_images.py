"""Prompts with images give transformers' greedy tokens, plainly and with drafts, alone and in
batches of text and images; what is kept of one image serves no other.

Toys of Qwen2.5-VL and Qwen3-VL with an EAGLE-3 draft each. Rows of images come from transformers'
own encoder, tokens from its generate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.contract import Limits
from edgespec.errors import EdgeSpecError
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import PLAIN, Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.requests.lossless_check import Replay
from edgespec.runtime.requests.quality import log_likelihood
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.runtime.trees.tree import DraftPlan
from tests import image_reference, made, toys
from tests.image_reference import Part, Picture
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engines import LANES, Engines, opened, write_engines
from tests.toys.vl import IMAGE

VOCAB, COUNT = 256, 24
LIMITS = Limits(
    max_input_len=96, max_kv_cache_capacity=144, max_verify_tree_size=16, max_draft_tree_size=16
)
GREEDY = SamplingParams(temperature=0, max_generate_length=COUNT)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_generate_length=COUNT)
TREE, CHAIN = DraftPlan(3, 4, 16), DraftPlan(1, 3, 4)
SMALL, LARGE = Picture.random(1, 4, 6), Picture.random(2, 6, 10)
OTHER = Picture.random(3, 4, 6)  # as many rows as SMALL
PROMPTS: dict[str, list[Part]] = {
    "text": [[5, 6, 7, 8, 9]],
    "between": [[5, 6, 7], SMALL, [8, 9, 10]],
    "first": [SMALL, [11]],
    "last": [[3, 4], LARGE],
    "several": [[3], SMALL, [9, 9, 7], LARGE, [30, 31], SMALL, [40, 41]],
}
SECTIONED = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
TOYS: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    # whose window is shorter than most prompts: it counts tokens, whatever the positions are
    "qwen2.5-vl-window": (
        toys.make_qwen2_5_vl,
        {"sliding_window": 12, "max_window_layers": 4},
        SECTIONED,
    ),
    # whose answers have no image token, which later prompts could not repeat
    "qwen3-vl": (toys.make_qwen3_vl, {"deepstack": (0, 1, 2), "seed": 8}, INTERLEAVED),
}


@dataclass
class Pair:
    """transformers' model, and engines of the same weights for one sequence and for four."""

    model: Any
    engines: Engines
    truths: dict[str, list[int]] = field(default_factory=dict)

    def truth(self, name: str) -> list[int]:
        if name not in self.truths:
            self.truths[name] = image_reference.greedy(self.model, PROMPTS[name], COUNT)
        return self.truths[name]

    def prompt(self, name: str) -> PromptValue:
        return image_reference.prompt_of(self.model, PROMPTS[name])


@pytest.fixture(scope="module", params=TOYS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    make, options, rope = TOYS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    base = make(root / "base", layers=8, **options)
    draft = toys.make_draft(root / "draft", base, "specforge", rope=rope, rope_theta=1e6)
    write_engines(
        root,
        made.exported(base, ExportOptions(base_for="eagle3")) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "llm",
        limits=LIMITS,
    )
    with opened(root) as engines:
        for engine in (engines.one, engines.four):
            engine.stop_ids = frozenset()
        yield Pair(toys.load_vl(base), engines)


@pytest.fixture(autouse=True)
def as_they_were(pair: Pair) -> None:
    for engine in (pair.engines.one, pair.engines.four):
        engine.session.drafter = engine.drafter
        engine.forget_prefixes()


@pytest.mark.parametrize("plan", [PLAIN, CHAIN, TREE])
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(pair: Pair, name: str, plan: Any) -> None:
    assert pair.engines.one.generate(pair.prompt(name), GREEDY, plan).token_ids == pair.truth(name)


def test_a_draft_that_reads_the_rows_of_images_changes_no_token(pair: Pair) -> None:
    one = pair.engines.one
    with Engine(one.path, drafter_options={"image_rows": True}) as engine:
        engine.stop_ids = frozenset()
        assert isinstance(engine.drafter, TreeDrafter)
        assert engine.drafter.image_rows
        assert not one.drafter.image_rows
        found = engine.generate(pair.prompt("several"), GREEDY, TREE)
    assert found.token_ids == pair.truth("several")


@pytest.mark.parametrize("name", ["between", "several"])
def test_accepted_drafts_go_on_behind_the_images(pair: Pair, name: str) -> None:
    """Drafts that are often right, in trees whose accepted rows lie scattered."""
    engine, prompt = pair.engines.one, pair.prompt(name)
    engine.session.drafter = ScriptedDrafter([(prompt, pair.truth(name))], VOCAB, 0.8)
    found = engine.generate(prompt, GREEDY, TREE)
    assert found.token_ids == pair.truth(name)
    assert sum(found.metrics.per_step_accepted) > 5


def test_sampled_tokens_are_the_same_with_drafts(pair: Pair) -> None:
    engine, prompt = pair.engines.one, pair.prompt("several")
    plain = engine.generate(prompt, SAMPLED, PLAIN)
    assert plain.token_ids != pair.truth("several")
    engine.session.drafter = ScriptedDrafter([(prompt, plain.token_ids)], VOCAB, 0.8)
    found = engine.generate(prompt, SAMPLED, TREE)
    assert found.token_ids == plain.token_ids
    assert sum(found.metrics.per_step_accepted) > 5


def served(pair: Pair, jobs: Sequence[GenerationRequest]) -> list[Response | EdgeSpecError]:
    found = {
        one: event
        for one, event in pair.engines.four.run_queue(deque(jobs), LANES)
        if not isinstance(event, Chunk)
    }
    return [found[one] for one in jobs]


@pytest.mark.parametrize("right", [None, 0.8])
def test_batches_mix_text_and_images(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, right: float | None
) -> None:
    """More requests than lanes, whose prompts are read in chunks while others decode."""
    monkeypatch.setattr(pair.engines.four.base.runner, "prefill_chunk", 7)
    names = [*PROMPTS, *PROMPTS]
    jobs = [
        GenerationRequest(
            pair.prompt(name),
            replace(GREEDY, max_generate_length=COUNT - i),
            (None, CHAIN, TREE)[i % 3],
        )
        for i, name in enumerate(names)
    ]
    if right is not None:
        scripts = [(pair.prompt(name), pair.truth(name)) for name in PROMPTS]
        pair.engines.four.session.drafter = ScriptedDrafter(scripts, VOCAB, right)
    for i, (name, found) in enumerate(zip(names, served(pair, jobs), strict=True)):
        assert isinstance(found, Response), found
        assert found.token_ids == pair.truth(name)[: COUNT - i]


@pytest.mark.parametrize("plan", [PLAIN, TREE])
def test_a_prefix_serves_the_same_image_and_no_other(pair: Pair, plan: Any) -> None:
    engine = pair.engines.one
    prompt = pair.prompt("between")
    engine.generate(prompt, GREEDY, plan, keep=True)
    other = image_reference.prompt_of(pair.model, [[5, 6, 7], OTHER, [8, 9, 10]])
    assert other.tokens == prompt.tokens
    found = engine.generate(other, GREEDY, plan)
    wanted = image_reference.greedy(pair.model, [[5, 6, 7], OTHER, [8, 9, 10]], COUNT)
    assert wanted != pair.truth("between")
    # the text before it, and the mark; a draft pairs each position with the token behind it
    assert (found.token_ids, found.metrics.reused_tokens) == (wanted, 4 - (plan is not PLAIN))
    following = prompt.then([*pair.truth("between"), 12, 13])
    more: list[Part] = [*PROMPTS["between"], [*pair.truth("between"), 12, 13]]
    turn = engine.generate(following, GREEDY, plan)
    assert turn.token_ids == image_reference.greedy(pair.model, more, COUNT)
    assert turn.metrics.reused_tokens > len(prompt)


@pytest.mark.parametrize("plan", [PLAIN, TREE])
def test_what_is_no_number_and_not_read_changes_nothing(pair: Pair, plan: Any) -> None:
    """The embedding of the image token in the base, and rows of an image whose slots are served by
    the prefix cache."""
    engine, prompt = pair.engines.one, pair.prompt("between")
    engine.generate(prompt, GREEDY, plan, keep=True)
    (image,) = prompt.images
    embeds = image.rows.embeds.copy()
    embeds[:-1] = np.nan
    spoilt = replace(prompt, images=(ImageSlots(image.start, replace(image.rows, embeds=embeds)),))
    table = engine.base.embedding

    class Spoilt:
        def rows(self, tokens: np.ndarray) -> np.ndarray:
            found = table.rows(tokens)
            found[tokens == IMAGE] = np.nan
            return found

    engine.base.embedding = Spoilt()
    try:
        found = engine.generate(spoilt, GREEDY, plan)
    finally:
        engine.base.embedding = table
    assert found.token_ids == pair.truth("between")
    assert found.metrics.reused_tokens > image.end


def test_rows_that_are_no_numbers_fail_their_own_request_alone(pair: Pair) -> None:
    bad = pair.prompt("between")
    bad.images[0].rows.embeds[2] = np.nan
    jobs = [
        GenerationRequest(prompt, GREEDY, TREE)
        for prompt in (pair.prompt("several"), bad, pair.prompt("text"), pair.prompt("last"))
    ]
    first, failed, *others = served(pair, jobs)
    assert isinstance(failed, EdgeSpecError)
    for name, found in zip(("several", "text", "last"), (first, *others), strict=True):
        assert isinstance(found, Response)
        assert found.token_ids == pair.truth(name)


def test_an_answer_is_computed_again_with_its_images(pair: Pair) -> None:
    """What the lossless check measures where two answers differ, in calls of all sizes."""
    engine, prompt = pair.engines.four, pair.prompt("several")
    found = engine.generate(prompt, GREEDY, TREE)
    index = 9
    wanted = engine.next_logits(prompt.then(found.token_ids[:index]))
    replay = Replay.of(engine, found, index, 2)
    assert replay.before == [*prompt, *found.token_ids[:index]]
    for logits in replay.logits():
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_likelihoods_are_those_of_the_prompt_with_its_images(pair: Pair) -> None:
    engine, prompt = pair.engines.one, pair.prompt("between")
    own, other = (
        log_likelihood(engine, one, pair.truth("between"))
        for one in (prompt, image_reference.prompt_of(pair.model, [[5, 6, 7], OTHER, [8, 9, 10]]))
    )
    assert own is not None
    assert other is not None
    assert own > other + 0.1
