"""Base models from their config.json: the families, and what each leaves unsaid. Knows no
drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.config import hybrid
from edgespec.config.fields import Fields, dtype_of, is_int, token_ids
from edgespec.config.ropes import one_rope
from edgespec.config.values import DecoderConfig, ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel


def parse_model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """A base model from its config.json; `source` names the file in errors.

    A missing `torch_dtype` reads as float32: the tensors know better (see checkpoint/detect.py).
    Raises CheckpointError for missing or impossible values, UnsupportedModel for what this version
    cannot do.
    """
    top = Fields(raw, source)
    architecture = _architecture(top)
    family = FAMILIES[architecture]
    fields = top.section(family.nested) if family.nested else top
    refuse_other_activations(fields)
    max_position = fields.size("max_position_embeddings")
    bos = _told(top, fields, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        decoder=_decoder(fields, family, max_position),
        vocab_size=fields.size("vocab_size"),
        tied_head=top.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False)),
        max_position=max_position,
        dtype=dtype_of(fields if fields.get("dtype") or fields.get("torch_dtype") else top),
        eos_token_ids=_told(top, fields, "eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        mtp_layers=hybrid.num_mtp_layers(fields) if family.hybrid else 0,
    )


def _decoder(fields: Fields, family: Family, max_position: int) -> DecoderConfig:
    num_heads, num_kv_heads, head_dim = _base_heads(fields, family)
    num_layers = fields.size("num_hidden_layers")
    partial = hybrid.PARTIAL_ROTARY if family.hybrid else None
    decoder = DecoderConfig(
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=one_rope(fields, head_dim, max_position, text_mrope=family.hybrid, partial=partial),
        qkv_bias=_bias(fields, family.qkv_bias),
        o_bias=_bias(fields, family.o_bias),
        mlp_bias=_bias(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
    )
    if not family.hybrid:
        return replace(decoder, sliding_window=one_window(fields, family, num_layers))
    hybrid.refuse_other_gates(fields)
    kinds = hybrid.layer_kinds(fields, num_layers)
    linear = hybrid.linear_attention(fields) if "linear_attention" in kinds else None
    return replace(
        decoder, gated_attention=True, unit_offset_norms=True, layer_kinds=kinds, linear=linear
    )


def _told(top: Fields, fields: Fields, key: str) -> tuple[int, ...]:
    """Token ids of the text part, or those of the whole where it has none."""
    return token_ids(fields, key) or token_ids(top, key)


def parse_eos(raw: Mapping[str, Any], source: str = "config.json") -> tuple[int, ...]:
    """The `eos_token_id` of a config.json or generation_config.json: none, one or several ids."""
    return token_ids(Fields(raw, source), "eos_token_id")


def with_eos(config: ModelConfig, ids: Iterable[int]) -> ModelConfig:
    """The same model, ending at `ids` (duplicates dropped, order kept)."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


