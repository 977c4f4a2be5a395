"""A base and a draft as pairing rules see them, whether they are checkpoints, exports or engines.

Knows values. The rules stand in `pair_rules` and, for what is one method's own, in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgespec.config.values import DraftConfig, ModelConfig

PLAIN_METHOD = "none"  # spec_decode_type of a base that was exported for no draft


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSide:
    """What a pairing asks of the base. None: not known at this stage.

    `name` stands in messages: "the base", or its path. `method`, `aux_layer_ids` and
    `hidden_states_width` are those of an exported base: what it emits. `origin` is the identity of
    the weights that it was quantized from, its own where it was not.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    name: str = "the base"
    method: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    hidden_states_width: int | None = None
    identity: str | None = None
    origin: str | None = None

    @classmethod
    def of_checkpoint(cls, model: ModelConfig, name: str = "the base") -> BaseSide:
        """A base as its checkpoint declares it."""
        return cls(
            vocab_size=model.vocab_size,
            hidden_size=model.decoder.hidden_size,
            num_layers=model.decoder.num_layers,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSide:
    """What a draft asks of its base. None: not known at this stage, or the draft does not say.

    `base_identity` and `base_origin` are those of the base that it was exported for.
    """

    method: str
    vocab_size: int  # of the base
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int
    aux_layer_ids: tuple[int, ...] | None
    own_embedding: bool
    own_head: bool = True
    num_target_layers: int | None = None
    mask_token_id: int | None = None
    hidden_states_width: int | None = None
    base_identity: str | None = None
    base_origin: str | None = None

    @classmethod
    def of_checkpoint(
        cls, draft: DraftConfig, aux_layers: tuple[int, ...] | None = None
    ) -> DraftSide:
        """A draft as its checkpoint declares it; `aux_layers` win over those that it names, which
        count as far as they are certain."""
        certain = draft.aux_layer_ids if draft.aux_layer_convention == "hs" else None
        return cls(
            method=draft.method,
            vocab_size=draft.vocab_size,
            draft_vocab_size=draft.draft_vocab_size,
            hidden_size=draft.decoder.hidden_size,
            target_hidden_size=draft.target_hidden_size,
            num_aux_layers=draft.num_aux_layers,
            aux_layer_ids=aux_layers or certain,
            own_embedding=draft.own_embedding,
            own_head=draft.own_head,
            num_target_layers=draft.num_target_layers,
            mask_token_id=None if draft.own_embedding else draft.mask_token_id,
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something in which base and draft do not fit. `remedy` None: the caller knows better."""

    topic: str
    what: str
    remedy: str | None = None


PairRule = Callable[[BaseSide, DraftSide], Iterator[Mismatch]]
