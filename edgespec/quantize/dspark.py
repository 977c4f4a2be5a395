"""DSpark (arXiv 2607.05147) for `quantize draft`: its layers as those of other block drafts; its
heads stay as they are, as they are computed in float32 beside the graph."""

from __future__ import annotations

from edgespec.methods.dspark import NAME
from edgespec.quantize.block_draft import QUANTIZE

__all__ = ["NAME", "QUANTIZE"]
