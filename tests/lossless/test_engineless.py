"""Drafts made of the text itself, on real engines: they leave every token as it was, alone and in
batches, on plain engines and beside drafts, for bases that forget rows and for those that keep a
state.

Only a few tokens are drawn, so that answers repeat themselves and drafts are accepted as well as
thrown away. With `min_token_prob` 0 all that can be drafted is.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import PLAIN
from edgespec.contract import Limits
from edgespec.errors import EdgeSpecError, LimitError
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.suffix import SuffixDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.requests.lossless_check import first_difference
from edgespec.runtime.trees.tree import DraftPlan
from tests import made, toys

VOCAB, LANES = 110, 4
DRAWN = range(3, 15)
LIMITS = Limits(max_input_len=48, max_kv_cache_capacity=96, max_verify_tree_size=24)
BASES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: toys.make_base(path, "llama", layers=2, vocab=VOCAB),
    "window-5": lambda path: toys.make_base(
        path, "mistral", layers=2, vocab=VOCAB, sliding_window=5
    ),
    "qwen3_5": lambda path: toys.make_qwen3_5(path, layers=4, vocab=VOCAB),
}
EVERYTHING = {"min_token_prob": 0.0}
WAYS = {
    "suffix": ("suffix", EVERYTHING, (None, None, None)),
    "suffix as it pays": ("suffix", {}, (None, None, None)),
    "suffix with the pool": ("suffix", EVERYTHING | {"enable_global_pool": True}, (3, 5, 12)),
    "suffix chains": ("suffix", EVERYTHING, (1, 6, 7)),
    "ngram": ("ngram", {"max_draft_len": 5, "max_matching_ngram_size": 3}, (None, None, None)),
    "ngram, private": ("ngram", {"is_public_pool": False}, (None, None, None)),
}
BIAS = dict.fromkeys(DRAWN, 50.0)
ADDED = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
GREEDY = SamplingParams(temperature=0.0, seed=0, logit_bias=BIAS)
SAMPLINGS = [
    GREEDY,
    replace(GREEDY, temperature=0.7, top_k=0, top_p=1.0, seed=1),
    replace(GREEDY, temperature=1.0, top_k=8, top_p=0.9, seed=2, repetition_penalty=1.2, **ADDED),
]


@dataclass(frozen=True)
class Pair:
    one: Engine
    four: Engine
    path: Path


@pytest.fixture(scope="module", params=BASES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Plain engines for one and for four sequences, opened without a drafter."""
    base = BASES[request.param](tmp_path_factory.mktemp("engineless") / "base")
    onnx = made.exported(base) / "llm"
    paths = [made.built(replace(LIMITS, max_batch_size=n), onnx) for n in (1, LANES)]
    with edgespec.load(paths[0]) as one, edgespec.load(paths[1]) as four:
        one.stop_ids = four.stop_ids = frozenset()
        yield Pair(one, four, paths[0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).choice(DRAWN, length).tolist()


def asked(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, way: str | None
) -> GenerationRequest:
    """A request that drafts in one of WAYS, or plainly."""
    if way is None:
        return GenerationRequest(prompt, sampling)
    name, options, sizes = WAYS[way]
    plan = engine.planner.limits(name, options).plan(*sizes, engine.planner.hints)
    return GenerationRequest(prompt, sampling, plan, drafter=name, drafter_options=options)


def served(
    engine: Engine, jobs: Sequence[GenerationRequest], lanes: int = 1
) -> list[Response | EdgeSpecError]:
    events = engine.run_queue(deque(jobs), lanes)
    found = {one: event for one, event in events if not isinstance(event, Chunk)}
    return [found[job] for job in jobs]


def assert_same(one: Engine, plain: Response, drafted: Response | EdgeSpecError) -> None:
    assert isinstance(drafted, Response), drafted
    assert first_difference(one, plain, drafted, GREEDY) is None
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)


@functools.cache
def plainly(engine: Engine, length: int, sampling: int) -> Response:
    params = replace(SAMPLINGS[sampling], max_generate_length=30)
    return engine.plainly(prompt_of(length), params)


@pytest.mark.parametrize("way", WAYS)
def test_drafts_leave_every_token_as_it_was(engines: Pair, way: str) -> None:
    accepted = []
    for sampling in SAMPLINGS:
        for length in (1, 45):
            params = replace(sampling, max_generate_length=30)
            plain = plainly(engines.one, length, SAMPLINGS.index(sampling))
            job = asked(engines.one, prompt_of(length), params, way)
            (drafted,) = served(engines.one, [job])
            assert_same(engines.one, plain, drafted)
            assert isinstance(drafted, Response)
            accepted += drafted.metrics.per_step_accepted
    assert 0 in accepted
    assert max(accepted) > 1


