"""Published data sets in their own columns, made by hand, become conversations; what is left out is
counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.main import run
from edgespec.data.sources.table import SOURCES

SAID = [("user", "Why is grass green?"), ("assistant", "Chlorophyll.")]
ROLES = [{"role": role, "content": text} for role, text in SAID]
BY = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in SAID]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USED = [
    {"role": "user", "content": "Add one."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "x"},
    {"role": "assistant", "content": "It is 2.", "reasoning_content": ""},
]
THINKS = [{"role": "system", "content": "/no_think"}, {**ROLES[0]}, ROLES[1]]
# a record of each source in its own columns, and the conversation that it is
RECORDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "ultrachat": ({"prompt": SAID[0][1], "prompt_id": "1", "messages": ROLES}, ROLES),
    "sharegpt": ({"id": "a", "conversations": [{"from": "system", "value": "x"}, *BY]}, ROLES),
    **{
        f"magpie-{size}": ({"instruction": SAID[0][1], "response": SAID[1][1]}, ROLES)
        for size in ("1m", "500k", "300k")
    },
    "daring-anteater": (
        {"system": "Be brief.", "conversations": [{**BY[0], "from": "User"}, BY[1]]},
        [SYSTEM, *ROLES],
    ),
    "mt-bench": ({"prompt_id": 81, "prompt": ["a", "b"], "reference": []},
                 [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    "nemotron-v2": ({"reasoning": "off", "messages": THINKS}, ROLES),
    "nemotron-v3": (
        {"messages": [{"role": "developer", "content": "Be brief."},
                      {"role": "user", "content": "Why is grass green? /think"}, ROLES[1]]},
        [SYSTEM, *ROLES],
    ),
}  # fmt: skip


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepared(out: Path, *words: str) -> list[dict[str, Any]]:
    assert run(["data", "prepare", *words, "--output-file", str(out), "--json"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_a_record_of_each_source_is_a_conversation(name: str, tmp_path: Path) -> None:
    record, messages = RECORDS[name]
    path = write(tmp_path / "train.jsonl", record)
    asked = [m for m in messages if m["role"] != "assistant"]
    assert [line["messages"] for line in prepared(tmp_path / "a", f"{name}={path}")] == [asked]
    if name != "mt-bench":
        full = prepared(tmp_path / "b", f"{name}={path}", "--full-conversations")
        assert [line["messages"] for line in full] == [messages]


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A local copy is a directory with a file a split; of conversations with tools whole ones are
    kept, with their calls."""
    quoted = "Write the words of a benchmark that has many of them, one behind the other, please."
    bench = write(tmp_path / "bench.jsonl", {"turns": [quoted, "Short."]})
    (tmp_path / "copy").mkdir()
    records = [
        {"messages": ROLES},
        {"messages": [ROLES[0], {"role": "assistant", "content": "Otherwise."}]},
        {"messages": USED, "tools": [CALL]},
        {"messages": [{"role": "user", "content": f"Hi! {quoted.upper()}"}, ROLES[1]]},
        {"messages": [{"role": "user", "content": "short"}, ROLES[1]]},
        {"messages": [ROLES[1]]},
        {"messages": "no list"},
    ]
    write(tmp_path / "copy" / "chat-0.jsonl", *records)
    write(tmp_path / "copy" / "math-0.jsonl", {"messages": [{"role": "user", "content": "?"}]})
    named = f"nemotron-v2={tmp_path / 'copy'}"
    words = named, "--exclude", str(bench), "--split", "chat"
    assert len(prepared(tmp_path / "prompts", *words)) == 1
    found = told(capsys)["left_out"]
    left_out = {"duplicates": 1, "with tools": 1, "prompts of benchmarks": 2}
    assert found == left_out | {"without a turn of a user": 2}
    whole = prepared(tmp_path / "whole", *words, "--mode", "train", "--cap", "3")
    used = next(line for line in whole if line.get("tools"))
    assert [m["role"] for m in used["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert used["messages"][1]["tool_calls"] == [CALL]
    assert used["messages"][2]["tool_call_id"] == "x"


def test_prompts_have_variants_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"})
    more = tmp_path / "more.yaml"
    more.write_text(
        "augmentations:\n- {type: user_suffix, text: ' In French.'}\n"
        "- {type: user_suffix, text: no, enabled: false}\n"
        "- {type: system_prompt, content: Be brief.}\n"
    )
    found = prepared(tmp_path / "out", f"ultrachat={path}", "--augmentations", str(more))
    said = sorted("|".join(m["content"] for m in line["messages"]) for line in found)
    assert said == ["Be brief.|b", "a", "a In French.", "b"]
    assert len({line["conversation_id"] for line in found}) == 4
    assert told(capsys)["variants"] == 2
    more.write_text("augmentations: [{type: suffix, text: no}]")
    words = ["data", "prepare", f"ultrachat={path}", "--augmentations", str(more)]
    assert run([*words, "--output-file", str(tmp_path / "other")]) == 3
    assert "augmentations[0]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": []}\n{"mess', "line 2 is not JSON"),
        ("[1]\n", "line 1 is [1], not an object"),
        ("", "no conversation is left: there are no records"),
        ('{"messages": []}\n', "no conversation is left: 1 without a turn of a user"),
    ],
)
def test_a_copy_that_cannot_be_read_leaves_nothing(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    words = ["data", "prepare", f"ultrachat={tmp_path / 'a.jsonl'}"]
    assert run([*words, "--output-file", str(tmp_path / "out")]) == 3
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_sources_and_splits_that_are_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copy").mkdir()
    for name in "ab":
        write(tmp_path / "copy" / f"{name}.jsonl", {})
    for words, message in (
        (["other"], "'other' is no source. Sources: ultrachat,"),
        ([f"ultrachat={tmp_path / 'copy'}"], "has no files of the split train_sft"),
        ([f"ultrachat={tmp_path / 'c'}"], "does not exist"),
        (["ultrachat="], "no path behind ="),
    ):
        assert run(["data", "prepare", *words, "--output-file", str(tmp_path / "out")]) in (2, 3)
        assert message in capsys.readouterr().err


def test_the_hub_is_streamed_and_what_fails_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []

    def load_dataset(name: str, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        assert (name, split, streaming) == ("HuggingFaceH4/ultrachat_200k", "test_sft", True)
        for number in range(5):
            if number == 4:
                raise ConnectionError("no route\nfar away")
            read.append(number)
            yield {"prompt": f"Why {number}?", "messages": None}

    words = ["data", "prepare", "ultrachat", "--split", "test_sft", "--output-file"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run([*words, str(tmp_path / "a")]) == 4
    assert "needs the package datasets" in capsys.readouterr().err
    hub = SimpleNamespace(load_dataset=load_dataset, get_dataset_split_names=None)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert run([*words, str(tmp_path / "a"), "--cap", "2"]) == 0
    assert len((tmp_path / "a").read_text().splitlines()) == len(read) == 2
    assert run([*words, str(tmp_path / "b")]) == 4
    assert "could not be read from the hub: no route\n" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_parquet_file_without_its_reader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1PAR1")
    words = ["data", "prepare", f"ultrachat={tmp_path / 'a.parquet'}", "--output-file"]
    assert run([*words, str(tmp_path / "out")]) == 4
    assert "needs the package pyarrow" in capsys.readouterr().err
