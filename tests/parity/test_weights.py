"""Engines whose weights are rounded on this machine, or were quantised before the export.

The reference is independent: the bytes of the engine's own data file, taken apart here with numpy,
multiplied in float32 by ONNX Runtime's plain MatMul.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from edgespec.artifacts import file_names, json_files
from edgespec.backends import engine_dir as engines
from edgespec.backends.build import Built, build
from edgespec.backends.golden import golden_calls
from edgespec.backends.ort import emulate, int8_gemm, matmul_nbits
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role, canonical_contract
from edgespec.errors import BuildError, EdgeSpecError
from edgespec.export.components import ExportOptions, export
from tests import toys
from tests.calls import outputs_of
from tests.unit.backends.ort.native.sessions import compiled

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)
FORMATS = {
    "int4-128": WeightFormat("int4", 128),
    "int4-32": WeightFormat("int4", 32),
    "int8-128": WeightFormat("int8", 128),
    "int8-32": WeightFormat("int8", 32),
}
# Of the largest logit: activations in 8 bits, in each of some fifty products (0.082 at most). Wrong
# layouts give 0.5.
ACTIVATIONS_IN_8_BITS = 0.12


@pytest.fixture(scope="module")
def onnx_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tied head, bfloat16, biases, and products whose last block is short (160 inputs)."""
    work = tmp_path_factory.mktemp("weights")
    base = toys.make_base(
        work / "base",
        layers=7,
        hidden=64,
        intermediate=160,
        dtype="bfloat16",
        tied=True,
        attention_bias=True,
    )
    return export(str(base), work, ExportOptions(base_for="eagle3")).directory


def take_apart(model: ir.Model, node: ir.Node, directory: Path) -> NDArray[np.float32]:
    """What a MatMulNBits multiplies by, [in, out]."""
    k, n, bits, block = (
        node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size")
    )
    quantized, scales = (stored(value, directory) for value in node.inputs[1:3])
    if bits == 4:
        pairs = np.stack([quantized & 15, quantized >> 4], -1).reshape(n, -1)
        values = pairs.astype(np.float32) - 8
    else:
        values = quantized.reshape(n, -1).astype(np.float32) - 128
    return (values * np.repeat(scales.reshape(n, -1), block, axis=1))[:, :k].T


def stored(value: ir.Value | None, directory: Path) -> NDArray[Any]:
    assert value is not None
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    kind = np.uint8 if tensor.dtype == ir.DataType.UINT8 else np.float32
    shape = tensor.shape.numpy()
    return np.fromfile(
        directory / tensor.location, kind, int(np.prod(shape)), offset=tensor.offset or 0
    ).reshape(shape)


def in_float32(engine_dir: Path, out: Path) -> OrtRunner:
    """The same engine with its MatMulNBits as plain products by what their weights are worth."""
    model = ir.load(engine_dir / "spec_base.onnx")
    for node in [n for n in model.graph if n.op_type == "MatMulNBits"]:
        name = f"{node.name}/worth"
        tensor = ir.tensor(np.ascontiguousarray(take_apart(model, node, engine_dir)), name=name)
        dequantized = ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        model.graph.register_initializer(dequantized)
        node.op_type, node.domain = "MatMul", ""
        node.replace_input_with(1, dequantized)
        node.resize_inputs(2)
        node.attributes.clear()
    out.mkdir()
    shutil.copy(engine_dir / "spec_base.onnx.data", out)
    ir.save(model, out / "spec_base.onnx")
    config = engines.read_config(engine_dir, Role.BASE)
    contract = lowered_contract(canonical_contract(config.component.graph))
    return OrtRunner(out / "spec_base.onnx", contract, 32)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rounded_engine_computes_what_its_bytes_are_worth(
    onnx_dir: Path, tmp_path: Path, name: str
) -> None:
    built = build(onnx_dir, tmp_path / "engine", LIMITS, options=FORMATS[name])
    assert built.golden_cosine is not None
    runner, config = open_runner(tmp_path / "engine", Role.BASE)
    plain = in_float32(tmp_path / "engine", tmp_path / "plain")
    from safetensors.numpy import load_file

    golden = load_file(onnx_dir / file_names.GOLDEN)
    for call in golden_calls(golden, config.component.ropes):
        wanted = outputs_of(plain.run(call)).logits.copy()
        found = outputs_of(runner.run(call)).logits
        assert np.abs(found - wanted).max() <= ACTIVATIONS_IN_8_BITS * np.abs(wanted).max()
    runner.close()
    plain.close()


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_the_weights_rounded_to_nearest(
    onnx_dir: Path, tmp_path: Path, name: str
) -> None:
    """Every product of the engine, the head too, against the exported weight; no step is further
    off than half."""
    fmt = FORMATS[name]
    build(onnx_dir, tmp_path, LIMITS, options=fmt)
    model, canonical = ir.load(tmp_path / "spec_base.onnx"), ir.load(onnx_dir / file_names.MODEL)
    names = {node.name: node for node in canonical.graph if node.op_type == "MatMul"}
    rounded = {node: parts(str(node.name)) for node in model.graph if node.op_type == "MatMulNBits"}
    assert sorted(name for several in rounded.values() for name in several) == sorted(names)
    assert len(rounded) == 4 * 7 + 1
    for node, several in rounded.items():
        weight = np.concatenate([exported_weight(names[name]) for name in several], axis=1)
        error = np.abs(take_apart(model, node, tmp_path) - weight)
        step = np.abs(weight).max() / (7 if fmt.bits == 4 else 127)
        assert (
            error.max() <= (1.3 if fmt.bits == 4 else 0.51) * step
        )  # what is clipped to round the others finer
        assert np.sqrt((error**2).mean()) < (0.13 if fmt.bits == 4 else 0.01) * weight.std()


