"""What config.json and tensors of a new draft have in common: its sizes, which are those of the
base where a recipe does not say others. Knows no method."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.config.values import Shapes
from edgespec.errors import RequestError
from edgespec.training.keys import shown
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts

SIZES = ("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LAYER_KEYS = (*SIZES, "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling")


def architecture(recipe: TrainRecipe, more: Sequence[str]) -> dict[str, Any]:
    """The recipe's keys of the draft's architecture, of those of layers and `more`. Raises
    RequestError for another, with the nearest."""
    given: dict[str, Any] = recipe.section("architecture_config")
    known, section = (*LAYER_KEYS, *more), recipe.own_key("architecture_config")
    for key, value in given.items():
        where = f"{recipe.source}: {section}.{key}"
        if key not in known:
            raise RequestError(
                f"{where} is not a known key",
                f"The nearest is {difflib.get_close_matches(str(key)[:80], known, 1, 0)[0]}."
                " Sizes that are not given are those of the base.",
            )
        if key in SIZES and not (type(value) is int and value > 0):
            raise RequestError(f"{where} is {shown(value)}", "Write a positive whole number.")
    return {key: value for key, value in given.items() if value is not None}


def layer_keys(facts: BaseFacts, given: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The keys of the draft's layers, in Hugging Face's words."""
    base, decoder = facts.config, facts.config.decoder
    keys = {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": facts.raw.get("intermediate_size") or decoder.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": base.vocab_size,
        "rms_norm_eps": decoder.norm.eps,
        "rope_theta": decoder.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": base.max_position,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": [*base.eos_token_ids],
        "tie_word_embeddings": False,
        "torch_dtype": base.dtype,
    }
    return keys | mrope(facts, given) | {key: given[key] for key in LAYER_KEYS if key in given}


def mrope(facts: BaseFacts, given: Mapping[str, Any]) -> dict[str, Any]:
    """The base's axes of positions in images, where the draft turns as many pairs of a head."""
    rope = facts.config.decoder.rope
    head_dim = given.get("head_dim", facts.config.decoder.head_dim)
    if facts.config.vision is None or 2 * sum(rope.mrope_section) != head_dim:
        return {}
    scaling: dict[str, Any] = {"type": "mrope", "mrope_section": [*rope.mrope_section]}
    if rope.mrope_interleaved:
        scaling["mrope_interleaved"] = True
    return {"rope_scaling": scaling}


def layer_shapes(config: Mapping[str, Any], index: int, width: int) -> Shapes:
    """Name -> shape of the tensors that every kind of layer has, whose attention reads `width`."""
    hidden, inner, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"layers.{index}.{name}.weight": shape for name, shape in shapes.items()}
