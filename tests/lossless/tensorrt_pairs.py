"""Exported pairs of every method, for backends that lower graphs for TensorRT.

Knows which toys make them. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from edgespec.export.components import ExportOptions
from tests import made, shared, toys
from tests.lossless import draft_models
from tests.lossless.pairs import agree, make_base

GREEDY = edgespec.SamplingParams(temperature=0.0, max_generate_length=24)
SAMPLED = edgespec.SamplingParams(
    temperature=1.0, top_k=20, top_p=0.9, seed=5, max_generate_length=24
)


@dataclass(frozen=True)
class Parts:
    """The exported components of a pair; `often_right`: its drafts are, and some are accepted."""

    base: Path
    draft: Path
    often_right: bool = False


def eagle3(family: Any, layout: Any) -> Parts:
    def make(path: Path) -> None:
        base = make_base(path / "base", family)
        toys.make_draft(path / "draft", base, layout)

    path = shared.made_once(("tensorrt eagle3", family, layout), make)
    options = ExportOptions(base_model_dir=str(path / "base"))
    return Parts(
        made.exported(path / "base", ExportOptions(base_for="eagle3")) / "llm",
        made.exported(path / "draft", options) / "llm",
    )


def mtp() -> Parts:
    def make(path: Path) -> None:
        base = toys.make_qwen3_5(path / "base", layers=4)
        agree(base / "model.safetensors")

    path = shared.made_once("tensorrt mtp", make)
    onnx = made.exported(path / "base", ExportOptions(base_for="mtp"))
    return Parts(onnx / "llm", onnx / "mtp_draft", often_right=True)


def block_draft(method: str, make_draft: Callable[..., Path], **keys: Any) -> Parts:
    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "qwen3", layers=8)
        make_draft(path / "draft", base, **keys)

    path = shared.made_once(("tensorrt", method), make)
    base, draft = path / "base", path / "draft"
    of_base = ExportOptions(base_for=method, draft_dir=str(draft))
    of_draft = ExportOptions(base_model_dir=str(base))
    return Parts(
        made.exported(base, of_base) / "llm",
        made.exported(draft, of_draft) / f"{method}_draft",
    )


def draft_model() -> Parts:
    path = draft_models.models("llama")
    base, draft = path / "base", path / "draft"
    as_draft = ExportOptions(as_draft="draft_model", base_model_dir=str(base))
    return Parts(
        made.exported(base, ExportOptions()) / "llm",
        made.exported(draft, as_draft) / "draft_model",
        often_right=True,
    )


def medusa() -> Parts:
    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "llama", layers=4)
        toys.make_medusa(path / "draft", base)

    path = shared.made_once("tensorrt medusa", make)
    base, draft = path / "base", path / "draft"
    of_base = ExportOptions(base_for="medusa", draft_dir=str(draft))
    return Parts(
        made.exported(base, of_base) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "medusa_draft",
    )


PAIRS: dict[str, Callable[[], Parts]] = {
    "eagle3": lambda: eagle3("llama", "eagle"),
    "eagle3-gemma3": lambda: eagle3("gemma3", "specforge"),
    "mtp": mtp,
    "dflash": lambda: block_draft("dflash", toys.make_dflash),
    "jetspec": lambda: block_draft("jetspec", toys.make_jetspec, block_size=6),
    "dspark": lambda: block_draft("dspark", toys.make_dspark, block_size=5),
    "draft-model": draft_model,
    "medusa": medusa,
}
