"""The exact rule, sample and walk: at each node the base draws its own token; a child that carries
it is accepted, otherwise the token drawn is the bonus.

The noise of a draw depends on the seed and the absolute position alone, so what comes out is what
plain decoding draws, token for token, whatever the tree proposes. For children that were chosen
without the base's noise the chance that one is accepted is the base's probability of it: rejecting
one child after the other (arXiv 2305.09781, 2401.15077) comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgespec.backends.call import Logits
from edgespec.methods.names import EXACT
from edgespec.runtime.acceptance.base import AcceptOptions, AcceptResult, AcceptRow
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftTree


@dataclass(frozen=True)
class ExactAcceptance(AcceptOptions):
    """The tokens of plain decoding, whatever is drafted. It has no options."""

    rule: ClassVar[str] = EXACT


def walk(tree: DraftTree, logits: Logits, sampler: Sampler, before: Sequence[int]) -> AcceptResult:
    """Walk `tree` by the base's logits [N, V]; `before` are all tokens up to the root, the root
    included."""
    path, emitted = [0], [sampler.pick_from(logits, 0, before)]
    child = tree.child(0, emitted[0])
    if child is None:  # as always without drafts
        return AcceptResult(path, emitted)
    tokens = [*before, *emitted]
    while child is not None:
        path.append(child)
        tokens.append(sampler.pick_from(logits, child, tokens))
        child = tree.child(child, tokens[-1])
    return AcceptResult(path, tokens[len(before) :])


def accept(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: AcceptOptions,
) -> AcceptResult:
    """`walk`, as a row has it."""
    del options
    return walk(tree, logits, sampler, before)


ROW = AcceptRow(title="sample and walk", lossless="tokens", accept=accept, options=ExactAcceptance)
