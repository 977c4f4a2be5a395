"""Block drafts: how their checkpoints are read, whatever the method, and what config.json keeps of
them.

A block draft is a few Qwen3-like layers that read the base's aux hidden states as context and draft
a block of mask tokens in one call. Inside, names of tensors are fc, hidden_norm, layers.0..., norm,
and for the small heads behind it markov_head and confidence_head. Knows no bases, and no method:
each says in its own file which keys it has, and how it differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, cast

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.layers import (
    activation_of,
    check_divides,
    even_head_dim,
    layer_types,
    num_layers_of,
    repeated,
)
from edgespec.config.ropes import DRAFT_MROPE, one_rope
from edgespec.config.values import (
    AttentionSpec,
    DecoderConfig,
    DraftConfig,
    LayerSpec,
    MlpSpec,
    NormSpec,
    Shapes,
)
from edgespec.contract import Role
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.base import SpecConfig
from edgespec.methods.sides import BaseSide, DraftSide, Mismatch, PairRule
from edgespec.methods.speculators import base_name

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
    target_layers = _agreed_size(top, inner, "num_target_layers")
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
    _check_shared(BlockDraftConfig(**values), shapes, source)
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
    num_layers = num_layers_of(layer)
    _check_layers(shapes, num_layers, layer.source)
    norm = NormSpec(layer.number("rms_norm_eps"))
    biases = (f"layers.0.mlp.{name}.bias" for name in ("gate_proj", "gate_up_proj"))
    mlp = MlpSpec(
        layer.size("intermediate_size"),
        activation_of(layer),
        bias=any(name in shapes for name in biases),
    )
    layers = repeated(LayerSpec(_attention(layer, shapes, title), mlp, norm), num_layers)
    return DecoderConfig(layer.size("hidden_size"), layers, norm)


def _attention(layer: Fields, shapes: Shapes, title: str) -> AttentionSpec:
    """Qwen3-like; which rows of block and context it sees, the masks say."""
    num_heads, num_kv_heads, head_dim = _heads(layer, shapes, title)
    given = layer.get("max_position_embeddings") is not None
    max_position = layer.size("max_position_embeddings") if given else None
    first = "layers.0.self_attn"
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=one_rope(layer, head_dim, max_position, mrope=DRAFT_MROPE),
        scale=1 / math.sqrt(head_dim),
        qkv_bias=f"{first}.q_proj.bias" in shapes or f"{first}.qkv_proj.bias" in shapes,
        o_bias=f"{first}.o_proj.bias" in shapes,
        qk_norm=f"{first}.q_norm.weight" in shapes,
    )


def _heads(layer: Fields, shapes: Shapes, title: str) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; the projections must have the sizes that the config
    declares."""
    num_heads = layer.size("num_attention_heads")
    num_kv_heads = layer.size("num_key_value_heads", num_heads)
    check_divides(layer, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    given = _projected_head_dim(shapes, num_heads, layer.size("hidden_size"))
    head_dim = even_head_dim(layer, layer.size("head_dim", given))
    _check_heads(shapes, num_heads, num_kv_heads, head_dim, layer.source, title)
    return num_heads, num_kv_heads, head_dim


def _check_layers(shapes: Shapes, num_layers: int, source: str) -> None:
    numbers = {
        int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d{1,6})\.", name))
    }
    if numbers != set(range(num_layers)):
        raise CheckpointError(
            f"{source} declares {num_layers} layers; the tensors are of {len(numbers)}:"
            f" {sorted(numbers)[:8]}.",
            "Download the draft again, all of it.",
        )


