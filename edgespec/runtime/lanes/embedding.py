"""The embedding table, memory-mapped from its safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.component_files import embedding_tensor
from edgespec.backends.engine_config import BUILD_AGAIN
from edgespec.safe_read.tensors import numpy_dtype


class EmbeddingTable:
    """The embeddings [vocab, hidden] of a component in their stored dtype.

    Raises BundleError for a missing or damaged file, or another table than the component's.
    """

    def __init__(self, path: Path, config: ComponentConfig) -> None:
        stored = embedding_tensor(path, config, BUILD_AGAIN)
        # As a plain array: each row of a memmap would be one again, which costs microseconds
        self.table = np.asarray(
            np.memmap(path, numpy_dtype(stored.dtype), "r", stored.offset, stored.shape)
        )

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the embeddings [S, hidden] of ids [S] in float32."""
        return np.ascontiguousarray(self.table[tokens], np.float32)
