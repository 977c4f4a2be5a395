"""The drafting methods that have an engine, a row each: how a toy pair is made, the commands that
export it and build it, and what is said of it on the way.

Knows where the parts of a pair stand. Knows nothing of what the commands should answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.cli.main import run
from tests import shared, toys

CHOICES = "[[0],[0,0],[1],[1,0],[2],[0,0,0],[1,0,2]]"  # 7 nodes, 3 levels
LIMITS = ("--max-input-len", "64", "--max-kv-cache-capacity", "128")
BEHIND = "mask token 255, behind the outputs of layers 1, 5"
MTP: dict[str, Any] = {"hidden": 32, "heads": 2, "head_dim": 16, "layers": 2}


@dataclass(frozen=True)
class Method:
    title: str
    make: Callable[[Path, Path], object]  # the draft at a path, for a base
    exports: str  # a command a line, in the folder of the checkpoints; OUT is where to
    component: str  # of the draft, in OUT
    plans: dict[str, str]  # flags of `infer`: what is told of the plan
    seen: str  # by `inspect` of the draft's checkpoint
    shown: str  # by `inspect` of the draft's component
    sizes: tuple[str, str] = ("--specBase", "--specDraft")  # of the builds
    base: str = "base"


def for_blocks(method: str, flag: str) -> str:
    dirs = f"--{method}-draft-dir {method}"
    return f"base OUT --{flag} {dirs}\nbase OUT --{method}-draft {dirs}"


BLOCK_SIZES = ("--maxVerifyTreeSize 32 --specBase", "--maxDraftTreeSize 8 --specDraft")
METHODS = {
    "eagle1": Method(
        "an EAGLE-1 draft",
        lambda path, base: toys.make_eagle1(path, base, pickle=True, dtype="float16"),
        "base OUT --eagle1-base\neagle1 OUT/draft --base-model-dir base --allow-pickle",
        "draft/llm",
        {
            "": "a chain: top-k 1, step 3, verify size 4",
            "--max-draft-len 2": "a chain: top-k 1, step 2, verify size 3",
            f"--eagle_choices {CHOICES}": "top-k 3, a static tree of 3 levels, verify size 8",
            "--eagle-choices mc_sim_7b_63 --num_eagle_layers 4 --max_draft_len 63": (
                "a tree: top-k 10, a static tree of 4 levels, verify size 64"
            ),
            "--max_non_leaves_per_layer 10": "a static tree of 4 levels, verify size 64",
            "--eagle_use_dynamic_tree --eagle_dynamic_tree_max_top_k 3": (
                "a tree: top-k 3, step 4, verify size 31"  # 3 + 3 * 9, and the root
            ),
            "--eagle-use-dynamic-tree --eagle-dynamic-tree-max-top-k 3 --num-eagle-layers 3"
            " --max-draft-len 20": "a tree: top-k 3, step 3, verify size 21",
        },
        "pickled weights are not looked into",
        "Eagle1, 1 layer",
    ),
    "medusa": Method(
        "a set of Medusa heads",
        lambda path, base: toys.make_medusa(
            path, base, "pickle", heads=5, declared=2, dtype="float16"
        ),
        "base OUT --medusa-base\nmedusa OUT --base-model-dir base --allow-pickle",
        "medusa_draft",
        {
            "": "a chain of Medusa heads: top-k 1, step 5, verify size 6",
            "--max-draft-len 63": "top-k 10, a static tree of 4 levels, verify size 64",
            f"--medusa_choices {CHOICES}": (
                "a tree of Medusa heads: top-k 3, a static tree of 3 levels, verify size 8"
            ),
            "--medusa-choices mc_sim_7b_63 --num_medusa_heads 4 --max_draft_len 63": (
                "top-k 10, a static tree of 4 levels, verify size 64"
            ),
            "--num_medusa_heads 2": "top-k 10, a static tree of 2 levels, verify size 39",
            "--spec-draft-top-k 3 --spec-draft-step 4 --spec-verify-size 12": (
                "a tree of Medusa heads: top-k 3, step 4, verify size 12"
            ),
        },
        "medusa_lm_head.pt",
        "5 heads of 1 residual block",
    ),
    "mtp": Method(
        "an MTP head",
        lambda path, base: None,  # it stands in the base's checkpoint
        "mtp OUT --mtp",
        "mtp_draft",
        {
            "": "a chain with the MTP head: top-k 1, step 3, verify size 4",
            "--specDraftTopK 1 --specDraftStep 2 --specVerifySize 3": "top-k 1, step 2",
        },
        "MTP",
        "the state after the last norm",
        ("--maxVerifyTreeSize 7 --specBase", "--maxDraftTreeSize 7 --specDraft"),
        base="mtp",
    ),
    "draft_model": Method(
        "a draft model",
        lambda path, base: toys.make_base(path, "llama", layers=1, tied=True, max_position=96),
        "base OUT\ndraft_model OUT --draft-model --base-model-dir base",
        "draft_model",
        {
            "": "a chain with the draft model: top-k 1, step 3, verify size 4",
            "--spec-draft-top-k 4 --spec-verify-size 16": "a tree with the draft model: top-k 4",
            "--spec-draft-step 2": "the draft follows 96 tokens",
        },
        "LlamaForCausalLM",
        "at most 96; beyond them nothing is drafted",
        ("", ""),
    ),
    "dflash": Method(
        "a DFlash draft",
        lambda path, base: toys.make_dflash(path, base, block_size=8),
        for_blocks("dflash", "dflash-base"),
        "dflash_draft",
        {
            "": "a chain: top-k 1, blocks of 8, verify size 8 (the default on a CPU)",
            "--specDraftTopK 4": "a tree: top-k 4, blocks of 8, verify size 32",
        },
        "DFlash",
        f"8 tokens, {BEHIND}",
        BLOCK_SIZES,
    ),
    "jetspec": Method(
        "a JetSpec draft",
        lambda path, base: toys.make_jetspec(path, base, block_size=7),
        for_blocks("jetspec", "jetspec-tree-base"),
        "jetspec_draft",
        {
            "": "a chain: top-k 1, blocks of 7, verify size 7",  # one of them is the anchor
            "--specDraftTopK 7 --specDraftStep 1 --specVerifySize 32 --jetspecBlockSize 0": (
                "a tree: top-k 7, blocks of 7, verify size 32"
            ),
        },
        "7 tokens, the anchor included",
        f"7 tokens, {BEHIND}",
        BLOCK_SIZES,
    ),
    "dspark": Method(
        "a DSpark draft",
        lambda path, base: toys.make_dspark(path, base, block_size=7),
        for_blocks("dspark", "dspark-base"),
        "dspark_draft",
        {"": "a chain: top-k 1, blocks of 7, verify size 8"},
        "Markov (vanilla, rank 8) and confidence",
        f"7 tokens, {BEHIND}",
        BLOCK_SIZES,
    ),
}


def checkpoints() -> Path:
    """The bases, the draft of each method under its name, and drafts in other layouts."""

    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "qwen3", layers=8)
        settings = json.loads((base / "tokenizer_config.json").read_text())
        settings["chat_template"] += "{% if enable_thinking %}think{% endif %}"
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
        toys.make_qwen3_5(path / "mtp", layer_types=["linear_attention", "full_attention"], **MTP)
        for name, method in METHODS.items():
            method.make(path / name, base)
        toys.make_base(path / "shallow", "qwen3", layers=6)
        toys.make_base(path / "padded", "qwen3", layers=8, vocab=320)
        toys.make_eagle1(path / "modelopt", base, "modelopt", seed=2)
        toys.make_medusa(path / "merged", base, "merged", seed=2)
        toys.make_medusa(path / "shared-head", base, "shared-head")
        toys.make_draft(path / "eagle3", base, "eagle")
        wide = toys.make_base(path / "wide", "qwen3", layers=8, hidden=96, heads=6)
        toys.make_eagle1(path / "wide-eagle1", wide)
        toys.make_medusa(path / "wide-medusa", wide)

    return shared.made_once("checkpoints of every method", make)


def exported(name: str) -> Path:
    """`llm` and the method's component, by the commands that a user types."""

    def make(out: Path) -> None:
        for line in METHODS[name].exports.splitlines():
            words = [word.replace("OUT", str(out)) for word in line.split()]
            here = checkpoints()
            call("export", *(here / word if (here / word).is_dir() else word for word in words))

    return shared.made_once(f"exports of {name}", make)


def built(name: str) -> Path:
    """The directory of both engines."""

    def make(engines: Path) -> None:
        method, onnx = METHODS[name], exported(name)
        for part, sizes in zip(("llm", method.component), method.sizes, strict=True):
            line = ("--onnxDir", onnx / part, "--engineDir", engines, *LIMITS)
            call("build", *line, *sizes.split())

    return shared.made_once(f"engines of {name}", make)


def call(*words: object) -> None:
    assert run([*map(str, words)]) == 0
