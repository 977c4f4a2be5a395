"""A block draft as a torch module: one block, without a cache.

Its parameters have the names of `checkpoint.block_draft.expected_tensors`. Knows nothing of files
or quantization.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm, rope_rows

Tensor = torch.Tensor


class BlockAttention(AttentionModule):
    """Attention of a block over its context and itself."""

    def __init__(self, config: BlockDraftConfig, index: int) -> None:
        layer = config.decoder
        super().__init__(layer.attention, layer.hidden_size, layer.hidden_size, layer.norm.eps)
        self.window, self.causal = config.windows[index], config.causal[index]

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        """The block x [B, H] behind the context [n, H] -> [B, H]"""
        rows, seen = torch.cat([context, x]), self.seen(len(context), len(x))
        return self.attended(x, rows, cos, sin, seen)

    def seen(self, known: int, rows: int) -> Tensor:
        """The mask [B, n + B]: the context within the window, and the block up to the row itself
        where it is causal."""
        device = self.o_proj.weight.device
        distance = (
            known
            + torch.arange(rows, device=device)[:, None]
            - torch.arange(known + rows, device=device)
        )
        near = distance < (self.window or known + rows + 1)
        inside = distance >= 0 if self.causal else torch.ones_like(near)
        return torch.where(torch.arange(known + rows, device=device) < known, near, inside)


class BlockDraftLayer(nn.Module):
    """A pre-norm decoder layer whose input norm is for the block alone."""

    def __init__(self, config: BlockDraftConfig, index: int) -> None:
        super().__init__()
        hidden, eps, layer = config.decoder.hidden_size, config.decoder.norm.eps, config.decoder
        self.self_attn = BlockAttention(config, index)
        self.mlp = MLP(hidden, layer.intermediate_size, bias=layer.layers[0].mlp.bias)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The block x [B, H] behind the context [n, H] -> [B, H]"""
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class BlockDraftModule(nn.Module):
    """The draft: fused aux hidden states as context, layers, lm_head."""

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        # ModelOpt takes `config` for one of transformers, and writes to it
        self.draft_config = config
        layer = config.decoder
        hidden, eps = layer.hidden_size, layer.norm.eps
        self.fc = nn.Linear(
            len(config.aux_layer_ids) * config.target_hidden_size, hidden, bias=False
        )
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockDraftLayer(config, i) for i in range(layer.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def forward(self, hidden_states: Tensor, embeds: Tensor) -> Tensor:
        """Aux hidden states [n, k * Ht] of the context and embeddings [B, H] of a block behind it
        -> logits [B, Vd].

        fc is computed in float32: sums of such states go beyond the range of halves.
        """
        context = self.hidden_norm(
            F.linear(hidden_states.float(), self.fc.weight.float()).to(embeds.dtype)
        )
        count = len(hidden_states) + len(embeds)
        cos, sin = rope_rows(self.draft_config.decoder.rope, count, embeds)
        x = embeds
        for layer in self.layers:
            x = layer(x, context, cos, sin)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]
