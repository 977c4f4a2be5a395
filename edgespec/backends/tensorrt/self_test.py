"""What `edgespec verify` learns of an open engine of TensorRT: what is written in place, where its
calls write, and its layers.

Knows the runner, its cache on the device and the library's inspector.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Runner
from edgespec.backends.cache_check import check_cache
from edgespec.backends.cuda.caches import KvCache
from edgespec.backends.cuda.states import DTYPES
from edgespec.backends.findings import Finding, failed, not_run, passed
from edgespec.backends.tensorrt.accuracy import FLOAT32_TOLERANCE
from edgespec.backends.tensorrt.execution import OpenEngine
from edgespec.backends.tensorrt.runner import TensorRTRunner
from edgespec.backends.tensorrt.target import Dialect
from edgespec.contract import past_names, present_names

ALIASES = "aliases"
FUSED = re.compile(r"\s*\+\s*")  # between the names of layers that became one


class DeviceCache:
    """The cache of a runner as the check reads and writes it."""

    def __init__(self, cache: KvCache, dtype: np.dtype[Any]) -> None:
        self.cache, self.dtype, self.num_tensors = cache, dtype, cache.size.tensors
        width = cache.size.row_bytes // dtype.itemsize
        self.shape = (cache.lanes, cache.size.heads, cache.slots, width)

    def read(self, tensor: int) -> NDArray[Any]:
        """A copy of one tensor [lanes, heads, slots, D]."""
        size = self.cache.lanes * self.cache.lane_bytes
        raw = self.cache.workspace.down(self.cache.address(tensor, 0), size)
        return raw.view(self.dtype).reshape(self.shape)

    def write(self, tensor: int, values: NDArray[Any]) -> None:
        """Replace the contents of one tensor."""
        self.cache.workspace.put(self.cache.address(tensor, 0), values.astype(self.dtype))


def self_test(runner: Runner) -> list[Finding]:
    """What the engine writes in place, and where its calls write."""
    assert isinstance(runner, TensorRTRunner)
    if runner.cache is None:
        return [not_run("cache", "the engine keeps no keys and values")]
    memory = DeviceCache(runner.cache, DTYPES[runner.settings.compute])
    return [aliases(runner), *check_cache(runner, memory, FLOAT32_TOLERANCE)]


def aliases(runner: TensorRTRunner) -> Finding:
    """Whether each cache that a dialect writes in place, which the engine reported as the input's
    memory when it was opened, is bound to one address in each context that has run."""
    if runner.settings.dialect is Dialect.PORTABLE:
        why = "an engine of the portable dialect gives new rows, which the runner copies"
        return not_run(ALIASES, why)
    pairs = [
        pair
        for layer in runner.contract.shape.attention_layers
        for pair in zip(past_names(layer), present_names(layer), strict=True)
    ]
    apart = [
        present
        for context in runner.engine.contexts
        for past, present in pairs
        if context.addresses.get(past) != context.addresses.get(present)
    ]
    if apart:
        return failed(ALIASES, f"{', '.join(apart)}: bound to another address than its input")
    return passed(ALIASES, f"{len(pairs)} outputs are their inputs' memory")


# ---- memory


def memory_of(runner: TensorRTRunner) -> dict[str, int]:
    """Bytes on the device by what they are for: the engine's weights, where the library says it,
    keys and values, what recurrent layers remember, and where engines work, which a pair shares."""
    cache, recurrent, sizes = runner.cache, runner.recurrent, {}
    ask = getattr(runner.engine.engine, "get_engine_stat", None)  # not in 10.13 and 10.14
    kinds = getattr(runner.engine.trt, "EngineStat", None)
    if ask is not None and kinds is not None:
        sizes["weights"] = int(ask(kinds.TOTAL_WEIGHTS_SIZE))
    if cache is not None:
        sizes["kv_cache"] = cache.size.tensors * cache.tensor_bytes
    if recurrent is not None:
        tensors = recurrent.tensors.values()
        sizes["recurrent_state"] = sum(row.layers * row.layer_bytes for row in tensors)
    return {**sizes, "work": runner.workspace.scratch.size}


# ---- layers


def layers_of(engine: OpenEngine) -> dict[str, int]:
    """The layers of an engine: by type where it was built to say it, else how many are fused of
    several and how many are not. Empty where the library tells nothing."""
    trt = engine.trt
    inspector = engine.engine.create_engine_inspector()
    if inspector is None:
        return {}
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return counted_layers(text or "")


def counted_layers(text: str) -> dict[str, int]:
    """The layers in what the inspector says, by type or by whether they are fused."""
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    layers = told.get("Layers", []) if isinstance(told, dict) else []
    return dict(Counter(map(kind_of, layers)).most_common())


def kind_of(layer: object) -> str:
    """The type of a layer; of one that has a name alone, whether it is made of several."""
    if isinstance(layer, dict):
        return str(layer.get("LayerType") or layer.get("Name"))
    return "fused" if len(FUSED.split(str(layer))) > 1 else "single"
