"""Answers of a form: with drafts of any drafter, forced tokens and cuts they are those of plain
decoding under the mask, and every one that ends has its form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest

import edgespec
from edgespec.errors import RequestError
from edgespec.prompts import END_OF_SEQUENCE, MAX_LENGTH, Guided, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.loop.session import Session
from edgespec.runtime.text.thinking import Thoughts
from edgespec.runtime.trees.tree import PLAIN, DraftPlan
from tests.lossless.answers import VOCAB, outcomes, prompt_of, served
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engines import api_engines
from tests.lossless.test_adaptive import PAIRS, SHAPES, SHAPES_OF_BLOCKS, SIZES, STATIC

SCHEMA = {
    "type": "object",
    "properties": {
        "on": {"enum": [True, "yes", None]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["on", "n", "s"],
    "additionalProperties": False,
}
WORD = re.compile(r"(one|two|3+){1,4}")
FORMS = [Guided(json_schema=SCHEMA), Guided(regex=WORD.pattern), Guided(choice=("aab", "aa b"))]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_generate_length=40)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=0.95, seed=3, max_generate_length=40)


def has_form(guided: Guided, text: str) -> bool:
    if guided.json_schema is None:
        return text in (guided.choice or ()) or WORD.fullmatch(text) is not None
    value = json.loads(text)
    return (
        [*value] == ["on", "n", "s"]
        and value["on"] in (True, "yes", None)
        and type(value["n"]) is int
        and 0 <= value["n"] <= 99
        and len(value["s"]) <= 2
        and {*value["s"]} <= {"a", "bc"}
    )


@dataclass(frozen=True)
class Pair:
    name: str
    one: Engine
    four: Engine

    def plans(self) -> list[DraftPlan]:
        sizes = SHAPES_OF_BLOCKS if self.name == "dflash" else SIZES
        own = [sizes[shape] for shape in SHAPES[self.name] if shape in sizes]
        return [self.one.plan(*size) for size in own] + [STATIC] * ("static" in SHAPES[self.name])


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        one, four = (
            stack.enter_context(edgespec.load(PAIRS[request.param](name)))
            for name in ("one", "four")
        )
        yield Pair(request.param, one, four)


def assert_is_plain(engine: Engine, job: GenerationRequest, found: Response) -> None:
    assert job.sampling.guided is not None
    plain = engine.plainly(job.prompt_ids, job.sampling)
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert plain.metrics.forced_tokens == 0
    if found.finish_reason == END_OF_SEQUENCE:
        assert has_form(job.sampling.guided, found.text), found.text
    else:
        assert found.finish_reason == MAX_LENGTH


def jobs_of(plans: list[DraftPlan]) -> list[GenerationRequest]:
    """Each plan with each form, greedy or sampled, with what is forced or without."""
    cases = [(plan, form) for plan in plans for form in FORMS]
    return [
        GenerationRequest(
            prompt_of(1 + 3 * i),
            replace((GREEDY, SAMPLED)[(i // 3 + i) % 2], guided=form),
            plan,
            takes_forced=i % 4 != 3,
        )
        for i, (plan, form) in enumerate(cases)
    ]


def test_drafts_leave_every_token_of_a_form_as_it_was(pair: Pair) -> None:
    jobs, forced, ended = jobs_of(pair.plans()), 0, 0
    for job in [*jobs, *(replace(j, sampling=replace(j.sampling, seed=9)) for j in jobs)]:
        (found,) = served(pair.one, [job])
        assert_is_plain(pair.one, job, found)
        forced += found.metrics.forced_tokens
        ended += found.finish_reason == END_OF_SEQUENCE
    assert forced > 0
    assert ended > 0


def test_batch_of_forms_and_of_none_gives_each_what_it_gets_alone(pair: Pair) -> None:
    jobs = jobs_of(pair.plans())[:6]
    free = GenerationRequest(prompt_of(4), GREEDY, pair.plans()[0])
    found = served(pair.four, [*jobs[:3], free, *jobs[3:]])
    alone = pair.one.plainly(free.prompt_ids, free.sampling)
    assert found.pop(3).token_ids == alone.token_ids
    for job, response in zip(jobs, found, strict=True):
        assert_is_plain(pair.one, job, response)


def test_lossy_and_random_rules_keep_the_form(pair: Pair) -> None:
    """Rejection cuts nothing and draws from what the mask leaves of q; typical, in both of its
    forms, never takes what the grammar forbids."""
    ended = 0
    typical = [edgespec.TypicalAcceptance(0.3, posterior_fast=fast) for fast in (True, False)]
    for rule in ("rejection", *typical):
        for seed in range(3):
            asked = replace(SAMPLED, seed=seed, guided=FORMS[0])
            plan = pair.plans()[0]
            found = pair.one.generate(prompt_of(9), asked, plan, acceptance=rule)
            if found.finish_reason == END_OF_SEQUENCE:
                ended += 1
                assert has_form(FORMS[0], found.text), found.text
    assert ended


# On one pair


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with edgespec.load(api_engines() / "one") as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_it_was(one: Engine) -> Iterator[None]:
    yield
    one.session.drafter = one.drafter


@pytest.mark.parametrize("drafter", [None, "ngram", "suffix"])
def test_forced_tokens_are_drafts_beside_those_of_the_text_and_without_any(
    drafter: str | None,
) -> None:
    with edgespec.load(api_engines() / "one", spec_decode=bool(drafter), drafter=drafter) as engine:
        for sampling in (GREEDY, SAMPLED):
            asked = replace(sampling, guided=FORMS[0])
            plain = engine.generate(prompt_of(9), asked, PLAIN)
            found = engine.generate(prompt_of(9), asked)
            assert found.token_ids == plain.token_ids
            assert found.metrics.forced_tokens > 5
            assert found.metrics.steps < plain.metrics.steps


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafts_of_the_text_go_on_behind_what_is_forced(drafter: str) -> None:
    """The items repeat, and what is forced stands between them."""
    item = {"properties": {"key": {"enum": ["ab", "cd"]}}, "required": ["key"]}
    form = Guided(
        json_schema={"items": {**item, "type": "object", "additionalProperties": False}}
        | {"type": "array", "minItems": 5, "maxItems": 5}
    )
    deep = 0
    with edgespec.load(api_engines() / "one", drafter=drafter) as engine:
        asked = replace(GREEDY, guided=form, max_generate_length=100)
        prompt = engine.encode('[{"key": "ab"}, {"key": "ab"}, {"key": "ab"}, ')
        with mock.patch.object(
            Session, "verify", autospec=True, side_effect=Session.verify
        ) as seen:
            found = engine.generate(prompt, asked)
        for call in seen.call_args_list:
            trees = [draft.tree for draft in call.args[1]]
            deep += sum(0 < tree.num_forced < len(tree) - 1 for tree in trees)
        assert found.token_ids == engine.plainly(prompt, asked).token_ids
    assert deep > 0


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_an_end_at_each_place_of_what_is_accepted(one: Engine, right: float) -> None:
    """Answers of one to six tokens, whose end is drafted with tokens behind it."""
    for length in range(1, 7):
        asked = replace(GREEDY, guided=Guided(choice=("q" * length, "z" * length)))
        plain = one.plainly(prompt_of(5), asked)
        assert len(plain.token_ids) == length + 1
        script = [*plain.token_ids, 7, 8, 9, 7, 8, 9]
        for forced in (False, True):
            one.session.drafter = ScriptedDrafter([(prompt_of(5), script)], VOCAB, right)
            plan = DraftPlan(1, 4, 5) if right == 1 else DraftPlan(3, 4, 12)
            job = GenerationRequest(prompt_of(5), asked, plan, takes_forced=forced)
            (found,) = served(one, [job])
            assert found.token_ids == plain.token_ids, (length, forced)
            assert found.finish_reason == END_OF_SEQUENCE
            if not forced and right == 1:
                assert found.metrics.per_step_accepted[0] == min(length, 4)


def test_the_mask_begins_behind_thoughts_that_end_within_a_tree(
    one: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the thoughts is drafted at each place of a chain, with the answer behind it."""
    begin, end = 11, 12
    form = Guided(regex="(ab|ba){2}")
    monkeypatch.setattr(Thoughts, "of", lambda prompt, tokenizer: Thoughts(begin, end, open=True))
    for length in range(5):
        thoughts = [*range(20, 20 + length), end]
        guide = one.guide(replace(GREEDY, guided=form), prompt_of(5))
        assert guide is not None
        for forced in (True, False):
            bias = dict.fromkeys(thoughts, 0.0)
            asked = replace(GREEDY, guided=form, max_generate_length=30, logit_bias=bias)
            plain = one.plainly([*prompt_of(5), *thoughts[:-1]], asked)
            assert guide.allowed([*prompt_of(5), *thoughts[:-1]]) is None
            mask = guide.allowed([*prompt_of(5), *thoughts])
            assert mask is not None
            letters = {one.tokenizer.decode([i]) for i in mask.nonzero()[0].tolist()}
            assert letters <= {"a", "b", "ab", "ba"}
            script = [*plain.token_ids]
            job = GenerationRequest(
                [*prompt_of(5), *thoughts[:-1]], asked, DraftPlan(1, 4, 5), takes_forced=forced
            )
            one.session.drafter = ScriptedDrafter([(job.prompt_ids, script)], VOCAB, 1)
            (found,) = served(one, [job])
            assert found.token_ids == plain.token_ids


