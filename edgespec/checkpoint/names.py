"""The tensors of a base: which there are, and their names in a checkpoint.

Own names are always those of a text model: model.layers.0, lm_head. On disk the decoder may have a
longer prefix, beside encoders of images or audio; the rows of the families list them. Knows no
graphs.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import ModelConfig, layer_tensors
from edgespec.families import FAMILIES
from edgespec.methods import METHODS

STACK = "model"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PREDICTION_HEADS = ("mtp.",)  # prefixes of multi-token prediction heads
IGNORED = ("rotary_emb.inv_freq",)  # buffers in old checkpoints


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a base's tensors by own name."""
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
    """Returns the prefix of the decoder's tensors, without its dot."""
    for stack in sorted({s for row in FAMILIES.values() for s in row.stacks}, key=len)[::-1]:
        if f"{stack}.embed_tokens.weight" in checkpoint.tensors:
            return stack
    return STACK


def stored_name(name: str, stack: str) -> str:
    """Returns the name on disk of a module or tensor; `stack` is the result of `text_stack`."""
    return f"{stack}{name.removeprefix(STACK)}" if name.startswith(f"{STACK}.") else name


def stored_names(names: Iterable[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the names on disk by own name."""
    stack = text_stack(checkpoint)
    return {name: stored_name(name, stack) for name in names}


def beside_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the names of the tensors outside the decoder, which an export leaves out."""
    return tuple(name for name in checkpoint.tensors if name.startswith(beside_roots()))


def beside_roots() -> tuple[str, ...]:
    """The prefixes of tensors outside the decoder: encoders, multi-token prediction heads."""
    return tuple(dict.fromkeys(root for row in FAMILIES.values() for root in row.beside))


def ignorable(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Returns the names of tensors that a base does not use.

    These are rotary buffers, tensors outside the decoder, a draft's beside them, and the stored
    copy of a tied lm_head.
    """
    drafts = (root for method in METHODS.values() for root in method.tensors_in_base)
    beside = (*FAMILIES[config.architecture].beside, *drafts)
    names = {
        name
        for name in checkpoint.tensors
        if name.endswith(IGNORED) or (beside and name.startswith(beside))
    }
    return names | {HEAD} if config.tied_head else names
