"""Grow the demo base in depth, and train all of it further.

Knows how the 16 layers committed under `recipes/demo/base` came out of the 8 that
`train_demo_model.py` trains. Each layer gets a copy behind it whose o_proj and down_proj are zero,
which changes no output (block expansion, LLaMA Pro, arXiv 2401.02415); then all parameters learn.
Knows nothing of drafts or engines.

    python scripts/grow_demo_base.py --base OLD/base --out NEW/base      # 35 minutes on one core
    python scripts/grow_demo_base.py --base OLD/base --out /tmp/base --smoke

A base that has the wanted layers already is only trained further. Prints the losses on held-out
modules before and after.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_text import KINDS
from draft_training import library, open_base
from torch import nn
from train_demo_model import (
    console,
    conversations,
    fit,
    functions_of,
    read_source,
    save_base,
    token_stream,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# How often a row goes on with each kind of text. The library's tests are text that the base has not
# seen; random words are never learned.
SHARES = {"functions": 0.45, "prose": 0.12, "repetitive": 0.08, "chat": 0.08}
TESTS = {"tests": 0.15, "source of tests": 0.12}
END = "<|endoftext|>"


@dataclass(frozen=True)
class Size:
    """Layers and steps of one run; tokens per step = batch * seq_len."""

    layers: int = 16
    seq_len: int = 288
    batch: int = 14
    steps: int = 400
    lr: float = 1e-3
    held_rows: int = 24  # of each kind, for the losses before and after


SMOKE = Size(layers=18, seq_len=64, batch=2, steps=3, held_rows=2)


def grow(model: Qwen3ForCausalLM, layers: int) -> None:
    """Puts a copy behind some of the layers, evenly, up to `layers`; no output changes."""
    old, new = list(model.model.layers), []
    wanted = layers - len(old)
    assert 0 <= wanted <= len(old)
    for i, layer in enumerate(old):
        new.append(layer)
        if (i + 1) * wanted // len(old) > i * wanted // len(old):
            twin = copy.deepcopy(layer)
            nn.init.zeros_(twin.self_attn.o_proj.weight)
            nn.init.zeros_(twin.mlp.down_proj.weight)
            new.append(twin)
    for i, layer in enumerate(new):
        layer.self_attn.layer_idx = i
    model.model.layers = nn.ModuleList(new)
    model.config.num_hidden_layers = len(new)
    model.config.layer_types = ["full_attention"] * len(new)


class Mixed:
    """Rows of complete texts of all kinds, as often as SHARES says; deterministic in the seed."""

    def __init__(
        self, texts: dict[str, list[list[int]]], shares: dict[str, float], size: Size, seed: int
    ) -> None:
        self.texts, self.size = texts, size
        self.names, self.rng = list(shares), np.random.default_rng(seed)
        self.shares = np.array([*shares.values()]) / sum(shares.values())

    def next(self, rows: int) -> torch.Tensor:
        """Returns ids [rows, seq_len + 1]."""
        return torch.tensor([self.row(self.size.seq_len + 1) for _ in range(rows)])

    def row(self, width: int) -> list[int]:
        """Returns the ids of one row, truncated to `width`."""
        out: list[int] = []
        while len(out) < width:
            some = self.texts[self.names[self.rng.choice(len(self.names), p=self.shares)]]
            out += some[self.rng.integers(len(some))]
        return out[:width]


def test_files(held: Sequence[Path]) -> list[Path]:
    """Returns the standard library's tests where they are installed, without those of modules that
    are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {path.stem for path in held if path.stem.strip("_") not in ("init", "main")}
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        ours = {"test", "tests", "idle_test"} & set(name.parts)
        words = {path.stem, *path.stem.split("_"), path.stem.removeprefix("test_"), *name.parts}
        if ours and not {"site-packages", "lib2to3"} & set(name.parts) and not names & words:
            found.append(path)
    return found


def texts_of(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerFast
) -> dict[str, list[list[int]]]:
    """Returns token ids of conversations by the kind of text."""
    return {
        kind: conversations(tokenizer, [pair for path in files for pair in KINDS[kind](path)])
        for kind in SHARES
    }


def texts_of_tests(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerFast, size: Size
) -> dict[str, list[list[int]]]:
    """Returns token ids of the functions of tests as conversations, and of windows of source."""
    pairs = functions_of([*files])
    stream, width = (
        token_stream(tokenizer, [read_source(path) + END for path in files]),
        size.seq_len + 1,
    )
    windows = [stream[i : i + width].tolist() for i in range(0, len(stream), width)]
    return dict(zip(TESTS, (conversations(tokenizer, pairs), windows), strict=True))


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of the next tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def losses(
    model: Qwen3ForCausalLM, texts: dict[str, list[list[int]]], size: Size
) -> dict[str, float]:
    """Returns the loss by kind, on rows that are the same in every call."""
    found = {}
    for kind in SHARES:
        rows = Mixed(texts, {kind: 1.0}, size, seed=7)
        parts = [loss_of(model, rows.next(8)) for _ in range(max(1, size.held_rows // 8))]
        found[kind] = round(float(torch.stack(parts).mean()), 4)
    return found


def train(model: Qwen3ForCausalLM, rows: Mixed, size: Size, minutes: float) -> int:
    """Trains all parameters and returns the number of steps."""
    model.train()
    steps = fit(
        "base", model, size.steps, size.lr, lambda _: loss_of(model, rows.next(size.batch)), minutes
    )
    model.eval()
    return steps


def main() -> None:
    """Grows and trains a base."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the base of 8 layers")
    parser.add_argument("--out", type=Path, required=True, help="directory of the grown base")
    parser.add_argument("--steps", type=int, help=f"(default: {Size.steps})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest it may train")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size(steps=args.steps or Size.steps)
    torch.manual_seed(args.seed)
    model, tokenizer = open_base(args.base)
    if not model.config.num_hidden_layers <= size.layers <= 2 * model.config.num_hidden_layers:
        parser.error(
            f"{args.base} has {model.config.num_hidden_layers} layers: it cannot grow to {size.layers}"
        )
    end, eos = tokenizer.convert_tokens_to_ids([END, "<|im_end|>"])
    training, held = library(smoke=args.smoke)
    texts, unseen = (texts_of(files, tokenizer) for files in (training, held))
    shares, tests = SHARES, test_files(held)
    tests = tests[:20] if args.smoke else tests
    if tests:
        texts |= texts_of_tests(tests, tokenizer, size)
        shares = SHARES | TESTS
    report: dict[str, object] = {
        "tokens": {kind: sum(map(len, some)) for kind, some in texts.items()}
    }
    report["loss_before"] = losses(model, unseen, size)
    console.print(f"{report}")
    grow(model, size.layers)
    began = time.monotonic()
    report["steps"] = train(model, Mixed(texts, shares, size, args.seed), size, args.minutes)
    report["minutes"] = round((time.monotonic() - began) / 60, 1)
    # What is stored is bfloat16.
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    report["loss_after"] = losses(model, unseen, size)
    save_base(model, tokenizer, args.out, [eos, end])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