def parts(name: str) -> list[str]:
    """The products that one was made of: a/q+k is a/q and a/k."""
    first, *others = name.split("+")
    return [first, *(f"{first.rpartition('/')[0]}/{other}" for other in others)]


def exported_weight(node: ir.Node) -> NDArray[np.float32]:
    """[in, out]"""
    turn = node.inputs[1].producer()  # type: ignore[union-attr]
    stored: NDArray[Any] = turn.inputs[0].producer().inputs[0].const_value.numpy()  # type: ignore[union-attr]
    return stored.astype(np.float32).T


def test_norms_and_biases_stay_float32(onnx_dir: Path, tmp_path: Path) -> None:
    build(onnx_dir, tmp_path, LIMITS, options=FORMATS["int4-128"])
    model = ir.load(tmp_path / "spec_base.onnx")
    kinds = Counter(
        v.const_value.dtype for v in model.graph.initializers.values() if stands_outside(v)
    )
    assert kinds[ir.DataType.UINT8] == 29
    assert kinds[ir.DataType.FLOAT] == 29 + 15 + 4 * 7  # scales, norms, biases
    assert not [node for node in model.graph if node.op_type == "MatMul"]


def test_products_of_integers_multiply_the_weights_rounded_by_channel(
    onnx_dir: Path, tmp_path: Path
) -> None:
    """Every product, the head too: no value is further off than half a step of its channel."""
    built = build(onnx_dir, tmp_path, LIMITS, options=WeightFormat("int8", 0))
    assert {k: v for k, v in built.weights.to_dict().items() if k != "rounding"} == {
        "scheme": "int8",
        "method": "rtn",
        "compute": "int8",
        "exact": True,
    }
    model, canonical = ir.load(tmp_path / "spec_base.onnx"), ir.load(onnx_dir / file_names.MODEL)
    names = {node.name: node for node in canonical.graph if node.op_type == "MatMul"}
    products = [node for node in model.graph if node.op_type == "MatMulInteger"]
    assert len(products) == len(names) == 7 * 7 + 1
    for product in products:
        name = str(product.name).removesuffix("/int8/sums")
        weight = (
            names[name]
            .inputs[1]
            .producer()
            .inputs[0]
            .producer()
            .inputs[0]
            .const_value.numpy()
            .astype(np.float32)
        )
        scaled = product.outputs[0].uses()[0].node.outputs[0].uses()[0].node
        values, scales = (taken(value, tmp_path) for value in (product.inputs[1], scaled.inputs[1]))
        assert np.abs(values).max(0).min() >= 127
        assert (np.abs(values * scales - weight.T) <= 0.501 * scales).all()


def taken(value: ir.Value | None, directory: Path) -> NDArray[np.float32]:
    """An initializer of the engine's data file, in float32."""
    assert value is not None
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    kind, shape = tensor.dtype.numpy(), tensor.shape.numpy()
    found = np.fromfile(
        directory / tensor.location, kind, int(np.prod(shape)), offset=tensor.offset or 0
    )
    return found.reshape(shape).astype(np.float32)


