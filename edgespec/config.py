"""What a model is, as pure values: read from the dictionaries of Hugging Face, ModelOpt, speculators and EAGLE.

Knows the spellings that published configurations use, and turns them into one. Knows no files, tensors or graphs.
Tap indices are normalised here: everywhere inside they are Hugging Face `hidden_states` indices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, cast, get_args

from edgespec.errors import CheckpointError, PairingError, UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
TapConvention = Literal["hs", "output", "unknown"]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, as on disk


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model. `rotary_dim` counts both halves; positions are token indices."""

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # length before scaling; dynamic: where the scaling sets in
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin, resolved from mscale at parse time


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder: what its layers look like. Sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens seen, the own one included; the same for all layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A base model: its decoder and its vocabulary."""

    architecture: str
    decoder: DecoderConfig
    vocab_size: int
    tied_head: bool
    max_position: int
    dtype: str  # the checkpoint's own: float32, float16, bfloat16
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


class DraftKind(StrEnum):
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """An EAGLE-3 draft (arXiv 2503.01840): `decoder` describes its own layers, width `decoder.hidden_size`."""

    kind: DraftKind
    flavour: str  # the on-disk family, for messages: "eagle", "modelopt", "speculators"
    decoder: DecoderConfig
    vocab_size: int  # of the base
    draft_vocab_size: int
    target_hidden_size: int  # width of one tap
    num_taps: int
    tap_ids: tuple[int, ...] | None  # hidden_states indices, but see tap_convention; None: EAGLE-3's default
    own_embedding: bool
    own_head: bool
    norm_before_residual: bool = False  # the residual stream starts at hidden_norm(g), not at g
    norm_before_fc: bool = False  # input_norm over the concatenated taps
    fc_norm: bool = False  # one RMSNorm per tap before fc
    norm_output: bool = False  # the recycled hidden state is the one after `norm`
    base_name: str | None = None  # what the draft's config says that it was made for
    # How the file counts its taps. hs: for certain, or converted; output: converted as the format suggests, to be
    # looked at again with the base's depth; unknown: raw. resolve_taps settles all three.
    tap_convention: TapConvention = "hs"


def default_tap_ids(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default taps as hidden_states indices: 2, L//2, L-3."""
    return (2, num_layers // 2, num_layers - 3)


def parse_model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """A base model from its config.json; `source` names the file in errors.

    A missing `torch_dtype` reads as float32: the tensors know better (see checkpoint/detect.py).
    Raises CheckpointError for missing or impossible values, UnsupportedModel for what this version cannot do.
    """
    fields = _Fields(raw, source)
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    num_heads, num_kv_heads, head_dim = _base_heads(fields, family)
    num_layers = fields.size("num_hidden_layers")
    max_position = fields.size("max_position_embeddings")
    _refuse_other_activations(fields)
    decoder = DecoderConfig(
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, head_dim, max_position),
        qkv_bias=_bias(fields, family.qkv_bias),
        o_bias=_bias(fields, family.o_bias),
        mlp_bias=_bias(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(fields, family, num_layers),
    )
    bos = _token_ids(fields, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        decoder=decoder,
        vocab_size=fields.size("vocab_size"),
        tied_head=fields.flag("tie_word_embeddings", False),
        max_position=max_position,
        dtype=_dtype(fields),
        eos_token_ids=parse_eos(raw, source),
        bos_token_id=bos[0] if bos else None,
    )


def parse_eos(raw: Mapping[str, Any], source: str = "config.json") -> tuple[int, ...]:
    """The `eos_token_id` of a config.json or generation_config.json: none, one or several ids."""
    return _token_ids(_Fields(raw, source), "eos_token_id")


def with_eos(config: ModelConfig, ids: Iterable[int]) -> ModelConfig:
    """The same model, ending at `ids` (duplicates dropped, order kept)."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def parse_draft_config(raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json") -> DraftConfig:
    """An EAGLE-3 draft of any published flavour from its config.json and the shapes of its tensors.

    A quantised Linear is in `shapes` as the weight that it stands for.

    Where config and tensors both speak (head_dim, taps, vocabulary), they must agree. What only the tensors tell:
    number of layers and taps, biases, q/k norm, whether it has an embedding and a head of its own.
    Raises CheckpointError for contradictions, UnsupportedModel for relatives of EAGLE-3 that differ in their graph.
    """
    top = _Fields(raw, source)
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    flavour = _draft_flavour(raw, shapes)
    layer = top.section("transformer_layer_config") if flavour == "speculators" else top
    decoder = _draft_decoder(layer, shapes)
    _refuse_unusual_eagle(top, decoder.num_layers)
    target_hidden_size = top.size("target_hidden_size", decoder.hidden_size)
    num_taps = _num_taps(shapes, decoder.hidden_size, target_hidden_size, source)
    tap_ids, convention = _draft_taps(top, flavour, num_taps)
    vocab_size = layer.size("vocab_size")
    draft = DraftConfig(
        kind=DraftKind.EAGLE3,
        flavour=flavour,
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=top.size("draft_vocab_size", vocab_size),
        target_hidden_size=target_hidden_size,
        num_taps=num_taps,
        tap_ids=tap_ids,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        norm_before_residual=_norm_before_residual(top, flavour),
        norm_before_fc=_norm_before_fc(top, shapes),
        fc_norm=_fc_norm(top, shapes, num_taps),
        norm_output=_norm_output(top, shapes, flavour),
        base_name=_base_name(top),
        tap_convention=convention,
    )
    _check_vocabulary(draft, shapes, tied=top.flag("tie_word_embeddings", False), source=source)
    return draft


def normalise_taps(ids: Sequence[int], num_layers: int, convention: Literal["hs", "output"]) -> tuple[int, ...]:
    """Tap ids of either convention as hidden_states indices of a base with `num_layers` layers.

    "output" counts layers from 0 and means what comes out of them: hs index - 1. The index `num_layers` means the last
    layer's output before the final norm (not Hugging Face's last entry). Raises PairingError for ids that are not in
    1..num_layers or not strictly ascending.
    """
    taps = tuple(ids) if convention == "hs" else tuple(i + 1 for i in ids)
    if not all(1 <= tap <= num_layers for tap in taps):
        raise PairingError(
            f"tap ids {list(ids)} read as hidden_states indices {list(taps)}: not all in 1..{num_layers}, "
            f"and the base has {num_layers} layers.",
            _TAPS_REMEDY,
        )
    if any(low >= high for low, high in pairwise(taps)):
        raise PairingError(
            f"tap ids {list(ids)} read as hidden_states indices {list(taps)}: not strictly ascending "
            f"(the base has {num_layers} layers).",
            _TAPS_REMEDY,
        )
    return taps


def resolve_taps(draft: DraftConfig, num_layers: int, override: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Which hidden_states indices of a base with `num_layers` layers the draft reads, ascending.

    `override` are hidden_states indices and win; otherwise the draft's own ids, otherwise EAGLE-3's default.
    Raises PairingError where ids do not fit the base or the draft, or can be read in two ways.
    """
    if override is not None:
        taps = normalise_taps(override, num_layers, "hs")
    elif draft.tap_ids is None:
        taps = normalise_taps(default_tap_ids(num_layers), num_layers, "hs")
    else:
        raw = tuple(tap - 1 for tap in draft.tap_ids) if draft.tap_convention == "output" else draft.tap_ids
        taps = normalise_taps(raw, num_layers, _convention(raw, draft.tap_convention, num_layers))
    if len(taps) != draft.num_taps:
        raise PairingError(
            f"{len(taps)} tapped layers {list(taps)}, but the draft's fc takes {draft.num_taps} of width "
            f"{draft.target_hidden_size}.",
            _TAPS_REMEDY,
        )
    return taps


