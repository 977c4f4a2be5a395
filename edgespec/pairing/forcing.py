"""A draft under teacher forcing: its graph, and the passes in which it is given what its base truly
said.

Knows, for each method, what a draft reads at a position and which of its tokens is the first. Knows
nothing of which reading of the base's features is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.detect import read_d2t
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.mtp import layer_config
from edgespec.checkpoint.names import EMBEDDING
from edgespec.config import DecoderConfig
from edgespec.export.stepwise import Feeds, causal_feeds
from edgespec.graphs import decoder, eagle, mtp
from edgespec.graphs import dflash as blocks
from edgespec.graphs.assembly import DecoderGraph
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.pairing.pair import Pair
from edgespec.rope import RopeTable

Array = NDArray[Any]
Ids = NDArray[np.int64]
BLOCK_POSITIONS = 64  # at which a block is drafted: each costs as many rows as the block is long
BLOCK_ROWS = 256  # a pass
FIRST_BLOCK = 8  # tokens before the first block


class Forced(Protocol):
    """`ids` [Vd] are the base's ids of the draft's own."""

    @property
    def graph(self) -> DecoderGraph: ...

    @property
    def ids(self) -> Ids: ...

    def positions(self) -> Ids:
        """Where the draft is asked, ascending: p asks for the token behind t_0 .. t_p."""

    def passes(self, features: Array) -> list[Feeds]:
        """Passes whose gathered rows are the draft's first token at each position, in order;
        features [T, k*H]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an embedding, [n, H], for the ids that were asked for; the table is not kept."""

    ids: Ids  # ascending
    rows: Array

    @classmethod
    def read(cls, source: tuple[Checkpoint, str], ids: Sequence[int] | Ids) -> Rows:
        checkpoint, name = source
        wanted = np.unique(np.asarray(ids, np.int64))
        return cls(wanted, checkpoint.read(name)[wanted].astype(np.float32))

    def of(self, ids: Ids) -> Array:
        found: Array = self.rows[np.searchsorted(self.ids, ids)]
        return found


def forced(pair: Pair, base: decoder.Decoder, tokens: Ids) -> Forced:
    """The draft of a pair over the tokens [T]; `base` lends what it has not."""
    shared = base.table.source(EMBEDDING)
    if pair.draft is None:
        head, ids = mtp.MtpDraft.open(pair.base, pair.model), np.arange(pair.model.vocab_size)
        return Pairs(head, ids, layer_config(pair.model), tokens, Rows.read(shared, tokens))
    checkpoint, config = pair.drafted()
    offsets = read_d2t(checkpoint, config)
    ids = np.arange(config.draft_vocab_size) + (0 if offsets is None else offsets)
    if isinstance(config, Eagle3Config):
        graph = eagle.Eagle3Draft.open(checkpoint, config, base)
        own = eagle.stored_names({eagle.EMBEDDING: ()}, checkpoint)[eagle.EMBEDDING]
        rows = Rows.read((checkpoint, own) if config.own_embedding else shared, tokens)
        return Pairs(graph, ids, config.decoder, tokens, rows)
    block = blocks.DFlashDraft.open(checkpoint, config, base)
    source = (block.table.checkpoint, blocks.EMBEDDING) if config.own_embedding else shared
    return Blocks(block, ids, config, tokens, Rows.read(source, [*tokens, config.mask_token_id]))


@dataclass(frozen=True)
class Pairs:
    """EAGLE-3 and MTP: the feature of each position beside the token that follows it, all in one
    pass."""

    graph: DecoderGraph
    ids: Ids
    layers: DecoderConfig
    tokens: Ids
    rows: Rows

    def positions(self) -> Ids:
        return np.arange(1, len(self.tokens))

    def passes(self, features: Array) -> list[Feeds]:
        given = features[None, :-1]
        own = np.zeros((1, 0, self.graph.shape.features), np.float32)
        hidden = {"base_hidden": given, "draft_hidden": own, "use_base_hidden": np.array(True)}
        return [causal_feeds(self.rows.of(self.tokens[1:]), self.layers) | hidden]


@dataclass(frozen=True)
class Blocks:
    """DFlash: at each position a block behind the context up to it, several blocks side by side in
    a pass."""

    graph: DecoderGraph
    ids: Ids
    config: DFlashConfig
    tokens: Ids
    rows: Rows

    def positions(self) -> Ids:
        first, last = min(FIRST_BLOCK, len(self.tokens) // 2), len(self.tokens) - 1
        return np.unique(np.linspace(first, last, BLOCK_POSITIONS).astype(np.int64))

    def passes(self, features: Array) -> list[Feeds]:
        positions = self.positions()
        count = max(1, BLOCK_ROWS // self.config.block_size)
        return [
            self.side_by_side(features, positions[i : i + count])
            for i in range(0, len(positions), count)
        ]

    def side_by_side(self, features: Array, positions: Ids) -> Feeds:
        size, context = self.config.block_size, int(positions[-1])
        tokens = np.full((len(positions), size), self.config.mask_token_id)
        tokens[:, 0] = self.tokens[positions]
        places = (positions[:, None] + np.arange(size)).ravel()
        table = RopeTable.of(self.config.decoder.rope, context + size)
        (cos, sin), (context_cos, context_sin) = (
            table.rows(places[None]),
            table.rows(np.arange(context)[None]),
        )
        masks = [
            self.mask(positions, places, window, causal) for window, causal in self.mask_specs()
        ]
        feeds = {
            "inputs_embeds": self.rows.of(tokens.ravel())[None],
            "rope_cos": cos,
            "rope_sin": sin,
            "attention_mask": masks[0],
            "write_indices": np.zeros(1, np.int64),
            "gather_idx": (np.arange(len(positions)) * size + 1)[None],
            "target_hidden": features[None, :context],
            "context_cos": context_cos,
            "context_sin": context_sin,
        }
        return feeds | ({"sliding_attention_mask": masks[1]} if len(masks) > 1 else {})

    def mask_specs(self) -> list[tuple[int | None, bool]]:
        """What rows see in each kind of layer: those without a window first, as the graph names its
        masks."""
        kinds = set(zip(self.config.windows, self.config.causal, strict=True))
        return sorted(kinds, key=lambda kind: kind[0] is not None)

    def mask(
        self, positions: Ids, places: Ids, window: int | None, causal: bool
    ) -> NDArray[np.bool_]:
        """[1, 1, S, L + S]: the context before the own block, and of the blocks the own one."""
        size = self.config.block_size
        starts, context = np.repeat(positions, size)[:, None], np.arange(positions[-1])
        before = context < starts
        if window is not None:
            before &= places[:, None] - context < window
        block, row = np.divmod(np.arange(len(places)), size)
        own = block[:, None] == block
        if causal:
            own &= row[:, None] >= row
        return np.concatenate([before, own], 1)[None, None]
