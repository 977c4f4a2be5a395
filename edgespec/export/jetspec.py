"""JetSpec (arXiv 2606.18394) on its way out."""

from __future__ import annotations

from edgespec.export.block_draft import component_row
from edgespec.methods.jetspec import NAME

__all__ = ["COMPONENTS", "NAME"]

COMPONENTS = component_row(NAME)
