"""From a checkpoint to an open engine, as the command line would do it: `export_dir`,
`open_engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import BuildOptions
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.onnx_dir import open_onnx_dir
from edgespec.backends.ort.layerwise import LayerwiseGraph, causal_feeds
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions
from edgespec.rope import RopeTable
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from tests import made
from tests.one_lane import OneLane
from tests.parity import tensorrt_graphs

CAPACITY = 48  # KV slots of each engine


def layer_by_layer(
    onnx_dir: Path, ids: NDArray[np.int64], capacity: int = CAPACITY
) -> NDArray[np.float32]:
    """The logits [S, V] of an export, each attention and each MLP a piece of its own."""
    onnx = open_onnx_dir(onnx_dir)
    graph = LayerwiseGraph.open(onnx)
    assert len(graph.pieces) == 2 * onnx.config.graph.num_layers
    feeds = causal_feeds(onnx.config, 2, len(ids), capacity)
    both = np.stack([ids[::-1], ids])  # a sequence beside another
    x = EmbeddingTable(onnx_dir / file_names.EMBEDDING, onnx.config).rows(both)
    for piece in graph.pieces:
        x = piece.run(x, feeds)
    return graph.head.logits(graph.head.rows(x, feeds))[len(ids) :]


@dataclass(frozen=True)
class Component:
    """One checkpoint on its whole way: the exported directory and the engine made of it."""

    onnx_dir: Path
    engine_dir: Path
    config: EngineConfig
    runner: OrtRunner
    golden_difference: float | None

    def decoder(self) -> OneLane:
        """An empty sequence. The rows of earlier ones are still in the cache and must not be
        seen."""
        embedding = EmbeddingTable(self.engine_dir / file_names.EMBEDDING, self.config.component)
        local = self.config.component.local_rope
        return OneLane(
            CachedDecoder(
                self.runner,
                embedding,
                self.rope,
                self.config.component.sliding_window,
                local_rope=RopeTable.of(local, self.runner.capacity) if local else None,
            )
        )

    def layer_by_layer(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The logits [S, V] of the exported graph, one piece after the other."""
        return layer_by_layer(self.onnx_dir, ids, self.runner.capacity)

    @property
    def rope(self) -> RopeTable:
        return RopeTable.of(self.config.component.rope, self.runner.capacity)


MakeComponent = Callable[..., Component]


@pytest.fixture(scope="session", autouse=True)
def lowered_graphs_are_only_read() -> Iterator[None]:
    yield
    assert tensorrt_graphs.changed() == []


@pytest.fixture(scope="module")
def make_component() -> Iterator[MakeComponent]:
    """checkpoint, flags of export -> Component; engines are closed after the module. `build`: the
    options of the engine where they are not the default ones."""
    opened: list[Component] = []

    def make(
        checkpoint: Path,
        role: Role,
        capacity: int = CAPACITY,
        build: BuildOptions | None = None,
        **options: Any,
    ) -> Component:
        purpose = "eagle3" if role is Role.BASE else None
        wanted = replace(ExportOptions(base_for=purpose, skip_visual=True), **options)
        (onnx_dir,) = made.exported(checkpoint, wanted).iterdir()
        limits = Limits(max_input_len=capacity, max_kv_cache_capacity=capacity)
        engine_dir = made.built(limits, onnx_dir, options=build)
        ((found, entry),) = EngineManifest.read(engine_dir).engines.items()
        assert found is role
        assert (engine_dir / f"{engines.STEMS[role]}.onnx").is_file()
        runner, config = open_runner(engine_dir, role)
        opened.append(Component(onnx_dir, engine_dir, config, runner, entry.golden_difference))
        return opened[-1]

    yield make
    for component in opened:
        component.runner.close()
