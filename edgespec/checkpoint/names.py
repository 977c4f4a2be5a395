"""The tensors of a base: which there are, and under which names a checkpoint holds them.

Our own names are always those of a text model: model.layers.0, lm_head. On disk the decoder may
stand deeper, beside towers for other senses; the families' rows say where. Knows no graphs.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import ModelConfig, layer_tensors
from edgespec.families import FAMILIES

STACK = "model"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PREDICTION_HEADS = ("mtp.",)  # roots of heads for multi-token prediction
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Own name -> shape of everything that a base of this configuration holds."""
    decoder = config.decoder
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, decoder.hidden_size),
        "model.norm.weight": (decoder.hidden_size,),
    }
    for i, layer in enumerate(decoder.layers):
        tensors |= layer_tensors(layer, decoder.hidden_size, f"{STACK}.layers.{i}")
    if not config.tied_head:
        tensors[HEAD] = (config.vocab_size, decoder.hidden_size)
    return tensors


def text_stack(checkpoint: Checkpoint) -> str:
    """The prefix, without its dot, under which the decoder's tensors stand."""
    for stack in sorted({s for row in FAMILIES.values() for s in row.stacks}, key=len)[::-1]:
        if f"{stack}.embed_tokens.weight" in checkpoint.tensors:
            return stack
    return STACK


def stored_name(name: str, stack: str) -> str:
    """The name on disk of one of ours, module or tensor; `stack` is what `text_stack` said."""
    return f"{stack}{name.removeprefix(STACK)}" if name.startswith(f"{STACK}.") else name


def stored_names(names: Iterable[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Own name -> name on disk."""
    stack = text_stack(checkpoint)
    return {name: stored_name(name, stack) for name in names}


def beside_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The tensors that are no part of the decoder: what an export of its text leaves out."""
    return tuple(name for name in checkpoint.tensors if name.startswith(beside_roots()))


def beside_roots() -> tuple[str, ...]:
    """Beginnings of the names of tensors that belong to no decoder layer: towers of other senses,
    heads for multi-token prediction."""
    return tuple(dict.fromkeys(root for row in FAMILIES.values() for root in row.beside))


def ignorable(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Tensors that may stand there and are not needed: rotary buffers, what the family has beside
    its decoder, and the stored copy of a tied head."""
    beside = FAMILIES[config.architecture].beside
    names = {
        name
        for name in checkpoint.tensors
        if name.endswith(IGNORED) or (beside and name.startswith(beside))
    }
    return names | {HEAD} if config.tied_head else names
