"""DFlash's draft (arXiv 2602.06036): a block draft without heads."""

from __future__ import annotations

from edgespec.graphs.block_draft import check, open_draft
from edgespec.graphs.draft import DraftGraphs
from edgespec.methods.dflash import NAME

__all__ = ["GRAPHS", "NAME"]

GRAPHS = DraftGraphs(open=open_draft, check=check)
