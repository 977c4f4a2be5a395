"""A draft model by its definition (arXiv 2211.17192, and 2406.16858 for trees): a language model
says what comes next, again and again. Through transformers, without any cache; shares no line with
edgespec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LogProbs = Callable[[Sequence[int]], np.ndarray]  # tokens -> [num_shared], of the token after them


def next_token(model: Any, num_shared: int) -> LogProbs:
    """The log-probabilities of the first `num_shared` ids behind tokens, each prefix once."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    @torch.no_grad()
    def log_probs(tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in known:
            logits = model(input_ids=torch.tensor([key]), use_cache=False).logits[0, -1]
            known[key] = logits[:num_shared].float().log_softmax(-1).numpy()
        return known[key]

    return log_probs


@dataclass(frozen=True)
class Node:
    token: int
    parent: int  # in the pool; -1: the root
    path: tuple[int, ...]
    score: float


def draft_tree(
    log_probs: LogProbs, tokens: Sequence[int], top_k: int, steps: int, size: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of EAGLE-2's tree behind `tokens`, whose last one is the root; a chain
    with top_k 1."""

    def children(index: int, path: tuple[int, ...], score: float) -> list[Node]:
        found = log_probs([*tokens, *path])
        best = np.argsort(-found, kind="stable")[:top_k].tolist()
        return [Node(t, index, (*path, t), score + float(found[t])) for t in best]

    pool = children(-1, (), 0.0)
    level = list(range(len(pool)))
    for _ in range(steps - 1):
        beam = sorted(level, key=lambda i: (-pool[i].score, i))[:top_k]
        first = len(pool)
        for i in beam:
            pool += children(i, pool[i].path, pool[i].score)
        level = list(range(first, len(pool)))
    ranked = sorted(range(len(pool)), key=lambda i: (-pool[i].score, len(pool[i].path), i))
    kept = sorted(ranked[: size - 1])
    place = {-1: 0} | {entry: node for node, entry in enumerate(kept, start=1)}
    return [tokens[-1], *(pool[i].token for i in kept)], [
        -1,
        *(place[pool[i].parent] for i in kept),
    ]


def static_tree(
    log_probs: LogProbs, tokens: Sequence[int], choices: Sequence[Sequence[int]]
) -> set[tuple[int, ...]]:
    """The paths of tokens of a tree whose nodes are paths of ranks (arXiv 2401.15077)."""

    def path_of(ranks: Sequence[int]) -> tuple[int, ...]:
        path: tuple[int, ...] = ()
        for rank in ranks:
            best = np.argsort(-log_probs([*tokens, *path]), kind="stable")
            path = (*path, int(best[rank]))
        return path

    return {path_of(ranks) for ranks in choices}


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The path of tokens of each node but the root."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def acceptances(
    log_probs: LogProbs,
    prompt: Sequence[int],
    answer: Sequence[int],
    top_k: int,
    steps: int,
    size: int,
) -> list[int]:
    """The accepted drafts of each step on the way to `answer`, what the base says behind `prompt`;
    its first token is that of prefill."""
    counts, done = [], 1
    while done < len(answer):
        remaining = len(answer) - done
        levels = min(steps, remaining - 1)
        taken = 0
        if levels:
            pool = 1 + top_k + (levels - 1) * top_k**2
            tree = draft_tree(log_probs, [*prompt, *answer[:done]], top_k, levels, min(size, pool))
            taken = accepted(*tree, answer[done:])
        counts.append(taken)
        done += taken + 1
    return counts


def accepted(tokens: list[int], parents: list[int], coming: Sequence[int]) -> int:
    """How far a tree goes along what comes."""
    node, count = 0, 0
    for token in coming:
        found = [
            n
            for n, (t, p) in enumerate(zip(tokens, parents, strict=True))
            if (t, p) == (token, node)
        ]
        if not found:
            break
        node, count = found[0], count + 1
    return count
