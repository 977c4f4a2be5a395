"""An EAGLE-1 draft as a torch module (arXiv 2401.15077), without a cache.

Its parameters have the names of `graphs.eagle1.expected_tensors`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from edgespec.config import AttentionSpec
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm, rope_rows
from edgespec.modules.unrolled import Attend

Tensor = torch.Tensor


class Eagle1Layer(nn.Module):
    """An ordinary decoder layer, with or without a norm before its attention."""

    def __init__(self, config: Eagle1Config, index: int) -> None:
        super().__init__()
        spec, hidden = config.decoder.layers[index], config.decoder.hidden_size
        assert isinstance(spec.mixer, AttentionSpec)
        self.self_attn = AttentionModule(spec.mixer, hidden, hidden, spec.norm.eps)
        self.mlp = MLP(hidden, spec.mlp.intermediate_size, bias=spec.mlp.bias)
        self.normed_first = spec.norm_names.before_mixer is not None
        if self.normed_first:
            self.input_layernorm = RMSNorm(hidden, spec.norm.eps)
        self.post_attention_layernorm = RMSNorm(hidden, spec.norm.eps)

    def forward(self, x: Tensor, attend: Callable[[AttentionModule, Tensor], Tensor]) -> Tensor:
        """[..., S, H] -> [..., S, H]"""
        x = x + attend(self.self_attn, self.input_layernorm(x) if self.normed_first else x)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Eagle1(nn.Module):
    """The draft: fc over embedding and hidden state, layers, and its lm_head or the base's."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        # ModelOpt takes `config` for one of transformers, and writes to it
        self.draft_config = config
        hidden = config.decoder.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            Eagle1Layer(config, i) for i in range(config.decoder.num_layers)
        )
        if config.last_norm:
            self.norm = RMSNorm(hidden, config.decoder.norm.eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    def forward(self, hidden_states: Tensor, embeds: Tensor) -> Tensor:
        """Hidden states [..., S, H] of tokens t, after the base's last norm, and embeddings
        [..., S, H] of tokens t + 1 -> logits [..., S, Vd] for t + 2."""
        rope = self.draft_config.decoder.rope
        cos, sin = rope_rows(rope, hidden_states.shape[-2], hidden_states)
        state = self.fuse(hidden_states)
        read, _ = self.run(embeds, state, lambda index, attention, x: attention(x, cos, sin))
        return self.lm_head(read)  # type: ignore[no-any-return]

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The first state is the base's own, [..., H]."""
        return hidden_states

    def run(self, embeds: Tensor, state: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Embeddings and state [..., S, H] each -> what the lm_head reads, and the state that the
        next step reads."""
        x = self.fc(torch.cat([embeds, state], dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(x, partial(attend, index))
        read = self.norm(x) if self.draft_config.last_norm else x
        return read, read if self.draft_config.norm_output else x
