"""An EAGLE-3 draft as a torch module (arXiv 2503.01840): over true hidden states in one pass, and
a step of its own (see `unrolled`).

Its parameters have the names of `graphs.eagle3.expected_tensors`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from edgespec.methods.eagle3 import Eagle3Config
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm, rope_rows
from edgespec.modules.unrolled import Attend

Tensor = torch.Tensor


class Eagle3Layer(nn.Module):
    """The first one reads the embedding beside the state; further ones are ordinary."""

    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        hidden, eps = config.decoder.hidden_size, config.decoder.norm.eps
        spec = config.decoder.attention
        self.self_attn = AttentionModule(spec, 2 * hidden if first else hidden, hidden, eps)
        self.mlp = MLP(
            hidden, config.decoder.intermediate_size, bias=config.decoder.layers[0].mlp.bias
        )
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.first, self.norm_before_residual = first, config.norm_before_residual

    def forward(
        self, embeds: Tensor, state: Tensor, attend: Callable[[AttentionModule, Tensor], Tensor]
    ) -> Tensor:
        """Embeddings and state [..., S, H] each -> the state [..., S, H] behind the layer."""
        if self.first:
            normed = self.hidden_norm(state)
            read = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            state = normed if self.norm_before_residual else state
        else:
            read = self.input_layernorm(state)
        state = state + attend(self.self_attn, read)
        return state + self.mlp(self.post_attention_layernorm(state))  # type: ignore[no-any-return]


class Eagle3(nn.Module):
    """The draft (arXiv 2503.01840): fc over fused aux hidden states, layers, lm_head."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        # ModelOpt takes `config` for one of transformers, and writes to it
        self.draft_config = config
        hidden, eps, aux_layers = (
            config.decoder.hidden_size,
            config.decoder.norm.eps,
            config.num_aux_layers,
        )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux_layers * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps) for _ in range(aux_layers)
            )
        self.fc = nn.Linear(aux_layers * config.target_hidden_size, hidden, bias=False)
        self.layers = nn.ModuleList(
            Eagle3Layer(config, i == 0) for i in range(config.decoder.num_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def forward(self, hidden_states: Tensor, embeds: Tensor) -> Tensor:
        """Aux hidden states [..., S, k * Ht] of tokens t and embeddings [..., S, H] of tokens t + 1
        -> logits [..., S, Vd] for t + 2."""
        rope = self.draft_config.decoder.rope
        cos, sin = rope_rows(rope, hidden_states.shape[-2], hidden_states)
        state = self.fuse(hidden_states)
        read, _ = self.run(embeds, state, lambda index, attention, x: attention(x, cos, sin))
        return self.lm_head(read)  # type: ignore[no-any-return]

    def run(self, embeds: Tensor, state: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Embeddings and state [..., S, H] each -> what the lm_head reads, and the state that the
        next step reads."""
        for index, layer in enumerate(self.layers):
            state = layer(embeds, state, partial(attend, index))
        normed: Tensor = self.norm(state)
        return normed, normed if self.draft_config.norm_output else state

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Aux hidden states [..., k * Ht] -> the first state [..., H]."""
        if self.draft_config.norm_before_fc:
            hidden_states = self.input_norm(hidden_states)
        if self.draft_config.fc_norm:
            parts = hidden_states.chunk(self.draft_config.num_aux_layers, dim=-1)
            hidden_states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(hidden_states)  # type: ignore[no-any-return]
