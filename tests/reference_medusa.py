"""Medusa heads as arXiv 2401.10774 defines them (section 2.1), in torch, written for these tests: a
residual block W1 with SiLU, then W2, each over the base's last hidden state; and the Cartesian
trees of their candidates.

Knows names on disk and formulas. Knows nothing of edgespec.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.toys.medusa import weights_of

Path_ = tuple[int, ...]


def heads_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the heads by `{head}.{place}...`, whatever they are called on disk."""
    pickled = path / "medusa_lm_head.pt"
    found = torch.load(pickled, weights_only=True) if pickled.exists() else weights_of(path)
    beside = any(name.startswith("medusa_head") for name in found)
    return {
        name.partition(".")[2] if beside else name: tensor.float()
        for name, tensor in found.items()
        if not beside or name.startswith("medusa_head")
    }


def logits_of(path: Path, base: Path, state: torch.Tensor) -> torch.Tensor:
    """[heads, V] for one hidden state [H]."""
    weights = heads_of(path)
    lm_head = weights_of(base)["lm_head.weight"].float()
    rows = []
    for head in sorted({int(name.split(".")[0]) for name in weights}):
        blocks = sum(name.startswith(f"{head}.") and "linear.bias" in name for name in weights)
        x = state
        for block in range(blocks):
            y = weights[f"{head}.{block}.linear.weight"] @ x
            y = y + weights[f"{head}.{block}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        rows.append(weights.get(f"{head}.{blocks}.weight", lm_head) @ x)
    return torch.stack(rows)


def candidates(logits: torch.Tensor) -> list[list[int]]:
    """All tokens of each head, the best first, ties to the lowest id."""
    return [sorted(range(len(row)), key=lambda i: (-row[i], i)) for row in logits.tolist()]


def static_paths(logits: torch.Tensor, choices: Iterable[Sequence[int]]) -> set[Path_]:
    """The paths of tokens of a tree of choices: rank by rank from each head's own list."""
    ranked = candidates(logits)
    return {tuple(ranked[depth][rank] for depth, rank in enumerate(node)) for node in choices}


def best_paths(logits: torch.Tensor, top_k: int, depth: int, count: int) -> set[Path_]:
    """The `count` paths of largest product of probabilities, of all of top_k tokens a head."""
    ranked, log_probs = candidates(logits), torch.log_softmax(logits.double(), -1)
    scored = []
    for levels in range(1, depth + 1):
        for ranks in itertools.product(range(top_k), repeat=levels):
            tokens = tuple(ranked[i][rank] for i, rank in enumerate(ranks))
            score = sum(float(log_probs[i, token]) for i, token in enumerate(tokens))
            scored.append((score, tokens))
    scored.sort(key=lambda pair: -pair[0])
    return {tokens for _, tokens in scored[:count]}
