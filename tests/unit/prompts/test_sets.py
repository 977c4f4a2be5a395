"""Prompt sets: the published forms are read, and everything else is refused by file, line and
place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgespec.errors import RequestError
from edgespec.prompts import (
    MAX_MESSAGE_BYTES,
    Message,
    RequestFile,
    SamplingParams,
    parse_prompt_set,
    read_prompt_set,
)

PUBLISHED = Path(os.environ.get("EDGESPEC_DATA", "no such directory"))


def lines(*objects: object) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in objects)


def parse(*objects: object) -> RequestFile:
    return parse_prompt_set(lines(*objects), "set.jsonl")


def refusal(data: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_prompt_set(data, "set.jsonl")
    assert caught.value.what.startswith("set.jsonl")
    assert caught.value.remedy
    return caught.value


def test_first_turn_opens_and_the_others_follow() -> None:
    (request,) = parse(
        {"question_id": 81, "category": "writing", "turns": ["One", "Two", "Three"]}
    ).requests
    assert request.messages == (Message("user", "One"),)
    assert request.turns == ("Two", "Three")
    assert request.name == "81"
    assert request.sampling == SamplingParams()


def test_prompt_is_a_single_turn() -> None:
    line = {
        "task_id": "HumanEval/0",
        "prompt": "def f():",
        "entry_point": "f",
        "canonical_solution": "",
        "test": "",
    }
    (request,) = parse(line).requests
    assert (request.messages, request.turns, request.name) == (
        (Message("user", "def f():"),),
        (),
        "HumanEval/0",
    )


def test_prompt_without_a_name_has_none() -> None:
    first, second = parse({"turns": ["a"]}, {"turns": ["b"], "id": "x"}).requests
    assert (first.name, second.name) == (None, "x")
    assert (first.index, second.index) == (0, 1)


def test_overrides_reach_every_prompt() -> None:
    found = parse_prompt_set(
        lines({"turns": ["a"]}, {"turns": ["b"]}),
        "set.jsonl",
        temperature=0,
        seed=3,
        num_logprobs=2,
        batch_size=4,
    )
    assert [r.sampling for r in found.requests] == [
        SamplingParams(temperature=0, seed=3, num_logprobs=2)
    ] * 2
    assert found.batch_size == 4
    assert parse({"turns": ["a"]}).batch_size == 1
    with pytest.raises(RequestError, match="command line: min_p is 2"):
        parse_prompt_set(lines({"turns": ["a"]}), "set.jsonl", min_p=2)


def test_blank_lines_count_for_places_only() -> None:
    data = b'\n{"turns": ["a"]}\r\n  \t\n\n{"turns": ["b"]}'
    assert [r.index for r in parse_prompt_set(data, "set.jsonl").requests] == [0, 1]
    assert refusal(data + b"\n\n{}").what.startswith("set.jsonl, line 7: turns is missing")


def test_line_separators_inside_a_string_end_no_line() -> None:
    data = '{"turns": ["a\u2028b\x85c"]}\n'.encode()
    assert parse_prompt_set(data, "set.jsonl").requests[0].messages[0].content == "a\u2028b\x85c"


def test_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    for blank in (b"", b"\n"):
        path.write_bytes(b"\xef\xbb\xbf" + blank + lines({"turns": ["é"]}))
        found = read_prompt_set(path, top_k=1)
        assert (found.path, found.requests[0].sampling.top_k) == (path, 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "set.jsonl has no prompts"),
        (b"\n \n", "set.jsonl has no prompts"),
        (b'[{"turns": ["a"]}]', "line 1 is a list, not an object"),
        (b'{"turns": ["a"]} {"turns": ["b"]}', "line 1 is not JSON: Extra data at column 18"),
        (b'{\n"turns": ["a"]}', "line 1 is not JSON"),
        (b'{"turns": ["a"]}\n{"turns": NaN}', "line 2: NaN is not JSON"),
        (b'{"turns": ["a"], "turns": ["b"]}', 'line 1: the key "turns" occurs twice'),
        (b'{"turns": ["a"]}\n{"turns": ["\xff"]}', "line 2 is not UTF-8: byte 0xff at column 13"),
        (lines({"turns": ["a"]}) + b"[" * 100_000, "line 2 is nested too deeply"),
        (b'{"turns": ["a"], "id": ' + b"9" * 5000 + b"}", "line 1 has a number that is too long"),
        (lines({"turns": []}), "line 1: turns is empty"),
        (lines({"turns": "a"}), 'line 1: turns is "a", not a list'),
        (lines({"turns": [3]}), "line 1: turns[0] is 3, not a string"),
        (lines({"turns": ["a"] * 2049}), "line 1: turns has 2049 turns"),
        (lines({"turns": ["a"], "prompt": "a"}), 'has both "turns" and "prompt"'),
        (lines({"prompt": None}), "line 1: prompt is null, not a string"),
        (lines({"turns": ["a", "b\ud83d"]}), "turns[1] has an unpaired surrogate"),
        (lines({"turns": ["x" * (MAX_MESSAGE_BYTES + 1)]}), "turns[0] has 1048577 bytes"),
        (
            lines({"turns": ["x" * MAX_MESSAGE_BYTES] * 4 + ["x"]}),
            "turns has 4194305 bytes of text in all",
        ),
        (lines({"turns": ["a"], "question_id": True}), "question_id is true"),
        (lines({"turns": ["a"], "question_id": [1]}), "question_id is a list"),
        (lines({"turns": ["a"], "task_id": "\ud800"}), "task_id has an unpaired surrogate"),
        (
            lines({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}),
            "turns[0] is a placeholder of SPEED-Bench",
        ),
    ],
)
def test_bad_line_is_refused_at_its_place(data: bytes, said: str) -> None:
    assert said in refusal(data).what


def test_longest_conversation_passes() -> None:
    assert len(parse({"turns": ["x" * 2**15] * 32}).requests[0].turns) == 31


def test_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    error = refusal(lines({"turns": ["a"]}, {"turn": ["a"]}))
    assert "line 2: turn is not a known key" in error.what
    assert 'Did you mean "turns"?' in error.remedy


SPEED_BENCH: list[dict[str, object]] = [
    {
        "question_id": "a1",
        "category": "coding",
        "sub_category": "python",
        "turns": ["One", "Two"],
        "source": "s",
        "src_id": "7",
        "difficulty": None,
        "multiturn": True,
    },
    {"question_id": "b2", "category": "writing", "turns": ["Three"], "multiturn": False},
    {"question_id": "c3", "category": "coding", "sub_category": "sql", "turns": ["Four"]},
]


def names_of(categories: tuple[str, ...]) -> list[str | None]:
    found = parse_prompt_set(lines(*SPEED_BENCH), "set.jsonl", categories=categories)
    assert [request.index for request in found.requests] == list(range(len(found.requests)))
    return [request.name for request in found.requests]


def test_categories_and_sub_categories_choose_prompts() -> None:
    assert names_of(()) == ["a1", "b2", "c3"]
    assert names_of(("coding",)) == ["a1", "c3"]
    assert names_of(("sql", "writing")) == ["b2", "c3"]
    with pytest.raises(RequestError, match="no prompts of the category maths") as caught:
        names_of(("maths",))
    assert caught.value.remedy == "Its categories: coding, python, sql, writing."
    with pytest.raises(RequestError, match="has no prompts of the category maths"):
        parse_prompt_set(lines({"turns": ["a"], "category": "x"}), "s", categories=("maths",))


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="EDGESPEC_DATA names no directory of published sets"
)
@pytest.mark.parametrize(("name", "num_later_turns"), [("mt_bench", 1), ("humaneval", 0)])
def test_published_set_is_read(name: str, num_later_turns: int) -> None:
    requests = read_prompt_set(PUBLISHED / f"{name}.jsonl").requests
    assert len(requests) == 80
    assert {len(request.turns) for request in requests} == {num_later_turns}
    assert len({request.name for request in requests}) == 80
