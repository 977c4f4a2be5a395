"""Whether a checkpoint has the tensors that its graph asks for, by names and shapes alone."""

from __future__ import annotations

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.vision import stored_vision_names, vision_prefix
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import CheckpointError
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.registry import DRAFTS

WITHOUT_IMAGES = "Or leave the image encoder out with `skip_visual`: text works without it."


def check_complete(checkpoint: Checkpoint, config: ModelConfig | DraftConfig) -> None:
    """Raises CheckpointError that names what is missing, unknown or misshapen, and UnsupportedModel
    for layers that no graph computes. `config` is the result of detect. Not looked at: an image
    encoder, without which text works."""
    if isinstance(config, DraftConfig):
        check = DRAFTS[config.method].check
        assert check is not None, config.method
        check(checkpoint, config)
        return
    Decoder.open(checkpoint, config)


def check_vision(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """The same for the image encoder of a base, if it has one."""
    if config.vision is None or vision_prefix(checkpoint) is None:
        return
    try:
        stored_vision_names(checkpoint, config.vision)
    except CheckpointError as error:
        raise CheckpointError(error.what, f"{error.remedy} {WITHOUT_IMAGES}") from error
