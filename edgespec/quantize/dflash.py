"""DFlash (arXiv 2602.06036) for `quantize draft`."""

from __future__ import annotations

from edgespec.methods.dflash import NAME
from edgespec.quantize.block_draft import QUANTIZE

__all__ = ["NAME", "QUANTIZE"]
