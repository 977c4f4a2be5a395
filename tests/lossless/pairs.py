"""How a toy pair becomes engines: a random base and a random draft, exported and built in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from edgespec.backends.ort.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from tests import toys

LIMITS = Limits(max_input_len=48, max_kv_cache_capacity=64, max_verify_tree_size=60, max_draft_tree_size=60)


Family = toys.Family | Literal["qwen3_5"]


def make_base(path: Path, family: Family, *, sliding_window: int | None = None, **options: Any) -> Path:
    """A random base of eight layers."""
    if family == "qwen3_5":
        return toys.make_qwen3_5(path, layers=8, **options)
    return toys.make_base(path, family, layers=8, sliding_window=sliding_window, **options)


def make_pair(path: Path, family: Family, flavour: toys.Flavour, sliding_window: int | None) -> Path:
    """The engine directory; the exported components stand beside it, in onnx_base and onnx_draft."""
    base = make_base(path / "base", family, sliding_window=sliding_window)
    draft = toys.make_draft(path / "draft", base, flavour)
    export(str(base), path / "onnx_base", ExportOptions(eagle_base=True))
    export(str(draft), path / "onnx_draft", ExportOptions(base_model_dir=str(base)))
    for component in ("onnx_base", "onnx_draft"):
        build(path / component / "llm", path / "engines", LIMITS)
    return path / "engines"
