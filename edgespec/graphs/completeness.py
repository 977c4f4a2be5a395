"""Whether a checkpoint has the tensors that its graph asks for, by names and shapes alone."""

from __future__ import annotations

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import DraftConfig, ModelConfig
from edgespec.graphs import decoder
from edgespec.graphs.registry import DRAFTS


def check_complete(checkpoint: Checkpoint, found: ModelConfig | DraftConfig) -> None:
    """Raises CheckpointError that names what is missing, unknown or misshapen, and UnsupportedModel
    for a draft of a form that its graph has not. `found` is what detect said."""
    if isinstance(found, DraftConfig):
        check = DRAFTS[found.method].check
        assert check is not None, found.method
        check(checkpoint, found)
        return
    expected = decoder.expected_tensors(found).items()
    stored = {decoder.stored_name(name, checkpoint): shape for name, shape in expected}
    ignorable = decoder.ignorable(found, checkpoint)
    check_tensors(stored, checkpoint, ignorable, read_quantization(checkpoint))
