"""Toy bases with draft models, exported and built: a smaller model with the same tokenizer,
which is often right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

import edgespec
from edgespec.backends.base import BuildOptions
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.runtime.engine import Engine
from tests import made, shared, toys
from tests.lossless.pairs import LIMITS

VOCAB = 256
LANES = 4
Kind = Literal["llama", "mistral-window-5", "gemma3-window-5", "hybrid-draft", "hybrid-base"]


def make_model(path: Path, kind: str, *, layers: int, seed: int, **options: Any) -> Path:
    """A toy whose last token mostly decides the next one, as in every other one of these."""
    if kind == "qwen3_5":
        toys.make_qwen3_5(path, layers=layers, seed=seed, mtp=False, **options)
    elif kind == "gemma3":
        return toys.make_gemma3(path, layers=layers, sliding_window=5, seed=seed, **options)
    elif kind == "mistral":
        toys.make_base(path, "mistral", layers=layers, sliding_window=5, seed=seed, **options)
    else:
        toys.make_base(path, "llama", layers=layers, seed=seed, **options)
    follow(path / "model.safetensors")
    return path


def follow(weights: Path) -> None:
    """Let the last token mostly decide the next one; rows beyond VOCAB stay as they are."""
    tensors = load_file(weights)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].clone()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))
    rows = min(VOCAB, len(embedding))
    head[order[:rows][order[:rows] < len(head)]] = embedding[:rows][order[:rows] < len(head)]
    tensors["lm_head.weight"] = head
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = 0.3 * tensor
    save_file(tensors, weights, metadata={"format": "pt"})


FAMILIES: dict[Kind, tuple[str, str]] = {
    "llama": ("llama", "llama"),
    "mistral-window-5": ("mistral", "mistral"),
    "gemma3-window-5": ("gemma3", "gemma3"),
    "hybrid-draft": ("llama", "qwen3_5"),
    "hybrid-base": ("qwen3_5", "llama"),
}


def models(kind: Kind) -> Path:
    """The directory of `base` and `draft`, made once per run."""

    def make(path: Path) -> None:
        base, draft = FAMILIES[kind]
        make_model(path / "base", base, layers=4, seed=0)
        make_model(path / "draft", draft, layers=4 if draft == "qwen3_5" else 2, seed=1)

    return shared.made_once(("draft models", kind), make)


def engines(
    base: Path,
    draft: Path,
    limits: Limits = LIMITS,
    *,
    options: BuildOptions | None = None,
    draft_options: BuildOptions | None = None,
    draft_limits: Limits | None = None,
    golden: bool = False,
) -> Path:
    """The engine directory of a base and its draft model, made once per run."""
    plain = ExportOptions(golden=golden)
    as_draft = replace(plain, as_draft="draft_model", base_model_dir=str(base))
    parts = made.exported(base, plain) / "llm", made.exported(draft, as_draft) / "draft_model"
    if draft_options is None and draft_limits is None:
        return made.built(limits, *parts, options=options)
    return shared.made_once(
        (
            "draft model engines",
            *map(made.digest, parts),
            limits,
            options,
            draft_options,
            draft_limits,
        ),
        lambda out: build_apart(
            out, parts, (limits, draft_limits or limits), (options, draft_options)
        ),
    )


def build_apart(
    out: Path,
    parts: tuple[Path, Path],
    limits: tuple[Limits, Limits],
    options: tuple[BuildOptions | None, BuildOptions | None],
) -> None:
    from edgespec.backends.build import build

    for part, size, option in zip(parts, limits, options, strict=True):
        build(part, out, size, options=option)


@dataclass(frozen=True)
class Opened:
    """The engine of one sequence, and that of LANES."""

    one: Engine
    four: Engine
    directory: Path  # of the checkpoints


@contextmanager
def opened(kind: Kind) -> Iterator[Opened]:
    path = models(kind)
    pair, many = (path / "base", path / "draft"), replace(LIMITS, max_batch_size=LANES)
    golden = kind == "hybrid-draft"  # no other test builds such a draft
    with (
        edgespec.load(engines(*pair, golden=golden)) as one,
        edgespec.load(engines(*pair, many, golden=golden)) as four,
    ):
        one.stop_ids = four.stop_ids = frozenset()
        yield Opened(one, four, path)
