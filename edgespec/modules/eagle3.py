"""An EAGLE-3 draft as a torch module (arXiv 2503.01840): over true hidden states in one pass, and
unrolled over its own.

Its parameters have the names of `graphs.eagle3.expected_tensors`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from edgespec.methods.eagle3 import Eagle3Config
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm, rope_rows, scaled_dot_product

Tensor = torch.Tensor
Attend = Callable[[AttentionModule, Tensor], Tensor]
Rows = Callable[[int, int], tuple[Tensor, Tensor]]


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

    def forward(self, embeds: Tensor, state: Tensor, attend: Attend) -> Tensor:
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
        for layer in self.layers:
            state = layer(embeds, state, lambda attention, x: attention(x, cos, sin))
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

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


class Unrolled:
    """The training-time test (section 3.2): chain i begins at the true states of positions 0..i,
    and goes on from its own. All chains of a sequence go on at once.

    A chain sees the first keys and values of all positions up to its own, and those of its own
    later steps.
    """

    def __init__(self, draft: Eagle3, hidden_states: Tensor, rows: Rows | None = None) -> None:
        """`hidden_states` are the aux hidden states [B, W, k * Ht] of W positions. `rows` gives cos
        and sin of (step, rows) where positions are not those of a text."""
        self.draft, self.state, self.num_steps = draft, draft.fuse(hidden_states), 0
        self.rows = rows or self.text_rows
        self.first: list[tuple[Tensor, Tensor]] = []  # per layer: keys and values of step 0
        self.own = [OwnSteps() for _ in draft.layers]

    def step(self, embeds: Tensor) -> Tensor:
        """Embeddings [B, n, H] of the tokens that the first n chains read now: token i + 1 + step
        of the text, or what a chain drafted last -> what the lm_head reads, [B, n, H]."""
        rows = embeds.shape[1]
        cos, sin = self.rows(self.num_steps, rows)
        state = self.state[:, :rows]
        for index, layer in enumerate(self.draft.layers):
            state = layer(embeds, state, partial(self.attend, index, cos, sin))
        self.num_steps += 1
        normed: Tensor = self.draft.norm(state)
        self.state = normed if self.draft.draft_config.norm_output else state
        return normed

    def text_rows(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin of a text: a step is a position further."""
        cos, sin = rope_rows(self.draft.draft_config.decoder.rope, step + rows, self.state)
        return cos[step:], sin[step:]

    def attend(
        self, index: int, cos: Tensor, sin: Tensor, attention: AttentionModule, x: Tensor
    ) -> Tensor:
        """Attention of the rows x [B, n, in] of this step in layer `index`."""
        q, (k, v) = attention.queries(x, cos, sin), attention.keys(x, cos, sin)
        rows = x.shape[1]
        if self.num_steps == 0:
            self.first.append((k, v))
            return attention.merged(scaled_dot_product(q, k, v, attention.seen(rows, 0, x.device)))
        far = self.first[index][0][:, :, :rows], self.first[index][1][:, :, :rows]
        self.own[index].add(k, v, attention.window)
        return attention.joint(
            q, far, self.own[index], attention.seen(rows, self.num_steps, x.device)
        )


class OwnSteps:
    """Keys and values of the steps behind the first, of which each chain sees its own."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # [B, kv, n, D] each
        self.values: list[Tensor] = []

    def add(self, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Those of one more step; the ones beyond the window are forgotten."""
        last = slice(-(window or len(self.keys) + 1), None)
        self.keys, self.values = [*self.keys, keys][last], [*self.values, values][last]

    def scores(self, q: Tensor) -> Tensor:
        """Those of `Near`."""
        rows = q.shape[-2]
        return torch.stack([(q * k[:, :, None, :rows]).sum(-1) for k in self.keys], dim=-1)

    def mixed(self, weights: Tensor) -> Tensor:
        """That of `Near`."""
        rows, parts = weights.shape[-2], weights.unbind(-1)
        return torch.stack(
            [w[..., None] * v[:, :, None, :rows] for w, v in zip(parts, self.values, strict=True)]
        ).sum(0)
