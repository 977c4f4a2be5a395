"""DFlash's draft (arXiv 2602.06036): a block draft without heads."""

from __future__ import annotations

from edgespec.graphs.block_draft import GRAPHS
from edgespec.methods.dflash import NAME

__all__ = ["GRAPHS", "NAME"]
