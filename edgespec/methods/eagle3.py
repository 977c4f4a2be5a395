"""EAGLE-3 drafts of every published layout, from config.json and the shapes of the tensors. Knows
no bases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.layers import repeated, windows_of
from edgespec.config.values import AuxLayerConvention, DecoderConfig, DraftConfig, Shapes
from edgespec.contract import Role
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import family_of
from edgespec.families.base import GgufForm
from edgespec.methods.aux_layers import default_aux_layers
from edgespec.methods.base import AUX_LAYERS_OF_GGUF, DraftFormat, Method, SpecConfig
from edgespec.methods.draft_layers import (
    Switch,
    base_name,
    check_shared,
    draft_layer,
    heads_by_rows,
    layer_ids,
    layer_numbers,
    matrix,
    norm_is_there,
    refuse_switches,
)
from edgespec.methods.sides import BaseSide, DraftSide, Mismatch

NAME = "eagle3"
WHOSE = "EAGLE-3 draft"
POST_NORM_KEY = "return_hidden_post_norm"  # TensorRT-LLM's, in eagle_config
AUX_LAYERS_KEY = "eagle_hidden_state_layers"  # TensorRT Edge-LLM's, in config.json of a base


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """An EAGLE-3 draft (arXiv 2503.01840)."""

    norm_before_residual: bool = False  # the residual stream starts at hidden_norm(g), not at g
    norm_before_fc: bool = False  # input_norm over the concatenated aux hidden states
    fc_norm: bool = False  # one RMSNorm per aux hidden state before fc
    norm_output: bool = False  # the recycled hidden state is the one after `norm`


def parse_eagle3_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> Eagle3Config:
    """An EAGLE-3 draft of any published layout from its config.json and the shapes of its tensors.

    A quantized Linear is in `shapes` as the weight that it stands for. Where config and tensors
    both speak (head_dim, aux layers, vocabulary), they must agree. What only the tensors show:
    number of layers and aux layers, biases, q/k norm, whether it has an embedding and an lm_head of
    its own.

    Raises CheckpointError for contradictions, UnsupportedModel for variants of EAGLE-3 that differ
    in their graph.
    """
    top = Fields(raw, source)
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    layout = _draft_layout(raw, shapes)
    layer = top.section("transformer_layer_config") if layout == "speculators" else top
    decoder = _draft_decoder(layer, shapes)
    switches = (*_SWITCHES, *([_REGULAR] if decoder.num_layers > 1 else []))
    refuse_switches(top.optional_section("eagle_config"), switches, WHOSE)
    target_hidden_size = top.size("target_hidden_size", decoder.hidden_size)
    num_aux_layers = _num_aux_layers(shapes, decoder.hidden_size, target_hidden_size, source)
    aux_layer_ids, convention = _draft_aux_layers(top, layout, num_aux_layers)
    vocab_size = layer.size("vocab_size")
    draft = Eagle3Config(
        method=NAME,
        layout=layout,
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=top.size("draft_vocab_size", vocab_size),
        target_hidden_size=target_hidden_size,
        num_aux_layers=num_aux_layers,
        aux_layer_ids=aux_layer_ids,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        norm_before_residual=_norm_before_residual(top, layout),
        norm_before_fc=_norm_before_fc(top, shapes),
        fc_norm=_fc_norm(top, shapes, num_aux_layers),
        norm_output=_norm_output(top, shapes, layout),
        base_name=base_name(top),
        aux_layer_convention=convention,
    )
    # tie_word_embeddings is often just copied from the base
    if not draft.own_head and draft.own_embedding and top.flag("tie_word_embeddings", False):
        raise UnsupportedModel(
            f"{source}: a draft whose head is its own embedding (tie_word_embeddings)."
        )
    check_shared(draft, shapes, source)
    return draft


def _draft_layout(raw: Mapping[str, Any], shapes: Shapes) -> str:
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    return "eagle" if _first_layer(shapes) == "midlayer" else "modelopt"


def _first_layer(shapes: Shapes) -> str:
    return "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0"


def _draft_decoder(layer: Fields, shapes: Shapes) -> DecoderConfig:
    first = _first_layer(shapes)
    num_layers = _count_layers(shapes, layer.source)
    heads = _draft_heads(layer, shapes, first)
    spec = draft_layer(layer, shapes, first, heads, _one_window(layer, num_layers))
    return DecoderConfig(layer.size("hidden_size"), repeated(spec, num_layers), spec.norm)


def _one_window(layer: Fields, num_layers: int) -> int | None:
    """The window of all layers, read as the family does that the config names; a draft whose layers
    differ is refused."""
    family = family_of({"model_type": layer.text("model_type")})
    windows = set(windows_of(layer, family.window_rule if family else "none", num_layers))
    if len(windows) > 1:
        raise UnsupportedModel(
            f"{layer.source}: layers with and without a window, from layer_types or"
            " max_window_layers; this version needs one kind of attention in all layers of an"
            " EAGLE-3 draft."
        )
    return windows.pop()


def _draft_heads(layer: Fields, shapes: Shapes, first: str) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; the projections must have the sizes that the config
    declares."""
    hidden_size = layer.size("hidden_size")
    q_out, q_in = matrix(shapes, f"{first}.self_attn.q_proj.weight", layer.source, WHOSE)
    k_out, _ = matrix(shapes, f"{first}.self_attn.k_proj.weight", layer.source, WHOSE)
    if q_in != 2 * hidden_size:
        raise CheckpointError(
            f"{first}.self_attn.q_proj.weight takes {q_in} inputs; an EAGLE-3 draft with the"
            f" hidden_size {hidden_size} of {layer.source} takes {2 * hidden_size} (embedding and"
            " hidden state)."
        )
    return heads_by_rows(layer, first, q_out, k_out)


