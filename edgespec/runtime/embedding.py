"""The embedding table, memory-mapped from its safetensors file. Knows that file's header."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class EmbeddingTable:
    """The embeddings [vocab, hidden] in their stored dtype.

    Raises BundleError for a missing or damaged file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                entry = json.loads(file.read(header_bytes))["embedding"]
            self.table = np.memmap(
                path, DTYPES[entry["dtype"]], "r", 8 + header_bytes, tuple(entry["shape"])
            )
        except (OSError, ValueError, KeyError) as error:
            raise BundleError(
                f"{path} is not an embedding table: {error}", "Build the engine again."
            ) from error

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the embeddings [S, hidden] of ids [S] in float32."""
        return np.ascontiguousarray(self.table[tokens], np.float32)
