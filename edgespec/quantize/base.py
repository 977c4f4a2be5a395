"""What quantising needs to know of a base: how many layers, where its tensors stand, whether its
head is tied.

Knows no torch and no formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import BESIDE, PREDICTION_HEADS, STACK, stored_name, text_stack
from edgespec.config import ModelConfig, parse_model_config
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods import METHODS

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class Base:
    """`stack` is where the decoder stands on disk; our own names are those of a text model:
    model.layers.0 ..."""

    checkpoint: Checkpoint
    num_layers: int
    max_position: int
    tied_head: bool
    stack: str = STACK

    def stored(self, name: str) -> str:
        """The name on disk of one of ours."""
        return stored_name(name, self.stack)

    def source_of(self, module: str) -> str:
        """The module on disk that a Linear's weight is made from: a tied head's is the
        embedding."""
        return self.stored(EMBEDDING) if module == HEAD and self.tied_head else module


def base_of(checkpoint: Checkpoint) -> Base:
    """Raises UnsupportedModel for what is no base that can be quantised, CheckpointError for a
    broken one."""
    config = base_config(checkpoint)
    if not config.tied_head and f"{HEAD}.weight" not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} has no {HEAD}.weight, and its config.json ties none."
        )
    layers, positions = config.decoder.num_layers, config.max_position
    return Base(checkpoint, layers, positions, config.tied_head, text_stack(checkpoint))


def base_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a base that is not quantized yet; prediction heads do not matter.

    Raises UnsupportedModel if it is none.
    """
    refuse_quantised(checkpoint)
    if any(name.startswith(PREDICTION_HEADS) for name in checkpoint.tensors):
        return parse_model_config(checkpoint.config, str(checkpoint.path / "config.json"))
    found = detect(checkpoint)
    if not isinstance(found, ModelConfig):
        raise UnsupportedModel(
            f"{checkpoint.path} is {METHODS[found.method].draft_title}, not a base model.",
            "edgespec quantize draft --base-model-dir BASE --draft-model-dir DRAFT ... quantizes"
            " drafts.",
        )
    return found


def refuse_quantised(checkpoint: Checkpoint) -> None:
    found = read_quantization(checkpoint)
    if found is not None:
        raise UnsupportedModel(
            f"{found.source} says that {checkpoint.path} is quantised already ({found.layout}).",
            "Give the original float16 or bfloat16 checkpoint: quantising twice loses twice.",
        )


def left_alone(checkpoint: Checkpoint) -> list[str]:
    """Globs of what stands beside the decoder, as settings name what is not quantised."""
    return [
        f"{root.removesuffix('.')}*"
        for root in BESIDE
        if any(n.startswith(root) for n in checkpoint.tensors)
    ]
