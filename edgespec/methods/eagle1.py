"""EAGLE-1 drafts (arXiv 2401.15077) of both published layouts, from config.json and the shapes of
the tensors. EAGLE-2 (arXiv 2406.16858) is another search over the same weights. Knows no bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import DecoderConfig, DraftConfig, NormNames, Shapes
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.base import DraftFormat, Method
from edgespec.methods.draft_layers import (
    Switch,
    base_name,
    check_shared,
    draft_layer,
    heads_by_rows,
    layer_numbers,
    matrix,
    norm_is_there,
    refuse_switches,
)
from edgespec.methods.eagle3 import POST_NORM_KEY

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
        fc_bias=norm_is_there(top, "bias", "fc.bias", shapes),
        last_norm=last_norm(top, shapes),
        norm_output=norm_output(top, shapes),
    )
    check_shared(draft, shapes, source)
    return draft


def last_norm(top: Fields, shapes: Shapes) -> bool:
    """Whether there is a norm before the lm_head. UnsupportedModel where nothing says which state
    such a draft recycles: SafeAILab's have no norm."""
    eagle = top.optional_section("eagle_config")
    there = norm_is_there(eagle, "use_last_layernorm", "norm.weight", shapes)
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


# ModelOpt's switches: the value of EAGLE-1, and what the other one makes of the draft
_SWITCHES: tuple[Switch, ...] = (
    ("use_aux_hidden_state", False, "a draft that reads aux layers (EAGLE-3)"),
    ("use_mtp_layernorm", False, "norms over embedding and hidden state, as in an MTP head"),
    ("parallel_draft_step", 1, "several tokens per draft step"),
)


def refuse_other_forms(top: Fields, shapes: Shapes) -> None:
    """Raises UnsupportedModel for drafts whose graph is another one."""
    refuse_switches(top.optional_section("eagle_config"), _SWITCHES, WHOSE)
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
    layer = draft_layer(top, shapes, FIRST, draft_heads(top, shapes, hidden_size))
    eagle = top.optional_section("eagle_config")
    key, tensor = "use_input_layernorm_in_first_layer", f"{FIRST}.input_layernorm.weight"
    first = layer
    if not norm_is_there(eagle, key, tensor, shapes):
        first = replace(layer, norm_names=NormNames(before_mixer=None))
    others = num_layers(shapes, top.source) - 1
    return DecoderConfig(hidden_size, (first, *others * (layer,)), layer.norm)


def draft_heads(top: Fields, shapes: Shapes, hidden_size: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; the projections must have the sizes that the config
    declares."""
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
    return heads_by_rows(top, FIRST, q_out, k_out)


def num_layers(shapes: Shapes, source: str) -> int:
    """The tensors decide: some configs copy num_hidden_layers from the base."""
    numbers = layer_numbers(shapes)
    if numbers != set(range(len(numbers))) or not numbers:
        message = (
            f"the draft of {source} lacks a layer: its tensors have the layers {sorted(numbers)}."
        )
        raise CheckpointError(message)
    return len(numbers)


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
