"""Decides which drafted tokens are accepted: the table of rules that a request may ask for.

Knows trees and the sampler; knows nothing of engines, caches or text.

The exact rule is sample and walk: at each node the base draws its own token; a child that carries
it is accepted, otherwise the token drawn is the bonus. For children that were chosen without the
base's noise this is exactly the base's distribution; the rejection of one child after the other
(arXiv 2305.09781, 2401.15077) comes to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.sampling import Sampler
from edgespec.runtime.tree import DraftTree


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """`path` are the accepted nodes, the root first; `emitted[i]` is what the base drew at
    `path[i]`, the last one being the bonus. len(emitted) == len(path) == accepted + 1."""

    path: list[int]
    emitted: list[int]


# The tree (with the draft's probabilities where the drafter gives them), the base's logits [N, V],
# the request's sampler and all tokens up to the root, the root included.
AcceptRule = Callable[[DraftTree, NDArray[np.float32], Sampler, Sequence[int]], AcceptResult]


def walk(
    tree: DraftTree, logits: NDArray[np.float32], sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    """Walk `tree` by the base's logits [N, V]; `before` are all tokens up to the root, the root
    included."""
    tokens, path = [*before], [0]
    while True:
        node = path[-1]
        tokens.append(sampler.pick(logits[node], tokens))
        child = tree.child(node, tokens[-1])
        if child is None:
            return AcceptResult(path, tokens[len(before) :])
        path.append(child)


EXACT = "exact"

# Name in a request -> its rule. `exact` is lossless; a rule that is not must say so in its name.
ACCEPT_RULES: dict[str, AcceptRule] = {EXACT: walk}
