"""What drafts of several methods read alike of config.json and the shapes of their tensors: layers,
lists of layers of the base, and what they share with it. Knows no method."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.layers import activation_of, check_divides, even_head_dim
from edgespec.config.ropes import DRAFT_MROPE, one_rope
from edgespec.config.values import (
    AttentionSpec,
    DraftConfig,
    LayerSpec,
    MlpSpec,
    NormSpec,
    Shapes,
)
from edgespec.errors import CheckpointError, UnsupportedModel

Switch = tuple[str, bool | int, str]  # a key, its usual value, what another makes of the draft


def layer_numbers(shapes: Shapes) -> set[int]:
    """The layers that tensors are named by."""
    matches = (re.match(r"layers\.(\d{1,6})\.", name) for name in shapes)
    return {int(match[1]) for match in matches if match}


def draft_layer(
    layer: Fields,
    shapes: Shapes,
    first: str,
    heads: tuple[int, int, int],
    window: int | None = None,
) -> LayerSpec:
    """The form of all layers: sizes by the config, biases and norms by the tensors of the layer
    `first`. `heads` are num_heads, num_kv_heads and head_dim."""

    def has(*names: str) -> bool:
        return any(f"{first}.{name}" in shapes for name in names)

    given = layer.get("max_position_embeddings") is not None
    max_position = layer.size("max_position_embeddings") if given else None
    attention = AttentionSpec(
        *heads,
        rope=one_rope(layer, heads[2], max_position, mrope=DRAFT_MROPE),
        scale=1 / math.sqrt(heads[2]),
        window=window,
        qkv_bias=has("self_attn.q_proj.bias", "self_attn.qkv_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )
    mlp = MlpSpec(
        layer.size("intermediate_size"),
        activation_of(layer),
        bias=has("mlp.gate_proj.bias", "mlp.gate_up_proj.bias"),
    )
    return LayerSpec(attention, mlp, NormSpec(layer.number("rms_norm_eps")))


def heads_by_rows(layer: Fields, first: str, q_out: int, k_out: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim of a draft whose first layer's q and k have so many rows.
    Raises CheckpointError where the config declares others."""
    num_heads = layer.size("num_attention_heads")
    check_divides(
        layer, "num_attention_heads", num_heads, f"output of {first}.self_attn.q_proj", q_out
    )
    head_dim = even_head_dim(layer, layer.size("head_dim", q_out // num_heads))
    num_kv_heads = layer.size("num_key_value_heads", max(1, k_out // head_dim))
    for name, rows, heads in (("q_proj", q_out, num_heads), ("k_proj", k_out, num_kv_heads)):
        if rows != heads * head_dim:
            raise CheckpointError(
                f"{first}.self_attn.{name}.weight has {rows} rows; {layer.source} declares {heads}"
                f" heads of {head_dim}."
            )
    check_divides(layer, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, head_dim


def matrix(shapes: Shapes, name: str, source: str, whose: str) -> tuple[int, int]:
    """Rows and columns of a tensor that every such draft has. Raises CheckpointError where it is
    missing or no matrix."""
    if name not in shapes:
        raise CheckpointError(
            f"the draft of {source} has no tensor {name!r}, which every {whose} has.",
            "Check that the directory holds a draft of Llama's layer form, and the whole of it.",
        )
    shape = shapes[name]
    if len(shape) != 2:
        raise CheckpointError(f"tensor {name!r} has the shape {list(shape)}, not two dimensions.")
    return shape[0], shape[1]


def layer_ids(fields: Fields, key: str) -> tuple[int, ...] | None:
    """A list of layer numbers; None where it is missing or empty. Raises what `fields` raises."""
    ids = fields.get(key)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(is_int(i) and 0 <= i < 2**31 - 1 for i in ids):
        raise fields.wrong(key, "a list of layer numbers")
    return tuple(ids)


def norm_is_there(fields: Fields, key: str, tensor: str, shapes: Shapes) -> bool:
    """Whether a tensor is there. CheckpointError where the config has the key and says other."""
    there = tensor in shapes
    if fields.flag(key, there) != there:
        raise CheckpointError(
            f"{fields.source}: '{key}' is {fields.get(key)}, but tensor {tensor!r} is"
            f" {'there' if there else 'missing'}."
        )
    return there


def refuse_switches(fields: Fields, switches: tuple[Switch, ...], whose: str) -> None:
    """UnsupportedModel for a switch of ModelOpt that makes another graph of the draft."""
    for key, usual, meaning in switches:
        value = fields.get(key)
        if value is not None and value != usual:
            raise UnsupportedModel(
                f"{fields.source}: {key} is {shortened(value)}: {meaning}; this version needs"
                f" {usual} for an {whose}."
            )


def check_shared(draft: DraftConfig, shapes: Shapes, source: str) -> None:
    """CheckpointError for an embedding or an lm_head of another shape than the config declares, and
    where the draft shares the base's, which does not fit."""
    reduced, vocab = draft.draft_vocab_size, draft.vocab_size
    if reduced > vocab:
        raise CheckpointError(
            f"{source}: draft_vocab_size {reduced} is greater than vocab_size {vocab}."
        )
    width, base_width = draft.decoder.hidden_size, draft.target_hidden_size
    for name, own, rows in (
        ("embed_tokens", draft.own_embedding, vocab),
        ("lm_head", draft.own_head, reduced),
    ):
        if own and shapes[f"{name}.weight"] != (rows, width):
            raise CheckpointError(
                f"{name}.weight has the shape {list(shapes[f'{name}.weight'])}; {source} declares"
                f" {[rows, width]}."
            )
        if not own and (width != base_width or rows < vocab):
            raise CheckpointError(
                f"the draft of {source} has no {name}.weight, and the base's does not fit: {rows}"
                f" of {vocab} tokens, width {width} on a base of {base_width}."
            )


def base_name(top: Fields) -> str | None:
    """The base that a draft's config.json names: speculators' verifier, or ModelOpt's key."""
    verifier = top.optional_section("speculators_config").optional_section("verifier")
    return verifier.text("name_or_path") or top.text("base_model_name_or_path")


def base_keys(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys of a draft's config.json that name its base, as published configurations do:
    `base_name` reads them."""
    speculators = config.get("speculators_config")
    if isinstance(speculators, dict) and isinstance(speculators.get("verifier"), dict):
        verifier = speculators["verifier"] | {"name_or_path": name}
        return {"speculators_config": speculators | {"verifier": verifier}}
    return {"base_model_name_or_path": name}
