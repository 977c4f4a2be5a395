"""EAGLE-1 drafts (arXiv 2401.15077) of both published layouts, from config.json and the shapes of
the tensors. EAGLE-2 (arXiv 2406.16858) is another search over the same weights. Knows no bases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.config.fields import Fields, shortened
from edgespec.config.layers import activation_of
from edgespec.config.ropes import DRAFT_MROPE, one_rope
from edgespec.config.values import (
    AttentionSpec,
    DecoderConfig,
    DraftConfig,
    LayerSpec,
    MlpSpec,
    NormNames,
    NormSpec,
    Shapes,
)
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.base import DraftFormat, Method
from edgespec.methods.eagle3 import POST_NORM_KEY, heads_by_rows, matrix
from edgespec.methods.speculators import base_name

NAME = "eagle1"
FIRST = "layers.0"
WHOSE = "EAGLE-1 draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Config(DraftConfig):
    """An EAGLE-1 draft. It reads one hidden state of its base, that after the last norm."""

    fc_bias: bool
    last_norm: bool  # a norm before the lm_head
    norm_output: bool  # the recycled hidden state is the one after that norm, not before it


def parse_eagle1_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> Eagle1Config:
    """An EAGLE-1 draft of SafeAILab's or ModelOpt's layout.

    The tensors decide how many layers there are, and which biases and norms; where config.json
    names them, it must agree. Raises CheckpointError for contradictions, UnsupportedModel for
    variants that differ in their graph.
    """
    top = Fields(raw, source)
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    refuse_other_forms(top, shapes)
    decoder = draft_decoder(top, shapes)
    vocab_size = top.size("vocab_size")
    draft = Eagle1Config(
        method=NAME,
        layout="modelopt" if "eagle_config" in raw else "eagle",
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=top.size("draft_vocab_size", vocab_size),
        target_hidden_size=decoder.hidden_size,
        num_aux_layers=1,
        aux_layer_ids=None,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        base_name=base_name(top),
        fc_bias=agreed(top, "bias", "fc.bias", shapes),
        last_norm=last_norm(top, shapes),
        norm_output=norm_output(top, shapes),
    )
    check_vocabulary(draft, shapes, source)
    return draft


def last_norm(top: Fields, shapes: Shapes) -> bool:
    """Whether there is a norm before the lm_head. UnsupportedModel where nothing says which state
    such a draft recycles: SafeAILab's have no norm."""
    eagle = top.optional_section("eagle_config")
    there = agreed(eagle, "use_last_layernorm", "norm.weight", shapes)
    if there and not eagle.raw:
        message = (
            f"the draft of {top.source} has 'norm.weight', and nothing says whether it goes on with"
            " the state before that norm or after it"
        )
        remedy = 'Add "eagle_config": {"use_last_layernorm": true} for the state before it, as'
        and_after = '"return_hidden_post_norm": true for the one after it'
        raise UnsupportedModel(message, f"{remedy} ModelOpt trains, and {and_after}.")
    return there


def norm_output(top: Fields, shapes: Shapes) -> bool:
    """Whether the recycled hidden state is the one after the last norm: ModelOpt trains with the
    one before it, TensorRT-LLM has a key for the other. CheckpointError where there is no norm."""
    eagle = top.optional_section("eagle_config")
    asked = eagle.flag(POST_NORM_KEY, False)
    if asked and "norm.weight" not in shapes:
        message = (
            f"{eagle.source}: '{POST_NORM_KEY}' is true, and there is no tensor 'norm.weight'."
        )
        raise CheckpointError(message)
    return asked


def agreed(fields: Fields, key: str, tensor: str, shapes: Shapes) -> bool:
    """Whether a tensor is there. CheckpointError where the config has the key and says other."""
    there = tensor in shapes
    if fields.flag(key, there) != there:
        raise CheckpointError(
            f"{fields.source}: '{key}' is {fields.get(key)}, but tensor {tensor!r} is"
            f" {'there' if there else 'missing'}."
        )
    return there


# ModelOpt's switches: the value of EAGLE-1, and what the other one makes of the draft
_SWITCHES: tuple[tuple[str, bool | int, str], ...] = (
    ("use_aux_hidden_state", False, "a draft that reads aux layers (EAGLE-3)"),
    ("use_mtp_layernorm", False, "norms over embedding and hidden state, as in an MTP head"),
    ("parallel_draft_step", 1, "several tokens per draft step"),
)


def refuse_other_forms(top: Fields, shapes: Shapes) -> None:
    """Raises UnsupportedModel for drafts whose graph is another one."""
    eagle = top.optional_section("eagle_config")
    for key, usual, meaning in _SWITCHES:
        value = eagle.get(key)
        if value is not None and value != usual:
            message = f"{eagle.source}: {key} is {shortened(value)}: {meaning}"
            raise UnsupportedModel(f"{message}; this version needs {usual} for an EAGLE-1 draft.")
    for name in ("enorm.weight", "hnorm.weight", f"{FIRST}.hidden_norm.weight"):
        if name in shapes:
            message = (
                f"the draft of {top.source} has {name!r}: it norms what an EAGLE-1 draft does not"
            )
            raise UnsupportedModel(
                message, "Take an EAGLE-1 draft of SafeAILab's or ModelOpt's layout."
            )


