"""Experts that ModelOpt quantized, each under its own name: the export against transformers with
the weights that the bytes stand for, and the engine against the export.

The toy checkpoints are written here as ModelOpt's unified export writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.backends.base import BuildOptions
from edgespec.backends.build import build
from edgespec.backends.ort.options import NATIVE, ONNX_RUNTIME, WeightFormat
from edgespec.checkpoint.files import open_checkpoint
from edgespec.contract import Limits
from edgespec.errors import UnsupportedModel
from edgespec.export.components import ExportOptions, export
from tests import gguf_files, toys
from tests.unit.backends.ort.native.sessions import compiled

LAYERS, EXPERTS, BLOCK = 2, 6, 32
LIMITS = Limits(max_input_len=64, max_kv_cache_capacity=64)
EXACT = 2e-5  # of a logit, as in test_quantised_export.py
Tensors = dict[str, torch.Tensor]


def int4(weight: torch.Tensor) -> Tensors:
    """W4A16_AWQ with a scale per input; two rows of values share a byte."""
    out, width = weight.shape
    smooth = torch.rand(width, generator=torch.Generator().manual_seed(width)) + 0.5
    blocks = (weight / smooth).reshape(out, -1, BLOCK)
    scale = blocks.abs().amax(-1) / 7
    values = (blocks / scale[..., None]).round().clamp(-8, 7).reshape(out, width)
    nibbles = values.to(torch.int8).view(torch.uint8) & 0xF
    return {
        "weight": nibbles[0::2] | (nibbles[1::2] << 4),
        "weight_scale": scale,
        "pre_quant_scale": smooth,
        "plain": (values.reshape(blocks.shape) * scale[..., None]).reshape(out, width) * smooth,
    }


def int8(weight: torch.Tensor) -> Tensors:
    """W8A16: a scale per channel."""
    scale = weight.abs().amax(1) / 127
    values = (weight / scale[:, None]).round()
    plain = values * scale[:, None]
    return {"weight": values.to(torch.int8), "weight_scale": scale, "plain": plain}


def static_int8(weight: torch.Tensor) -> Tensors:
    """W8A8_SQ_PER_CHANNEL: a scale of the inputs too."""
    smooth = torch.ones(weight.shape[1])
    return int8(weight) | {"input_scale": torch.tensor(0.05), "pre_quant_scale": smooth}


ALGOS = {
    "W4A16_AWQ": (int4, BLOCK),
    "W8A16": (int8, None),
    "W8A8_SQ_PER_CHANNEL": (static_int8, None),
}


def quantized(path: Path, algo: str, excluded: tuple[str, ...] = ("lm_head", "*.mlp.gate")) -> Path:
    """A quantized checkpoint below `path`, and beside it `plain`, with the same weights in
    float32."""
    make, group = ALGOS[algo]
    for name in ("plain", "quantized"):
        toys.make_qwen3_moe(
            path / name, layers=LAYERS, experts=EXPERTS, per_token=2, expert_size=2 * BLOCK
        )
    plain: Tensors = {}
    stored: Tensors = {}
    for name, tensor in load_file(path / "plain" / "model.safetensors").items():
        module = name.removesuffix(".weight")
        plain[name] = stored[name] = tensor
        routes = module.endswith(".mlp.gate") and "*.mlp.gate" in excluded
        if tensor.ndim < 2 or module in ("lm_head", "model.embed_tokens") or routes:
            continue
        parts = make(tensor)
        plain[name] = parts.pop("plain")
        del stored[name]
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(plain, path / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, path / "quantized" / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": list(excluded)}
    if group:
        settings |= {"group_size": group, "has_zero_point": False, "pre_quant_scale": True}
    config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": settings}
    (path / "quantized" / "hf_quant_config.json").write_text(json.dumps(config))
    return path / "quantized"


def built(onnx: Path, out: Path, options: BuildOptions | None = None) -> tuple[Any, Counter[str]]:
    """The engine's manifest entry, and how many nodes of each kind it has."""
    found = build(onnx / "llm", out, LIMITS, options=options)
    return found, Counter(node.op_type for node in ir.load(out / "llm.onnx").graph)


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16"])
@compiled
def test_quantized_experts_are_those_of_transformers_and_one_node_each(
    tmp_path: Path, algo: str
) -> None:
    checkpoint = quantized(tmp_path, algo)
    export(str(checkpoint), tmp_path / "onnx", ExportOptions())
    golden = load_file(tmp_path / "onnx" / "llm" / "golden.safetensors")
    model = toys.load_base(tmp_path / "plain")
    with torch.no_grad():
        logits = model(golden["prompt_ids"][None]).logits
    assert (golden["prompt_logits"] - logits).abs().max() < EXACT
    native, counts = built(tmp_path / "onnx", tmp_path / "native", WeightFormat(kernels=NATIVE))
    assert counts["Experts"] == LAYERS
    assert counts["Sum"] == counts["Sigmoid"] == 0
    # What AWQ multiplies rows by before q, k and v, and before o
    assert counts["Mul"] == (2 * LAYERS if algo == "W4A16_AWQ" else 0)
    assert native.weights.is_bitwise
    _, dense = built(tmp_path / "onnx", tmp_path / "dense", WeightFormat(kernels=ONNX_RUNTIME))
    assert dense["Experts"] == 0
    assert dense["Sum"] == LAYERS


