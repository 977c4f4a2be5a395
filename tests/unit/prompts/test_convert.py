"""Prompt sets in the forms of other benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.cli.main import run

LINES = {
    "humaneval": '{"task_id": "HumanEval/0", "prompt": "def f():\\n"}\n{"turns": ["é"]}\n',
    "mt_bench": '{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}\n',
}


def converted(tmp_path: Path, name: str, form: str) -> str:
    source, target = tmp_path / "question.jsonl", tmp_path / "out file"
    source.write_text(LINES[name], encoding="utf-8")
    words = ["data", "convert", name, str(source), "--to", form, "--output-file", str(target)]
    assert run(words) == 0
    return target.read_text(encoding="utf-8")


def test_genai_perf_has_a_text_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert converted(tmp_path, "humaneval", "genai-perf").splitlines() == [
        '{"text": "def f():\\n"}',
        '{"text": "é"}',
    ]
    told = capsys.readouterr().err
    assert told.startswith("genai-perf profile --model MODEL ")
    assert told.endswith(f"--input-file '{tmp_path / 'out file'}'\n")


def test_aiperf_has_a_session_a_line(tmp_path: Path) -> None:
    (line,) = converted(tmp_path, "mt_bench", "aiperf").splitlines()
    turns = [{"text": "Write."}, {"text": "Again."}]
    assert json.loads(line) == {"session_id": "81", "turns": turns}


def test_sharegpt_has_empty_answers(tmp_path: Path) -> None:
    (whole,) = json.loads(converted(tmp_path, "mt_bench", "sharegpt"))
    said = [(one["from"], one["value"]) for one in whole["conversations"]]
    assert said == [("human", "Write."), ("gpt", ""), ("human", "Again."), ("gpt", "")]


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("mt_bench", "mt_bench", "prompt 81 has 2 turns, and genai-perf sends one"),
        ("humaneval", "mt_bench", "prompt 81 has 2 turns, those of humaneval have 1"),
        ("mt_bench", "humaneval", "prompt HumanEval/0 has 1 turns, those of mt_bench have 2"),
    ],
)
def test_what_a_form_or_a_set_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lines: str, said: str
) -> None:
    (tmp_path / "q.jsonl").write_text(LINES[lines], encoding="utf-8")
    assert run(["data", "convert", name, str(tmp_path / "q.jsonl"), "--to", "genai-perf"]) == 3
    out, err = capsys.readouterr()
    assert said in err
    assert not out
