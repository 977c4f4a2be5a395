"""The head for multi-token prediction (MTP) that a base's checkpoint brings along: is it there, and
is it whole.

Knows Qwen3.5's names, which are `mtp.*` at the root, and those of other families.
Knows no graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import tensor_names
from edgespec.checkpoint.source import some_of
from edgespec.config import AttentionSpec, DecoderConfig, ModelConfig, layer_tensors
from edgespec.errors import CheckpointError, UnsupportedModel

ROOT = "mtp."
LAYER = "mtp.layers.0"
_NEXTN = re.compile(r"model\.layers\.\d{1,6}\.eh_proj\.")
_WITHOUT = (
    "Use a draft with a checkpoint of its own for this base; without `mtp` the head is left out."
)


def mtp_head(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the head's tensors, as on disk; a quantized Linear as the weight that it
    stands for.

    Raises UnsupportedModel where there is no head, where the head that the config declares was
    lost, and for heads of other forms; CheckpointError where a part of it is missing.
    """
    refuse_other_forms(checkpoint)
    stored = [name for name in checkpoint.tensors if name.startswith(ROOT)]
    if not config.mtp_layers:
        raise _no_head(checkpoint, stored)
    if not stored:
        raise UnsupportedModel(
            f"{checkpoint.place}: config.json declares an MTP head (mtp_num_hidden_layers"
            f" {config.mtp_layers}), but there are no mtp.* tensors.",
            "transformers leaves mtp.* out when it saves a model. Use the original download, or do"
            " without the head, which is without `mtp`.",
        )
    if config.mtp_layers > 1:
        raise UnsupportedModel(
            f"{checkpoint.place}: an MTP head of {config.mtp_layers} layers; this version takes one"
            " layer, used again for every step.",
            _WITHOUT,
        )
    _refuse_own_embedding(checkpoint, stored)
    expected = mtp_tensors(config)
    _check_whole(checkpoint, expected, stored)
    return expected


def layer_config(config: ModelConfig) -> DecoderConfig:
    """The head's one layer: full attention in the base's own form, whatever the base's layers
    are."""
    layers = [s for s in config.decoder.layers if isinstance(s.mixer, AttentionSpec)]
    return replace(config.decoder, layers=(layers[0],))


def mtp_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a head with one layer."""
    hidden = config.decoder.hidden_size
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    tensors: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
    tensors |= layer_tensors(layer_config(config).layers[0], hidden, LAYER)
    return tensors | {f"{name}.weight": (hidden,) for name in norms}


def _no_head(checkpoint: Checkpoint, stored: list[str]) -> UnsupportedModel:
    if stored:
        return UnsupportedModel(
            f"{checkpoint.place} has {len(stored)} mtp.* tensors, but its config.json declares no"
            " MTP head.",
            "Use the config.json of the original download: mtp_num_hidden_layers was lost.",
        )
    return UnsupportedModel(
        f"{checkpoint.place} has no MTP head: its config.json declares none.", _WITHOUT
    )


def refuse_other_forms(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModel for DeepSeek and GLM, whose head is a layer behind the last, and for
    speculators, whose head is a draft of its own."""
    nextn = next((name for name in checkpoint.tensors if _NEXTN.match(name)), None)
    if nextn is not None or checkpoint.config.get("num_nextn_predict_layers"):
        raise UnsupportedModel(
            f"{checkpoint.place}: an MTP head as DeepSeek and GLM name it "
            f"({nextn or 'num_nextn_predict_layers'}); this version knows Qwen3.5's form.",
            "It would need graphs of that family's layers (enorm, hnorm, eh_proj, shared_head)."
            " Take a Qwen3.5 base.",
        )


def _refuse_own_embedding(checkpoint: Checkpoint, stored: list[str]) -> None:
    text = checkpoint.config.get("text_config")
    places = [checkpoint.config, text] if isinstance(text, Mapping) else [checkpoint.config]
    own = [name for name in stored if re.match(r"mtp\.(embed_tokens|lm_head)\.", name)]
    if own or any(place.get("mtp_use_dedicated_embeddings") for place in places):
        raise UnsupportedModel(
            f"{checkpoint.place}: an MTP head with an embedding of its own"
            f" ({own[0] if own else 'mtp_use_dedicated_embeddings'}); this version shares the"
            " base's.",
            _WITHOUT,
        )


def _check_whole(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], stored: list[str]
) -> None:
    parts = {name: _parts_of(checkpoint, name) for name in expected}
    missing = [name for name, parts_of in parts.items() if not parts_of]
    known = {part for parts_of in parts.values() for part in parts_of}
    unknown = [name for name in stored if name not in known]
    if unknown:
        raise UnsupportedModel(
            f"{checkpoint.place}: the MTP head has parts that a dense one has not:"
            f" {some_of(unknown)}.",
            _WITHOUT,
        )
    if missing:
        raise CheckpointError(
            f"{checkpoint.place}: the MTP head lacks {some_of(missing)}.",
            "Download the checkpoint again, all shards of it, or do without the head, which is"
            " without `mtp`.",
        )


def _parts_of(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    """What stands for the tensor on disk: itself, or the parts of a quantized Linear."""
    if not name.endswith(".weight"):
        return (name,) if name in checkpoint.tensors else ()
    return tensor_names(checkpoint, name.removesuffix(".weight"))
