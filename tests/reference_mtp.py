"""A slow and plain second opinion in torch: Qwen3.5's head for multi-token prediction.

Composed of transformers' own decoder layer, norms and rotary embedding, from the description of the
head; reads checkpoints in its own way and shares no line with edgespec. Each call computes all
pairs anew, in float32.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

PRE_NORM, EMBEDDING_SECOND, RECYCLES_PRE_NORM, ROPE_BASE = (
    "pre-norm",
    "embedding second",
    "recycles pre-norm",
    "theta",
)
READINGS = (PRE_NORM, EMBEDDING_SECOND, RECYCLES_PRE_NORM, ROPE_BASE)  # what could be mistaken


class MtpReference:
    """The head of a checkpoint, and the base's states that it reads; `mistake` is one of READINGS,
    to be told apart."""

    def __init__(self, path: Path, model: Any, mistake: str | None = None) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

        self.model, self.mistake = model, mistake
        stored = {
            name: t.float()
            for file in sorted(path.glob("*.safetensors"))
            for name, t in load_file(file).items()
        }
        weights = {
            name.removeprefix("mtp."): tensor
            for name, tensor in stored.items()
            if name.startswith("mtp.")
        }
        config = deepcopy(model.config.get_text_config())
        config.layer_types, config._attn_implementation = ["full_attention"], "eager"
        if mistake == ROPE_BASE:
            config.rope_parameters = config.rope_parameters | {"rope_theta": 10000.0}
        mixture = hasattr(config, "num_experts")
        kind: Any = Qwen3_5MoeDecoderLayer if mixture else qwen.Qwen3_5DecoderLayer
        self.layer = kind(config, 0).float().eval()
        self.rotary = qwen.Qwen3_5TextRotaryEmbedding(config)
        self.layer.load_state_dict(
            {
                name.removeprefix("layers.0."): tensor
                for name, tensor in weights.items()
                if name.startswith("layers.0.")
            }
        )
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].weight.data = weights[f"{name}.weight"]
        self.fc = weights["fc.weight"]

    @torch.no_grad()
    def base_states(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, H]: the base's states of a sequence [n], after the last norm."""
        before_norm: list[torch.Tensor] = []
        text = (
            self.model.model.language_model
            if hasattr(self.model.model, "language_model")
            else self.model.model
        )
        hook = text.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
        out = self.model(ids[None], output_hidden_states=True, use_cache=False)
        hook.remove()
        return (before_norm[0] if self.mistake == PRE_NORM else out.hidden_states[-1])[0]

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of a token [n] and the state before it [n, H], at positions 0 .. n-1: logits [n,
        V], states [n, H]."""
        embedded = self.norms["pre_fc_norm_embedding"](self.model.get_input_embeddings()(tokens))
        halves = [embedded, self.norms["pre_fc_norm_hidden"](states)]
        if self.mistake == EMBEDDING_SECOND:
            halves.reverse()
        x = torch.cat(halves, -1)[None] @ self.fc.T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[
            None, None
        ]
        rotated = self.rotary(x, positions[None].expand(3, -1, -1))
        out = self.layer(
            x, position_embeddings=rotated, attention_mask=mask, position_ids=positions
        )[0]
        out = out if out.dim() == 2 else out[0]
        normed = self.norms["norm"](out)
        return self.model.lm_head(normed), out if self.mistake == RECYCLES_PRE_NORM else normed

    def chain(
        self, tokens: torch.Tensor, states: torch.Tensor, drafts: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with drafted tokens behind, each with the head's own state of the pair before:
        the last rows."""
        logits, own = self.forward(tokens, states)
        for token in drafts:
            tokens, states = (
                torch.cat([tokens, torch.tensor([token])]),
                torch.cat([states, own[-1:]]),
            )
            logits, own = self.forward(tokens, states)
        return logits[-1 - len(drafts) :], own[-1 - len(drafts) :]
