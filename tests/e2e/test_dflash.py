"""A DFlash pair as a user types it: the guide's commands, and what is said of input that cannot be
right.

The commands run in this process on a toy pair that is exported and built once; whoever tampers
takes a copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import file_names
from edgespec.cli.main import run
from tests import toys
from tests.e2e.workshop import Cli, Outcome, asked, cli, infer, process

__all__ = ["cli"]  # a fixture

REFUSED = 3
BLOCK = 8
SIZES = ["--maxBatchSize", 1, "--maxInputLen", 64, "--maxKVCacheCapacity", 128]


@dataclass(frozen=True)
class Shop:
    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def engines(self) -> Path:
        return self.root / "engines"


def call(*args: object) -> None:
    assert run([str(arg) for arg in args]) == 0


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Everything up to the engines, in the order and the spelling of the guide."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    toys.make_base(shop.base, "qwen3", layers=8)
    settings = json.loads((shop.base / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if enable_thinking %}think{% endif %}"
    (shop.base / "tokenizer_config.json").write_text(json.dumps(settings))
    toys.make_dflash(shop.draft, shop.base, block_size=BLOCK)
    onnx = shop.root / "onnx"
    call(
        "export", shop.base, onnx / "base_export", "--dflash-base", "--dflash-draft-dir", shop.draft
    )
    call(
        "export",
        shop.base,
        onnx / "draft_export",
        "--dflash-draft",
        "--dflash-draft-dir",
        shop.draft,
    )
    shutil.copytree(onnx / "base_export" / "llm", onnx / "base")
    shutil.copytree(onnx / "draft_export" / "dflash_draft", onnx / "draft")
    made = ["--engineDir", shop.engines, *SIZES]
    call("build", "--onnxDir", onnx / "base", *made, "--maxVerifyTreeSize", 16, "--specBase")
    call("build", "--onnxDir", onnx / "draft", *made, "--maxDraftTreeSize", 16, "--specDraft")
    return shop


Refused = Callable[..., Outcome]


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Refused:
    """Run one command line that must fail with these words, one line and one remedy, and leave
    nothing behind."""

    def call(words: list[object], *args: object) -> Outcome:
        before = {path for path in tmp_path.rglob("*") if path.is_file()}
        found = cli(*args)
        assert found.code == REFUSED, found.err
        lines = [line for line in found.err.splitlines() if not line.startswith("drafting ")]
        assert len(lines) == 2, found.err
        assert lines[0].startswith("error: ")
        assert len(lines[1]) > 10
        for word in words:
            assert str(word) in found.err
        assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
        return found

    return call


def answers(path: Path) -> list[dict[str, Any]]:
    responses: list[dict[str, Any]] = json.loads((path / "output.json").read_text())["responses"]
    return responses


# The guide


def test_the_guides_infer_is_lossless(shop: Shop, tmp_path: Path) -> None:
    requests = [asked("one two"), asked("three", temperature=1.0, seed=4)]
    line = infer(shop.engines, tmp_path, *requests, max_generate_length=20)
    sizes = ["--specDraftTopK", 1, "--specDraftStep", 1, "--specVerifySize", BLOCK]
    done = process(*line, "--specDecode", *sizes, "--check-lossless")
    assert done.code == 0, done.err
    assert f"drafting a chain: top-k 1, blocks of {BLOCK}, verify size {BLOCK}" in done.err
    assert [len(answer["output_ids"]) for answer in answers(tmp_path)] == [20, 20]
    assert [line.split() for line in done.out.splitlines() if line.startswith("lossless")] == [
        ["lossless", "yes"]
    ]


def test_a_tree_and_the_default_are_lossless_too(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    line = infer(shop.engines, tmp_path, max_generate_length=20)
    for sizes, said in (
        ([], f"a chain: top-k 1, blocks of {BLOCK}, verify size {BLOCK} (the default on a CPU)"),
        (["--spec-draft-top-k", 4], f"a tree: top-k 4, blocks of {BLOCK}, verify size 16"),
    ):
        done = cli(*line, "--spec-decode", *sizes, "--check-lossless")
        assert done.code == 0, done.err
        assert said in done.err


def test_metrics_count_blocks_by_their_levels(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    done = cli(*infer(shop.engines, tmp_path, max_generate_length=20), "--spec-decode", "--json")
    assert done.code == 0
    assert f'"num_spec_tokens": {BLOCK - 1}' in json.dumps(answers(tmp_path))


@pytest.mark.usefixtures("needs_modelopt")
def test_the_guides_quantised_draft_joins_its_base(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    pair = [
        "--base_model_dir",
        shop.base,
        "--draft_model_dir",
        shop.draft,
        "--output_dir",
        tmp_path / "q",
    ]
    formats = ["--quantization", "nvfp4", "--lm_head_quantization", "nvfp4"]
    done = cli("quantize", "draft", *pair, *formats, "--num-samples", 1, "--calib-seq-len", 32)
    assert done.code == 0, done.err
    assert "an lm_head of its own" in done.out
    assert (
        cli(
            "export", shop.base, tmp_path, "--dflash-draft", "--dflash-draft-dir", tmp_path / "q"
        ).code
        == 0
    )
    engines = shutil.copytree(shop.engines, tmp_path / "engines")
    done = cli("build", "--onnx-dir", tmp_path / "dflash_draft", "--engine-dir", engines, *SIZES)
    assert done.code == 0, done.err
    line = infer(engines, tmp_path, max_generate_length=12)
    assert cli(*line, "--spec-decode", "--check-lossless").code == 0


def test_a_draft_is_recognised_by_itself(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", shop.draft, tmp_path, "--base-model-dir", shop.base)
    assert done.code == 0
    assert "DFlash draft, z-lab layout" in done.out
    one, other = (
        json.loads((path / "dflash_draft" / "config.json").read_text())
        for path in (tmp_path, shop.root / "onnx" / "draft_export")
    )
    assert one == other
    assert (
        cli("export", shop.base, tmp_path, "--dflash-draft", "--dflash-draft-dir", shop.draft).code
        == 0
    )
    assert "already there" in cli("export", shop.draft, tmp_path, "--base-model-dir", shop.base).out


def test_configs_have_the_mirrored_tools_keys(shop: Shop) -> None:
    base, draft = (
        json.loads((shop.root / "onnx" / part / "config.json").read_text())
        for part in ("base", "draft")
    )
    assert (base["spec_decode_type"], draft["spec_decode_type"]) == ("dflash", "dflash")
    assert base["dflash_config"] == {
        "target_layer_ids": [1, 5],
        "block_size": BLOCK,
        "mask_token_id": 255,
    }
    assert draft["dflash_config"].items() >= base["dflash_config"].items()
    assert not (shop.engines / file_names.D2T).exists()


def test_tree_base_is_the_same_base_and_says_so(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    done = cli(
        "export", shop.base, tmp_path, "--dflash-tree-base", "--dflash-draft-dir", shop.draft
    )
    assert done.code == 0
    assert "--dflash-tree-base is --dflash-base here" in done.out
    graph = "model.onnx"
    assert (tmp_path / "llm" / graph).read_bytes() == (
        shop.root / "onnx" / "base" / graph
    ).read_bytes()


def test_inspect_tells_of_every_stage(shop: Shop, cli: Cli) -> None:
    for path, said in (
        (
            shop.root / "onnx" / "draft",
            "8 tokens, mask token 255, behind the outputs of layers 1, 5",
        ),
        (
            shop.root / "onnx" / "base",
            "8 tokens, mask token 255, behind the outputs of layers 1, 5",
        ),
        (shop.engines, "pairing"),
    ):
        done = cli("inspect", path)
        assert done.code == 0, done.err
        assert said in done.out


def test_thinking_that_the_draft_was_not_trained_with_is_told_once(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    thinking = asked("one", enable_thinking=True)
    line = infer(shop.engines, tmp_path, thinking, asked("two"), thinking)
    done = cli(*line, "--spec-decode")
    assert done.err.count("2 of 3 requests have enable_thinking on") == 1
    assert "fewer of them will be accepted" in done.err
    assert "enable_thinking" not in cli(*line).err  # without drafts
    assert (
        "enable_thinking on"
        not in cli(*infer(shop.engines, tmp_path, asked("two")), "--spec-decode").err
    )


# What cannot be


@pytest.mark.parametrize("flag", ["--dflash-base", "--dflash-tree-base", "--dflash-draft"])
def test_a_flag_without_the_draft(shop: Shop, tmp_path: Path, refused: Refused, flag: str) -> None:
    refused(["--dflash-draft-dir", "which layers"], "export", shop.base, tmp_path / "out", flag)


def test_the_draft_without_a_flag(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    refused(
        ["--dflash-base"], "export", shop.base, tmp_path / "out", "--dflash-draft-dir", shop.draft
    )


def test_both_components_at_once(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    flags = ["--dflash-base", "--dflash-draft", "--dflash-draft-dir", shop.draft]
    refused(["one of"], "export", shop.base, tmp_path / "out", *flags)


def test_a_directory_that_is_no_dflash_draft(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    for flag in ("--dflash-base", "--dflash-draft"):
        args = ["export", shop.base, tmp_path / "out", flag, "--dflash-draft-dir", shop.base]
        refused([shop.base, "is not a DFlash draft"], *args)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"vocab": 320}, "vocabulary"),
        ({"hidden": 96, "heads": 6}, "hidden size"),
        ({"layers": 6}, "a base of 8 layers"),
    ],
    ids=str,
)
def test_a_draft_of_another_base(
    shop: Shop, tmp_path: Path, refused: Refused, keys: dict[str, int], said: str
) -> None:
    other = toys.make_base(tmp_path / "other", "qwen3", **({"layers": 8} | keys))  # type: ignore[arg-type]
    for flag in ("--dflash-base", "--dflash-draft"):
        args = ["export", other, tmp_path / "out", flag, "--dflash-draft-dir", shop.draft]
        refused([said, "trained for"], *args)


def test_a_base_of_the_same_sizes_and_other_weights(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    other = toys.make_base(tmp_path / "other", "qwen3", layers=8, seed=9)
    assert (
        cli(
            "export", other, tmp_path / "o", "--dflash-draft", "--dflash-draft-dir", shop.draft
        ).code
        == 0
    )
    shutil.copytree(shop.engines, tmp_path / "engines")
    args = [
        "build",
        "--onnx-dir",
        tmp_path / "o" / "dflash_draft",
        "--engine-dir",
        tmp_path / "engines",
    ]
    refused(["another base checkpoint", "--base-model-dir"], *args)


def test_a_draft_that_reads_other_layers(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    draft = toys.make_dflash(tmp_path / "draft", shop.base, aux_layers=(1, 4), block_size=BLOCK)
    assert cli("export", draft, tmp_path, "--base-model-dir", shop.base).code == 0
    shutil.copytree(shop.engines, tmp_path / "engines")
    args = ["build", "--onnx-dir", tmp_path / "dflash_draft", "--engine-dir", tmp_path / "engines"]
    refused(["[1, 5]", "[0, 3]", "--dflash-base --dflash-draft-dir"], *args)


def test_a_base_that_was_exported_for_eagle(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    assert cli("export", shop.base, tmp_path, "--eagle-base", "--aux-layers", "2,6").code == 0
    engines = [
        "--engine-dir",
        tmp_path / "engines",
        "--max-kv-cache-capacity",
        64,
        "--max-input-len",
        64,
    ]
    assert cli("build", "--onnx-dir", tmp_path / "llm", *engines).code == 0
    draft = ["build", "--onnx-dir", shop.root / "onnx" / "draft", *engines]
    refused(["a DFlash draft", "an EAGLE-3 draft", "--dflash-base"], *draft)


def test_a_block_larger_than_the_engine(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = ["build", "--onnx-dir", shop.root / "onnx" / "draft", "--engine-dir", tmp_path / "e"]
    refused(
        [f"blocks of {BLOCK}", "--max-draft-tree-size 8"], *args, "--max-draft-tree-size", BLOCK - 1
    )


def test_the_directory_above_the_draft(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    above = shop.root / "onnx" / "draft_export"
    refused([above / "dflash_draft"], "build", "--onnx-dir", above, "--engine-dir", tmp_path / "e")


def copied(shop: Shop, tmp_path: Path) -> Path:
    shutil.copytree(shop.draft, tmp_path / "draft")
    return tmp_path / "draft"


def edited(path: Path, **keys: object) -> None:
    config = json.loads((path / "config.json").read_text())
    inner = {key: config["dflash_config"].get(key) for key in config["dflash_config"]} | {
        key: value for key, value in keys.items() if key in config["dflash_config"]
    }
    rest = {key: value for key, value in keys.items() if key not in inner}
    (path / "config.json").write_text(json.dumps(config | rest | {"dflash_config": inner}))


@pytest.mark.parametrize("flag", ["--dflash-base", "--dflash-draft"])
def test_a_mask_token_outside_the_vocabulary(
    shop: Shop, tmp_path: Path, refused: Refused, flag: str
) -> None:
    draft = copied(shop, tmp_path)
    edited(draft, mask_token_id=256)
    args = ["export", shop.base, tmp_path / "out", flag, "--dflash-draft-dir", draft]
    refused(["mask_token_id 256", "256 tokens"], *args)


@pytest.mark.parametrize("flag", ["--dflash-base", "--dflash-draft"])
@pytest.mark.parametrize("cut", ["weights", "a layer", "no weights"])
def test_a_cropped_draft_directory(
    shop: Shop, tmp_path: Path, refused: Refused, flag: str, cut: str
) -> None:
    draft = copied(shop, tmp_path)
    weights = draft / "model.safetensors"
    if cut == "weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif cut == "a layer":
        edited(draft, num_hidden_layers=3)
    else:
        weights.unlink()
    refused([draft], "export", shop.base, tmp_path / "out", flag, "--dflash-draft-dir", draft)


def test_eagle_flags_on_a_dflash_draft(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    for flags in (["--eagle-base"], ["--aux-layers", "1,4"]):
        refused(
            ["DFlash"],
            "export",
            shop.draft,
            tmp_path / "out",
            "--base-model-dir",
            shop.base,
            *flags,
        )


def test_a_draft_without_a_head_and_without_its_base(
    shop: Shop, tmp_path: Path, refused: Refused
) -> None:
    refused(["no lm_head", "--base-model-dir"], "export", shop.draft, tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--spec-draft-top-k", 9], ["top-k 9", "8 children"]),
        (["--spec-draft-step", 2], ["--spec-draft-step 2", "one step"]),
        (["--spec-verify-size", 9], ["--spec-verify-size 9", "blocks of 8", "8 nodes"]),
        (["--spec-draft-top-k", 4, "--spec-verify-size", 17], ["17", "--max-verify-tree-size 17"]),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(
    shop: Shop, tmp_path: Path, refused: Refused, flags: list[object], words: list[object]
) -> None:
    line = infer(shop.engines, tmp_path)
    refused(words, *line, "--spec-decode", *flags)
