"""How a toy pair becomes engines: a random base and a random draft, exported and built in this
process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from tests import made, shared, toys

LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=64, max_verify_tree_size=60, max_draft_tree_size=60
)


Family = toys.Family | Literal["qwen3_5", "gemma3", "phi4-mini"]


def make_base(
    path: Path, family: Family, *, sliding_window: int | None = None, **options: Any
) -> Path:
    """A random base of eight layers."""
    if family == "qwen3_5":
        return toys.make_qwen3_5(path, layers=8, **options)
    if family == "gemma3":
        return toys.make_gemma3(path, layers=8, sliding_window=sliding_window or 5, **options)
    if (
        family == "phi4-mini"
    ):  # longrope beyond its original length, three quarters of a head rotated
        form = {"tied": True, "longrope": 32, "partial_rotary": 0.75}
        return toys.make_phi3(path, layers=8, sliding_window=sliding_window, **form, **options)
    return toys.make_base(path, family, layers=8, sliding_window=sliding_window, **options)


def make_pair(
    path: Path, family: Family, layout: toys.DraftLayout, sliding_window: int | None
) -> Path:
    """The engine directory; the exported components stand beside it, in onnx_base and
    onnx_draft, and the checkpoints in base and draft."""
    base = make_base(path / "base", family, sliding_window=sliding_window)
    draft = toys.make_draft(path / "draft", base, layout)
    base_onnx = made.exported(base, ExportOptions(base_for="eagle3"))
    draft_onnx = made.exported(draft, ExportOptions(base_model_dir=str(base)))
    shutil.copytree(base_onnx, path / "onnx_base")
    shutil.copytree(draft_onnx, path / "onnx_draft")
    engines = made.built(LIMITS, base_onnx / "llm", draft_onnx / "llm")
    return Path(shutil.copytree(engines, path / "engines"))


def shared_pair(
    family: Family, layout: toys.DraftLayout, sliding_window: int | None = None
) -> Path:
    """The directory of such a pair, made once per run: whoever changes it takes a copy."""
    how = (family, layout, sliding_window)
    return shared.made_once(("pair", how), lambda path: make_pair(path, *how))


def make_mtp_pair(path: Path, *lanes: int, vocab: int = 256, limits: Limits = LIMITS) -> Path:
    """Engines of a hybrid base and its MTP head, for so many sequences each, below `path`; the head
    is often right."""
    base = toys.make_qwen3_5(path / "base", layers=4, vocab=vocab)
    agree(base / "model.safetensors")
    export(str(base), path / "onnx", ExportOptions(base_for="mtp"))
    for count in lanes:
        for component in ("llm", "mtp_draft"):
            build(
                path / "onnx" / component,
                path / f"engines-{count}",
                replace(limits, max_batch_size=count),
            )
    return path


def agree(weights: Path) -> None:
    """Let the last token decide the next one, in base and head alike, and all else have a say."""
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"]
    vocab, width = embedding.shape
    following = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))
    tensors["lm_head.weight"] = torch.zeros_like(embedding).index_copy_(0, following, embedding)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = 0.25 * tensor
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(width), 0.6 * torch.eye(width).roll(1, 0)], 1)
    save_file(tensors, weights, metadata={"format": "pt"})
