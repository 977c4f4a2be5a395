"""The image encoder of a vision-language model, which stands in a GGUF file of its own, mmproj: its
keys as those of a vision_config, its tensors under Hugging Face's names.

A family's row says what is its own (`GgufEncoder`). Weights are read as numbers, quantized ones as
well; tensors that the converter took apart are put together where they are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.gguf.config import number, plain
from edgespec.checkpoint.gguf.header import Header, Metadata, StoredBlocks, read_model
from edgespec.checkpoint.gguf.types import numbers_of, weight_of
from edgespec.checkpoint.source import DOWNLOAD_AGAIN, Encoding, TensorInfo, some_of
from edgespec.config import VisionConfig
from edgespec.config.fields import Fields
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families.base import GgufEncoder
from edgespec.families.vision import NORM_EPS
from edgespec.quantization.quantized_weight import dequantize

logger = logging.getLogger(__name__)

NAMED = "mmproj"  # is part of such a file's name
VISION = "vision_config"  # in config.json
# Key of config.json -> the token, by the name that it has in Qwen's vocabularies
_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PREFIX, OUT = "clip.vision.", "model.visual."
# The type of the weights, the best first: Hugging Face's are bfloat16
_ORDER = ("bf16", "f32", "f16")
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "depth",
    "attention.head_count": "num_heads",
    "projection_dim": "out_hidden_size",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "window_size": "window_size",
}
_OF_IMAGES = {
    "image_mean": "image_mean",
    "image_std": "image_std",
    "image_min_pixels": "min_pixels",
    "image_max_pixels": "max_pixels",
}
_EPSILON = "attention.layer_norm_epsilon"
_OPTIONAL = ("spatial_merge_size", "window_size")
_IGNORED = (*_OF_IMAGES, _EPSILON, "image_size", "projector_type")
_POSITIONS = "v.position_embd.weight"
_PATCHES = "patch_embed.proj.weight"
# Stored module -> own name (checkpoint/vision.py), and which part of it, where it was taken apart
_TOP: dict[str, tuple[str, int | None]] = {
    "v.patch_embd.weight": (_PATCHES, 0),
    "v.patch_embd.weight.1": (_PATCHES, 1),
    "v.patch_embd.bias": ("patch_embed.proj.bias", None),
    _POSITIONS: ("pos_embed.weight", None),
}
_MODULES = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}
_BLOCK: dict[str, tuple[str, int | None]] = {
    "ln1": ("norm1", None),
    "ln2": ("norm2", None),
    "attn_qkv": ("attn.qkv", None),
    "attn_q": ("attn.qkv", 0),
    "attn_k": ("attn.qkv", 1),
    "attn_v": ("attn.qkv", 2),
    "attn_out": ("attn.proj", None),
}
_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_NAME = re.compile(r"(v\.\w+)\.(\d{1,4})\.(\w+)\.(weight|bias)")


def is_named(file: str) -> bool:
    """Whether a file is an image encoder, by its name."""
    return NAMED in file.lower() and file.lower().endswith(".gguf")


def best(files: list[str]) -> str:
    """Of the files of one encoder that with the best weights, by its name."""
    ends = [re.compile(rf"(?:^|[-._]){kind}(?=[-._]|$)", re.IGNORECASE) for kind in _ORDER]
    return min(files, key=lambda file: [*(not end.search(file) for end in ends), file])


def encoder_beside(header: Header, row: GgufEncoder | None) -> Header | None:
    """The encoder in the model's directory; None where there is none that can be read, which is
    told. Raises CheckpointError for a damaged one, and where several are for models of this
    size."""
    first = header.files[0]
    width = header.metadata.get(f"{header.metadata['general.architecture']}.embedding_length")
    files = [path for path in sorted(first.parent.iterdir()) if is_named(path.name)]
    of_this = {
        path.name: encoder
        for path in files
        if path != first
        and (encoder := read_model(path)).metadata.get(f"{PREFIX}projection_dim") == width
    }
    fitting = {
        n: e for n, e in of_this.items() if row is not None and projector(e) == row.projector
    }
    if not fitting:
        for name, encoder in of_this.items():
            _tell_unread(first, name, str(projector(encoder)))
        return None
    names = {re.sub(r"[-._](b?f\d+|q\d\w*)(?=[-._])", "", name.lower()) for name in fitting}
    if len(names) > 1:
        raise CheckpointError(
            f"{first.parent} has image encoders of several models: {some_of(fitting)}.",
            f"Leave that of {first.name} in this directory alone.",
        )
    return fitting[best(list(fitting))]


def projector(encoder: Header) -> Any:
    """What llama.cpp calls the kind of an encoder."""
    metadata = encoder.metadata
    return metadata.get("clip.projector_type", metadata.get(f"{PREFIX}projector_type"))


@cache  # once in a run
def _tell_unread(model: Path, encoder: str, kind: str) -> None:
    logger.warning(
        "%s: the text part alone runs: %s is an image encoder of the kind %s, which this version"
        " does not read with this architecture",
        *(model.name, encoder, kind),
    )


def vision_config(
    encoder: Header, row: GgufEncoder, parse: Callable[[Fields], VisionConfig]
) -> dict[str, Any]:
    """The section `vision_config` of a config.json, which the family can `parse`. Raises
    CheckpointError for missing keys and impossible values, UnsupportedModel for keys that this
    version does not know."""
    file, known = encoder.files[0], _KEYS | dict(row.keys)
    config: dict[str, Any] = {}
    unknown = []
    for key, value in encoder.metadata.items():
        bare = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or bare in _IGNORED:
            continue
        if bare not in known:
            unknown.append(key)
            continue
        read = plain if isinstance(value, np.ndarray) else number
        config[known[bare]] = read(f"{file}: {key}", value)
    epsilon = encoder.metadata.get(f"{PREFIX}{_EPSILON}", NORM_EPS)
    if epsilon != NORM_EPS:
        unknown.append(f"{PREFIX}{_EPSILON} {epsilon!r:.40}")
    if unknown:
        raise UnsupportedModel(
            f"{file} has {some_of(unknown)}, which this version does not know of this encoder.",
            "Give the Hugging Face checkpoint that it was made from, or take the file away: the"
            " text part runs alone.",
        )
    missing = [key for key, name in known.items() if name not in config and key not in _OPTIONAL]
    if missing:
        names = some_of(f"{PREFIX}{key}" for key in missing)
        raise CheckpointError(f"{file} has no {names}.", DOWNLOAD_AGAIN)
    if (positions := encoder.tensors.get(_POSITIONS)) is not None:
        config["num_position_embeddings"] = positions.shape[0]
    config |= row.more(config)
    try:
        parse(Fields(config, str(file)))
    except (CheckpointError, UnsupportedModel) as error:
        keys = {name: key for key, name in known.items()}
        words = re.compile(rf"\b({'|'.join(keys)})\b")
        what = words.sub(lambda found: f"{PREFIX}{keys[found[1]]}", error.what)
        raise type(error)(what, DOWNLOAD_AGAIN) from error
    return config


def image_tokens(metadata: Metadata) -> dict[str, int]:
    """The ids of the tokens around and inside an image, as far as the vocabulary names them."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    ids = {token: i for i, token in enumerate(tokens if isinstance(tokens, list) else [])}
    return {key: ids[token] for key, token in _TOKENS.items() if token in ids}


