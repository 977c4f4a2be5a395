"""A whole model as a draft (arXiv 2211.17192): the graph of a base in the role of a draft.

Knows that its layers are `decoder`'s. How drafts are searched stands in `runtime/drafters`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DecoderConfig, DraftConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs.assembly import Inputs, Memory
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.draft import DraftGraphs, DraftSource
from edgespec.graphs.weights import WeightTable
from edgespec.methods.draft_model import NAME, DraftModelConfig

__all__ = ["GRAPHS", "NAME", "DraftModel"]


@dataclass(frozen=True)
class DraftModel:
    """The graph of a draft model; it reads tokens and its own cache alone."""

    decoder: Decoder
    aux_layers: tuple[int, ...] = ()

    @property
    def layers(self) -> DecoderConfig:
        """The model's own layers."""
        return self.decoder.config.decoder

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding and of its logits."""
        return self.decoder.config.vocab_size

    @property
    def table(self) -> WeightTable:
        """The weights of the graph by their own names."""
        return self.decoder.table

    @property
    def shape(self) -> GraphShape:
        """The sizes of the plain decoder, in the role of a draft."""
        return replace(self.decoder.shape, role=Role.DRAFT)

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The embeddings [B, S, H]."""
        return self.decoder.stem(b, inputs)

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """Layer `index` over the stream [B, S, H], and what it leaves for later calls."""
        return self.decoder.layer(b, index, x, inputs)

    def head(
        self, b: GraphBuilder, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, ir.Value | None]:
        """Logits [B, G, V] of the gathered rows; no state."""
        return self.decoder.head(b, x, inputs)


def open_draft(source: DraftSource) -> DraftModel:
    """The model of a source. Raises what `Decoder.open` raises."""
    checkpoint, config = source.draft()
    assert isinstance(config, DraftModelConfig)
    return DraftModel(Decoder.open(checkpoint, config.model))


def check(checkpoint: Checkpoint, config: DraftConfig) -> None:
    """CheckpointError where the checkpoint lacks a tensor of the model or has others,
    UnsupportedModel for layers that no graph computes."""
    assert isinstance(config, DraftModelConfig)
    Decoder.open(checkpoint, config.model)


GRAPHS = DraftGraphs(open=open_draft, check=check)