# What a configuration file holds


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object with its name: each read is checked, and null reads as missing."""

    raw: Mapping[str, Any]
    source: str

    def get(self, key: str) -> Any:
        return self.raw.get(key)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: '{key}' is {_shortened(self.get(key))}, not {wanted}.",
            "Correct the file, or download the checkpoint again.",
        )

    def missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: '{key}' is missing.", "Add it, or download the checkpoint again.")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if not _is_int(value) or not 1 <= value < 2**31:
            raise self.wrong(key, "a positive whole number below 2^31")
        return cast(int, value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if not (_is_int(value) or isinstance(value, float)) or not 0 < value < 2**63:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def section(self, key: str) -> _Fields:
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return _Fields(value, f"{self.source} ({key})")

    def optional_section(self, key: str) -> _Fields:
        return _Fields({}, self.source) if self.get(key) is None else self.section(key)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _token_ids(fields: _Fields, key: str) -> tuple[int, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(_is_int(i) and 0 <= i < 2**31 for i in ids):
        raise fields.wrong(key, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: _Fields) -> str:
    name = (fields.text("torch_dtype") or fields.text("dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(
            f"{fields.source}: weights of type {name!r}; this version exports float32, float16 and bfloat16."
        )
    return name


# Families of base models


@dataclass(frozen=True, slots=True)
class _Family:
    """One supported architecture, as transformers 5.14 builds it. A bias is a constant or the key that decides."""

    model_type: str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    window: Literal["none", "all", "late"]  # late: from layer max_window_layers on, if use_sliding_window
    head_dim: int | None = None  # where the key is missing; None: hidden_size / num_attention_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", "attention_bias", "attention_bias", "mlp_bias", False, "none"),
    "MistralForCausalLM": _Family("mistral", False, False, False, False, "all"),
    "Qwen2ForCausalLM": _Family("qwen2", True, False, False, False, "late"),
    "Qwen3ForCausalLM": _Family("qwen3", "attention_bias", "attention_bias", False, True, "late", head_dim=128),
}
_BY_MODEL_TYPE = {family.model_type: name for name, family in _FAMILIES.items()}


def _architecture(fields: _Fields) -> str:
    """The key of _FAMILIES; transformers goes by model_type, so the two names must agree."""
    model_type = fields.text("model_type")
    architectures = fields.get("architectures") or [_BY_MODEL_TYPE.get(model_type or "", model_type)]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise fields.wrong("architectures", "a list with the name of one class")
    name = architectures[0]
    if name not in _FAMILIES or len(architectures) > 1:
        raise UnsupportedModel(
            f"{fields.source}: architecture {', '.join(map(str, architectures))} is not one that this version knows.",
            f"Supported base models: {', '.join(_FAMILIES)}.",
        )
    if model_type is not None and model_type != _FAMILIES[name].model_type:
        raise CheckpointError(
            f"{fields.source} contradicts itself: architectures says {name}, model_type says {model_type!r}.",
            f"For {name}, model_type is {_FAMILIES[name].model_type!r}.",
        )
    return name


def _base_heads(fields: _Fields, family: _Family) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim."""
    num_heads = fields.size("num_attention_heads")
    # Only Llama's first configurations lack the key: they are older than grouped heads.
    lacks_kv_heads = "num_key_value_heads" not in fields.raw and family.model_type != "llama"
    num_kv_heads = fields.size("num_key_value_heads", None if lacks_kv_heads else num_heads)
    head_dim = fields.get("head_dim") or family.head_dim
    if head_dim is None:
        _check_divides(fields, "num_attention_heads", num_heads, "hidden_size", fields.size("hidden_size"))
        head_dim = fields.size("hidden_size") // num_heads
    _check_divides(fields, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, _even(fields, fields.size("head_dim", head_dim))


def _check_divides(fields: _Fields, part: str, count: int, whole: str, size: int) -> None:
    if size % count:
        raise CheckpointError(f"{fields.source}: {whole} {size} is not a multiple of {part} {count}.")


def _even(fields: _Fields, head_dim: int) -> int:
    if head_dim % 2:
        raise CheckpointError(f"{fields.source}: head_dim is {head_dim}; rotary embeddings need an even one.")
    return head_dim


def _bias(fields: _Fields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def _refuse_other_activations(fields: _Fields) -> None:
    activation = fields.text("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(f"{fields.source}: hidden_act {activation!r}; this version knows silu only.")


def _sliding_window(fields: _Fields, family: _Family, num_layers: int) -> int | None:
    """The window of all layers, or None; layers that differ are refused."""
    window = _window_size(fields, family)
    kinds = set(_layer_types(fields, family, num_layers, window))
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise UnsupportedModel(
            f"{fields.source}: layers of different or unknown kinds ({', '.join(sorted(kinds))}), from layer_types or "
            "max_window_layers; this version needs one kind of attention in all layers."
        )
    slides = kinds == {"sliding_attention"}
    if slides != (window is not None) and (slides or family.window == "all"):
        raise CheckpointError(
            f"{fields.source} contradicts itself: layer_types says {kinds.pop()}, "
            f"but the sliding window in force is {window}."
        )
    return window if slides else None


def _window_size(fields: _Fields, family: _Family) -> int | None:
    if family.window == "none" or (family.window == "late" and not fields.flag("use_sliding_window", False)):
        return None
    if "sliding_window" in fields.raw and fields.get("sliding_window") is None:
        return None
    return fields.size("sliding_window", 4096)  # transformers' default for Mistral, Qwen2 and Qwen3


def _layer_types(fields: _Fields, family: _Family, num_layers: int, window: int | None) -> list[str]:
    named = fields.get("layer_types")
    if named is not None:
        if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named) or len(named) < num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers} names")
        return named[:num_layers]
    first = 0 if family.window == "all" else fields.raw.get("max_window_layers", 28)
    if not _is_int(first) or first < 0:
        raise fields.wrong("max_window_layers", "a number of layers")
    return ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(num_layers)]


