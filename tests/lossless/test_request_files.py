"""Any request file: what it asks for is honoured or refused by name, never silently changed, and
never a crash.

Random files go through the door as JSON text and are answered in batches, with drafts or without.
Each answer is then judged by itself: by the same request alone, plain, on an engine for one
sequence, and by what its ids, text and candidates must be according to what was asked.

EDGESPEC_REQUEST_FILES=2000 tries so many files, other ones each time; `pytest -s` prints the tally.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.contract import tree_pool_size
from edgespec.errors import RequestError
from edgespec.prompts import CAPACITY as FULL
from edgespec.prompts import (
    END_OF_SEQUENCE,
    MAX_LENGTH,
    STOP_WORDS,
    Message,
    Request,
    RequestFile,
    SamplingParams,
    parse_json,
    parse_requests,
)
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.requests.answers import Answer, FileAnswers, to_dict
from edgespec.runtime.requests.lossless_check import first_difference
from edgespec.runtime.sampling.sampler import log_softmax
from edgespec.runtime.trees.tree import DraftPlan
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engines import Engines, make_engines, opened
from tests.lossless.pairs import LIMITS
from tests.toys import CHAT_TEMPLATE

NUM_FILES = int(os.environ.get("EDGESPEC_REQUEST_FILES", "0"))
USUAL_FILES = 50
VOCAB = 320  # all bytes are in it, so that characters come in pieces
EOS = [2, 0, *range(40, 52)]  # so many that answers end by themselves
WIDER = replace(LIMITS, max_input_len=80, max_kv_cache_capacity=96)  # room for a few turns
INPUT, CAPACITY = WIDER.max_input_len, WIDER.max_kv_cache_capacity
PIECES = "\ufffd"

# Thinking can be seen in the prompt, and one role is refused.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tool"
    " here') }}{% endif %}{% endfor %}"
    + CHAT_TEMPLATE
    + "{% if enable_thinking %}<think>{% endif %}"
)


# ---- files

SYSTEMS = ["You count.", "Be brief"]
STOPS = ["e", "th", "<|im_end|>", "<|endoftext|>", "\n\n", "é", "never said by anyone"]
SPOILT_STOPS = ["x<|im_end|>"]
POISON: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", "warm"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -1),
    ("top_k", 2.5),
    ("min_p", 1.01),
    ("seed", -(2**63) - 1),
    ("seed", 2**64),
    ("repetition_penalty", 0),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("num_logprobs", 51),
    ("max_generate_length", 0),
    ("apply_chat_template", 1),
    ("lora_name", "mine"),
    ("streaming", True),
    ("talker_speed", 1),
    ("temprature", 1),
    ("max_tokens", 3),
    ("batch_size", 17),
    ("batch_size", 0),
]


@dataclass(frozen=True)
class Emitted:
    """A stop string yet to be cut out of what the model says to the request without stops."""

    start: int
    length: int


def mostly(usual: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 7 + [seldom]).flatmap(lambda strategy: strategy)


def some_of(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A few keys with their values: were each of all as likely as not, all would be set to
    something odd."""
    names = st.sampled_from([*keys, *["stop", "num_logprobs", "logit_bias"] * 2])
    chosen = st.integers(0, 4).flatmap(lambda n: st.lists(names, min_size=n, max_size=n))
    return chosen.flatmap(lambda found: st.fixed_dictionaries({name: keys[name] for name in found}))


