"""The draft that a speculative_config names, beside the draft engine that is there.

Knows identities of weights and layers. Knows no engine, and no keys of other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.artifacts.component import ComponentConfig
from edgespec.checkpoint.files import open_checkpoint
from edgespec.errors import PairingError


def check_named(draft: ComponentConfig, name: str | None, layers: Sequence[int] | None) -> None:
    """Raises PairingError where a config names another checkpoint than the one that a draft engine
    was made from, or other hidden_states indices of the base than those that it reads. None: the
    config does not say. CheckpointError for a directory that is no checkpoint."""
    if layers is not None and draft.pair is not None:
        check_layers(draft.pair.aux_layer_ids, layers)
    if name is not None:
        check_model(name, draft)


def check_layers(own: Sequence[int] | None, named: Sequence[int]) -> None:
    """Raises PairingError where a config names other layers than the draft reads."""
    if own is not None and sorted(own) != sorted(named):
        message = (
            f"the draft was exported to read the layers {[i - 1 for i in sorted(own)]}, and"
            f" speculative_config names {[i - 1 for i in named]}"
        )
        raise PairingError(message, "Remove the key, or export base and draft with these layers.")


def check_model(name: str, draft: ComponentConfig) -> None:
    """Raises PairingError where a checkpoint is not the one that a draft engine was made from, nor
    its original, or is not here to be compared."""
    path = directory_of(name)
    if path is None:
        message = f"speculative_model {name} is not on this machine, so it cannot be compared"
        raise PairingError(message, "Remove it: the draft engine is what drafts.")
    identity = open_checkpoint(path, allow_pickle=True).identity()
    if identity not in (draft.identity, draft.quantized_from):
        message = f"speculative_model {name} is not what the draft engine was made from"
        remedy = f"Export and build {name}, or remove the key: the draft engine is what drafts."
        raise PairingError(message, remedy)


def directory_of(name: str) -> Path | None:
    """The directory of a checkpoint: as it is, or of a hub name that was downloaded before; None
    where there is neither."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
