"""Medusa heads as they are published, from a pickled file and from a merged checkpoint to answers,
with the flags of TensorRT-LLM's Medusa example; and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import edgespec
from edgespec.prompts import SamplingParams
from edgespec.prompts.template import named_template
from tests import shared, toys
from tests.e2e.workshop import Cli, asked, check_rejection, check_tuning, cli, infer, responses

__all__ = ["cli"]  # a fixture

USAGE, REFUSED = 2, 3
SIZES = {"layers": 8, "hidden": 32, "heads": 2, "kv_heads": 2}
LIMITS = ("--max-input-len", 48, "--max-kv-cache-capacity", 96)
CHOICES = "[[0], [0, 0], [1], [1, 0], [2], [0, 0, 0], [1, 0, 2]]"  # 7 nodes, 3 levels


def make_pair(path: Path) -> None:
    base = toys.make_base(path / "base", "llama", **SIZES)
    toys.make_medusa(path / "heads", base, "pickle", heads=5, declared=2, dtype="float16")
    toys.make_medusa(path / "merged", base, "merged", seed=2)
    toys.make_medusa(path / "shared-head", base, "shared-head")
    toys.make_eagle1(path / "eagle1", base)
    other = toys.make_base(path / "other", "llama", **SIZES | {"hidden": 64})
    toys.make_medusa(path / "foreign", other)


@pytest.fixture(scope="module")
def pair() -> Path:
    return shared.made_once("a base and its Medusa heads", make_pair)


@pytest.fixture(scope="module")
def engines(pair: Path) -> Path:
    """Made by the commands that a user types: base and heads go to one directory."""
    from edgespec.cli.main import run

    def make(path: Path) -> None:
        base, heads, onnx = str(pair / "base"), str(pair / "heads"), str(path / "onnx")
        lines = [
            ["export", base, onnx, "--medusa-base"],
            ["export", heads, onnx, "--base-model-dir", base, "--allow-pickle"],
        ]
        for part, flag in (("llm", "--spec-base"), ("medusa_draft", "--spec-draft")):
            lines.append(["build", "--onnx-dir", f"{onnx}/{part}", flag, *map(str, LIMITS)])
            lines[-1] += ["--engine-dir", str(path / "engines")]
        for line in lines:
            assert run(line) == 0

    return shared.made_once("engines of Medusa heads", make) / "engines"


def test_it_is_tuned(engines: Path, tmp_path: Path, cli: Cli) -> None:
    found = check_tuning(cli, engines, tmp_path)
    assert {"up to chain of 5", "up to tree 2/2/4"} <= {row["words"] for row in found["ranked"]}


def drafting(engines: Path, tmp_path: Path, *flags: object) -> list[object]:
    return [*infer(engines, tmp_path, asked("one two")), "--spec-decode", *flags]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "drafting a chain of Medusa heads: top-k 1, step 5, verify size 6"),
        (
            ("--max-draft-len", 63),
            "drafting a tree of Medusa heads: top-k 10, a static tree of 4 levels, verify size 64",
        ),
        (
            ("--medusa_choices", CHOICES),
            "drafting a tree of Medusa heads: top-k 3, a static tree of 3 levels, verify size 8",
        ),
        (
            ("--medusa-choices", "mc_sim_7b_63", "--num_medusa_heads", 4, "--max_draft_len", 63),
            "drafting a tree of Medusa heads: top-k 10, a static tree of 4 levels, verify size 64",
        ),
        (
            ("--num_medusa_heads", 2),
            "drafting a tree of Medusa heads: top-k 10, a static tree of 2 levels, verify size 39",
        ),
        (
            ("--spec-draft-top-k", 3, "--spec-draft-step", 4, "--spec-verify-size", 12),
            "drafting a tree of Medusa heads: top-k 3, step 4, verify size 12",
        ),
    ],
)
def test_trees_are_those_of_the_flags_and_lose_nothing(
    engines: Path, tmp_path: Path, cli: Cli, flags: tuple[object, ...], line: str
) -> None:
    done = cli(*drafting(engines, tmp_path, *flags, "--check-lossless"))
    assert done.code == 0, done.err
    assert line in done.err
    assert "lossless" in done.out
    (answer,) = responses(tmp_path)
    assert len(answer["output_ids"]) == 8


def test_rejection_draws_drafts_and_keeps_the_distribution(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    check_rejection(cli, engines, tmp_path)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ("--medusa-choices", CHOICES, "--num-medusa-heads", 2),
            USAGE,
            ["3 levels deep", "--num-medusa-heads 3"],
        ),
        (
            ("--medusa-choices", CHOICES, "--num-eagle-layers", 3),
            USAGE,
            ["--num-eagle-layers", "leave one of the two out"],
        ),
        (("--medusa-choices", "[[1, 0]]"), USAGE, ["[1, 0] has no parent"]),
        (("--medusa-choices", CHOICES, "--max-draft-len", 6), USAGE, ["7 nodes"]),
        (
            ("--medusa-choices", str([[0] * i for i in range(1, 7)])),
            REFUSED,
            ["6 levels deep", "5 Medusa heads"],
        ),
        (
            ("--medusa-choices", str([[i] for i in range(64)])),
            REFUSED,
            ["65 nodes, the root included", "--max-verify-tree-size 65"],
        ),
        (("--spec-draft-step", 6), REFUSED, ["5 Medusa heads", "Set it to 5"]),
        (
            ("--spec-draft-top-k", 2, "--spec-draft-step", 1, "--spec-verify-size", 4),
            REFUSED,
            ["3"],
        ),
    ],
)
def test_trees_that_cannot_be_are_refused(
    engines: Path, tmp_path: Path, cli: Cli, flags: tuple[object, ...], code: int, words: list[str]
) -> None:
    done = cli(*drafting(engines, tmp_path, *flags))
    assert done.code == code, done.err
    for word in words:
        assert word in done.err
    assert not (tmp_path / "output.json").exists()


def test_a_config_that_counts_otherwise_is_noted(pair: Path, tmp_path: Path, cli: Cli) -> None:
    options = ("--base-model-dir", pair / "base", "--allow-pickle")
    done = cli("export", pair / "heads", tmp_path, *options)
    assert done.code == 0, done.err
    assert "5 heads of 1 residual block by the file; its config.json says 2" in done.err + done.out
    checked = cli("check", pair / "base", pair / "heads", "--allow-pickle", "--json")
    found = {r["topic"]: r["level"] for r in json.loads(checked.out)["results"]}
    assert (checked.code, found["heads"], found["hidden size"]) == (0, "warning", "ok")


def test_pickled_heads_want_a_flag(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "heads", tmp_path, "--base-model-dir", pair / "base")
    assert done.code == REFUSED
    assert "--allow-pickle" in done.err
    seen = cli("inspect", pair / "heads")
    assert (seen.code, "medusa_lm_head.pt" in seen.out) == (0, True)


def test_heads_without_matrices_of_logits_need_their_base(
    pair: Path, tmp_path: Path, cli: Cli
) -> None:
    done = cli("export", pair / "shared-head", tmp_path)
    assert (done.code, "--base-model-dir" in done.err) == (REFUSED, True)


def test_another_base_is_refused(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "foreign", tmp_path, "--base-model-dir", pair / "base")
    assert done.code == REFUSED
    assert "hidden states of width 64" in done.err


def test_a_base_of_another_draft_is_refused(pair: Path, tmp_path: Path, cli: Cli) -> None:
    base, heads = tmp_path / "base", tmp_path / "heads"
    assert cli("export", pair / "base", base, "--eagle1-base").code == 0
    assert cli("export", pair / "merged", heads, "--medusa-base").code == 0
    engines = ("--engine-dir", tmp_path / "engines", *LIMITS)
    assert cli("build", "--onnx-dir", base / "llm", "--spec-base", *engines).code == 0
    done = cli("build", "--onnx-dir", heads / "medusa_draft", "--spec-draft", *engines)
    assert done.code == REFUSED
    assert "a set of Medusa heads" in done.err
    assert "--medusa-base" in done.err


def test_heads_are_rounded_by_build_and_quantize_draft_says_so(
    pair: Path, tmp_path: Path, cli: Cli
) -> None:
    line = ("--base_model_dir", pair / "base", "--draft_model_dir", pair / "heads")
    options = ("--quantization", "fp8", "--output_dir", tmp_path / "q", "--allow-pickle")
    refused = cli("quantize", "draft", *line, *options)
    assert refused.code == REFUSED
    assert "a set of Medusa heads, which is not quantized here: data calibrates" in refused.err
    assert "build it with --weights int8 or int4" in refused.err
    onnx = tmp_path / "onnx"
    merged = cli("export", pair / "merged", onnx, "--medusa-base")
    assert merged.code == 0, merged.err
    engines, weights = tmp_path / "engines", ("--weights", "int8", "--weight-block", 0)
    for part in ("llm", "medusa_draft"):
        line = ("--onnx-dir", onnx / part, "--engine-dir", engines, *LIMITS)
        done = cli("build", *line, *(weights if part != "llm" else ()))
        assert done.code == 0, done.err
    done = cli(*drafting(engines, tmp_path, "--check-lossless"))
    assert done.code == 0, done.err


def test_a_merged_checkpoint_is_base_and_heads(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "merged", tmp_path / "onnx", "--medusa-base")
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {"llm", "medusa_draft"}
    plain = cli("export", pair / "merged", tmp_path / "plain")
    assert (plain.code, [p.name for p in (tmp_path / "plain").iterdir()]) == (0, ["llm"])
    checked = cli("check", pair / "merged", "--probe", "--json")
    found = json.loads(checked.out)
    levels = {r["topic"]: r["level"] for r in found["results"]}
    said = {r["topic"]: r["what"] for r in found["results"]}
    assert found["method"] == "medusa"
    assert levels["tensors"] == levels["tokenizer"] == levels["hidden size"] == "ok", said
    assert "from before the base's last norm" in said["probe"]
    seen = cli("inspect", pair / "merged", "--json")
    assert json.loads(seen.out)["medusa_head"] is None
    part = cli("inspect", tmp_path / "onnx" / "medusa_draft")
    assert (part.code, "3 heads of 1 residual block" in part.out) == (0, True)


def test_heads_are_built_of_low_bit_weights_and_have_no_cache(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    heads = ("--onnx-dir", engines.parent / "onnx" / "medusa_draft", "--spec-draft", *LIMITS)
    low = ("--weights", "int4", "--weight-block", 32, "--max-batch-size", 3)
    done = cli("build", *heads, *low, "--engine-dir", tmp_path / "engines")
    assert (done.code, "golden outputs approached" in done.out + done.err) == (0, True), done.err
    assert "KV cache" not in done.out + done.err


def test_one_command_from_the_heads_to_an_answer(
    pair: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    said = ("--prompt", "a", "--temperature", 0, "--max-generate-length", 6)
    limits = ("--max-input-len", 48, "--max-kv-cache-capacity", 64)
    plain = cli("run", pair / "base", *said, *limits, "--no-spec-decode")
    for line in (("run", pair / "base", "--draft", pair / "shared-head"), ("run", pair / "merged")):
        done = cli(*line, *said, *limits, "--medusa-choices", CHOICES)
        assert (done.code, done.out) == (0, plain.out), done.err
        assert "a static tree of 3 levels" in done.err


def test_heads_of_several_forms_are_refused_by_name(pair: Path, tmp_path: Path, cli: Cli) -> None:
    state = torch.load(pair / "heads" / "medusa_lm_head.pt", weights_only=True)
    (tmp_path / "config.json").write_text("{}")
    torch.save(
        {k: v for k, v in state.items() if k != "3.1.weight"}, tmp_path / "medusa_lm_head.pt"
    )
    done = cli("check", pair / "base", tmp_path, "--allow-pickle")
    assert (done.code, "not all of one form" in done.err + done.out) == (REFUSED, True)


# ---- a checkpoint as Vicuna's: pickled weights, tokenizer.model, no chat template

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions."
)
PROMPTS = {
    "vicuna": [f"{SYSTEM} USER: one two ASSISTANT:"],
    "llama-2": ["[INST] one two [/INST]"],
}


@pytest.fixture(scope="module")
def vicuna() -> Path:
    """Base and heads as they are published, and their engines."""
    from edgespec.cli.main import run

    def make(path: Path) -> None:
        base = toys.make_base(path / "vicuna-0b", "llama", **SIZES, vocab=400)
        toys.make_medusa(path / "heads", base, "pickle", heads=3, dtype="float16")
        toys.write_pickle(toys.make_sentencepiece(base, vocab=400))
        pair = ("--base-model-dir", str(base), "--allow-pickle")
        onnx = str(path / "onnx")
        assert run(["export", str(base), onnx, "--medusa-base", "--allow-pickle"]) == 0
        assert run(["export", str(path / "heads"), onnx, *pair]) == 0
        limits = ("--max-input-len", "192", "--max-kv-cache-capacity", "256")
        for part, flag in (("llm", "--spec-base"), ("medusa_draft", "--spec-draft")):
            line = ["build", "--onnx-dir", f"{onnx}/{part}", flag, *limits]
            assert run([*line, "--engine-dir", str(path / "engines")]) == 0

    return shared.made_once("a checkpoint as Vicuna's", make)


@pytest.mark.parametrize("name", PROMPTS)
def test_conversations_are_written_as_the_model_was_trained(
    vicuna: Path, tmp_path: Path, cli: Cli, name: str
) -> None:
    import sentencepiece

    model = str(vicuna / "vicuna-0b" / "tokenizer.model")
    wanted = [1, *sentencepiece.SentencePieceProcessor(model_file=model).encode(PROMPTS[name][0])]
    line = infer(vicuna / "engines", tmp_path, asked("one two"))
    done = cli(*line, "--chat-template", name, "--medusa-choices", CHOICES, "--spec-decode")
    assert done.code == 0, done.err
    with edgespec.load(vicuna / "engines") as engine:
        engine.tokenizer.template = named_template(name, vicuna / "engines")
        talk = [edgespec.Message("user", "one two")]
        assert engine.request(talk, SamplingParams()).prompt_ids == wanted
    (drafted,) = responses(tmp_path)
    plain = cli(*line, "--chat-template", name)
    assert plain.code == 0, plain.err
    assert responses(tmp_path)[0]["output_ids"] == drafted["output_ids"]


def test_a_conversation_without_a_format_is_told_how_to_name_one(
    vicuna: Path, tmp_path: Path, cli: Cli
) -> None:
    done = cli(*infer(vicuna / "engines", tmp_path, asked("one two")))
    assert done.code == 5
    assert "--chat-template (chatml, " in done.err


# ---- with what other parts of the loop do


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("{decoding_type: Medusa}", "a static tree of 4 levels, verify size 64"),
        (
            "{decoding_type: Medusa, medusa_choices: [[0], [0, 0], [1]], num_medusa_heads: 2}",
            "top-k 2, a static tree of 2 levels, verify size 4",
        ),
        (
            "{decoding_type: Medusa, num_medusa_heads: 1, max_draft_len: 10}",
            "top-k 10, a static tree of 1 level, verify size 11",
        ),
    ],
)
def test_a_speculative_config_names_the_tree(
    engines: Path, tmp_path: Path, cli: Cli, block: str, line: str
) -> None:
    (tmp_path / "config.yaml").write_text(f"speculative_config: {block}\n")
    said = infer(engines, tmp_path, asked("one two"))
    done = cli(*said, "--config", tmp_path / "config.yaml", "--check-lossless")
    assert done.code == 0, done.err
    assert line in done.err


def test_a_config_that_contradicts_itself_is_refused(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    block = "{decoding_type: Medusa, medusa_choices: [[0], [0, 0]], max_draft_len: 1}"
    (tmp_path / "config.yaml").write_text(f"speculative_config: {block}\n")
    done = cli(*infer(engines, tmp_path, asked("a")), "--config", tmp_path / "config.yaml")
    assert (done.code, "the choices have 2 nodes" in done.err) == (USAGE, True)


@pytest.mark.parametrize("rule", ["typical", "rejection"])
def test_other_rules_of_acceptance_take_its_drafts(
    engines: Path, tmp_path: Path, cli: Cli, rule: str
) -> None:
    flags = ("--medusa-choices", CHOICES) if rule == "typical" else ("--spec-draft-step", 3)
    done = cli(*drafting(engines, tmp_path, *flags, "--acceptance", rule, "--temperature", 0.8))
    assert done.code == 0, done.err
    (answer,) = responses(tmp_path)
    assert len(answer["output_ids"]) == 8


def test_a_chat_of_two_turns_says_what_plain_decoding_says(vicuna: Path) -> None:
    """Each turn goes on behind the last one's rows; the heads read the state behind them."""
    line = [sys.executable, "-m", "edgespec.cli.main", "chat", "--chat-template", "vicuna"]
    line += ["--engine-dir", str(vicuna / "engines"), "--temperature", "0"]
    line += ["--max-generate-length", "8"]
    said = []
    for flags in (["--medusa-choices", CHOICES], ["--no-spec-decode"]):
        done = subprocess.run(
            [*line, *flags], input=b"Hi\n\nOn?\n", capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert said[0].strip()
