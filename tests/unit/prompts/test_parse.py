"""What the door for `input.json` lets through, and what it refuses and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec import prompts
from edgespec.errors import RequestError
from edgespec.prompts import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Message,
    RequestFile,
    SamplingParams,
    parse_json,
    parse_requests,
    read_requests,
)
from edgespec.prompts.rendering import Rendering

HELLO = [{"role": "user", "content": "Hello"}]


def parse(top: dict[str, object], *requests: dict[str, object]) -> RequestFile:
    return parse_requests(
        {**top, "requests": list(requests or ({"messages": HELLO},))}, "input.json"
    )


def refusal(top: dict[str, object], *requests: dict[str, object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(top, *requests)
    assert caught.value.what.startswith("input.json")
    assert caught.value.remedy
    return caught.value


def test_smallest_file_gets_the_documented_defaults() -> None:
    found = parse({})
    assert found.batch_size == 1
    (request,) = found.requests
    assert request.messages == (Message("user", "Hello"),)
    assert request.sampling == SamplingParams(
        temperature=1.0, top_p=0.8, top_k=50, seed=None, max_generate_length=256
    )
    assert (request.rendering.apply_chat_template, request.rendering.add_generation_prompt) == (
        True,
        True,
    )
    assert (request.rendering.enable_thinking, request.disable_spec_decode) == (False, False)
    assert (request.keep_system_prompt, request.turns, request.name) == (True, (), None)


def test_request_wins_over_top_level_and_override_wins_over_both() -> None:
    raw = {
        "temperature": 0.5,
        "top_k": 7,
        "requests": [
            {"messages": HELLO, "temperature": 0, "seed": 3},
            {"messages": HELLO, "max_generate_length": 9},
        ],
    }
    first, second = parse_requests(raw, "input.json").requests
    assert (first.sampling.temperature, first.sampling.seed, first.sampling.top_k) == (0.0, 3, 7)
    assert (
        second.sampling.temperature,
        second.sampling.seed,
        second.sampling.max_generate_length,
    ) == (0.5, None, 9)
    overridden = parse_requests(
        raw, "input.json", temperature=0.25, max_generate_length=4, batch_size=2
    )
    assert [r.sampling.temperature for r in overridden.requests] == [0.25, 0.25]
    assert [r.sampling.max_generate_length for r in overridden.requests] == [4, 4]
    assert overridden.batch_size == 2
    assert [r.index for r in overridden.requests] == [0, 1]


OVERRIDES = {
    "temperature": 0.3,
    "top_p": 0.4,
    "top_k": 5,
    "min_p": 0.2,
    "seed": 7,
    "repetition_penalty": 1.2,
    "max_generate_length": 9,
    "num_logprobs": 2,
}


@pytest.mark.parametrize(("key", "value"), OVERRIDES.items())
def test_each_override_wins_everywhere_and_touches_nothing_else(key: str, value: float) -> None:
    raw = {"top_k": 11, "requests": [{"messages": HELLO, key: 1}, {"messages": HELLO, "stop": "x"}]}
    plain = parse_requests(raw, "input.json").requests
    for before, after in zip(
        plain, parse_requests(raw, "input.json", **{key: value}).requests, strict=True
    ):  # type: ignore[arg-type]
        assert getattr(after.sampling, key) == value
        others = [name for name in SamplingParams.__slots__ if name != key]
        assert [getattr(after.sampling, name) for name in others] == [
            getattr(before.sampling, name) for name in others
        ]


def test_override_is_checked_like_the_file() -> None:
    raw = {"requests": [{"messages": HELLO}]}
    with pytest.raises(RequestError, match=r"command line: top_p is 2\.0"):
        parse_requests(raw, "input.json", top_p=2.0)
    with pytest.raises(RequestError, match="command line: batch_size is 17"):
        parse_requests(raw, "input.json", batch_size=17)
    with pytest.raises(TypeError, match="tempratur is not an override"):
        parse_requests(raw, "input.json", tempratur=1)  # type: ignore[call-arg]


def test_override_of_none_leaves_the_file() -> None:
    raw = {"batch_size": 3, "seed": 5, "requests": [{"messages": HELLO}]}
    found = parse_requests(raw, "input.json", batch_size=None, seed=None)
    assert (found.batch_size, found.requests[0].sampling.seed) == (3, 5)


def test_text_items_are_joined() -> None:
    content = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo 😀"}]
    (request,) = parse({}, {"messages": [{"role": "user", "content": content}]}).requests
    assert request.messages[0].content == "Hello 😀"


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("video", "Send some frames of the video as image items."),
        ("video_url", "Send some frames of the video as image items."),
        ("audio", "Send what was said as a text item."),
        ("input_audio", "Send what was said as a text item."),
    ],
)
def test_video_and_audio_are_refused_by_name_and_place(kind: str, remedy: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": kind, kind: "x.mp4"}]
    error = refusal({}, {"messages": HELLO}, {"messages": [{"role": "user", "content": content}]})
    assert f"requests[1].messages[0].content[1] is of type {kind}" in error.what
    assert error.remedy == remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 17),
        ("batch_size", True),
        ("batch_size", 1.0),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", False),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("max_generate_length", 0),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("seed", True),
        ("apply_chat_template", 1),
        ("add_generation_prompt", "true"),
        ("enable_thinking", None),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101),
        ("repetition_penalty", None),
        ("num_logprobs", 51),
        ("num_logprobs", -1),
        ("num_logprobs", False),
        ("logit_bias", [1]),
        ("stop", 3),
        ("stop", ""),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_tokens", 257),
        ("stop_token_ids", 2),
        ("prompt_logprobs", 51),
    ],
)
def test_value_out_of_its_range_is_refused_with_its_name(key: str, value: object) -> None:
    assert f"input.json: {key} is " in refusal({key: value}).what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0),
        ("top_p", 1),
        ("top_k", 0),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("seed", None),
        ("batch_size", 16),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 100),
        ("repetition_penalty", 0.01),
        ("num_logprobs", 50),
    ],
)
def test_value_at_the_edge_of_its_range_is_accepted(key: str, value: object) -> None:
    found = parse({key: value})
    held = found.batch_size if key == "batch_size" else getattr(found.requests[0].sampling, key)
    assert held == value


def test_per_request_value_is_refused_at_its_place() -> None:
    error = refusal({}, {"messages": HELLO}, {"messages": HELLO, "top_p": 3})
    assert "requests[1].top_p is 3" in error.what


UNSUPPORTED: list[tuple[str, object, object]] = [
    ("lora_name", "", "a"),
    ("lora_name", None, 3),
    ("available_lora_weights", {}, {"a": "b"}),
    ("streaming", {}, {"x": 1}),
    ("streaming", False, 0),
    ("talker_temperature", None, 0.9),
]


@pytest.mark.parametrize(("key", "neutral", "asking"), UNSUPPORTED)
def test_key_that_cannot_be_honored_is_refused_only_when_it_asks(
    key: str, neutral: object, asking: object
) -> None:
    assert parse({key: neutral}, {"messages": HELLO, key: neutral}).requests
    for error in (refusal({key: asking}), refusal({}, {"messages": HELLO, key: asking})):
        assert key in error.what
        assert "this version does not support: " in error.what


def test_every_sampling_key_may_stand_in_a_request_and_replaces_the_top_level() -> None:
    top: dict[str, object] = {
        "min_p": 0.1,
        "repetition_penalty": 2,
        "num_logprobs": 3,
        "stop": "a",
        "logit_bias": {"1": 1, "2": 2},
        "enable_thinking": True,
        "apply_chat_template": False,
        "add_generation_prompt": False,
    }
    own: dict[str, object] = {
        "min_p": 0,
        "repetition_penalty": 1,
        "num_logprobs": 0,
        "stop": ["b", "c"],
        "logit_bias": {"3": -1.5},
        "enable_thinking": False,
        "apply_chat_template": True,
        "add_generation_prompt": True,
        "disable_spec_decode": True,
        "save_system_prompt_kv_cache": False,
    }
    first, second, third = parse(
        top,
        {"messages": HELLO},
        {"messages": HELLO, **own},
        {"messages": HELLO, "stop": None, "logit_bias": {}},
    ).requests
    assert first.sampling == SamplingParams(
        min_p=0.1, repetition_penalty=2.0, num_logprobs=3, stop=("a",), logit_bias={1: 1.0, 2: 2.0}
    )
    assert first.rendering == Rendering(False, False, True)
    assert (first.disable_spec_decode, first.keep_system_prompt) == (False, True)
    assert second.sampling == SamplingParams(stop=("b", "c"), logit_bias={3: -1.5})
    assert second.rendering == Rendering(True, True, False)
    assert (second.disable_spec_decode, second.keep_system_prompt) == (True, False)
    assert (third.sampling.stop, third.sampling.logit_bias, third.sampling.min_p) == ((), {}, 0.1)


def test_saving_the_system_prompt_asked_for_is_granted() -> None:
    assert (
        parse({}, {"messages": HELLO, "save_system_prompt_kv_cache": True})
        .requests[0]
        .keep_system_prompt
        is True
    )


def test_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    assert 'Did you mean "temperature"?' in refusal({"temprature": 1}).remedy
    assert 'Did you mean "messages"?' in refusal({}, {"message": HELLO}).remedy
    error = refusal({}, {"messages": [{"role": "user", "contents": "x"}]})
    assert "requests[0].messages[0].contents is not a known key" in error.what
    assert 'Did you mean "content"?' in error.remedy
    assert "the known keys are" in refusal({"zzzzzz": 1}).remedy
    assert 'Did you mean "max_generate_length"?' in refusal({"max_tokens": 1}).remedy
    with pytest.raises(RequestError, match="3 is not a known key"):
        parse_requests({3: 1, "requests": []}, "input.json")


def test_known_key_in_the_wrong_place_is_told_where_it_belongs() -> None:
    assert "top level" in refusal({}, {"messages": HELLO, "batch_size": 1}).remedy
    for key in ("messages", "disable_spec_decode", "save_system_prompt_kv_cache"):
        assert "in each of the requests" in refusal({key: True}).remedy


@pytest.mark.parametrize(
    "raw", [None, [], "x", 3, {}, {"requests": []}, {"requests": {}}, {"requests": [3]}]
)
def test_wrong_shape_is_refused(raw: object) -> None:
    with pytest.raises(RequestError, match=r"^input\.json"):
        parse_requests(raw, "input.json")


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (None, "requests[0].messages is missing"),
        ([], "requests[0].messages is empty"),
        (HELLO * 4097, "requests[0].messages has 4097 messages"),
        (["x"], "requests[0].messages[0] is"),
        ([{"role": "user"}], "requests[0].messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "requests[0].messages[0].content is 3"),
        (
            [{"role": "user", "content": "é" * (MAX_MESSAGE_BYTES // 2 + 1)}],
            "content has 1048578 bytes",
        ),
        ([{"role": "user", "content": "a\ud83d"}], "content has an unpaired surrogate"),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "content[0].text is null",
        ),
        ([{"role": "user", "content": [{"type": "txt", "text": "x"}]}], 'content[0].type is "txt"'),
    ],
)
def test_bad_messages_are_refused_at_their_place(messages: object, place: str) -> None:
    request: dict[str, object] = {} if messages is None else {"messages": messages}
    assert place in refusal({}, request).what


def test_largest_allowed_messages_pass() -> None:
    largest = [{"role": "user", "content": "é" * (MAX_MESSAGE_BYTES // 2)}]
    requests = parse({}, {"messages": largest}, {"messages": HELLO * 4096}).requests
    assert requests[1].messages[4095].content == "Hello"


def test_text_of_a_request_is_limited_in_all() -> None:
    full = [{"role": "user", "content": "x" * MAX_MESSAGE_BYTES}] * (
        MAX_REQUEST_BYTES // MAX_MESSAGE_BYTES
    )
    assert len(parse({}, {"messages": full}, {"messages": full}).requests) == 2
    error = refusal(
        {}, {"messages": HELLO}, {"messages": [*full, {"role": "user", "content": "é"}]}
    )
    assert (
        "requests[1].messages has 4194306 bytes of text in all, and 4194304 is the limit"
        in error.what
    )


def test_long_table_of_biases_is_checked_once_however_many_requests() -> None:
    requests: list[dict[str, object]] = [{"messages": HELLO, "temperature": 0.5}] * 2000
    found = parse({"logit_bias": {str(i): 1 for i in range(1024)}}, *requests).requests
    assert len(found[0].sampling.logit_bias) == 1024
    assert len({id(request.sampling.logit_bias) for request in found}) == 1


def test_requests_that_say_nothing_of_sampling_share_the_file_s() -> None:
    requests: list[dict[str, object]] = [{"messages": HELLO}] * 100
    found = parse({"top_k": 3}, *requests).requests
    assert len({id(request.sampling) for request in found}) == 1


def test_misspelt_role_is_refused_because_templates_would_drop_it() -> None:
    assert (
        'Did you mean "user"?'
        in refusal({}, {"messages": [{"role": "usr", "content": "x"}]}).remedy
    )
    assert "role is null" in refusal({}, {"messages": [{"content": "x"}]}).what


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"requests": [\n  {"a" 1}]}', "line 2, column 8"),
        (b"", "line 1, column 1"),
        (b'{\n "a": "\xc3\xa9\xff"}', "byte 0xff at line 2, column 9"),
        (b'{"a": 1, "a": 2}', 'the key "a" occurs twice'),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number that is too long"),
    ],
)
def test_malformed_json_is_refused_with_its_place(data: bytes, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(data, "input.json")
    assert said in caught.value.what
    assert caught.value.remedy


def test_every_depth_up_to_the_limit_ends_in_a_refusal() -> None:
    for depth in range(850, 1000, 3):
        data = b'{"requests": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(RequestError):
            parse_requests(parse_json(data, "input.json"), "input.json")


def test_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"requests": [{"messages": HELLO}]}).encode())
    found = read_requests(path, seed=5)
    assert found.path == path
    assert found.requests[0].sampling.seed == 5


def test_unreadable_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_requests(tmp_path / "absent.json")
    with pytest.raises(RequestError, match="cannot be read"):
        read_requests(tmp_path)
    with pytest.raises(RequestError, match="null byte"):
        read_requests("a\0b")
    monkeypatch.setattr("edgespec.prompts.source.MAX_FILE_BYTES", 10)
    (tmp_path / "large.json").write_bytes(b" " * 11)
    with pytest.raises(RequestError, match="larger than 10 bytes"):
        read_requests(tmp_path / "large.json")


def test_package_exports_what_it_says() -> None:
    assert all(hasattr(prompts, name) for name in prompts.__all__)
