"""Slow and plain second opinions in torch: an EAGLE-3 draft, an EAGLE-2 tree, a base's hidden
states.

Written from the papers (EAGLE-2, EAGLE-3); reads checkpoints in its own way and shares no line with
edgespec. Everything is float32, nothing is fast.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Cache = list[
    tuple[torch.Tensor, torch.Tensor]
]  # per layer: keys and values [B, num_kv_heads, T, head_dim]


class Eagle3Reference:
    """An EAGLE-3 draft (arXiv 2503.01840), read from its directory; embedding and head from the
    base where it has none.

    `embed_tokens` [V, Hd], `lm_head` [Vd, Hd] and `d2t` (absolute base ids, int64 [Vd]) are there
    to be used.
    """

    def __init__(self, draft_path: str | Path, base_path: str | Path) -> None:
        raw = _read_config(draft_path)
        layer = raw.get("transformer_layer_config", raw)
        self.weights = _float_tensors(draft_path)
        self.hidden_size: int = layer["hidden_size"]
        self.num_heads: int = layer["num_attention_heads"]
        self.num_kv_heads: int = layer["num_key_value_heads"]
        self.num_layers: int = layer["num_hidden_layers"]
        self.head_dim: int = layer.get("head_dim") or self.hidden_size // self.num_heads
        self.eps: float = layer["rms_norm_eps"]
        self.theta = _rope_theta(layer)
        self.axes = _axes(layer, self.head_dim // 2)
        self.target_hidden_size: int = raw.get("target_hidden_size", self.hidden_size)
        self.num_aux_layers = self.weights["fc.weight"].shape[1] // self.target_hidden_size
        self.norm_before_residual = _norm_before_residual(raw)
        self.norm_before_fc = bool(raw.get("norm_before_fc", False))
        self.fc_norm = bool(raw.get("fc_norm", False))
        # SpecForge says norm_output for "the head has a norm"; the recycled state is meant by
        # speculators, and by 3.1.
        recycles_norm = "speculators_model_type" in raw or self.fc_norm
        self.norm_output = recycles_norm and bool(raw.get("norm_output", False))
        self.first_layer = (
            "midlayer" if "midlayer.hidden_norm.weight" in self.weights else "layers.0"
        )
        self._aux_layer_ids = _named_aux_layer_ids(raw)

        base = _float_tensors(base_path)
        named = (f"model.{stack}embed_tokens.weight" for stack in ("", "language_model."))
        embedding = next(base[name] for name in named if name in base)
        self.embed_tokens = self.weights.get("embed_tokens.weight", embedding)
        self.lm_head = self.weights.get("lm_head.weight", base.get("lm_head.weight", embedding))
        self.d2t = d2t_table(draft_path)
        assert self.embed_tokens.shape[1] == self.hidden_size
        assert self.lm_head.shape == (len(self.d2t), self.hidden_size)

    def aux_layer_ids(self, num_base_layers: int) -> tuple[int, ...]:
        """hidden_states indices in ascending order: the draft's own, or EAGLE-3's default."""
        default = (2, num_base_layers // 2, num_base_layers - 3)
        return tuple(sorted(self._aux_layer_ids or default))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Base features [B, S, num_aux_layers * Ht] -> [B, S, Hd]."""
        if self.norm_before_fc:
            features = self._norm(features, "input_norm")
        if self.fc_norm:
            aux_layers = features.split(self.target_hidden_size, dim=-1)
            features = torch.cat(
                [self._norm(layer, f"fc_norm.{i}") for i, layer in enumerate(aux_layers)], dim=-1
            )
        return features @ self.weights["fc.weight"].T

    def forward(
        self,
        embeds: torch.Tensor,  # [B, S, Hd]
        hidden: torch.Tensor,  # [B, S, Hd]: fused features, or hidden states of an earlier call
        positions: torch.Tensor,  # int [B, S], or with an axis each for time, height, width
        mask: torch.Tensor,  # bool [B, S, T], T = cached + S, True = attend
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Cache]:
        """Logits [B, S, Vd], the hidden states to recycle [B, S, Hd], and the cache with S more
        rows at its end."""
        new_cache: Cache = []
        stream = hidden
        for i in range(self.num_layers):
            layer = self.first_layer if i == 0 else f"layers.{i}"
            if i == 0:
                normed = self._norm(hidden, f"{layer}.hidden_norm")
                attention_in = torch.cat(
                    [self._norm(embeds, f"{layer}.input_layernorm"), normed], dim=-1
                )
                stream = normed if self.norm_before_residual else hidden
            else:
                attention_in = self._norm(stream, f"{layer}.input_layernorm")
            past = cache[i] if cache is not None else None
            attended, rows = self._attend(attention_in, layer, positions, mask, past)
            stream = stream + attended
            stream = stream + self._mlp(
                self._norm(stream, f"{layer}.post_attention_layernorm"), layer
            )
            new_cache.append(rows)
        final = self._norm(stream, "norm")
        return final @ self.lm_head.T, final if self.norm_output else stream, new_cache

    def _attend(
        self,
        x: torch.Tensor,
        layer: str,
        positions: torch.Tensor,
        mask: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        queries = self._heads(x, f"{layer}.self_attn.q_proj", self.num_heads)
        keys = self._heads(x, f"{layer}.self_attn.k_proj", self.num_kv_heads)
        values = self._heads(x, f"{layer}.self_attn.v_proj", self.num_kv_heads)
        if f"{layer}.self_attn.q_norm.weight" in self.weights:
            queries = self._norm(queries, f"{layer}.self_attn.q_norm")
            keys = self._norm(keys, f"{layer}.self_attn.k_norm")
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        group = self.num_heads // self.num_kv_heads
        scores = (
            queries @ keys.repeat_interleave(group, dim=1).mT * self.head_dim**-0.5
        )  # [B, heads, S, T]
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        mixed = scores.softmax(dim=-1) @ values.repeat_interleave(group, dim=1)
        joined = mixed.transpose(1, 2).flatten(2)
        return joined @ self.weights[f"{layer}.self_attn.o_proj.weight"].T, (keys, values)

    def _heads(self, x: torch.Tensor, name: str, num_heads: int) -> torch.Tensor:
        projected = x @ self.weights[f"{name}.weight"].T
        return projected.unflatten(-1, (num_heads, self.head_dim)).transpose(
            1, 2
        )  # [B, heads, S, D]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding, half and half: pair i is (x[i], x[i + D/2]), turned by position *
        theta^(-2i/D). Of a position with three axes each pair has its own."""
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        own = positions[..., self.axes] if positions.dim() == 3 else positions[..., None]
        angles = own[:, None].double() * frequencies  # [B, 1, S, D/2]
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _mlp(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        gate, up, down = (
            self.weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
            * self.weights[f"{name}.weight"]
        )


def d2t_table(draft_path: str | Path) -> np.ndarray:
    """The base id of each draft id, int64 [Vd], whichever way the checkpoint stores it."""
    raw = _read_config(draft_path)
    vocab = raw.get("transformer_layer_config", raw)["vocab_size"]
    num_draft = raw.get("draft_vocab_size", vocab)
    if num_draft == vocab:
        return np.arange(vocab, dtype=np.int64)
    tensors = _tensors(draft_path)
    if "d2t" not in tensors:
        raise ValueError(
            f"{draft_path}: draft_vocab_size is {num_draft} of {vocab} and there is no d2t"
        )
    table = tensors["d2t"].numpy().astype(np.int64)
    allowed = tensors["t2d"].numpy() if "t2d" in tensors else np.ones(vocab, dtype=bool)

    def fits(targets: np.ndarray) -> bool:
        in_range = targets.min() >= 0 and targets.max() < vocab
        return bool(in_range and allowed[targets].all() and len(np.unique(targets)) == num_draft)

    readings = [targets for targets in (np.arange(num_draft) + table, table) if fits(targets)]
    if len(readings) != 1:
        raise ValueError(
            f"{draft_path}: d2t has {len(readings)} readings as a vocabulary map, not one"
        )
    return readings[0]


@dataclass(frozen=True)
class _Node:
    """One drafted token: what its path feeds the draft, and what the draft said at its end."""

    token: int  # base id
    parent: int  # index in the pool, -1: the root
    depth: int
    score: np.float32
    path_tokens: tuple[int, ...]  # drafted tokens down to this one
    path_hidden: tuple[torch.Tensor, ...]  # [Hd] beside each of them


def draft_tree(
    ref: Eagle3Reference,
    embed_table: torch.Tensor,  # [V, Hd]
    prefix_features: torch.Tensor,  # [n, num_aux_layers * Ht]: f_0 .. f_{n-1}
    next_tokens: list[int],  # [n]: t_1 .. t_n; t_n is the pending token, the root
    top_k: int,
    steps: int,
    size: int,
    positions: torch.Tensor | None = None,  # [n, 3] of the prefix; None: 0 .. n-1
    prefix_embeds: torch.Tensor | None = None,  # [n, Hd], where not those of next_tokens
) -> tuple[list[int], list[int], list[int]]:
    """An EAGLE-2 tree (arXiv 2406.16858): tokens (base ids), parents (root: -1) and depths (root:
    0), `size` nodes.

    `steps` is the number of levels below the root, so the pool holds K + (steps - 1) * K * K
    candidates; fewer than `size` nodes come back where that is not enough. Each node's path is
    computed from its first slot on, with no cache.
    """
    fused = ref.fuse(prefix_features[None].float())[0]
    top_k = min(top_k, len(ref.d2t))

    def run(
        tokens: tuple[int, ...], hidden: tuple[torch.Tensor, ...]
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Log-probabilities [Vd] and recycled hidden [Hd] after the committed pairs and one chain
        of drafted tokens."""
        ids = torch.tensor([*next_tokens, *tokens])
        states = torch.cat([fused, *(h[None] for h in hidden)])[None]
        places = torch.arange(len(ids))  # committed 0 .. n-1, a node of depth d at n + d - 1
        if positions is not None:  # behind the largest of the prefix
            after = positions.max() + 1 + torch.arange(len(tokens))
            places = torch.cat([positions, after[:, None].expand(-1, 3)])
        mask = torch.ones(1, len(ids), len(ids), dtype=torch.bool).tril()
        embeds = embed_table[ids].float()
        if prefix_embeds is not None:
            embeds[: len(prefix_embeds)] = prefix_embeds
        logits, out, _ = ref.forward(embeds[None], states, places[None], mask)
        return logits[0, -1].log_softmax(dim=-1).numpy(), out[0, -1]

    def children(index: int, node: _Node | None) -> list[_Node]:
        tokens, hidden = (node.path_tokens, node.path_hidden) if node else ((), ())
        log_probs, state = run(tokens, hidden)
        best = np.argsort(-log_probs, kind="stable")[:top_k]
        score, depth = (node.score, node.depth) if node else (np.float32(0), 0)
        return [
            _Node(token, index, depth + 1, score + log_probs[i], (*tokens, token), (*hidden, state))
            for i, token in zip(best.tolist(), ref.d2t[best].tolist(), strict=True)
        ]

    pool = children(-1, None)
    beam = list(range(len(pool)))
    for _ in range(steps - 1):
        level_start = len(pool)
        pool += [child for index in beam for child in children(index, pool[index])]
        beam = sorted(range(level_start, len(pool)), key=lambda i: (-pool[i].score, i))[:top_k]

    kept = sorted(
        sorted(range(len(pool)), key=lambda i: (-pool[i].score, pool[i].depth, i))[: size - 1]
    )
    node_of = {-1: 0} | {pool_index: i + 1 for i, pool_index in enumerate(kept)}
    tokens = [next_tokens[-1], *(pool[i].token for i in kept)]
    parents = [-1, *(node_of[pool[i].parent] for i in kept)]
    return tokens, parents, [0, *(pool[i].depth for i in kept)]


@torch.no_grad()
def base_hidden_states(
    model: Any,
    ids: torch.Tensor,  # int [B, S]
    # bool (True = attend) or additive float, [B, 1, S, S], or such by layer type; None: causal
    mask4d: torch.Tensor | dict[str, torch.Tensor] | None = None,
    position_ids: torch.Tensor | None = None,  # int [B, S]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits [B, S, V] and hs[0..L], each [B, S, H]: embeddings, then the un-normed output of each
    layer.

    A mask of one's own replaces the causal one and any sliding window.
    """
    if isinstance(mask4d, dict):
        mask4d = {kind: _additive(mask) for kind, mask in mask4d.items()}
    elif mask4d is not None:
        mask4d = _additive(mask4d)
    before_norm: list[torch.Tensor] = []
    stack = getattr(model.model, "language_model", model.model)
    hook = stack.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    try:
        out = model(
            input_ids=ids,
            attention_mask=mask4d,
            position_ids=position_ids,
            output_hidden_states=True,
            use_cache=False,
        )
    finally:
        hook.remove()
    return out.logits, (*out.hidden_states[:-1], before_norm[0])


def _additive(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def gather_aux_hidden_states(
    hidden_states: tuple[torch.Tensor, ...], aux_layer_ids: tuple[int, ...]
) -> torch.Tensor:
    """The features that a draft reads: [B, S, num_aux_layers * H], in the order of
    `aux_layer_ids`."""
    return torch.cat([hidden_states[i] for i in aux_layer_ids], dim=-1)


def _read_config(path: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return config


def _rope_theta(layer: dict[str, Any]) -> float:
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise NotImplementedError(f"this reference has no {kind} RoPE for drafts")
    return float(rope.get("rope_theta", layer.get("rope_theta", 10000.0)))


def _axes(layer: dict[str, Any], pairs: int) -> list[int]:
    """By which axis of a position each pair turns: section by section (Qwen2.5-VL), or in turn
    (Qwen3-VL), where what is over is the first one's. Without sections all by the first."""
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    section = rope.get("mrope_section", [pairs, 0, 0])
    if not rope.get("mrope_interleaved"):
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    return [i % 3 if i < 3 * section[i % 3] else 0 for i in range(pairs)]


def _norm_before_residual(raw: dict[str, Any]) -> bool:
    if "norm_before_residual" in raw:
        return bool(raw["norm_before_residual"])
    version = str(raw.get("speculators_version", "1"))
    return tuple(int(part) for part in version.split(".")[:2]) < (0, 2)


def _named_aux_layer_ids(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """hidden_states indices: speculators writes these, the nested eagle_config counts layers by
    their output."""
    if raw.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(raw["eagle_aux_hidden_state_layer_ids"])
    outputs = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(i + 1 for i in outputs) if outputs else None


def _tensors(path: str | Path) -> dict[str, torch.Tensor]:
    pickled = Path(path) / "pytorch_model.bin"
    if pickled.exists():
        loaded: dict[str, torch.Tensor] = torch.load(pickled, weights_only=True)
        return loaded
    return {
        name: t
        for file in sorted(Path(path).glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def _float_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float()
        for name, tensor in _tensors(path).items()
        if tensor.is_floating_point()
    }


@functools.cache
def final_states(base: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """transformers' last hidden state of a base, which its lm_head reads: [n, H]."""
    from tests import toys

    model = toys.load_base(base)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    states: torch.Tensor = out.hidden_states[-1][0]
    assert torch.allclose(states @ model.lm_head.weight.T, out.logits[0], atol=1e-4)
    return states
