"""The smallest pair at each stage, made once per run: checkpoints, exports, engines.

For tests of what damaged and mismatched directories are refused with. Whoever changes a directory
takes a copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from tests import shared, toys

SIZES = {"layers": 8, "hidden": 32, "heads": 2, "kv_heads": 1}
LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=64, max_verify_tree_size=16, max_draft_tree_size=12
)


@dataclass(frozen=True)
class SmallPair:
    """A base in two shards and an EAGLE-3 draft of ModelOpt's layout, 96 tokens of 256."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def base_onnx(self) -> Path:
        return self.root / "onnx-base" / "llm"

    @property
    def draft_onnx(self) -> Path:
        return self.root / "onnx-draft" / "llm"

    @property
    def engine(self) -> Path:
        """Both engines."""
        return self.root / "engine"

    @property
    def base_engine(self) -> Path:
        """The base's engine alone."""
        return self.root / "base-engine"


def small_pair() -> SmallPair:
    return SmallPair(shared.made_once(("small pair",), make))


def make(root: Path) -> None:
    pair = SmallPair(root)
    toys.make_base(pair.base, shards=2, **SIZES)
    toys.make_draft(pair.draft, pair.base, "modelopt")
    export(str(pair.base), pair.base_onnx.parent, ExportOptions(base_for="eagle3"))
    export(str(pair.draft), pair.draft_onnx.parent, ExportOptions(base_model_dir=str(pair.base)))
    build(pair.base_onnx, pair.base_engine, LIMITS)
    shutil.copytree(pair.base_engine, pair.engine)
    build(pair.draft_onnx, pair.engine, LIMITS)


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def flip_byte(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
