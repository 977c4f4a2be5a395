"""Families whose layers differ in mask, rotary embedding or projections: layer by layer as in
transformers' own model, and through ModelOpt into an export and an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from edgespec.backends.build import build
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.writing import to_torch
from edgespec.cli.main import run
from edgespec.contract import Limits
from edgespec.errors import UnsupportedModel
from edgespec.export.components import ExportOptions, export
from edgespec.quantize.base import base_of
from edgespec.quantize.decoder import TorchDecoder
from edgespec.quantize.plan import plan_base
from tests import toys

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="needs nvidia-modelopt"
)
MIXED = ["full_attention", "sliding_attention"] * 2
MAKE: dict[str, Callable[[Path], Path]] = {
    "gemma3": partial(toys.make_gemma3, dtype="bfloat16", hidden=96),
    "gemma3-published": partial(toys.make_gemma3, stack="published"),
    # the text part of a model that transformers has as a whole alone
    "qwen2.5-vl": toys.make_qwen2_5_vl,
    "qwen3-vl": toys.make_qwen3_vl,
    "phi3": partial(toys.make_phi3, partial_rotary=0.75, longrope=16, tied=True),
    "qwen2-mixed": partial(
        toys.make_base, family="qwen2", sliding_window=5, layer_types=MIXED, layers=4
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_layers_one_by_one_make_what_the_whole_model_makes(tmp_path: Path, name: str) -> None:
    path = MAKE[name](tmp_path)
    ids = np.random.default_rng(0).integers(3, 256, 24)
    checkpoint = open_checkpoint(path)
    decoder = TorchDecoder(base_of(checkpoint), torch.float32)

    def read(stored: str) -> torch.Tensor:
        tensor: torch.Tensor = to_torch(checkpoint.read(stored))
        return tensor

    with torch.no_grad():
        state = decoder.embed([ids.tolist()])
        for i in range(4):
            with decoder.loaded(i, read) as layer:
                state = decoder.run(i, layer, state)
        found = decoder.finish(state, read)
        load = toys.load_vl if name.endswith("-vl") else toys.load_base
        whole = load(path).model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    assert (found - whole.last_hidden_state).abs().max() < 1e-4


def test_experts_are_refused_before_any_work(tmp_path: Path) -> None:
    base = base_of(open_checkpoint(toys.make_qwen3_moe(tmp_path, layers=1, tokenizer=False)))
    with pytest.raises(UnsupportedModel, match=r"layers of experts.*\n*.*`weights` int4"):
        plan_base(base, "int4_awq", None, (), fp8_cache=False)


@needs_modelopt
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (partial(toys.make_gemma3, stack="published", hidden=128, dtype="bfloat16"), False),
        (partial(toys.make_phi3, hidden=128, heads=4, dtype="bfloat16", tied=True), True),
        (partial(toys.make_qwen2_5_vl, hidden=128, dtype="bfloat16", sections=(4, 6, 6)), False),
    ],
    ids=["gemma3", "phi3", "qwen2.5-vl"],
)
def test_a_quantized_base_becomes_an_engine(
    tmp_path: Path, make: Callable[[Path], Path], fused: bool
) -> None:
    base, out = make(tmp_path / "base"), tmp_path / "int8"
    line = ["quantize", "llm", "--model-dir", str(base), "--output-dir", str(out)]
    line += ["--quantization", "int8_sq", "--num-samples", "2", "--calib-seq-len", "32"]
    assert run(line) == 0
    scales = {name for name in open_checkpoint(out).tensors if name.endswith("weight_scale")}
    assert any("qkv_proj" in name for name in scales) == fused
    assert len(scales) == 4 * (4 if fused else 7)
    exported = export(str(out), tmp_path / "onnx", ExportOptions())
    limits = Limits(max_input_len=32, max_kv_cache_capacity=48)
    built = build(exported.directory, tmp_path / "engine", limits)
    assert built.golden_cosine is not None
    assert built.golden_cosine > 0.99
