"""Pairs of which the TensorRT backend builds engines, each exported once a run.

Knows how they are exported, built and asked. Knows no library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.cli.main import run
from tests import shared, toys
from tests.e2e.workshop import Cli, asked, infer, responses

SIZES = ["--max-input-len", "64", "--max-kv-cache-capacity", "128"]
TREES = ["--max-verify-tree-size", "16", "--max-draft-tree-size", "16"]
PORTABLE, NATIVE = "10.13.3.9", "10.16.2.10"
QUESTIONS = ("one two", "three four five six")


@dataclass(frozen=True)
class Pair:
    """A base, its draft, and how both are exported."""

    make_base: Callable[..., Path]
    base_keys: dict[str, Any]
    export_base: str
    draft: str  # the directory of its component
    make_draft: Callable[..., Path] | None = None
    draft_keys: dict[str, Any] = field(default_factory=dict)


PAIRS = {
    "eagle3": Pair(
        toys.make_base,
        {"layers": 7},
        "--eagle-base",
        "llm",
        toys.make_draft,
        {"layout": "specforge"},
    ),
    "dflash": Pair(
        toys.make_base,
        {"family": "qwen3", "layers": 8},
        "--dflash-base",
        "dflash_draft",
        toys.make_dflash,
        {"block_size": 8},
    ),
    "mtp": Pair(
        toys.make_qwen3_5,
        {
            "hidden": 32,
            "heads": 2,
            "head_dim": 16,
            "layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "--mtp",
        "mtp_draft",
    ),
}


def exported(name: str) -> list[Path]:
    """The components of a pair, made once."""
    pair = PAIRS[name]

    def make(out: Path) -> None:
        base = pair.make_base(out / "base", **pair.base_keys)
        draft = out / "draft"
        if pair.make_draft is not None:
            pair.make_draft(draft, base, **pair.draft_keys)
            line = ["export", str(draft), str(out / "onnx-draft"), "--base-model-dir", str(base)]
            assert run(line) == 0
        reads = ["--dflash-draft-dir", str(draft)] if pair.export_base == "--dflash-base" else []
        assert run(["export", str(base), str(out / "onnx"), pair.export_base, *reads]) == 0

    root = shared.made_once(("tensorrt pair", name), make)
    draft = root / ("onnx" if pair.make_draft is None else "onnx-draft") / pair.draft
    return [root / "onnx" / "llm", draft]


def built(cli: Cli, name: str, out: Path, *options: object) -> Path:
    """The engines of a pair."""
    for component in exported(name):
        done = cli("build", "--onnx-dir", component, "--engine-dir", out, *SIZES, *TREES, *options)
        assert done.code == 0, done.err
    return out


def tokens(cli: Cli, engines: Path, tmp_path: Path, *options: object) -> list[list[int]]:
    """What `infer` answers."""
    line = infer(engines, tmp_path, *map(asked, QUESTIONS), max_generate_length=20)
    done = cli(*line, *options)
    assert done.code == 0, done.err
    return [answer["output_ids"] for answer in responses(tmp_path)]