def _count_layers(shapes: Shapes, source: str) -> int:
    """The tensors decide: some configs copy num_hidden_layers from the base."""
    numbers = layer_numbers(shapes)
    if any(name.startswith("midlayer.") for name in shapes):
        if 0 in numbers:
            raise CheckpointError(
                f"the draft of {source} has both 'midlayer.' and 'layers.0.' tensors."
            )
        numbers.add(0)
    if numbers != set(range(len(numbers))):
        raise CheckpointError(
            f"the draft of {source} lacks a layer: its tensors have the layers {sorted(numbers)}."
        )
    return len(numbers)


# ModelOpt's switches: the value of published EAGLE-3 drafts
_SWITCHES: tuple[Switch, ...] = (
    ("use_aux_hidden_state", True, "a draft without aux layers (EAGLE-1)"),
    ("use_input_layernorm_in_first_layer", True, "no norm over the embedding"),
    ("use_last_layernorm", True, "no norm before lm_head"),
    ("use_mtp_layernorm", False, "the norms of an MTP head"),
    ("parallel_draft_step", 1, "several tokens per draft step"),
    ("eh_proj_before_attn", False, "a projection of embedding and state before the attention"),
)
_REGULAR: Switch = ("next_layer_regular", True, "later layers that take the embedding as well")


def _num_aux_layers(shapes: Shapes, hidden_size: int, target_hidden_size: int, source: str) -> int:
    rows, columns = matrix(shapes, "fc.weight", source, WHOSE)
    if rows != hidden_size or columns % target_hidden_size or not columns:
        raise CheckpointError(
            f"fc.weight has the shape [{rows}, {columns}]; {source} declares [{hidden_size}, k *"
            f" {target_hidden_size}] (hidden_size, aux layers * target_hidden_size)."
        )
    return columns // target_hidden_size


def _draft_aux_layers(
    top: Fields, layout: str, num_aux_layers: int
) -> tuple[tuple[int, ...] | None, AuxLayerConvention]:
    """The ids a draft names and how they count; None where it names none."""
    key = "eagle_aux_hidden_state_layer_ids"
    eagle = top.optional_section("eagle_config")
    nested, plain = layer_ids(eagle, key), layer_ids(top, key)
    ids = plain if nested is None or layout == "speculators" else nested
    if ids is None:
        return None, "hs"
    if len(ids) != num_aux_layers:
        raise CheckpointError(
            f"{top.source}: {key} names {len(ids)} layers, but fc.weight takes {num_aux_layers}."
        )
    if layout == "speculators":
        return ids, "hs"
    if ids is plain:
        return ids, "unknown"  # vLLM reads this key as hs indices, others write layer outputs there
    return tuple(i + 1 for i in ids), "hs" if layout == "modelopt" else "output"


def _norm_before_residual(top: Fields, layout: str) -> bool:
    """Heads of speculators before 0.2 leave the key out and rely on vLLM's default, which is
    true."""
    version = re.match(r"(\d+)\.(\d+)", top.text("speculators_version") or "")
    early = (
        layout == "speculators"
        and version is not None
        and (int(version[1]), int(version[2])) < (0, 2)
    )
    return top.flag("norm_before_residual", early)


def _norm_before_fc(top: Fields, shapes: Shapes) -> bool:
    key, tensor = "norm_before_fc", "input_norm.weight"
    norm_is_there(top.optional_section("eagle_config"), key, tensor, shapes)  # TensorRT-LLM's
    return norm_is_there(top, key, tensor, shapes)


def _fc_norm(top: Fields, shapes: Shapes, num_aux_layers: int) -> bool:
    present = norm_is_there(top, "fc_norm", "fc_norm.0.weight", shapes)
    if present and "input_norm.weight" in shapes:
        raise CheckpointError(
            f"the draft of {top.source} has both input_norm and fc_norm: they exclude each other."
        )
    missing = [i for i in range(num_aux_layers) if f"fc_norm.{i}.weight" not in shapes]
    if present and missing:
        raise CheckpointError(
            f"the draft of {top.source} has {num_aux_layers} aux layers, but no"
            f" fc_norm.{missing[0]}.weight."
        )
    return present


