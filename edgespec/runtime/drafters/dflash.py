"""DFlash's search: a block of drafts in one pass (arXiv 2602.06036), as a chain or as a DDTree
(arXiv 2604.12989), the most probable nodes of the tree that the slots' candidates span.

The slots of a block are drafted side by side and do not know of each other.
"""

from __future__ import annotations

from edgespec.methods.dflash import NAME
from edgespec.runtime.drafters.block_drafter import limits, open_tree_drafter, trained_with_thinking
from edgespec.runtime.drafters.row import DrafterRow

__all__ = ["NAME", "ROW"]

ROW = DrafterRow(
    open=open_tree_drafter,
    limits=limits,
    trained_with_thinking=trained_with_thinking,
)
