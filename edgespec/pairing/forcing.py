"""A draft under teacher forcing: its graph, and the passes in which it reads the base's own hidden
states.

Knows drafts of one token a step; other ones stand in their method's file. Knows nothing of which
reading of the hidden states is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.names import EMBEDDING
from edgespec.config import DecoderConfig
from edgespec.export.stepwise import Correct, Feeds, causal_feeds
from edgespec.graphs.assembly import DecoderGraph
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.draft import DraftGraph, DraftSource, own_embedding
from edgespec.graphs.registry import open_draft
from edgespec.pairing.pair import Pair
from edgespec.pairing.probe_text import ProbeText
from edgespec.pairing.readings import Reading

Array = NDArray[Any]
Ids = NDArray[np.int64]


class Forced(Protocol):
    """`ids` [Vd] are the base's ids of the draft's own."""

    @property
    def graph(self) -> DecoderGraph:
        """The draft's graph, which `passes` feeds."""

    @property
    def ids(self) -> Ids:
        """[Vd], the base's id of each of the draft's own tokens."""

    def positions(self) -> Ids:
        """Where the draft is asked, ascending: p asks for the token behind t_0 .. t_p."""

    def passes(self, hidden_states: Array, reading: Reading) -> list[Feeds]:
        """Passes whose gathered rows are the draft's first token at each position, in order;
        hidden_states [T, k*H] are those of the reading."""

    @property
    def correct(self) -> Correct | None:
        """What the draft adds to the logits of its graph; a reading's passes follow each other."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows of an embedding, [n, H], for the ids that were asked for; the table is not kept."""

    ids: Ids  # ascending
    rows: Array

    @classmethod
    def read(cls, source: tuple[Checkpoint, str], ids: Sequence[int] | Ids) -> EmbeddingRows:
        """The float32 rows of the distinct `ids` in the tensor `source` names. Raises
        CheckpointError."""
        checkpoint, name = source
        wanted = np.unique(np.asarray(ids, np.int64))
        return cls(wanted, checkpoint.read(name)[wanted].astype(np.float32))

    def of(self, ids: Ids) -> Array:
        """[n, H], the rows of `ids`, all of which were read."""
        rows: Array = self.rows[np.searchsorted(self.ids, ids)]
        return rows


def open_pair(pair: Pair, base: Decoder) -> tuple[DraftGraph, Ids]:
    """The draft's graph, and the base's ids [Vd] of the draft's own tokens."""
    graph = open_draft(pair.method, DraftSource(base, pair.draft, pair.config))
    ids = np.arange(graph.shape.vocab_size)
    if pair.draft is None:
        return graph, ids
    offsets = read_d2t(*pair.drafted())
    return graph, ids if offsets is None else ids + offsets


def embedding_of(graph: DraftGraph, base: Decoder) -> tuple[Checkpoint, str]:
    """Checkpoint and stored name of the table that the draft reads: its own, or the base's."""
    return own_embedding(graph) or base.table.source(EMBEDDING)


def chain_forcing(pair: Pair, base: Decoder, text: ProbeText) -> ChainForcing:
    """The draft of a pair over a text; `base` shares what it lacks."""
    graph, ids = open_pair(pair, base)
    rows = EmbeddingRows.read(embedding_of(graph, base), text.tokens).of(text.tokens)
    return ChainForcing(graph, ids, graph.layers, text, rows)


@dataclass(frozen=True)
class ChainForcing:
    """A draft of one token a step: the hidden states of each position beside the token that follows
    it, all in one pass."""

    graph: DecoderGraph
    ids: Ids
    layers: DecoderConfig
    text: ProbeText
    rows: Array  # [T, H], the embeddings of its tokens
    correct: Correct | None = None

    def positions(self) -> Ids:
        """[T-1]: all but the first, for which there is no hidden state before it."""
        return np.arange(1, len(self.text))

    def passes(self, hidden_states: Array, reading: Reading) -> list[Feeds]:
        """One pass over all positions: hidden state t beside token t+1 (arXiv 2503.01840), at the
        position of t."""
        given = hidden_states[None, :-1]
        own = np.zeros((1, 0, self.graph.shape.features), np.float32)
        hidden = {"base_hidden": given, "draft_hidden": own, "use_base_hidden": np.array(True)}
        rows = self.text.placed(self.rows) if reading.image_rows else self.rows
        return [causal_feeds(rows[1:], self.layers, self.text.positions[:-1]) | hidden]