def _norm_output(top: Fields, shapes: Shapes, layout: str) -> bool:
    """One key, two meanings: in SpecForge it says that `norm` comes before lm_head, which it always
    does here. TensorRT-LLM's key for the recycled state has but one."""
    recycles = layout == "speculators" or "fc_norm.0.weight" in shapes
    if not recycles and not top.flag("norm_output", True):
        raise UnsupportedModel(
            f"{top.source}: norm_output is false, which in this format means no norm before"
            " lm_head.",
            "If it was meant as EAGLE-3's usual form, remove the key.",
        )
    eagle = top.optional_section("eagle_config")
    return (recycles and top.flag("norm_output", False)) or eagle.flag(POST_NORM_KEY, False)


# The method's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(SpecConfig):
    """Of a base: the aux layers that it emits. A draft's config.json keeps no key of the method."""


def read_spec(fields: Fields) -> Eagle3Spec:
    """The aux layers that a base's config.json says it emits; a draft's has no such key. Raises
    what `fields` raises, with the key."""
    if fields.get("engine_role") != Role.BASE.value:
        return Eagle3Spec()
    layers = layer_ids(fields, AUX_LAYERS_KEY)
    if layers is None:
        raise fields.missing(AUX_LAYERS_KEY)
    return Eagle3Spec(aux_layer_ids=layers)


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The key that `read_spec` reads; nothing without aux layers."""
    return {AUX_LAYERS_KEY: list(spec.aux_layer_ids)} if spec.aux_layer_ids else {}


def reads_what_is_emitted(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """An exported base emits the aux layers that the draft was trained on."""
    if base.aux_layer_ids is None:
        return
    wanted, emitted = draft.aux_layer_ids or default_aux_layers(base.num_layers), base.aux_layer_ids
    if tuple(wanted) != emitted:
        message = f"the base emits hidden_states {list(emitted)}, the draft reads {list(wanted)}"
        layers = ",".join(map(str, wanted))
        remedy = f"Export the base again with `eagle_base` `aux_layers` {layers}"
        yield Mismatch("aux layers", message, remedy)
    elif draft.hidden_states_width != base.hidden_states_width:
        message = (
            f"the draft reads {draft.num_aux_layers} aux layers, the base emits {len(emitted)}"
        )
        remedy = (
            "Export the base again with `aux_layers` naming as many as the draft was trained on"
        )
        yield Mismatch("aux layers", message, remedy)


def spec_rows(spec: SpecConfig) -> Iterator[tuple[str, str]]:
    """Of a base: the aux layers that it emits."""
    if spec.aux_layer_ids:
        yield "aux layers", ", ".join(map(str, spec.aux_layer_ids))


def gguf_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of ModelOpt's layout, whose ids are those of layer outputs, for metadata of
    llama.cpp, which count from the embedding."""
    ids = [i - 1 for i in config.get(AUX_LAYERS_OF_GGUF, ())]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }


# Its hidden_norm is the second norm before the attention; d2t holds ids (checkpoint/d2t.py)
GGUF = GgufForm(
    "eagle3",
    keys={
        "extract_layers": AUX_LAYERS_OF_GGUF,
        "target_layers": AUX_LAYERS_OF_GGUF,
        "target_hidden_size": "target_hidden_size",
        "norm_before_residual": "norm_before_residual",
    },
    lists=("extract_layers", "target_layers", "norm_before_residual"),
    tensors={"attn_norm_2": "hidden_norm", "fc.weight": "fc.weight"},
    permuted=True,
    more=gguf_keys,
)


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == NAME


def _has_eagle3_tensors(config: Mapping[str, Any], shapes: Callable[[], Shapes]) -> bool:
    eagle = config.get("eagle_config")
    if isinstance(eagle, Mapping):
        return eagle.get("use_aux_hidden_state") is not False
    names = shapes()
    return "fc.weight" in names and any(name.endswith(".hidden_norm.weight") for name in names)


METHOD = Method(
    name=NAME,
    title="EAGLE-3",
    draft_title="an EAGLE-3 draft",
    aliases=("eagle-3", "eagle"),
    base_output="aux_hidden_states",
    export_params={"eagle_base": True},
    component="llm",
    takes_aux_layers=True,
    proposes="tree",
    format=DraftFormat(
        matches_config=_is_speculators,
        matches_tensors=_has_eagle3_tensors,
        parse=parse_eagle3_config,
        gguf=GGUF,
    ),
    read_spec=read_spec,
    write_spec=write_spec,
    pair_rules=(reads_what_is_emitted,),
    default_layers="EAGLE-3's default",
    spec_rows=spec_rows,
)
