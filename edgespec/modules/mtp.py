"""The head for multi-token prediction of Qwen3.5 as a torch module: a step over states and tokens,
which `unrolled` runs again over its own states (arXiv 2404.19737).

Its parameters have the names of the checkpoint below `mtp.`. Knows nothing of files or
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from edgespec.config import DraftConfig, LayerSpec
from edgespec.config.values import MlpSpec
from edgespec.modules.layers import MLP, AttentionModule, RMSNorm
from edgespec.modules.unrolled import Attend

Tensor = torch.Tensor


class Experts(nn.Module):
    """A mixture of experts (arXiv 2101.03961), each of which reads the rows that chose it."""

    def __init__(self, spec: MlpSpec, hidden: int) -> None:
        super().__init__()
        assert spec.experts is not None
        self.spec, inner = spec.experts, spec.intermediate_size
        self.gate = nn.Linear(hidden, self.spec.count, bias=False)
        self.experts = nn.ModuleList(
            MLP(hidden, inner, bias=spec.bias) for _ in range(self.spec.count)
        )
        if shared := self.spec.shared_size:
            self.shared_expert = MLP(hidden, shared, bias=spec.bias)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        rows = x.flatten(0, -2)
        shares, chosen = self.gate(rows).float().softmax(-1).topk(self.spec.per_token)
        if self.spec.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(rows)
        if self.spec.shared_size:
            total = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        for number, expert in enumerate(self.experts):
            place, rank = torch.where(chosen == number)
            out = expert(rows[place]) * shares[place, rank, None]
            total = total.index_add(0, place, out.to(total.dtype))
        return total.view(x.shape)


class MtpLayer(nn.Module):
    """A pre-norm decoder layer with full attention, as the base's own are."""

    def __init__(self, layer: LayerSpec, hidden: int) -> None:
        super().__init__()
        norm = partial(RMSNorm, eps=layer.norm.eps, unit_offset=layer.norm.unit_offset)
        self.self_attn = AttentionModule(
            layer.mixer,  # type: ignore[arg-type]
            hidden, hidden, layer.norm.eps, unit_offset=layer.norm.unit_offset,
        )  # fmt: skip
        self.mlp = (
            Experts(layer.mlp, hidden)
            if layer.mlp.experts is not None
            else MLP(hidden, layer.mlp.intermediate_size, bias=layer.mlp.bias)
        )
        self.input_layernorm, self.post_attention_layernorm = norm(hidden), norm(hidden)

    def forward(self, x: Tensor, attend: Callable[[AttentionModule, Tensor], Tensor]) -> Tensor:
        """[..., S, H] -> [..., S, H]"""
        x = x + attend(self.self_attn, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MtpModule(nn.Module):
    """The head: fc over the normed embedding and state, a layer, a norm. The lm_head is the
    base's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.draft_config, decoder = config, config.decoder
        hidden, spec = decoder.hidden_size, decoder.norm
        norm = partial(RMSNorm, eps=spec.eps, unit_offset=spec.unit_offset)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden), norm(hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(MtpLayer(layer, hidden) for layer in decoder.layers)
        self.norm = norm(hidden)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The base's state [..., H] after its last norm is the first state as it is."""
        return hidden_states

    def run(self, embeds: Tensor, state: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens t + 1 and states [..., S, H] of tokens t each -> what the lm_head
        reads for t + 2, which is also the state that the next step reads."""
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(state)]
        x = self.fc(torch.cat(both, dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(x, partial(attend, index))
        normed = self.norm(x)
        return normed, normed
