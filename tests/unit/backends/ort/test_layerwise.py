"""What is handed out while a graph runs layer by layer, against transformers' own modules. That its
logits are right is claimed in tests/parity, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.artifacts import file_names
from edgespec.backends.onnx_dir import open_onnx_dir
from edgespec.backends.ort import layerwise
from edgespec.backends.ort.layerwise import Feeds, Floats, LayerwiseGraph, causal_feeds
from edgespec.runtime.lanes.embedding import EmbeddingTable
from tests import made, toys

IDS = np.random.default_rng(0).integers(3, 256, (2, 12))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("base") / "base", "qwen3", layers=2)


@pytest.fixture
def opened(base: Path) -> tuple[LayerwiseGraph, Floats, Feeds]:
    """The graph, and what its first piece reads."""
    onnx = open_onnx_dir(made.exported(base) / "llm")
    table = EmbeddingTable(onnx.path / file_names.EMBEDDING, onnx.config)
    return LayerwiseGraph.open(onnx), table.rows(IDS), causal_feeds(onnx.config, *IDS.shape, 64)


def test_each_weight_is_named_with_the_rows_that_it_multiplies(
    base: Path, opened: tuple[LayerwiseGraph, Floats, Feeds]
) -> None:
    graph, x, feeds = opened
    model: Any = toys.load_base(base)
    wanted: dict[str, Floats] = {}

    def keep(name: str) -> Any:
        return lambda _, given: wanted.update({name: given[0].flatten(0, 1).numpy()})

    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(keep(f"model.{name}.weight"))
    with torch.no_grad():
        model(torch.from_numpy(IDS))
    found: dict[str, Floats] = {}
    for piece in graph.pieces:
        inputs = piece.inputs(x, feeds)
        found |= {linear.name: inputs[linear.x] for linear in piece.linears}
        x = piece.run(x, feeds)
        for linear in piece.linears:
            stored = model.get_parameter(linear.name).detach().numpy()
            np.testing.assert_array_equal(linear.read(), stored)
            np.testing.assert_array_equal(linear.read(3, 7), stored[3:7])
    assert found.keys() == wanted.keys()
    for name, rows in found.items():
        np.testing.assert_allclose(rows, wanted[name], atol=2e-5)


def test_given_weights_take_the_place_of_stored_ones(
    opened: tuple[LayerwiseGraph, Floats, Feeds],
) -> None:
    graph, x, feeds = opened
    (last,) = [w for w in graph.pieces[0].linears if w.name.endswith("o_proj.weight")]
    nothing = {last.name: np.zeros(last.shape, np.float32)}
    np.testing.assert_array_equal(graph.pieces[0].run(x, feeds, weights=nothing), x)


def test_a_head_in_parts_gives_the_same_logits(
    opened: tuple[LayerwiseGraph, Floats, Feeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, x, feeds = opened
    rows = graph.head.rows(x, feeds)
    whole = graph.head.logits(rows)
    monkeypatch.setattr(layerwise, "PART_ELEMENTS", 64 * 100)  # 100 of 256 outputs
    np.testing.assert_allclose(graph.head.logits(rows), whole, atol=1e-5)
