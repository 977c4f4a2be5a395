"""Pairs with DFlash (arXiv 2602.06036)."""

from __future__ import annotations

from edgespec.methods.dflash import NAME
from edgespec.pairing.block_draft import pairing_row

__all__ = ["NAME", "PAIRING"]

PAIRING = pairing_row()
