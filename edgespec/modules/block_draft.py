"""A block draft as a torch module: one block, without a cache.

Its parameters have the names of `checkpoint.block_draft.expected_tensors`. Knows nothing of files
or quantization.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.modules.layers import MLP, RMSNorm, rotate
from edgespec.rope import RopeTable

Tensor = torch.Tensor


class BlockAttention(nn.Module):
    """Attention of a block over its context and itself, with grouped queries."""

    def __init__(self, config: BlockDraftConfig, index: int) -> None:
        super().__init__()
        layer = config.decoder
        hidden, queries, keys = (
            layer.hidden_size,
            layer.num_heads * layer.head_dim,
            layer.num_kv_heads * layer.head_dim,
        )
        self.num_heads, self.num_kv_heads, self.head_dim = (
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
        )
        self.window, self.causal = config.windows[index], config.causal[index]
        self.q_proj = nn.Linear(hidden, queries, bias=layer.attention.qkv_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=layer.attention.qkv_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=layer.attention.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=layer.attention.o_bias)
        if layer.attention.qk_norm:
            self.q_norm = RMSNorm(layer.head_dim, layer.norm.eps)
            self.k_norm = RMSNorm(layer.head_dim, layer.norm.eps)
        self.qk_norm = layer.attention.qk_norm

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The block x [B, H] behind the context [n, H] -> [B, H]"""
        known, both = len(context), torch.cat([context, x])
        q = self.heads(self.q_proj(x), self.num_heads)
        k = self.heads(self.k_proj(both), self.num_kv_heads)
        v = self.heads(self.v_proj(both), self.num_kv_heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos[known:], sin[known:]), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], self.seen(known, len(x)), enable_gqa=True
        )[0]
        return self.o_proj(mixed.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    def heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[S, heads*D] -> [heads, S, D]"""
        return x.view(len(x), num_heads, self.head_dim).transpose(0, 1)  # [heads, S, D]

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
        table = RopeTable.of(self.draft_config.decoder.rope, len(hidden_states) + len(embeds))
        cos, sin = (torch.from_numpy(rows).to(embeds.device) for rows in (table.cos, table.sin))
        x = embeds
        for layer in self.layers:
            x = layer(x, context, cos, sin)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]
