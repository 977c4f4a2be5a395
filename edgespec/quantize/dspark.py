"""DSpark (arXiv 2607.05147) for `quantize draft`: its layers as those of other block drafts; its
heads stay as they are, as they are computed in float32 beside the graph."""

from __future__ import annotations

from dataclasses import replace

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.graphs.block_draft import named_tensors
from edgespec.methods.dspark import NAME, DSparkConfig
from edgespec.quantize import block_draft

__all__ = ["NAME", "QUANTIZE"]


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The draft under our own names, and own name -> that name of each tensor of the graph. Raises
    as `named_tensors` does."""
    assert isinstance(config, DSparkConfig)
    return named_tensors(draft, config, config.head_shapes)


QUANTIZE = replace(block_draft.QUANTIZE, names=names)
