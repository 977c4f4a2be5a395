"""Answers turn by turn: what is asked behind what, what a second run goes on with, and what is
refused or listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import run
from edgespec.data.synthesize import Answer, AnswerFailed, Synthesis, read_asked, synthesize
from edgespec.errors import EnvironmentProblem, OutputError, RequestError
from edgespec.progress import Silent
from edgespec.prompts.chats import Chat, Turn
from tests.chat_server import serving

SETTINGS = {"base": "b", "seed": 0, "drop_truncated": False}


@dataclass
class Echo:
    """Answers with the number of messages and the last one; fails at what says so."""

    concurrency: int = 2
    asked: list[str] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)

    def answer(self, chat: Chat, messages: Sequence[Turn], seed: int) -> Answer:
        last = messages[-1]["content"]
        self.asked.append(last)
        self.seeds.add(seed)
        if "fail" in last:
            raise AnswerFailed("it was told to")
        return Answer("" if last == "empty" else f"{len(messages)} {last}", cut=last == "long")

    def abort(self) -> None:
        """Nothing waits."""


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def answered(source: Path, out: Path, answerer: Echo | None = None, **settings: Any) -> Synthesis:
    return synthesize(
        read_asked(source),
        out,
        answerer or Echo(),
        SETTINGS | settings,
        stopping=lambda: False,
        progress=Silent(),
    )


def lines(path: Path) -> dict[str, Any]:
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return {value["conversation_id"]: value for value in values}


def test_each_turn_is_asked_behind_the_answers_before_it(tmp_path: Path) -> None:
    said = [("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b")]
    messages = [{"role": role, "content": text} for role, text in said]
    older = {"id": 7, "conversations": [{"from": "human", "value": "long"}]}
    source = write(
        tmp_path / "in.jsonl", {"uuid": "x", "messages": messages}, older, {"turns": ["c"]}
    )
    found = answered(source, tmp_path / "out.jsonl")
    assert (found.written, found.cut, found.failed) == (3, 1, 0)
    kept = lines(tmp_path / "out.jsonl")
    assert [m["content"] for m in kept["x"]["messages"]] == ["s", "a", "2 a", "b", "4 b"]
    assert kept["7"]["truncated"]
    assert "truncated" not in kept["x"]
    assert not (tmp_path / "out.failures.jsonl").exists()


def test_a_run_goes_on_where_a_kill_left_it_and_asks_again_what_failed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": name, "prompt": name} for name in "abc"),
                   {"id": "d", "prompt": "fail"}, {"id": "e", "prompt": "empty"})  # fmt: skip
    out, first = tmp_path / "out.jsonl", Echo()
    assert answered(source, out, first).failed == 2
    assert len(first.seeds) == 5
    reasons = {
        name: line["reason"] for name, line in lines(tmp_path / "out.failures.jsonl").items()
    }
    assert reasons == {"d": "it was told to", "e": "the answer to message 1 is empty"}
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(whole[0] + whole[1] + whole[2][:20])
    again = Echo()
    found = answered(source, out, again)
    assert (found.kept, found.written, found.failed) == (2, 1, 2)
    assert {"fail", "empty"} < {*again.asked}
    assert len(again.asked) == 3
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(whole)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (({"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}), "line 2 has the id '1' of"),
        (({"messages": [{"role": "assistant", "content": "a"}]},), "line 1 has no messages with"),
        (({"prompt": "a"}, {"messages": [{"role": "user"}]}), "line 2 has no messages with"),
        (([1],), "line 1 is not an object"),
        ((), "has no conversations"),
    ],
)
def test_a_file_that_cannot_be_asked_is_refused_by_line(
    tmp_path: Path, records: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read_asked(write(tmp_path / "in.jsonl", *records))


def test_an_output_made_otherwise_is_refused_by_key(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    answered(source, out)
    with pytest.raises(RequestError, match="made with seed 0, and this run has 1"):
        answered(source, out, seed=1)
    (tmp_path / "out.settings.json").unlink()
    with pytest.raises(RequestError, match=r"no out\.settings\.json"):
        answered(source, out)


def test_truncated_conversations_are_left_out_where_told(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "long"}, {"prompt": "a"}, {"prompt": "a"})
    found = answered(source, tmp_path / "out.jsonl", drop_truncated=True)
    assert (found.written, found.dropped, found.repeated) == (1, 1, 1)


def test_a_run_gives_up_where_nothing_is_answered(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"prompt": f"fail {i}"} for i in range(100)))
    answerer = Echo()
    with pytest.raises(EnvironmentProblem, match="16 conversations in a row"):
        answered(source, tmp_path / "out.jsonl", answerer)
    assert len(answerer.asked) < 20


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"

    class Nested(Echo):
        def answer(self, chat: Chat, messages: Sequence[Turn], seed: int) -> Answer:
            with pytest.raises(OutputError, match="another run"):
                answered(source, out)
            return super().answer(chat, messages, seed)

    assert answered(source, out, Nested()).written == 1


def test_a_server_answers_and_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": "q", "turns": ["a", "b"]})
    out = tmp_path / "out.jsonl"
    with serving(models=["m"]) as server:
        words = ["data", "synthesize", str(source), "--url", server.url, "--output-file", str(out)]
        assert run([*words, "--model", "other"]) == 3
        assert "serves m, and not other" in capsys.readouterr().err
        assert not out.exists()
        assert run([*words, "--model", "m", "--temperature", "0.5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["written"] == 1
        bodies = [(b["model"], b["temperature"], len(b["messages"])) for b in server.asked]
        assert bodies == [("m", 0.5, 1), ("m", 0.5, 3)]
    answer = {"role": "assistant", "content": "one two ", "reasoning_content": "why "}
    assert lines(out)["q"]["messages"][1::2] == [answer, answer]
