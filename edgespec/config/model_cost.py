"""What a pass of a model reads and multiplies, counted from its layers: before anything is built,
and whatever its weights become.

Knows layers and elements. Knows no bytes and no seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from edgespec.config import AttentionSpec, DecoderConfig, LayerSpec

Drafting = Literal["levels", "model", "block", "heads"]


@dataclass(frozen=True, slots=True)
class ExpertsWork:
    """Experts of so many layers: each row chooses `per_token` of `count`, of `size` elements
    each."""

    count: int
    per_token: int
    size: int
    layers: int = 1

    def distinct(self, rows: int) -> float:
        """Experts of a layer that so many rows choose, on average, if each chooses evenly."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True)
class PassWork:
    """Weights that a pass reads, in elements: `dense` ones, those of the `head`, and `experts`.

    `cache` are elements that each token of the context has in layers that see all of it, `windowed`
    those in layers that see a window. `scores` are multiply-adds of a row for each of these tokens,
    as a share of the elements.
    """

    dense: int
    head: int
    experts: tuple[ExpertsWork, ...] = ()
    cache: int = 0
    windowed: tuple[tuple[int, int], ...] = ()  # window, elements
    scores: float = 1.0

    @classmethod
    def of(cls, decoder: DecoderConfig, head: int) -> PassWork:
        """That of a decoder whose lm_head has so many elements."""
        hidden = decoder.hidden_size
        experts = Counter(sizes for layer in decoder.layers if (sizes := experts_of(layer, hidden)))
        windows: Counter[int | None] = Counter()
        for attention in decoder.attentions:
            windows[attention.window] += 2 * attention.num_kv_heads * attention.head_dim
        shared = decoder.num_heads / decoder.num_kv_heads if decoder.attentions else 1.0
        return cls(
            sum(dense_of(layer, hidden) for layer in decoder.layers),
            head,
            tuple(ExpertsWork(*sizes, layers=layers) for sizes, layers in experts.items()),
            windows.pop(None, 0),
            tuple((window, size) for window, size in windows.items() if window is not None),
            shared,
        )

    def weights(self, rows: int) -> float:
        """Elements of weights that a pass over so many rows reads: each expert once."""
        return (
            self.dense + self.head + sum(e.distinct(rows) * e.size * e.layers for e in self.experts)
        )

    def products(self) -> float:
        """Multiply-adds of a row by weights."""
        chosen = sum(e.per_token * e.size * e.layers for e in self.experts)
        return self.dense + self.head + chosen

    def cached(self, context: int) -> int:
        """Elements of the cache that a pass behind so many tokens reads, for each sequence."""
        seen = sum(min(window, context) * size for window, size in self.windowed)
        return self.cache * context + seen


@dataclass(frozen=True, slots=True)
class PairWork:
    """What a pass of the base and one of the draft read. A draft drafts by `levels`, the first of
    which follows from what it observed; by whole passes of a `model`; or in one pass, of a `block`
    or of `heads`. `levels` bounds a chain, where the draft's make does."""

    base: PassWork
    draft: PassWork
    drafting: Drafting
    levels: int | None = None


def dense_of(layer: LayerSpec, hidden: int) -> int:
    """Weights of a layer that every row is multiplied by."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        queries = mixer.num_heads * mixer.head_dim
        keys = mixer.num_kv_heads * mixer.head_dim
        size = hidden * (queries * (2 if mixer.gated else 1) + 2 * keys + queries)
    else:
        keys = mixer.num_key_heads * mixer.key_head_dim
        values = mixer.num_value_heads * mixer.value_head_dim
        size = hidden * (2 * keys + 3 * values + 2 * mixer.num_value_heads)
    if mlp.experts is None:
        return size + 3 * hidden * mlp.intermediate_size
    return size + hidden * (mlp.experts.count + 3 * mlp.experts.shared_size)


def experts_of(layer: LayerSpec, hidden: int) -> tuple[int, int, int] | None:
    """The count of a layer's experts, how many a row chooses, and the size of one; None where it
    has none."""
    experts = layer.mlp.experts
    if experts is None:
        return None
    return experts.count, experts.per_token, 3 * hidden * layer.mlp.intermediate_size
