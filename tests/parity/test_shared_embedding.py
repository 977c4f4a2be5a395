"""A tied head of few bits is the embedding too: the same rows, one file less, the same law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.artifacts import file_names
from edgespec.backends.build import build
from edgespec.backends.ort import matmul_nbits
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions, export
from edgespec.quantization.quantized_weight import dequantize_stored, quantize_rtn
from edgespec.runtime.lanes.embedding import EmbeddingTable
from tests import toys

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)


def exported(work: Path, *, tied: bool) -> Path:
    base = toys.make_base(
        work / "base", layers=7, hidden=64, intermediate=160, dtype="bfloat16", tied=tied
    )
    return export(str(base), work, ExportOptions(base_for="eagle3")).directory


@pytest.mark.parametrize(
    ("bits", "block", "in_features"), [(4, 128, 256), (4, 32, 96), (4, 128, 160), (8, 32, 80)]
)
def test_unpack_undoes_pack(bits: int, block: int, in_features: int) -> None:
    array = np.random.default_rng(0).standard_normal((24, in_features)).astype(np.float32)
    weight = quantize_rtn(array, bits, block)  # type: ignore[arg-type]
    kernel = matmul_nbits.NBitsKernel(bits, block, in_features, 24)  # type: ignore[arg-type]
    values, scales = matmul_nbits.pack(kernel, weight)
    some = np.array([[3, 0], [23, 3]])
    found = matmul_nbits.unpack(kernel, values[some], scales.reshape(24, -1)[some])
    np.testing.assert_array_equal(found, dequantize_stored(weight)[some])


@pytest.mark.parametrize(
    "weight_format", [WeightFormat("int4", 32), WeightFormat("int4", 128), WeightFormat("int8")]
)
def test_rows_of_a_tied_head_are_the_rounded_embedding(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    onnx = exported(tmp_path, tied=True)
    built = build(onnx, tmp_path / "engine", LIMITS, options=weight_format)
    assert not (tmp_path / "engine" / file_names.EMBEDDING).exists()
    assert any("embedding" in note for note in built.notes)
    runner, config = open_runner(tmp_path / "engine", Role.BASE)
    table = EmbeddingTable(onnx / file_names.EMBEDDING, config.component).table
    tokens = np.array([[0, 5, len(table) - 1]])
    assert runner.table is not None
    assert weight_format.bits is not None
    rounded = dequantize_stored(
        quantize_rtn(np.asarray(table), weight_format.bits, weight_format.block)
    )
    np.testing.assert_array_equal(runner.table.rows(tokens), rounded[tokens])
    runner.close()


@pytest.mark.parametrize(
    ("weight_format", "tied"),
    [
        (WeightFormat("int4", share_embedding=False), True),
        (WeightFormat("int4"), False),
        (FP32, True),
    ],
)
def test_other_engines_keep_a_table_of_their_own(
    tmp_path: Path, weight_format: WeightFormat, *, tied: bool
) -> None:
    onnx = exported(tmp_path, tied=tied)
    build(onnx, tmp_path / "engine", LIMITS, options=weight_format)
    runner, _ = open_runner(tmp_path / "engine", Role.BASE)
    assert runner.table is None
    assert (tmp_path / "engine" / file_names.EMBEDDING).read_bytes() == (
        onnx / file_names.EMBEDDING
    ).read_bytes()
    runner.close()
