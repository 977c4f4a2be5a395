"""A slow and plain second opinion in torch: an EAGLE-1 draft, and its static and dynamic trees.

Written from the papers (arXiv 2401.15077, 2406.16858); reads checkpoints in its own way and shares
no line with edgespec. No cache: what a node says is computed anew from all that lies before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

# Ways in which a draft is easily read wrongly
MISTAKES = ("hidden state first", "norm before attention", "no bias", "embedding added")


class Eagle1Reference:
    """A draft, with embedding and lm_head of the base at `base_path` where it has none. `mistake`
    is one of MISTAKES."""

    def __init__(self, path: Path, base_path: Path, mistake: str | None = None) -> None:
        self.raw: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.weights, base = tensors_of(path), tensors_of(base_path)
        self.mistake = mistake
        self.base_table = embedding = base["model.embed_tokens.weight"]
        self.embed_tokens = self.weights.get("embed_tokens.weight", embedding)
        self.lm_head = self.weights.get("lm_head.weight", base.get("lm_head.weight", embedding))
        self.ids = torch.arange(len(self.lm_head))  # base id of each draft id
        if "d2t" in self.weights:
            self.ids = self.ids + self.weights["d2t"].long()

    def forward(
        self, tokens: Sequence[int], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of (state, the token after it) at positions 0, 1, ...: logits [S, Vd] and the states
        [S, H] that the draft says in place of the base's."""
        w, width = self.weights, states.shape[-1]
        embeds = self.embed_tokens[torch.tensor(tokens)].float()
        pair = [states, embeds] if self.mistake == "hidden state first" else [embeds, states]
        x = torch.cat(pair, -1) @ w["fc.weight"].T
        if "fc.bias" in w and self.mistake != "no bias":
            x = x + w["fc.bias"]
        if self.mistake == "embedding added":
            x = x + embeds
        for i in range(self.raw["num_hidden_layers"]):
            layer = f"layers.{i}"
            given = x
            if f"{layer}.input_layernorm.weight" in w:
                given = self.norm(x, f"{layer}.input_layernorm")
            elif self.mistake == "norm before attention":
                given = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            x = x + self.attention(given, f"{layer}.self_attn")
            y = self.norm(x, f"{layer}.post_attention_layernorm")
            gate, up, down = (w[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        normed = self.norm(x, "norm") if "norm.weight" in w else x
        recycled = normed if self.says("return_hidden_post_norm") else x
        assert x.shape[-1] == width
        return normed @ self.lm_head.T, recycled

    def says(self, key: str) -> bool:
        """A switch of the draft's eagle_config."""
        return bool(self.raw.get("eagle_config", {}).get(key))

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        heads, kv = self.raw["num_attention_heads"], self.raw["num_key_value_heads"]
        dim = self.raw.get("head_dim") or self.raw["hidden_size"] // heads

        def rows(part: str, count: int) -> torch.Tensor:  # [count, S, dim]
            y = x @ self.weights[f"{name}.{part}_proj.weight"].T
            y = y + self.weights.get(f"{name}.{part}_proj.bias", torch.zeros(()))
            return y.unflatten(-1, (count, dim)).transpose(0, 1)

        q, k, v = self.turned(rows("q", heads)), self.turned(rows("k", kv)), rows("v", kv)
        k, v = (part.repeat_interleave(heads // kv, 0) for part in (k, v))
        scores = q @ k.mT / dim**0.5
        scores = scores.masked_fill(
            ~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf
        )
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return mixed @ self.weights[f"{name}.o_proj.weight"].T

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, S, D] with rotary embedding at positions 0, 1, ..."""
        half = x.shape[-1] // 2
        theta = float(self.raw.get("rope_theta", 10000.0))
        angle = torch.arange(x.shape[1])[:, None] * theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True) + self.raw["rms_norm_eps"]
        return x * torch.rsqrt(mean) * self.weights[f"{name}.weight"]

    def after(
        self, states: torch.Tensor, following: Sequence[int], drafts: Sequence[int]
    ) -> torch.Tensor:
        """Log-probabilities [Vd] behind the committed pairs (state t, token t + 1) and a chain of
        drafts, each beside the draft's own state of the row before."""
        tokens, rows = [*following], states
        for token in drafts:
            _, own = self.forward(tokens, rows)
            tokens, rows = [*tokens, token], torch.cat([rows, own[-1:]])
        return self.forward(tokens, rows)[0][-1].log_softmax(-1)


def static_tree(
    ref: Eagle1Reference, states: torch.Tensor, following: Sequence[int], choices: Any
) -> list[tuple[int, ...]]:
    """The path of base ids of each node of `choices`: each rank among the children of the node
    before."""
    paths = []
    for ranks in choices:
        path: list[int] = []
        for rank in ranks:
            best = ref.after(states, following, path).sort(descending=True, stable=True).indices
            path.append(int(ref.ids[best[rank]]))
        paths.append(tuple(path))
    return paths


def dynamic_tree(
    ref: Eagle1Reference,
    states: torch.Tensor,
    following: Sequence[int],
    top_k: int,
    levels: int,
    nodes: int,
) -> set[tuple[int, ...]]:
    """The paths of base ids of EAGLE-2's `nodes` best drafts: of each level the `top_k` best go on,
    with `top_k` children each."""
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    everyone: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(levels):
        born = []
        for score, path in level:
            values, best = ref.after(states, following, path).topk(top_k)
            born += [
                (score + float(value), (*path, int(ref.ids[i])))
                for value, i in zip(values, best, strict=True)
            ]
        everyone += born
        level = sorted(born, reverse=True)[:top_k]
    ranked = sorted(everyone, key=lambda node: (-node[0], len(node[1])))
    return {path for _, path in ranked[:nodes]}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, floating ones as float32."""
    pickled = path / "pytorch_model.bin"
    if pickled.exists():
        found = torch.load(pickled, weights_only=True)
    else:
        found = {n: t for f in sorted(path.glob("*.safetensors")) for n, t in load_file(f).items()}
    return {n: t.float() if t.is_floating_point() else t for n, t in found.items()}
