"""`infer --prompts`: conversations whose answers are fed back, one output a turn, with rows kept
between turns.

EDGESPEC_DATA=DIRECTORY answers the beginning of each published set (*.jsonl) in it, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgespec.contract import Limits
from edgespec.prompts import MAX_LENGTH, read_prompt_set
from tests.e2e.workshop import Cli, cli, kept_lines, responses, said
from tests.lossless.engines import make_engines

__all__ = ["cli"]  # a fixture

DATA = os.environ.get("EDGESPEC_DATA")
ROOMY = Limits(
    max_input_len=448, max_kv_cache_capacity=512, max_verify_tree_size=16, max_draft_tree_size=16
)
TREE = ["--spec-decode", "--spec-draft-top-k", 4, "--spec-draft-step", 3, "--spec-verify-size", 16]
SET: list[dict[str, object]] = [
    {
        "question_id": 81,
        "category": "writing",
        "turns": ["Tell of the boat.", "Shorter.", "And é?"],
    },
    {"id": "b", "turns": ["one"]},
    {
        "task_id": "HumanEval/0",
        "prompt": "def add(left, right):\n",
        "entry_point": "add",
        "test": "pass",
    },
    {"turns": ["two", "three"], "reference": ["x", "y"]},
    {"question_id": 82, "turns": ["Rain fell", "on the roof"]},
]
NAMES = ["81", "b", "HumanEval/0", None, "82"]
TURNS = [3, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("engines"), limits=ROOMY)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in SET))
    return path


def infer(engine: Path, prompts: Path, output: Path, **flags: object) -> list[object]:
    usual: dict[str, object] = {"--seed": 3, "--max-generate-length": 12}
    given = usual | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    args = ["infer", "--engine-dir", engine, "--prompts", prompts, "--output-file", output]
    return [*args, *(part for flag in given.items() for part in flag)]


def answered(cli: Cli, *args: Any, flags: list[object] | None = None) -> list[dict[str, Any]]:
    found = cli(*args, *(flags or []))
    assert found.code == 0, found.err
    output = Path(str(args[args.index("--output-file") + 1]))
    return responses(output.parent, output.name)


def rendered(messages: list[dict[str, str]]) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{text}<|im_start|>assistant\n"


def turns_of(line: dict[str, Any]) -> list[str]:
    return list(line.get("turns") or [line["prompt"]])


def assert_fed_back(found: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    """Each turn's prompt is all turns before it with the answers that were given to them."""
    for index, line in enumerate(lines):
        messages: list[dict[str, str]] = []
        for turn, answer in zip(
            turns_of(line), [r for r in found if r["request_idx"] == index], strict=True
        ):
            messages.append({"role": "user", "content": turn})
            assert answer["messages"] == messages
            assert answer["formatted_complete_request"] == rendered(messages)
            messages.append({"role": "assistant", "content": answer["output_text"]})


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("flags", [[], TREE], ids=["plain", "tree"])
def test_answers_are_fed_back_and_every_turn_is_in_the_output_under_its_name(
    engines: Path, prompts: Path, tmp_path: Path, cli: Cli, batch_size: int, flags: list[object]
) -> None:
    engine = engines / ("one" if batch_size == 1 else "four")
    found = answered(
        cli, *infer(engine, prompts, tmp_path / "out.json", batch_size=batch_size), flags=flags
    )
    keys = [(r["request_idx"], r.get("turn_idx", 0), r.get("id")) for r in found]
    assert keys == [(i, t, NAMES[i]) for i, count in enumerate(TURNS) for t in range(count)]
    assert [("turn_idx" in r) for r in found] == [
        count > 1 for count in TURNS for _ in range(count)
    ]
    assert_fed_back(found, SET)
    assert any(r["output_text"] for r in found if TURNS[r["request_idx"]] > 1)


def test_batches_of_conversations_and_drafts_change_no_answer(
    engines: Path, prompts: Path, tmp_path: Path, cli: Cli
) -> None:
    wanted = said(answered(cli, *infer(engines / "one", prompts, tmp_path / "plain.json")))
    for engine, batch_size, flags in (
        ("one", 1, TREE),
        ("four", 2, []),
        ("four", 4, TREE),
        ("four", 3, [*TREE[:1]]),
    ):
        args = infer(engines / engine, prompts, tmp_path / "out.json", batch_size=batch_size)
        assert said(answered(cli, *args, flags=flags)) == wanted


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("flags", [[], TREE], ids=["plain", "tree"])
def test_later_turns_reuse_rows_unless_told_not_to_and_say_the_same(
    engines: Path, prompts: Path, tmp_path: Path, cli: Cli, batch_size: int, flags: list[object]
) -> None:
    engine = engines / ("one" if batch_size == 1 else "four")
    args = infer(engine, prompts, tmp_path / "out.json", batch_size=batch_size)
    reusing = answered(cli, *args, flags=flags)
    anew = answered(cli, *args, flags=[*flags, "--prefix-cache-mb", 0])
    assert said(reusing) == said(anew)
    assert all(r["metrics"]["reused_tokens"] == 0 for r in anew)
    before: dict[tuple[int, int], dict[str, Any]] = {
        (r["request_idx"], r.get("turn_idx", 0)): r for r in reusing
    }
    for (index, turn), answer in before.items():
        metrics = answer["metrics"]
        assert metrics["reused_tokens"] + metrics["computed_tokens"] == metrics["prompt_tokens"]
        # all of the turn before, its answer not: the pending token has no row, and text may be cut
        # anew
        if turn:
            assert (
                metrics["reused_tokens"] >= before[index, turn - 1]["metrics"]["prompt_tokens"] - 1
            )