def give_up(guide: Guide) -> None:
    if len(guide.read) > 3:
        raise RequestError("it gave up")


def test_a_matcher_that_gives_up_ends_its_request_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a batch, where drafts are tested too."""
    jobs = jobs_of(pair.plans())[:2]
    free = GenerationRequest(prompt_of(4), GREEDY, pair.plans()[0])
    alone = pair.one.plainly(free.prompt_ids, free.sampling)
    monkeypatch.setattr(Guide, "check", give_up)
    *failed, found = outcomes(pair.four, [*jobs, free])
    assert [str(error) for error in failed] == ["it gave up"] * 2
    assert isinstance(found, Response)
    assert found.token_ids == alone.token_ids


def test_an_error_of_the_grammar_is_that_of_its_request_alone(
    one: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = np.zeros(VOCAB, bool)
    monkeypatch.setattr(
        Guide, "allowed", lambda guide, before: nothing if len(before) > 8 else None
    )
    jobs = [
        GenerationRequest(prompt_of(5), replace(GREEDY, guided=FORMS[1]), takes_forced=False),
        GenerationRequest(prompt_of(6), GREEDY),
    ]
    failed, free = outcomes(one, jobs)
    assert isinstance(failed, RequestError)
    assert "leaves no token" in str(failed)
    assert isinstance(free, Response)
    assert free.token_ids == one.plainly(prompt_of(6), GREEDY).token_ids


def test_log_probabilities_are_the_models_own(one: Engine) -> None:
    """Those of the first token are the same with a grammar as without one."""
    asked = replace(GREEDY, num_logprobs=5)
    free = one.generate(prompt_of(5), asked)
    formed = one.generate(prompt_of(5), replace(asked, guided=FORMS[0]))
    assert formed.logprobs[0][:5] == free.logprobs[0][:5]
    assert formed.token_ids[0] == formed.logprobs[0][-1][0] != free.token_ids[0]


def test_what_comes_out_does_not_rest_on_the_cut(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that is not cut costs rows and no tokens."""
    job = jobs_of(pair.plans())[0]
    (cut,) = served(pair.one, [job])
    monkeypatch.setattr(Session, "guided", lambda session, seq, tree, forced: tree)
    (whole,) = served(pair.one, [job])
    assert whole.token_ids == cut.token_ids
    assert whole.metrics.num_drafted >= cut.metrics.num_drafted
