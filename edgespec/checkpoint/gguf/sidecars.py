"""What stands beside the weights of a model, made of a GGUF file's metadata: tokenizer.json, its
configuration with the chat templates, and generation_config.json.

Knows keys. tokenizer.py knows the kinds of tokenizers.
"""

from __future__ import annotations

import json
from typing import Any

from edgespec.checkpoint.gguf.header import Metadata
from edgespec.checkpoint.gguf.tokenizer import (
    CONTROL,
    Vocabulary,
    refusal,
    tokenizer_json,
    vocabulary_of,
)
from edgespec.errors import CheckpointError

_TEMPLATE = "tokenizer.chat_template"
# Control tokens that end an answer by their name, whatever role the file gives them
_ENDS = (
    *(
        "</s>",
        "<eos>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|im_end|>",
    ),
    *("<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>", "[EOT]"),
)
# Behind general.sampling. -> in generation_config.json
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def tokenizer_files(metadata: Metadata, beside: bytes | None = None) -> dict[str, bytes]:
    """tokenizer.json, or the one that was found `beside` the file, and tokenizer_config.json.

    Raises UnsupportedModel for a tokenizer of another kind, CheckpointError for one whose parts do
    not fit.
    """
    if beside is None and (error := refusal(metadata)) is not None:
        raise error
    vocabulary = vocabulary_of(metadata)
    if beside is None:
        tokenizer = tokenizer_json(metadata, vocabulary)
        beside = json.dumps(tokenizer, ensure_ascii=False).encode()
    return {
        "tokenizer.json": beside,
        "tokenizer_config.json": _text(_config(metadata, vocabulary)),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """The ids that end an answer, and how the author would have it sampled."""
    vocabulary = vocabulary_of(metadata)
    ends = [vocabulary.ids[kind] for kind in ("eos", "eot", "eom") if kind in vocabulary.ids]
    named = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ends += [i for i, (token, kind) in enumerate(named) if kind == CONTROL and token in _ENDS]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None and type(value) not in (int, float):
            raise CheckpointError(
                f"general.sampling.{key} is {value!r:.80}, no number.", "Download it again."
            )
        config |= {} if value is None else {name: value}
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config


def _config(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        f"{kind}_token": vocabulary.tokens[vocabulary.ids[kind]]
        for kind in ("bos", "eos", "unk", "pad")
        if kind in vocabulary.ids
    }
    config |= {"add_bos_token": vocabulary.add_bos, "add_eos_token": vocabulary.add_eos}
    main = metadata.get(_TEMPLATE)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    templates = ({"default": main} if main else {}) | named
    if named:
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    elif main:
        config["chat_template"] = main
    return config


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()