def draft_decoder(top: Fields, shapes: Shapes) -> DecoderConfig:
    """The draft's layers, of which the first has no norm before its attention unless the file has
    one."""
    hidden_size = top.size("hidden_size")
    rows, columns = matrix(shapes, "fc.weight", top.source, WHOSE)
    if (rows, columns) != (hidden_size, 2 * hidden_size):
        raise CheckpointError(
            f"fc.weight has the shape [{rows}, {columns}]; an EAGLE-1 draft with the hidden_size"
            f" {hidden_size} of {top.source} has [{hidden_size}, {2 * hidden_size}] (embedding and"
            " hidden state)."
        )
    norm = NormSpec(top.number("rms_norm_eps"))
    mlp = MlpSpec(
        top.size("intermediate_size"),
        activation_of(top),
        bias=f"{FIRST}.mlp.gate_proj.bias" in shapes,
    )
    layer = LayerSpec(draft_attention(top, shapes, hidden_size), mlp, norm)
    eagle = top.optional_section("eagle_config")
    key, tensor = "use_input_layernorm_in_first_layer", f"{FIRST}.input_layernorm.weight"
    first = layer
    if not agreed(eagle, key, tensor, shapes):
        first = replace(layer, norm_names=NormNames(before_mixer=None))
    others = num_layers(shapes, top.source) - 1
    return DecoderConfig(hidden_size, (first, *others * (layer,)), norm)


def draft_attention(top: Fields, shapes: Shapes, hidden_size: int) -> AttentionSpec:
    """The attention of all layers: they rotate by the draft's own config."""
    q_out, q_in = matrix(shapes, f"{FIRST}.self_attn.q_proj.weight", top.source, WHOSE)
    k_out, _ = matrix(shapes, f"{FIRST}.self_attn.k_proj.weight", top.source, WHOSE)
    if q_in == 2 * hidden_size:
        message = (
            f"the draft of {top.source} reads embedding and hidden state side by side, as EAGLE-3"
            " does, and no aux layers"
        )
        raise UnsupportedModel(message, "Take a draft that reads aux layers, or an EAGLE-1 draft.")
    if q_in != hidden_size:
        raise CheckpointError(
            f"{FIRST}.self_attn.q_proj.weight takes {q_in} inputs; {top.source} declares the"
            f" hidden_size {hidden_size}."
        )
    num_heads, num_kv_heads, head_dim = heads_by_rows(top, FIRST, q_out, k_out)
    given = top.get("max_position_embeddings") is not None
    max_position = top.size("max_position_embeddings") if given else None
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=one_rope(top, head_dim, max_position, mrope=DRAFT_MROPE),
        scale=1 / math.sqrt(head_dim),
        qkv_bias=f"{FIRST}.self_attn.q_proj.bias" in shapes,
        o_bias=f"{FIRST}.self_attn.o_proj.bias" in shapes,
        qk_norm=f"{FIRST}.self_attn.q_norm.weight" in shapes,
    )


def num_layers(shapes: Shapes, source: str) -> int:
    """The tensors decide: some configs copy num_hidden_layers from the base."""
    numbers = {int(m[1]) for name in shapes if (m := re.match(r"layers\.(\d{1,6})\.", name))}
    if numbers != set(range(len(numbers))) or not numbers:
        message = (
            f"the draft of {source} lacks a layer: its tensors have the layers {sorted(numbers)}."
        )
        raise CheckpointError(message)
    return len(numbers)


def check_vocabulary(draft: Eagle1Config, shapes: Shapes, source: str) -> None:
    """Raises CheckpointError where lm_head and vocabulary do not fit each other."""
    vocab, own = draft.vocab_size, draft.draft_vocab_size
    if own > vocab:
        raise CheckpointError(
            f"{source}: draft_vocab_size {own} is greater than vocab_size {vocab}."
        )
    if draft.own_head and matrix(shapes, "lm_head.weight", source, WHOSE)[0] != own:
        raise CheckpointError(
            f"lm_head.weight has the shape {list(shapes['lm_head.weight'])}; {source} declares"
            f" {own} draft tokens."
        )
    if not draft.own_head and own < vocab:
        raise CheckpointError(
            f"the draft of {source} has no lm_head.weight, and the base's does not fit: {own} of"
            f" {vocab} tokens."
        )


def has_eagle1_tensors(config: Mapping[str, Any], shapes: Callable[[], Shapes]) -> bool:
    """Whether a checkpoint is such a draft, or says that it is one: fc over [embedding; hidden
    state] before ordinary layers."""
    eagle = config.get("eagle_config")
    if isinstance(eagle, Mapping):
        if eagle.get("use_aux_hidden_state") is not None:
            return eagle["use_aux_hidden_state"] is False
    elif eagle is not None:
        return False
    tensors, hidden_size = shapes(), config.get("hidden_size")
    if not isinstance(hidden_size, int) or tensors.get("fc.weight") != (
        hidden_size,
        2 * hidden_size,
    ):
        return False
    ordinary = any(name.startswith(f"{FIRST}.self_attn.") for name in tensors)
    return ordinary and not any(name.endswith(".hidden_norm.weight") for name in tensors)


METHOD = Method(
    name=NAME,
    title="EAGLE-1",
    draft_title="an EAGLE-1 draft",
    aliases=("eagle-1", "eagle2", "eagle-2"),
    base_output="final_hidden_state",
    export_params={"eagle1_base": True},
    component="llm",
    proposes="tree",
    format=DraftFormat(
        matches_config=lambda config: False,
        matches_tensors=has_eagle1_tensors,
        parse=parse_eagle1_config,
    ),
    default_layers="the state after the last norm",
)
