"""Draft models: what they propose is what the definition says, by transformers; and with them or
without, the same tokens come out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import edgespec
from edgespec.backends.call import Result
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.drafters.draft_model import DraftModelDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests import toys
from tests.lossless.answers import (
    VOCAB,
    asked,
    assert_as_alone,
    assert_same,
    plainly,
    prompt_of,
    served,
)
from tests.lossless.draft_models import (
    Kind,
    Opened,
    engines,
    make_model,
    models,
    opened,
)
from tests.lossless.pairs import LIMITS
from tests.reference_draft_model import (
    LogProbs,
    acceptances,
    draft_tree,
    next_token,
    paths_of,
    static_tree,
)

KINDS: list[Kind] = [
    "llama",
    "mistral-window-5",
    "gemma3-window-5",
    "hybrid-draft",
    "hybrid-base",
]
CHAIN, TREE, WIDE = DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), DraftPlan(10, 4, 40)
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0], [1, 0, 2], [2, 1, 0, 1]])
PLANS = [CHAIN, TREE, WIDE]
GREEDY = SamplingParams(temperature=0.0, seed=0)
ADDED = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.6, top_k=0, top_p=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=2, repetition_penalty=1.3, **ADDED),
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with opened(request.param) as found:
        yield found


@pytest.fixture(autouse=True)
def without_prefixes(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        pair: Opened = request.getfixturevalue("pair")
        for engine in (pair.one, pair.four):
            engine.forget_prefixes()


@functools.cache
def draft_of(directory: Path) -> LogProbs:
    return next_token(toys.load_base(directory / "draft"), VOCAB)


class Proposals:
    """What a drafter proposed, each with the tokens before it."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.drafter, DraftModelDrafter)
        self.drafter, self.real = engine.drafter, engine.drafter.propose
        self.found: list[tuple[list[int], DraftPlan, DraftTree]] = []

    def __call__(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        tokens = [[*self.drafter.state(request.lane).tokens] for request in requests]
        trees = self.real(requests)
        plans = [request.plan for request in requests]
        self.found += zip(tokens, plans, trees, strict=True)
        return trees


# The definition


@pytest.mark.parametrize("plan", [TREE, WIDE], ids=["tree", "wide"])
def test_drafts_are_those_of_the_definition(pair: Opened, plan: DraftPlan) -> None:
    """Every tree of an answer, whatever was accepted before it."""
    proposals, log_probs = Proposals(pair.one), draft_of(pair.directory)
    with mock.patch.object(pair.one.drafter, "propose", proposals):
        pair.one.generate(prompt_of(9), asked(GREEDY, 6), plan)
    assert len(proposals.found) > 1
    for tokens, cut, tree in proposals.found:
        if cut.verify_size == 1:
            assert len(tree) == 1
            continue
        wanted = draft_tree(log_probs, tokens, cut.top_k, cut.steps, cut.verify_size)
        assert (tree.tokens.tolist(), tree.parents.tolist()) == wanted


def test_static_trees_are_those_of_the_definition(pair: Opened) -> None:
    proposals, log_probs = Proposals(pair.one), draft_of(pair.directory)
    with mock.patch.object(pair.one.drafter, "propose", proposals):
        found = pair.one.generate(prompt_of(9), asked(GREEDY, 10), STATIC)
    assert found.token_ids == plainly(pair.one, prompt_of(9), asked(GREEDY, 10)).token_ids
    whole = [(tokens, tree) for tokens, plan, tree in proposals.found if plan == STATIC]
    assert whole
    for tokens, tree in whole:
        paths = paths_of(tree.tokens.tolist(), tree.parents.tolist())
        assert paths == static_tree(log_probs, tokens, STATIC.choices)


def test_as_much_is_accepted_as_the_definition_gives(pair: Opened) -> None:
    prompt = prompt_of(12, seed=3)
    plain = plainly(pair.one, prompt, asked(GREEDY, 18))
    drafted = pair.one.generate(prompt, asked(GREEDY, 18), CHAIN)
    wanted = acceptances(draft_of(pair.directory), prompt, plain.token_ids, 1, 3, 4)
    assert drafted.metrics.per_step_accepted == wanted
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("plan", "sampling"),
    list(zip([WIDE, TREE, CHAIN], SAMPLINGS, strict=True)),
    ids=["0", "0.6", "1.0"],
)
def test_drafts_leave_every_token_as_it_was(
    pair: Opened, plan: DraftPlan, sampling: SamplingParams
) -> None:
    for length in (1, 20):
        plain = plainly(pair.one, prompt_of(length), asked(sampling, 20))
        drafted = pair.one.generate(prompt_of(length), asked(sampling, 20), plan)
        assert_same(pair.one, plain, drafted, asked(sampling, 20))


