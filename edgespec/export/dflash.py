"""DFlash (arXiv 2602.06036) on its way out."""

from __future__ import annotations

from edgespec.export.block_draft import component_row
from edgespec.methods.dflash import NAME

__all__ = ["COMPONENTS", "NAME"]

COMPONENTS = component_row(NAME)
