"""NVIDIA's parser takes hybrid bases in both dialects, and its compiler builds them.

Nothing here runs an engine.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.tensorrt.lowering import indexing, loops, lower
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import canonical_contract
from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes

pytestmark = pytest.mark.tensorrt
CAPACITY, MAX_ROWS = 128, 64


@pytest.fixture(scope="module")
def onnx_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = toys.make_qwen3_5(tmp_path_factory.mktemp("hybrid") / "base")
    options = ExportOptions(base_for="eagle3", aux_layers=(1, 2, 4), golden=False)
    (onnx_dir,) = made.exported(checkpoint, options).iterdir()
    return onnx_dir


def target(dialect: Dialect, compute: Compute) -> Target:
    return Target(dialect=dialect, compute=compute, capacity=CAPACITY, max_rows=MAX_ROWS)


def lowered(onnx_dir: Path, dialect: Dialect, compute: Compute) -> bytes:
    contract = canonical_contract(ComponentConfig.read(onnx_dir / file_names.CONFIG).graph)
    model = ir.load(onnx_dir / file_names.MODEL)
    return as_bytes(lower(model, contract, target(dialect, compute)))


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dialect", Dialect)
def test_a_hybrid_is_parsed(onnx_dir: Path, dialect: Dialect, compute: Compute) -> None:
    answer = rtx.ask(lowered(onnx_dir, dialect, compute), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.slow
@pytest.mark.parametrize("dialect", Dialect)
def test_a_hybrid_is_compiled(onnx_dir: Path, dialect: Dialect) -> None:
    rtx.needs_builds()
    answer = rtx.ask(lowered(onnx_dir, dialect, "bfloat16"), build=True)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("left_out", [indexing, loops])
def test_a_hybrid_is_not_parsed_with_a_part_as_export_wrote_it(
    onnx_dir: Path, left_out: object
) -> None:
    """Why EyeLike, Compress and Loop are lowered: a parser that takes them is noticed here."""
    model = ir.load(onnx_dir / file_names.MODEL)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape([128 if fixed(dim) == "C" else dim for dim in value.shape or ()])
    indexing.apply(model, target(Dialect.NATIVE, "float32"))
    if left_out is indexing:
        model = ir.load(onnx_dir / file_names.MODEL)
    assert rtx.ask(as_bytes(model), build=False).step == "parse"


def fixed(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value
