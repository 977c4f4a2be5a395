"""A product that makes its rows computes, bit for bit, what the parts compute apart; and those what
ONNX Runtime's nodes compute, up to rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec.artifacts import file_names
from edgespec.backends.build import build
from edgespec.backends.golden import golden_calls
from edgespec.backends.ort import lowering, norm_matmul
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from tests import made, toys
from tests.calls import outputs_of
from tests.unit.backends.ort.native.sessions import compiled

pytestmark = compiled

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)
INT8 = WeightFormat("int8", 32, kernels=NATIVE)
# An activation that is rounded to the other side moves logits by a step of 8 bits, which is rare;
# a weight or a residual that is left out far more
STEP = 0.01
LAYERS = 4


def qwen2(path: Path) -> Path:
    """Biases behind q, k and v."""
    return toys.make_base(path, family="qwen2", layers=LAYERS)


def gemma3(path: Path) -> Path:
    """Norms behind the parts of a layer too, and GELU."""
    return toys.make_gemma3(path, layers=LAYERS)


def phi3(path: Path) -> Path:
    """Gate and up in one product."""
    return toys.make_phi3(path, layers=LAYERS)


def qwen3_5(path: Path) -> Path:
    """Gates behind attention, and recurrent layers."""
    return toys.make_qwen3_5(path, layers=LAYERS, mtp=False)


def qwen3_vl(path: Path) -> Path:
    """Rows of images are added behind the first layers."""
    return toys.make_qwen3_vl(path, layers=LAYERS, deepstack=(0, 1))


# What becomes of norms and gates that are no part of an attention: by operator
KINDS: dict[Callable[[Path], Path], dict[str, int]] = {
    # the last sum alone, whose rows are gathered before their norm
    qwen2: {"NormLowBitMatMul": 2 * LAYERS, "GatedLowBitMatMul": LAYERS, "Add": 1},
    gemma3: {"NormLowBitMatMul": 2 * LAYERS, "GatedLowBitMatMul": LAYERS},
    phi3: {"NormLowBitMatMul": 2 * LAYERS, "GatedLowBitMatMul": LAYERS},
    qwen3_5: {},
    # behind two layers a sum of its own, and the rows of images join the next norm
    qwen3_vl: {"NormLowBitMatMul": 2 * LAYERS, "GatedLowBitMatMul": LAYERS, "Add": 3},
}


def answers(onnx_dir: Path, engine_dir: Path) -> list[NDArray[np.float32]]:
    """Logits of the golden calls; of the first one where states would have to be kept between."""
    runner, config = open_runner(engine_dir, Role.LLM)
    calls = golden_calls(load_file(onnx_dir / file_names.GOLDEN), config.component.ropes)
    calls = calls[:1] if config.component.graph.recurrent else calls
    found = [outputs_of(runner.run(call)).logits.copy() for call in calls]
    runner.close()
    return found


def operators(engine_dir: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(engine_dir / "llm.onnx").graph)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_norm_matmul_are_the_rows(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx_dir = made.exported(make(tmp_path / "base")) / "llm"

    def answered(name: str) -> list[NDArray[np.float32]]:
        build(onnx_dir, tmp_path / name, LIMITS, options=INT8)
        return answers(onnx_dir, tmp_path / name)

    joined = answered("joined")
    monkeypatch.setattr(norm_matmul, "is_product", lambda node: False)
    apart = answered("apart")
    monkeypatch.setattr(lowering, "fuse_norms", lambda model: None)
    plain = answered("plain")
    found = operators(tmp_path / "joined")
    assert {name: found[name] for name in KINDS[make]} == KINDS[make]
    assert {"RMSNormalization", "Gelu"}.isdisjoint(found)
    parts = operators(tmp_path / "apart")
    assert parts["NormLowBitMatMul"] == 0
    assert operators(tmp_path / "plain")["RmsNorm"] == 0
    for one, two, three in zip(joined, apart, plain, strict=True):
        if "Sigmoid" in parts:  # of gates that have no operator by themselves
            assert np.abs(one - two).max() <= 1e-5 * np.abs(two).max()
        else:
            assert one.tobytes() == two.tobytes()
        assert np.abs(two - three).max() <= STEP * np.abs(three).max()
