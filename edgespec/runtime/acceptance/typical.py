"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): a draft is accepted where the base
finds it typical, whether or not the base would have drawn it. The output is another one than that
of the base: the rule is lossy.

A token x is typical at a node where p(x) > min(epsilon, alpha * exp(-H(p))), with p the base's
probabilities at the request's temperature and H their entropy in nats. epsilon is
`posterior_threshold`, alpha `posterior_alpha`.

There are two forms of it, and the field has both:

- `posterior_fast` (the paper's, and Medusa's default): every typical draft is accepted behind
  accepted ones, and the longest path wins; of several the one of the largest probability. The token
  behind it is the most probable one, so that an answer depends on no seed.
- otherwise (TensorRT-LLM's, and Medusa's `fast=False`): at each node the base draws from its
  typical tokens alone, and the child with that token is accepted. What comes out is sampling from
  truncated probabilities, the same whatever is drafted.

At temperature 0 and without a threshold both are greedy decoding, as there. A draft that the
request's top-k, top-p or min-p removes is never accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, Logits
from edgespec.methods.names import TYPICAL
from edgespec.runtime.acceptance.base import (
    AcceptOptions,
    AcceptResult,
    AcceptRow,
    is_number,
)
from edgespec.runtime.acceptance.exact import walk
from edgespec.runtime.sampling.sampler import Sampler, gumbel, log_softmax
from edgespec.runtime.trees.tree import DraftTree

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TypicalAcceptance(AcceptOptions):
    """Drafts that the base finds typical are accepted: faster, and lossy.

    `posterior_threshold` is the paper's epsilon, above 0 and at most 1 (Medusa and TensorRT-LLM's
    example: 0.09); None decodes greedily. `posterior_alpha` is the paper's delta, by default the
    root of the threshold. With `posterior_fast` False the base draws from its typical tokens, and
    drafts have to equal what it draws. Raises OptionError for other values.
    """

    rule: ClassVar[str] = TYPICAL

    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    posterior_fast: bool = True

    def __post_init__(self) -> None:
        for name, example in (("posterior_threshold", 0.09), ("posterior_alpha", 0.3)):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                self.refuse(name, f"a number above 0 and at most 1, such as {example}")
        if self.posterior_threshold is None and self.posterior_alpha is not None:
            self.refuse("posterior_alpha", "posterior_threshold too: alpha is a factor beside it")
        if not isinstance(self.posterior_fast, bool):
            self.refuse("posterior_fast", "true or false")

    @property
    def note(self) -> str | None:
        """That nothing is typical without a threshold."""
        if self.posterior_threshold is not None:
            return None
        return "typical acceptance without a posterior threshold is greedy at every temperature"

    @property
    def alpha(self) -> float:
        """The factor of exp(-entropy)."""
        assert self.posterior_threshold is not None
        given = self.posterior_alpha
        return math.sqrt(self.posterior_threshold) if given is None else given


def accept(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: TypicalAcceptance,
) -> AcceptResult:
    """Accept the typical drafts of `tree` by the base's logits [N, V]."""
    if sampler.temperature == 0 or options.posterior_threshold is None:
        return walk(tree, logits, replace(sampler, temperature=0.0), before)
    form = longest if options.posterior_fast else drawn
    return form(tree, logits, sampler, before, options)


def longest(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: TypicalAcceptance,
) -> AcceptResult:
    """The longest path of typical drafts; ties go to the larger probability, then to the earlier
    node."""
    paths, scores = {0: [0]}, {0: 0.0}
    for node in range(len(tree)):
        if node not in paths:
            continue
        children = np.flatnonzero(tree.parents == node).tolist()
        if not children:
            continue
        tokens = [*before, *tree.tokens[paths[node][1:]].tolist()]
        ids, log_probs = typical(logits.row(node), sampler, tokens, options, strictly=True)
        of = dict(zip(ids.tolist(), log_probs.tolist(), strict=True))
        for child in children:
            log_prob = of.get(int(tree.tokens[child]))
            if log_prob is not None:
                paths[child] = [*paths[node], child]
                scores[child] = scores[node] + log_prob
    best = min(paths, key=lambda node: (-len(paths[node]), -scores[node], node))
    path = paths[best]
    emitted = tree.tokens[path[1:]].tolist()
    greedy = replace(sampler, temperature=0.0)
    return AcceptResult(path, [*emitted, greedy.pick_from(logits, best, [*before, *emitted])])


def drawn(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: TypicalAcceptance,
) -> AcceptResult:
    """Walk `tree` by tokens that the base draws from its typical ones, with the noise of plain
    decoding."""
    tokens, path = [*before], [0]
    while True:
        node = path[-1]
        ids, log_probs = typical(logits.row(node), sampler, tokens, options, strictly=False)
        noise = gumbel(sampler.seed, len(tokens), ids)
        tokens.append(int(ids[np.argmax(log_probs + noise)]))
        child = tree.child(node, tokens[-1])
        if child is None:
            return AcceptResult(path, tokens[len(before) :])
        path.append(child)


def typical(
    row: Floats,
    sampler: Sampler,
    before: Sequence[int],
    options: TypicalAcceptance,
    *,
    strictly: bool,
) -> tuple[Ids, NDArray[np.float64]]:
    """The typical tokens after `before`, ascending, by the base's logits [V], with their log p at
    the request's temperature.

    `strictly`: above the threshold, else not below it. The most probable token is always among
    them.
    """
    assert options.posterior_threshold is not None
    adjusted = sampler.checked(row, before)
    log_probs = log_softmax(sampler.scaled(adjusted))
    probs = np.exp(log_probs)
    entropy = -float(np.sum(probs * np.where(probs > 0, log_probs, 0.0)))
    limit = min(options.posterior_threshold, options.alpha * math.exp(-entropy))
    passes = probs > limit if strictly else probs >= limit
    passes[np.argmax(adjusted)] = True
    allowed, _ = sampler.warped(adjusted)
    ids = allowed[passes[allowed]]
    return ids, log_probs[ids]


ROW = AcceptRow(title="typical acceptance", lossless="no", accept=accept, options=TypicalAcceptance)
