"""Whether a checkpoint's tokenizer.json can be run on a text. Knows its normalizer alone."""

from __future__ import annotations

from edgespec.artifacts import file_names
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import read_json
from edgespec.errors import CheckpointError
from edgespec.safe_read.tokenizer import MAX_GROWTH, text_growth


def refuse_growth(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a normalizer that makes texts many times longer."""
    path = checkpoint.path / file_names.TOKENIZER
    if path.is_file() and text_growth(read_json(path).get("normalizer")) > MAX_GROWTH:
        message = f"{path}: the normalizer makes a text more than {MAX_GROWTH} times as long."
        raise CheckpointError(message, "Download it again.")
