"""Bases whose weights have zero points, minimums, super-blocks, tables and scales of either sign:
what they export and what engines compute, against the base of the weights that these stand for.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.artifacts import file_names
from edgespec.backends.build import build
from edgespec.backends.golden import golden_calls
from edgespec.backends.ort.native.library import why_missing
from edgespec.backends.ort.options import Kernels, WeightFormat
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits
from edgespec.export.components import Exported, ExportOptions, export
from edgespec.graphs import packing
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES
from tests import toys
from tests.one_weight import weights_of_forms

Array = NDArray[Any]
GROUP = 32
LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)
IN_8_BITS = 0.9995  # the cosine of an engine that rounds activations to 8 bits
RNG = np.random.default_rng(0)

needs_kernels = pytest.mark.skipif(why_missing() is not None, reason="no kernels of our own")


def linears(path: Path) -> dict[str, Array]:
    tensors = load_file(path / "model.safetensors")
    return {name.removesuffix(".weight"): one for name, one in tensors.items() if "_proj" in name}


def rewrite(path: Path, out: Path, parts: dict[str, Array], config: dict[str, Any]) -> Path:
    """A copy of a checkpoint that has `parts` in place of the modules that these name."""
    plain = load_file(path / "model.safetensors")
    shutil.copytree(path, out)
    modules = {name.rpartition(".")[0] for name in parts}
    kept = {k: v for k, v in plain.items() if k.rpartition(".")[0] not in modules} | parts
    save_file({k: np.ascontiguousarray(v) for k, v in kept.items()}, out / "model.safetensors")
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | config))
    return out


def golden_logits(exported: Exported) -> Array:
    logits: Array = load_file(exported.directory / "golden.safetensors")["prompt_logits"][0]
    return logits


def nodes_of(engine_dir: Path) -> Counter[str]:
    """How many nodes of each operator an engine has."""
    (path,) = engine_dir.glob("*.onnx")
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def engine(exported: Exported, work: Path, kernels: Kernels) -> tuple[Array, Counter[str], Any]:
    """The logits [S, V] of the golden prompt, how many nodes of each operator the engine has, and
    what it says of its weights."""
    built = build(exported.directory, work, LIMITS, options=WeightFormat(kernels=kernels))
    runner, config = open_runner(work, built.role)
    golden = load_file(exported.directory / "golden.safetensors")
    prompt, _ = golden_calls(golden, config.component.ropes)
    logits: Array = runner.run(prompt)[0].logits.rows().copy()
    runner.close()
    return logits, nodes_of(work), built.weights


def cosine(one: Array, other: Array) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


# The layouts of the hub, as their packers write them


def words(values: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """[rows, n] of 4 bits -> int32 [rows, n / 8]: nibble i of a word holds its column order[i]."""
    eights = values.astype(np.uint32).reshape(len(values), -1, 8)[..., list(order)]
    shifted: Array = eights << np.arange(0, 32, 4, dtype=np.uint32)
    return np.asarray(np.bitwise_or.reduce(shifted, -1)).view(np.int32)


def awq(values: Array, zeros: Array, scales: Array) -> dict[str, Array]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {"qweight": words(values.T, order), "qzeros": words(zeros.T, order)}
    return packed | {"scales": scales.T}


def gptq(values: Array, zeros: Array, scales: Array) -> dict[str, Array]:
    return {"qweight": words(values).T, "qzeros": words(zeros.T - 1), "scales": scales.T}


def compressed(values: Array, zeros: Array, scales: Array) -> dict[str, Array]:
    packed = {"weight_packed": words(values), "weight_zero_point": words(zeros.T).T}
    return packed | {"weight_scale": scales, "weight_shape": np.array(values.shape)}


INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
LAYOUTS: dict[str, tuple[Callable[..., dict[str, Array]], dict[str, Any]]] = {
    "awq": (awq, {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "sym": False}),
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": INTEGERS | {"symmetric": False}}
            },
        },
    ),
}


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_with_zero_points_is_the_base_of_its_weights(tmp_path: Path, layout: str) -> None:
    base, (pack, settings) = toys.make_base(tmp_path / "base", layers=2), LAYOUTS[layout]
    parts: dict[str, Array] = {}
    plain: dict[str, Array] = {}
    for module, weight in linears(base).items():
        groups = weight.shape[0], weight.shape[1] // GROUP
        values = RNG.integers(0, 16, weight.shape)
        zeros = RNG.integers(1, 16, groups)
        scales = RNG.uniform(0.01, 0.03, groups).astype(np.float16)
        less = (values - np.repeat(zeros, GROUP, 1)).astype(np.float32)
        plain[f"{module}.weight"] = less * np.repeat(scales, GROUP, 1)
        packed = pack(values, zeros, scales)
        parts |= {f"{module}.{part}": array for part, array in packed.items()}
    config = {"quantization_config": {"quant_method": layout} | settings}
    stored, wanted = (
        export(str(path), tmp_path / f"onnx-{path.name}", ExportOptions())
        for path in (
            rewrite(base, tmp_path / "stored", parts, config),
            rewrite(base, tmp_path / "plain", plain, {}),
        )
    )
    np.testing.assert_allclose(golden_logits(stored), golden_logits(wanted), rtol=0, atol=1e-5)
    native, nodes, said = engine(stored, tmp_path / "native", "native")
    assert (said.scheme, said.compute, said.is_bitwise) == ("int4_wo", None, True)
    assert cosine(native, golden_logits(wanted)) > IN_8_BITS
    other, nodes, said = engine(stored, tmp_path / "ort", "onnxruntime")
    assert (said.compute, nodes["MatMulNBits"]) == (None, 2 * 4)  # q, k, v and gate, up are one
    assert cosine(other, golden_logits(wanted)) > IN_8_BITS


# All forms, whatever file they come from


def numbers_of(weight: QuantizedWeight) -> Array:
    """The weight [out, in] in float64, by the definition of its fields."""

    def wide(numbers: Array | None, width: int, default: float) -> Array:
        if numbers is None:
            return np.full(weight.shape, default)
        repeated: Array = np.repeat(numbers.astype(np.float64), width, axis=1)
        return repeated[:, : weight.shape[1]]

    block = weight.block[1]
    many = block * weight.super_block
    values: Array = weight.values.astype(np.float64) - wide(weight.zero_points, block, 0)
    values *= wide(weight.scales, block, 1) * wide(weight.super_scales, many, 1)
    values -= wide(weight.minimums, block, 0) * wide(weight.super_minimums, many, 1)
    return values * (1.0 if weight.global_scale is None else float(weight.global_scale))


def exported_with(
    base: Path,
    work: Path,
    weights: dict[str, QuantizedWeight],
    patch: pytest.MonkeyPatch,
    parts: Mapping[str, Array] | None = None,
) -> Exported:
    """The export of a base that has these weights; on disk stand int8 ones of the same shapes."""
    carrier: dict[str, Array] = {}
    carrier |= {f"{m}.weight": np.zeros(w.shape, np.int8) for m, w in weights.items()}
    carrier |= {f"{m}.weight_scale": np.ones(w.shape[0], np.float32) for m, w in weights.items()}
    kept = [m for m in (*linears(base), "lm_head", "*.mlp.gate") if m not in weights]
    settings = {"quant_method": "modelopt", "quant_algo": "W8A16", "ignore": kept}
    path = rewrite(
        base, work / "stored", carrier | dict(parts or {}), {"quantization_config": settings}
    )
    patch.setattr(packing, "read_weight", lambda _, __, module: weights.get(module))
    return export(str(path), work / "onnx", ExportOptions())


@needs_kernels
def test_an_engine_of_every_form_is_that_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each Linear of two layers has the next form."""
    base = toys.make_base(tmp_path / "base", layers=2)
    weights: dict[str, QuantizedWeight] = {}
    for i, (module, weight) in enumerate(sorted(linears(base).items())):
        forms = list(weights_of_forms(weight.shape).values())
        weights[module] = replace(forms[i % len(forms)], name=module)
    plain = {f"{m}.weight": numbers_of(w).astype(np.float32) for m, w in weights.items()}
    with monkeypatch.context() as patch:
        exported = exported_with(base, tmp_path, weights, patch)
    wanted = golden_logits(
        export(
            str(rewrite(base, tmp_path / "plain", plain, {})), tmp_path / "wanted", ExportOptions()
        )
    )
    np.testing.assert_allclose(golden_logits(exported), wanted, rtol=0, atol=1e-4)
    native, nodes, said = engine(exported, tmp_path / "native", "native")
    assert cosine(native, wanted) > IN_8_BITS
    assert (said.compute, said.emulated, nodes["MatMul"]) == (None, None, 1)  # the lm_head
    stored = (exported.directory / file_names.MODEL_DATA).stat().st_size
    assert (tmp_path / "native" / "llm.onnx.data").stat().st_size < stored  # nothing twice
    other, nodes, said = engine(exported, tmp_path / "ort", "onnxruntime")
    assert cosine(other, wanted) > IN_8_BITS
    assert (said.compute, said.emulated) == ("float32", None)  # of minimums and FP4


