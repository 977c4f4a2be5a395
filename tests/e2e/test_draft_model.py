"""What is a draft model's own: a smaller model drafts for a larger one with the same tokenizer, so
the tokenizers are compared. What every method does stands in test_methods."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests import shared, toys
from tests.e2e import methods
from tests.e2e.workshop import Cli, asked, cli, infer

__all__ = ["cli"]

REFUSED = 3
SIZES = ("--max-input-len", 64, "--max-kv-cache-capacity", 128)


def make_models(path: Path) -> None:
    toys.make_base(path / "base", "qwen3", layers=3, hidden=96, eos=[0])
    toys.make_base(path / "draft", "llama", layers=1, tied=True, seed=1, eos=[0], max_position=96)
    toys.make_base(path / "padded", "llama", layers=1, seed=1, vocab=320, eos=[0])
    shutil.copyfile(path / "base" / "tokenizer.json", path / "padded" / "tokenizer.json")


@pytest.fixture(scope="module")
def shop() -> Path:
    """`base`, and the drafts `draft` and `padded` for it."""
    return shared.made_once("models of the draft model's commands", make_models)


@pytest.fixture(scope="module")
def onnx(shop: Path) -> Path:
    """The plain export of the base, and the draft's, in one directory."""

    def make(out: Path) -> None:
        from edgespec.export.components import ExportOptions, export

        export(str(shop / "base"), out, ExportOptions())
        as_draft = ExportOptions(as_draft="draft_model", base_model_dir=str(shop / "base"))
        export(str(shop / "draft"), out, as_draft)
        eagle = ExportOptions(base_for="eagle3", aux_layers=(1, 2), golden=False)
        export(str(shop / "base"), out / "eagle", eagle)

    return shared.made_once("exports of the draft model's commands", make)


