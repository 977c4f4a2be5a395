"""Requests of one batch name their methods, sizes and options, and each gets what plain decoding
gives on an engine for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from edgespec.compat.decoding import DecodingType
from edgespec.compat.decoding_types import DECODING_TYPES
from edgespec.compat.speculative_config import class_named
from edgespec.errors import LimitError, OptionError, RequestError
from edgespec.methods import METHODS, Method
from edgespec.prompts import NoJournal, RequestFile, SamplingParams, parse_requests
from edgespec.runtime.acceptance.verify import TypicalAcceptance
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.requests.file_runner import FileRun
from edgespec.runtime.trees.tree import PLAIN
from tests.e2e.repeating_drafter import Repeating
from tests.lossless.engines import api_engines

NAME = "repeat"
WORDS = "one two one two one two "
OFTEN = {"0": -100, "2": -100}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatOptions(DrafterOptions):
    """Of the method of this file."""

    window: int = option(64, "Tokens that are looked at.", low=1)


def open_drafter(sources: DrafterSources) -> Repeating:
    assert isinstance(sources.options, RepeatOptions)
    return Repeating(num_lanes=sources.num_lanes)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    method = Method(
        name=NAME,
        title="repetition",
        draft_title="repetition",
        needs_engine=False,
        weights_in="nowhere",
    )
    row = DrafterRow(
        open=open_drafter,
        limits=lambda base, draft: TreeLimits(base.limits.verify_tree_size),
        options=RepeatOptions,
    )
    patch.setitem(METHODS, NAME, method)
    patch.setitem(DRAFTERS, NAME, row)
    patch.setitem(DECODING_TYPES, NAME, DecodingType(name="Repeat_It"))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def engines(registered: None) -> Iterator[tuple[Engine, Engine]]:
    """For one sequence, and for four."""
    made = api_engines()
    with Engine(made / "one") as one, Engine(made / "four") as four:
        one.stop_ids = four.stop_ids = frozenset()
        yield one, four


BLOCKS: list[dict[str, Any]] = [
    {},
    {"speculative": {"decoding_type": "Repeat_It", "max_draft_len": 4}},
    {"speculative": {"decoding_type": "Eagle3", "max_draft_len": 2}},
    {"disable_spec_decode": True},
    {"speculative": {"decoding_type": "repeat-it", "window": 8, "max_draft_len": 2}},
    {"speculative": {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_draft_len": 3}},
    {"speculative": {"decoding_type": "AUTO", "draft_len_schedule": {"1": 3, "4": 1}}},
    {"speculative": {"decoding_type": "Repeat_It", "max_draft_len": 3, "max_concurrency": 2}},
    {"speculative": {"max_draft_len": 5}, "temperature": 0.8, "seed": 3},
]


def file_of(blocks: list[dict[str, Any]], **top: Any) -> RequestFile:
    document = {
        "temperature": 0,
        "max_generate_length": 14,
        "logit_bias": OFTEN,
        "batch_size": 4,
        **top,
        "requests": [
            {"messages": [{"role": "user", "content": WORDS + "x" * i}], **block}
            for i, block in enumerate(blocks)
        ],
    }
    return parse_requests(json.loads(json.dumps(document)), "input.json")


class Quiet:
    def add(self, chunk: Chunk) -> None: ...

    def finish(self, count: int) -> None: ...


def answered(engine: Engine, requests: RequestFile, *, drafts: bool = True) -> FileRun:
    said: list[str] = []
    requests = replace(requests, batch_size=min(requests.batch_size, engine.max_batch_size))
    plan = engine.plan() if drafts else None
    run = FileRun(engine, requests, plan, NoJournal(), stopping=lambda: False, warn=said.append)
    run.run(Quiet(), warmup=0, check_lossless=False)
    assert run.fault is None
    run.said = said  # type: ignore[attr-defined]
    return run


def responses(run: FileRun) -> list[Response]:
    assert [answer.error for answer in run.in_order() if answer.error] == []
    return [answer.response for answer in run.in_order() if answer.response is not None]


@pytest.mark.parametrize("budget", [0, 2**24])
def test_batch_that_mixes_methods_equals_plain_decoding(
    engines: tuple[Engine, Engine], budget: int
) -> None:
    one, four = engines
    four.forget_prefixes()
    four.session.prefixes.budget_bytes = budget
    requests = file_of(BLOCKS)
    plainly = answered(
        one,
        file_of([{k: v for k, v in b.items() if k != "speculative"} for b in BLOCKS]),
        drafts=False,
    )
    mixed = answered(four, requests)
    for got, wanted in zip(responses(mixed), responses(plainly), strict=True):
        assert got.token_ids == wanted.token_ids
    drafted = [sum(r.metrics.per_step_drafted) for r in responses(mixed)]
    # the fourth asks for none, and beside the eighth more than two run until its end
    assert [count > 0 for count in drafted] == [i not in (3, 7) for i in range(len(BLOCKS))]
    most = [max(r.metrics.per_step_drafted) for r in responses(mixed)]
    assert most[1] <= 4
    assert most[2] == 2
    assert most[5] == 9  # a tree of 3 + 2 * 3 nodes
    assert [a.speculative for a in mixed.in_order()] == [i != 3 for i in range(len(BLOCKS))]


def test_engine_without_a_draft_answers_requests_that_bring_a_method(
    engines: tuple[Engine, Engine],
) -> None:
    blocks = [BLOCKS[0], BLOCKS[1], {"speculative": {"max_draft_len": 2}}]
    with Engine(api_engines() / "four", spec_decode=False) as plain:
        plain.stop_ids = frozenset()
        run = answered(plain, file_of(blocks), drafts=False)
    first, second, third = run.in_order()
    assert first.response is not None
    assert second.response is not None
    assert sum(first.response.metrics.per_step_drafted) == 0
    assert sum(second.response.metrics.per_step_drafted) > 0
    assert isinstance(third.error, LimitError)  # it asks for the engine's own
    assert run.speculative


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"decoding_type": "Repeat_It", "windows": 3},
            r"requests\[0\].speculative.*\nDid you mean window",
        ),
        ({"decoding_type": "Nothing"}, "no decoding_type Nothing"),
        ({"max_draft_len": "3"}, "max_draft_len is '3'"),
        ({"speculative_model": "x"}, "a matter of the engine"),
    ],
)
def test_block_that_cannot_be_is_refused_before_the_run(
    engines: tuple[Engine, Engine], block: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        answered(engines[1], file_of([{"speculative": block}]))


@pytest.mark.parametrize(
    ("block", "error", "said"),
    [
        ({"max_draft_len": 999}, LimitError, "decoding_type Eagle3: "),
        ({"decoding_type": "MTP"}, OptionError, "Write decoding_type: Eagle3"),
    ],
)
def test_request_beyond_the_engine_fails_alone(
    engines: tuple[Engine, Engine], block: dict[str, Any], error: type[Exception], said: str
) -> None:
    run = answered(engines[1], file_of([{}, {"speculative": block}]))
    assert run.in_order()[0].response is not None
    failed = run.in_order()[1].error
    assert isinstance(failed, error)
    assert said in str(failed)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"speculative": {}, "disable_spec_decode": True}, "disable_spec_decode is true"),
        ({"speculative": "NGram"}, 'is "NGram", not an object'),
        ({"speculative": [1]}, "is a list, not an object"),
        ({"speculativ": {}}, 'Did you mean "speculative"'),
    ],
)
def test_key_of_the_file_is_checked_where_it_stands(content: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        file_of([content])


def test_file_may_say_it_for_all_requests() -> None:
    requests = file_of(
        [{}, {"speculative": {"max_draft_len": 1}}], speculative={"max_draft_len": 2}
    )
    assert [r.speculative for r in requests.requests] == [
        {"max_draft_len": 2},
        {"max_draft_len": 1},
    ]


# ---- in Python


def test_config_is_a_plan_of_a_request_and_of_an_engine(engines: tuple[Engine, Engine]) -> None:
    _, four = engines
    greedy = SamplingParams(temperature=0, max_generate_length=16)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    plain = four.generate(prompt, greedy, PLAIN)
    repeat = class_named("RepeatItDecodingConfig")
    plans = [repeat(max_draft_len=3, window=9), None, PLAIN, class_named("AutoDecodingConfig")()]
    answers = four.generate_batch([prompt] * 4, greedy, plans)
    assert [answer.token_ids for answer in answers] == [plain.token_ids] * 4
    made = api_engines() / "four"
    for config in (repeat(max_draft_len=2), {"decoding_type": "Repeat_It", "max_draft_len": 2}):
        with Engine(made, speculative_config=config) as opened:
            opened.stop_ids = frozenset()
            assert opened.method == NAME
            assert opened.plan() == opened.plan(1, 2, 3)
            assert opened.generate(prompt, greedy).token_ids == plain.token_ids
    with pytest.raises(OptionError, match="a matter of the engine"):
        four.generate(prompt, greedy, repeat(acceptance_window=2, acceptance_length_threshold=1))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"spec_decode": False}, "spec_decode=False and speculative_config"),
        ({"drafter": NAME}, "drafter and speculative_config"),
        ({"drafter_options": {"window": 3}}, "drafter_options and speculative_config"),
    ],
)
def test_engine_takes_a_config_or_a_drafter(more: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Engine(api_engines() / "one", speculative_config={"decoding_type": "Eagle3"}, **more)


def test_engine_refuses_another_method_than_its_drafts() -> None:
    with pytest.raises(OptionError, match="an EAGLE-3 draft\nWrite decoding_type: Eagle3"):
        Engine(api_engines() / "one", speculative_config={"decoding_type": "DFlash"})


# ---- gates


def test_drafting_stops_for_good_once_too_little_is_accepted(
    engines: tuple[Engine, Engine],
) -> None:
    """Toy drafts are seldom right. What runs then goes on without drafts, and so does the rest."""
    config = {"decoding_type": "Eagle3", "max_draft_len": 3}
    gate = {"acceptance_window": 2, "acceptance_length_threshold": 3.0}
    requests = file_of([{}] * 7, batch_size=1)
    plain = answered(engines[1], requests, drafts=False)
    with Engine(api_engines() / "four", speculative_config=config | gate) as opened:
        opened.stop_ids = frozenset()
        run = answered(opened, requests)
        assert opened.drafting_stopped == run.stopped
    drafted = [sum(r.metrics.per_step_drafted) > 0 for r in responses(run)]
    assert drafted == [True, True, False, False, False, False, False]
    assert [r.token_ids for r in responses(run)] == [r.token_ids for r in responses(plain)]
    said = run.said  # type: ignore[attr-defined]
    assert len(said) == 1
    assert said[0].startswith("drafting stopped at answer 2: the last 2 accepted 0.")
    assert run.stats().drafting_stopped == said[0]


def test_lossy_rule_decides_after_drafting_has_stopped_too(engines: tuple[Engine, Engine]) -> None:
    """What it samples from depends on no drafts: the end of drafting changes no answer."""
    made, config = api_engines() / "four", {"decoding_type": "Eagle3", "max_draft_len": 3}
    rule = TypicalAcceptance(0.3, posterior_fast=False)
    requests = file_of([{"seed": n} for n in range(5)], batch_size=1, temperature=1.0)
    plain = answered(engines[1], requests, drafts=False)
    gate = {"acceptance_window": 2, "acceptance_length_threshold": 3.0}
    with (
        Engine(made, speculative_config=config, acceptance=rule) as opened,
        Engine(made, speculative_config=config | gate, acceptance=rule) as gated,
    ):
        opened.stop_ids = gated.stop_ids = frozenset()
        wanted, found = answered(opened, requests), answered(gated, requests)
        assert gated.drafting_stopped
    drafted = [sum(r.metrics.per_step_drafted) > 0 for r in responses(found)]
    assert drafted == [True, True, False, False, False]
    assert [r.token_ids for r in responses(found)] == [r.token_ids for r in responses(wanted)]
    assert [r.metrics.lossless for r in responses(found)] == ["no"] * 5
    ends = zip(responses(found)[2:], responses(plain)[2:], strict=True)
    assert any(one.token_ids != other.token_ids for one, other in ends)


def test_rule_that_takes_chains_gets_a_chain_where_no_sizes_are_given() -> None:
    made = api_engines() / "one"
    block = {"decoding_type": "Suffix", "use_rejection_sampling": True}
    with Engine(made) as opened:
        (response,) = responses(answered(opened, file_of([{"speculative": block}])))
        assert response.metrics.lossless == "tokens"
        wide = file_of([{"speculative": {"decoding_type": "Suffix"}}], temperature=1.0)
        assert responses(answered(opened, wide))[0].metrics.acceptance == "exact"
    with Engine(made, speculative_config=block) as opened:
        assert opened.plan().top_k == 1
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "use_rejection_sampling": True}
    with (
        Engine(made, speculative_config={"decoding_type": "Eagle3", **tree}) as opened,
        pytest.raises(LimitError, match="rejection sampling is for chains"),
    ):
        opened.plan()


def test_schedule_and_concurrency_limit_what_a_step_drafts(engines: tuple[Engine, Engine]) -> None:
    """By how many run: the last of a batch drafts as deep as one alone."""
    requests = file_of([{}] * 4, max_generate_length=12)
    requests_alone = file_of([{}], max_generate_length=12)
    plain = answered(engines[1], requests, drafts=False)
    config = {"decoding_type": "Eagle3", "draft_len_schedule": {1: 3, 3: 1}}
    with Engine(api_engines() / "four", speculative_config=config) as opened:
        opened.stop_ids = frozenset()
        run, alone = answered(opened, requests), answered(opened, requests_alone)
    assert [r.token_ids for r in responses(run)] == [r.token_ids for r in responses(plain)]
    assert max(responses(alone)[0].metrics.per_step_drafted) == 3
    first = [r.metrics.per_step_drafted[0] for r in responses(run)]
    assert first == [0, 0, 0, 0]  # four ran
