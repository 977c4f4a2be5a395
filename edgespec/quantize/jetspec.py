"""JetSpec (arXiv 2606.18394) for `quantize draft`."""

from __future__ import annotations

from edgespec.methods.jetspec import NAME
from edgespec.quantize.block_draft import QUANTIZE

__all__ = ["NAME", "QUANTIZE"]