@pytest.fixture
def changed(shop: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the draft with another tokenizer.json."""

    def copy(change: Callable[[dict[str, Any]], object]) -> Path:
        draft = shutil.copytree(shop / "draft", tmp_path / "changed")
        raw = json.loads((draft / "tokenizer.json").read_text())
        change(raw)
        (draft / "tokenizer.json").write_text(json.dumps(raw))
        return draft

    return copy


def swap(raw: dict[str, Any]) -> None:
    """Two tokens have each other's ids."""
    vocab = raw["model"]["vocab"]
    by_id = {i: token for token, i in vocab.items()}
    vocab[by_id[40]], vocab[by_id[50]] = 50, 40


def drop_last(raw: dict[str, Any]) -> None:
    """The last token is not there, nor what it is merged from."""
    vocab = raw["model"]["vocab"]
    last = max(vocab, key=lambda token: vocab[token])
    del vocab[last]
    raw["model"]["merges"].pop()


def test_base_that_emits_hidden_states_takes_a_draft_model_too(
    onnx: Path, tmp_path: Path, cli: Cli
) -> None:
    for part in ("eagle/llm", "draft_model"):
        built = cli("build", "--onnx-dir", onnx / part, "--engine-dir", tmp_path / "e", *SIZES)
        assert built.code == 0, built.err
    done = cli(*infer(tmp_path / "e", tmp_path, asked("one")), "--spec-decode", "--check-lossless")
    assert done.code == 0, done.err
    assert "with the draft model" in done.err


def test_quantized_embedding_of_a_tied_draft_is_its_own(
    onnx: Path, tmp_path: Path, cli: Cli
) -> None:
    """The draft's lm_head serves as its embedding, and that of the base is another table."""
    for part, weights in (("llm", "fp32"), ("draft_model", "int4")):
        line = ("--onnx-dir", onnx / part, "--engine-dir", tmp_path / "e", "--weights", weights)
        assert cli("build", *line, *SIZES).code == 0
    assert not (tmp_path / "e" / "draft_embedding.safetensors").exists()
    done = cli(*infer(tmp_path / "e", tmp_path, asked("one")), "--spec-decode", "--check-lossless")
    assert done.code == 0, done.err


def test_quantized_checkpoint_drafts_as_well(
    shop: Path, onnx: Path, tmp_path: Path, cli: Cli
) -> None:
    small, engines = tmp_path / "small", tmp_path / "engines"
    line = ("quantize", "llm", "--model-dir", shop / "draft", "--quantization", "mxfp8")
    made = cli(*line, "--output-dir", small)
    assert made.code == 0, made.err
    done = cli("export", small, tmp_path, "--draft-model", "--base-model-dir", shop / "base")
    assert done.code == 0, done.err
    assert "mxfp8 in blocks of 32" in done.out
    for part in (onnx / "llm", tmp_path / "draft_model"):
        assert cli("build", "--onnx-dir", part, "--engine-dir", engines, *SIZES).code == 0
    done = cli(*infer(engines, tmp_path, asked("one")), "--spec-decode", "--check-lossless")
    assert done.code == 0, done.err


@pytest.mark.parametrize("decoding_type", ["Draft_Target", "DraftTarget"])
def test_speculative_config_names_it_as_tensorrt_llm_does(decoding_type: str) -> None:
    engines, draft = methods.built("draft_model"), str(methods.checkpoints() / "draft_model")
    config = {"decoding_type": decoding_type, "max_draft_len": 2, "speculative_model": draft}
    with edgespec.load(engines, speculative_config=config) as engine:
        sampling = edgespec.SamplingParams(temperature=0, max_generate_length=12)
        drafted = engine.generate("one two", sampling)
        assert max(drafted.metrics.per_step_drafted) == 2
        assert drafted.token_ids == engine.plainly("one two", sampling).token_ids
    made = edgespec.DraftTargetDecodingConfig(max_draft_len=2)
    with edgespec.load(engines, speculative_config=made) as engine:
        assert engine.method == "draft_model"


# The tokenizers


def test_other_tokens_are_refused_with_the_first_one(
    shop: Path, changed: Callable[..., Path], tmp_path: Path, cli: Cli
) -> None:
    draft = changed(swap)
    tokens = {
        i: token
        for token, i in json.loads((shop / "base" / "tokenizer.json").read_text())["model"][
            "vocab"
        ].items()
    }
    said = f"the first of them 40: {tokens[50]!r} to the draft, {tokens[40]!r} to the base"
    line = ("export", draft, tmp_path / "out", "--draft-model", "--base-model-dir", shop / "base")
    refused = cli(*line)
    assert refused.code == REFUSED
    assert "2 of 256 ids mean other tokens" in refused.err
    assert said in refused.err
    assert not (tmp_path / "out").exists()
    told = cli("check", shop / "base", draft)
    assert told.code == REFUSED
    assert said in told.out


def test_missing_tokens_are_a_warning_and_export_works(
    shop: Path, changed: Callable[..., Path], tmp_path: Path, cli: Cli
) -> None:
    draft = changed(drop_last)
    told = cli("check", shop / "base", draft)
    assert told.code == 0, told.out
    assert "the draft's tokenizer lacks 1 token, from 255 on" in told.out
    line = ("export", draft, tmp_path / "out", "--draft-model", "--base-model-dir", shop / "base")
    done = cli(*line, "--no-golden")
    assert done.code == 0
    assert "the draft's tokenizer lacks 1 token of the base" in done.out


def test_draft_without_a_tokenizer_is_refused(shop: Path, tmp_path: Path, cli: Cli) -> None:
    draft = shutil.copytree(shop / "draft", tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    line = ("export", draft, tmp_path / "out", "--draft-model", "--base-model-dir", shop / "base")
    refused = cli(*line)
    assert refused.code == REFUSED
    assert f"{draft} has no tokenizer.json: its tokens cannot be compared" in refused.err


# check


def test_check_says_how_the_two_compare(shop: Path, cli: Cli) -> None:
    told = cli("check", shop / "base", shop / "draft")
    assert told.code == 0, told.out
    lines = {line[9:23].strip(): line for line in told.out.splitlines() if line[:9].strip()}
    assert "256 ids compared, each means the same to both" in lines["tokenizer"]
    assert "256 rows in both" in lines["vocabulary"]
    assert "both end an answer at 0" in lines["special tokens"]
    assert lines["context"].startswith("warning")
    assert "the draft was made for 96 tokens, the base for 512" in lines["context"]
    assert lines["size"].startswith("ok")
    assert "Draft model: fits, 1 warning" in told.out
    refused = cli("check", shop / "base", shop / "draft", "--aux-layers", "1,2")
    assert (refused.code, "Leave --aux-layers out" in refused.out) == (REFUSED, True)


def test_check_of_padded_vocabularies_other_ends_and_a_large_draft(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    told = cli("check", shop / "base", shop / "padded").out
    assert "256 rows in the base, 320 in the draft: the first 256 are shared" in told
    other = shutil.copytree(shop / "base", tmp_path / "other")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((other / name).read_text())
        (other / name).write_text(json.dumps(config | {"eos_token_id": 7}))
    told = cli("check", shop / "base", other)
    assert told.code == 0, told.out
    assert "an answer of the base ends at 0, one of the draft at 7" in told.out
    assert "the draft is as large as its base" in told.out


def test_probe_counts_how_often_both_agree(shop: Path, cli: Cli) -> None:
    """A model agrees with itself everywhere; one of other weights no more than by chance."""
    found = json.loads(cli("check", shop / "base", shop / "base", "--probe", "--json").out)
    assert found["probe"]["shares"][0]["share"] == 1.0
    other = cli("check", shop / "base", shop / "draft", "--probe")
    assert other.code == REFUSED
    assert "the draft was not made for this base" in other.out


@pytest.mark.parametrize("first", ["llm", "draft_model"])
def test_draft_for_another_base_is_refused_at_build(
    onnx: Path, shop: Path, tmp_path: Path, cli: Cli, first: str
) -> None:
    other = toys.make_base(tmp_path / "other", "qwen3", layers=3, hidden=96, eos=[0], seed=9)
    assert cli("export", other, tmp_path / "onnx", "--no-golden").code == 0
    parts = {"llm": tmp_path / "onnx" / "llm", "draft_model": onnx / "draft_model"}
    engines = tmp_path / "engines"
    assert cli("build", "--onnx-dir", parts.pop(first), "--engine-dir", engines, *SIZES).code == 0
    (second,) = parts.values()
    refused = cli("build", "--onnx-dir", second, "--engine-dir", engines, *SIZES)
    assert refused.code == REFUSED
    assert "another base checkpoint" in refused.err
