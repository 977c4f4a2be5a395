"""Whatever comes through the door is honored or refused, never changed, and never a crash."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import RequestError
from edgespec.prompts import Request, parse_json, parse_prompt_set, parse_requests
from edgespec.prompts.rendering import RENDERING

SAMPLING_DEFAULTS: dict[str, object] = {
    "temperature": 1.0,
    "top_p": 0.8,
    "top_k": 50,
    "seed": None,
    "max_generate_length": 256,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": None,
    "num_logprobs": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "prompt_logprobs": None,
}
FLAG_DEFAULTS = {
    "apply_chat_template": True,
    "add_generation_prompt": True,
    "enable_thinking": False,
    "disable_spec_decode": False,
    "save_system_prompt_kv_cache": True,
}
NEUTRAL_ONLY = ["lora_name", "available_lora_weights", "streaming", "talker_speed"]
SHARED = [
    *SAMPLING_DEFAULTS,
    "apply_chat_template",
    "add_generation_prompt",
    "enable_thinking",
    *NEUTRAL_ONLY,
]

texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", "user", "text", "7", "07", "\ud83d", "\udc00"]
)
numbers = (
    st.integers(-3, 60)
    | st.integers()
    | st.floats()
    | st.sampled_from([0, 1, 0.5, 2**63 - 1, 10**400, -0.0])
)
scalars = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2) | st.just(0),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 100),
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "max_generate_length": st.integers(1, 300),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.floats(-100, 100), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3) | st.text(min_size=1, max_size=5),
    "num_logprobs": st.integers(0, 50),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "min_tokens": st.just(0) | st.just(1),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=3),
    "prompt_logprobs": st.none() | st.integers(0, 50),
    "batch_size": st.integers(1, 16),
    **dict.fromkeys(FLAG_DEFAULTS, st.booleans()),
    **dict.fromkeys(NEUTRAL_ONLY, st.none()),
}
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
contents = st.text(max_size=9) | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}),
    min_size=1,
    max_size=3,
)
conversations = st.lists(
    st.fixed_dictionaries({"role": roles, "content": contents}), min_size=1, max_size=4
)


def fields_of(names: list[str], wild: bool) -> st.SearchStrategy[dict[str, Any]]:
    values = {name: (plausible[name] | anything) if wild else plausible[name] for name in names}
    return st.fixed_dictionaries({}, optional=values)


def files(wild: bool) -> st.SearchStrategy[Any]:
    own = fields_of([*SHARED, "disable_spec_decode", "save_system_prompt_kv_cache"], wild)
    messages = conversations | anything if wild else conversations
    request = st.builds(lambda fields, said: {**fields, "messages": said}, own, messages)
    requests = st.lists(request, min_size=1, max_size=3)
    return st.builds(
        lambda top, said: {**top, "requests": said},
        fields_of([*SHARED, "batch_size"], wild),
        requests,
    )


def as_stop(value: object) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else ()


def as_bias(value: dict[str, float] | None) -> dict[int, float]:
    return {int(key): float(bias) for key, bias in (value or {}).items()}


AS_HELD = {"stop": as_stop, "logit_bias": as_bias, "stop_token_ids": lambda ids: tuple(ids or ())}


def same(held: object, said: object) -> bool:
    """Equal, and of the same kind: 1 is not true, and minus zero is zero."""
    if isinstance(said, bool) or isinstance(held, bool) or said is None:
        return held is said
    return held == said


def assert_told(error: RequestError) -> None:
    """A refusal has a remedy, and a terminal can print it."""
    assert error.remedy
    assert str(error).encode()


def assert_honored(request: Request, own: dict[str, Any], top: dict[str, Any]) -> None:
    said = {**SAMPLING_DEFAULTS, **FLAG_DEFAULTS, **top, **own}
    for key in SAMPLING_DEFAULTS:
        meant = AS_HELD.get(key, lambda value: value)(said[key])
        assert same(getattr(request.sampling, key), meant), key
    for key in FLAG_DEFAULTS:
        field = "keep_system_prompt" if key == "save_system_prompt_kv_cache" else key
        holder = request.rendering if key in RENDERING else request
        assert same(getattr(holder, field), said[key]), key
    for message, raw in zip(request.messages, own["messages"], strict=True):
        content = raw["content"]
        meant = content if isinstance(content, str) else "".join(item["text"] for item in content)
        assert (message.role, message.content) == (raw["role"], meant)
    assert not any(said.get(key) for key in NEUTRAL_ONLY)


def assert_file_honored(raw: dict[str, Any]) -> None:
    found = parse_requests(raw, "input.json")
    assert found.batch_size == raw.get("batch_size", 1)
    for request, own in zip(found.requests, raw["requests"], strict=True):
        assert_honored(request, own, raw)


@settings(max_examples=30, deadline=None)
@given(files(wild=False))
def test_file_within_the_limits_is_honored(raw: dict[str, Any]) -> None:
    assert_file_honored(raw)


@settings(max_examples=50, deadline=None)
@given(files(wild=True))
def test_file_of_known_keys_and_any_values_is_honored_or_refused(raw: dict[str, Any]) -> None:
    try:
        assert_file_honored(raw)
    except RequestError as error:
        assert_told(error)


@settings(max_examples=100, deadline=None)
@given(anything | st.dictionaries(st.sampled_from(["requests", "batch_size"]) | texts, anything))
def test_any_json_is_a_file_or_refused(raw: Any) -> None:
    try:
        parse_requests(raw, "input.json")
    except RequestError as error:
        assert_told(error)


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text('[]{}":,0129.eE-+ \\untrfalsNI\n\ufeffé', max_size=40).map(str.encode)
)
def test_any_bytes_are_json_or_refused(data: bytes) -> None:
    try:
        found = parse_json(data, "input.json")
    except RequestError as error:
        assert_told(error)
        return
    assert found == json.loads(data)
    assert not isinstance(found, float) or not math.isnan(found)


LINE = st.fixed_dictionaries(
    {},
    optional={
        "turns": st.lists(st.text(max_size=9), min_size=1, max_size=4) | anything,
        "prompt": texts,
        "question_id": st.integers() | texts | anything,
        "category": anything,
        "reference": anything,
    },
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(LINE.map(lambda line: json.dumps(line).encode()) | st.binary(max_size=20), max_size=4)
)
def test_any_lines_are_a_prompt_set_or_refused(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    try:
        found = parse_prompt_set(data, "set.jsonl")
    except RequestError as error:
        assert_told(error)
        return
    said = [
        json.loads(line) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()
    ]
    for request, line in zip(found.requests, said, strict=True):
        turns = [line["prompt"]] if "prompt" in line else line["turns"]
        assert [request.messages[0].content, *request.turns] == turns
        assert request.name == (str(line["question_id"]) if "question_id" in line else None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(max_size=9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_prompt_set_within_the_limits_is_honored(sets: list[list[str]]) -> None:
    data = b"\n".join(json.dumps({"turns": turns}, ensure_ascii=False).encode() for turns in sets)
    found = parse_prompt_set(data, "set.jsonl").requests
    assert [[request.messages[0].content, *request.turns] for request in found] == sets
