"""The torch layers that drafts share. Knows no method, no files and no quantization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from edgespec.config import AttentionSpec, RopeConfig
from edgespec.rope import RopeTable

Tensor = torch.Tensor


class RMSNorm(nn.Module):
    """Root mean square normalization (arXiv 1910.07467), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, S, D] with rotary embedding (arXiv 2104.09864) over its first R elements; pair i is
    (x[i], x[i + R/2]). cos and sin are [S, R/2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def rope_rows(rope: RopeConfig, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [count, R/2] of the first positions, on the device of a tensor."""
    table = RopeTable.of(rope, count)
    return torch.from_numpy(table.cos).to(like.device), torch.from_numpy(table.sin).to(like.device)


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
    rows of `in_features`."""

    def __init__(self, spec: AttentionSpec, in_features: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )
        self.window = spec.window
        self.q_proj = nn.Linear(in_features, spec.num_heads * spec.head_dim, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(in_features, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(in_features, spec.num_kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden, bias=spec.o_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, eps)
            self.k_norm = RMSNorm(spec.head_dim, eps)
        self.qk_norm = spec.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[S, in] -> [S, H]"""
        places = torch.arange(len(x), device=x.device)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (self.window or len(x) + 1))
        return self.attended(x, x, cos, sin, seen)

    def attended(self, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        """Queries of x [S, in] over keys and values of rows [n + S, in], the last of which are x,
        as far as they are seen [S, n + S] -> [S, H]"""
        q = self.heads(self.q_proj(x), self.num_heads)
        k = self.heads(self.k_proj(rows), self.num_kv_heads)
        v = self.heads(self.v_proj(rows), self.num_kv_heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos[-len(x) :], sin[-len(x) :]), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, enable_gqa=True
        )[0]
        return self.o_proj(mixed.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    def heads(self, x: Tensor, num_heads: int) -> Tensor:
        """[S, heads*D] -> [heads, S, D]"""
        return x.view(len(x), num_heads, self.head_dim).transpose(0, 1)  # [heads, S, D]