@compiled
def test_rows_that_nodes_round_leave_all_experts_computed(tmp_path: Path) -> None:
    """A scale of the inputs for each expert: the kernel has one form for all of them."""
    checkpoint = quantized(tmp_path, "W8A8_SQ_PER_CHANNEL")
    export(str(checkpoint), tmp_path / "onnx", ExportOptions())
    _, counts = built(tmp_path / "onnx", tmp_path / "engine", WeightFormat(kernels=NATIVE))
    assert counts["Experts"] == 0
    assert counts["Sum"] == LAYERS


def q4_k_m(name: str) -> str:
    """The types of llama.cpp's mix: more bits for some layers' down and value projections."""
    if "ffn_gate_inp" in name:
        return "F32"
    more = ("output.weight", "blk.0.attn_v.weight", "blk.0.ffn_down_exps.weight")
    return "Q6_K" if name in more else "Q4_K"


@compiled
def test_a_gguf_of_mixed_types_is_one_node_a_layer_and_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden": 256, "expert_size": 256, "intermediate": 256, "head_dim": 64}
    hf = toys.make_qwen3_moe(tmp_path / "hf", layers=LAYERS, experts=EXPERTS, **sizes)
    gguf_files.write(hf, tmp_path / "model.gguf", q4_k_m)
    export(str(tmp_path / "model.gguf"), tmp_path / "onnx", ExportOptions())
    golden = load_file(tmp_path / "onnx" / "llm" / "golden.safetensors")
    config = AutoConfig.from_pretrained(hf)  # of a GGUF transformers takes defaults for some sizes
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config)
    with torch.no_grad():
        logits = model(golden["prompt_ids"][None]).logits
    assert (golden["prompt_logits"] - logits).abs().max() < EXACT * logits.abs().max()
    found, counts = built(tmp_path / "onnx", tmp_path / "engine", WeightFormat(kernels=NATIVE))
    assert (counts["Experts"], counts["Sum"]) == (LAYERS, 0)
    assert found.golden_cosine > 0.9995  # of an engine that rounds activations to 8 bits


def test_a_quantized_router_is_refused(tmp_path: Path) -> None:
    checkpoint = quantized(tmp_path, "W8A16", excluded=("lm_head",))
    assert "model.layers.0.mlp.gate.weight_scale" in open_checkpoint(checkpoint).tensors
    with pytest.raises(UnsupportedModel, match=r"mlp\.gate of .* is quantized, but it must keep"):
        export(str(checkpoint), tmp_path / "onnx", ExportOptions())


@pytest.mark.parametrize(
    ("make", "lowest"),
    [(toys.make_qwen3_moe, 0.995), (toys.make_qwen3_5, 0.95)],  # the second is recurrent
    ids=["qwen3", "qwen3_5"],
)
@compiled
def test_rounded_experts_are_as_close_to_the_export_as_on_other_kernels(
    tmp_path: Path, make: Callable[..., Path], lowest: float
) -> None:
    make(tmp_path / "base", layers=4, experts=EXPERTS)
    export(str(tmp_path / "base"), tmp_path / "onnx", ExportOptions())
    cosines = []
    for kernels in (NATIVE, ONNX_RUNTIME):
        options = WeightFormat("int8", 32, kernels=kernels)
        found, counts = built(tmp_path / "onnx", tmp_path / kernels, options)
        assert counts["Experts"] == (4 if kernels == NATIVE else 0)
        cosines.append(found.golden_cosine)
    assert min(cosines) > lowest
    assert np.ptp(cosines) < 2e-3
