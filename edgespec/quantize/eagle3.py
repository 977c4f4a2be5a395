"""EAGLE-3 drafts for `quantize draft`: what they are calibrated on, and their names."""

from __future__ import annotations

from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.methods.eagle3 import NAME, Eagle3Config
from edgespec.quantize.row import QuantizeRow, next_tokens

__all__ = ["NAME", "QUANTIZE"]


def module(config: DraftConfig) -> Any:
    """The draft as a torch module with float32 weights that are not loaded yet."""
    from edgespec.modules.eagle3 import Eagle3

    assert isinstance(config, Eagle3Config)
    return Eagle3(config)


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The draft as it is, and own name -> name on disk of each tensor of the graph."""
    from edgespec.graphs.eagle3 import named_tensors

    assert isinstance(config, Eagle3Config)
    return named_tensors(draft, config)


QUANTIZE = QuantizeRow(module=module, pairs=next_tokens, names=names)
