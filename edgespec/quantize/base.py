"""The properties of a base that quantization needs: number of layers, tensor names, tied lm_head.

Knows checkpoints and their names. Knows no torch and no formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import PREDICTION_HEADS, STACK, beside_roots, stored_name, text_stack
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel, command
from edgespec.families import parse_model_config
from edgespec.methods import METHODS

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class Base:
    """A base model that can be quantized. Own names are those of a text model: model.layers.0."""

    checkpoint: Checkpoint
    num_layers: int
    max_position: int  # tokens
    tied_head: bool
    stack: str = STACK  # prefix of the decoder's tensors on disk, without its dot
    embedding_scale: float = 1.0  # multiplies the embedding's rows, rounded to the weights' dtype

    def stored(self, name: str) -> str:
        """Returns the name on disk of a module or tensor with the own name `name`."""
        return stored_name(name, self.stack)

    def source_of(self, module: str) -> str:
        """Returns the module on disk that holds the weight of a Linear.

        The source of a tied lm_head is the embedding.
        """
        return self.stored(EMBEDDING) if module == HEAD and self.tied_head else module


def base_of(checkpoint: Checkpoint) -> Base:
    """Returns the base in `checkpoint`.

    Raises UnsupportedModel for a draft or a quantized checkpoint, and CheckpointError for a broken
    one.
    """
    config = base_config(checkpoint)
    if not config.tied_head and f"{HEAD}.weight" not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.place} has no {HEAD}.weight, and its config.json does not tie it."
        )
    return Base(
        checkpoint,
        config.decoder.num_layers,
        config.max_position,
        config.tied_head,
        text_stack(checkpoint),
        config.decoder.embedding_scale,
    )


def base_config(checkpoint: Checkpoint) -> ModelConfig:
    """Returns the configuration of a base that is not quantized yet; prediction heads are ignored.

    Raises UnsupportedModel for a draft or a quantized checkpoint.
    """
    refuse_quantized(checkpoint)
    if any(name.startswith(PREDICTION_HEADS) for name in checkpoint.tensors):
        return parse_model_config(checkpoint.config, checkpoint.config_source)
    config = detect(checkpoint)
    if not isinstance(config, ModelConfig):
        raise UnsupportedModel(
            f"{checkpoint.place} is {METHODS[config.method].draft_title}, not a base model.",
            f"{command('quantize draft', base_model_dir='BASE')} ... quantizes drafts.",
        )
    return config


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModel if the checkpoint is quantized already."""
    quantization = read_quantization(checkpoint)
    if quantization is not None:
        raise UnsupportedModel(
            f"{quantization.source} says that {checkpoint.place} is quantized already"
            f" ({quantization.layout}).",
            "Give the original float16 or bfloat16 checkpoint: a second quantization adds its own"
            " error.",
        )


def unquantized_globs(checkpoint: Checkpoint) -> list[str]:
    """Returns globs of the tensors outside the decoder, for the settings' list of exclusions."""
    return [
        f"{root.removesuffix('.')}*"
        for root in beside_roots()
        if any(n.startswith(root) for n in checkpoint.tensors)
    ]