def stands_outside(value: ir.Value) -> bool:
    return isinstance(value.const_value, ir.ExternalTensor)


def test_an_engine_says_what_its_weights_are(onnx_dir: Path, tmp_path: Path) -> None:
    built = build(onnx_dir, tmp_path, LIMITS, options=FORMATS["int4-32"])
    for found in (
        built.weights.to_dict(),
        json_files.read_json(tmp_path / "base_config.json")["weights"],
        json_files.read_manifest(tmp_path)["engines"]["base"]["weights"],
    ):
        assert {name: found[name] for name in ("scheme", "block", "method")} == {
            "scheme": "int4",
            "block": 32,
            "method": "rtn",
        }
        assert 0.1 <= found["rounding"] < 2
    assert any("lossless up to kernel rounding" in note for note in built.notes)
    assert (
        json_files.read_json(tmp_path / "manifest.json")["engines"]["base"]["golden_cosine"]
        == built.golden_cosine
    )


def test_int4_takes_a_seventh_of_float32(onnx_dir: Path, tmp_path: Path) -> None:
    sizes = []
    for name, fmt in (("a", WeightFormat()), ("b", FORMATS["int4-32"])):
        build(onnx_dir, tmp_path / name, LIMITS, options=fmt)
        sizes.append(sum(w.nbytes for w in quantized_values_and_floats(tmp_path / name)))
    assert sizes[1] < sizes[0] / 5  # 5 bits a weight, and blocks that are filled up


def quantized_values_and_floats(engine_dir: Path) -> Iterator[Any]:
    model = ir.load(engine_dir / "spec_base.onnx")
    return (v.const_value for v in model.graph.initializers.values() if stands_outside(v))


@pytest.mark.parametrize("name", ["int4-128", "int8-32"])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    """Why not dynamic int8, whose scale is one for all rows."""
    from edgespec.quantization.quantized_weight import quantize_rtn

    fmt, rng = FORMATS[name], np.random.default_rng(0)
    assert fmt.bits is not None
    kernel = matmul_nbits.NBitsKernel(fmt.bits, fmt.block, 160, 24)
    weight = quantize_rtn(rng.standard_normal((24, 160), np.float32), fmt.bits, fmt.block)
    packed = matmul_nbits.pack(kernel, weight)
    x = rng.standard_normal((2, 160), np.float32)
    louder = x * np.array([[1], [100]], np.float32)
    one, other = (matmul_nbits.run(kernel, packed, rows) for rows in (x, louder))
    np.testing.assert_array_equal(one[0], other[0])


# What must be refused


def high_nibble_first(
    kernel: matmul_nbits.NBitsKernel, values: Any, scales: Any
) -> tuple[Any, Any]:
    return (values >> 4) | (values << 4), scales


def scales_turned(kernel: matmul_nbits.NBitsKernel, values: Any, scales: Any) -> tuple[Any, Any]:
    return values, np.ascontiguousarray(scales.reshape(kernel.out_features, -1)[::-1].reshape(-1))


def zero_point_off(kernel: matmul_nbits.NBitsKernel, values: Any, scales: Any) -> tuple[Any, Any]:
    return values ^ 0x88, scales