def processor_config(
    encoder: Header, row: GgufEncoder, vision: Mapping[str, Any]
) -> dict[str, Any]:
    """The preprocessor_config.json; how large images may be is the family's, where the file does
    not say it. Raises CheckpointError for values that no image can be prepared by."""
    from edgespec.images.processor import parse_processor

    least, most = row.pixels
    config = {
        "image_processor_type": row.processor,
        "patch_size": vision.get("patch_size"),
        "temporal_patch_size": 2,
        "merge_size": vision.get("spatial_merge_size", 2),
        "min_pixels": least,
        "max_pixels": most,
    }
    for key, name in _OF_IMAGES.items():
        value = encoder.metadata.get(f"{PREFIX}{key}")
        if isinstance(value, np.ndarray):  # the shortest decimals are the numbers of the original
            value = [float(str(one)) for one in value[:4]]
        config |= {} if value is None else {name: value}
    parse_processor(config, str(encoder.files[0]))
    return config


def encoder_tensors(
    encoder: Header, row: GgufEncoder, config: VisionConfig
) -> dict[str, TensorInfo]:
    """All tensors by name. Raises CheckpointError for names that no encoder of the family has, and
    for parts that do not make a whole."""
    found: dict[str, dict[int | None, StoredBlocks]] = {}
    unknown = []
    for stored in encoder.tensors.values():
        name, part = _own(stored.name, row, config)
        if name:
            found.setdefault(name, {})[part] = stored
        else:
            unknown.append(stored.name)
    if unknown:
        raise CheckpointError(
            f"{encoder.files[0]} has tensors that this version does not know of this encoder:"
            f" {some_of(unknown)}.",
            "Give the Hugging Face checkpoint that it was made from.",
        )
    return {f"{OUT}{name}": _info(f"{OUT}{name}", parts) for name, parts in found.items()}


