"""Hybrid bases lowered for TensorRT, against the canonical graph: both run by ONNX Runtime in
float32, with states and rows that travel from call to call as the contract says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.rewriting import replace_output
from edgespec.backends.tensorrt.lowering import indexing, loops, lower, recurrence
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import (
    GraphShape,
    canonical_contract,
    conv_names,
    delta_names,
    past_names,
    present_names,
    state_names,
)
from edgespec.errors import ContractError
from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.parity.test_bases import random_tree

Array = NDArray[Any]
Outputs = dict[str, Array]

CAPACITY = 160
MAX_ROWS = 64
TOLERANCE = 1e-5  # of an output's largest value

ROWS: dict[str, dict[str, Any]] = {
    "four-layers": {},
    "four-value-heads-a-key": {"key_heads": 1, "value_heads": 4},
    "short-convolution": {"conv_kernel": 2},
}


DIALECTS = list(Dialect)
Change = Callable[[ir.Model], None]


def target(
    max_rows: int = MAX_ROWS,
    dialect: Dialect = Dialect.NATIVE,
    compute: Compute = "float32",
) -> Target:
    return Target(dialect=dialect, compute=compute, capacity=CAPACITY, max_rows=max_rows)


def unrolled(model: ir.Model, max_rows: int = MAX_ROWS) -> None:
    for apply in (indexing.apply, loops.apply):
        apply(model, target(max_rows))


def widened(model: ir.Model) -> None:
    """The same values in float32, each rounded where the graph has it in half precision: ONNX
    Runtime has few kernels for that. Inputs and outputs are float32 then."""
    graph, wide = model.graph, ir.DataType.FLOAT
    made = [(value, None) for value in (*graph.inputs, *graph.initializers.values())]
    made += [(value, node) for node in graph for value in node.outputs]
    for value, node in made:
        narrow, readers = value.dtype, list(value.uses())
        if narrow not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        kept = value.is_initializer() or (node is not None and node.op_type == "Cast")
        casts = []
        for to in (wide,) if kept else (narrow, wide):
            source = casts[-1].outputs[0] if casts else value
            casts.append(ir.node("Cast", [source], {"to": int(to)}, name=f"{value.name}/{to.name}"))
            casts[-1].outputs[0].name = f"{casts[-1].name}:0"
        if node is None:
            graph.insert_before(graph[0], casts)
        else:
            graph.insert_after(node, casts)
        for reader, index in readers:
            reader.replace_input_with(index, casts[-1].outputs[0])
        if not kept:
            value.type = ir.TensorType(wide)
        if value.is_graph_output():
            replace_output(graph, value, casts[-1].outputs[0])
            value.type = ir.TensorType(narrow if kept else wide)
            casts[-1].outputs[0].type = ir.TensorType(wide)


@dataclass
class Graph:
    """A graph in ONNX Runtime, with one sequence's memory; `accept` keeps rows of the last call."""

    session: ort.InferenceSession
    shape: GraphShape
    length: int = 0
    memory: Outputs = field(default_factory=dict)
    last: Outputs = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, shape: GraphShape) -> Graph:
        graph = cls(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]), shape)
        graph.reset()
        return graph

    def reset(self) -> None:
        """An empty sequence; before it, no row is in the cache, and none is pending."""
        sizes, kv = self.shape.recurrent, (1, self.shape.num_kv_heads, CAPACITY)
        assert sizes is not None
        self.length, self.memory = 0, {}
        for layer in range(self.shape.num_layers):
            if layer not in sizes.layers:
                for name in past_names(layer):
                    self.memory[name] = zeros(*kv, self.shape.head_dim)
                continue
            conv, state = conv_names(layer)[0], state_names(layer)[0]
            self.memory[conv] = zeros(1, sizes.conv_kernel - 1, sizes.conv_width)
            self.memory[state] = zeros(1, *sizes.state_dims)
            self.memory[delta_names(layer)[0]] = zeros(1, 1, sizes.row_width)

    def run(self, path: Array, seed: int) -> Outputs:
        """A call over rows [S] with random embeddings; `path` [S, S] says what each follows."""
        rows, rng = len(path), np.random.default_rng(seed)
        visible = np.zeros((1, 1, rows, CAPACITY), bool)
        visible[..., : self.length] = True
        visible[0, 0, :, self.length : self.length + rows] = path
        half = self.shape.rotary_dim // 2
        angles = (self.length + path.sum(1) - 1)[None, :, None] / 10.0 ** np.arange(half)
        feeds = self.memory | {
            "inputs_embeds": rng.standard_normal((1, rows, self.shape.hidden_size)),
            "rope_cos": np.cos(angles),
            "rope_sin": np.sin(angles),
            "attention_mask": visible,
            "write_indices": np.array([self.length]),
            "gather_idx": np.arange(rows)[None],
            "tree_mask": path[None],
        }
        kinds = {"tensor(float)": np.float32, "tensor(bool)": np.bool_, "tensor(int64)": np.int64}
        wanted = {i.name: feeds[i.name].astype(kinds[i.type]) for i in self.session.get_inputs()}
        names = [o.name for o in self.session.get_outputs()]
        self.last = dict(zip(names, self.session.run(None, wanted), strict=True))
        return self.last

    def accept(self, kept: Array) -> None:
        """Keep the rows `kept` of the last call, one path, for the next one."""
        sizes = self.shape.recurrent
        assert sizes is not None
        for layer in range(self.shape.num_layers):
            if layer in sizes.layers:
                conv, rows = conv_names(layer)
                series = np.concatenate([self.memory[conv], self.last[rows][:, kept]], axis=1)
                self.memory[conv] = series[:, -(sizes.conv_kernel - 1) :]
                pending, rows = delta_names(layer)
                self.memory[pending] = self.last[rows][:, kept]
                before, after = state_names(layer)
                self.memory[before] = self.last[after]
                continue
            for past, present in zip(past_names(layer), present_names(layer), strict=True):
                cache, first = self.last[present], self.length
                if cache.shape[2] != CAPACITY:  # this call's rows alone
                    cache, new = self.memory[past].copy(), cache
                    cache[:, :, first : first + new.shape[2]] = new
                end = self.length + len(kept)
                cache[:, :, first:end] = cache[:, :, first + kept]
                self.memory[past] = cache
        self.length += len(kept)


