"""What `edgespec verify` learns of an engine of this backend: where its calls write, and which
kernels it has.

Knows the runner's cache. Reads the graph with onnx, without its weights.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Runner
from edgespec.backends.cache_check import check_cache
from edgespec.backends.findings import Finding, not_run
from edgespec.backends.ort.cache import KvCache
from edgespec.backends.ort.options import FLOAT32_TOLERANCE
from edgespec.backends.ort.runner import OrtRunner


class HostCache:
    """The cache of a runner as the check reads and writes it; its slots are those of the stride."""

    def __init__(self, cache: KvCache) -> None:
        self.cache, self.num_tensors = cache, cache.dims[0]

    def read(self, tensor: int) -> NDArray[Any]:
        """A copy of one tensor [lanes, heads, stride, D]."""
        return np.array(self.cache.slab[tensor])

    def write(self, tensor: int, values: NDArray[Any]) -> None:
        """Replace the contents of one tensor."""
        self.cache.slab[tensor] = values


def self_test(runner: Runner) -> list[Finding]:
    """Where calls write in the cache of an open engine."""
    assert isinstance(runner, OrtRunner)
    if not runner.cache.dims[0]:
        return [not_run("cache", "the engine keeps no keys and values")]
    return check_cache(runner, HostCache(runner.cache), FLOAT32_TOLERANCE)


def nodes_of(path: Path) -> dict[str, int]:
    """The nodes of an engine's graph by operator, the most frequent first."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return dict(Counter(node.op_type for node in graph.node).most_common())
