"""`infer` without JSON files: prompts of the command line, requests from stdin, answers on
stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import shared
from tests.e2e.workshop import Cli, cli, happening
from tests.lossless.pairs import make_pair

__all__ = ["cli"]  # a fixture

GREEDY = ("--temperature", 0, "--max-generate-length", 8)


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    make = ("llama", "eagle", None)
    return shared.made_once(("pair", make), lambda path: make_pair(path, *make)) / "engines"


def texts(cli: Cli, engine_dir: Path, tmp_path: Path, *prompts: str) -> list[str]:
    """What `infer` answers to the same prompts with files."""
    requests = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    (tmp_path / "input.json").write_text(json.dumps({"requests": requests}))
    files = ("--input-file", tmp_path / "input.json", "--output-file", tmp_path / "output.json")
    assert cli("infer", "--engine-dir", engine_dir, *files, *GREEDY).code == 0
    found = json.loads((tmp_path / "output.json").read_text())["responses"]
    return [response["output_text"] for response in found]


def test_answers_are_all_that_is_on_stdout(cli: Cli, engine_dir: Path, tmp_path: Path) -> None:
    first, second = texts(cli, engine_dir, tmp_path, "one", "two")
    command = ("infer", "--engine-dir", engine_dir, "--prompt", "one", "--prompt", "two", *GREEDY)
    for more in ((), ("--spec-decode",), ("--spec-decode", "--check-lossless")):
        shown = cli(*command, *more)
        assert (shown.code, shown.out) == (0, f"{first}\n{second}\n"), shown.err
        assert "tokens/s" in shown.err
    assert "lossless" in shown.err
    assert cli(*command, "--output-file", tmp_path / "out.json").out != shown.out
    kept = json.loads((tmp_path / "out.json").read_text())["responses"]
    assert [response["output_text"] for response in kept] == [first, second]


def test_without_the_chat_template_the_prompt_is_continued_as_it_is(
    cli: Cli, engine_dir: Path, tmp_path: Path
) -> None:
    request = {"messages": [{"role": "user", "content": "one"}], "apply_chat_template": False}
    (tmp_path / "input.json").write_text(json.dumps({"requests": [request]}))
    files = ("--input-file", tmp_path / "input.json", "--output-file", tmp_path / "output.json")
    assert cli("infer", "--engine-dir", engine_dir, *files, *GREEDY).code == 0
    (response,) = json.loads((tmp_path / "output.json").read_text())["responses"]
    bare = ("--prompt", "one", "--no-chat-template")
    assert cli("infer", "--engine-dir", engine_dir, *bare, *GREEDY).out == (
        f"{response['output_text']}\n"
    )


def test_failed_prompt_leaves_the_others(cli: Cli, engine_dir: Path, tmp_path: Path) -> None:
    (last,) = texts(cli, engine_dir, tmp_path, "two")
    prompts = ("--prompt", "word " * 100, "--prompt", "two")
    shown = cli("infer", "--engine-dir", engine_dir, *prompts, *GREEDY)
    assert (shown.code, shown.out) == (5, f"{last}\n")
    assert "--max-input-len" in shown.err


def test_first_token_is_on_stdout_before_the_last_is_made(engine_dir: Path) -> None:
    """The third call of the engine sees what the first two made: the prompt's token among it."""
    code = "import os, sys; sys.stdout.flush(); os._exit(9)"
    command = ("infer", "--engine-dir", engine_dir, "--prompt", "one", *GREEDY)
    stopped = happening("edgespec.backends.ort.runner:OrtRunner.run", 6, code, *command)
    assert stopped.code == 9
    assert stopped.out


def test_interrupted_answer_ends_with_its_line(engine_dir: Path) -> None:
    code = "os.kill(os.getpid(), signal.SIGINT)"
    prompts = ("--prompt", "one", "--prompt", "two")
    command = ("infer", "--engine-dir", engine_dir, *prompts, *GREEDY)
    stopped = happening("edgespec.backends.ort.runner:OrtRunner.run", 6, code, *command)
    assert stopped.code == 130
    assert stopped.out.count("\n") == 1
    assert stopped.out.endswith("\n")
    assert "stopping after this step" in stopped.err
    assert "what was finished" not in stopped.err


@pytest.mark.parametrize("form", ["json", "pretty", "jsonl", "turns"])
def test_stdin_is_an_input_file_or_a_prompt_set(
    cli: Cli, engine_dir: Path, tmp_path: Path, form: str
) -> None:
    answers = texts(cli, engine_dir, tmp_path, "one", "two")
    requests = json.loads((tmp_path / "input.json").read_text())
    forms = {
        "json": json.dumps(requests),
        "pretty": json.dumps(requests, indent=2),
        "jsonl": '\n{"prompt": "one"}\n{"prompt": "two"}\n',
        "turns": '{"turns": ["one"]}\n{"turns": ["two"]}',
    }
    out = tmp_path / "out.json"
    command = ("infer", "--engine-dir", engine_dir, "--input-file", "-", "--output-file", out)
    done = cli(*command, *GREEDY, stdin=forms[form])
    assert done.code == 0, done.err
    document = json.loads(out.read_text())
    assert [response["output_text"] for response in document["responses"]] == answers
    assert document["input_file"] == "stdin"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "stdin is not JSON"),
        (b"{", "stdin is not JSON"),
        (b"\xff", "stdin is not UTF-8"),
        (b'{"prompt": "one"}\n{"prompt": 5}', "stdin, line 2: prompt is 5"),
        (b'{"requests": []}', "stdin: requests is empty"),
    ],
)
def test_what_stdin_lacks_is_named(
    cli: Cli, engine_dir: Path, tmp_path: Path, text: bytes, said: str
) -> None:
    out = ("--output-file", tmp_path / "out.json")
    refused = cli("infer", "--engine-dir", engine_dir, "--input-file", "-", *out, stdin=text)
    assert refused.code == 3
    assert said in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --input-file, --prompts, --prompt and --input-text"),
        (("--prompt", "a", "--input-file", "x.json"), "give one of"),
        (("--input-file", "x.json", "--no-chat-template"), "goes with --prompt"),
        (("--input-file", "x.json"), "only --prompt does without"),
        (("--prompt", "a", "--json"), "--json needs --output-file"),
        (("--prompt", "a", "--dump-output"), "--dump-output needs --output-file"),
        (("--prompt", "a", "--num-logprobs", 2), "--num-logprobs needs --output-file"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(
    cli: Cli, words: tuple[object, ...], said: str
) -> None:
    refused = cli("infer", "--engine-dir", "nowhere", *words)
    assert (refused.code, said in refused.err) == (2, True), refused.err
