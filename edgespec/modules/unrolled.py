"""Drafts that go on from their own states, unrolled over a text: the chains behind all its tokens
at once. Knows no method, no files and no quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import nn

from edgespec.config import DraftConfig
from edgespec.modules.layers import AttentionModule, rope_rows, scaled_dot_product

Tensor = torch.Tensor
# (layer, its attention, what it reads [..., S, in]) -> [..., S, H]
Attend = Callable[[int, AttentionModule, Tensor], Tensor]
Rows = Callable[[int, int], tuple[Tensor, Tensor]]


class Chained(Protocol):
    """A draft whose step reads the next token's embedding and its own state."""

    draft_config: DraftConfig
    layers: nn.ModuleList

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """What is read of the base [..., k * Ht] -> the first state [..., H]."""

    def run(self, embeds: Tensor, state: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Embeddings and state [..., S, H] each -> what the lm_head reads, and the state that the
        next step reads."""


class Unrolled:
    """The training-time test (arXiv 2503.01840, section 3.2): chain i begins at the true states of
    positions 0..i, and goes on from its own. All chains of a sequence go on at once.

    A chain sees the first keys and values of all positions up to its own, and those of its own
    later steps. `state` is what the last step gave the next one.
    """

    def __init__(self, draft: Chained, hidden_states: Tensor, rows: Rows | None = None) -> None:
        """`hidden_states` are those [B, W, k * Ht] of W positions of the base that the draft reads.
        `rows` gives cos and sin of (step, rows) where positions are not those of a text."""
        self.draft, self.state, self.num_steps = draft, draft.fuse(hidden_states), 0
        self.rows = rows or self.text_rows
        self.first: list[tuple[Tensor, Tensor]] = []  # per layer: keys and values of step 0
        self.own = [OwnSteps() for _ in draft.layers]

    def step(self, embeds: Tensor) -> Tensor:
        """Embeddings [B, n, H] of the tokens that the first n chains read now: token i + 1 + step
        of the text, or what a chain drafted last -> what the lm_head reads, [B, n, H]."""
        rows = embeds.shape[1]
        cos, sin = self.rows(self.num_steps, rows)
        attend = partial(self.attend, cos, sin)
        read, self.state = self.draft.run(embeds, self.state[:, :rows], attend)
        self.num_steps += 1
        return read

    def text_rows(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin of a text: a step is a position further."""
        cos, sin = rope_rows(self.draft.draft_config.decoder.rope, step + rows, self.state)
        return cos[step:], sin[step:]

    def attend(
        self, cos: Tensor, sin: Tensor, index: int, attention: AttentionModule, x: Tensor
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
