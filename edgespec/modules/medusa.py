"""Medusa heads as a torch module (arXiv 2401.10774).

Its parameters have the own names of `graphs.medusa.expected_tensors`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.methods.medusa import MedusaConfig

Tensor = torch.Tensor


class Head(nn.Module):
    """Residual blocks, which begin as the identity, and a matrix of logits where each head has one
    of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        hidden = config.decoder.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.num_blocks))
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)
        if config.own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The head's state [..., H] of the base's: x + SiLU(W x + b), block after block."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class Medusa(nn.Module):
    """The heads, all over the base's state after its last norm."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.draft_config = config
        self.heads = nn.ModuleList(Head(config) for _ in range(config.num_heads))
        if not config.own_head:
            self.lm_head = nn.Linear(config.decoder.hidden_size, 1, bias=False)  # the base's comes

    def forward(self, hidden_states: Tensor, index: int) -> Tensor:
        """Hidden states [..., H] of tokens t -> logits [..., V] of head `index` for t + 2 +
        index."""
        head: Any = self.heads[index]
        lm_head = head.lm_head if self.draft_config.own_head else self.lm_head
        return lm_head(head(hidden_states))  # type: ignore[no-any-return]
