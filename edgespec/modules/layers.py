"""The torch layers that drafts share. Knows no method, no files and no quantization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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
