"""Pairs with JetSpec (arXiv 2606.18394)."""

from __future__ import annotations

from edgespec.methods.jetspec import NAME
from edgespec.pairing.block_draft import pairing_row

__all__ = ["NAME", "PAIRING"]

PAIRING = pairing_row()
