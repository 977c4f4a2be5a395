"""JetSpec block drafts (arXiv 2606.18394): DFlash's layers with a causal head.

A row of the block sees the anchor and the slots before its own, and none behind. So what a slot
says follows from the tokens before it, and one call is enough for a tree.

Read as its authors publish it: class, keys and tensors are DFlash's, and `dflash_config` has
`causal_head` (hao-ai-lab/JetSpec, models/draft_head.py). TensorRT Edge-LLM calls the same section
`jetspec_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.base import SpecConfig
from edgespec.methods.block_draft import (
    KEYS,
    BlockDraftConfig,
    block_values,
    layout_of,
    own_shapes,
    refuse_unknown,
)
from edgespec.methods.block_method import BlockSpec, block_method, read_values, spec_keys
from edgespec.methods.block_variants import JETSPEC, is_variant, refuse_variants

NAME, TITLE = "jetspec", "JetSpec"
SECTION = "jetspec_config"
PUBLISHED_SECTION = "dflash_config"


def parse_jetspec_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> BlockDraftConfig:
    """A JetSpec draft from its config.json and the shapes of its tensors, under stored names or
    ours.

    Raises CheckpointError for contradictions, UnsupportedModel for what only has the name.
    """
    top, shapes = Fields(raw, source), own_shapes(shapes)
    if top.get("speculators_model_type") is not None:
        message = f"{source}: a JetSpec draft of speculators is refused: no release of it has one"
        raise UnsupportedModel(
            f"{message}, and the proposed one is trained on tokens where the published have masks.",
            "Give a draft as hao-ai-lab publishes it, with dflash_config and causal_head.",
        )
    refuse_variants(raw, shapes, source, read=(JETSPEC,))
    inner = _section(top)
    refuse_unknown(inner, (*KEYS, "causal_head", "target_hidden_size"))
    if not inner.flag("causal_head", False):
        raise CheckpointError(
            f"{inner.source}: the draft is called JetSpec, and 'causal_head' is not true.",
            "Download config.json again: what rows of a block see depends on it.",
        )
    for place, key in ((top, "is_causal"), (inner, "is_causal"), (inner, "causal")):
        if place.get(key) is False:
            raise CheckpointError(
                f"{source} contradicts itself: 'causal_head' is true and '{key}' is false.",
                "Remove the one that the draft was not trained with.",
            )
    values = block_values(
        NAME, TITLE, raw, shapes, source, inner=inner, layout=layout_of(raw, PUBLISHED_SECTION)
    )
    draft = replace(
        BlockDraftConfig(**values), layout="jetspec", causal=(True,) * len(values["causal"])
    )
    width = inner.size("target_hidden_size", draft.target_hidden_size)
    if width != draft.target_hidden_size:
        message = (
            f"{inner.source}: a draft of width {draft.decoder.hidden_size} on a base of {width}"
        )
        raise UnsupportedModel(
            f"{message} is refused: its authors initialise the adapter between them at random.",
            "Give a draft that was trained for the base.",
        )
    return draft


def _section(top: Fields) -> Fields:
    """The one section that the draft's own keys stand in."""
    there = [key for key in (SECTION, PUBLISHED_SECTION) if top.get(key) is not None]
    if len(there) == 2:
        raise CheckpointError(
            f"{top.source} has both {SECTION} and {PUBLISHED_SECTION}.",
            "Remove the one that the draft was not published with.",
        )
    if not there:
        raise top.missing(PUBLISHED_SECTION)
    return top.section(there[0])


def read_spec(fields: Fields) -> BlockSpec:
    """The `jetspec_config` of an export's config.json. Raises what `fields` raises, with the
    key."""
    inner = fields.section(SECTION)
    spec = BlockSpec(**read_values(fields, inner))
    if inner.get("causal_head") is not True or not all(spec.causal):
        raise inner.wrong("causal_head", "true, as every layer is")
    return spec


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The `jetspec_config` that `read_spec` reads."""
    return {SECTION: spec_keys(spec) | {"causal_head": True}}


def matches_config(config: Mapping[str, Any]) -> bool:
    """By a word of its class or kind, `jetspec_config`, or `causal_head` in its section."""
    return is_variant(JETSPEC, NAME, config)


METHOD = replace(
    block_method(NAME, TITLE, parse_jetspec_config, matches_config),
    read_spec=read_spec,
    write_spec=write_spec,
    thinking={"Qwen3ForCausalLM": False},
)
