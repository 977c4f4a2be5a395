"""Names of the decoder's tensors on disk: under `model.`, or `model.language_model.` with a tower.

Own names are always those of a text model: model.layers.0, lm_head. Knows no tensors.
"""

from __future__ import annotations

from edgespec.checkpoint.files import Checkpoint

STACK = "model"
NESTED = "model.language_model"
# Prefixes of tensors outside the decoder: vision towers, heads of multi-token prediction
BESIDE = ("model.visual.", "visual.", "mtp.")


def text_stack(checkpoint: Checkpoint) -> str:
    """Returns the prefix of the decoder's tensors, without its dot."""
    return NESTED if any(name.startswith(f"{NESTED}.") for name in checkpoint.tensors) else STACK


def stored_name(name: str, stack: str) -> str:
    """Returns the name on disk of a module or tensor; `stack` is the result of `text_stack`."""
    return f"{stack}{name.removeprefix(STACK)}" if name.startswith(f"{STACK}.") else name


def beside_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the names of the tensors outside the decoder, which an export leaves out."""
    return tuple(name for name in checkpoint.tensors if name.startswith(BESIDE))