def zeros(*dims: int) -> Array:
    return np.zeros(dims, np.float32)


class Case:
    """An exported hybrid, and what is made of its graph."""

    def __init__(self, onnx_dir: Path, work: Path) -> None:
        self.onnx_dir, self.work = onnx_dir, work
        self.shape = ComponentConfig.read(onnx_dir / file_names.CONFIG).graph
        self.canonical = Graph.open(onnx_dir / file_names.MODEL, self.shape)

    @cached_property
    def wanted(self) -> list[Outputs]:
        """What the canonical graph gives to `calls`."""
        return calls(self.canonical)

    def model(self) -> ir.Model:
        return ir.load(self.onnx_dir / file_names.MODEL)

    def lowered(self, dialect: Dialect, compute: Compute = "float32", *changes: Change) -> Graph:
        """The whole of lowering, and what `changes` make of its result."""
        contract = canonical_contract(self.shape)

        def whole(model: ir.Model) -> None:
            lower(model, contract, target(MAX_ROWS, dialect, compute))

        return self.changed(whole, *changes, widened)

    def changed(self, *changes: Change) -> Graph:
        model = self.model()
        for change in changes:
            change(model)
        out = self.work / f"{len(list(self.work.iterdir()))}"
        shutil.copytree(self.onnx_dir, out)
        ir.save(model, out / file_names.MODEL)
        return Graph.open(out / file_names.MODEL, self.shape)


ROWS_AND_DEEP = [*list(ROWS)[:2], pytest.param("short-convolution", marks=pytest.mark.deep)]


@pytest.fixture(scope="module", params=ROWS_AND_DEEP)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    work = tmp_path_factory.mktemp(request.param)
    checkpoint = toys.make_qwen3_5(work / "base", **ROWS[request.param])
    options = ExportOptions(base_for="eagle3", aux_layers=(1, 2, 4), golden=False)
    (onnx_dir,) = made.exported(checkpoint, options).iterdir()
    (work / "lowered").mkdir()
    return Case(onnx_dir, work / "lowered")


def chain(rows: int) -> Array:
    return np.tri(rows, dtype=bool)


def calls(graph: Graph) -> list[Outputs]:
    """A prompt of several calls, a tree, one row, a tree of which a path was accepted, and a
    chunk of the largest size after it."""
    graph.reset()
    tree = random_tree(0)
    path = np.flatnonzero(tree.mask[len(tree) - 1])
    steps: list[tuple[Array, Array]] = [
        (chain(1), np.arange(1)),
        (chain(7), np.arange(7)),
        (tree.mask, path),
        (chain(1), np.arange(1)),
        (tree.mask, path[:1]),
        (chain(MAX_ROWS), np.arange(MAX_ROWS)),
        (chain(33), np.arange(33)),
    ]
    found = []
    for seed, (mask, kept) in enumerate(steps):
        found.append(graph.run(mask, seed))
        graph.accept(kept)
    return found


