"""The table of methods whose drafts `quantize draft` takes, by the name of the row in METHODS: the
draft as a torch module whose float32 weights are not loaded yet, what it is calibrated on, and its
names."""

from __future__ import annotations

from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.methods import dflash, dspark, eagle1, eagle3, jetspec
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.quantize.row import CalibrationPair, QuantizeRow, next_tokens

BLOCKS_PER_WINDOW = 4
Named = tuple[Checkpoint, dict[str, str]]


def _eagle1_module(config: DraftConfig) -> Any:
    from edgespec.modules.eagle1 import Eagle1

    assert isinstance(config, eagle1.Eagle1Config)
    return Eagle1(config)


def _eagle1_names(draft: Checkpoint, config: DraftConfig) -> Named:
    from edgespec.graphs.eagle1 import named_tensors

    assert isinstance(config, eagle1.Eagle1Config)
    return named_tensors(draft, config)


def _eagle3_module(config: DraftConfig) -> Any:
    from edgespec.modules.eagle3 import Eagle3

    assert isinstance(config, eagle3.Eagle3Config)
    return Eagle3(config)


def _eagle3_names(draft: Checkpoint, config: DraftConfig) -> Named:
    from edgespec.graphs.eagle3 import named_tensors

    assert isinstance(config, eagle3.Eagle3Config)
    return named_tensors(draft, config)


def _block_module(config: DraftConfig) -> Any:
    from edgespec.modules.block_draft import BlockDraftModule

    assert isinstance(config, BlockDraftConfig)
    return BlockDraftModule(config)


def _block_names(draft: Checkpoint, config: DraftConfig) -> Named:
    from edgespec.graphs.block_draft import named_tensors

    assert isinstance(config, BlockDraftConfig)
    return named_tensors(draft, config)


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


# Of DSpark without its heads, which are computed in float32
BLOCKS = QuantizeRow(
    module=_block_module,
    pairs=blocks_of,
    names=_block_names,
    casts_hidden_states=False,  # fc is computed in float32 whatever it reads
    quantizes_shared_head=True,
)
QUANTIZABLE: dict[str, QuantizeRow] = {
    eagle1.NAME: QuantizeRow(
        module=_eagle1_module,
        pairs=next_tokens,
        names=_eagle1_names,
        quantizes_shared_head=True,
        reads_final=True,
    ),
    eagle3.NAME: QuantizeRow(module=_eagle3_module, pairs=next_tokens, names=_eagle3_names),
    dflash.NAME: BLOCKS,
    jetspec.NAME: BLOCKS,
    dspark.NAME: BLOCKS,
}