def test_conversation_that_outgrows_the_engine_fails_from_there_on_and_alone(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    prompts = tmp_path / "set.jsonl"
    growing = {
        "id": "growing",
        "turns": ["boat " * 30, "boat " * 40, "boat " * 60, "and now?", "still there?"],
    }
    prompts.write_text(
        "".join(json.dumps(line) + "\n" for line in (growing, {"id": "small", "turns": ["a", "b"]}))
    )
    found = cli(*infer(engines / "four", prompts, tmp_path / "out.json", batch_size=2), *TREE)
    assert found.code == 5
    answers = responses(tmp_path, "out.json")
    assert [(r["id"], r["turn_idx"]) for r in answers] == [
        *(("growing", t) for t in range(5)),
        ("small", 0),
        ("small", 1),
    ]
    reasons = [r["finish_reason"] for r in answers]
    first = reasons.index("error")
    assert 0 < first < 4
    assert reasons[first:5] == ["error"] * (5 - first)
    assert "error" not in reasons[5:]
    assert "the base engine was built for 448" in answers[first]["error"]
    for later in answers[first + 1 : 5]:
        assert f"turn {first} of request 0 failed" in later["error"]
    assert f"request 0, turn {first}: the prompt has" in found.err


def test_losslessness_is_checked_turn_by_turn(
    engines: Path, prompts: Path, tmp_path: Path, cli: Cli
) -> None:
    args = infer(engines / "four", prompts, tmp_path / "out.json", batch_size=3)
    found = cli(*args, *TREE, "--check-lossless", "--json")
    assert found.code == 0
    summary = json.loads(found.out)
    assert (summary["requests"], summary["lossless"]) == (sum(TURNS), "yes")
    assert all(r["lossless"] == {"equal": True} for r in responses(tmp_path, "out.json"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 is not JSON"),
        (b'{"turns": []}', "line 2: turns is empty"),
        (b'{"turns": ["x"], "prompt": "y"}', 'has both "turns" and "prompt"'),
        (b'{"turns": ["\xff"]}', "line 2 is not UTF-8"),
        (b'{"turn": ["x"]}', '"turns"'),
        (b'{"turns": [1]}', "turns[0] is 1, not a string"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_damaged_line_is_refused_by_its_number(
    engines: Path, tmp_path: Path, cli: Cli, line: bytes, words: str
) -> None:
    (tmp_path / "set.jsonl").write_bytes(b'{"turns": ["fine"]}\n' + line + b"\n")
    found = cli(*infer(engines / "one", tmp_path / "set.jsonl", tmp_path / "out.json"))
    assert (found.code, found.out) == (3, "")
    assert words in found.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.skipif(not DATA, reason="EDGESPEC_DATA names no directory of published sets")
def test_published_sets_are_read_whole_and_answered(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    files = sorted(Path(DATA or "").glob("*.jsonl"))
    assert files
    for file in files:
        lines = kept_lines(file)
        requests = read_prompt_set(file).requests
        assert [r.name for r in requests] == [
            str(one.get("question_id", one.get("task_id"))) for one in lines
        ]
        # The toy reads short prompts only: the beginnings of a few, with as many turns.
        few = [
            one | {"turns": [turn[:60] for turn in turns_of(one)]}
            for one in lines[:: max(1, len(lines) // 8)]
        ]
        for one in few:
            one.pop("prompt", None)
        (tmp_path / "few.jsonl").write_text("".join(json.dumps(one) + "\n" for one in few))
        args = infer(engines / "four", tmp_path / "few.jsonl", tmp_path / "out.json", batch_size=4)
        found = answered(cli, *args, flags=[*TREE, "--check-lossless"])
        assert_fed_back(found, few)
        assert len(found) == sum(len(turns_of(one)) for one in few)
        assert {r["finish_reason"] for r in found} <= {MAX_LENGTH, "end-of-sequence"}
