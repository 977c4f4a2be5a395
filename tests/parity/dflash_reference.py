"""A slow and plain second opinion on DFlash drafts in torch, written from the description of the
method.

Reads checkpoints in its own way and shares no line with edgespec. There is no cache: a block is
computed from all features before it, each time anew. Everything is float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests import reference

RESPELT = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}


class DFlashReference:
    """A draft read from its directory; embedding and head from the base where it has none.

    `windows` and `causal` are per layer, `aux_layers` hidden_states indices; tests turn them to see
    that it shows.
    """

    def __init__(self, draft_path: str | Path, base_path: str | Path) -> None:
        raw: dict[str, Any] = json.loads(
            (Path(draft_path) / "config.json").read_text(encoding="utf-8")
        )
        layer = raw.get("transformer_layer_config", raw)
        inner = raw.get("dflash_config") or raw.get("jetspec_config") or {}
        self.num_layers: int = layer["num_hidden_layers"]
        self.num_heads: int = layer["num_attention_heads"]
        self.num_kv_heads: int = layer["num_key_value_heads"]
        self.head_dim: int = layer["head_dim"]
        self.eps: float = layer["rms_norm_eps"]
        self.theta: float = layer["rope_theta"]
        self.block_size: int = raw.get("block_size") or inner["block_size"]
        self.mask_token: int = raw.get("mask_token_id") or inner["mask_token_id"]
        self.aux_layers = aux_layer_ids(raw, inner, self.num_layers)
        self.windows, self.causal = spec(raw, layer, inner, self.num_layers)
        self.norms_context = True  # hidden_norm over what fc makes
        self.weights = unfused(float_tensors(draft_path), self)
        base = float_tensors(base_path)
        embedding = base["model.embed_tokens.weight"]
        self.embed_tokens = self.weights.get("embed_tokens.weight", embedding)
        self.lm_head = self.weights.get("lm_head.weight", base.get("lm_head.weight", embedding))
        reduced = raw.get("draft_vocab_size") not in (None, layer["vocab_size"])
        self.d2t = (
            reference.d2t_table(draft_path)
            if reduced
            else torch.arange(layer["vocab_size"]).numpy()
        )

    @torch.no_grad()
    def block(self, features: torch.Tensor, pending: int, size: int) -> torch.Tensor:
        """Logits [size, Vd] of a block behind the features [n, k*H] of positions 0 to n-1."""
        return self.states(features, pending, size) @ self.lm_head.T

    @torch.no_grad()
    def states(self, features: torch.Tensor, pending: int, size: int) -> torch.Tensor:
        """The states [size, H] that the head reads of such a block."""
        n = len(features)
        context = features.float() @ self.weights["fc.weight"].T
        if self.norms_context:
            context = self.norm(context, "hidden_norm")
        x = self.embed_tokens[torch.tensor([pending, *[self.mask_token] * (size - 1)])]
        for i in range(self.num_layers):
            x = x + self.attend(i, self.norm(x, f"layers.{i}.input_layernorm"), context, n)
            x = x + self.mlp(i, self.norm(x, f"layers.{i}.post_attention_layernorm"))
        return self.norm(x, "norm")

    def attend(self, i: int, h: torch.Tensor, context: torch.Tensor, n: int) -> torch.Tensor:
        """Queries of the block alone; keys and values of the context and then of the block."""
        size, name = len(h), f"layers.{i}.self_attn"
        q = self.norm(self.heads(h, f"{name}.q_proj", self.num_heads), f"{name}.q_norm")
        both = [self.heads(rows, f"{name}.k_proj", self.num_kv_heads) for rows in (context, h)]
        k = self.norm(torch.cat(both, dim=1), f"{name}.k_norm")
        v = torch.cat(
            [self.heads(rows, f"{name}.v_proj", self.num_kv_heads) for rows in (context, h)], dim=1
        )
        q, k = self.rotate(q, n + torch.arange(size)), self.rotate(k, torch.arange(n + size))
        group = self.num_heads // self.num_kv_heads
        scores = (
            q @ k.repeat_interleave(group, 0).mT / self.head_dim**0.5
        )  # [heads, size, n + size]
        scores = scores.masked_fill(~self.seen(i, n, size), -torch.inf)
        mixed = scores.softmax(-1) @ v.repeat_interleave(group, 0)
        return self.linear(mixed.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def seen(self, i: int, n: int, size: int) -> torch.Tensor:
        """[size, n + size]: the context within the window; the block whole, or up to the row
        itself."""
        query, key = n + torch.arange(size)[:, None], torch.arange(n + size)
        window = self.windows[i]
        near = torch.ones(1, dtype=torch.bool) if window is None else key > query - window
        inside = key <= query if self.causal[i] else torch.ones(1, dtype=torch.bool)
        return torch.where(key < n, near, inside)

    def heads(self, x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        return (
            self.linear(x, name).unflatten(-1, (count, self.head_dim)).transpose(0, 1)
        )  # [heads, rows, D]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        angles = positions[:, None].double() * self.theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def mlp(self, i: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.linear(x, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            * self.weights[f"{name}.weight"]
        )


def aux_layer_ids(raw: dict[str, Any], inner: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """hidden_states indices: speculators writes these, the others count layers, whose outputs are
    one further."""
    if "aux_hidden_state_layer_ids" in raw:
        return tuple(raw["aux_hidden_state_layer_ids"])
    depth = raw["num_target_layers"]
    even = (
        [depth // 2]
        if num_layers == 1
        else [round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers)]
    )
    ids = inner.get("target_layer_ids") or raw.get("target_layer_ids") or even
    return tuple(layer + 1 for layer in ids)


def spec(
    raw: dict[str, Any], layer: dict[str, Any], inner: dict[str, Any], num_layers: int
) -> tuple[list[int | None], list[bool]]:
    slides = [
        kind == "sliding_attention"
        for kind in layer.get("layer_types") or ["full_attention"] * num_layers
    ]
    if inner.get("use_swa"):
        windows: list[int | None] = [inner["swa_window_size"]] * num_layers
    else:
        windows = [layer["sliding_window"] if slide else None for slide in slides]
    for told in (inner.get("causal_head"), raw.get("is_causal"), inner.get("causal")):
        if told is not None:
            return windows, [told] * num_layers
    return windows, [slide and not raw.get("sliding_window_non_causal") for slide in slides]


def float_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    files = sorted(Path(path).glob("*.safetensors"))
    tensors = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    for theirs, ours in RESPELT.items():
        tensors = {
            name.replace(theirs, ours, 1) if name.startswith(theirs) else name: t
            for name, t in tensors.items()
        }
    return tensors


def unfused(tensors: dict[str, torch.Tensor], ref: DFlashReference) -> dict[str, torch.Tensor]:
    q, kv = ref.num_heads * ref.head_dim, ref.num_kv_heads * ref.head_dim
    out = {}
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            parts = dict(zip("qkv", tensor.split([q, kv, kv]), strict=True))
            out |= {name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in parts.items()}
        elif "gate_up_proj" in name:
            gate, up = tensor.chunk(2)
            out |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            out[name] = tensor
    return out
