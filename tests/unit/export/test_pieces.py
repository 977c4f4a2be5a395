"""Pieces of a canonical graph that read weights a chunk at a time: what they compute, against the
whole graph, and how much of a weight they hold."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.artifacts import file_names
from edgespec.checkpoint import layouts
from edgespec.checkpoint.files import open_checkpoint
from edgespec.contract import memory_inputs, memory_outputs
from edgespec.export import component, golden, pieces
from edgespec.export.components import ExportOptions, export
from edgespec.export.stored_weights import StoredWeight
from edgespec.graphs import packing
from edgespec.graphs.assembly import DecoderGraph, head_piece, layer_piece, stem_piece
from edgespec.quantization.quantized_weight import dequantize
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
    graph: DecoderGraph, directory: Path, passes: tuple[golden.GoldenPass, ...], capacity: int
) -> Feeds:
    """What the written graph gives when it runs as a whole, as golden outputs are called."""
    session = ort.InferenceSession(
        str(directory / file_names.MODEL), providers=["CPUExecutionProvider"]
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
        passes, capacity = golden.passes_of(graph.shape, *rest[:3])
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


# ---- quantized weights

WEIGHT_ONLY = {"mxfp8": "MXFP8", "nvfp4": "NVFP4", "int4_awq": "W4A16_AWQ"}


def quantized_and_dequantized(path: Path, scheme: str) -> tuple[Path, Path]:
    """A checkpoint in ModelOpt's layout, its lm_head quantized too, and one with the numbers that
    its weights stand for. Activations are as they are in both graphs."""
    base = toys.make_base(path / "base", "qwen3", hidden=128, intermediate=256, vocab=320)
    tensors = load_file(base / "model.safetensors")
    rng, quantized = np.random.default_rng(0), dict(tensors)
    for name, array in tensors.items():
        if array.ndim == 2 and "embed_tokens" not in name:
            quantized |= modelopt_tensors(scheme, name, array.shape, rng)
    algo = {"quant_algo": WEIGHT_ONLY[scheme], "kv_cache_quant_algo": None, "exclude_modules": []}
    settings = {"producer": {"name": "modelopt"}, "quantization": algo}
    made, plain = path / "quantized", path / "dequantized"
    for directory in (made, plain):
        shutil.copytree(base, directory)
    (made / "hf_quant_config.json").write_text(json.dumps(settings))
    save_file(quantized, made / "model.safetensors")
    checkpoint = open_checkpoint(made)
    quantization = layouts.read_quantization(checkpoint)
    assert quantization is not None
    for scales in (name for name in quantized if name.endswith(".weight_scale")):
        module = scales.removesuffix(".weight_scale")
        weight = layouts.read_weight(checkpoint, quantization, module)
        assert weight is not None
        tensors[f"{module}.weight"] = dequantize(weight)
    save_file(tensors, plain / "model.safetensors")
    return made, plain


def modelopt_tensors(
    scheme: str, name: str, shape: tuple[int, int], rng: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """Random codes and scales as ModelOpt stores them."""
    (out, width), module = shape, name.removesuffix(".weight")
    small = rng.uniform(0.5, 1.5, (out, width // 16)).astype(ml_dtypes.float8_e4m3fn)
    one = {"input_scale": np.float32(0.01), "weight_scale_2": np.float32(0.02)}
    parts: dict[str, Any] = {
        "mxfp8": {
            "weight": rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn),
            "weight_scale": rng.integers(119, 123, (out, width // 32), np.uint8),
        },
        "nvfp4": {
            "weight": rng.integers(0, 256, (out, width // 2), np.uint8),
            "weight_scale": small,
            **{key: np.array(value) for key, value in one.items()},
        },
        "int4_awq": {
            "weight": rng.integers(0, 256, (out // 2, width), np.uint8),
            "weight_scale": rng.uniform(0.01, 0.02, (out, width // 128)).astype(np.float32),
            "pre_quant_scale": rng.uniform(0.5, 2, width).astype(np.float32),
        },
    }[scheme]
    return {f"{module}.{part}": array for part, array in parts.items()}


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_quantized_pieces_make_what_their_dequantized_weights_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """And no more than chunks of a weight are float32 at a time, and the checkpoint is read for the
    graph and for its file alone."""
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", 64 * 128)
    monkeypatch.setattr(pieces, "TILE_ROWS", 16)
    real, sizes = StoredWeight.outputs, list[int]()

    def outputs(weight: StoredWeight, low: int, high: int) -> Any:
        found = real(weight, low, high)
        sizes.append(found.size)
        return found

    def read_weight(*args: Any) -> Any:
        reads.append(args[-1])
        return layouts.read_weight(*args)

    reads: list[str] = []
    monkeypatch.setattr(packing, "read_weight", read_weight)
    monkeypatch.setattr(StoredWeight, "outputs", outputs)
    found = []
    for checkpoint in quantized_and_dequantized(tmp_path, scheme):
        out = tmp_path / f"onnx_{checkpoint.name}"
        export(str(checkpoint), out, ExportOptions())
        found.append(load_file(out / "llm" / file_names.GOLDEN))
    quantized, plain = found
    for name, array in plain.items():
        if array.dtype == np.float32 and array.size:
            assert np.abs(quantized[name] - array).max() <= 1e-5 * np.abs(array).max()
    assert np.abs(plain["tree_logits"]).max() > 0.1
    assert len(sizes) > 7 * 4 + 1  # some Linears have several chunks; each is read for all passes
    assert max(sizes) < 2 * 64 * 128
    assert max(Counter(reads).values()) == 2
