"""Block drafts: how their checkpoints are read, whatever the method.

A block draft is a few Qwen3-like layers that read the base's aux hidden states as context and draft
a block of mask tokens in one call. Inside, names of tensors are fc, hidden_norm, layers.0..., norm,
and for the small heads behind it markov_head and confidence_head. Knows no bases, and no method:
each says in its own file which keys it has, and how it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeVar, cast

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.layers import (
    check_divides,
    even_head_dim,
    layer_types,
    num_layers_of,
    repeated,
)
from edgespec.config.values import DecoderConfig, DraftConfig, Shapes
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.draft_layers import (
    base_name,
    check_shared,
    draft_layer,
    layer_ids,
    layer_numbers,
)

Stated = TypeVar("Stated")

MAX_BLOCK = 1024  # published drafts have up to 16; a pass computes the whole block
# Stored Linear -> the ones it is made of, by rows
FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
_RENAMED = {
    "context_proj": "fc",
    "context_norm": "hidden_norm",
    "final_norm": "norm",
    # ModelOpt's names of the heads behind the layers
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}
_CONTAINERS = ("model.", "logit_head.")  # prefixes under which some stored the same tensors
# Keys that the section of every block draft may have
KEYS = (
    *("mask_token_id", "mask_token", "target_layer_ids", "block_size", "num_target_layers"),
    *("use_swa", "swa_window_size", "causal", "is_causal", "attention_sink_bias"),
    *("projector_type", "sample_from_anchor", "shift_label", "pure_draft_prefix_len"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraftConfig(DraftConfig):
    """A block draft of Qwen3-like layers."""

    aux_layer_ids: tuple[int, ...]  # hidden_states indices
    block_size: int  # the anchor included
    mask_token_id: int
    windows: tuple[int | None, ...]  # per layer: how far back it sees the context; None: all of it
    causal: tuple[bool, ...]  # per layer: a row of the block does not see the later ones

    @property
    def first_slot(self) -> int:
        """The first slot of a block that drafts: the one behind the anchor's."""
        return 1

    @property
    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the arrays that stand beside the draft's graph."""
        return {}

    @property
    def num_drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_slot


def own_name(stored: str) -> str:
    """The name in here of a tensor that is stored under a spelling of others; fused Linears keep
    theirs."""
    for container in _CONTAINERS:
        stored = stored.removeprefix(container)
    root, dot, rest = stored.partition(".")
    return f"{_RENAMED.get(root, root)}{dot}{rest}"


def own_shapes(shapes: Shapes) -> Shapes:
    """Shapes under the names in here."""
    return {own_name(name): shape for name, shape in shapes.items()}


def block_values(
    method: str,
    title: str,
    raw: Mapping[str, Any],
    shapes: Shapes,
    source: str,
    *,
    inner: Fields,
    layout: str,
) -> dict[str, Any]:
    """What a BlockDraftConfig of any layout is made of, from its config.json and the shapes of its
    tensors under the names in here.

    `title` is the method's, for messages. `inner` are the keys that may stand in a section of their
    own, `layout` the spelling: "speculators" has the layers in `transformer_layer_config`. A
    quantized Linear is in `shapes` as the weight that it stands for. Raises CheckpointError for
    contradictions, UnsupportedModel for layers of another kind.
    """
    top = Fields(raw, source)
    layer = top.section("transformer_layer_config") if layout == "speculators" else top
    decoder = _decoder(layer, shapes, title)
    vocab_size = layer.size("vocab_size")
    target_hidden_size = top.size("target_hidden_size", decoder.hidden_size)
    target_layers = _agreed(top, inner, "num_target_layers", _size)
    aux_layers = _aux_layers(top, inner, decoder.num_layers, target_layers, layout)
    _check_fc(shapes, decoder.hidden_size, len(aux_layers) * target_hidden_size, source, title)
    kinds = _layer_kinds(layer, decoder.num_layers, title)
    values: dict[str, Any] = {
        "method": method,
        "layout": layout,
        "decoder": decoder,
        "vocab_size": vocab_size,
        "draft_vocab_size": top.size("draft_vocab_size", vocab_size),
        "target_hidden_size": target_hidden_size,
        "num_aux_layers": len(aux_layers),
        "aux_layer_ids": aux_layers,
        "block_size": _block_size(top, inner),
        "mask_token_id": _mask_token(top, inner, vocab_size),
        "windows": _windows(inner, layer, kinds),
        "causal": _causal(top, inner, layer, kinds),
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_head": "lm_head.weight" in shapes,
        "num_target_layers": target_layers,
        "base_name": base_name(top),
    }
    check_shared(BlockDraftConfig(**values), shapes, source)
    return values