# Rotary embeddings: the semantics of transformers 5.14, modeling_rope_utils.py


def _rope(fields: _Fields, head_dim: int, max_position: int | None, *, text_mrope: bool = False) -> RopeConfig:
    """The one rotary embedding of a config: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    `text_mrope` accepts "mrope" as default: on text, the three axes of a position are equal.
    """
    entries = _rope_entries(fields)
    ropes = {name: _parse_rope(entry, fields, head_dim, max_position, text_mrope) for name, entry in entries.items()}
    if len(set(ropes.values())) > 1:
        raise UnsupportedModel(
            f"{fields.source}: more than one rotary embedding ({', '.join(ropes)} differ); this version needs the same "
            "in all layers."
        )
    return next(iter(ropes.values()))


def _rope_entries(fields: _Fields) -> dict[str, _Fields]:
    """What describes a rotary embedding, by name; one entry per layer type where the file nests them."""
    entries: dict[str, _Fields] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not fields.get(key):
            continue
        raw = fields.section(key).raw
        nested = {name: value for name, value in raw.items() if isinstance(value, Mapping)}
        shared = {name: value for name, value in raw.items() if name not in nested}
        for name, entry in nested.items() or [("", {})]:
            label = f"{key}.{name}" if name else key
            entries[label] = _Fields({**shared, **entry}, f"{fields.source} ({label})")
    return entries or {"rope_theta": _Fields({}, fields.source)}