@pytest.mark.parametrize("fault", [high_nibble_first, scales_turned, zero_point_off])
def test_a_kernel_that_reads_another_layout_stops_the_build(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    run = matmul_nbits.run
    monkeypatch.setattr(
        matmul_nbits,
        "run",
        lambda kernel, weights, x: run(kernel, fault(kernel, *weights), x),
    )
    with pytest.raises(BuildError, match=r"MatMulNBits computes .* with an error of"):
        build(onnx_dir, tmp_path / "engine", LIMITS, options=FORMATS["int4-32"])
    assert not (tmp_path / "engine").exists()


def test_weights_that_are_rounded_beyond_recognition_are_not_kept(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quantized values are as they should be, and the golden outputs are not approached."""
    from edgespec.backends.ort import weight_data

    honest = weight_data.quantize_rtn

    def coarse(*args: Any) -> Any:
        found = honest(*args)
        return replace(
            found, values=(found.values.astype(np.int8) // 4 * 4).astype(found.values.dtype)
        )

    monkeypatch.setattr(weight_data, "quantize_rtn", coarse)
    with pytest.raises(BuildError, match="have a cosine of"):
        build(onnx_dir, tmp_path / "engine", LIMITS, options=FORMATS["int4-32"])


# Quantised before the export


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        toys.make_base(tmp_path_factory.mktemp("tokenizer"), "llama", layers=2) / "tokenizer.json"
    )


EMULATED = "emulated: correctness only"
ORT_KERNELS = WeightFormat(kernels="onnxruntime")
IN_FLOAT32 = {"compute": "float32", "emulated": EMULATED}
# Export of tests/modelopt_exports.py -> what its engine says, and how near its golden outputs are.
# Those have no dynamic roundings: 0.47, 0.21 and 0.09 were measured for nvfp4, mxfp8 and fp8_token.
EXPORTED: dict[str, tuple[dict[str, Any], float]] = {
    "int4_awq": ({"scheme": "int4_awq", "block": 128}, 0.1),
    "llama_int4_awq": ({"scheme": "int4_awq", "block": 128}, 0.1),
    "int8_wo": ({"scheme": "int8_wo", "block": 128}, 0.1),
    "llama_int8_sq": ({"scheme": "int8_sq", "compute": "int8", "exact": True}, 0.02),
    "qwen2_int8_sq": ({"scheme": "int8_sq", "compute": "int8", "exact": True}, 0.02),
    "llama_fp8": ({"scheme": "fp8", **IN_FLOAT32}, 0.02),
    "llama_nvfp4": ({"scheme": "nvfp4", **IN_FLOAT32}, 0.8),
    "mxfp8": ({"scheme": "mxfp8", **IN_FLOAT32}, 0.4),
    "fp8_token": ({"scheme": "fp8_token", **IN_FLOAT32}, 0.2),
    "fp8_block": ({"scheme": "fp8_block", **IN_FLOAT32}, 1e-5),
    "mixed": ({"scheme": "fp8, nvfp4", **IN_FLOAT32}, 0.5),
}
UNROUNDED = ("fp8_block",)  # nothing but weights
# Where kernels of our own do something else
NATIVE = {"llama_nvfp4": ({"scheme": "nvfp4", "compute": "int8"}, 0.1)}


def exported(name: str, modelopt_exports: Path, tokenizer: Path, work: Path) -> Path:
    checkpoint = shutil.copytree(modelopt_exports / name, work / "checkpoint")
    shutil.copy(tokenizer, checkpoint)
    return export(str(checkpoint), work / "onnx", ExportOptions()).directory


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.deep), 2])
@pytest.mark.parametrize("name", EXPORTED)
def test_a_quantised_export_runs_as_its_golden_outputs_say(
    name: str, lanes: int, modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    wanted, difference = EXPORTED[name]
    directory = exported(name, modelopt_exports, tokenizer, tmp_path)
    limits = replace(LIMITS, max_batch_size=lanes)
    built: Built = build(directory, tmp_path / "engine", limits, options=ORT_KERNELS)
    said = built.weights.to_dict()
    said = {key: value for key, value in said.items() if key not in ("rounding", "method")}
    assert said == wanted
    assert built.golden_difference is not None
    assert built.golden_difference <= difference
    assert (built.weights.rounding is not None) == (name not in UNROUNDED)
    assert any(EMULATED in note for note in built.notes) == ("emulated" in wanted)
    assert any("bitwise with `exact`" in note for note in built.notes) == ("exact" in wanted)
    assert not any("computed in float32" in note for note in built.notes)


@compiled
@pytest.mark.parametrize(
    "name", ["int4_awq", "int8_wo", "llama_int8_sq", "llama_nvfp4", "fp8_block"]
)
def test_a_quantised_export_runs_on_kernels_of_our_own(
    name: str, modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Its rows have the same bits in every call, where roundings are emulated too. FP4 activations
    are rounded to 8 bits."""
    wanted, difference = NATIVE.get(name, EXPORTED[name])
    directory = exported(name, modelopt_exports, tokenizer, tmp_path)
    native = WeightFormat(kernels="native")
    built = build(directory, tmp_path / "engine", LIMITS, options=native)
    assert built.golden_difference is not None
    assert built.golden_difference <= difference
    assert built.weights.is_bitwise
    assert built.weights.scheme == wanted["scheme"]
    assert built.weights.compute == wanted.get("compute")
    model = ir.load(tmp_path / "engine" / "llm.onnx")
    products = sum(node.op_type.endswith("LowBitMatMul") for node in model.graph)
    # q, k and v as one; o; gate and up as one; down: of two layers, and the head where it is stored
    assert products in ((0,) if "float32" in (built.weights.compute or "") else (8, 9))


def test_int8_sq_is_as_small_as_its_values(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """The head is quantised as well: 4 bytes a weight would be four times as much."""
    directory = exported("llama_int8_sq", modelopt_exports, tokenizer, tmp_path)
    build(directory, tmp_path / "engine", LIMITS, options=ORT_KERNELS)
    model = ir.load(tmp_path / "engine" / "llm.onnx")
    products = [node for node in model.graph if node.op_type == "MatMulInteger"]
    assert len(products) == 2 * 7 + 1
    assert not [node for node in model.graph if node.op_type in ("MatMul", "DequantizeLinear")]
    weights = sum(
        node.inputs[1].const_value.size for node in products if node.inputs[1] is not None
    )
    assert (tmp_path / "engine" / "llm.onnx.data").stat().st_size < 1.5 * weights


def test_linears_that_read_one_input_round_it_once(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """For q, k and v, for o, for gate and up, for down: four a layer, and the head's own."""
    for name, op_type in (("llama_int8_sq", "QuantizeLinear"), ("llama_nvfp4", "ReduceMax")):
        directory = exported(name, modelopt_exports, tokenizer, tmp_path / name)
        build(directory, tmp_path / name / "engine", LIMITS, options=ORT_KERNELS)
        model = ir.load(tmp_path / name / "engine" / "llm.onnx")
        assert sum(node.op_type == op_type for node in model.graph) == 2 * 4 + 1


def test_a_cpu_that_adds_in_16_bits_gets_float32(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_gemm, "is_exact_here", lambda: False)
    directory = exported("int8_sq", modelopt_exports, tokenizer, tmp_path)
    built = build(directory, tmp_path / "engine", LIMITS, options=ORT_KERNELS)
    assert built.weights.compute == "float32"
    assert not built.weights.exact
    assert any("computed in float32" in note for note in built.notes)


def test_a_cpu_that_adds_in_16_bits_gets_no_products_of_integers(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_gemm, "is_exact_here", lambda: False)
    with pytest.raises(BuildError, match="in 16 bits"):
        build(onnx_dir, tmp_path / "engine", LIMITS, options=WeightFormat("int8", 0))
    assert not (tmp_path / "engine").exists()


# Broken forms of a quantised export


def wrong_step(node: Any) -> Any:
    found = honest_static_input(node)
    return found and (found[0], found[1] * np.float32(64))


honest_static_input = int8_gemm.static_input


def coarse(make: Any, x: ir.Value, how: Any) -> ir.Value:
    return emulate.nvfp4_nodes(
        make, x, replace(how, global_scale=how.outer_scale * np.float32(1e7))
    )


def test_golden_outputs_find_products_of_wrong_integers(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product is what its kernel says, and the kernel is not the checkpoint's."""
    directory = exported("llama_int8_sq", modelopt_exports, tokenizer, tmp_path)
    monkeypatch.setattr(int8_gemm, "static_input", wrong_step)
    with pytest.raises(BuildError, match="have a cosine of"):
        build(directory, tmp_path / "engine", LIMITS, options=ORT_KERNELS)
    assert not (tmp_path / "engine").exists()


def test_golden_outputs_find_an_emulation_of_something_else(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = exported("llama_nvfp4", modelopt_exports, tokenizer, tmp_path)
    monkeypatch.setitem(emulate.FORMATS, "nvfp4", replace(emulate.FORMATS["nvfp4"], nodes=coarse))
    with pytest.raises(BuildError, match="activations of nvfp4 are rounded to other values here"):
        build(directory, tmp_path / "engine", LIMITS, options=ORT_KERNELS)
    monkeypatch.setattr(emulate, "prove", lambda rounding: None)
    with pytest.raises(BuildError, match="have a cosine of"):
        build(directory, tmp_path / "engine", LIMITS, options=ORT_KERNELS)
    assert not (tmp_path / "engine").exists()


def test_rounding_what_is_quantised_already_is_refused(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    directory = exported("int4_awq", modelopt_exports, tokenizer, tmp_path)
    with pytest.raises(EdgeSpecError, match="quantized already"):
        build(directory, tmp_path / "engine", LIMITS, options=FORMATS["int4-32"])
    assert not (tmp_path / "engine").exists()