biases = (
    st.sampled_from([-100, 100, 100.0])
    | st.floats(-100, 100).map(lambda x: round(x, 3))
    | st.floats(-2, 2)
)
token_ids = st.integers(0, VOCAB - 1) | st.sampled_from(EOS)
sampling_keys: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from(
        [0, 0.0, 0.0, 5e-324, 1e-9, 0.01, 0.3, 0.7, 1, 1.0, 1.0, 2.0, 50.0, 1e308]
    ),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 50, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1]),
    "top_p": st.sampled_from([5e-324, 0.1, 0.5, 0.8, 0.95, 1, 1.0]),
    "min_p": st.sampled_from([0, 5e-324, 0.01, 0.2, 1.0]),
    "seed": st.none() | st.integers(0, 2**63 - 1) | st.integers(0, 9),
    "repetition_penalty": st.sampled_from([0.01, 0.5, 0.9, 1, 1.1, 1.5, 2.0, 100]),
    "logit_bias": mostly(
        st.dictionaries(token_ids.map(str), biases, max_size=4),
        st.sampled_from([None, {"5000": 1}]),
    ),
    "stop": mostly(
        st.lists(
            st.sampled_from(STOPS) | st.builds(Emitted, st.integers(0, 6), st.integers(1, 4)),
            max_size=3,
        ),
        st.sampled_from([None, "e", *SPOILT_STOPS]),
    ),
    "num_logprobs": st.sampled_from([0, 1, 2, 5, 50]),
    "max_generate_length": st.integers(1, 24) | st.just(99) | st.just(2**31 - 1),
}
flags: dict[str, st.SearchStrategy[Any]] = {
    "apply_chat_template": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "enable_thinking": st.booleans(),
    "lora_name": st.just(""),
    "streaming": st.just(False),
}
own_flags: dict[str, st.SearchStrategy[Any]] = {
    "disable_spec_decode": st.booleans(),
    "save_system_prompt_kv_cache": st.booleans(),
}
contents = st.sampled_from(["", "a", "one two", "é", "\U0001f600 and", "the boat"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=6
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "user", "assistant", "tool"])

messages_of = st.builds(
    lambda system, history, last: [
        *({"role": "system", "content": content} for content in system),
        *history,
        {"role": "user", "content": last},
    ],
    st.sampled_from([[], *[[text] for text in SYSTEMS]]),
    st.just([])
    | st.just([])
    | st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), max_size=1),
    mostly(
        contents
        | contents.map(
            lambda text: [{"type": "text", "text": text}, {"type": "text", "text": "!"}]
        ),
        st.just("boat " * 50),
    ),
)
requests_of = st.builds(
    lambda messages, own: {"messages": messages, **own},
    messages_of,
    some_of(sampling_keys | flags | own_flags),
)
documents = st.builds(
    # Short answers and one seed unless somebody asks: the default of 256 tokens is the engine's
    # capacity here.
    lambda size, length, seed, others, requests: {
        "batch_size": size,
        "max_generate_length": length,
        **seed,
        **others,
        "requests": requests,
    },
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([{"seed": 7}, {"seed": 7}, {}]),
    some_of(sampling_keys | flags),
    st.integers(1, 6).flatmap(lambda n: st.lists(requests_of, min_size=n, max_size=n)),
)
plans = st.sampled_from([True, True, True, False]).flatmap(
    lambda drafts: (
        st.builds(
            lambda top_k, steps, size: DraftPlan(
                top_k, steps, min(size, tree_pool_size(top_k, steps))
            ),
            st.sampled_from([1, 1, 2, 3, 5]),
            st.integers(1, 5),
            st.sampled_from([2, 4, 9, 16, 25, 1]),
        )
        if drafts
        else st.none()
    )
)
drafters = st.sampled_from([1.0, 0.6, "eagle"])
turns_of = st.tuples(*[st.sampled_from([(), (), ("on",), ("", "and é?"), ("on", "")])] * 6)
poisons = st.sampled_from([False, True, False, False])


@dataclass
class Tally:
    """What was tried and what came of it."""

    files: int = 0
    refused_files: int = 0
    requests: int = 0
    near_ties: int = 0
    accepted: int = 0
    reused: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    path = tmp_path_factory.mktemp("request_files")
    with opened(
        make_engines(path, vocab=VOCAB, eos=EOS, chat_template=TEMPLATE, limits=WIDER)
    ) as pair:
        yield pair


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"\n{tally}")  # noqa: T201


