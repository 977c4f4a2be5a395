"""A whole model as a draft (arXiv 2211.17192): the graph of a base in the role of a draft.

Knows that its layers are `decoder`'s. How drafts are searched stands in `runtime/drafters`.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DecoderConfig, DraftConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.draft import DraftGraphs, DraftSource
from edgespec.methods.draft_model import NAME, DraftModelConfig

__all__ = ["GRAPHS", "NAME", "DraftModel"]


class DraftModel(Decoder):
    """The graph of a draft model; it reads tokens and its own cache alone."""

    @property
    def layers(self) -> DecoderConfig:
        """The model's own layers."""
        return self.config.decoder

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding and of its logits."""
        return self.config.vocab_size

    @property
    def shape(self) -> GraphShape:
        """The sizes of the plain decoder, in the role of a draft."""
        return replace(super().shape, role=Role.DRAFT)


def open_draft(source: DraftSource) -> DraftModel:
    """The model of a source. Raises what `Decoder.open` raises."""
    checkpoint, config = source.draft()
    assert isinstance(config, DraftModelConfig)
    return DraftModel.open(checkpoint, config.model)


def check(checkpoint: Checkpoint, config: DraftConfig) -> None:
    """CheckpointError where the checkpoint lacks a tensor of the model or has others,
    UnsupportedModel for layers that no graph computes."""
    assert isinstance(config, DraftModelConfig)
    Decoder.open(checkpoint, config.model)


GRAPHS = DraftGraphs(open=open_draft, check=check)
