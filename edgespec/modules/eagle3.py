"""An EAGLE-3 draft as a torch module (arXiv 2503.01840), without a cache.

Its parameters have the names of `graphs.eagle3.expected_tensors`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

import torch
from torch import nn

from edgespec.methods.eagle3 import Eagle3Config
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm, rope_rows

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

    def forward(self, embeds: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Embeddings and state [S, H] each -> the state [S, H] behind the layer."""
        if self.first:
            normed = self.hidden_norm(state)
            attended = self.self_attn(
                torch.cat([self.input_layernorm(embeds), normed], dim=-1), cos, sin
            )
            state = normed if self.norm_before_residual else state
        else:
            attended = self.self_attn(self.input_layernorm(state), cos, sin)
        state = state + attended
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
        """Aux hidden states [S, k * Ht] of tokens t and embeddings [S, H] of tokens t + 1 -> logits
        [S, Vd] for t + 2."""
        if self.draft_config.norm_before_fc:
            hidden_states = self.input_norm(hidden_states)
        if self.draft_config.fc_norm:
            parts = hidden_states.chunk(self.draft_config.num_aux_layers, dim=-1)
            hidden_states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        rope = self.draft_config.decoder.rope
        cos, sin = rope_rows(rope, len(hidden_states), hidden_states)
        state = self.fc(hidden_states)
        for layer in self.layers:
            state = layer(embeds, state, cos, sin)
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]
