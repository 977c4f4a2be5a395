"""EAGLE-1 drafts for `quantize draft`: what they are calibrated on, and their names."""

from __future__ import annotations

from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.methods.eagle1 import NAME, Eagle1Config
from edgespec.quantize.row import QuantizeRow, next_tokens

__all__ = ["NAME", "QUANTIZE"]


def module(config: DraftConfig) -> Any:
    """The draft as a torch module with float32 weights that are not loaded yet."""
    from edgespec.modules.eagle1 import Eagle1

    assert isinstance(config, Eagle1Config)
    return Eagle1(config)


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The draft as it is, and own name -> name on disk of each tensor of the graph."""
    from edgespec.graphs.eagle1 import named_tensors

    assert isinstance(config, Eagle1Config)
    return named_tensors(draft, config)


QUANTIZE = QuantizeRow(
    module=module, pairs=next_tokens, names=names, quantizes_shared_head=True, reads_final=True
)
