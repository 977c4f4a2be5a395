"""What quantising needs to know of a base: how many layers, where its tensors stand, whether its head is tied.

Knows the families that can be quantised before this version can export them. Knows no torch and no formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import BESIDE, STACK, stored_name, text_stack
from edgespec.config import ModelConfig, parse_model_config
from edgespec.errors import CheckpointError, UnsupportedModel

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
# model_type -> what we call it, and what of a layer is quantised beside *_proj. Its export comes later.
NOT_EXPORTED = {"qwen3_5": "Qwen3.5", "qwen3_5_text": "Qwen3.5"}


@dataclass(frozen=True, slots=True)
class Base:
    """`stack` is where the decoder stands on disk; our own names are those of a text model: model.layers.0 ..."""

    checkpoint: Checkpoint
    num_layers: int
    max_position: int
    tied_head: bool
    stack: str = STACK
    not_exported: str = ""  # the family's name, where this version cannot export it yet

    def stored(self, name: str) -> str:
        """The name on disk of one of ours."""
        return stored_name(name, self.stack)

    def source_of(self, module: str) -> str:
        """The module on disk that a Linear's weight is made from: a tied head's is the embedding."""
        return self.stored(EMBEDDING) if module == HEAD and self.tied_head else module


def base_of(checkpoint: Checkpoint) -> Base:
    """Raises UnsupportedModel for what is no base that can be quantised, CheckpointError for a broken one."""
    refuse_quantised(checkpoint)
    family = checkpoint.config.get("model_type")
    if family in NOT_EXPORTED:
        return _not_exported(checkpoint, NOT_EXPORTED[family])
    config = base_config(checkpoint)
    return Base(checkpoint, config.decoder.num_layers, config.max_position, config.tied_head)


def base_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a base that is not quantised yet; its `mtp.*` heads do not matter. Raises if it is none."""
    refuse_quantised(checkpoint)
    if any(name.startswith("mtp.") for name in checkpoint.tensors):
        return parse_model_config(checkpoint.config, str(checkpoint.path / "config.json"))
    found = detect(checkpoint)
    if not isinstance(found, ModelConfig):
        raise UnsupportedModel(
            f"{checkpoint.path} is a draft, not a base model.",
            "edgespec quantize draft --base-model-dir BASE --draft-model-dir DRAFT ... quantises drafts.",
        )
    return found


def refuse_quantised(checkpoint: Checkpoint) -> None:
    found = read_quantization(checkpoint)
    if found is not None:
        raise UnsupportedModel(
            f"{found.source} says that {checkpoint.path} is quantised already ({found.layout}).",
            "Give the original float16 or bfloat16 checkpoint: quantising twice loses twice.",
        )


def _not_exported(checkpoint: Checkpoint, family: str) -> Base:
    text = checkpoint.config.get("text_config") or checkpoint.config
    if not isinstance(text, dict):
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: 'text_config' is no object.", "Download it again.")
    tied = f"{HEAD}.weight" not in checkpoint.tensors
    if tied and not any(part.get("tie_word_embeddings") for part in (text, checkpoint.config)):
        raise CheckpointError(f"{checkpoint.path} has no {HEAD}.weight, and its config.json ties none.")
    num_layers = _count(checkpoint, text, "num_hidden_layers")
    return Base(
        checkpoint,
        num_layers,
        _count(checkpoint, text, "max_position_embeddings"),
        tied,
        text_stack(checkpoint),
        family,
    )


def _count(checkpoint: Checkpoint, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: '{key}' is {value!r}, not a whole number above 0.")
    return value


def left_alone(checkpoint: Checkpoint) -> list[str]:
    """Globs of what stands beside the decoder, as settings name what is not quantised."""
    return [f"{root.removesuffix('.')}*" for root in BESIDE if any(n.startswith(root) for n in checkpoint.tensors)]