def test_batches_of_all_ways_say_what_each_says_alone(engines: Pair) -> None:
    """More requests than lanes, of lengths that let them end at different times, so that sequences
    move between lanes; some are plain."""
    ways = [*WAYS, None]
    lengths = [(9, 30), (30, 12), (1, 40), (22, 5), (3, 26), (17, 33), (40, 20), (2, 8)]
    jobs, plains = [], []
    for number, (length, new) in enumerate(2 * lengths):
        params = replace(SAMPLINGS[number % 3], max_generate_length=new)
        prompt = prompt_of(length, number % 5)
        jobs.append(asked(engines.four, prompt, params, ways[number % len(ways)]))
        plains.append(engines.one.plainly(prompt, params))
    for plain, drafted in zip(plains, served(engines.four, jobs, LANES), strict=True):
        assert_same(engines.one, plain, drafted)


def test_chat_across_turns_goes_on_with_rows_and_index(engines: Pair) -> None:
    """Each turn begins with the one before: its KV rows are taken from the prefix cache, its text
    from the drafter, and the answer is the plain one to the whole prompt."""
    params = replace(GREEDY, max_generate_length=12)
    with Engine(engines.path, drafter="suffix", drafter_options=EVERYTHING) as engine:
        engine.stop_ids = frozenset()
        assert isinstance(engine.drafter, SuffixDrafter)
        prompt, indexes = prompt_of(10), set[int]()
        for turn in range(3):
            response = engine.generate(prompt, params, keep=True)
            plain = engines.one.plainly(prompt, params)
            assert_same(engines.one, plain, response)
            assert (response.metrics.reused_tokens > 0) == (turn > 0)
            (lane,) = engine.drafter.lanes.values()
            indexes.add(id(lane.text))
            assert lane.text.text[: len(prompt)] == prompt
            prompt = [*prompt, *response.token_ids, *prompt_of(3, turn)]
        assert len(indexes) == 1


def test_prefix_that_several_requests_share(engines: Pair) -> None:
    """Snapshots of the base are restored under drafters that keep none."""
    engine = engines.four
    shared, params = prompt_of(30), replace(SAMPLINGS[1], max_generate_length=15)
    reused = 0
    for number, way in enumerate(WAYS):
        prompt = [*shared, *prompt_of(4, number)]
        job = replace(asked(engine, prompt, params, way), keep=len(shared))
        (drafted,) = served(engine, [job])
        assert_same(engines.one, engines.one.plainly(prompt, params), drafted)
        assert isinstance(drafted, Response)
        reused += drafted.metrics.reused_tokens
    assert reused >= len(shared) * (len(WAYS) - 1)


def test_cache_fills_up_with_drafts_as_without(engines: Pair) -> None:
    params = replace(GREEDY, max_generate_length=200)
    plain = engines.one.plainly(prompt_of(20), params)
    assert plain.finish_reason == "capacity"
    for way in ("suffix", "ngram"):
        (drafted,) = served(engines.one, [asked(engines.one, prompt_of(20), params, way)])
        assert_same(engines.one, plain, drafted)
        assert isinstance(drafted, Response)
        assert drafted.finish_reason == plain.finish_reason


# ---- what is opened


def test_auto_drafts_by_the_first_method_without_an_engine(engines: Pair) -> None:
    with Engine(engines.path, spec_decode="auto") as engine:
        assert engine.method == "suffix"
        assert "drafting by suffix decoding, which needs none" in engine.notes[0]
        assert engine.plan() == DraftPlan(4, 23, 24)
    with Engine(engines.path) as engine:
        assert engine.method is None
        assert not engine.spec_decode


def test_plans_by_sizes_and_options(engines: Pair) -> None:
    """Sizes are bounds of suffix trees; a pool has matches of one length."""
    with Engine(engines.path, drafter="suffix") as engine:
        assert engine.plan(top_k=1) == DraftPlan(1, 23, 24)
        assert engine.plan(steps=1) == DraftPlan(4, 1, 5)
        assert engine.plan(verify_size=2) == DraftPlan(1, 1, 2)
        with pytest.raises(LimitError, match="exceeds the 24"):
            engine.plan(verify_size=25)
    options = {"max_draft_len": 7}
    with Engine(engines.path, drafter="ngram", drafter_options=options) as engine:
        assert engine.plan() == DraftPlan(1, 7, 8)
        assert engine.plan(steps=4) == DraftPlan(1, 4, 5)
        assert engine.plan(verify_size=3) == DraftPlan(1, 2, 3)
        with pytest.raises(LimitError, match="exceeds the max_draft_len of 7") as error:
            engine.plan(steps=8)
        assert "max_draft_len to 8" in error.value.remedy
        with pytest.raises(LimitError, match="no trees"):
            engine.plan(top_k=2)


@pytest.mark.parametrize("engines", ["llama", "window-5"], indirect=True)
def test_exact_engines_draft_chains_and_bitwise_ones_trees(engines: Pair) -> None:
    """No engine with recurrent layers is exact."""
    with Engine(engines.path, drafter="suffix", drafter_options=EVERYTHING, exact=True) as engine:
        engine.stop_ids = frozenset()
        assert (engine.plan().top_k > 1) == engine.config.weights.is_bitwise
        params = replace(GREEDY, max_generate_length=20)
        drafted = engine.generate(prompt_of(20), params)
        assert drafted.token_ids == engine.generate(prompt_of(20), params, PLAIN).token_ids
        assert sum(drafted.metrics.per_step_accepted) > 0
