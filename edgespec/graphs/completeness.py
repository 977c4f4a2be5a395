"""Whether a checkpoint has the tensors that its graph asks for, by names and shapes alone."""

from __future__ import annotations

from edgespec.checkpoint import dflash
from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import expected_tensors, ignorable, stored_names
from edgespec.config import ModelConfig
from edgespec.graphs import eagle
from edgespec.graphs.dflash import check_masks
from edgespec.graphs.layers import check_buildable
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config


def check_whole(checkpoint: Checkpoint, found: ModelConfig | Eagle3Config | DFlashConfig) -> None:
    """Raises CheckpointError that names what is missing, unknown or misshapen, and UnsupportedModel
    for layers that no graph computes. `found` is what detect said."""
    quantization = read_quantization(checkpoint)
    if isinstance(found, ModelConfig):
        check_buildable(found.decoder, str(checkpoint.path))
        expected = expected_tensors(found)
        stored = stored_names(expected, checkpoint)
        there = {stored[name]: size for name, size in expected.items()}
        check_tensors(there, checkpoint, ignorable(found, checkpoint), quantization)
        return
    if isinstance(found, DFlashConfig):
        check_masks(found)
        named = dflash.named_as_ours(checkpoint, found)
        check_tensors(dflash.expected_tensors(found), named, dflash.IGNORED, quantization)
        return
    expected = eagle.expected_tensors(found)
    stored = eagle.stored_names(expected, checkpoint)
    maps = [name for name in checkpoint.tensors if name.removeprefix("model.") in eagle.MAPS]
    check_tensors(
        {stored[name]: shape for name, shape in expected.items()}, checkpoint, maps, quantization
    )
