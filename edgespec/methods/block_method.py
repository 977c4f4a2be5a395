"""The row of a method whose drafts make blocks: what config.json of an export keeps of them, when
they fit a base, and what `inspect` shows. Knows no method: a row changes what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.config.fields import Fields, is_int
from edgespec.config.values import DraftConfig, Shapes
from edgespec.contract import Role
from edgespec.families.base import GgufForm
from edgespec.methods.base import DraftFormat, Method, SpecConfig
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.draft_layers import layer_ids
from edgespec.methods.sides import BaseSide, DraftSide, Mismatch, PairRule


def block_method(
    name: str,
    title: str,
    parse: Callable[[Mapping[str, Any], Shapes, str], DraftConfig],
    matches_config: Callable[[Mapping[str, Any]], bool],
    gguf: GgufForm | None = None,
) -> Method:
    """The row of a method as it is for most: base and draft are exported together, and a section of
    config.json, NAME_config, keeps what a BlockSpec says."""
    section, base_param = f"{name}_config", f"{name}_base"
    return Method(
        name=name,
        title=title,
        draft_title=f"a {title} draft",
        base_output="aux_hidden_states",
        export_params={base_param: True, f"{name}_draft_dir": "DRAFT"},
        component=f"{name}_draft",
        proposes="block",
        format=DraftFormat(matches_config=matches_config, parse=parse, gguf=gguf),
        read_spec=lambda fields: BlockSpec(**read_values(fields, fields.section(section))),
        write_spec=lambda spec: {section: spec_keys(spec)},
        pair_rules=(reads_what_is_emitted(base_param),),
        min_draft_tree_size=lambda spec: block_of(spec).block_size,
        config_rows=config_rows,
        spec_rows=spec_rows,
    )


# What config.json of an export keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(SpecConfig):
    """What config.json keeps of a block draft, and of the base that is exported for it; `windows`
    and `causal` only in a draft's, per layer."""

    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()

    @property
    def first_slot(self) -> int:
        """The first slot of a block that drafts: the one behind the anchor's."""
        return 1


def spec_of(config: BlockDraftConfig, *, draft: bool) -> BlockSpec:
    """What config.json keeps of a draft: of itself, or of the base that is exported for it."""
    return BlockSpec(**spec_values(config, draft=draft))


def spec_values(config: BlockDraftConfig, *, draft: bool) -> dict[str, Any]:
    """What the BlockSpec of a draft is made of, or that of the base that is exported for it."""
    return {
        "aux_layer_ids": config.aux_layer_ids,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "windows": config.windows if draft else (),
        "causal": config.causal if draft else (),
    }


def read_values(fields: Fields, inner: Fields) -> dict[str, Any]:
    """What a BlockSpec is made of, from a config.json and its section `inner`; the layers there
    count layer outputs from 0. Raises what the fields raise, with the key."""
    outputs = layer_ids(inner, "target_layer_ids")
    if outputs is None:
        raise inner.missing("target_layer_ids")
    mask = inner.get("mask_token_id")
    if not is_int(mask) or not 0 <= mask < fields.size("vocab_size"):
        raise inner.wrong("mask_token_id", "the id of a token")
    windows, causal = inner.get("windows") or [], inner.get("causal") or []
    drafted = fields.get("engine_role") == Role.DRAFT.value
    layers = fields.size("num_hidden_layers") if drafted else 0  # a base keeps neither
    if not isinstance(windows, list) or not all(
        w is None or (is_int(w) and 1 <= w < 2**31) for w in windows
    ):
        raise inner.wrong("windows", "a list of windows")
    if len(windows) != layers:
        raise inner.wrong("windows", f"a list of {layers}, one per layer")
    if not isinstance(causal, list) or not all(isinstance(c, bool) for c in causal):
        raise inner.wrong("causal", "a list of true and false")
    if len(windows) != len(causal):
        raise inner.wrong("causal", f"a list of {len(windows)}, one per layer")
    return {
        "aux_layer_ids": tuple(i + 1 for i in outputs),
        "block_size": inner.size("block_size"),
        "mask_token_id": mask,
        "windows": tuple(windows),
        "causal": tuple(causal),
    }


def spec_keys(spec: SpecConfig) -> dict[str, Any]:
    """The keys that `read_values` reads."""
    block = block_of(spec)
    keys: dict[str, Any] = {
        "target_layer_ids": [layer - 1 for layer in block.aux_layer_ids],
        "block_size": block.block_size,
        "mask_token_id": block.mask_token_id,
    }
    if block.windows:
        keys |= {"windows": list(block.windows), "causal": list(block.causal)}
    return keys


def block_of(spec: SpecConfig) -> BlockSpec:
    """A spec as that of a block draft, which it must be."""
    assert isinstance(spec, BlockSpec)
    return spec


# What makes a pair, and what `inspect` shows


def reads_what_is_emitted(base_param: str) -> PairRule:
    """The rule that an exported base emits the aux layers that the draft was trained on;
    `base_param` is what exports such a base."""

    def rule(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
        if base.aux_layer_ids is None:
            return
        remedy = f"Export the base again with `{base_param}`"
        if draft.aux_layer_ids != base.aux_layer_ids:
            emitted, wanted = (
                [layer - 1 for layer in side.aux_layer_ids or ()] for side in (base, draft)
            )
            message = (
                f"the base emits the outputs of layers {emitted}, the draft reads those of {wanted}"
            )
            yield Mismatch("aux layers", message, remedy)
        elif draft.hidden_states_width != base.hidden_states_width:
            message = (
                f"the draft reads aux hidden states {draft.hidden_states_width} wide, the base "
                f"emits {base.hidden_states_width}"
            )
            yield Mismatch("aux layers", message, remedy)

    return rule


def config_rows(config: DraftConfig) -> Iterator[tuple[str, str]]:
    """Of a draft's checkpoint: its block, and what rows of the block see in each layer."""
    assert isinstance(config, BlockDraftConfig)
    mask = f"mask token {config.mask_token_id}"
    yield "block", f"{config.block_size} tokens, the anchor included; {mask}"
    kinds = [attention_words(*kind) for kind in zip(config.windows, config.causal, strict=True)]
    counted = [
        f"{kinds.count(kind)} of {len(kinds)} layers: {kind}" for kind in dict.fromkeys(kinds)
    ]
    yield "attention", "; ".join(counted)


def attention_words(window: int | None, causal: bool) -> str:
    """How one layer attends, for `inspect`."""
    seen = f"a window of {window}" if window else "all of the context"
    return f"{seen}, {'causal' if causal else 'both ways'} inside the block"


def spec_rows(spec: SpecConfig) -> Iterator[tuple[str, str]]:
    """Of an exported base or draft: the block, and the layers whose outputs it is drafted from."""
    assert isinstance(spec, BlockSpec)
    layers = ", ".join(str(layer - 1) for layer in spec.aux_layer_ids)
    block = f"{spec.block_size} tokens, mask token {spec.mask_token_id}"
    yield "block", f"{block}, behind the outputs of layers {layers}"
