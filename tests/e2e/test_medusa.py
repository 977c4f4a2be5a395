"""What is Medusa's own: heads that build rounds and quantize does not, a checkpoint of base and
heads in one, and Vicuna's conversations, which its first heads were trained with.

What every method does stands in test_methods.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgespec
from edgespec.prompts import SamplingParams
from edgespec.prompts.template import named_template
from tests import shared, toys
from tests.e2e.methods import CHOICES, LIMITS, checkpoints
from tests.e2e.workshop import Cli, asked, cli, infer, responses

__all__ = ["cli"]  # a fixture

REFUSED = 3
SIZES = {"layers": 8, "hidden": 32, "heads": 2, "kv_heads": 2}


def test_heads_are_rounded_by_build_and_quantize_draft_says_so(tmp_path: Path, cli: Cli) -> None:
    shop = checkpoints()
    line = ("--base_model_dir", shop / "base", "--draft_model_dir", shop / "medusa")
    options = ("--quantization", "fp8", "--output_dir", tmp_path / "q", "--allow-pickle")
    refused = cli("quantize", "draft", *line, *options)
    assert refused.code == REFUSED
    assert "a set of Medusa heads, which is not quantized here: data calibrates" in refused.err
    assert "build it with --weights int8 or int4" in refused.err
    onnx, engines = tmp_path / "onnx", tmp_path / "engines"
    assert cli("export", shop / "merged", onnx, "--medusa-base").code == 0
    for part, weights in (
        ("llm", ()),
        ("medusa_draft", ("--weights", "int4", "--weight-block", 32)),
    ):
        line = ("--onnx-dir", onnx / part, "--engine-dir", engines, *LIMITS)
        done = cli("build", *line, *weights)
        assert done.code == 0, done.err
    assert "golden outputs approached" in done.out + done.err
    assert "KV cache" not in done.out + done.err  # of the heads
    done = cli(*infer(engines, tmp_path), "--spec-decode", "--check-lossless")
    assert done.code == 0, done.err


def test_a_merged_checkpoint_is_base_and_heads(tmp_path: Path, cli: Cli) -> None:
    merged = checkpoints() / "merged"
    done = cli("export", merged, tmp_path / "onnx", "--medusa-base")
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {"llm", "medusa_draft"}
    plain = cli("export", merged, tmp_path / "plain")
    assert (plain.code, [p.name for p in (tmp_path / "plain").iterdir()]) == (0, ["llm"])
    found = json.loads(cli("check", merged, "--probe", "--json").out)
    levels = {r["topic"]: r["level"] for r in found["results"]}
    said = {r["topic"]: r["what"] for r in found["results"]}
    assert found["method"] == "medusa"
    assert levels["tensors"] == levels["tokenizer"] == levels["hidden size"] == "ok", said
    assert "from before the base's last norm" in said["probe"]
    seen = cli("inspect", merged, "--json")
    assert json.loads(seen.out)["medusa_head"] is None
    part = cli("inspect", tmp_path / "onnx" / "medusa_draft")
    assert (part.code, "3 heads of 1 residual block" in part.out) == (0, True)


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
