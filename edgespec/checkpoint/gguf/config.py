"""A config.json in Hugging Face's words of a GGUF file's metadata, by the row of its family.

Knows the keys that all architectures share. A key of the architecture's own that nothing here reads
is refused by name: it may change what the model computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.checkpoint.gguf.header import Header, StoredBlocks
from edgespec.checkpoint.source import some_of
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import FAMILIES
from edgespec.families.base import GgufForm
from edgespec.methods import METHODS

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
D2T = "d2t"
D2T_KEY = "d2t"  # in config.json: how a draft's table is to be read, where that is known
MAX_LISTED = 2**12
_IDS = ("bos_token_id", "eos_token_id", "mask_token_id")
LLAMA3 = "rope_freqs.weight"  # what the frequencies are divided by
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_NEXTN = "nextn_predict_layers"  # layers of a prediction head, counted as blocks
_MAX_FACTORS = 2**13

_LENGTH = "max_position_embeddings"
# Key of metadata behind the architecture's name -> key of config.json
_KEYS = {
    "context_length": _LENGTH,
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_AT_TOP = ("architectures", "model_type", "tie_word_embeddings", "quantization_config")
_SCALING = "rope.scaling."
_KIND = f"{_SCALING}type"
_SCALED = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")
_ELSEWHERE = (
    *("attention.value_length", _NEXTN, "rope.dimension_count", _KIND),
    *(f"{_SCALING}{key}" for key in _SCALED),
)
_IGNORED = ("vocab_size", f"{_SCALING}finetuned")  # the embedding's rows are the vocabulary
# Keys that say nothing where they have this value
_IDLE = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


def form_of(header: Header) -> tuple[str, GgufForm]:
    """The architecture in Hugging Face's words, or the method of a draft, and how the converter
    writes it. Raises UnsupportedModel for one that is in neither table."""
    name = header.metadata.get("general.architecture")
    drafts = ((key, row.format.gguf) for key, row in METHODS.items() if row.format is not None)
    both = (*((hf, row.gguf) for hf, row in FAMILIES.items()), *drafts)
    rows = [(hf, form) for hf, form in both if form is not None]
    for hf, form in rows:
        if form.architecture == name:
            return hf, form
    if name == "clip":
        raise UnsupportedModel(
            f"{header.files[0]} is the image encoder of a model.",
            "Give the model's own file; the encoder is read where it stands beside that.",
        )
    raise UnsupportedModel(
        f"{header.files[0]}: general.architecture is {name!r:.80}, which this version does not"
        " read.",
        f"It reads {', '.join(form.architecture for _, form in rows)}.",
    )


def config_of(header: Header) -> dict[str, Any]:
    """The config.json. Raises CheckpointError for values that are no numbers and for a missing
    embedding, UnsupportedModel for architectures and keys that this version does not know."""
    architecture, form = form_of(header)
    own = _own_keys(header, form)
    names = _KEYS | dict(form.keys)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "rope_theta": 10000.0,
    }
    config |= {name: own[key] for key, name in names.items() if key in own and name}
    config["num_hidden_layers"] = config.get("num_hidden_layers", 0) - own.get(_NEXTN, 0)
    for key in _IDS:
        if (value := header.metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = value
    config |= _base(header, architecture) if architecture in FAMILIES else _draft(header)
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 0)
    if "head_dim" not in config and heads and hidden % heads == 0:
        config["head_dim"] = hidden // heads
    _check_values(header, own, config)
    config |= _rope(header, own, config)
    config |= form.more(config)
    types = Counter(t.type.name for t in header.tensors.values() if not t.type.dtype)
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": dict(types)}
    return in_sections(config, architecture)


def in_sections(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The keys of a family's text part in their section, where they have one."""
    family = FAMILIES.get(architecture)
    if family is None or not family.text_key:
        return config
    text = {key: value for key, value in config.items() if key not in _AT_TOP}
    return {key: config[key] for key in _AT_TOP if key in config} | {family.text_key: text}


def in_words_of(form: GgufForm, message: str) -> str:
    """A message about keys of config.json, with those of the metadata that they were made of."""
    names = {name: key for key, name in (_KEYS | dict(form.keys)).items() if name}
    names["rope_scaling"] = _SCALING.rstrip(".")
    known = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    return known.sub(lambda found: f"{form.architecture}.{names[found[1]]}", message)


def _base(header: Header, architecture: str) -> dict[str, Any]:
    """The keys of a model that stands for itself."""
    return {
        "model_type": FAMILIES[architecture].model_type,
        "tie_word_embeddings": HEAD not in header.tensors,
        "vocab_size": _tensor(header, EMBEDDING).shape[0],
    }


