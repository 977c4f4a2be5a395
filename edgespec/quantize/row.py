"""What `quantize draft` asks of a drafting method: the columns of QUANTIZABLE. Knows no method.

Rows import torch only when they are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig

# Aux hidden states [n, k * Ht] and the embeddings [m, H] that a draft reads with them
CalibrationPair = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRow:
    """`module` is the draft as a torch module, called with a CalibrationPair.

    `pairs` makes them of one window of text: (config, aux hidden states [S, k * Ht], token ids [S],
    embedding table [vocab, H]). `names` is the draft under the names that will be written, and own
    name -> that name of each tensor. `casts_hidden_states`: the draft reads them in its own type,
    otherwise in that of the base. `quantizes_shared_head`: a draft without an lm_head can get a
    quantized one of its own. `reads_final`: it reads the base's state after the last norm, and no
    aux layers.
    """

    module: Callable[[DraftConfig], Any]
    pairs: Callable[[DraftConfig, Any, Any, Any], list[CalibrationPair]]
    names: Callable[[Checkpoint, DraftConfig], tuple[Checkpoint, dict[str, str]]]
    casts_hidden_states: bool = True
    quantizes_shared_head: bool = False
    reads_final: bool = False


def next_tokens(
    config: DraftConfig, hidden_states: Any, ids: Any, table: Any
) -> list[CalibrationPair]:
    """The `pairs` of a draft of one token a step: one pair, the hidden states of tokens t with the
    embeddings of tokens t + 1."""
    del config
    return [(hidden_states[:-1], table[ids[1:]])]