def _parse_rope(
    entry: _Fields, fields: _Fields, head_dim: int, max_position: int | None, text_mrope: bool
) -> RopeConfig:
    kind = entry.text("rope_type") or entry.text("type") or "default"
    if kind == "mrope" and text_mrope:
        kind = "default"
    if kind not in get_args(RopeKind):
        raise UnsupportedModel(
            f"{entry.source}: rotary embedding of type {kind!r}; this version knows {', '.join(get_args(RopeKind))}."
        )
    _refuse_partial_rotary(entry, fields)
    theta = entry.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise fields.wrong("rope_theta", "a base greater than 1")
    rope = RopeConfig(theta=theta, rotary_dim=head_dim, kind=cast(RopeKind, kind))
    match rope.kind:
        case "default":
            return rope
        case "linear":
            return replace(rope, factor=entry.number("factor"))
        case "dynamic":  # sets in at max_position_embeddings, whatever original_max_position_embeddings says
            original = max_position or fields.size("max_position_embeddings")
            return replace(rope, factor=entry.number("factor"), original_max_position=original)
        case "llama3":
            return _llama3(rope, entry, _original_max_position(entry, fields, max_position))
        case "yarn":
            return _yarn(rope, entry, _original_max_position(entry, fields, max_position), max_position)


