"""The native dialect against the canonical graph, both run by ONNX Runtime on the CPU.

Every kind of graph takes the same calls twice: a prompt, a chain, a tree of which a path is
committed, and what follows. What a device has to be told beside the graph stands in
`tests.tensorrt_on_ort`.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgespec.backends.rewriting import Constants
from edgespec.backends.tensorrt.lowering import PASSES, conditionals, lower, masks
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.errors import ContractError
from tests.parity.other_forms import Tamper, first
from tests.parity.tensorrt_calls import (
    LANES,
    difference,
    lowered_runner,
    outputs,
    rounded_runner,
    runner_of,
    wanted,
)
from tests.parity.tensorrt_graphs import (
    BASES,
    CAPACITY,
    DRAFTS,
    KINDS,
    MAX_ROWS,
    Canonical,
    canonical,
)
from tests.tensorrt_on_ort import GraphRunner, as_bytes, open_session

NAMES: dict[Compute, str] = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}
EQUAL = 1e-5  # relative to the largest value of an output


def target(compute: Compute) -> Target:
    return Target(dialect=Dialect.NATIVE, compute=compute, capacity=CAPACITY, max_rows=MAX_ROWS)


GRAPHS = BASES | DRAFTS  # hybrids: test_tensorrt_hybrid
WITHOUT_HYBRIDS = [
    name if name in KINDS else pytest.param(name, marks=pytest.mark.deep) for name in GRAPHS
]


@pytest.fixture(scope="module", params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Canonical:
    return canonical(request.param)


# ---- passes


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [(conditionals, "eagle3", "If"), (masks, "qwen2", "a mask that is added")],
    ids=["conditionals", "masks"],
)
def test_a_pass_that_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, why: str
) -> None:
    passes = tuple(one for one in PASSES[Dialect.NATIVE] if one is not module.apply)
    monkeypatch.setitem(PASSES, Dialect.NATIVE, passes)
    graph = canonical(name)
    with pytest.raises(ContractError, match=why):
        lower(graph.model(), graph.contract, target("bfloat16"))


# ---- equal to the canonical graph


@pytest.mark.parametrize(
    ("lanes", "apart"), [pytest.param(1, 0, marks=pytest.mark.deep), (LANES, 3)], ids=["one", "two"]
)
def test_a_native_graph_equals_its_canonical_one(graph: Canonical, lanes: int, apart: int) -> None:
    steps, expected = wanted(graph, lanes, apart)
    found = outputs(lowered_runner(graph, Dialect.NATIVE, "float32", lanes), steps)
    assert difference(found, expected) < EQUAL


# Largest relative difference of an output or of a row of the cache that a half type may make on
# these random weights; measured: 2.9e-3 and 2.9e-2
HALVES: dict[Compute, float] = {"float16": 5e-3, "bfloat16": 5e-2}


@pytest.mark.parametrize("graph", WITHOUT_HYBRIDS, indirect=True)
@pytest.mark.parametrize("compute", HALVES)
def test_in_half_precision_it_is_within_roundings(graph: Canonical, compute: Compute) -> None:
    steps, expected = wanted(graph)
    found = outputs(rounded_runner(graph, Dialect.NATIVE, compute), steps)
    assert EQUAL < difference(found, expected) < HALVES[compute]


@pytest.mark.parametrize("compute", ["float32", *HALVES])
def test_it_is_valid_onnx_of_one_type_a_node(graph: Canonical, compute: Compute) -> None:
    """Strict inference by ONNX itself, which knows nothing of `precision`; and what was declared
    of inputs and outputs is what inference finds."""
    model = graph.lowered(Dialect.NATIVE, compute)
    onnx.checker.check_model(as_bytes(model), full_check=True)


# ---- what TensorRT takes


@pytest.mark.parametrize("compute", ["float32", *HALVES])
def test_all_layers_add_one_mask_of_the_compute_type(graph: Canonical, compute: Compute) -> None:
    model = graph.lowered(Dialect.NATIVE, compute)
    masks = [value for value in model.graph.inputs if "attention_mask" in (value.name or "")]
    wheres = [node for node in model.graph if node.inputs[0] in masks]
    assert [node.op_type for node in wheres] == len(masks) * ["Where"]
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    assert len(attentions) == graph.contract.shape.num_layers
    read = {node.inputs[3] for node in attentions}
    assert read == {node.outputs[0] for node in wheres}
    assert {value.dtype for value in read} <= {ir.DataType[NAMES[compute]]}


@pytest.mark.parametrize("compute", HALVES)
def test_products_and_caches_are_in_the_compute_type_and_logits_are_not(
    graph: Canonical, compute: Compute
) -> None:
    model, half = graph.lowered(Dialect.NATIVE, compute), ir.DataType[NAMES[compute]]
    kept = [
        node.name
        for node in model.graph
        if node.op_type in ("MatMul", "TensorScatter", "Attention")
        and {value.dtype for value in node.outputs} != {half}
    ]
    # aux hidden states of 2e4 and more are known, and a router decides which experts are computed:
    # export marks their products
    routers = [name for node in model.graph if (name := str(node.name)).endswith("mlp/router")]
    assert kept == (["context/fc"] if graph.contract.shape.block else routers)
    given = {value.name: value.dtype for value in model.graph.outputs}
    assert given.pop("logits") == ir.DataType.FLOAT
    assert set(given.values()) <= {half}


@pytest.mark.parametrize("compute", ["float32", *HALVES])
def test_a_weight_is_cast_once_and_from_what_is_stored(graph: Canonical, compute: Compute) -> None:
    """And no weight is written anew: the graph refers to the bytes of the export."""
    model = graph.lowered(Dialect.NATIVE, compute)
    stored = [value for value in model.graph.initializers.values() if is_external(value)]
    assert {at(value) for value in stored} == {
        at(value) for value in graph.model().graph.initializers.values() if is_external(value)
    }
    for value in stored:
        readers = [node for node, _ in value.uses()]
        casts = [node for node in readers if node.op_type == "Cast"]
        assert len({node.attributes["to"].as_int() for node in casts}) == len(casts)
        for cast in casts:
            assert all(node.op_type != "Cast" for node, _ in cast.outputs[0].uses())


def is_external(value: ir.Value) -> bool:
    return isinstance(value.const_value, ir.ExternalTensor)


def at(value: ir.Value) -> tuple[str, int | None]:
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return tensor.location, tensor.offset


# ---- faults


def queries_that_are_not_scaled(model: ir.Model) -> None:
    node = first(model, "Mul", "/q/scale")
    node.outputs[0].replace_all_uses_with(node.inputs[0])


def mask_that_hides_too_little(model: ir.Model) -> None:
    """3 taken from the score of a slot that may not be seen."""
    where = first(model, "Where", "attention_mask")
    never = where.inputs[2]
    assert never is not None
    little = np.array(-3.0, np.float32)
    where.replace_input_with(2, Constants(model.graph)("tampered/little", little))


def mask_that_is_turned(model: ir.Model) -> None:
    where = first(model, "Where", "attention_mask")
    seen, hidden = where.inputs[1:]
    where.replace_input_with(1, hidden)
    where.replace_input_with(2, seen)


def keys_that_are_not_rotated(model: ir.Model) -> None:
    node = first(model, "RotaryEmbedding", "/k/rope")
    node.outputs[0].replace_all_uses_with(node.inputs[0])


def rows_of_values_one_slot_late(model: ir.Model) -> None:
    node = first(model, "TensorScatter", "/v/cache")
    one = Constants(model.graph)("tampered/one", np.array([1], np.int64))
    later = ir.node("Add", [node.inputs[2], one], name="tampered/later")
    model.graph.insert_before(node, later)
    node.replace_input_with(2, later.outputs[0])


def the_other_hidden_states(model: ir.Model) -> None:
    where = first(model, "Where", "fuse/choose")
    base, own = where.inputs[1:]
    where.replace_input_with(1, own)
    where.replace_input_with(2, base)


FAULTS: dict[str, tuple[Tamper, str]] = {
    fault.__name__: (fault, graph)
    for fault, graph in (
        (mask_that_hides_too_little, "qwen2"),
        (mask_that_is_turned, "gemma3"),
        (queries_that_are_not_scaled, "llama-biases"),
        (keys_that_are_not_rotated, "phi3"),
        (rows_of_values_one_slot_late, "dflash"),
        (the_other_hidden_states, "eagle3-two-layers"),
    )
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_beyond_every_bound(name: str) -> None:
    fault, of = FAULTS[name]
    graph = canonical(of)
    steps, expected = wanted(graph)
    model = graph.lowered(Dialect.NATIVE, "float32").clone()
    fault(model)
    runner = runner_of(graph, Dialect.NATIVE, "float32", open_session(model))
    assert difference(outputs(runner, steps), expected) > 2 * max(EQUAL, *HALVES.values())


# ---- numbers beyond float16


def with_large_products(graph: Canonical) -> ir.Model:
    """The canonical graph with a layer whose gated product goes to some 1e6, and a `down_proj` that
    takes most of it back, in numbers that float16 has."""
    model = graph.model()
    ir.external_data.load_to_model(model)
    for part, factor in (("up_proj", 1e4), ("gate_proj", 3e1), ("down_proj", 1e-2)):
        value = model.graph.initializers[f"model.layers.1.mlp.{part}.weight"]
        stored = value.const_value
        assert stored is not None
        value.const_value = ir.tensor(stored.numpy() * np.float32(factor), name=value.name)
    return model


def test_a_gated_product_beyond_float16_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = canonical("mistral-window")
    steps, _ = wanted(graph)
    exact = GraphRunner(
        open_session(with_large_products(graph)), graph.contract, CAPACITY, CAPACITY
    )
    expected = outputs(exact, steps)

    def found() -> list[np.ndarray]:
        model = lower(with_large_products(graph), graph.contract, target("float16"))
        return outputs(rounded_runner(graph, Dialect.NATIVE, "float16", model), steps)

    assert difference(found(), expected) < HALVES["float16"]
    monkeypatch.setattr("edgespec.backends.tensorrt.lowering.gated_products.SHIFT", 1.0)
    assert not all(np.isfinite(array).all() for array in found())