def _own(name: str, row: GgufEncoder, config: VisionConfig) -> tuple[str, int | None]:
    """The own name of a tensor, and which part of it this is; "" for one that is not known."""
    if name in _TOP:
        return _TOP[name]
    module, _, end = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{end}", None
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in ("v.blk", row.inner_mergers):
        return "", None
    layer = int(match[2])
    if match[1] == row.inner_mergers:
        merger, bare = config.inner_mergers.get(layer), _MERGER.get(match[3])
        return (f"{merger}.{bare}.{end}", None) if merger and bare else ("", None)
    own, part = _BLOCK.get(match[3]) or (row.tensors.get(match[3], ""), None)
    return (f"blocks.{layer}.{own}.{end}" if own else ""), part


def _info(name: str, parts: Mapping[int | None, StoredBlocks]) -> TensorInfo:
    """A tensor of one or several stored ones, which are read as they lie, with what is between."""
    stored = [parts[key] for key in sorted(parts, key=lambda key: key or 0)]
    first = stored[0]
    if len(stored) > 1 or None not in parts:
        wanted = 2 if name.endswith(_PATCHES) else 3
        whole = set(parts) == set(range(wanted)) and len({one.shape for one in stored}) == 1
        if not whole or len({one.file for one in stored}) > 1:
            raise CheckpointError(
                f"{first.file}: {', '.join(one.name for one in stored)} are not the {wanted} parts"
                " of one tensor.",
                DOWNLOAD_AGAIN,
            )
    elif first.type.dtype:
        return TensorInfo(
            name, first.type.dtype, first.shape, first.file, first.offset, first.num_bytes
        )
    start = min(one.offset for one in stored)
    size = max(one.offset + one.num_bytes for one in stored) - start
    kinds = {one.type.dtype or "float32" for one in stored}
    dtype = kinds.pop() if len(kinds) == 1 else "float32"
    join: Callable[..., NDArray[Any]] = np.concatenate
    rows, *rest = first.shape
    shape = (rows * len(stored), *rest)
    if name.endswith(_PATCHES):  # a kernel for each of two pictures in time
        join, shape = _side_by_side, (rows, rest[0], len(stored), *rest[1:])
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def decode(raw: NDArray[np.uint8]) -> NDArray[Any]:
        data = raw.reshape(-1)
        arrays = [_numbers(one, data[one.offset - start :][: one.num_bytes]) for one in stored]
        return join([array.astype(numpy_type, copy=False) for array in arrays])

    num_bytes = int(np.prod(shape)) * numpy_type.itemsize
    encoding = Encoding(0, decode, span_bytes=size)
    return TensorInfo(name, dtype, shape, first.file, start, num_bytes, encoding)


def _side_by_side(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.stack(arrays, 2)


def _numbers(stored: StoredBlocks, data: NDArray[np.uint8]) -> NDArray[Any]:
    """The numbers of a stored tensor, from its bytes."""
    kind = stored.type
    data = np.ascontiguousarray(data)
    if kind.dtype:
        return data.view(np.dtype(getattr(ml_dtypes, kind.dtype, kind.dtype))).reshape(stored.shape)
    raw = data.reshape(-1, stored.row_bytes)
    numbers = (
        dequantize(weight_of(stored.name, kind, raw)) if kind.fields else numbers_of(kind, raw)
    )
    return numbers.reshape(stored.shape)