def test_drafts_are_accepted_in_part_and_in_whole() -> None:
    """So that the claims above are about caches that go back by every number of rows."""
    with opened("llama") as pair:
        counts: set[int] = set()
        for seed in range(6):
            found = pair.one.generate(prompt_of(12, seed), asked(GREEDY, 24), CHAIN)
            counts |= set(found.metrics.per_step_accepted)
    assert counts == {0, 1, 2, 3}


# What the draft engine computes


class Calls:
    """The numbers of rows of each call of a decoder, those of one lane."""

    def __init__(self, decoder: CachedDecoder) -> None:
        self.decoder, self.real = decoder, decoder.run
        self.rows: list[int] = []

    def __call__(self, parts: Sequence[DecoderRows]) -> list[Result]:
        self.rows += [len(part.tokens) for part in parts]
        return self.real(parts)


def test_base_as_its_own_draft_is_accepted_whole_and_reads_no_token_twice() -> None:
    base = models("llama") / "base"
    with edgespec.load(engines(base, base)) as engine:
        engine.stop_ids = frozenset()
        assert isinstance(engine.drafter, DraftModelDrafter)
        calls = Calls(engine.drafter.decoder)
        with mock.patch.object(engine.drafter.decoder, "run", calls):
            found = engine.generate(prompt_of(20), asked(GREEDY, 17), CHAIN)
    assert found.metrics.per_step_accepted == [3, 3, 3, 3]
    # the prompt; the pending token and two drafts; from then on the last accepted draft as well
    assert calls.rows == [20, 1, 1, 1, *[2, 1, 1] * 3]


def test_prompt_is_read_in_chunks_and_its_end_with_the_first_draft() -> None:
    """As the base reads it, so that others wait for a chunk at a time."""
    base = models("llama") / "base"
    with edgespec.load(engines(base, base)) as engine:
        engine.stop_ids = frozenset()
        assert isinstance(engine.drafter, DraftModelDrafter)
        for length, rows in ((5, [6, 1, 1]), (40, [20, 20, 1, 1, 1]), (45, [20, 20, 6, 1, 1])):
            calls = Calls(engine.drafter.decoder)
            with (
                mock.patch.object(CachedDecoder, "prefill_chunk", 20),
                mock.patch.object(engine.drafter.decoder, "run", calls),
            ):
                found = engine.generate(prompt_of(length), asked(GREEDY, 5), CHAIN)
            assert calls.rows == rows
            assert found.metrics.per_step_accepted == [3]


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=lambda s: f"t{s.temperature}")
def test_rejection_of_what_the_base_itself_drew_accepts_all_of_it(
    sampling: SamplingParams,
) -> None:
    """p is q there: the drafts are drawn with the settings, and on the path, of the request."""
    base = models("llama") / "base"
    with edgespec.load(engines(base, base), acceptance="rejection") as engine:
        engine.stop_ids = frozenset()
        found = engine.generate(prompt_of(12), asked(sampling, 17), CHAIN)
        exact = engine.generate(prompt_of(12), asked(sampling, 17), CHAIN, acceptance="exact")
    assert found.metrics.per_step_accepted == [3, 3, 3, 3]
    assert sum(exact.metrics.per_step_accepted) < 12


# Batches


def test_batch_gives_each_what_it_gets_alone(pair: Opened) -> None:
    lengths = [(1, 9), (30, 22), (12, 24), (5, 1), (22, 5), (3, 16), (17, 27), (9, 12)]
    plans = [CHAIN, None, TREE, DraftPlan(1, 5, 6)]
    jobs = [
        GenerationRequest(prompt_of(length), asked(SAMPLINGS[i % 3], new), plans[i % 4])
        for i, (length, new) in enumerate(lengths)
    ]
    found = served(pair.four, jobs)
    assert_as_alone(pair.one, jobs, found)
    for one, response in zip(jobs, found, strict=True):
        if one.plan is not None and one.sampling.temperature == 0:
            alone = pair.one.generate(one.prompt_ids, one.sampling, one.plan)
            assert response.metrics.per_step_accepted == alone.metrics.per_step_accepted


