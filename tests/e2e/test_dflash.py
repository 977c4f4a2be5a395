"""What is a DFlash pair's own: its tree base, requests that think, a draft of ModelOpt's formats,
and drafts that are not whole.

Knows the pair of methods.py; whoever changes it takes a copy. What every method does stands in
test_methods.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import toys
from tests.e2e.methods import LIMITS, built, checkpoints, exported
from tests.e2e.workshop import Cli, asked, cli, infer

__all__ = ["cli"]  # a fixture

REFUSED = 3


@pytest.mark.usefixtures("needs_modelopt")
def test_the_guides_quantised_draft_joins_its_base(tmp_path: Path, cli: Cli) -> None:
    shop = checkpoints()
    pair = ["--base_model_dir", shop / "base", "--draft_model_dir", shop / "dflash"]
    formats = ["--quantization", "nvfp4", "--lm_head_quantization", "nvfp4"]
    line = ["quantize", "draft", *pair, "--output_dir", tmp_path / "q", *formats]
    done = cli(*line, "--num-samples", 1, "--calib-seq-len", 32)
    assert done.code == 0, done.err
    assert "an lm_head of its own" in done.out
    flags = ["--dflash-draft", "--dflash-draft-dir", tmp_path / "q"]
    assert cli("export", shop / "base", tmp_path, *flags).code == 0
    engines = shutil.copytree(built("dflash"), tmp_path / "engines")
    done = cli("build", "--onnx-dir", tmp_path / "dflash_draft", "--engine-dir", engines, *LIMITS)
    assert done.code == 0, done.err
    assert cli(*infer(engines, tmp_path), "--spec-decode", "--check-lossless").code == 0


def test_tree_base_is_the_same_base(tmp_path: Path, cli: Cli) -> None:
    shop = checkpoints()
    flags = ["--dflash-tree-base", "--dflash-draft-dir", shop / "dflash"]
    done = cli("export", shop / "base", tmp_path, *flags)
    assert done.code == 0
    one, other = (path / "llm" / "model.onnx" for path in (tmp_path, exported("dflash")))
    assert one.read_bytes() == other.read_bytes()


def test_thinking_that_the_draft_was_not_trained_with_is_told_once(
    tmp_path: Path, cli: Cli
) -> None:
    thinking = asked("one", enable_thinking=True)
    line = infer(built("dflash"), tmp_path, thinking, asked("two"), thinking)
    done = cli(*line, "--spec-decode")
    assert done.err.count("2 of 3 requests have enable_thinking on") == 1
    assert "fewer of them will be accepted" in done.err
    assert "enable_thinking" not in cli(*line).err  # without drafts
    done = cli(*infer(built("dflash"), tmp_path, asked("two")), "--spec-decode")
    assert "enable_thinking on" not in done.err


@pytest.mark.parametrize(
    ("part", "flags", "words"),
    [
        ("dflash_draft", ("--max-draft-tree-size", 7), ["of 8", "--max-draft-tree-size 8"]),
        ("", (), ["dflash_draft"]),  # the directory above
    ],
)
def test_builds_that_cannot_be_are_refused(
    tmp_path: Path, cli: Cli, part: str, flags: tuple[object, ...], words: list[str]
) -> None:
    onnx = exported("dflash") / part
    done = cli("build", "--onnx-dir", onnx, "--engine-dir", tmp_path / "engines", *flags)
    assert done.code == REFUSED
    assert all(word in done.err for word in words), done.err
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("flag", ["--dflash-base", "--dflash-draft"])
@pytest.mark.parametrize("cut", ["weights", "a layer", "no weights", "the mask token"])
def test_a_cropped_draft_directory(tmp_path: Path, cli: Cli, flag: str, cut: str) -> None:
    draft = Path(shutil.copytree(checkpoints() / "dflash", tmp_path / "draft"))
    weights = draft / "model.safetensors"
    config = json.loads((draft / "config.json").read_text())
    said = str(draft)
    if cut == "weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif cut == "a layer":
        config["num_hidden_layers"] = 3
    elif cut == "no weights":
        weights.unlink()
    else:
        config["dflash_config"]["mask_token_id"] = 256
        said = "mask_token_id 256"
    (draft / "config.json").write_text(json.dumps(config))
    line = ["export", checkpoints() / "base", tmp_path / "out", flag]
    done = cli(*line, "--dflash-draft-dir", draft)
    assert done.code == REFUSED
    assert said in done.err
    assert len(done.err.splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_a_draft_that_reads_other_layers_joins_no_engine(tmp_path: Path, cli: Cli) -> None:
    base = checkpoints() / "base"
    draft = toys.make_dflash(tmp_path / "draft", base, aux_layers=(1, 4), block_size=8)
    assert cli("export", draft, tmp_path, "--base-model-dir", base).code == 0
    engines = shutil.copytree(built("dflash"), tmp_path / "engines")
    done = cli("build", "--onnx-dir", tmp_path / "dflash_draft", "--engine-dir", engines, *LIMITS)
    assert done.code == REFUSED
    assert all(word in done.err for word in ("[1, 5]", "[0, 3]", "--dflash-base")), done.err
