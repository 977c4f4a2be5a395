"""Activations rounded in the graph: each format against ModelOpt's own or against torch, and rows
for themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec.backends.ort import emulate
from edgespec.backends.ort.emulate import FORMATS, Emulation, Rounding, prove
from edgespec.backends.ort.probe import probe_graph, run_probe
from edgespec.backends.rewriting import Constants, Nodes
from edgespec.contract import ACTIVATIONS, INPUT_SCALE, SCHEME
from edgespec.errors import BuildError, ContractError
from edgespec.quantization.schemes import SCHEMES

Floats = NDArray[np.float32]
GLOBAL_SCALES = (1e-4, 0.0123, 3.0)


def rounding(name: str, global_scale: float = 0.0123) -> Rounding:
    return Rounding(SCHEMES[name], np.float32(global_scale) if name == "nvfp4" else None)


def rounded(x: Floats, how: Rounding) -> Floats:
    """By ONNX Runtime."""
    value = ir.Value(name="x")
    end = ir.node("Identity", [value], name="end")
    graph = probe_graph(end, value, x.shape[1], x.shape[1])
    end.replace_input_with(
        0, FORMATS[how.scheme.name].nodes(Nodes(end, Constants(graph)), value, how)
    )
    return run_probe(graph, x)


def rows(count: int) -> Floats:
    """Each ten times as loud as the one before it."""
    normal = np.random.default_rng(0).standard_normal((count, 128))
    return (normal * 10.0 ** (np.arange(count)[:, None] % 8 - 4)).astype(np.float32)


def test_all_dynamic_activations_have_a_format() -> None:
    assert {name for name, row in SCHEMES.items() if row.activations.startswith("dynamic")} == set(
        FORMATS
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", *(f"nvfp4/{scale}" for scale in GLOBAL_SCALES)])
def test_blocks_are_rounded_to_the_values_that_modelopt_packs(
    modelopt_exports: Path, name: str
) -> None:
    """Normal values, outliers, all exponents, values between two quantized ones, blocks of zeros
    and subnormal values."""
    kept = load_file(modelopt_exports / "activations.safetensors")
    scheme, _, scale = name.partition("/")
    np.testing.assert_array_equal(
        rounded(kept["x"], rounding(scheme, float(scale or 0))), kept[name]
    )


@pytest.mark.slow
def test_rows_are_rounded_to_the_values_of_modelopts_fake_quantiser(modelopt_exports: Path) -> None:
    """ModelOpt multiplies by a scale where this divides: the last bit, and what lies between two
    values, may differ. Rows below 2**-24 are nothing to it."""
    kept = load_file(modelopt_exports / "activations.safetensors")
    x, wanted = kept["x"][:80], kept["fp8_token"][:80]
    found, between = rounded(x, rounding("fp8_token")), slice(48, 64)
    far = np.abs(found - wanted) > 1e-6 * np.abs(wanted)
    assert far[between].mean() < 0.1
    assert np.abs(found - wanted)[between].max() <= 6 * 32 / 448 * 1.001  # the widest step
    far[between] = False
    assert not far.any()


def test_int8_rows_are_rounded_as_torch_does_it() -> None:
    x = torch.from_numpy(rows(16))
    scale = x.abs().amax(1, keepdim=True) / 127
    wanted = torch.fake_quantize_per_channel_affine(
        x, scale[:, 0], torch.zeros(16, dtype=torch.int32), 0, -127, 127
    )
    # torch multiplies by the inverse of the scale
    assert (rounded(x.numpy(), rounding("int8_token")) != wanted.numpy()).mean() < 0.001


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_rounded_alike_in_any_company(name: str) -> None:
    x = rows(20)
    together = rounded(x, rounding(name))
    for count in range(1, 21):
        np.testing.assert_array_equal(
            rounded(x[20 - count :], rounding(name)), together[20 - count :]
        )


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name: str) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 63] = 1
    np.testing.assert_array_equal(rounded(x, rounding(name))[:, :32], x[:, :32])


def test_what_is_beyond_the_global_scale_saturates() -> None:
    x = np.full((1, 16), 1e9, np.float32)
    np.testing.assert_array_equal(
        rounded(x, rounding("nvfp4", 0.5)), np.full((1, 16), 6 * 448 * 0.5, np.float32)
    )


# In a graph


def graph_of(*products: tuple[str, float]) -> ir.Graph:
    """MatMuls that read one input, by scheme and global scale."""
    x = ir.Value(name="x")
    nodes = []
    for i, (scheme, scale) in enumerate(products):
        node = ir.node("MatMul", [x, ir.Value(name=f"w{i}")], name=f"product{i}")
        node.metadata_props.update(
            {SCHEME: scheme, ACTIVATIONS: SCHEMES[scheme].activations, INPUT_SCALE: repr(scale)}
        )
        nodes.append(node)
    return ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, name="graph")


def emulated(graph: ir.Graph) -> list[ir.Node]:
    emulation = Emulation(graph)
    for node in [node for node in graph if node.op_type == "MatMul"]:
        emulation.round_input(node, SCHEMES[node.metadata_props[SCHEME]])
    return [node for node in graph if node.op_type == "ReduceMax"]


@pytest.mark.parametrize(
    ("products", "count"),
    [
        ([("nvfp4", 0.5), ("nvfp4", 0.5), ("nvfp4", 0.5)], 1),
        ([("nvfp4", 0.5), ("nvfp4", 0.25)], 2),
        ([("nvfp4", 0.5), ("mxfp8", 0.5), ("fp8_token", 0.5)], 3),
    ],
)
def test_linears_share_a_rounding_of_the_same_settings(
    products: list[tuple[str, float]], count: int
) -> None:
    graph = graph_of(*products)
    assert len(emulated(graph)) == count
    assert all(node.inputs[0] is not graph.inputs[0] for node in graph if node.op_type == "MatMul")


def test_a_product_whose_activations_are_rounded_already_stays() -> None:
    graph = graph_of(("mxfp8", 1.0))
    (node,) = graph
    del node.metadata_props[ACTIVATIONS]
    assert emulated(graph) == []
    assert list(graph) == [node]


def test_a_product_that_lacks_its_global_scale_is_refused_by_its_name() -> None:
    graph = graph_of(("nvfp4", 1.0))
    del next(iter(graph)).metadata_props[INPUT_SCALE]
    with pytest.raises(ContractError, match="product0: activations of nvfp4"):
        emulated(graph)


# Broken ones


def away_from_zero(make: Nodes, x: ir.Value, how: Rounding) -> ir.Value:
    """Halves to the next larger one instead of the even one."""
    scale = emulate.row_scale(make, x, emulate.INT8_MAX)
    units = make("Add", make("Div", x, scale, label="units"), 0.5, label="half")
    return make("Mul", make("Floor", units, label="values"), scale, label="dequantized")


def one_step_finer(make: Nodes, x: ir.Value, how: Rounding) -> ir.Value:
    return emulate.nvfp4_nodes(
        make, x, replace(how, global_scale=how.outer_scale * np.float32(1.01))
    )


def blocks_of_64(make: Nodes, x: ir.Value, how: Rounding) -> ir.Value:
    return emulate.mxfp8_nodes(make, x, replace(how, scheme=replace(how.scheme, block=64)))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("int8_token", away_from_zero), ("nvfp4", one_step_finer), ("mxfp8", blocks_of_64)],
)
def test_a_format_that_computes_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    prove(rounding(name))
    monkeypatch.setitem(FORMATS, name, replace(FORMATS[name], nodes=fault))
    with pytest.raises(BuildError, match=f"activations of {name} are rounded to other values here"):
        prove(rounding(name))