# Vocabularies


@pytest.mark.parametrize(("base_rows", "draft_rows"), [(256, 288), (288, 256)])
def test_vocabularies_may_be_padded_differently(
    tmp_path: Path, base_rows: int, draft_rows: int
) -> None:
    """The rows behind the tokens both know are no drafts; the tokenizer is one."""
    base = make_model(tmp_path / "base", "llama", layers=2, seed=0, vocab=base_rows)
    draft = make_model(tmp_path / "draft", "llama", layers=1, seed=1, vocab=draft_rows)
    for path in (base, draft):
        (path / "tokenizer.json").write_bytes(
            (models("llama") / "base" / "tokenizer.json").read_bytes()
        )
    with edgespec.load(engines(base, draft)) as engine:
        engine.stop_ids = frozenset()
        proposals = Proposals(engine)
        plain = plainly(engine, prompt_of(9), asked(GREEDY, 20))
        with mock.patch.object(engine.drafter, "propose", proposals):
            drafted = engine.generate(prompt_of(9), asked(GREEDY, 20), WIDE)
        assert_same(engine, plain, drafted, asked(GREEDY, 20))
    reference = next_token(toys.load_base(draft), min(base_rows, draft_rows))
    known = [(t, plan, tree) for t, plan, tree in proposals.found if max(t) < draft_rows]
    assert known
    for tokens, plan, tree in known:
        assert tree.tokens[1:].max(initial=0) < base_rows
        if plan.verify_size > 1:
            wanted = draft_tree(reference, tokens, plan.top_k, plan.steps, plan.verify_size)
            assert (tree.tokens.tolist(), tree.parents.tolist()) == wanted


def test_token_without_a_row_in_the_draft_ends_the_drafts_and_not_the_request(
    tmp_path: Path,
) -> None:
    base = make_model(tmp_path / "base", "llama", layers=2, seed=0, vocab=288)
    draft = make_model(tmp_path / "draft", "llama", layers=1, seed=1)
    (base / "tokenizer.json").write_bytes((draft / "tokenizer.json").read_bytes())
    with edgespec.load(engines(base, draft)) as engine:
        engine.stop_ids = frozenset()
        found = engine.generate([5, 280, 9], asked(GREEDY, 8), CHAIN)
        assert found.metrics.per_step_drafted == [0] * 7
        later = engine.generate([5, 8, 9], asked(GREEDY, 8), CHAIN)
        assert sum(later.metrics.per_step_drafted) > 0


# Lengths


def test_draft_of_a_shorter_context_stops_drafting_there(tmp_path: Path) -> None:
    """Whether its positions end or its KV cache does; the request goes on."""
    base = models("llama") / "base"
    short = make_model(tmp_path / "draft", "llama", layers=2, seed=1, max_position=24)
    small = replace(LIMITS, max_input_len=16, max_kv_cache_capacity=24)
    for path in (
        engines(base, short),
        engines(base, models("llama") / "draft", draft_limits=small),
    ):
        with edgespec.load(path) as engine:
            engine.stop_ids = frozenset()
            assert any("beyond 24 nothing is drafted" in note for note in engine.notes)
            for length in (12, 40):  # the second one is longer than the draft takes at all
                plain = plainly(engine, prompt_of(length), asked(GREEDY, 22))
                drafted = engine.generate(prompt_of(length), asked(GREEDY, 22), CHAIN)
                assert_same(engine, plain, drafted, asked(GREEDY, 22))
                emitted = length + 1
                for count, accepted in zip(
                    drafted.metrics.per_step_drafted,
                    drafted.metrics.per_step_accepted,
                    strict=True,
                ):
                    room = 24 - emitted
                    left = length + 22 - emitted
                    assert count == max(0, min(3, left - 1, 1 + room if room >= 0 else 0))
                    emitted += accepted + 1


