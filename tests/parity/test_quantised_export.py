"""Exports of quantised checkpoints, against transformers with the weights and roundings that the
bytes stand for.

The reference unpacks the stored tensors with torch, as ModelOpt's formats are published, and rounds
activations where the graph does. ONNX's own reference evaluator says what the graph's
DequantizeLinear nodes are worth.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.build import build
from edgespec.backends.golden import golden_calls
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits
from edgespec.errors import BundleError, CheckpointError
from edgespec.export.components import Exported, ExportOptions, export
from edgespec.rope import RopeTable
from tests import reference, toys
from tests.parity.conftest import layer_by_layer

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
Array = NDArray[Any]

# Largest difference of a logit, whose standard deviation is about 1. A rounded activation that lies
# between two quantized values may fall to either side; then a logit moves by a step of the format
# (measured: up to 0.034 in FP8).
EXACT, ROUNDED_INT8, ROUNDED_FP8 = 2e-5, 0.02, 0.1
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Row:
    """An export of tests/modelopt_exports.py: its source, scheme and tolerance; whether ONNX
    Runtime has its types."""

    family: str
    scheme: str
    tolerance: float = EXACT
    runs: bool = True


ROWS = {
    "fp8": Row("qwen3", "fp8", ROUNDED_FP8),
    "int4_awq": Row("qwen3", "int4_awq"),
    "llama_int8_sq": Row("llama", "int8_sq", ROUNDED_INT8),
    "nvfp4": Row("qwen3", "nvfp4", runs=False),
    "mxfp8": Row("qwen3", "mxfp8", runs=False),
    "fp8_block": Row("llama", "fp8_block"),
    "int8_sq": Row("qwen3", "int8_sq", ROUNDED_INT8),
    "llama_fp8": Row("llama", "fp8", ROUNDED_FP8),
    "llama_int4_awq": Row("llama", "int4_awq"),
    "llama_nvfp4": Row("llama", "nvfp4", runs=False),
    "int4_wo": Row("llama", "int4_awq"),
    "int8_wo": Row("llama", "int8_wo"),
    "w4a8_awq": Row("llama", "w4a8_awq", ROUNDED_FP8),
    "w4a16_nvfp4": Row("qwen3", "w4a16_nvfp4", runs=False),
    "fp8_token": Row("llama", "fp8_token"),
    "int8_token": Row("qwen3", "int8_token"),
    "qwen2_fp8": Row("qwen2", "fp8", ROUNDED_FP8),
    "qwen2_int8_sq": Row("qwen2", "int8_sq", ROUNDED_INT8),
}
# For what a scheme's family decides. These stand first: fixtures are shared by their place in the
# list.
representative = pytest.mark.parametrize("case", list(ROWS)[:6], indirect=True)
# Whose kernel rounds activations, which the format does not
IN_8_BITS = ("int4_awq", "int8_wo", "w4a16_nvfp4")
HEADS = (
    "llama_fp8",
    "llama_int4_awq",
    "llama_int8_sq",
    "llama_nvfp4",
)  # whose lm_head is quantised as well


@dataclass(frozen=True)
class Case:
    """A checkpoint and its export."""

    row: Row
    name: str
    checkpoint: Path
    source: Path
    exported: Exported

    @property
    def graph(self) -> Path:
        return self.exported.directory / "model.onnx"

    def golden(self) -> dict[str, Array]:
        return {
            k: v.numpy()
            for k, v in load_file(self.exported.directory / "golden.safetensors").items()
        }

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.exported.directory / "config.json").read_text())[
            "quantization"
        ]
        return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        toys.make_base(tmp_path_factory.mktemp("tokenizer"), "llama", layers=2) / "tokenizer.json"
    )


@pytest.fixture(scope="module", params=ROWS)
def case(
    request: pytest.FixtureRequest,
    modelopt_exports: Path,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    return made(
        request.param,
        ROWS[request.param],
        modelopt_exports,
        tokenizer,
        tmp_path_factory.mktemp("export"),
    )


def made(name: str, row: Row, exports: Path, tokenizer: Path, work: Path) -> Case:
    checkpoint = work / "checkpoint"
    if row.scheme == "int8_token":
        int8_token_twin(exports / f"source_{row.family}", checkpoint)
    else:
        shutil.copytree(exports / name, checkpoint)
    shutil.copy(tokenizer, checkpoint)
    exported = export(str(checkpoint), work / "onnx", ExportOptions())
    return Case(row, name, checkpoint, exports / f"source_{row.family}", exported)


def int8_token_twin(plain: Path, out: Path) -> Path:
    """A copy in the INT8 of compressed-tensors that rounds activations token by token; the head
    stays."""
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name], tensors[f"{name}_scale"] = torch.round(weight / scale).to(torch.int8), scale
    shutil.copytree(plain, out)
    save_file(tensors, out / "model.safetensors")
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "weights": kind | {"strategy": "channel"},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
    }
    settings |= {"config_groups": {"group_0": group | {"targets": ["Linear"]}}}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return out


# The reference


def unpacked(tensors: Tensors, module: str) -> torch.Tensor:
    """The weight [out, in] that activations meet after the smoothing, from ModelOpt's tensors."""
    values, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if values.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn:
        pairs = torch.stack([values & 0xF, values >> 4], -1).flatten(1).long()
        return (
            FP4[pairs]
            * scale.float().repeat_interleave(16, 1)
            * tensors[f"{module}.weight_scale_2"]
        )
    if values.dtype == torch.uint8:
        pairs = torch.stack([values & 0xF, values >> 4], 1).flatten(0, 1).int()
        return torch.where(pairs > 7, pairs - 16, pairs) * scale.float().repeat_interleave(128, 1)
    if scale.dtype == torch.uint8:
        return values.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    if scale.dim() == 4:
        squares = scale.float()[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values.float() * squares[: values.shape[0], : values.shape[1]]
    return values.float() * (scale.float().reshape(-1, 1) if scale.numel() > 1 else scale.float())


class Rounded(torch.nn.Module):
    """A Linear of the reference: smoothing, the activations' rounding, the unpacked weight. The
    canonical graph leaves out `dynamic` roundings."""

    def __init__(self, tensors: Tensors, module: str, scheme: str, dynamic: bool) -> None:
        super().__init__()
        self.weight, self.bias = unpacked(tensors, module), tensors.get(f"{module}.bias")
        self.smooth, self.step = (
            tensors.get(f"{module}.pre_quant_scale"),
            tensors.get(f"{module}.input_scale"),
        )
        self.scheme, self.dynamic = scheme, dynamic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.smooth is not None:
            x = x * self.smooth.float()
        if self.scheme == "int8_sq":
            assert self.step is not None
            x = torch.clamp(torch.round(x / self.step), -128, 127) * self.step
        if self.scheme in ("fp8", "w4a8_awq"):
            assert self.step is not None
            x = (x / self.step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * self.step
        if self.dynamic:
            x = DYNAMIC[self.scheme](x, self.step)
        return torch.nn.functional.linear(
            x, self.weight, None if self.bias is None else self.bias.float()
        )


def in_nvfp4(x: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
    """To the nearest value of FP4 by their list; of two equally near ones the even one."""
    assert step is not None
    blocks = x.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * step)).clamp(2**-9, 448).to(
        torch.float8_e4m3fn
    ).float() * step
    off = ((blocks / scale).clamp(-6, 6)[..., None] - FP4).abs()
    order = torch.arange(16) % 2 + 2 * off / off.amin(-1, keepdim=True).clamp(min=1e-30)
    return (
        FP4[torch.where(off == off.amin(-1, keepdim=True), order, 1e30).argmin(-1)] * scale
    ).flatten(-2)


def in_mxfp8(x: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).double() / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).float().flatten(-2)