def _refuse_partial_rotary(entry: _Fields, fields: _Fields) -> None:
    """transformers ignores the factor in these families where vLLM applies it: no reading of it is safe."""
    for place in (entry, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(
                f"{place.source}: partial_rotary_factor {place.get('partial_rotary_factor')}; "
                "this version rotates whole heads only."
            )


def _original_max_position(entry: _Fields, fields: _Fields, max_position: int | None) -> int:
    """The length before scaling; transformers lets the top level win over the rope's own entry."""
    for place in (fields, entry):
        if place.get("original_max_position_embeddings") is not None:
            return place.size("original_max_position_embeddings")
    return max_position or fields.size("max_position_embeddings")


def _llama3(rope: RopeConfig, entry: _Fields, original: int) -> RopeConfig:
    low, high = entry.number("low_freq_factor"), entry.number("high_freq_factor")
    if high <= low:
        raise entry.wrong("high_freq_factor", f"greater than low_freq_factor {low}")
    return replace(
        rope,
        factor=entry.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: RopeConfig, entry: _Fields, original: int, max_position: int | None) -> RopeConfig:
    """arXiv 2309.00071; without a factor, the ratio of the two lengths."""
    ratio = max_position / original if max_position else None
    factor = entry.number("factor", ratio)
    return replace(
        rope,
        factor=factor,
        original_max_position=original,
        beta_fast=entry.number("beta_fast") if entry.get("beta_fast") else 32.0,
        beta_slow=entry.number("beta_slow") if entry.get("beta_slow") else 1.0,
        truncate=entry.flag("truncate", True),
        attention_factor=entry.number("attention_factor", _yarn_attention_factor(entry, factor)),
    )


def _yarn_attention_factor(entry: _Fields, factor: float) -> float:
    if entry.get("mscale") and entry.get("mscale_all_dim"):
        return _mscale(factor, entry.number("mscale")) / _mscale(factor, entry.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


# EAGLE-3 drafts


def _draft_flavour(raw: Mapping[str, Any], shapes: Shapes) -> str:
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    return "eagle" if _first_layer(shapes) == "midlayer" else "modelopt"


def _first_layer(shapes: Shapes) -> str:
    return "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0"


def _draft_decoder(layer: _Fields, shapes: Shapes) -> DecoderConfig:
    _refuse_other_activations(layer)
    family = _FAMILIES[_BY_MODEL_TYPE.get(layer.text("model_type") or "llama", "LlamaForCausalLM")]
    first = _first_layer(shapes)
    hidden_size = layer.size("hidden_size")
    num_heads, num_kv_heads, head_dim = _draft_heads(layer, shapes, first, hidden_size)
    max_position = layer.size("max_position_embeddings") if layer.get("max_position_embeddings") is not None else None
    num_layers = _count_layers(shapes, layer.source)
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=layer.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=layer.number("rms_norm_eps"),
        rope=_rope(layer, head_dim, max_position, text_mrope=True),
        qkv_bias=f"{first}.self_attn.q_proj.bias" in shapes,
        o_bias=f"{first}.self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{first}.mlp.gate_proj.bias" in shapes,
        qk_norm=f"{first}.self_attn.q_norm.weight" in shapes,
        sliding_window=_sliding_window(layer, family, num_layers),
    )


def _draft_heads(layer: _Fields, shapes: Shapes, first: str, hidden_size: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; the projections must have the sizes that the config tells."""
    q_out, q_in = _matrix(shapes, f"{first}.self_attn.q_proj.weight", layer.source)
    k_out, _ = _matrix(shapes, f"{first}.self_attn.k_proj.weight", layer.source)
    if q_in != 2 * hidden_size:
        raise CheckpointError(
            f"{first}.self_attn.q_proj.weight takes {q_in} inputs; an EAGLE-3 draft with the hidden_size {hidden_size} "
            f"of {layer.source} takes {2 * hidden_size} (embedding and hidden state)."
        )
    num_heads = layer.size("num_attention_heads")
    _check_divides(layer, "num_attention_heads", num_heads, f"output of {first}.self_attn.q_proj", q_out)
    head_dim = _even(layer, layer.size("head_dim", q_out // num_heads))
    num_kv_heads = layer.size("num_key_value_heads", max(1, k_out // head_dim))
    for name, rows, heads in (("q_proj", q_out, num_heads), ("k_proj", k_out, num_kv_heads)):
        if rows != heads * head_dim:
            raise CheckpointError(
                f"{first}.self_attn.{name}.weight has {rows} rows; {layer.source} tells of {heads} heads of {head_dim}."
            )
    _check_divides(layer, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, head_dim


def _matrix(shapes: Shapes, name: str, source: str) -> tuple[int, int]:
    """Rows and columns of a tensor that every EAGLE-3 draft has."""
    if name not in shapes:
        raise CheckpointError(
            f"the draft of {source} has no tensor {name!r}, which every EAGLE-3 draft has.",
            "Check that the directory holds a draft of Llama's layer form, and the whole of it.",
        )
    shape = shapes[name]
    if len(shape) != 2:
        raise CheckpointError(f"tensor {name!r} has the shape {list(shape)}, not two dimensions.")
    return shape[0], shape[1]


def _count_layers(shapes: Shapes, source: str) -> int:
    """The tensors decide: some configs copy num_hidden_layers from the base."""
    numbers = {int(found[1]) for name in shapes if (found := re.match(r"layers\.(\d{1,6})\.", name))}
    if any(name.startswith("midlayer.") for name in shapes):
        if 0 in numbers:
            raise CheckpointError(f"the draft of {source} has both 'midlayer.' and 'layers.0.' tensors.")
        numbers.add(0)
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"the draft of {source} lacks a layer: its tensors have the layers {sorted(numbers)}.")
    return len(numbers)


# ModelOpt's switches: the value of published EAGLE-3 drafts, and what the other one makes of the draft.
_EAGLE_SWITCHES: tuple[tuple[str, bool | int, str], ...] = (
    ("use_aux_hidden_state", True, "a draft without tapped layers (EAGLE-1)"),
    ("use_input_layernorm_in_first_layer", True, "no norm over the embedding"),
    ("use_last_layernorm", True, "no norm before lm_head"),
    ("use_mtp_layernorm", False, "the norms of an MTP head"),
    ("parallel_draft_step", 1, "several tokens per draft step"),
)


def _refuse_unusual_eagle(top: _Fields, num_layers: int) -> None:
    eagle = top.optional_section("eagle_config")
    regular: tuple[str, bool | int, str] = ("next_layer_regular", True, "later layers that take the embedding as well")
    for key, usual, meaning in (*_EAGLE_SWITCHES, *([regular] if num_layers > 1 else [])):
        value = eagle.get(key)
        if value is not None and value != usual:
            raise UnsupportedModel(
                f"{eagle.source}: {key} is {_shortened(value)}: {meaning}; this version needs {usual}."
            )


def _num_taps(shapes: Shapes, hidden_size: int, target_hidden_size: int, source: str) -> int:
    rows, columns = _matrix(shapes, "fc.weight", source)
    if rows != hidden_size or columns % target_hidden_size or not columns:
        raise CheckpointError(
            f"fc.weight has the shape [{rows}, {columns}]; {source} tells of [{hidden_size}, k * {target_hidden_size}] "
            "(hidden_size, taps * target_hidden_size)."
        )
    return columns // target_hidden_size


def _draft_taps(top: _Fields, flavour: str, num_taps: int) -> tuple[tuple[int, ...] | None, TapConvention]:
    """The ids a draft names and how they count; None where it names none."""
    key = "eagle_aux_hidden_state_layer_ids"
    eagle = top.optional_section("eagle_config")
    nested, plain = _tap_list(eagle, key), _tap_list(top, key)
    ids = plain if nested is None or flavour == "speculators" else nested
    if ids is None:
        return None, "hs"
    if len(ids) != num_taps:
        raise CheckpointError(f"{top.source}: {key} names {len(ids)} layers, but fc.weight takes {num_taps}.")
    if flavour == "speculators":
        return ids, "hs"
    if ids is plain:
        return ids, "unknown"  # vLLM reads this key as hs indices, others write layer outputs there
    return tuple(i + 1 for i in ids), "hs" if flavour == "modelopt" else "output"


def _tap_list(fields: _Fields, key: str) -> tuple[int, ...] | None:
    ids = fields.get(key)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(_is_int(i) and 0 <= i < 2**31 for i in ids):
        raise fields.wrong(key, "a list of layer numbers")
    return tuple(ids)


def _norm_before_residual(top: _Fields, flavour: str) -> bool:
    """Heads of speculators before 0.2 leave the key out and rely on vLLM's default, which is true."""
    version = re.match(r"(\d+)\.(\d+)", top.text("speculators_version") or "")
    early = flavour == "speculators" and version is not None and (int(version[1]), int(version[2])) < (0, 2)
    return top.flag("norm_before_residual", early)


def _norm_before_fc(top: _Fields, shapes: Shapes) -> bool:
    return _norm_by_presence(top, "norm_before_fc", "input_norm.weight", shapes)


def _fc_norm(top: _Fields, shapes: Shapes, num_taps: int) -> bool:
    present = _norm_by_presence(top, "fc_norm", "fc_norm.0.weight", shapes)
    if present and "input_norm.weight" in shapes:
        raise CheckpointError(f"the draft of {top.source} has both input_norm and fc_norm: they exclude each other.")
    missing = [i for i in range(num_taps) if f"fc_norm.{i}.weight" not in shapes]
    if present and missing:
        raise CheckpointError(f"the draft of {top.source} has {num_taps} taps, but no fc_norm.{missing[0]}.weight.")
    return present


def _norm_by_presence(top: _Fields, key: str, tensor: str, shapes: Shapes) -> bool:
    present = tensor in shapes
    if top.flag(key, present) != present:
        raise CheckpointError(
            f"{top.source}: '{key}' is {top.get(key)}, but tensor {tensor!r} is {'there' if present else 'missing'}."
        )
    return present


def _norm_output(top: _Fields, shapes: Shapes, flavour: str) -> bool:
    """One key, two meanings: in SpecForge it says that `norm` comes before lm_head, which it always does here."""
    recycles = flavour == "speculators" or "fc_norm.0.weight" in shapes
    if not recycles and not top.flag("norm_output", True):
        raise UnsupportedModel(
            f"{top.source}: norm_output is false, which in this format means no norm before lm_head.",
            "If it was meant as EAGLE-3's usual form, remove the key.",
        )
    return recycles and top.flag("norm_output", False)


def _base_name(top: _Fields) -> str | None:
    verifier = top.optional_section("speculators_config").optional_section("verifier")
    return verifier.text("name_or_path") or top.text("base_model_name_or_path")


def _check_vocabulary(draft: DraftConfig, shapes: Shapes, *, tied: bool, source: str) -> None:
    """A head and an embedding that the base lends must fit; tie_word_embeddings is often just copied from the base."""
    vocab, reduced = draft.vocab_size, draft.draft_vocab_size
    if reduced > vocab:
        raise CheckpointError(f"{source}: draft_vocab_size {reduced} is greater than vocab_size {vocab}.")
    if draft.own_head and _matrix(shapes, "lm_head.weight", source)[0] != reduced:
        raise CheckpointError(
            f"lm_head.weight has the shape {list(shapes['lm_head.weight'])}; {source} tells of {reduced} draft tokens."
        )
    if not draft.own_head and tied and draft.own_embedding:
        raise UnsupportedModel(f"{source}: a draft whose head is its own embedding (tie_word_embeddings).")
    own_width = draft.decoder.hidden_size != draft.target_hidden_size
    if not draft.own_head and (own_width or reduced < vocab):
        raise CheckpointError(
            f"the draft of {source} has no lm_head.weight, and the base's does not fit: {reduced} of {vocab} tokens, "
            f"width {draft.decoder.hidden_size} on a base of {draft.target_hidden_size}."
        )
    if not draft.own_embedding and own_width:
        raise CheckpointError(
            f"the draft of {source} has no embed_tokens.weight, and the base's does not fit: width "
            f"{draft.decoder.hidden_size} on a base of {draft.target_hidden_size}."
        )


# Taps

_TAPS_REMEDY = "Pass --aux-layers with the hidden_states indices that the draft was trained on, such as 2,16,29."


def _convention(ids: tuple[int, ...], suggested: TapConvention, num_layers: int) -> Literal["hs", "output"]:
    """How ids count: a default tells by itself, then the range, then the format."""
    if suggested == "hs":
        return "hs"
    default = default_tap_ids(num_layers)
    if ids == default:
        return "hs"
    if ids == tuple(tap - 1 for tap in default) or 0 in ids or suggested == "output":
        return "output"
    if num_layers in ids:
        return "hs"
    raise PairingError(
        f"the draft names the layers {list(ids)} and does not say how it counts: as hidden_states indices they are "
        f"{list(ids)}, as layer outputs {[i + 1 for i in ids]}.",
        "Pass --aux-layers with the one list of the two that the draft was trained on.",
    )
