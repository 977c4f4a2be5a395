"""The keys of a speculative_config that all block drafts share.

Knows sizes of blocks. Which method has which keys stands in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import OptionError
from edgespec.runtime.drafters.block_drafter import MAX_BLOCK_TOP_K
from edgespec.runtime.drafters.decoding import (
    LAYERS_SCHEMA,
    DecodingConfig,
    Sizes,
    read_layers,
)
from edgespec.runtime.drafters.options import option


@dataclass(frozen=True, kw_only=True)
class BlockDecoding(DecodingConfig):
    """The keys of a method that drafts the chain of one block."""

    target_layer_ids: tuple[int, ...] | None = option(
        None,
        "The base's layers whose output the draft reads, counted from 0; others than the draft was"
        " exported with are refused.",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )
    mask_token_id: int | None = option(
        None, "The mask token.", low=0, unused="it is the one that the draft was exported with"
    )
    attention_backend: str | None = option(
        None, "Kernels of the draft.", unused="this is decided when the engine is built"
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a block of max_draft_len drafts. Raises OptionError."""
        self.check_chain()
        return Sizes(1, None, None if self.draft_len is None else 1 + self.draft_len)

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The layers as hidden_states indices, which count the embedding as 0."""
        layers = self.target_layer_ids
        return None if layers is None else tuple(layer + 1 for layer in layers)


@dataclass(frozen=True, kw_only=True)
class BlockTreeDecoding(BlockDecoding):
    """The keys of a method that drafts the chain of one block, or a tree made of it."""

    dynamic_tree_max_topK: int | None = option(  # noqa: N815
        None,
        "Candidates per slot of a block; above 1 a tree of max_total_draft_tokens nodes is made of"
        " it.",
        low=1,
        high=MAX_BLOCK_TOP_K,
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a block of max_draft_len drafts, or a tree. Raises OptionError."""
        top_k, total = self.dynamic_tree_max_topK, self.max_total_draft_tokens
        if top_k is None or top_k == 1:
            return super().sizes
        if self.draft_len is not None:
            message = (
                f"a tree of candidates ({top_k}) is asked for, and max_draft_len {self.draft_len}"
            )
            raise OptionError(
                message, "A tree is as deep as the block: give max_total_draft_tokens."
            )
        return Sizes(top_k, None, None if total is None else 1 + total)
