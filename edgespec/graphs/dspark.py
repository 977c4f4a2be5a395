"""DSpark's draft (arXiv 2607.05147): a block draft that gives its states to the heads beside it."""

from __future__ import annotations

from edgespec.graphs.block_draft import GRAPHS
from edgespec.methods.dspark import NAME

__all__ = ["GRAPHS", "NAME"]
