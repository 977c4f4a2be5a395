"""JetSpec's draft (arXiv 2606.18394): a block draft without heads, whose masks are causal."""

from __future__ import annotations

from edgespec.graphs.block_draft import GRAPHS
from edgespec.methods.jetspec import NAME

__all__ = ["GRAPHS", "NAME"]