def difference(found: list[Outputs], wanted: list[Outputs], *prefixes: str) -> float:
    """The largest, relative to the largest value of its output. Caches are compared by what later
    calls make of them: the rows of a call that nobody keeps may lie anywhere."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if name.startswith(("present_key", "present_value")):
                continue
            assert one[name].shape == value.shape
            reach = max(float(np.abs(value).max()), 1e-6)
            if not prefixes or name.startswith(prefixes):
                # a NaN stays a NaN
                worst = float(np.maximum(worst, np.abs(one[name] - value).max() / reach))
    return worst


def test_the_unrolled_loop_gives_the_same_bits(case: Case) -> None:
    """In calls of one row up to the largest one, trees among them."""
    found, wanted = calls(case.changed(unrolled)), case.wanted
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_lowered_hybrid_is_the_canonical_one(case: Case, dialect: Dialect) -> None:
    """Prompts in calls of several sizes, trees, and what follows a part of a tree."""
    found, wanted = calls(case.lowered(dialect)), case.wanted
    assert difference(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_operator_is_left_that_the_parser_refuses(case: Case, dialect: Dialect) -> None:
    model = case.model()
    before = {node.op_type for node in model.graph.all_nodes()}
    assert before >= {"EyeLike", "Compress", "Loop"}
    lower(model, canonical_contract(case.shape), target(MAX_ROWS, dialect))
    after = {node.op_type for node in model.graph.all_nodes()}
    assert not after & {"EyeLike", "Compress", "Loop", "If"}


# ---- what would go wrong


def level_less(model: ir.Model) -> None:
    unrolled(model, MAX_ROWS // 2)


def first_level_twice(model: ir.Model) -> None:
    """Each layer's second level with the first level's mask."""
    unrolled(model)
    for node in model.graph:
        if node.name and node.name.endswith("/level/1/below"):
            (first,) = [
                other
                for other in model.graph
                if other.name == node.name.replace("/level/1/", "/level/0/")
            ]
            node.replace_input_with(1, first.inputs[1])


def unit_beside_the_diagonal(model: ir.Model) -> None:
    unrolled(model)
    (same,) = [node for node in model.graph if str(node.name).endswith("rows/itself/range/same")]
    make = ir.node("Greater", list(same.inputs), name="planted")
    make.outputs[0].name = "planted:0"
    model.graph.insert_before(same, make)
    same.outputs[0].replace_all_uses_with(make.outputs[0])


@pytest.mark.parametrize(
    "fault", [level_less, first_level_twice, unit_beside_the_diagonal], ids=lambda f: f.__name__
)
def test_a_fault_in_the_levels_is_noticed(case: Case, fault: Change) -> None:
    found, wanted = calls(case.changed(fault)), case.wanted
    assert difference(found, wanted) > 100 * TOLERANCE


def test_a_level_less_does_for_calls_of_half_the_rows(case: Case) -> None:
    """So that the count of levels is the least that is right."""
    found, wanted = case.changed(level_less), case.canonical
    for graph in (found, wanted):
        graph.reset()
    half = chain(MAX_ROWS // 2)
    assert difference([found.run(half, 0)], [wanted.run(half, 0)]) == 0
    one_more = chain(MAX_ROWS // 2 + 1)
    assert difference([found.run(one_more, 0)], [wanted.run(one_more, 0)]) > TOLERANCE


def test_one_row_a_call_needs_no_level(case: Case) -> None:
    found = case.changed(lambda model: unrolled(model, 1))
    wanted = case.canonical
    for graph in (found, wanted):
        graph.reset()
    for seed in range(3):
        assert difference([found.run(chain(1), seed)], [wanted.run(chain(1), seed)]) == 0
        for graph in (found, wanted):
            graph.accept(np.arange(1))


def test_more_rows_than_the_graph_has_masks_for_are_refused(case: Case) -> None:
    with pytest.raises(ContractError, match="calls of at most 65536 rows"):
        unrolled(case.model(), 65537)


# ---- half precision

# Largest relative RMS error of states and of logits, against float32
BOUNDS: dict[Compute, tuple[float, float]] = {
    "float16": (0.0035, 0.006),
    "bfloat16": (0.025, 0.05),
}


def rms(found: list[Outputs], wanted: list[Outputs], prefix: str) -> float:
    """The error of all outputs of these names, relative to their own RMS."""
    pairs = [
        (one[name], value)
        for one, other in zip(found, wanted, strict=True)
        for name, value in other.items()
        if name.startswith(prefix)
    ]
    error = sum(float(np.square(one - value).sum()) for one, value in pairs)
    return float(np.sqrt(error / sum(float(np.square(value).sum()) for _, value in pairs)))


@pytest.mark.parametrize("case", ["four-value-heads-a-key"], indirect=True)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("compute", ["float16", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_half_precision_stays_near_float32(case: Case, compute: Compute, dialect: Dialect) -> None:
    found, wanted = calls(case.lowered(dialect, compute)), case.wanted
    states, logits = BOUNDS[compute]
    assert rms(found, wanted, "present_recurrent_state") < states
    assert rms(found, wanted, "logits") < logits


@pytest.mark.parametrize("case", ["four-value-heads-a-key"], indirect=True)
@pytest.mark.parametrize("compute", ["float16", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_products_of_recurrent_layers_are_not_rounded(
    case: Case, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded as other products are, they move states beyond the bound."""
    monkeypatch.setattr(recurrence, "keep_float32", lambda node: None)
    found, wanted = calls(case.lowered(Dialect.NATIVE, compute)), case.wanted
    assert rms(found, wanted, "present_recurrent_state") > BOUNDS[compute][0]
