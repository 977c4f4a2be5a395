"""Hybrid bases lowered for TensorRT, against the canonical graph: both run by ONNX Runtime in
float32, with states and rows that travel from call to call as the contract says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec import bundle
from edgespec.backends.tensorrt.lowering import indexing, loops
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.component import ComponentConfig
from edgespec.contract import (
    GraphShape,
    conv_names,
    delta_names,
    past_names,
    present_names,
    state_names,
)
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


def target(max_rows: int = MAX_ROWS) -> Target:
    return Target(dialect=Dialect.NATIVE, compute="float32", capacity=CAPACITY, max_rows=max_rows)


def unrolled(model: ir.Model, max_rows: int = MAX_ROWS) -> None:
    for apply in (indexing.apply, loops.apply):
        apply(model, target(max_rows))


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
                cache = self.last[present].copy()
                end = self.length + len(kept)
                cache[:, :, self.length : end] = cache[:, :, self.length + kept]
                self.memory[past] = cache
        self.length += len(kept)


def zeros(*dims: int) -> Array:
    return np.zeros(dims, np.float32)


Change = Callable[[ir.Model], None]


class Case:
    """An exported hybrid, and what is made of its graph."""

    def __init__(self, onnx_dir: Path, work: Path) -> None:
        self.onnx_dir, self.work = onnx_dir, work
        self.shape = ComponentConfig.read(onnx_dir / bundle.CONFIG).graph
        self.canonical = Graph.open(onnx_dir / bundle.MODEL, self.shape)

    def model(self) -> ir.Model:
        return ir.load(self.onnx_dir / bundle.MODEL)

    def lowered(self, *changes: Change) -> Graph:
        model = self.model()
        for change in changes:
            change(model)
        out = self.work / f"{len(list(self.work.iterdir()))}"
        shutil.copytree(self.onnx_dir, out)
        ir.save(model, out / bundle.MODEL)
        return Graph.open(out / bundle.MODEL, self.shape)


@pytest.fixture(scope="module", params=ROWS)
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


def difference(found: list[Outputs], wanted: list[Outputs]) -> float:
    """The largest, relative to the largest value of its output."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name].shape == value.shape
            reach = max(float(np.abs(value).max()), 1e-6)
            # a NaN stays a NaN
            worst = float(np.maximum(worst, np.abs(one[name] - value).max() / reach))
    return worst


def test_the_unrolled_loop_gives_the_same_bits(case: Case) -> None:
    """In calls of one row up to the largest one, trees among them."""
    found, wanted = calls(case.lowered(unrolled)), calls(case.canonical)
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


def test_no_operator_is_left_that_the_parser_refuses(case: Case) -> None:
    model = case.model()
    before = {node.op_type for node in model.graph.all_nodes()}
    assert before >= {"EyeLike", "Compress", "Loop"}
    unrolled(model)
    after = {node.op_type for node in model.graph.all_nodes()}
    assert not after & {"EyeLike", "Compress", "Loop", "If"}