def nvfp4(name: str, shape: tuple[int, int], number: int) -> QuantizedWeight:
    """With a global scale of its own."""
    values = (RNG.standard_normal(shape) * 3).astype(ml_dtypes.float4_e2m1fn)
    scales = RNG.uniform(0.5, 4, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(0.003 + 0.001 * number)
    scheme = SCHEMES["w4a16_nvfp4"]
    return QuantizedWeight(name, scheme, values, scales, (1, 16), global_scale=scale)


def int4(name: str, shape: tuple[int, int], number: int) -> QuantizedWeight:
    """With scales that fit float16 or not."""
    values = RNG.integers(-8, 8, shape).astype(ml_dtypes.int4)
    scales = RNG.uniform(0.01, 0.03, (shape[0], shape[1] // 32)).astype(np.float32)
    scales = scales.astype(np.float16).astype(np.float32) if number % 2 else scales
    return QuantizedWeight(name, SCHEMES["int4_wo"], values, scales, (1, 32))


@needs_kernels
@pytest.mark.parametrize("make", [nvfp4, int4])
def test_experts_whose_scales_are_not_alike_are_one_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[str, tuple[int, int], int], QuantizedWeight],
) -> None:
    base = toys.make_qwen3_moe(tmp_path / "base", layers=1, experts=4, per_token=2, expert_size=64)
    shapes = [(module, weight.shape) for module, weight in linears(base).items()]
    weights = {module: make(module, shape, i) for i, (module, shape) in enumerate(shapes)}
    plain = {f"{m}.weight": numbers_of(w).astype(np.float32) for m, w in weights.items()}
    rewritten = rewrite(base, tmp_path / "plain", plain, {})
    wanted = golden_logits(export(str(rewritten), tmp_path / "wanted", ExportOptions()))
    exported = exported_with(base, tmp_path, weights, monkeypatch)
    found, nodes, _ = engine(exported, tmp_path / "native", "native")
    assert nodes["Experts"] == 1
    assert cosine(found, wanted) > IN_8_BITS


@needs_kernels
@pytest.mark.parametrize(
    ("form", "tied"), [("super-blocks less minimums", True), ("6 bits", True), ("6 bits", False)]
)
def test_a_stored_head_whose_numbers_are_the_embeddings_serves_as_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, tied: bool
) -> None:
    """A GGUF file has both as one tensor. With another number the embedding stays."""
    base = toys.make_base(tmp_path / "base", layers=2)
    tensors = load_file(base / "model.safetensors")
    head = replace(weights_of_forms(tensors["lm_head.weight"].shape)[form], name="lm_head")
    rows = numbers_of(head).astype(np.float32)
    rows[-1, -1] += not tied
    embedding = {"model.embed_tokens.weight": rows}
    exported = exported_with(base, tmp_path, {"lm_head": head}, monkeypatch, embedding)
    engine_dir = tmp_path / "engine"
    built = build(exported.directory, engine_dir, LIMITS, options=WeightFormat(kernels="native"))
    runner, _ = open_runner(engine_dir, built.role)
    assert (runner.table is not None) == tied == (not (engine_dir / file_names.EMBEDDING).exists())
    if runner.table is not None:
        np.testing.assert_array_equal(runner.table.rows(np.array([3, 255])), rows[[3, 255]])
    assert nodes_of(engine_dir)["LowBitHead"] == 1
    runner.close()
