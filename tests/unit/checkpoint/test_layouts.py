"""Claims about checkpoint/layouts.py: bytes that ModelOpt wrote, held against what ModelOpt says
they are worth; bytes that packers here write from the published definitions; and bytes that nobody
should have written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import (
    logical_shapes,
    read_kv_scales,
    read_quantization,
    read_weight,
    rule_at,
    stored_shape,
    tensor_names,
    unpack_nibbles,
    unpack_words,
)
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize, dequantize_stored

LAYER = "model.layers.0"
Tensors = Mapping[str, torch.Tensor]


# What ModelOpt wrote


# export -> scheme, its source, relative error of the effective weight (reference: 0.026, 0.118,
# 0.0127, 0.095, 0.027), and how far ModelOpt's own account may be from ours. w4a8: its fake
# quantizer rounds to FP8 once more.
MODELOPT = {
    "fp8": ("fp8", "qwen3", (0.025, 0.028), 0.02),
    "int4_awq": ("int4_awq", "qwen3", (0.11, 0.13), 0.01),
    "int8_sq": ("int8_sq", "qwen3", (0.009, 0.025), 0.002),
    "nvfp4": ("nvfp4", "qwen3", (0.093, 0.097), 0.0),
    "mxfp8": ("mxfp8", "qwen3", (0.026, 0.028), 0.0),
    "llama_fp8": ("fp8", "llama", (0.025, 0.028), 1e-6),
    "llama_int4_awq": ("int4_awq", "llama", (0.11, 0.135), 1e-6),
    # a weight at a tie rounds up or down by the CPU: one step of one weight is 8e-5
    "llama_int8_sq": ("int8_sq", "llama", (0.009, 0.025), 2e-4),
    "llama_nvfp4": ("nvfp4", "llama", (0.093, 0.097), 0.0),
    "int4_wo": ("int4_awq", "llama", (0.11, 0.12), 1e-6),
    "int8_wo": ("int8_wo", "llama", (0.006, 0.008), 2e-4),
    "w4a8_awq": ("w4a8_awq", "llama", (0.11, 0.135), 0.03),
    "w4a16_nvfp4": ("w4a16_nvfp4", "qwen3", (0.093, 0.097), 0.0),
    "fp8_block": ("fp8_block", "llama", (0.025, 0.028), 1e-6),
    "fp8_token": ("fp8_token", "llama", (0.025, 0.028), 1e-6),
}


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def source_weights(modelopt_exports: Path, family: str) -> dict[str, NDArray[np.float32]]:
    tensors = load_file(modelopt_exports / f"source_{family}" / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def weight_of(checkpoint: Checkpoint, module: str) -> QuantizedWeight:
    quantization = read_quantization(checkpoint)
    assert quantization is not None
    weight = read_weight(checkpoint, quantization, module)
    assert weight is not None
    assert stored_shape(checkpoint, quantization, module) == weight.shape
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELOPT)
def test_modelopts_bytes_are_worth_what_modelopt_says(modelopt_exports: Path, name: str) -> None:
    scheme, family, (least, most), tolerance = MODELOPT[name]
    checkpoint, source = (
        Checkpoint(modelopt_exports / name),
        source_weights(modelopt_exports, family),
    )
    dequantized = load_file(modelopt_exports / name / "reference.safetensors")
    assert len(dequantized) == 14 + ("lm_head" in dequantized)
    for module, its_worth in dequantized.items():
        weight = weight_of(checkpoint, module)
        assert weight.scheme.name == scheme
        assert weight.shape == tuple(its_worth.shape)
        assert relative_error(dequantize_stored(weight), its_worth.numpy()) <= tolerance
        assert least < relative_error(dequantize(weight), source[f"{module}.weight"]) < most
        assert np.isfinite(dequantize(weight)).all()


@pytest.mark.slow
def test_smoothed_linears_keep_their_scale_and_it_matters(modelopt_exports: Path) -> None:
    source = source_weights(modelopt_exports, "llama")
    for name in ("llama_int8_sq", "llama_int4_awq"):
        weight = weight_of(Checkpoint(modelopt_exports / name), f"{LAYER}.self_attn.q_proj")
        assert weight.pre_quant_scale is not None
        assert (
            relative_error(dequantize_stored(weight), source[f"{LAYER}.self_attn.q_proj.weight"])
            > 0.15
        )


@pytest.mark.slow
def test_what_stands_beside_the_weights(modelopt_exports: Path) -> None:
    parts = {
        name: weight_of(Checkpoint(modelopt_exports / name), f"{LAYER}.mlp.down_proj")
        for name in MODELOPT
    }
    static = {"fp8", "llama_fp8", "int8_sq", "llama_int8_sq", "nvfp4", "llama_nvfp4", "w4a8_awq"}
    smoothed = {"int4_awq", "llama_int4_awq", "int8_sq", "llama_int8_sq", "w4a8_awq"}
    assert {name for name, weight in parts.items() if weight.input_scale is not None} == static
    assert {
        name for name, weight in parts.items() if weight.pre_quant_scale is not None
    } == smoothed
    assert {name for name, weight in parts.items() if weight.global_scale is not None} == {
        "nvfp4",
        "llama_nvfp4",
        "w4a16_nvfp4",
    }
    assert all(weight.symmetric and weight.input_order is None for weight in parts.values())
    kinds = {
        name: (parts[name].values.dtype.name, parts[name].scales.dtype.name, parts[name].block)
        for name in parts
    }
    assert kinds["fp8"] == ("float8_e4m3fn", "float32", (256, 384))
    assert kinds["int4_awq"] == kinds["int4_wo"] == ("int4", "float32", (1, 128))
    assert kinds["int8_sq"] == kinds["int8_wo"] == ("int8", "float32", (1, 384))
    assert kinds["nvfp4"] == ("float4_e2m1fn", "float8_e4m3fn", (1, 16))
    assert kinds["mxfp8"] == ("float8_e4m3fn", "float8_e8m0fnu", (1, 32))
    assert kinds["fp8_block"] == ("float8_e4m3fn", "float32", (128, 128))


@pytest.mark.slow
def test_heads_caches_and_mixtures(modelopt_exports: Path) -> None:
    plain, full, mixed = (
        Checkpoint(modelopt_exports / name) for name in ("fp8", "llama_fp8", "mixed")
    )
    for checkpoint, quantized in ((plain, False), (full, True)):
        quantization = read_quantization(checkpoint)
        assert quantization is not None
        assert (read_weight(checkpoint, quantization, "lm_head") is not None) == quantized
        assert stored_shape(checkpoint, quantization, "lm_head") == (128, 256)
        assert quantization.kv_cache == ("fp8" if quantized else None)
    scales = read_kv_scales(full, f"{LAYER}.self_attn")
    assert scales is not None
    assert all(0 < scale < 1 for scale in scales)
    assert read_kv_scales(plain, f"{LAYER}.self_attn") is None
    assert weight_of(mixed, f"{LAYER}.mlp.up_proj").scheme.name == "nvfp4"
    assert weight_of(mixed, f"{LAYER}.self_attn.q_proj").scheme.name == "fp8"


@pytest.mark.slow
def test_config_alone_reads_the_same(modelopt_exports: Path, tmp_path: Path) -> None:
    for name in ("int4_awq", "nvfp4", "mixed"):
        copy = shutil.copytree(modelopt_exports / name, tmp_path / name)
        (copy / "hf_quant_config.json").unlink()
        module = f"{LAYER}.mlp.down_proj"
        wanted = dequantize(weight_of(Checkpoint(modelopt_exports / name), module))
        np.testing.assert_array_equal(dequantize(weight_of(Checkpoint(copy), module)), wanted)


@pytest.mark.slow
def test_every_tensor_of_an_export_is_known(modelopt_exports: Path) -> None:
    for name in MODELOPT:
        checkpoint = Checkpoint(modelopt_exports / name)
        modules = {tensor.rsplit(".", 1)[0] for tensor in checkpoint.tensors}
        known = {tensor for module in modules for tensor in tensor_names(checkpoint, module)}
        left = {tensor for tensor in checkpoint.tensors if tensor not in known}
        assert all(tensor.endswith((".k_scale", ".v_scale")) for tensor in left), left


# What the hub's packers write, from their definitions, a word at a time

M = f"{LAYER}.mlp.up_proj"


def write(
    path: Path, tensors: Tensors, config: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": config})
    )
    if beside is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    return path


def words(values: NDArray[Any], order: tuple[int, ...], bits: int) -> torch.Tensor:
    """[rows, n] of `bits` each -> int32 [rows, ceil(n / per word)]: nibble i of a word holds its
    column order[i]."""
    per_word = len(order)
    rows, columns = values.shape
    packed = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for row in range(rows):
        for word in range(packed.shape[1]):
            for place, column in enumerate(order):
                if word * per_word + column < columns:
                    value = int(values[row, word * per_word + column]) & (2**bits - 1)
                    packed[row, word] |= np.uint32(value << (bits * place))
    return torch.from_numpy(packed.view(np.int32))


PLAIN4, PLAIN8, AWQ = tuple(range(8)), tuple(range(4)), (0, 2, 4, 6, 1, 3, 5, 7)


def drawn(seed: int, out: int, inputs: int, group: int, bits: int = 4) -> tuple[NDArray[Any], ...]:
    """Codes [out, in], zero points and float16 scales [out, groups], and the weight that these
    are."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**bits, (out, inputs))
    zeros = rng.integers(1, 2**bits, (out, inputs // group))
    scales = rng.uniform(0.01, 1, (out, inputs // group)).astype(np.float16)
    return values, zeros, scales, worth_of(values, zeros, scales, np.arange(inputs) // group)


def worth_of(
    values: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any], groups: NDArray[Any]
) -> NDArray[Any]:
    """Each input i belongs to groups[i]."""
    weight = np.zeros(values.shape)
    for i, group in enumerate(groups):
        weight[:, i] = (values[:, i] - zeros[:, group]) * scales[:, group].astype(np.float64)
    return weight


def write_awq(path: Path, values: Any, zeros: Any, scales: Any, group: int) -> Path:
    tensors = {
        f"{M}.qweight": words(values.T, AWQ, 4),
        f"{M}.qzeros": words(zeros.T, AWQ, 4),
        f"{M}.scales": torch.from_numpy(scales.T.copy()),
        "lm_head.weight": torch.zeros(8, 4, dtype=torch.float16),
    }
    return write(
        path, tensors, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    )


def write_gptq(
    path: Path,
    values: Any,
    zeros: Any,
    scales: Any,
    group: int,
    *,
    bits: int = 4,
    form: str = "gptq",
    g_idx: Any = None,
) -> Path:
    order, offset = PLAIN4 if bits == 4 else PLAIN8, 1 if form == "gptq" else 0
    tensors = {
        f"{M}.qweight": words(values, order, bits).T,
        f"{M}.qzeros": words((zeros - offset).T, order, bits),
        f"{M}.scales": torch.from_numpy(scales.T.copy()),
    }
    if g_idx is not None:
        tensors[f"{M}.g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    return write(path, tensors, config)


@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    values, zeros, scales, weight = drawn(1, 24, 64, 64 if group == -1 else group)
    checkpoint = Checkpoint(write_awq(tmp_path, values, zeros, scales, group))
    found = weight_of(checkpoint, M)
    np.testing.assert_array_equal(found.values.astype(np.int64), values)
    np.testing.assert_array_equal(found.zero_points.astype(np.int64), zeros)  # type: ignore[union-attr]
    assert (found.values.dtype.name, found.scales.dtype.name, found.scheme.name) == (
        "uint4",
        "float16",
        "int4_wo",
    )
    np.testing.assert_allclose(dequantize(found), weight, rtol=1e-6)
    quantization = read_quantization(checkpoint)
    assert quantization is not None
    assert read_weight(checkpoint, quantization, "lm_head") is None  # the tensors say so


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, form: str) -> None:
    values, zeros, scales, weight = drawn(2, 16, 64, 32, bits)
    g_idx = np.arange(64) // 32
    found = weight_of(
        Checkpoint(
            write_gptq(tmp_path, values, zeros, scales, 32, bits=bits, form=form, g_idx=g_idx)
        ),
        M,
    )
    np.testing.assert_array_equal(found.values.astype(np.int64), values)
    np.testing.assert_allclose(dequantize(found), weight, rtol=1e-6)
    assert found.input_order is None
    assert found.values.dtype.name == f"uint{bits}"


def test_gptq_in_the_order_of_activations_is_put_in_blocks(tmp_path: Path) -> None:
    values, zeros, scales, _ = drawn(3, 16, 64, 16)
    groups = np.random.default_rng(4).permutation(np.arange(64) // 16)
    found = weight_of(Checkpoint(write_gptq(tmp_path, values, zeros, scales, 16, g_idx=groups)), M)
    assert found.input_order is not None
    np.testing.assert_array_equal(groups[found.input_order], np.arange(64) // 16)
    np.testing.assert_allclose(
        dequantize(found), worth_of(values, zeros, scales, groups), rtol=1e-6
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_in_the_middle_are_none(tmp_path: Path, bits: int) -> None:
    values, zeros, scales, _ = drawn(5, 16, 64, 32, bits)
    zeros[:] = 2 ** (bits - 1)
    found = weight_of(Checkpoint(write_gptq(tmp_path, values, zeros, scales, 32, bits=bits)), M)
    assert found.symmetric
    assert found.values.dtype.name == f"int{bits}"
    np.testing.assert_array_equal(found.values.astype(np.int64), values - 2 ** (bits - 1))
    np.testing.assert_allclose(
        dequantize(found), worth_of(values, zeros, scales, np.arange(64) // 32), rtol=1e-6
    )


def test_gptq_zero_point_that_readers_take_for_two_things_is_refused(tmp_path: Path) -> None:
    values, zeros, scales, _ = drawn(6, 16, 64, 32)
    zeros[3, 1] = 0
    with pytest.raises(UnsupportedModel, match=r"up_proj\.qzeros stores the zero point 15"):
        weight_of(Checkpoint(write_gptq(tmp_path / "v1", values, zeros, scales, 32)), M)
    second = weight_of(
        Checkpoint(write_gptq(tmp_path / "v2", values, zeros, scales, 32, form="gptq_v2")), M
    )
    np.testing.assert_array_equal(second.zero_points.astype(np.int64), zeros)  # type: ignore[union-attr]


def compressed_config(
    bits: int, strategy: str, form: str, group: int | None = None, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": more.pop("type", "int"),
        "strategy": strategy,
        "group_size": group,
    } | more
    inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
    group_0 = {
        "weights": weights,
        "targets": ["Linear"],
        "input_activations": inputs if form[0] in "if" else None,
    }
    keys = {"config_groups": {"group_0": group_0}, "format": form, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors"} | keys


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 32, True), (4, 32, False), (8, 16, True), (4, 60, True)]
)
def test_compressed_integers(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    inputs = 60 if group == 60 else 64  # 60 is no multiple of a word's eight
    values, zeros, scales, weight = drawn(7, 16, inputs, group, bits)
    order = PLAIN4 if bits == 4 else PLAIN8
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
        weight = worth_of(values, zeros, scales, np.arange(inputs) // group)
    tensors = {
        f"{M}.weight_packed": words(values, order, bits),
        f"{M}.weight_scale": torch.from_numpy(scales).bfloat16(),
        f"{M}.weight_shape": torch.tensor([16, inputs]),
    }
    rounded = tensors[f"{M}.weight_scale"].float().numpy()
    weight = worth_of(values, zeros, rounded, np.arange(inputs) // group)
    if not symmetric:
        tensors[f"{M}.weight_zero_point"] = words(zeros.T, order, bits).T
    config = compressed_config(bits, "channel" if group == 60 else "group", "pack-quantized", group)
    found = weight_of(Checkpoint(write(tmp_path, tensors, config)), M)
    assert found.symmetric == symmetric
    assert found.shape == (16, inputs)
    assert found.scales.dtype.name == "bfloat16"
    np.testing.assert_allclose(dequantize(found), weight, rtol=1e-6)


@pytest.mark.parametrize("shape", [(16, 1), (16,), (1,), ()])
def test_compressed_fp8_and_int8(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(shape, generator=generator) + 0.1
    fp8 = torch.randn(16, 48, generator=generator).to(torch.float8_e4m3fn)
    int8 = torch.randint(-128, 128, (16, 48), generator=generator, dtype=torch.int8)
    for stored, form, kind in ((fp8, "float-quantized", "float"), (int8, "int-quantized", "int")):
        config = compressed_config(8, "channel", form, type=kind)
        path = write(tmp_path / form, {f"{M}.weight": stored, f"{M}.weight_scale": scale}, config)
        found = weight_of(Checkpoint(path), M)
        wanted = stored.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)
        np.testing.assert_array_equal(dequantize(found), wanted.numpy())
        assert found.scheme.name == ("fp8_token" if kind == "float" else "int8_token")


@pytest.mark.parametrize("shape", [(16, 1), (1,)])
def test_compressed_int8_with_zero_points(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.rand(shape, generator=generator) + 0.1
    values, zeros = (
        torch.randint(-128, 128, sizes, generator=generator, dtype=torch.int8)
        for sizes in ((16, 48), shape)
    )
    config = compressed_config(8, "channel", "int-quantized", symmetric=False)
    config["config_groups"]["group_0"]["input_activations"] = None
    tensors = {f"{M}.weight": values, f"{M}.weight_scale": scale, f"{M}.weight_zero_point": zeros}
    found = weight_of(Checkpoint(write(tmp_path, tensors, config)), M)
    assert (found.scheme.name, found.values.dtype.name) == ("int8_wo", "uint8")
    wanted = (values.float() - zeros.float()) * scale
    np.testing.assert_array_equal(dequantize(found), wanted.numpy())


def test_deepseeks_fp8_has_a_scale_for_each_square(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scale = (torch.rand(2, 3, generator=generator) + 0.1).bfloat16()
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    path = write(tmp_path, {f"{M}.weight": values, f"{M}.weight_scale_inv": scale}, config)
    wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    np.testing.assert_array_equal(
        dequantize(weight_of(Checkpoint(path), M)), (values.float() * wide).numpy()
    )


def test_modelopts_nibbles(tmp_path: Path) -> None:
    """INT4 packs two rows, FP4 two columns, the first in the low half; written here without
    ModelOpt."""
    rng = np.random.default_rng(8)
    values = rng.integers(-8, 8, (6, 128))
    packed = (values[0::2] & 15) | ((values[1::2] & 15) << 4)
    tensors = {
        f"{M}.weight": torch.from_numpy(packed.astype(np.uint8)),
        f"{M}.weight_scale": torch.ones(6, 1),
    }
    beside = {"quant_algo": "W4A16_AWQ", "group_size": 128, "exclude_modules": []}
    found = weight_of(Checkpoint(write(tmp_path / "int4", tensors, {}, beside)), M)
    np.testing.assert_array_equal(dequantize(found), values)
    values = rng.integers(0, 16, (6, 32))
    packed = values[:, 0::2] | (values[:, 1::2] << 4)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = magnitudes[values & 7] * np.where(values & 8, -1, 1) * 0.5 * 0.25
    tensors = {
        f"{M}.weight": torch.from_numpy(packed.astype(np.uint8)),
        f"{M}.weight_scale": torch.full((6, 2), 0.5).to(torch.float8_e4m3fn),
        f"{M}.weight_scale_2": torch.tensor(0.25),
        f"{M}.input_scale": torch.tensor(0.125),
    }
    found = weight_of(Checkpoint(write(tmp_path / "fp4", tensors, {}, {"quant_algo": "NVFP4"})), M)
    np.testing.assert_array_equal(dequantize(found), wanted)
    assert (found.global_scale, found.input_scale) == (0.25, 0.125)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(rows: int, count: int, bits: int, seed: int) -> None:
    per_word = 32 // bits
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, count * per_word))
    np.testing.assert_array_equal(
        unpack_words(words(values, tuple(range(per_word)), bits).numpy(), bits), values
    )
    if bits == 4:
        np.testing.assert_array_equal(
            unpack_nibbles((values[:, 0::2] | values[:, 1::2] << 4).astype(np.uint8)), values
        )


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16]), st.integers(0, 2**32 - 1))
def test_awq_and_gptq_read_any_quantized_values(
    tmp_path: Path, eights: int, count: int, group: int, seed: int
) -> None:
    values, zeros, scales, weight = drawn(seed, 8 * eights, group * count, group)
    for path in (
        write_awq(tmp_path / "awq", values, zeros, scales, group),
        write_gptq(tmp_path / "gptq", values, zeros, scales, group),
    ):
        np.testing.assert_allclose(dequantize(weight_of(Checkpoint(path), M)), weight, rtol=1e-6)


def test_linears_come_in_the_order_of_their_tensors(tmp_path: Path) -> None:
    """Not in that of a set, which another hash seed would change."""
    modules = [f"model.layers.{i}.mlp.up_proj" for i in range(9)]
    tensors = {f"{m}.{part}": tensor for m in modules for part, tensor in good("FP8").items()}
    path = write(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    checkpoint = Checkpoint(path)
    found = logical_shapes(checkpoint, read_quantization(checkpoint))
    order = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors)
    assert list(found) == [f"{module}.weight" for module in order]


# What nobody should have written


def good(algo: str) -> dict[str, torch.Tensor]:
    """A Linear [4, 128] of the scheme, all of its tensors sound."""
    parts = {
        "FP8": {
            "weight": torch.ones(4, 128).to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(1.0),
        },
        "W8A8_SQ_PER_CHANNEL": {
            "weight": torch.ones(4, 128, dtype=torch.int8),
            "weight_scale": torch.ones(4),
            "pre_quant_scale": torch.ones(128).bfloat16(),
        },
        "W4A16_AWQ": {
            "weight": torch.ones(2, 128, dtype=torch.uint8),
            "weight_scale": torch.ones(4, 1),
        },
        "NVFP4": {
            "weight": torch.ones(4, 64, dtype=torch.uint8),
            "weight_scale": torch.ones(4, 8).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(1.0),
        },
        "MXFP8": {
            "weight": torch.ones(4, 128).to(torch.float8_e4m3fn),
            "weight_scale": torch.full((4, 4), 127, dtype=torch.uint8),
        },
    }[algo]
    if algo in ("FP8", "W8A8_SQ_PER_CHANNEL", "NVFP4"):
        parts["input_scale"] = torch.tensor(0.5)
    return parts


def with_value(index: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float()
        wide[index] = value
        return wide.to(tensor.dtype)

    return change


def lost(_: torch.Tensor) -> None:
    return None


NAN = float("nan")
SQ = "W8A8_SQ_PER_CHANNEL"


@pytest.mark.parametrize("algo", ["FP8", SQ, "W4A16_AWQ", "NVFP4", "MXFP8"])
def test_sound_tensors_are_read(tmp_path: Path, algo: str) -> None:
    path = write(
        tmp_path,
        {f"{M}.{part}": tensor for part, tensor in good(algo).items()},
        {},
        {"quant_algo": algo},
    )
    assert weight_of(Checkpoint(path), M).shape == (4, 128)


@pytest.mark.parametrize(
    ("algo", "part", "change", "said"),
    [
        ("FP8", "weight_scale", with_value((), NAN), "has nan at"),
        ("FP8", "weight_scale", with_value((), -1.0), "has -1.0 at"),
        ("FP8", "weight_scale", lambda t: t.repeat(4), r"has the shape \[4\]"),
        ("FP8", "weight_scale", lambda t: t.to(torch.int32), "is int32"),
        ("FP8", "weight", with_value((1, 2), NAN), "has NaN values"),
        ("FP8", "weight", lambda t: t[0], "expected a matrix"),
        ("FP8", "weight", lambda t: t.to(torch.int8), "is int8"),
        ("FP8", "input_scale", with_value((), 0.0), "is 0.0"),
        ("FP8", "input_scale", lost, "no tensor"),
        (SQ, "weight_scale", with_value(3, float("inf")), r"has inf at \[3, 0\]"),
        (SQ, "weight_scale", lambda t: t[:3], r"has the shape \[3\]"),
        (SQ, "pre_quant_scale", with_value(5, NAN), r"has nan at \[5\]"),
        (SQ, "pre_quant_scale", with_value(5, 0.0), "has zeros"),
        (SQ, "pre_quant_scale", lambda t: t[:64], r"expected \[128\]"),
        ("W4A16_AWQ", "weight_scale", with_value((2, 0), -0.5), r"has -0.5 at \[2, 0\]"),
        ("W4A16_AWQ", "weight_scale", lambda t: t.repeat(1, 3), "3 scales per row for 128 inputs"),
        ("W4A16_AWQ", "weight_scale", lambda t: t[:2], "expected 4 rows"),
        ("W4A16_AWQ", "weight", lambda t: t.view(torch.int8), "is int8"),
        ("NVFP4", "weight_scale", with_value((0, 1), NAN), r"has nan at \[0, 1\]"),
        ("NVFP4", "weight_scale", with_value((0, 1), -1.0), r"has -1.0 at \[0, 1\]"),
        ("NVFP4", "weight_scale", lambda t: t[:, :4], "4 scales per row for 128 inputs"),
        ("NVFP4", "weight_scale_2", with_value((), -1.0), "is -1.0"),
        ("NVFP4", "weight_scale_2", lost, "no tensor"),
        ("MXFP8", "weight_scale", with_value((1, 1), 255), r"has nan at \[1, 1\]"),
        ("MXFP8", "weight_scale", lambda t: t.float(), "is float32"),
        ("MXFP8", "weight", lost, "no tensor"),
    ],
)
def test_a_broken_tensor_is_named(
    tmp_path: Path,
    algo: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    said: str,
) -> None:
    tensors = good(algo)
    changed = change(tensors.pop(part))
    if changed is not None:
        tensors[part] = changed
    path = write(
        tmp_path,
        {f"{M}.{name}": tensor for name, tensor in tensors.items()},
        {},
        {"quant_algo": algo},
    )
    with pytest.raises(CheckpointError, match=said) as caught:
        weight_of(Checkpoint(path), M)
    assert f"{M}.{part}" in caught.value.what
    assert caught.value.remedy


def test_settings_and_tensors_must_agree(tmp_path: Path) -> None:
    tensors = {f"{M}.{part}": tensor for part, tensor in good("FP8").items()}
    plain = {f"{M}.weight": torch.ones(4, 128)}
    excluded = Checkpoint(
        write(tmp_path / "a", tensors, {}, {"quant_algo": "FP8", "exclude_modules": [M]})
    )
    with pytest.raises(
        CheckpointError, match=rf"declares {M} as not quantized, but .* has {M}.weight_scale"
    ):
        weight_of(excluded, M)
    unscaled = Checkpoint(write(tmp_path / "b", plain, {}, {"quant_algo": "FP8"}))
    with pytest.raises(
        CheckpointError, match=f"declares {M} as fp8, but {M}.weight is float32 and has no scales"
    ):
        weight_of(unscaled, M)
    sizes = Checkpoint(
        write(
            tmp_path / "c",
            {f"{M}.{p}": t for p, t in good("W4A16_AWQ").items()},
            {},
            {"quant_algo": "W4A16_AWQ", "group_size": 64},
        )
    )
    with pytest.raises(CheckpointError, match="declares groups of 64"):
        weight_of(sizes, M)
    smoothed = tensors | {f"{M}.pre_quant_scale": torch.ones(128)}
    with pytest.raises(UnsupportedModel, match="is fp8 and has a pre_quant_scale"):
        weight_of(Checkpoint(write(tmp_path / "d", smoothed, {}, {"quant_algo": "FP8"})), M)
    quantization = read_quantization(excluded)
    assert quantization is not None
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.none\.weight'"):
        stored_shape(excluded, quantization, "model.none")
    assert rule_at(excluded, quantization, "model.none") is not None


@pytest.mark.parametrize(
    ("layout", "part", "change", "said"),
    [
        ("awq", "qzeros", lost, "no tensor"),
        ("awq", "scales", lambda t: t[:, :8], "has the shape"),
        ("awq", "scales", lambda t: t * NAN, "has nan"),
        ("awq", "scales", lambda t: -t, "scales are finite and not negative"),
        ("awq", "scales", lambda t: t[:1], "1 scales per row for 64 inputs"),
        ("awq", "qweight", lambda t: t.to(torch.int64), "is int64"),
        ("awq", "qweight", lambda t: t.T, "2 scales per row for 2 inputs"),
        ("gptq", "g_idx", lambda t: t + 1, "does not have 32 inputs in each"),
        ("gptq", "g_idx", lambda t: t * 0, "does not have 32 inputs in each"),
        ("gptq", "g_idx", lambda t: t - 1, "does not have 32 inputs in each"),
        ("gptq", "g_idx", lambda t: t[:8], r"expected \[64\]"),
        ("gptq", "qzeros", lambda t: t[:, :1], "has the shape"),
        ("gptq", "qweight", lambda t: t[:0], "expected a matrix"),
    ],
)
def test_broken_tensors_of_the_hub_are_refused(
    tmp_path: Path,
    layout: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    said: str,
) -> None:
    values, zeros, scales, _ = drawn(9, 16, 64, 32)
    if layout == "awq":
        path = write_awq(tmp_path, values, zeros, scales, 32)
    else:
        path = write_gptq(tmp_path, values, zeros, scales, 32, g_idx=np.arange(64) // 32)
    tensors = load_file(path / "model.safetensors")
    changed = change(tensors.pop(f"{M}.{part}"))
    if changed is not None:
        tensors[f"{M}.{part}"] = changed.contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(EdgeSpecError, match=said) as caught:
        weight_of(Checkpoint(path), M)
    assert M in caught.value.what


def test_compressed_shape_must_fit_its_words(tmp_path: Path) -> None:
    tensors = {
        f"{M}.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        f"{M}.weight_scale": torch.ones(16, 2),
        f"{M}.weight_shape": torch.tensor([16, 64]),
    }
    config = compressed_config(4, "group", "pack-quantized", 32)
    assert weight_of(Checkpoint(write(tmp_path / "good", tensors, config)), M).shape == (16, 64)
    for number, shape in enumerate(([16, 65], [16, 56], [15, 64], [16, -8], [16, 0])):
        tensors[f"{M}.weight_shape"] = torch.tensor(shape)
        with pytest.raises(CheckpointError, match=rf"{M}\.weight_shape declares"):
            weight_of(Checkpoint(write(tmp_path / str(number), tensors, config)), M)


def test_kv_scales_come_in_pairs(tmp_path: Path) -> None:
    attention = f"{LAYER}.self_attn"
    tensors = {
        f"{attention}.k_scale": torch.tensor(0.5),
        f"{attention}.v_scale": torch.tensor([0.25]),
    }
    assert read_kv_scales(Checkpoint(write(tmp_path / "a", tensors, {})), attention) == (0.5, 0.25)
    del tensors[f"{attention}.k_scale"]
    with pytest.raises(CheckpointError, match="k_scale"):
        read_kv_scales(Checkpoint(write(tmp_path / "b", tensors, {})), attention)