# Families


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture, as transformers 5.14 builds it. A bias is a constant or the key
    that decides."""

    model_type: str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    window: Literal[
        "none", "all", "late"
    ]  # late: from layer max_window_layers on, if use_sliding_window
    head_dim: int | None = None  # where the key is missing; None: hidden_size / num_attention_heads
    hybrid: bool = False  # gated attention and gated delta nets, norms around 0
    nested: str = ""  # the key under which the text part stands


FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", "attention_bias", "attention_bias", "mlp_bias", False, "none"
    ),
    "MistralForCausalLM": Family("mistral", False, False, False, False, "all"),
    "Qwen2ForCausalLM": Family("qwen2", True, False, False, False, "late"),
    "Qwen3ForCausalLM": Family(
        "qwen3", "attention_bias", "attention_bias", False, True, "late", head_dim=128
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        "attention_bias",
        "attention_bias",
        False,
        True,
        "none",
        head_dim=256,
        hybrid=True,
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        "qwen3_5",
        "attention_bias",
        "attention_bias",
        False,
        True,
        "none",
        256,
        hybrid=True,
        nested="text_config",
    ),
}
BY_MODEL_TYPE = {family.model_type: name for name, family in FAMILIES.items()}


def _architecture(fields: Fields) -> str:
    """The key of FAMILIES; transformers goes by model_type, so the two names must agree."""
    model_type = fields.text("model_type")
    architectures = fields.get("architectures") or [BY_MODEL_TYPE.get(model_type or "", model_type)]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise fields.wrong("architectures", "a list with the name of one class")
    name = architectures[0]
    known = model_type is None or model_type in BY_MODEL_TYPE
    if name not in FAMILIES or len(architectures) > 1 or not known:
        names = [*map(str, architectures), *([] if known else [f"with model_type {model_type!r}"])]
        raise UnsupportedModel(
            f"{fields.source}: architecture {', '.join(names)} is not one that this version knows.",
            f"Supported base models: {', '.join(FAMILIES)}.",
        )
    if model_type is not None and model_type != FAMILIES[name].model_type:
        raise CheckpointError(
            f"{fields.source} contradicts itself: architectures says {name}, model_type says"
            f" {model_type!r}.",
            f"For {name}, model_type is {FAMILIES[name].model_type!r}.",
        )
    return name


def _base_heads(fields: Fields, family: Family) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim."""
    num_heads = fields.size("num_attention_heads")
    # Only Llama's first configurations lack the key: they are older than grouped heads.
    lacks_kv_heads = "num_key_value_heads" not in fields.raw and family.model_type != "llama"
    num_kv_heads = fields.size("num_key_value_heads", None if lacks_kv_heads else num_heads)
    head_dim = fields.get("head_dim") or family.head_dim
    if head_dim is None:
        check_divides(
            fields, "num_attention_heads", num_heads, "hidden_size", fields.size("hidden_size")
        )
        head_dim = fields.size("hidden_size") // num_heads
    check_divides(fields, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, even_head_dim(fields, fields.size("head_dim", head_dim))


def check_divides(fields: Fields, part: str, count: int, whole: str, size: int) -> None:
    if size % count:
        raise CheckpointError(
            f"{fields.source}: {whole} {size} is not a multiple of {part} {count}."
        )


def even_head_dim(fields: Fields, head_dim: int) -> int:
    if head_dim % 2:
        raise CheckpointError(
            f"{fields.source}: head_dim is {head_dim}; rotary embeddings need an even one."
        )
    return head_dim


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def refuse_other_activations(fields: Fields) -> None:
    activation = fields.text("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(
            f"{fields.source}: hidden_act {activation!r}; this version knows silu only."
        )


def one_window(fields: Fields, family: Family, num_layers: int) -> int | None:
    """The window of all layers, or None; layers that differ are refused."""
    window = _window_size(fields, family)
    kinds = set(layer_types(fields, family, num_layers, window))
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise UnsupportedModel(
            f"{fields.source}: layers of different or unknown kinds ({', '.join(sorted(kinds))}),"
            " from layer_types or max_window_layers; this version needs one kind of attention in"
            " all layers."
        )
    slides = kinds == {"sliding_attention"}
    if slides != (window is not None) and (slides or family.window == "all"):
        raise CheckpointError(
            f"{fields.source} contradicts itself: layer_types says {kinds.pop()}, "
            f"but the sliding window in force is {window}."
        )
    return window if slides else None


def _window_size(fields: Fields, family: Family) -> int | None:
    if family.window == "none" or (
        family.window == "late" and not fields.flag("use_sliding_window", False)
    ):
        return None
    if "sliding_window" in fields.raw and fields.get("sliding_window") is None:
        return None
    return fields.size("sliding_window", 4096)  # transformers' default for Mistral, Qwen2 and Qwen3


def layer_types(fields: Fields, family: Family, num_layers: int, window: int | None) -> list[str]:
    named = fields.get("layer_types")
    if named is not None:
        if (
            not isinstance(named, list)
            or not all(isinstance(kind, str) for kind in named)
            or len(named) < num_layers
        ):
            raise fields.wrong("layer_types", f"a list of {num_layers} names")
        return named[:num_layers]
    first = 0 if family.window == "all" else fields.raw.get("max_window_layers", 28)
    if not is_int(first) or first < 0:
        raise fields.wrong("max_window_layers", "a number of layers")
    return [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(num_layers)
    ]
