"""Pieces of a canonical graph that read weights a chunk at a time: what they compute, against the
whole graph, and how much of a weight they hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgespec import bundle
from edgespec.contract import memory_inputs, memory_outputs
from edgespec.export import component, golden, pieces
from edgespec.export.components import ExportOptions, export
from edgespec.graphs.assembly import DecoderGraph, head_piece, layer_piece, stem_piece
from tests import toys

CHUNK = 64 * 40  # elements: most weights of a toy have several chunks
CLOSE = 2e-6  # of the largest value: sums in float32 in another order
Feeds = dict[str, np.ndarray[Any, Any]]


def dense(path: Path) -> tuple[Path, ExportOptions]:
    base = toys.make_base(path / "base", "qwen3", tied=True, layers=8, dtype="bfloat16")
    return base, ExportOptions(base_for="eagle3")


def float16(path: Path) -> tuple[Path, ExportOptions]:
    return toys.make_base(path / "base", "qwen2", dtype="float16"), ExportOptions()


def two_ropes(path: Path) -> tuple[Path, ExportOptions]:
    return toys.make_gemma3(path / "base", dtype="bfloat16"), ExportOptions()


def hybrid(path: Path) -> tuple[Path, ExportOptions]:
    return toys.make_qwen3_5(path / "base", dtype="bfloat16"), ExportOptions(base_for="mtp")


def with_draft(make: Callable[..., Path], path: Path, **keys: Any) -> tuple[Path, ExportOptions]:
    base = toys.make_base(path / "base", "qwen3", layers=8)
    draft = make(path / "draft", base, **keys)
    return draft, ExportOptions(base_model_dir=str(base))


MADE: dict[str, Callable[[Path], tuple[Path, ExportOptions]]] = {
    "dense": dense,
    "float16": float16,
    "two-ropes": two_ropes,
    "hybrid-and-mtp": hybrid,
    "eagle3": partial(with_draft, partial(toys.make_draft, layout="eagle"), dtype="bfloat16"),
    "eagle1": partial(with_draft, toys.make_eagle1),
    "dflash": partial(with_draft, toys.make_dflash, aux_layers=[2, 6], dtype="bfloat16"),
    "jetspec": partial(with_draft, toys.make_jetspec),
    "dspark": partial(with_draft, toys.make_dspark),
    "medusa": partial(with_draft, toys.make_medusa, dtype="bfloat16"),
}


def whole_outputs(
    graph: DecoderGraph, directory: Path, passes: tuple[golden.Pass, ...], capacity: int
) -> Feeds:
    """What the written graph gives when it runs as a whole, as golden outputs are called."""
    session = ort.InferenceSession(
        str(directory / bundle.MODEL), providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    layers = range(graph.shape.num_layers)
    memory = {
        k: v for i in layers for k, v in golden.empty_memory(graph.shape, i, capacity).items()
    }
    found: Feeds = {}
    for label, one in zip(("prompt", "tree"), passes, strict=True):
        outputs = [value.name for value in session.get_outputs()]
        feeds = memory | one.feeds
        got = dict(zip(outputs, session.run(outputs, {n: feeds[n] for n in names}), strict=True))
        found |= {f"{label}_{n}": got[n] for n in ("logits", "hidden_states") if n in got}
        memory = {}
        for i in layers:
            left = [got[spec.name] for spec in memory_outputs(graph.shape, i)]
            assert len(left) == len(memory_inputs(graph.shape, i))
            memory |= golden.next_memory(graph.shape, i, left)
    return found


@pytest.mark.parametrize("made", MADE)
def test_pieces_in_chunks_make_what_the_whole_graph_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    real, compared = golden.make_golden, []
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(pieces, "TILE_ROWS", 16)

    def both(graph: DecoderGraph, plan: Any, directory: Path, *rest: Any) -> Feeds:
        arrays = real(graph, plan, directory, *rest)
        passes, capacity = golden.passes_of(graph, *rest[:3])
        for name, whole in whole_outputs(graph, directory, passes, capacity).items():
            compared.append(np.abs(arrays[name] - whole).max() / np.abs(whole).max())
        return arrays

    monkeypatch.setattr(component, "make_golden", both)
    checkpoint, options = MADE[made](tmp_path)
    export(str(checkpoint), tmp_path / "out", options)
    assert len(compared) >= 2
    assert max(compared) < CLOSE


@pytest.mark.parametrize("made", ["dense", "hybrid-and-mtp", "eagle3", "dflash"])
def test_no_piece_holds_more_than_chunks_of_a_weight_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    graphs: list[tuple[DecoderGraph, Any]] = []

    def keep(graph: DecoderGraph, plan: Any, *_: Any) -> Feeds:
        graphs.append((graph, plan))
        return {}

    monkeypatch.setattr(component, "make_golden", keep)
    monkeypatch.setattr(component.writer, "write_small", lambda *_: None)
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(pieces, "TILE_ROWS", 16)
    checkpoint, options = MADE[made](tmp_path)
    export(str(checkpoint), tmp_path / "out", options)
    assert graphs
    for graph, plan in graphs:
        for i in range(graph.shape.num_layers):
            assert cast_elements(layer_piece(graph, plan, i).model) < 2 * CHUNK
        assert cast_elements(head_piece(graph, plan).model) < 2 * CHUNK
        assert cast_elements(stem_piece(graph, plan).model) < 2 * CHUNK


def cast_elements(model: ir.Model) -> int:
    """The most elements of a stored weight that become float32, or are transposed, at once."""
    pieces.read_weights_in_chunks(model)
    sizes = [0]
    for node in model.graph.all_nodes():
        if node.op_type in ("Cast", "Transpose") and node.inputs[0].const_value is not None:
            sizes.append(node.inputs[0].const_value.size)
    return max(sizes)


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 8), (64, 1 << 20), (1000, 3072), (151936, 1024), (1025, 1024), (96, 7)]
)
def test_chunks_are_whole_tiles_and_none_is_short(rows: int, width: int) -> None:
    ends = pieces.chunk_ends(rows, width)
    sizes = [high - low for low, high in pairwise(ends)]
    assert (ends[0], ends[-1]) == (0, rows)
    assert all(size % pieces.TILE_ROWS == 0 for size in sizes[:-1])
    assert sizes[-1] >= max(sizes[:-1], default=0)
    assert max(sizes) * width < 2 * max(pieces.CHUNK_ELEMENTS, pieces.TILE_ROWS * width)