def _projected_head_dim(shapes: Shapes, num_heads: int, hidden_size: int) -> int:
    """transformers' rule for a missing key, unless a projection knows better."""
    shape = shapes.get("layers.0.self_attn.q_proj.weight", (hidden_size,))
    return max(1, (shape[0] if shape else 0) // num_heads)


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
    outputs, indices = _outputs(top, inner), _ids(top, "aux_hidden_state_layer_ids")
    also = _ids(top, "eagle_aux_hidden_state_layer_ids")
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


def _outputs(top: Fields, inner: Fields) -> tuple[int, ...] | None:
    """`target_layer_ids`, from either place; they must agree."""
    stated = [ids for place in (top, inner) if (ids := _ids(place, "target_layer_ids")) is not None]
    if len(set(stated)) > 1:
        raise CheckpointError(
            f"{top.source} contradicts itself: 'target_layer_ids' is {list(stated[0])} at the top"
            f" level and {list(stated[1])} in {inner.source}."
        )
    return stated[0] if stated else None


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


def _ids(fields: Fields, key: str) -> tuple[int, ...] | None:
    ids = fields.get(key)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(is_int(i) and 0 <= i < 2**31 - 1 for i in ids):
        raise fields.wrong(key, "a list of layer numbers")
    return tuple(ids)


def _agreed_size(top: Fields, inner: Fields, key: str) -> int | None:
    """A size that may stand at the top level or inside the section, or in both if they agree."""
    sizes = [place.size(key) for place in (top, inner) if place.get(key) is not None]
    if len(set(sizes)) > 1:
        raise CheckpointError(
            f"{top.source} contradicts itself: '{key}' is {sizes[0]} at the top level and"
            f" {sizes[1]} in {inner.source}."
        )
    return sizes[0] if sizes else None


def _block_size(top: Fields, inner: Fields) -> int:
    size = _agreed_size(top, inner, "block_size")
    if size is None:
        raise CheckpointError(
            f"{top.source}: 'block_size' is missing; the draft cannot be run without it.",
            "Download the draft again.",
        )
    if not 2 <= size <= MAX_BLOCK:
        wanted = "at least 2" if size < 2 else f"at most {MAX_BLOCK}"
        raise (top if top.get("block_size") is not None else inner).wrong("block_size", wanted)
    return size


def _mask_token(top: Fields, inner: Fields, vocab_size: int) -> int:
    places = [place for place in (top, inner) if place.get("mask_token_id") is not None]
    for place in places:
        if not is_int(place.get("mask_token_id")):
            raise place.wrong("mask_token_id", "the id of a token")
    ids: list[int] = [place.get("mask_token_id") for place in places]
    if not ids:
        raise CheckpointError(
            f"{inner.source}: 'mask_token_id' is missing; the draft cannot be run without it.",
            "Add the id of the token that the draft was trained with, or download the draft again.",
        )
    if len(set(ids)) > 1:
        raise CheckpointError(
            f"{top.source} contradicts itself: 'mask_token_id' is {ids[0]} at the top level and"
            f" {ids[1]} in {inner.source}."
        )
    if not 0 <= ids[0] < vocab_size:
        raise CheckpointError(
            f"{places[0].source}: mask_token_id {ids[0]} is outside the vocabulary of {vocab_size}"
            " tokens.",
            "Check that the draft is whole and was made for this vocabulary; its config.json may be"
            " of another draft.",
        )
    return ids[0]


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


def _check_shared(draft: BlockDraftConfig, shapes: Shapes, source: str) -> None:
    """An embedding and an lm_head that the base shares must fit."""
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
    outputs = _ids(inner, "target_layer_ids")
    if outputs is None:
        raise inner.missing("target_layer_ids")
    mask = inner.get("mask_token_id")
    if not is_int(mask) or not 0 <= mask < fields.size("vocab_size"):
        raise inner.wrong("mask_token_id", "the id of a token")
    windows, causal = inner.get("windows") or [], inner.get("causal") or []
    drafted = fields.get("engine_role") == Role.DRAFT.value
    layers = fields.size("num_hidden_layers") if drafted else 0  # a base keeps neither
    if not isinstance(windows, list) or not all(w is None or is_window(w) for w in windows):
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


def is_window(value: object) -> bool:
    """Whether a JSON value is a number of tokens that a layer sees."""
    return is_int(value) and 1 <= cast(int, value) < 2**31


def spec_keys(spec: SpecConfig) -> dict[str, Any]:
    """The keys that `read_values` reads."""
    assert isinstance(spec, BlockSpec)
    keys: dict[str, Any] = {
        "target_layer_ids": [layer - 1 for layer in spec.aux_layer_ids],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
    }
    if spec.windows:
        keys |= {"windows": list(spec.windows), "causal": list(spec.causal)}
    return keys


def block_of(spec: SpecConfig) -> int:
    """The nodes that a call of the draft makes: a whole block."""
    assert isinstance(spec, BlockSpec)
    return spec.block_size


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
