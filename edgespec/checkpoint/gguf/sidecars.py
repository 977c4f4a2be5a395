"""What stands beside the weights of a model, made of a GGUF file's metadata: tokenizer.json, its
configuration with the chat template, and generation_config.json.

Knows BPE of the pre-tokenizers in `_SPLITS`; every other tokenizer is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from edgespec.checkpoint.gguf.header import Metadata
from edgespec.errors import CheckpointError, UnsupportedModel

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# tokenizer.ggml.pre -> the pre-tokenizers of a tokenizer.json
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_ENDS = ("eos", "eot", "eom")


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. Raises UnsupportedModel for a tokenizer of another
    kind, CheckpointError for one whose parts do not fit."""
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2" or pre not in _SPLITS:
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {model!r:.40} and tokenizer.ggml.pre {pre!r:.40}, which this"
            " version does not read.",
            f"It reads gpt2 with {', '.join(_SPLITS)}.",
        )
    tokens, merges = (_list(metadata, key, str) for key in ("tokens", "merges"))
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens) or not all(" " in merge for merge in merges):
        raise CheckpointError(
            "tokenizer.ggml has tokens, types and merges that do not fit.", "Download it again."
        )
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[str(pre)]},
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    ids = {kind: _id(metadata, kind) for kind in ("bos", "eos")}
    config: dict[str, Any] = {
        f"{kind}_token": tokens[i] for kind, i in ids.items() if i is not None and i < len(tokens)
    }
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """The ids that end an answer."""
    ids = (_id(metadata, end) for end in _ENDS)
    return {"eos_token_id": list(dict.fromkeys(i for i in ids if i is not None))}


def _id(metadata: Metadata, kind: str) -> int | None:
    """A token's id, or None."""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{key} is {value!r:.80}, no token id.", "Download it again.")
    return value


def _list(metadata: Metadata, key: str, kind: type) -> list[Any]:
    """An array of metadata as a list of values of one type."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise CheckpointError(
            f"tokenizer.ggml.{key} is missing, or no array of {kind.__name__}.",
            "Download it again.",
        )
    return value