def test_full_cache_ends_both_runs_at_the_same_token(pair: Opened) -> None:
    prompt = prompt_of(45)
    plain = plainly(pair.one, prompt, asked(GREEDY, 100))
    for plan in PLANS:
        drafted = pair.one.generate(prompt, asked(GREEDY, 100), plan)
        assert drafted.finish_reason == plain.finish_reason
        assert_same(pair.one, plain, drafted, asked(GREEDY, 100))


# Turns of a chat


def test_next_turn_goes_on_with_the_rows_of_base_and_draft(pair: Opened) -> None:
    engine = pair.one
    assert isinstance(engine.drafter, DraftModelDrafter)
    turn = prompt_of(20, seed=5)
    first = engine.generate(turn, asked(GREEDY, 12), CHAIN, keep=True)
    longer = [*turn, *first.token_ids, *prompt_of(4, seed=6)]
    calls = Calls(engine.drafter.decoder)
    with mock.patch.object(engine.drafter.decoder, "run", calls):
        second = engine.generate(longer, asked(GREEDY, 8), CHAIN)
    assert second.metrics.reused_tokens >= len(turn)
    assert calls.rows[0] < 10  # what the user said, and the last drafts of the turn before
    engine.forget_prefixes()
    anew = engine.generate(longer, asked(GREEDY, 8), CHAIN)
    assert second.token_ids == anew.token_ids
    assert second.metrics.per_step_accepted == anew.metrics.per_step_accepted


def test_prefix_of_which_a_recurrent_draft_keeps_nothing_is_read_again() -> None:
    """The base's rows can be cut, a state cannot."""
    with opened("hybrid-draft") as pair:
        engine, turn = pair.one, prompt_of(30, seed=5)
        engine.generate(turn, asked(GREEDY, 12), CHAIN, keep=True)
        other = [*turn[:24], *prompt_of(6, seed=6)]
        assert isinstance(engine.drafter, DraftModelDrafter)
        calls = Calls(engine.drafter.decoder)
        with mock.patch.object(engine.drafter.decoder, "run", calls):
            found = engine.generate(other, asked(GREEDY, 8), CHAIN)
        assert found.metrics.reused_tokens >= 24
        assert calls.rows[0] == 30
        engine.forget_prefixes()
        anew = engine.generate(other, asked(GREEDY, 8), CHAIN)
        assert found.metrics.per_step_accepted == anew.metrics.per_step_accepted
        assert found.token_ids == anew.token_ids


# A draft that is rounded, and one that is broken


def test_int4_draft_changes_what_is_accepted_and_not_the_text() -> None:
    from edgespec.backends.registry import get_backend

    path = models("llama")
    options = get_backend("ort", "the test").parse_options({"weights": "int4"})
    with edgespec.load(engines(path / "base", path / "draft", draft_options=options)) as engine:
        engine.stop_ids = frozenset()
        assert engine.draft_config is not None
        assert engine.draft_config.weights.scheme == "int4"
        for plan in PLANS:
            plain = plainly(engine, prompt_of(9), asked(GREEDY, 24))
            drafted = engine.generate(prompt_of(9), asked(GREEDY, 24), plan)
            assert_same(engine, plain, drafted, asked(GREEDY, 24))
            assert sum(drafted.metrics.per_step_accepted) > 0


def test_nan_in_the_draft_ends_its_drafts_and_no_other(pair: Opened) -> None:
    drafter = pair.one.drafter
    assert isinstance(drafter, DraftModelDrafter)
    real, calls = drafter.decoder.run, iter(range(100))

    def poisoned(parts: Sequence[DecoderRows]) -> list[Result]:
        results = real(parts)
        if next(calls) == 4:
            results[0].logits.rows()[:] = np.nan
        return results

    plain = plainly(pair.one, prompt_of(9), asked(GREEDY, 20))
    unharmed = pair.one.generate(prompt_of(9), asked(GREEDY, 20), CHAIN)
    with mock.patch.object(drafter.decoder, "run", poisoned):
        found = pair.one.generate(prompt_of(9), asked(GREEDY, 20), CHAIN)
    assert found.token_ids == plain.token_ids
    drafted = found.metrics.per_step_drafted
    assert drafted == [3, 1, *[0] * (len(drafted) - 2)]
    again = pair.one.generate(prompt_of(9), asked(GREEDY, 20), CHAIN)
    assert again.token_ids == plain.token_ids
    assert again.metrics.per_step_drafted == unharmed.metrics.per_step_drafted
