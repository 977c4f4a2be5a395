"""What the door for `input.json` lets through, what it refuses and how, and that `output.json` is written whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import OutputError, RequestError
from edgespec.prompts import (
    END_OF_SEQUENCE,
    MAX_MESSAGE_BYTES,
    Message,
    RequestFile,
    SamplingParams,
    check_writable,
    parse_json,
    parse_requests,
    read_requests,
    write_output,
)

HELLO = [{"role": "user", "content": "Hello"}]


def parse(top: dict[str, object], *requests: dict[str, object]) -> RequestFile:
    return parse_requests({**top, "requests": list(requests or ({"messages": HELLO},))}, "input.json")


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
    assert request.sampling == SamplingParams(temperature=1.0, top_p=0.8, top_k=50, seed=None, max_generate_length=256)
    assert (request.apply_chat_template, request.add_generation_prompt) == (True, True)
    assert (request.enable_thinking, request.disable_spec_decode) == (False, False)


def test_request_wins_over_top_level_and_override_wins_over_both() -> None:
    raw = {
        "temperature": 0.5,
        "top_k": 7,
        "requests": [{"messages": HELLO, "temperature": 0, "seed": 3}, {"messages": HELLO, "max_generate_length": 9}],
    }
    first, second = parse_requests(raw, "input.json").requests
    assert (first.sampling.temperature, first.sampling.seed, first.sampling.top_k) == (0.0, 3, 7)
    assert (second.sampling.temperature, second.sampling.seed, second.sampling.max_generate_length) == (0.5, None, 9)
    overridden = parse_requests(raw, "input.json", temperature=0.25, max_generate_length=4, batch_size=2)
    assert [r.sampling.temperature for r in overridden.requests] == [0.25, 0.25]
    assert [r.sampling.max_generate_length for r in overridden.requests] == [4, 4]
    assert overridden.batch_size == 2
    assert [r.index for r in overridden.requests] == [0, 1]


def test_override_is_checked_like_the_file() -> None:
    with pytest.raises(RequestError, match="command line: top_p is 2"):
        parse_requests({"requests": [{"messages": HELLO}]}, "input.json", top_p=2.0)


def test_text_items_are_joined() -> None:
    content = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo 😀"}]
    (request,) = parse({}, {"messages": [{"role": "user", "content": content}]}).requests
    assert request.messages[0].content == "Hello 😀"


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_media_items_are_refused_by_name_and_place(kind: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": kind, kind: "x.png"}]
    error = refusal({}, {"messages": HELLO}, {"messages": [{"role": "user", "content": content}]})
    assert f"requests[1].messages[0].content[1] is of type {kind}" in error.what


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
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("apply_chat_template", 1),
        ("add_generation_prompt", "true"),
        ("enable_thinking", None),
    ],
)
def test_value_out_of_its_range_is_refused_with_its_name(key: str, value: object) -> None:
    assert f"input.json: {key} is " in refusal({key: value}).what


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 0), ("top_p", 1), ("top_k", 0), ("seed", 2**63 - 1), ("seed", None), ("batch_size", 16)],
)
def test_value_at_the_edge_of_its_range_is_accepted(key: str, value: object) -> None:
    found = parse({key: value})
    held = found.batch_size if key == "batch_size" else getattr(found.requests[0].sampling, key)
    assert held == value


def test_per_request_value_is_refused_at_its_place() -> None:
    error = refusal({}, {"messages": HELLO}, {"messages": HELLO, "top_p": 3})
    assert "requests[1].top_p is 3" in error.what


REFUSED_YET = [
    ("num_logprobs", 0, 5),
    ("logit_bias", {}, {"1": 2.0}),
    ("available_lora_weights", {}, {"a": "b"}),
    ("streaming", {}, {"x": 1}),
    ("talker_temperature", None, 0.9),
]
REFUSED_YET_PER_REQUEST = [
    ("stop", "", "\n"),
    ("stop", [], ["a"]),
    ("lora_name", None, "a"),
    ("lora_name", "", "a"),
    ("save_system_prompt_kv_cache", False, True),
    ("num_logprobs", 0, False),
]


@pytest.mark.parametrize(("key", "neutral", "asking"), REFUSED_YET)
def test_key_that_cannot_be_honoured_is_refused_only_when_it_asks(key: str, neutral: object, asking: object) -> None:
    assert parse({key: neutral}).requests
    error = refusal({key: asking})
    assert key in error.what
    assert "cannot honour it: " in error.what


@pytest.mark.parametrize(("key", "neutral", "asking"), REFUSED_YET_PER_REQUEST)
def test_request_key_that_cannot_be_honoured_is_refused_only_when_it_asks(
    key: str, neutral: object, asking: object
) -> None:
    assert parse({}, {"messages": HELLO, key: neutral}).requests
    assert f"requests[0].{key} is " in refusal({}, {"messages": HELLO, key: asking}).what


def test_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    assert 'Did you mean "temperature"?' in refusal({"temprature": 1}).remedy
    assert 'Did you mean "messages"?' in refusal({}, {"message": HELLO}).remedy
    error = refusal({}, {"messages": [{"role": "user", "contents": "x"}]})
    assert "requests[0].messages[0].contents is not a known key" in error.what
    assert 'Did you mean "content"?' in error.remedy
    assert "the known keys are" in refusal({"zzzzzz": 1}).remedy


def test_known_key_in_the_wrong_place_is_told_where_it_belongs() -> None:
    assert "top level" in refusal({}, {"messages": HELLO, "enable_thinking": True}).remedy
    assert "in each of the requests" in refusal({"messages": HELLO}).remedy


@pytest.mark.parametrize("raw", [None, [], "x", 3, {}, {"requests": []}, {"requests": {}}, {"requests": [3]}])
def test_wrong_shape_is_refused(raw: object) -> None:
    with pytest.raises(RequestError, match=r"^input\.json"):
        parse_requests(raw, "input.json")


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (None, "requests[0].messages is missing"),
        ([], "requests[0].messages is empty"),
        (HELLO * 65, "requests[0].messages holds 65 messages"),
        (["x"], "requests[0].messages[0] is"),
        ([{"role": "user"}], "requests[0].messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "requests[0].messages[0].content is 3"),
        ([{"role": "user", "content": "é" * (MAX_MESSAGE_BYTES // 2 + 1)}], "content is 131074 bytes"),
        ([{"role": "user", "content": "a\ud83d"}], "content holds half of a surrogate pair"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "content[0].text is null"),
        ([{"role": "user", "content": [{"type": "txt", "text": "x"}]}], 'content[0].type is "txt"'),
    ],
)
def test_bad_messages_are_refused_at_their_place(messages: object, place: str) -> None:
    request: dict[str, object] = {} if messages is None else {"messages": messages}
    assert place in refusal({}, request).what


def test_largest_allowed_messages_pass() -> None:
    largest = [{"role": "user", "content": "é" * (MAX_MESSAGE_BYTES // 2)}]
    assert parse({}, {"messages": largest}, {"messages": HELLO * 64}).requests[1].messages[63].content == "Hello"


def test_misspelt_role_is_refused_because_templates_would_drop_it() -> None:
    assert 'Did you mean "user"?' in refusal({}, {"messages": [{"role": "usr", "content": "x"}]}).remedy
    assert "role is null" in refusal({}, {"messages": [{"content": "x"}]}).what


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"requests": [\n  {"a" 1}]}', "line 2, column 8"),
        (b"", "line 1, column 1"),
        (b'{\n "a": "\xc3\xa9\xff"}', "byte 0xff at line 2, column 9"),
        (b'{"a": 1, "a": 2}', 'the key "a" stands twice'),
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
    monkeypatch.setattr("edgespec.prompts.MAX_FILE_BYTES", 10)
    (tmp_path / "large.json").write_bytes(b" " * 11)
    with pytest.raises(RequestError, match="larger than 10 bytes"):
        read_requests(tmp_path / "large.json")


def test_output_is_readable_json_with_its_characters_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    write_output(path, "input.json", [{"output_text": "😀 né", "finish_reason": END_OF_SEQUENCE}])
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {
        "input_file": "input.json",
        "responses": [{"output_text": "😀 né", "finish_reason": "end-of-sequence"}],
    }
    assert '\n    "responses"' in text
    assert "😀 né" in text
    assert [item.name for item in tmp_path.iterdir()] == ["output.json"]


def test_failed_write_leaves_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "output.json"
    path.write_text("old")

    def disk_is_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(OutputError, match="No space left"):
        write_output(path, "input.json", [])
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["output.json"]


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_output(tmp_path / "link.json", "input.json", [])
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").is_file()


def test_writable_path_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "output.json")
    assert list(tmp_path.iterdir()) == []


def test_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    for path, said in [
        (tmp_path, "is a directory"),
        (tmp_path / "absent" / "output.json", "there is no directory"),
        (Path("/dev/null"), "not an ordinary file"),
        (Path("/proc/output.json"), "cannot be written"),  # a directory where not even root may create a file
    ]:
        with pytest.raises(OutputError, match=said):
            check_writable(path)
    with pytest.raises(OutputError, match="not an ordinary file"):
        write_output("/dev/null", "input.json", [])
