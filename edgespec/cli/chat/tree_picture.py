"""The tree that a step verified, as lines for a terminal.

Knows trees and characters. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.runtime.trees.tree import DraftTree

ACCEPTED, REJECTED = "\u25cf", "\u25cb"  # a filled and an empty circle


def tree_picture(
    tree: DraftTree, path: Sequence[int], next_token: int | None, text: Callable[[int], str]
) -> list[tuple[str, bool]]:
    """Returns the lines of a tree, each with whether its node was accepted.

    `path` are the accepted nodes, the root first; `next_token` is the base's own token behind them,
    None where the answer ended before it. `text` gives a token as it is shown. Children stand in
    the order of the draft.
    """
    accepted = set(path)
    last = path[-1]
    lines = [(f"{text(int(tree.tokens[0]))}  (the token before)", True)]

    def below(node: int, indent: str) -> None:
        children = [int(child) for child in np.flatnonzero(tree.parents == node)]
        own = next_token if node == last else None
        for place, child in enumerate(children, start=1):
            is_last = place == len(children) and own is None
            mark = ACCEPTED if child in accepted else REJECTED
            share = "" if tree.probs is None else f"  {float(tree.probs[child]):.0%}"
            token = text(int(tree.tokens[child]))
            branch = "\u2514\u2500 " if is_last else "\u251c\u2500 "
            lines.append((f"{indent}{branch}{mark} {token}{share}", child in accepted))
            below(child, indent + ("   " if is_last else "\u2502  "))
        if own is not None:
            lines.append((f"{indent}\u2514\u2500 {text(own)}  (the base's own)", True))

    below(0, "")
    return lines