def in_fp8(x: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def in_int8(x: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


DYNAMIC = {"nvfp4": in_nvfp4, "mxfp8": in_mxfp8, "fp8_token": in_fp8, "int8_token": in_int8}


def transformers_logits(case: Case, ids: Array, dynamic: bool = False) -> Array:
    """[S, V]"""
    model: Any = AutoModelForCausalLM.from_pretrained(
        case.source, dtype=torch.float32, attn_implementation="eager"
    )
    tensors = load_file(case.checkpoint / "model.safetensors")
    quantised = [
        name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")
    ]
    plain = {name: tensor.float() for name, tensor in tensors.items() if name in model.state_dict()}
    model.load_state_dict(
        {k: v for k, v in plain.items() if k.rpartition(".")[0] not in quantised}, strict=False
    )
    for module in quantised:
        parent, _, leaf = module.rpartition(".")
        setattr(
            model.get_submodule(parent), leaf, Rounded(tensors, module, case.row.scheme, dynamic)
        )
    logits, _ = reference.base_hidden_states(model.eval(), torch.from_numpy(ids)[None])
    found: Array = logits[0].numpy()
    return found


# Running the graph


def graph_logits(case: Case, label: str) -> Array:
    """The canonical graph's own answer to a golden call, on ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(str(case.graph), options, providers=["CPUExecutionProvider"])
    feeds = golden_feeds(case, session, label)
    logits: Array = session.run(["logits"], feeds)[0]
    return logits


def golden_feeds(case: Case, session: ort.InferenceSession, label: str) -> dict[str, Array]:
    golden = case.golden()
    config = ComponentConfig.read(case.exported.directory / "config.json")
    positions, mask = golden[f"{label}_positions"], golden[f"{label}_attention_mask"]
    cos, sin = RopeTable.of(config.rope, mask.shape[-1]).rows(positions[None])
    feeds: dict[str, Array] = {
        "inputs_embeds": golden[f"{label}_inputs_embeds"],
        "rope_cos": cos,
        "rope_sin": sin,
        "attention_mask": mask,
        "write_indices": np.zeros(1, np.int64),
        "gather_idx": np.arange(len(positions), dtype=np.int64)[None],
    }
    for value in session.get_inputs():
        if value.name.startswith("past_"):
            _, heads, _, dim = value.shape
            feeds[value.name] = np.zeros((1, heads, mask.shape[-1], dim), np.float32)
    return feeds


def dequantised_by_onnx(graph: onnx.GraphProto, product: onnx.NodeProto) -> Array:
    """What the nodes before a MatMul's second input are worth, [in, out]."""
    makers = {name: node for node in graph.node for name in node.output}

    def before(value: str) -> list[onnx.NodeProto]:
        node = makers.get(value)
        return [] if node is None else [*(n for name in node.input for n in before(name)), node]

    nodes = before(product.input[1])
    needed = {name for node in nodes for name in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    output = onnx.helper.make_tensor_value_info(product.input[1], onnx.TensorProto.FLOAT, None)
    alone = onnx.helper.make_graph(nodes, "weight", [], [output], initializers)
    model = onnx.helper.make_model(
        alone, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11
    )
    outputs: Any = ReferenceEvaluator(model).run(None, {})
    dequantized: Array = outputs[0]
    return dequantized


NODES = {"attn": "self_attn", "mlp": "mlp"}


def module_of(node: str) -> str:
    """layers.0/attn/q_proj -> model.layers.0.self_attn.q_proj"""
    if "/" not in node:
        return node
    layer, part, leaf = node.split("/")
    return f"model.{layer}.{NODES[part]}.{leaf}"


def quantised_products(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Stored module -> MatMul."""
    marked = [
        node
        for node in graph.node
        if any(prop.key == "edgespec.scheme" for prop in node.metadata_props)
    ]
    return {module_of(node.name): node for node in marked}


# Claims


def test_golden_logits_are_those_of_transformers_with_the_dequantised_weights(case: Case) -> None:
    golden = case.golden()
    wanted = transformers_logits(case, golden["prompt_ids"])
    found = golden["prompt_logits"][0]
    assert np.abs(found - wanted).max() <= case.row.tolerance * wanted.std()
    cosine = (found * wanted).sum() / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine >= (0.9999 if case.row.tolerance > EXACT else 1 - 1e-6)


def test_the_graphs_weights_are_worth_what_the_stored_bytes_are(case: Case) -> None:
    tensors = load_file(case.checkpoint / "model.safetensors")
    graph = onnx.load(case.graph).graph
    products = quantised_products(graph)
    assert len(products) == 14 + (case.name in HEADS)
    for module, product in products.items():
        dequantized = dequantised_by_onnx(graph, product)
        np.testing.assert_allclose(
            dequantized, unpacked(tensors, module).numpy().T, rtol=2e-7, atol=1e-12
        )


@representative
def test_the_graph_with_its_dequantize_nodes_gives_the_golden_logits(case: Case) -> None:
    if not case.row.runs:
        with pytest.raises(
            ort.capi.onnxruntime_pybind11_state.NotImplemented, match="DequantizeLinear"
        ):
            graph_logits(case, "prompt")
        return
    wanted = case.golden()["prompt_logits"]
    assert np.abs(graph_logits(case, "prompt") - wanted).max() <= case.row.tolerance * wanted.std()


def test_layer_by_layer_the_graph_gives_the_golden_logits(case: Case) -> None:
    golden = case.golden()
    wanted = golden["prompt_logits"][0]
    found = layer_by_layer(case.exported.directory, golden["prompt_ids"])
    assert np.abs(found - wanted).max() <= case.row.tolerance * wanted.std()


def test_quantized_values_keep_their_type_and_stand_as_tensorrt_wants_them(case: Case) -> None:
    graph = onnx.load(case.graph, load_external_data=False).graph
    product = quantised_products(graph)["model.layers.0.mlp.down_proj"]
    makers = {name: node for node in graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    node = makers[product.input[1]]
    turned = node.op_type == "Transpose"
    node = makers[node.input[0]] if turned else node
    assert node.op_type == "DequantizeLinear"
    assert turned == ("nvfp4" in case.row.scheme)
    values = tensors[node.input[0]]
    assert onnx.TensorProto.DataType.Name(values.data_type) == QUANTIZED[case.row.scheme][0]
    assert list(values.dims) == ([256, 384] if turned else [384, 256])
    attributes = {a.name: a.i for a in node.attribute}
    assert (attributes.get("axis"), attributes.get("block_size")) == QUANTIZED[case.row.scheme][1:]


QUANTIZED = {
    "fp8": ("FLOAT8E4M3FN", None, None),
    "fp8_block": ("FLOAT8E4M3FN", 0, 128),
    "fp8_token": ("FLOAT8E4M3FN", 1, None),
    "int4_awq": ("INT4", 0, 128),
    "w4a8_awq": ("INT4", 0, 128),
    "int8_sq": ("INT8", 1, None),
    "int8_token": ("INT8", 1, None),
    "int8_wo": ("INT8", 1, None),
    "nvfp4": ("FLOAT4E2M1", 1, 16),
    "w4a16_nvfp4": ("FLOAT4E2M1", 1, 16),
    "mxfp8": ("FLOAT8E4M3FN", 0, 32),
}


@representative
def test_small_scales_have_one_reader_each(case: Case) -> None:
    """One that many nodes share brings TensorRT down. A static scale has two: QuantizeLinear and
    DequantizeLinear."""
    graph = onnx.load(case.graph, load_external_data=False).graph
    scalars = {
        tensor.name
        for tensor in graph.initializer
        if "scale" in tensor.name and not list(tensor.dims)
    }
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in scalars & set(node.input):
            readers.setdefault(name, set()).add(
                node.name.removesuffix("/quantize").removesuffix("/dequantize")
            )
    shared = {
        name
        for name, nodes in readers.items()
        if len(nodes) > 1 and not name.startswith("attention_scale")
    }
    assert not shared


@representative
def test_config_and_notes_say_what_is_quantised(case: Case) -> None:
    settings, count = case.settings(), 14 + (case.name in HEADS)
    scheme = settings["schemes"][case.row.scheme]
    assert (list(settings["schemes"]), scheme["linears"]) == ([case.row.scheme], count)
    assert scheme["blocks"] == [size for size in QUANTIZED[case.row.scheme][2:] if size]
    assert settings["unquantised"] == ([] if case.name in HEADS else ["lm_head"])
    assert settings["lm_head"] == (case.row.scheme if case.name in HEADS else None)
    assert any(
        f"{count} Linears" in note and case.row.scheme in note for note in case.exported.notes
    )
    manifest = json.loads((case.exported.directory / "manifest.json").read_text())
    assert manifest["quantization"] == settings["schemes"]


@representative
def test_activations_that_only_backends_can_round_are_left_to_them_by_name(case: Case) -> None:
    scheme = case.settings()["schemes"][case.row.scheme]
    left = case.row.scheme in DYNAMIC
    assert scheme["activations_in_graph"] is not left
    graph = onnx.load(case.graph, load_external_data=False).graph
    tensors = load_file(case.checkpoint / "model.safetensors")
    for module, node in quantised_products(graph).items():
        props = {prop.key: prop.value for prop in node.metadata_props}
        assert ("edgespec.activations" in props) == left
        if case.row.scheme == "nvfp4":
            assert float(props["edgespec.input_scale"]) == float(tensors[f"{module}.input_scale"])
    rounds = any(node.op_type == "QuantizeLinear" for node in graph.node)
    assert rounds == (case.row.tolerance > EXACT)


# Engines


def engine_logits(case: Case, work: Path) -> Array:
    """Of the golden prompt, [S, V]. Our own kernels round FP4 activations to 8 bits."""
    limits = Limits(max_input_len=32, max_kv_cache_capacity=32)
    options = WeightFormat(kernels="onnxruntime") if case.row.scheme == "nvfp4" else None
    built = build(case.exported.directory, work / "engine", limits, options=options)
    assert built.weights.emulated in (None, "emulated: correctness only")
    runner, config = open_runner(work / "engine", built.role)
    prompt, _ = golden_calls(case.golden(), config.component.ropes)
    logits: Array = runner.run(prompt)[0].logits.rows().copy()
    runner.close()
    return logits


def test_an_engine_rounds_what_its_format_rounds(case: Case, tmp_path: Path) -> None:
    """A value between two quantized ones may fall to either side, and later tokens see it: some
    token shows the same values."""
    dynamic = case.row.scheme in DYNAMIC
    wanted = transformers_logits(case, case.golden()["prompt_ids"], dynamic)
    found = engine_logits(case, tmp_path)
    cosine = (found * wanted).sum() / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine >= (0.98 if case.row.scheme == "nvfp4" else 0.999)
    if case.row.scheme not in IN_8_BITS:
        assert np.abs(found - wanted).max(1).min() <= EXACT * wanted.std()
    if dynamic:
        plain = transformers_logits(case, case.golden()["prompt_ids"])
        assert np.abs(found - plain).max(1).min() > 50 * EXACT * wanted.std()


# What only some checkpoints have


def test_an_fp8_cache_is_recorded_and_not_applied(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    case = made("llama_fp8", ROWS["llama_fp8"], modelopt_exports, tokenizer, tmp_path)
    cache, tensors = case.settings()["kv_cache"], load_file(case.checkpoint / "model.safetensors")
    names = [
        (f"model.layers.{i}.self_attn.k_proj.k_scale", f"model.layers.{i}.self_attn.v_proj.v_scale")
        for i in (0, 1)
    ]
    wanted = [[float(tensors[key]), float(tensors[value])] for key, value in names]
    assert cache == {"type": "fp8", "scales": wanted, "in_graph": False}
    assert any("fp8 cache" in note and "not applied" in note for note in case.exported.notes)


def test_each_layer_of_a_mixture_has_its_own_scheme(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    case = made("mixed", Row("qwen3", "fp8"), modelopt_exports, tokenizer, tmp_path)
    schemes = case.settings()["schemes"]
    assert {name: row["linears"] for name, row in schemes.items()} == {"fp8": 8, "nvfp4": 6}
    tensors, graph = load_file(case.checkpoint / "model.safetensors"), onnx.load(case.graph).graph
    for module, product in quantised_products(graph).items():
        np.testing.assert_allclose(
            dequantised_by_onnx(graph, product), unpacked(tensors, module).numpy().T, rtol=2e-7
        )


def test_a_quantised_head_wins_over_a_flag_that_ties_it(
    modelopt_exports: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """ModelOpt leaves tie_word_embeddings as it was in the source."""
    shutil.copytree(modelopt_exports / "llama_int4_awq", tmp_path / "tied" / "llama_int4_awq")
    config = tmp_path / "tied" / "llama_int4_awq" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    case = made(
        "llama_int4_awq", ROWS["llama_int4_awq"], tmp_path / "tied", tokenizer, tmp_path / "work"
    )
    assert case.settings()["lm_head"] == "int4_awq"


# Made here: other layouts, and drafts


def int8_twin(plain: Path, out: Path) -> Path:
    """A copy in INT8 of ModelOpt's layout; `plain` itself gets the dequantized
    weights."""
    tensors = load_file(plain / "model.safetensors")
    packed, dequantized = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed_tokens" not in name:
            scale = tensor.abs().amax(1) / 127
            values = torch.round(tensor / scale[:, None]).to(torch.int8)
            packed[name], packed[f"{name}_scale"] = values, scale
            dequantized[name] = values.float() * scale[:, None]
    shutil.copytree(plain, out)
    save_file(packed, out / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors")
    settings = {
        "quant_algo": "W8A16",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["embed_tokens"],
    }
    (out / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    return out


def assert_equal_goldens(found: Exported, wanted: Exported) -> None:
    goldens = [load_file(made.directory / "golden.safetensors") for made in (found, wanted)]
    assert goldens[0].keys() == goldens[1].keys()
    for name, value in goldens[1].items():
        torch.testing.assert_close(goldens[0][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["modelopt", "specforge"])
def test_a_quantised_draft_is_the_draft_of_its_dequantised_weights(
    tmp_path: Path, layout: toys.DraftLayout
) -> None:
    """Its Linears in a branch of `If`, those that read two inputs, and names under `midlayer.`
    among them."""
    base = toys.make_base(tmp_path / "base", layers=7)
    plain = toys.make_draft(tmp_path / "plain", base, layout, own_embedding=True)
    quantised = int8_twin(plain, tmp_path / "quantised")
    options = ExportOptions(base_model_dir=str(base))
    found, wanted = (
        export(str(path), tmp_path / f"out-{path.name}", options) for path in (quantised, plain)
    )
    settings = json.loads((found.directory / "config.json").read_text())["quantization"]
    assert settings["schemes"]["int8_wo"]["linears"] == 9  # seven of the layer, fc and the head
    assert (settings["unquantised"], settings["lm_head"]) == ([], "int8_wo")
    assert_equal_goldens(found, wanted)


def test_a_draft_borrows_a_quantised_head(tmp_path: Path) -> None:
    plain_base = toys.make_base(tmp_path / "base", layers=7)
    base = int8_twin(plain_base, tmp_path / "int8_base")
    draft = toys.make_draft(tmp_path / "draft", base, "eagle", draft_vocab=None, own_head=False)
    found, wanted = (
        export(str(draft), tmp_path / f"out-{path.name}", ExportOptions(base_model_dir=str(path)))
        for path in (base, plain_base)
    )
    settings = json.loads((found.directory / "config.json").read_text())["quantization"]
    assert (settings["lm_head"], settings["schemes"]["int8_wo"]["linears"]) == ("int8_wo", 1)
    assert_equal_goldens(found, wanted)


def gptq_twin(plain: Path, out: Path) -> Path:
    """A copy in GPTQ's INT4 with groups in an order of their own; `plain` gets the dequantized
    weights."""
    tensors, generator, group = (
        load_file(plain / "model.safetensors"),
        torch.Generator().manual_seed(0),
        32,
    )
    packed, dequantized = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = tensor.shape
        groups = (torch.randperm(columns, generator=generator) // group).int()
        values = torch.randint(0, 16, (rows, columns), generator=generator).int()
        scales = torch.rand(columns // group, rows, generator=generator) * 0.01 + 0.01
        dequantized[name] = (values - 8) * scales.T[:, groups.long()]
        module = name.removesuffix(".weight")
        shifts = torch.arange(8, dtype=torch.int32) * 4
        del packed[name]
        packed |= {
            f"{module}.qweight": (values.T.reshape(columns // 8, 8, rows) << shifts[None, :, None])
            .sum(1)
            .int(),
            f"{module}.qzeros": (torch.full((columns // group, rows // 8, 8), 8).int() << shifts)
            .sum(-1)
            .int(),
            f"{module}.scales": scales,
            f"{module}.g_idx": groups,
        }
    shutil.copytree(plain, out)
    save_file(
        {name: tensor.contiguous() for name, tensor in packed.items()}, out / "model.safetensors"
    )
    save_file(dequantized, plain / "model.safetensors")
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "checkpoint_format": "gptq_v2",
    }
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return out


def test_an_export_is_found_again_until_the_settings_beside_the_config_change(
    tmp_path: Path,
) -> None:
    quantised = int8_twin(toys.make_base(tmp_path / "plain", layers=2), tmp_path / "int8")
    export(str(quantised), tmp_path / "out", ExportOptions(golden=False))
    assert (
        "already there"
        in export(str(quantised), tmp_path / "out", ExportOptions(golden=False)).notes[0]
    )
    settings = quantised / "hf_quant_config.json"
    settings.write_text(
        settings.read_text().replace('"kv_cache_quant_algo": null', '"kv_cache_quant_algo": "FP8"')
    )
    with pytest.raises(BundleError, match="the checkpoint has changed since"):
        export(str(quantised), tmp_path / "out", ExportOptions(golden=False))


def test_gptq_in_the_order_of_activations_is_the_base_of_its_weights(tmp_path: Path) -> None:
    plain = toys.make_base(tmp_path / "plain", "qwen2", layers=2)
    quantised = gptq_twin(plain, tmp_path / "gptq")
    found, wanted = (
        export(str(path), tmp_path / f"out-{path.name}", ExportOptions())
        for path in (quantised, plain)
    )
    assert_equal_goldens(found, wanted)
    case = Case(Row("qwen2", "int4_wo"), "gptq", quantised, plain, found)
    assert (case.settings()["layout"], case.settings()["schemes"]["int4_wo"]["blocks"]) == (
        "gptq",
        [32],
    )
    logits = case.golden()["prompt_logits"]
    assert np.abs(graph_logits(case, "prompt") - logits).max() <= EXACT * logits.std()


def test_a_scale_that_is_no_number_is_refused_by_its_name(tmp_path: Path) -> None:
    quantised = int8_twin(toys.make_base(tmp_path / "plain", layers=2), tmp_path / "int8")
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name][3] = float("nan")
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        export(str(quantised), tmp_path / "out", ExportOptions())
    assert not list((tmp_path / "out").rglob("*.*"))
