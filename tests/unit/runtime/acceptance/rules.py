"""What the tests of accept rules share: a toy base of a few tokens, and the distribution of two
tokens that plain sampling draws from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from edgespec.backends.host import HostLogits
from edgespec.runtime.acceptance.verify import AcceptResult
from edgespec.runtime.sampling.draft_sampler import Distribution, DraftSampler
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftTree

V = 5
PENDING = 4
BEFORE = [1, 3, PENDING]
SUSPICIOUS = 1e-4  # p-values below this are a wrong distribution; seeds are fixed

RNG = np.random.default_rng(7)
FIRST = RNG.normal(0, 1.2, V).astype(np.float32)
SECOND = RNG.normal(0, 1.2, (V, V)).astype(np.float32)  # row t: logits after token t
DRAFT_FIRST = RNG.normal(0, 1.2, V).astype(np.float32)
DRAFT_SECOND = RNG.normal(0, 1.2, (V, V)).astype(np.float32)

Setting = dict[str, Any]
Rule = Callable[[DraftTree, HostLogits, Sampler, Sequence[int]], AcceptResult]


def law(logits: np.ndarray, setting: Setting, before: Sequence[int] = BEFORE) -> np.ndarray:
    """The probabilities [V] of a setting behind `before`, written plainly: logit bias,
    penalties, temperature, top-k, top-p, min-p."""
    row = logits.astype(np.float64)
    for token, bias in setting.get("logit_bias", {}).items():
        row[token] += bias
    penalty = setting.get("repetition_penalty", 1.0)
    for token in set(before):
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= setting.get("presence_penalty", 0.0)
        row[token] -= setting.get("frequency_penalty", 0.0) * list(before).count(token)
    p = torch.from_numpy(row / setting["temperature"]).softmax(0).numpy()
    order = np.argsort(-p)[: int(setting.get("top_k", 0)) or len(p)]
    p = p[order] / p[order].sum()
    kept = np.concatenate([[True], np.cumsum(p)[:-1] < setting.get("top_p", 1.0)])
    kept &= p >= setting.get("min_p", 0.0) * p[0]
    out = np.zeros(len(logits))
    out[order[kept]] = p[kept] / p[kept].sum()
    return out


def tree(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents))


def logits_of(drafted: DraftTree) -> HostLogits:
    """[N, V]: the base's logits at each node."""
    return HostLogits(np.stack([FIRST, *(SECOND[token] for token in drafted.tokens[1:])]))


def drawn_chain(sampler: Sampler, *, keep_distributions: bool = True) -> DraftTree:
    """Two drafts, drawn as a drafter draws them."""
    draws = DraftSampler(sampler, BEFORE, V)
    first, q1 = draws.draw(DRAFT_FIRST)
    second, q2 = draws.draw(DRAFT_SECOND[first], [first])
    drawn: list[Distribution | None] = [None, q1, q2]
    return DraftTree(
        np.array([PENDING, first, second]),
        np.array([-1, 0, 1]),
        drawn_from=drawn if keep_distributions else None,
    )


def reduced_chain(sampler: Sampler) -> DraftTree:
    """Two drafts, drawn from a vocabulary of the draft's own: three of the base's tokens."""
    ids = np.array([3, 0, 2])
    draws = DraftSampler(sampler, BEFORE, V)
    first, q1 = draws.draw(DRAFT_FIRST[ids], ids=ids)
    second, q2 = draws.draw(DRAFT_SECOND[first][ids], [first], ids)
    drawn = [None, q1, q2]
    return DraftTree(np.array([PENDING, first, second]), np.array([-1, 0, 1]), drawn_from=drawn)


def two_tokens(rule: Rule, sampler: Sampler, drafted: DraftTree) -> tuple[int, int]:
    """The first two tokens that verifying `drafted` emits, and then a bare root where one is still
    wanting."""
    emitted = rule(drafted, logits_of(drafted), sampler, BEFORE).emitted
    if len(emitted) == 1:
        root = DraftTree.root_only(emitted[0])
        emitted = [
            *emitted,
            *rule(root, HostLogits(SECOND[emitted[0]][None]), sampler, [*BEFORE, *emitted]).emitted,
        ]
    return emitted[0], emitted[1]


def p_value(pairs: Sequence[tuple[int, int]], wanted: np.ndarray) -> float:
    """Of the chi-square test of pairs of tokens against their probabilities [V, V]."""
    counts = Counter(pairs)
    found = np.array([[counts[a, b] for b in range(V)] for a in range(V)])
    if found[wanted == 0].any():
        return 0.0
    expected = wanted * len(pairs)
    rare = (expected > 0) & (expected < 5)  # together, as the test wants five of each
    cells, sums = found[expected >= 5], expected[expected >= 5]
    if rare.any():
        cells, sums = np.append(cells, found[rare].sum()), np.append(sums, expected[rare].sum())
    return float(stats.chisquare(cells, sums).pvalue)


def joint(setting: Setting) -> np.ndarray:
    """[V, V]: the probabilities of two tokens by plain sampling."""
    second = [law(row, setting, [*BEFORE, token]) for token, row in enumerate(SECOND)]
    return law(FIRST, setting)[:, None] * np.stack(second)