def _draft(header: Header) -> dict[str, Any]:
    """The keys of a draft, which may share the embedding and the head of its base."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if EMBEDDING not in header.tensors and not isinstance(tokens, list):
        raise CheckpointError(
            f"{header.files[0]} has neither {EMBEDDING} nor tokenizer.ggml.tokens, which tell the"
            " vocabulary.",
            "Convert the draft again, with the directory of its base.",
        )
    table = header.tensors.get(EMBEDDING)
    vocab = len(tokens) if table is None and tokens else _tensor(header, EMBEDDING).shape[0]
    head = header.tensors.get(HEAD)
    return {
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "draft_vocab_size": vocab if head is None else head.shape[0],
        **({D2T_KEY: "ids"} if D2T in header.tensors else {}),
    }


def _own_keys(header: Header, form: GgufForm) -> dict[str, Any]:
    """The values of the architecture's own keys, without its name."""
    file, prefix = header.files[0], f"{form.architecture}."
    known = {*_KEYS, *form.keys, *_ELSEWHERE}
    own, unknown = {}, []
    for key, value in header.metadata.items():
        bare = key.removeprefix(prefix)
        one = not isinstance(value, np.ndarray)
        idle = one and bare in _IDLE and bare not in known and value == _IDLE[bare]
        if not key.startswith(prefix) or bare in _IGNORED or idle or form.keys.get(bare) == "":
            continue
        if bare not in known:
            unknown.append(key)
        else:
            read = plain if bare in form.lists else number
            own[bare] = value if bare == _KIND else read(f"{file}: {key}", value)
    if unknown:
        raise UnsupportedModel(
            f"{file} has {some_of(unknown)}, which this version does not know of this"
            " architecture.",
            "Give the Hugging Face checkpoint that it was made from.",
        )
    return own


def number(where: str, value: Any) -> Any:
    """A finite number; of an array of layers the one number that it holds beside zeros."""
    one = value
    if isinstance(value, np.ndarray):
        others = np.unique(value[value != 0])
        one = others[0].item() if len(others) == 1 else None
    if type(one) in (int, float) and math.isfinite(one):
        return one
    shown = f"{list(value[:8])} ..." if isinstance(value, np.ndarray | list) else repr(value)
    raise CheckpointError(
        f"{where} is {shown:.80}, not one finite number.",
        "Download it again; models whose layers differ in it are not supported.",
    )


def plain(where: str, value: Any) -> Any:
    """A flag, or a list of whole numbers or flags."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and len(value) <= MAX_LISTED:
        return value.tolist()
    if type(value) is bool:
        return value
    raise CheckpointError(
        f"{where} is {value!r:.80}, not a flag or a list of whole numbers.", "Download it again."
    )


def _tensor(header: Header, name: str) -> StoredBlocks:
    if name not in header.tensors:
        raise CheckpointError(f"{header.files[0]} has no tensor {name!r}.", "Download it again.")
    return header.tensors[name]


def _check_values(header: Header, own: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    width = own.get("attention.value_length", config.get("head_dim"))
    if width != config.get("head_dim"):
        raise UnsupportedModel(
            f"{header.files[0]}: attention.value_length {width} is not attention.key_length"
            f" {config.get('head_dim')}; this version needs them equal."
        )


# Rotary embeddings


def _rope(header: Header, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the rotary embedding, beside its base."""
    keys: dict[str, Any] = {}
    head_dim, rotary = config.get("head_dim"), own.get("rope.dimension_count")
    if rotary is not None and head_dim and not 0 < rotary <= head_dim:
        raise CheckpointError(
            f"{header.files[0]}: rope.dimension_count is {rotary}, and a head has {head_dim}"
            " elements.",
            "Download it again.",
        )
    if rotary is not None and head_dim and rotary != head_dim:
        part = rotary / head_dim
        whole = int(head_dim * part) == rotary  # which rounding may miss
        keys["partial_rotary_factor"] = part if whole else (rotary + 0.5) / head_dim
    scaling = _scaling(header, own)
    if scaling is not None:
        original = own.get(f"{_SCALING}original_context_length")
        keys["rope_scaling"] = scaling
        keys["original_max_position_embeddings"] = original or config.get(_LENGTH)
    return keys


def _scaling(header: Header, own: Mapping[str, Any]) -> dict[str, Any] | None:
    factor, attention = own.get(f"{_SCALING}factor"), own.get(f"{_SCALING}attn_factor", 1.0)
    kind = own.get(_KIND, "none" if factor is None else "linear")
    divided = {SHORT: LLAMA3, LONG: LLAMA3} if LLAMA3 in header.tensors else {}
    if divided or LONG in header.tensors:
        short, long = (_factors(header, divided.get(name, name)) for name in (SHORT, LONG))
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": 1.0,
            "attention_factor": attention,
        }
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{header.files[0]}: {_KIND} is {kind!r:.80}; this version reads none, linear and yarn."
        )
    grown = 1 + 0.1 * math.log(factor) if factor and factor > 1 else 1.0
    betas = {beta: own.get(f"{_SCALING}yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * grown,
        **{beta: value for beta, value in betas.items() if value},
    }


def _factors(header: Header, name: str) -> list[float]:
    """A tensor of numbers, one for each pair of rotated elements."""
    tensor = _tensor(header, name)
    if tensor.type.name != "f32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise CheckpointError(
            f"{tensor.file}: tensor {name!r} is {tensor.type.name} {list(tensor.shape)}, not a"
            " number for each rotated pair.",
            "Download it again.",
        )
    numbers = np.fromfile(tensor.file, "<f4", tensor.shape[0], offset=tensor.offset)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise CheckpointError(
            f"{tensor.file}: tensor {name!r} has numbers that are not positive and finite.",
            "Download it again.",
        )
    return [float(number) for number in numbers]
