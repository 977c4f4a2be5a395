"""A block draft as a torch module: one block, or many in a row of text at once, without a cache.

Its parameters have the names of `checkpoint.block_draft.expected_tensors`. Knows nothing of files
or quantization.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.config import RopeConfig
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
        rows, seen = torch.cat([context, x]), self.seen_of_one(len(context), len(x))
        return self.attended(x, rows, cos, sin, seen)

    def blocks(self, x: Tensor, context: Tensor, places: BlockPlaces) -> Tensor:
        """A blocks x [B, A * block, H], each behind the context [B, C, H] up to its anchor -> [B, A
        * block, H]"""
        q, near = (
            self.queries(x, *places.rows),
            OwnBlock(*self.keys(x, *places.rows), places, self.causal),
        )
        far = self.keys(context, *places.context)
        return self.merged(self.joint(q, far, near, places.seen(self.window)), x)

    def seen_of_one(self, known: int, rows: int) -> Tensor:
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

    def forward(self, x: Tensor, attend: Callable[[BlockAttention, Tensor], Tensor]) -> Tensor:
        """[..., H] -> [..., H]"""
        x = x + attend(self.self_attn, self.input_layernorm(x))
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
        context = self.context_of(hidden_states, embeds)
        count = len(hidden_states) + len(embeds)
        cos, sin = rope_rows(self.draft_config.decoder.rope, count, embeds)
        x = embeds
        for layer in self.layers:
            x = layer(x, lambda attention, rows: attention(rows, context, cos, sin))
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]

    def context_of(self, hidden_states: Tensor, embeds: Tensor) -> Tensor:
        """Aux hidden states [..., k * Ht] -> what all layers read of them, [..., H], in the type of
        the embeddings."""
        fused = F.linear(hidden_states.float(), self.fc.weight.float())
        return self.hidden_norm(fused.to(embeds.dtype))  # type: ignore[no-any-return]

    def blocks(self, hidden_states: Tensor, embeds: Tensor, anchors: Tensor) -> Tensor:
        """Aux hidden states [B, C, k * Ht] of a text and embeddings [B, A, block, H] of blocks that
        begin at the positions `anchors` [B, A] -> what the lm_head reads, [B, A, block, H]. A block
        sees the states before its anchor."""
        context, shape = self.context_of(hidden_states, embeds), embeds.shape
        rope = self.draft_config.decoder.rope
        places = BlockPlaces(rope, anchors, hidden_states.shape[1], shape[2])
        x = embeds.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, lambda attention, rows: attention.blocks(rows, context, places))
        return self.norm(x).view(shape)  # type: ignore[no-any-return]


class BlockPlaces:
    """Where the rows of A blocks in each of B texts stand: cos and sin of context and rows, and
    what a row sees of the context."""

    def __init__(self, rope: RopeConfig, anchors: Tensor, known: int, block_size: int) -> None:
        self.block_size, self.num_blocks = block_size, anchors.shape[1]
        slots = torch.arange(block_size, device=anchors.device)
        positions = (anchors[..., None] + slots).flatten(1)  # [B, A * block]
        cos, sin = rope_rows(rope, known + block_size, anchors)
        self.context = cos[:known], sin[:known]
        self.rows = cos[positions][:, None], sin[positions][:, None]
        self.before = anchors.repeat_interleave(block_size, 1)[..., None]  # [B, A * block, 1]
        self.distance = positions[..., None] - torch.arange(known, device=anchors.device)

    def seen(self, window: int | None) -> Tensor:
        """The mask [B, 1, 1, A * block, C]: the context before the anchor, within the window."""
        places = torch.arange(self.distance.shape[-1], device=self.distance.device)
        near = self.distance < (window or self.distance.shape[-1] + self.block_size + 1)
        return ((places < self.before) & near)[:, None, None]


class OwnBlock:
    """Keys and values of blocks, of which each row sees those of its own block."""

    def __init__(self, keys: Tensor, values: Tensor, places: BlockPlaces, causal: bool) -> None:
        self.parts, self.causal = (places.num_blocks, places.block_size), causal
        self.keys, self.values = self.split(keys[:, :, None]), self.split(values[:, :, None])

    def split(self, x: Tensor) -> Tensor:
        """[..., A * block, D] -> [..., A, block, D]"""
        return x.reshape(*x.shape[:-2], *self.parts, x.shape[-1])

    def scores(self, q: Tensor) -> Tensor:
        """Those of `Near`."""
        scores = self.split(q) @ self.keys.transpose(-1, -2)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return scores.flatten(3, 4)

    def mixed(self, weights: Tensor) -> Tensor:
        """That of `Near`."""
        return (self.split(weights) @ self.values).flatten(3, 4)
