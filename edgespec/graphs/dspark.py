"""DSpark's draft (arXiv 2607.05147): a block draft that gives its states to the heads beside it."""

from __future__ import annotations

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.graphs.block_draft import BlockDraft, named_tensors
from edgespec.graphs.draft import DraftGraphs, DraftSource
from edgespec.methods.dspark import NAME, DSparkConfig

__all__ = ["GRAPHS", "NAME"]


def open_draft(source: DraftSource) -> BlockDraft:
    """The draft of a source. Raises what `BlockDraft.open` raises."""
    checkpoint, config = source.draft()
    assert isinstance(config, DSparkConfig)
    return BlockDraft.open(checkpoint, config, source.base, config.head_shapes)


def check(checkpoint: Checkpoint, config: DraftConfig) -> None:
    """CheckpointError or UnsupportedModel where the checkpoint has no such draft."""
    assert isinstance(config, DSparkConfig)
    named_tensors(checkpoint, config, config.head_shapes)


GRAPHS = DraftGraphs(open=open_draft, check=check)
