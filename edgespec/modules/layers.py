"""The torch layers that drafts share. Knows no method, no files and no quantization."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.config import AttentionSpec, RopeConfig
from edgespec.config.tensors import qkv_rows
from edgespec.rope import RopeTable

Tensor = torch.Tensor


class RMSNorm(nn.Module):
    """Root mean square normalization (arXiv 1910.07467), computed in float32. With a unit offset
    the weight is stored around 0."""

    def __init__(self, width: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.offset, self.eps = float(unit_offset), eps
        self.weight = nn.Parameter(torch.full((width,), 1 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * (
            self.weight + self.offset
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, S, D] with rotary embedding (arXiv 2104.09864) over its first R elements; pair
    i is (x[i], x[i + R/2]). cos and sin are [S, R/2], or have leading dimensions too."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def rope_rows(rope: RopeConfig, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [count, R/2] of the first positions, on the device of a tensor."""
    table = RopeTable.of(rope, count)
    return torch.from_numpy(table.cos).to(like.device), torch.from_numpy(table.sin).to(like.device)


def rope_at(rope: RopeConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, S, R/2] of positions [3, B, S] on the axes time, height and width."""
    table = RopeTable.of(rope, int(positions.max()) + 1)
    rows = table.rows(positions.permute(1, 2, 0).cpu().numpy())
    cos, sin = (torch.from_numpy(part)[:, None].to(positions.device) for part in rows)
    return cos, sin


class MLP(nn.Module):
    """A gated feed-forward with SiLU: SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class AttentionModule(nn.Module):
    """Causal attention with grouped queries, over a window where the spec has one; q, k and v read
    rows of `in_features`. `unit_offset` is of the norms of queries and keys."""

    def __init__(
        self,
        spec: AttentionSpec,
        in_features: int,
        hidden: int,
        eps: float,
        *,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )
        self.window, self.gated = spec.window, spec.gated
        self.q_proj = nn.Linear(in_features, qkv_rows(spec)[0], bias=spec.qkv_bias)
        self.k_proj = nn.Linear(in_features, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(in_features, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden, bias=spec.o_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, eps, unit_offset=unit_offset)
            self.k_norm = RMSNorm(spec.head_dim, eps, unit_offset=unit_offset)
        self.qk_norm = spec.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., S, in] -> [..., S, H]"""
        return self.attended(x, x, cos, sin, self.seen(x.shape[-2], 0, x.device))

    def seen(self, rows: int, step: int, device: torch.device) -> Tensor:
        """Which of as many slots a row `step` positions behind its own slot sees, [S, S]: those up
        to its own, within the window."""
        places = torch.arange(rows, device=device)
        distance = places[:, None] - places
        return (distance >= 0) & (distance + step < (self.window or rows + step + 1))

    def attended(self, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        """Queries of x [..., S, in] over keys and values of rows [..., n + S, in], the last of
        which are x, as far as they are seen [S, n + S] -> [..., S, H]"""
        q, (k, v) = (
            self.queries(x, cos[-x.shape[-2] :], sin[-x.shape[-2] :]),
            self.keys(rows, cos, sin),
        )
        return self.merged(scaled_dot_product(q, k, v, seen), x)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., S, in] -> rotated queries [..., heads, S, D]"""
        q = self.heads(self.projected(x, 0) if self.gated else self.q_proj(x), self.num_heads)
        return rotate(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., S, in] -> rotated keys and values [..., kv_heads, S, D]"""
        k = self.heads(self.k_proj(x), self.num_kv_heads)
        v = self.heads(self.v_proj(x), self.num_kv_heads)
        return rotate(self.k_norm(k) if self.qk_norm else k, cos, sin), v

    def projected(self, x: Tensor, part: int) -> Tensor:
        """Of gated attention: the queries (part 0) of all heads, or the gates (1): [..., S, in] ->
        [..., S, heads * D]"""
        split = (self.num_heads, 2, self.head_dim)
        weight = self.q_proj.weight.view(*split, -1)[:, part].flatten(0, 1)
        bias = self.q_proj.bias
        return F.linear(x, weight, None if bias is None else bias.view(split)[:, part].flatten())

    def joint(self, q: Tensor, far: tuple[Tensor, Tensor], near: Near, seen: Tensor) -> Tensor:
        """Attention of q [B, heads, T, D] to keys and values [B, kv_heads, C, D] that are seen
        [..., T, C], and at once to the `near` ones that only some rows have -> [B, heads, T, D]"""
        batch, _, rows, width = q.shape
        grouped = q.reshape(batch, self.num_kv_heads, -1, rows, width)  # [B, kv, group, T, D]
        k, v = (part[:, :, None] for part in far)
        scores = (grouped @ k.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))
        both = torch.cat([scores, near.scores(grouped).float()], dim=-1) * self.head_dim**-0.5
        weights = both.softmax(-1).to(v.dtype)
        mixed = weights[..., : k.shape[-2]] @ v + near.mixed(weights[..., k.shape[-2] :])
        merged: Tensor = mixed.flatten(1, 2)
        return merged

    def merged(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Values [..., heads, S, D] mixed for the rows x [..., S, in] -> [..., S, H]"""
        wide = mixed.transpose(-3, -2).flatten(-2)
        wide = wide * self.projected(x, 1).sigmoid() if self.gated else wide
        return self.o_proj(wide)  # type: ignore[no-any-return]

    def heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[..., S, heads * D] -> [..., heads, S, D]"""
        split: Tensor = x.view(*x.shape[:-1], num_heads, self.head_dim)
        return split.transpose(-3, -2)


class Near(Protocol):
    """Keys and values that only some rows see, beside those of `AttentionModule.joint`."""

    def scores(self, q: Tensor) -> Tensor:
        """q [B, kv, group, T, D] -> [B, kv, group, T, n], not scaled."""

    def mixed(self, weights: Tensor) -> Tensor:
        """weights [B, kv, group, T, n] -> [B, kv, group, T, D]"""


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention with grouped queries of one sequence, or of a batch."""
    single = q.dim() == 3
    q, k, v = (part[None] if single else part for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return mixed[0] if single else mixed