def refuse_unknown(inner: Fields, known: tuple[str, ...] = KEYS) -> None:
    """CheckpointError for a key of the section that is not `known`: a misspelt key would silently
    leave a default in force."""
    unknown = next((key for key in inner.raw if key not in known), None)
    if unknown is not None:
        near = get_close_matches(unknown, known, n=1, cutoff=0)[0]
        raise CheckpointError(
            f"{inner.source}: the key {shortened(unknown)} is not one that is known here; the"
            f" nearest is {near!r}.",
            "Correct the key, or remove it if the draft does not need it. Known keys:"
            f" {', '.join(known)}.",
        )


def layout_of(raw: Mapping[str, Any], section: str) -> str:
    """Who wrote a config.json whose own keys stand in `section`: ModelOpt always writes `causal`,
    and has none of the keys that transformers adds when it saves."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    inner = raw.get(section)
    given = isinstance(inner, Mapping) and "causal" in inner
    return (
        "modelopt"
        if given and "transformers_version" not in raw and "auto_map" not in raw
        else "z-lab"
    )


# The layers


def _decoder(layer: Fields, shapes: Shapes, title: str) -> DecoderConfig:
    """Qwen3-like; which rows of block and context a layer sees, the masks say."""
    num_layers, numbers = num_layers_of(layer), layer_numbers(shapes)
    if numbers != set(range(num_layers)):
        raise CheckpointError(
            f"{layer.source} declares {num_layers} layers; the tensors are of {len(numbers)}:"
            f" {sorted(numbers)[:8]}.",
            "Download the draft again, all of it.",
        )
    spec = draft_layer(layer, shapes, "layers.0", _heads(layer, shapes, title))
    return DecoderConfig(layer.size("hidden_size"), repeated(spec, num_layers), spec.norm)


def _heads(layer: Fields, shapes: Shapes, title: str) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; the projections must have the sizes that the config
    declares."""
    num_heads = layer.size("num_attention_heads")
    num_kv_heads = layer.size("num_key_value_heads", num_heads)
    check_divides(layer, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    # transformers' rule for a missing key, unless a projection knows better
    rows = shapes.get("layers.0.self_attn.q_proj.weight", (layer.size("hidden_size"),))
    given = max(1, (rows[0] if rows else 0) // num_heads)
    head_dim = even_head_dim(layer, layer.size("head_dim", given))
    _check_heads(shapes, num_heads, num_kv_heads, head_dim, layer.source, title)
    return num_heads, num_kv_heads, head_dim


def _check_heads(
    shapes: Shapes, num_heads: int, num_kv_heads: int, head_dim: int, source: str, title: str
) -> None:
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "qkv_proj": queries + 2 * keys}
    stored = [name for name in rows if f"layers.0.self_attn.{name}.weight" in shapes]
    if stored not in (["q_proj", "k_proj", "v_proj"], ["qkv_proj"]):
        raise CheckpointError(
            f"the draft of {source} has {', '.join(stored) or 'no projections'} in"
            f" layers.0.self_attn; a {title} draft has q_proj, k_proj and v_proj, or all in one as"
            " qkv_proj."
        )
    for name in stored:
        shape = shapes[f"layers.0.self_attn.{name}.weight"]
        if shape[:1] != (rows[name],):
            raise CheckpointError(
                f"layers.0.self_attn.{name}.weight has the shape {list(shape)}; {source} declares"
                f" {num_heads} heads and {num_kv_heads} key heads of {head_dim}: {rows[name]} rows."
            )


def _layer_kinds(layer: Fields, num_layers: int, title: str) -> list[str]:
    kinds = layer_types(layer, "late", num_layers, _qwen_window(layer))
    unknown = next(
        (kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None
    )
    if unknown is not None:
        raise UnsupportedModel(
            f"{layer.source}: layer_types has {shortened(unknown)}; a {title} draft has"
            " full_attention and sliding_attention."
        )
    return kinds


def _qwen_window(layer: Fields) -> int | None:
    """The window by which a config without layer_types slides."""
    on = layer.flag("use_sliding_window", False) and layer.get("sliding_window") is not None
    return layer.size("sliding_window") if on else None


def _windows(inner: Fields, layer: Fields, kinds: list[str]) -> tuple[int | None, ...]:
    """Per layer, how far back the context is seen: all layers slide with use_swa, else those that
    layer_types names."""
    slides = [inner.flag("use_swa", False) or kind == "sliding_attention" for kind in kinds]
    if not any(slides):
        return (None,) * len(kinds)
    place, key = (
        (inner, "swa_window_size")
        if inner.get("swa_window_size") is not None
        else (layer, "sliding_window")
    )
    window = place.size(key)
    return tuple(window if slide else None for slide in slides)


def _causal(top: Fields, inner: Fields, layer: Fields, kinds: list[str]) -> tuple[bool, ...]:
    """is_causal wins over the section's causal, and both over the rule: sliding layers are causal,
    full ones not."""
    for place, key in (
        (top, "is_causal"),
        (layer, "is_causal"),
        (inner, "is_causal"),
        (inner, "causal"),
    ):
        if place.get(key) is not None:
            return (place.flag(key, False),) * len(kinds)
    if top.flag("sliding_window_non_causal", False):  # speculators; its full layers never are
        return (False,) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


# Aux layers, block and mask


def _aux_layers(
    top: Fields, inner: Fields, num_layers: int, target_layers: int | None, layout: str
) -> tuple[int, ...]:
    """hidden_states indices. `target_layer_ids`, at the top level or in the section, counts layer
    outputs (index - 1), speculators counts as we do."""
    outputs = _agreed(top, inner, "target_layer_ids", layer_ids)
    indices = layer_ids(top, "aux_hidden_state_layer_ids")
    also = layer_ids(top, "eagle_aux_hidden_state_layer_ids")
    aux_layers = indices or (tuple(i + 1 for i in outputs) if outputs else None) or also
    if aux_layers is None and layout == "speculators":
        raise top.missing("aux_hidden_state_layer_ids")
    if aux_layers is None:
        aux_layers = tuple(i + 1 for i in default_outputs(target_layers, num_layers, inner))
    for ids, offset, name in (
        (outputs, 1, "target_layer_ids"),
        (also, 0, "eagle_aux_hidden_state_layer_ids"),
    ):
        if ids is not None and tuple(i + offset for i in ids) != aux_layers:
            raise CheckpointError(
                f"{top.source} contradicts itself: {name} {list(ids)} are the hidden_states indices"
                f" {[i + offset for i in ids]}, not {list(aux_layers)} as the other key says."
            )
    ascending = all(low < high for low, high in pairwise(aux_layers))
    if (
        not ascending
        or aux_layers[0] < 1
        or (target_layers is not None and aux_layers[-1] > target_layers)
    ):
        limit = f"1..{target_layers}" if target_layers else "1 and more"
        raise CheckpointError(
            f"{top.source}: the aux layers are the hidden_states indices {list(aux_layers)};"
            f" expected ascending ones of {limit}."
        )
    return aux_layers


def default_outputs(target_layers: int | None, num_layers: int, inner: Fields) -> list[int]:
    """The layer outputs of z-lab's rule: as many as the draft has layers, evenly from the second to
    the last but two; one: the middle. Raises CheckpointError where the base's depth is
    unknown."""
    if target_layers is None:
        raise CheckpointError(
            f"{inner.source}: neither 'target_layer_ids' nor 'num_target_layers' is there, so the"
            " aux layers are not known.",
            "Add target_layer_ids as the draft was trained, or download the draft again.",
        )
    if num_layers == 1:
        return [target_layers // 2]
    first = min(1, target_layers - 1)
    span = max(first, target_layers - 3) - first
    return [round(first + i * span / (num_layers - 1)) for i in range(num_layers)]


def _agreed(
    top: Fields, inner: Fields, key: str, read: Callable[[Fields, str], Stated | None]
) -> Stated | None:
    """A value that may stand at the top level or inside the section, or in both if they agree."""
    stated = [value for place in (top, inner) if (value := read(place, key)) is not None]
    if len(set(stated)) > 1:
        raise CheckpointError(
            f"{top.source} contradicts itself: '{key}' is {stated[0]} at the top level and"
            f" {stated[1]} in {inner.source}."
        )
    return stated[0] if stated else None


def _size(place: Fields, key: str) -> int | None:
    return None if place.get(key) is None else place.size(key)


def _block_size(top: Fields, inner: Fields) -> int:
    size = _agreed(top, inner, "block_size", _size)
    if size is None:
        raise CheckpointError(
            f"{top.source}: 'block_size' is missing; the draft cannot be run without it.",
            "Download the draft again.",
        )
    if not 2 <= size <= MAX_BLOCK:
        wanted = "at least 2" if size < 2 else f"at most {MAX_BLOCK}"
        raise (top if top.get("block_size") is not None else inner).wrong("block_size", wanted)
    return size


def _token_id(place: Fields, key: str) -> int | None:
    if place.get(key) is not None and not is_int(place.get(key)):
        raise place.wrong(key, "the id of a token")
    return cast("int | None", place.get(key))


def _mask_token(top: Fields, inner: Fields, vocab_size: int) -> int:
    mask = _agreed(top, inner, "mask_token_id", _token_id)
    if mask is None:
        raise CheckpointError(
            f"{inner.source}: 'mask_token_id' is missing; the draft cannot be run without it.",
            "Add the id of the token that the draft was trained with, or download the draft again.",
        )
    if not 0 <= mask < vocab_size:
        raise CheckpointError(
            f"{top.source}: mask_token_id {mask} is outside the vocabulary of {vocab_size} tokens.",
            "Check that the draft is whole and was made for this vocabulary; its config.json may be"
            " of another draft.",
        )
    return mask


# What the tensors must be


def _check_fc(shapes: Shapes, hidden_size: int, width: int, source: str, title: str) -> None:
    shape = shapes.get("fc.weight")
    if shape is None:
        raise CheckpointError(
            f"the draft of {source} has no tensor 'fc.weight', which every {title} draft has.",
            f"Check that the directory holds the whole of a {title} draft.",
        )
    if shape != (hidden_size, width):
        raise CheckpointError(
            f"fc.weight has the shape {list(shape)}; {source} declares {[hidden_size, width]} "
            "(hidden_size, aux layers * target_hidden_size)."
        )


# How a checkpoint is recognised


def named_by(config: Mapping[str, Any], words: tuple[str, ...]) -> bool:
    """Whether the class or the kind that a config.json names begins with one of the `words`, for a
    speculators draft, or has one of them in it."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return isinstance(kind, str) and kind.startswith(words)
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    lowered = [name.lower() for name in names if isinstance(name, str)]
    return any(word in name for name in lowered for word in words)
