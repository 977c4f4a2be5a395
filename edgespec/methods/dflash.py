"""DFlash block drafts (arXiv 2602.06036) as z-lab, speculators and ModelOpt write them.

A block's rows see each other in both directions, and no two of its slots know of each other's
token. Variants are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import CheckpointError
from edgespec.methods.base import DraftFormat, Method, SpecConfig
from edgespec.methods.block_draft import (
    KEYS,
    BlockDraftConfig,
    BlockSpec,
    block_of,
    block_values,
    config_rows,
    layout_of,
    named_by,
    own_shapes,
    read_values,
    reads_what_is_emitted,
    refuse_unknown,
    spec_keys,
    spec_rows,
)
from edgespec.methods.block_variants import (
    VARIANT_NAMES,
    is_read_elsewhere,
    refuse_variants,
)

NAME, TITLE = "dflash", "DFlash"
SECTION = "dflash_config"  # TensorRT Edge-LLM's exports have it too
EXPORT: dict[str, str | bool] = {"dflash_base": True, "dflash_draft_dir": "DRAFT"}


def parse_dflash_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> BlockDraftConfig:
    """A DFlash draft of any layout from its config.json and the shapes of its tensors, under stored
    names or ours.

    A quantized Linear is in `shapes` as the weight that it stands for. Raises CheckpointError for
    contradictions, UnsupportedModel for variants of DFlash that differ in their graph.
    """
    top, shapes = Fields(raw, source), own_shapes(shapes)
    inner = top.optional_section(SECTION)
    refuse_variants(raw, shapes, source)
    refuse_unknown(inner, (*KEYS, "causal_head"))  # which is off here
    if top.get(SECTION) is not None and not inner.raw:
        raise CheckpointError(f"{inner.source} is empty.", "Download the draft again.")
    layout = layout_of(raw, SECTION)
    return BlockDraftConfig(
        **block_values(NAME, TITLE, raw, shapes, source, inner=inner, layout=layout)
    )


def read_spec(fields: Fields) -> BlockSpec:
    """The `dflash_config` of an export's config.json. Raises what `fields` raises, with the key."""
    return BlockSpec(**read_values(fields, fields.section(SECTION)))


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The `dflash_config` that `read_spec` reads."""
    return {SECTION: spec_keys(spec)}


def matches_config(config: Mapping[str, Any]) -> bool:
    """Variants that no other method reads match as well: the parser refuses them by their names."""
    if is_read_elsewhere(config):
        return False
    if config.get("speculators_model_type") is None and config.get(SECTION) is not None:
        return True
    return named_by(config, VARIANT_NAMES)


METHOD = Method(
    name=NAME,
    title=TITLE,
    draft_title="a DFlash draft",
    base_output="aux_hidden_states",
    export_params=EXPORT,
    component="dflash_draft",
    proposes="block",
    format=DraftFormat(matches_config=matches_config, parse=parse_dflash_config),
    read_spec=read_spec,
    write_spec=write_spec,
    pair_rules=(reads_what_is_emitted("dflash_base"),),
    min_draft_tree_size=block_of,
    thinking={
        "Qwen3ForCausalLM": False,
        "Qwen3_5ForCausalLM": True,
        "Qwen3_5ForConditionalGeneration": True,
    },
    config_rows=config_rows,
    spec_rows=spec_rows,
)
