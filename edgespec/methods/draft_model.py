"""A draft model (arXiv 2211.17192): a whole language model that drafts for a larger one.

Knows the method's row. Any base of a supported family can be one: its checkpoint is no draft by
itself, and is taken for one where the user says so. What a pair needs is one tokenizer; sizes may
differ, the rows that pad the two vocabularies as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import DraftConfig, ModelConfig
from edgespec.contract import Role
from edgespec.methods.base import Method, SpecConfig

NAME = "draft_model"
POSITIONS_KEY = "max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(DraftConfig):
    """A whole model as a draft: it has its own vocabulary, embedding and lm_head, and reads no
    hidden states."""

    model: ModelConfig


def of_model(model: ModelConfig) -> DraftModelConfig:
    """A base model as a draft for another one."""
    return DraftModelConfig(
        method=NAME,
        layout="Hugging Face",
        decoder=model.decoder,
        vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        target_hidden_size=model.decoder.hidden_size,
        num_aux_layers=0,
        aux_layer_ids=None,
        own_embedding=True,
        own_head=True,
        model=model,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSpec(SpecConfig):
    """`max_position` is the longest sequence, in tokens, that the draft was made for."""

    max_position: int


def read_spec(fields: Fields) -> SpecConfig:
    """The positions that a draft's config.json declares; no base is exported for this method.
    Raises what `fields` raises, with the key."""
    if fields.get("engine_role") != Role.DRAFT.value:
        raise fields.wrong("engine_role", f"{Role.DRAFT.value!r}, as all of this kind are")
    return DraftModelSpec(max_position=fields.size(POSITIONS_KEY))


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The key that `read_spec` reads."""
    assert isinstance(spec, DraftModelSpec)
    return {POSITIONS_KEY: spec.max_position}


def spec_rows(spec: SpecConfig) -> Iterator[tuple[str, str]]:
    """The positions that it was made for."""
    assert isinstance(spec, DraftModelSpec)
    yield "positions", f"at most {spec.max_position}; beyond them nothing is drafted"


METHOD = Method(
    name=NAME,
    title="Draft model",
    draft_title="a draft model",
    aliases=("draft-model", "DraftTarget", "Draft_Target", "draft-target"),
    draft_param="draft_model",
    component=NAME,
    proposes="tree",
    of_model=of_model,
    read_spec=read_spec,
    write_spec=write_spec,
    default_layers="none",
    spec_rows=spec_rows,
)
