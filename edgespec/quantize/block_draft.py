"""Block drafts for `quantize draft`: what they are calibrated on, and their names."""

from __future__ import annotations

from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.quantize.row import CalibrationPair, QuantizeRow

BLOCKS_PER_WINDOW = 4


def module(config: DraftConfig) -> Any:
    """The draft as a torch module with float32 weights that are not loaded yet."""
    from edgespec.modules.block_draft import BlockDraftModule

    assert isinstance(config, BlockDraftConfig)
    return BlockDraftModule(config)


def blocks_of(
    config: DraftConfig, hidden_states: Any, ids: Any, table: Any
) -> list[CalibrationPair]:
    """Contexts of growing length out of a window of text, and a block behind each.

    Blocks begin as decoding begins them, with the token that is known; the rest is masks.
    """
    import torch

    assert isinstance(config, BlockDraftConfig)
    length, parts = len(ids), range(1, BLOCKS_PER_WINDOW + 1)
    anchors = sorted({max(1, length * part // BLOCKS_PER_WINDOW - 1) for part in parts})
    masks: list[int] = [config.mask_token_id] * (config.block_size - 1)
    return [
        (hidden_states[:anchor], table[torch.tensor([int(ids[anchor]), *masks])])
        for anchor in anchors
    ]


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The draft under our own names, which are those that will be written, and own name -> that
    name. Raises as `named_tensors` does."""
    from edgespec.graphs.block_draft import named_tensors

    assert isinstance(config, BlockDraftConfig)
    return named_tensors(draft, config)


QUANTIZE = QuantizeRow(
    module=module,
    pairs=blocks_of,
    names=names,
    casts_hidden_states=False,  # fc is computed in float32 whatever it reads
    quantizes_shared_head=True,
)
