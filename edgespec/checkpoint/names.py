"""Where the text part of a checkpoint stands: alone under `model.`, or beside a tower under
`model.language_model.`.

Our own names are always those of a text model: model.layers.0, lm_head.
"""

from __future__ import annotations

from edgespec.checkpoint.files import Checkpoint

STACK = "model"
NESTED = "model.language_model"
PREDICTION_HEADS = ("mtp.",)  # roots of heads for multi-token prediction
# Roots of tensors that belong to no layer of the decoder: vision towers, and such heads
BESIDE = ("model.visual.", "visual.", *PREDICTION_HEADS)


def text_stack(checkpoint: Checkpoint) -> str:
    """The prefix, without its dot, under which the decoder's tensors stand."""
    return NESTED if any(name.startswith(f"{NESTED}.") for name in checkpoint.tensors) else STACK


def stored_name(name: str, stack: str) -> str:
    """The name on disk of one of ours, module or tensor; `stack` is what `text_stack` said."""
    return f"{stack}{name.removeprefix(STACK)}" if name.startswith(f"{STACK}.") else name


def beside_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The tensors that are no part of the decoder: what an export of its text leaves out."""
    return tuple(name for name in checkpoint.tensors if name.startswith(BESIDE))
