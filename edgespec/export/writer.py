"""Streams weights from a checkpoint into the files of an exported directory and hashes them.

Knows bytes and offsets. Holds one chunk of a tensor, or one quantized weight, in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.finite import FiniteSink
from edgespec.checkpoint.source import TensorInfo
from edgespec.graphs.builder import ALIGN_BYTES, WeightPlan

Advance = Callable[[int], None]
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class PaddedFile:
    """A binary file for writing that knows its position in bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.position = file, 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes the data and returns its number of bytes."""
        self.position += len(data)
        return self.file.write(data)

    def pad_to(self, offset: int) -> None:
        """Writes zeros up to `offset` bytes from the start."""
        self.write(b"\0" * (offset - self.position))


class HashingFile(PaddedFile):
    """The same; it hashes its content and reports the progress in bytes."""

    def __init__(self, file: BinaryIO, advance: Advance) -> None:
        super().__init__(file)
        self.advance, self.digest = advance, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Writes the data and returns its number of bytes."""
        self.digest.update(data)
        self.advance(len(data))
        return super().write(data)


def write_weights(plan: WeightPlan, path: Path, advance: Advance) -> str:
    """Writes the plan's weights to `path` at their offsets. Returns the file's sha256.

    Raises CheckpointError for NaN or Inf.
    """
    with path.open("wb") as raw:
        file = HashingFile(raw, advance)
        place_weights(plan, file)
        return file.digest.hexdigest()


def place_weights(plan: WeightPlan, file: PaddedFile) -> None:
    """Writes the plan's weights at their offsets. Raises CheckpointError for NaN or Inf."""
    for weight in plan.written_here():
        file.pad_to(weight.offset)
        weight.source.write_to(weight.info.name, FiniteSink(file, weight.info))


def write_embedding(
    checkpoint: Checkpoint, info: TensorInfo, path: Path, advance: Advance
) -> tuple[str, int]:
    """Writes a table [vocab, hidden] as the safetensors file that the runtime maps.

    Returns the sha256 and the offset of the table's first byte. The header is padded to a page so
    that a graph can reference the file. Raises CheckpointError for NaN or Inf.
    """
    entry = {
        "dtype": SAFETENSORS_DTYPES[info.dtype],
        "shape": list(info.shape),
        "data_offsets": [0, info.num_bytes],
    }
    header = json.dumps({"embedding": entry}, separators=(",", ":")).encode()
    header = header.ljust(ALIGN_BYTES - 8)
    with path.open("wb") as raw:
        file = HashingFile(raw, advance)
        file.write(len(header).to_bytes(8, "little") + header)
        checkpoint.write_to(info.name, FiniteSink(file, info))
        return file.digest.hexdigest(), ALIGN_BYTES


def write_small(arrays: dict[str, NDArray[np.generic]], path: Path) -> None:
    """Writes arrays to a safetensors file in memory first. Raises OSError."""
    from safetensors.numpy import save

    path.write_bytes(save(arrays))  # save_file reports a full disk with an error of its own
