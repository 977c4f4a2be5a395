"""Rejection sampling: a draft x is accepted with probability min(1, p(x) / q(x)), where p is what
the base samples from and q what the draft was drawn from (arXiv 2211.17192, 2302.01318).

What comes out has the distribution of plain sampling. It has not its tokens: chance decides on a
draft, and not the noise of plain decoding. At temperature 0 the rule is sample and walk.

**p and q.** Both are what the request's logit bias, repetition penalty, temperature, top-k, top-p
and min-p leave of the logits, each on the path of its own node, renormalised. `q` belongs to how
the draft was chosen and not to what the drafter's softmax says: a draft that was chosen without
chance (the best token, a copied text) has all of q on itself. With q(x) = 1 a draft is accepted
with probability p(x); to put the softmax there instead would accept it too often, and what comes
out would lean towards the drafts. So a drafter that can draws its chain from q with `DraftSampler`,
and gives `DraftTree.drawn_from`; a node without it counts as chosen without chance.

**Why the distribution is that of plain sampling.** Let x be drawn from q, and u uniform on (0, 1)
and independent of x. A token t comes out as an accepted draft with probability

    q(t) min(1, p(t) / q(t)) = min(p(t), q(t)).

Some draft is rejected with probability r = 1 - sum_s min(p(s), q(s)). Then the token is drawn from
max(p - q, 0) / sum_s max(p(s) - q(s), 0). The sum in that is r as well, since sum_s p(s) = 1 =
sum_s [min(p(s), q(s)) + max(p(s) - q(s), 0)]. So t comes out of a rejection with probability
r * max(p(t) - q(t), 0) / r, and in all with

    min(p(t), q(t)) + max(p(t) - q(t), 0) = p(t).

Where a node has several children (drafts of top-k above 1, chosen without chance), what is left of
p after one rejection takes the place of p for the next child: each stage gives its p by the same
argument, so the first one does. For the tokens after t the argument is repeated on the path with t.

**What it needs of chance.** u, x and the draw after a rejection have streams of noise of their own,
so they are independent. u and the draw after a rejection are used once for a position: some token
is emitted wherever they are looked at. x depends on the position of the pending token too, so that
a position that is drafted again is drafted with new noise. Whether there is a draft at some depth
may depend on the drafts before it, and never on the draft itself: a chain that leaves out the draft
that it just drew because it is improbable would change q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgespec.backends.call import Logits
from edgespec.methods.names import REJECTION
from edgespec.runtime.acceptance.base import AcceptOptions, AcceptResult, AcceptRow
from edgespec.runtime.acceptance.exact import walk
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.sampling.sampler import Sampler, gumbel, stream, uniform
from edgespec.runtime.trees.tree import DraftTree

DECISIONS = 2  # the stream of noise that accepts or rejects
REDRAWS = 3  # the stream that draws after a rejection


@dataclass(frozen=True)
class RejectionAcceptance(AcceptOptions):
    """The distribution of plain sampling, with drafts that are drawn at random. It has no
    options."""

    rule: ClassVar[str] = REJECTION


def accept(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: RejectionAcceptance,
) -> AcceptResult:
    """Accept drafts of `tree` one after the other by the base's logits [N, V]; the first that is
    rejected ends it."""
    del options
    if sampler.temperature == 0:
        return walk(tree, logits, sampler, before)
    tokens, path = [*before], [0]
    while True:
        token, child = judge(tree, path[-1], logits, sampler, tokens)
        tokens.append(token)
        if child is None:
            return AcceptResult(path, tokens[len(before) :])
        path.append(child)


def judge(
    tree: DraftTree, node: int, logits: Logits, sampler: Sampler, tokens: Sequence[int]
) -> tuple[int, int | None]:
    """The token after `node` by the base's logits there, and the child that carries it; None
    where all were rejected, or there is none."""
    children = np.flatnonzero(tree.parents == node)
    if not len(children):
        return sampler.pick_from(logits, node, tokens), None
    ids, log_probs = sampler.warped(sampler.checked(logits.row(node), tokens))
    left = Distribution(ids, np.exp(log_probs))
    decisions = uniform(
        stream(sampler.seed, DECISIONS), len(tokens), np.arange(len(children), dtype=np.int64)
    )
    for u, child in zip(decisions, children.tolist(), strict=True):
        token = int(tree.tokens[child])
        drawn_from = tree.distribution(child)
        if u * drawn_from.prob(token) < left.prob(token):
            return token, child
        left = residual(left, drawn_from)
    return draw(left, stream(sampler.seed, REDRAWS), len(tokens)), None


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), renormalised; p itself where rounding leaves nothing of it."""
    rest = np.maximum(p.probs - q.of(p.ids), 0.0)
    total = rest.sum()
    return Distribution(p.ids, rest / total) if total > 0 else p


def draw(p: Distribution, seed: int, position: int) -> int:
    """A token from p, by Gumbel-max."""
    with np.errstate(divide="ignore"):
        scores = np.log(p.probs) + gumbel(seed, position, p.ids)
    return int(p.ids[np.argmax(scores)])


ROW = AcceptRow(
    title="rejection sampling",
    lossless="distribution",
    accept=accept,
    options=RejectionAcceptance,
    draws_drafts=True,
    chains_only=True,
)