@settings(
    max_examples=NUM_FILES or USUAL_FILES,
    derandomize=not NUM_FILES,
    database=None,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
@given(
    document=documents,
    plan=plans,
    drafter=drafters,
    turns=turns_of,
    poison=poisons,
    data=st.data(),
    budget=st.sampled_from([0, 20_000, 2**24]),
    ascii_only=st.booleans(),
)
def test_each_request_of_any_file_gets_what_it_asked_for(
    engines: Engines,
    tally: Tally,
    document: dict[str, Any],
    plan: DraftPlan | None,
    drafter: str | float,
    turns: tuple[tuple[str, ...], ...],
    poison: bool,
    data: st.DataObject,
    budget: int,
    ascii_only: bool,
) -> None:
    tally.files += 1
    resolve_stops(engines.one, document)
    if poison:
        assert_refused_by_name(
            document, *data.draw(st.sampled_from(POISON)), data.draw(st.booleans())
        )
        tally.refused_files += 1
        return
    file = parsed(document, ascii_only)
    requests = [
        replace(request, turns=said) if said else request
        for request, said in zip(file.requests, turns, strict=False)
    ]
    judge = Judge(engines.one, plan, tally)
    scripted = isinstance(drafter, float)
    with_drafter(engines.four, scripts_for(judge, requests) if scripted else None, drafter, budget)
    answers = list(FileAnswers(engines.four, plan, file.batch_size).run(requests))
    tally.requests += len(requests)
    assert sorted(a.key for a in answers) == [
        (r.index, t) for r in requests for t in range(len(r.turns) + 1)
    ]
    for request in requests:
        judge.conversation(
            request, sorted((a for a in answers if a.request is request), key=lambda a: a.turn)
        )


def test_files_tried_were_of_all_kinds(tally: Tally) -> None:
    """Otherwise the claim above would be about nothing."""
    if tally.files < USUAL_FILES:
        pytest.skip("a look at all kinds needs all files")
    # A full cache is too rare here; it has tests of its own (unit/runtime/test_session.py)
    assert {END_OF_SEQUENCE, MAX_LENGTH, STOP_WORDS, "error"} <= set(tally.reasons)
    assert tally.refused_files > 0
    assert tally.accepted > 15
    assert tally.reused > 0
    assert {
        "stop text",
        "bias",
        "logprobs",
        "later turn",
        "disabled",
        "seed drawn",
    } <= set(tally.seen)
    assert tally.near_ties == 0 or NUM_FILES


def test_end_that_might_have_become_a_stop_string_stands_once(engines: Engines) -> None:
    said = engines.one.plainly([70], SamplingParams(temperature=0, max_generate_length=6)).text
    assert said
    for stop in (f"{said[-1]}...", f"{said[-2:]}..."):
        sampling = SamplingParams(temperature=0, max_generate_length=6, stop=(stop,))
        assert engines.one.plainly([70], sampling).text == said


def test_bias_forbids_what_would_be_said_and_demands_what_would_not(engines: Engines) -> None:
    with_drafter(engines.four, None, "eagle", 0)
    asked = {
        "messages": [{"role": "user", "content": "the boat"}],
        "temperature": 0,
        "max_generate_length": 6,
    }
    said = engines.one.plainly(
        engines.one.encode([Message("user", "the boat")]),
        SamplingParams(temperature=0, max_generate_length=6),
    ).token_ids
    other = next(token for token in range(60, VOCAB) if token not in said)
    biases = [dict.fromkeys(said, -100), {other: 100}]
    file = parsed({"batch_size": 2, "requests": [asked | {"logit_bias": bias} for bias in biases]})
    plan = DraftPlan(2, 2, 5)
    answers = sorted(
        FileAnswers(engines.four, plan, 2).run(file.requests), key=lambda answer: answer.key
    )
    judge = Judge(engines.one, plan, Tally())
    for request, answer in zip(file.requests, answers, strict=True):
        judge.conversation(request, [answer])
    forbidden, demanded = (answer.response.token_ids for answer in answers if answer.response)
    assert not set(forbidden) & set(said)
    assert demanded == [other] * 6


def parsed(document: dict[str, Any], ascii_only: bool = True) -> RequestFile:
    text = json.dumps(document, ensure_ascii=ascii_only)
    return parse_requests(parse_json(text.encode(), "input.json"), "input.json")


def assert_refused_by_name(
    document: dict[str, Any], key: str, value: object, in_request: bool
) -> None:
    place = document["requests"][-1] if in_request else document
    place[key] = value
    with pytest.raises(RequestError) as caught:
        parsed(document)
    assert caught.value.what.startswith("input.json: ")
    assert key in caught.value.what
    assert caught.value.remedy


def resolve_stops(one: Engine, document: dict[str, Any]) -> None:
    """Cut the stop strings that were to be emitted out of what each request's answer says without
    any."""
    bare = {key: value for key, value in document.items() if key != "stop"}
    bare["requests"] = [
        {k: v for k, v in request.items() if k != "stop"} for request in document["requests"]
    ]
    texts = [text_without_stops(one, request) for request in parsed(bare).requests]
    for place, text in [(document, texts[0]), *zip(document["requests"], texts, strict=True)]:
        if isinstance(place.get("stop"), list):
            cut = [
                text[s.start : s.start + s.length] if isinstance(s, Emitted) else s
                for s in place["stop"]
            ]
            place["stop"] = [stop for stop in cut if stop]


def text_without_stops(one: Engine, request: Request) -> str:
    ids = Judge.encoded(one, request, request.messages)
    if not isinstance(ids, list) or refusals(one, request, ids):
        return ""
    sampling = replace(request.sampling, seed=request.sampling.seed or 0, max_generate_length=12)
    return one.plainly(ids, sampling).text


def with_drafter(engine: Engine, scripts: Any, right: str | float, budget: int) -> None:
    """The engine's own drafter, or one that knows what is to come; and a budget for prefixes."""
    engine.session.drafter = (
        engine.drafter if scripts is None else ScriptedDrafter(scripts, VOCAB, float(right))
    )
    engine.session.prefixes = PrefixCache(budget)


def scripts_for(judge: Judge, requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    """Prompts of first turns with what plain decoding says; later turns and drawn seeds find no
    script."""
    found = []
    for request in requests:
        ids = judge.encoded(judge.one, request, request.messages)
        if isinstance(ids, list) and not refusals(judge.one, request, ids):
            found.append((ids, judge.plainly(ids, request.sampling, None).token_ids))
    return found


# ---- the judge


def refusals(one: Engine, request: Request, ids: Sequence[int]) -> list[str]:
    """What an engine may say against a request, if it may: words that the error must have, of any
    one of them."""
    words = [stop for stop in request.sampling.stop if stop in SPOILT_STOPS] and ["special token"]
    words += [f"token id {token}" for token in request.sampling.logit_bias if token >= VOCAB]
    words += ["the prompt is empty"] * (not ids)
    return words + [f"the prompt has {len(ids)} tokens"] * (len(ids) > INPUT)


@dataclass
class Judge:
    """Judges answers by an engine for one sequence, without drafts, one request at a time."""

    one: Engine
    plan: DraftPlan | None
    tally: Tally

    @staticmethod
    def encoded(one: Engine, request: Request, messages: Sequence[Message]) -> list[int] | str:
        """The ids of a prompt, or the words of its refusal."""
        if not request.rendering.apply_chat_template:
            if request.rendering.enable_thinking or not request.rendering.add_generation_prompt:
                return "is a matter of the chat template"
            return one.tokenizer.encode(
                "".join(m.content for m in messages), add_special_tokens=True
            )
        if any(m.role == "tool" for m in messages):
            return "no tool here"
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        text += (
            "<|im_start|>assistant\n" * request.rendering.add_generation_prompt
            + "<think>" * request.rendering.enable_thinking
        )
        return one.tokenizer.encode(text)

    def plainly(self, ids: Sequence[int], sampling: SamplingParams, seed: int | None) -> Response:
        return self.one.plainly(
            ids, replace(sampling, seed=sampling.seed or 0 if seed is None else seed)
        )

    def conversation(self, request: Request, answers: Sequence[Answer]) -> None:
        messages = request.messages
        for turn, answer in enumerate(answers):
            if turn and answers[turn - 1].error is not None:
                assert answer.error is not None
                assert (
                    f"turn {turn - 1} of request" in answers[turn].error.what
                    or "failed" in answer.error.what
                )
                self.tally.reasons["error"] += 1
                continue
            assert answer.messages == messages
            self.turn(request, messages, answer)
            if answer.response is not None and turn < len(request.turns):
                messages = (
                    *messages,
                    Message("assistant", answer.response.text),
                    Message("user", request.turns[turn]),
                )
                self.tally.seen["later turn"] += 1

    def turn(self, request: Request, messages: Sequence[Message], answer: Answer) -> None:
        assert not answer.cancelled
        ids = self.encoded(self.one, request, messages)
        refused = [ids] if isinstance(ids, str) else refusals(self.one, request, ids)
        if refused:
            assert answer.error is not None, refused
            assert any(words in answer.error.what for words in refused), answer.error
            assert answer.response is None
            self.tally.reasons["error"] += 1
            self.written(answer, None)
            return
        assert answer.error is None, answer.error
        assert answer.response is not None
        assert answer.response.prompt_ids == ids
        self.response(request, answer.response)
        self.written(answer, answer.response)

    def response(self, request: Request, found: Response) -> None:
        sampling = request.sampling
        self.tally.reasons[found.finish_reason] += 1
        self.seed(sampling, found)
        alone = self.plainly(found.prompt_ids, sampling, found.seed)
        difference = first_difference(self.one, alone, found, sampling)
        if difference is not None:
            assert difference.explained, (difference, request)
            self.tally.near_ties += 1
        else:
            assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
        self.reason(sampling, found)
        self.biased(sampling, found)
        self.logprobs(sampling, found)
        self.metrics(request, found)

    def seed(self, sampling: SamplingParams, found: Response) -> None:
        if sampling.temperature == 0:
            assert found.seed is None
        elif sampling.seed is None:
            assert found.seed is not None
            assert 0 <= found.seed < 2**63
            self.tally.seen["seed drawn"] += 1
        else:
            assert found.seed == sampling.seed

    def reason(self, sampling: SamplingParams, found: Response) -> None:
        """Text and finish reason again, from the ids and the definition."""
        tokenizer, ids = self.one.tokenizer, found.token_ids
        words = [stop for stop in sampling.stop if stop not in ("<|im_end|>", "<|endoftext|>")]
        stop_ids = {tokenizer.token_id(stop) for stop in sampling.stop} & {0, 2}
        room = CAPACITY + 1 - len(found.prompt_ids)
        assert 1 <= len(ids) <= min(sampling.max_generate_length, room)
        for count in range(1, len(ids)):  # nothing before the last token was a reason to stop
            assert ids[count - 1] not in (*EOS, *stop_ids)
            text = tokenizer.decode(ids[:count])
            assert text.endswith(PIECES) or not any(word in text for word in words)
        text = tokenizer.decode(ids[:-1] if ids[-1] in EOS else ids)  # an end is no text
        starts = [text.index(word) for word in words if word in text]
        assert found.text == text[: min(starts, default=None)]
        assert not any(word in found.text for word in words)
        if starts:
            self.tally.seen["stop text"] += 1
            assert found.finish_reason == STOP_WORDS
        elif ids[-1] in EOS:
            assert found.finish_reason == END_OF_SEQUENCE
        elif ids[-1] in stop_ids:
            assert found.finish_reason == STOP_WORDS
        else:
            is_long = len(ids) == sampling.max_generate_length
            assert found.finish_reason == (MAX_LENGTH if is_long else FULL)
            assert len(ids) == min(sampling.max_generate_length, room)

    def biased(self, sampling: SamplingParams, found: Response) -> None:
        """What -100 forbids never comes, and what +100 alone demands always does, where nothing
        outweighs them."""
        if (
            not 0.5 <= sampling.repetition_penalty <= 2
            or sampling.temperature > 2
            or not sampling.logit_bias
        ):
            return
        self.tally.seen["bias"] += 1
        if sampling.temperature == 0 and sampling.repetition_penalty == 1:
            logits = self.one.next_logits([*found.prompt_ids, *found.token_ids[:-1]]).astype(
                np.float64
            )
            for token, bias in sampling.logit_bias.items():
                logits[token] += bias
            assert logits[found.token_ids[-1]] >= logits.max() - 1e-3
        forbidden = {token for token, bias in sampling.logit_bias.items() if bias == -100}
        assert not forbidden & set(found.token_ids)
        wanted = [token for token, bias in sampling.logit_bias.items() if bias == 100]
        if len(wanted) == 1 and all(
            bias <= 0 or bias == 100 for bias in sampling.logit_bias.values()
        ):
            assert set(found.token_ids) == set(wanted)

    def logprobs(self, sampling: SamplingParams, found: Response) -> None:
        count = min(sampling.num_logprobs, VOCAB)
        assert len(found.logprobs) == (len(found.token_ids) if count else 0)
        for token, candidates in zip(found.token_ids, found.logprobs, strict=False):
            ids, values = [i for i, _ in candidates], [p for _, p in candidates]
            assert token in ids[:count] or ids[count:] == [token]
            assert len(ids) == len(set(ids)) == count + (token not in ids[:count])
            assert values[:count] == sorted(values[:count], reverse=True)
            assert np.exp(values).sum() <= 1 + 1e-9
        if count:
            self.tally.seen["logprobs"] += 1
            self.compare_logprobs(found, len(found.token_ids) // 2)

    def compare_logprobs(self, found: Response, index: int) -> None:
        """The candidates of one token again, from the logits of one pass over all that came
        before."""
        wanted = log_softmax(
            self.one.next_logits([*found.prompt_ids, *found.token_ids[:index]]).astype(np.float64)
        )
        candidates = found.logprobs[index]
        assert [p for _, p in candidates] == pytest.approx(
            [wanted[i] for i, _ in candidates], abs=1e-3
        )
        count = len(candidates) - (candidates[-1][1] < candidates[0][1] and len(candidates) > 1)
        best = np.sort(wanted)[::-1][:count]
        assert [p for _, p in candidates[:count]] == pytest.approx(best.tolist(), abs=1e-3)

    def metrics(self, request: Request, found: Response) -> None:
        metrics = found.metrics
        assert (
            metrics.prompt_tokens
            == len(found.prompt_ids)
            == metrics.reused_tokens + metrics.computed_tokens
        )
        assert 0 <= metrics.reused_tokens < len(found.prompt_ids)
        assert metrics.completion_tokens == len(found.token_ids)
        accepted, drafted = metrics.per_step_accepted, metrics.per_step_drafted
        assert len(accepted) == len(drafted) == metrics.steps
        assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
        whole = 1 + sum(accepted) + metrics.steps
        assert len(found.token_ids) in (
            whole,
            whole - 1,
        )  # a stop inside an accepted run takes its bonus away
        if self.plan is None or request.disable_spec_decode:
            assert sum(drafted) == 0
        self.tally.accepted += sum(accepted)
        self.tally.reused += metrics.reused_tokens

    def written(self, answer: Answer, found: Response | None) -> None:
        """The entry of output.json: valid, and it says the same."""
        entry = json.loads(json.dumps(to_dict(answer, self.one.tokenizer), allow_nan=False))
        assert entry["request_idx"] == answer.request.index
        assert entry.get("turn_idx", 0) == answer.turn
        if found is None:
            assert (entry["output_text"], entry["finish_reason"]) == ("", "error")
            assert entry["error"]
            return
        assert (entry["output_text"], entry["output_ids"]) == (found.text, found.token_ids)
        drafts = self.plan is not None and not answer.request.disable_spec_decode
        self.tally.seen["disabled"] += self.plan is not None and not drafts
        assert ("speculative_decoding" in entry["metrics"]) == drafts
        assert ("logprobs" in entry) == (answer.request.sampling.num_logprobs > 0)
        self.spelt(entry)

    def spelt(self, entry: dict[str, Any]) -> None:
        """Candidates' bytes: those of the tokens taken make the text, piece by piece."""
        taken = b""
        for token, candidates in zip(entry["output_ids"], entry.get("logprobs", ()), strict=False):
            for candidate in candidates:
                assert bytes(candidate["bytes"]).decode("utf-8", "replace") == candidate["token"]
            chosen = next(c for c in candidates if c["token_id"] == token)
            taken += b"" if self.one.tokenizer.is_special(token) else bytes(chosen["bytes"])
        if "logprobs" in entry:
            assert taken.decode("utf-8", "replace") == self.one.tokenizer.decode(
                entry["output_ids"]
            )
