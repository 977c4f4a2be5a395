"""How far graphs that are lowered for TensorRT stand from the golden outputs of their export, on
the CPU: each value is rounded to the compute type, and computed in float32.

Knows exports, lowering, and faults that are planted in what a graph is given and gives. Knows no
bound: `backends/tensorrt/accuracy.py` has those that were set from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.base import AccuracySpec
from edgespec.backends.golden import CALLS, cosine, golden_calls, keep_prompt, outputs
from edgespec.backends.golden_file import Golden, read_golden
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.lowering import lower
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import GraphContract, canonical_contract
from tests.tensorrt_on_ort import GraphRunner, open_session, widened
from tests.tensorrt_operators import OPERATORS

Array = NDArray[Any]
SLOTS, MAX_ROWS = 40, 32
NAMES: dict[Compute, str] = {"float16": "FLOAT16", "bfloat16": "BFLOAT16"}
FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True, slots=True)
class Distance:
    """Of outputs from golden ones: the largest difference relative to the largest value, the root
    mean square relative to that of the golden output, what the cosine lacks of 1, and how far the
    size along the golden output is from 1; each the worst of all."""

    largest: float = 0.0
    rms: float = 0.0
    angle: float = 0.0
    scale: float = 0.0

    def __or__(self, other: Distance) -> Distance:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Distance(*(float(np.maximum(a, b)) for a, b in pairs))  # a NaN stays

    def refused_by(self, spec: AccuracySpec) -> str:
        """Which bound a build or `verify` would refuse it by; empty: none."""
        assert spec.min_cosine is not None
        if not 1 - self.angle >= spec.min_cosine:
            return "cosine"
        refused = spec.max_scale is not None and not self.scale <= spec.max_scale
        return "size" if refused else ""


def distance_of(found: Array, wanted: Array) -> Distance:
    """The distance of one output [rows, width]."""
    a, b = found.astype(np.float64), wanted.astype(np.float64).reshape(found.shape)
    size = max(float(np.linalg.norm(b)), 1e-12)
    largest = np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)
    along = float(np.vdot(a, b)) / size**2
    rms = float(np.linalg.norm(a - b)) / size
    return Distance(float(largest), rms, 1 - cosine(a, b), abs(along - 1))


# ---- graphs


@dataclass(frozen=True)
class Export:
    """A component that `export` wrote, with its golden outputs."""

    path: Path

    @property
    def config(self) -> ComponentConfig:
        return ComponentConfig.read(self.path / file_names.CONFIG)

    def golden(self) -> Golden:
        config = self.config
        return read_golden(self.path / file_names.GOLDEN, config.graph, config.vocab_size)


class Evaluated:
    """What stands for a session: onnx's own evaluator, with TensorRT's operators in numpy."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)

    def io_binding(self) -> None:
        """It has none."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = self.evaluator.run(None, dict(feeds))
        return dict(zip(self.evaluator.output_names, found, strict=True))


class EvaluatedRunner(GraphRunner):
    """A graph with operators that ONNX Runtime has not."""

    def execute(self, feeds: dict[str, Array], sizes: dict[str, int]) -> dict[str, Array]:
        assert isinstance(self.session, Evaluated)
        given = {name: np.ascontiguousarray(v, self.dtype(name)) for name, v in feeds.items()}
        return self.session.run(given)


def lowered(
    export: Export, dialect: Dialect, compute: Compute, change: Callable[[ir.Model], None]
) -> tuple[ir.Model, GraphContract]:
    """A lowered graph in float32, each of whose values is rounded to the compute type, and its
    contract; `change` is made to it before that."""
    contract = canonical_contract(export.config.graph)
    target = Target(dialect=dialect, compute=compute, capacity=SLOTS, max_rows=MAX_ROWS)
    model = lower(ir.load(export.path / file_names.MODEL), contract, target)
    change(model)
    if compute != "float32":
        narrow = ir.DataType[NAMES[compute]]
        for node in model.graph:
            kind = node.attributes.get("output_dtype")
            if kind is not None and kind.as_int() == narrow:
                node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(FLOAT))
        model = widened(model, narrow)
    wide = Target(dialect=dialect, compute="float32", capacity=SLOTS, max_rows=MAX_ROWS)
    return model, lowered_contract(contract, wide)


def nothing(model: ir.Model) -> None:
    """Changes nothing."""


def runner_of(
    export: Export,
    dialect: Dialect,
    compute: Compute,
    change: Callable[[ir.Model], None] = nothing,
) -> GraphRunner:
    """A runner of a lowered graph."""
    kind = GraphRunner if export.config.quantization is None else EvaluatedRunner
    return kind(*session_of(export, dialect, compute, change), SLOTS, SLOTS)


@lru_cache(maxsize=8)
def session_of(
    export: Export, dialect: Dialect, compute: Compute, change: Callable[[ir.Model], None]
) -> tuple[Any, GraphContract]:
    """What computes a lowered graph, and its contract; both without state."""
    model, contract = lowered(export, dialect, compute, change)
    if export.config.quantization is None:
        return open_session(model), contract
    ir.external_data.load_to_model(model)
    return Evaluated(ir.to_proto(model)), contract


def distance(export: Export, runner: GraphRunner) -> Distance:
    """How far a runner's golden calls are from the golden outputs, of one sequence alone."""
    golden, worst = export.golden(), Distance()
    for label, call in zip(CALLS, golden_calls(golden, export.config.ropes), strict=True):
        (result,) = runner.run(call)
        keep_prompt(runner, label, call)
        for name, found in outputs(result).items():
            if f"{label}_{name}" in golden:
                worst |= distance_of(found, golden[f"{label}_{name}"][0])
    return worst


# ---- faults


class Faulty(GraphRunner):
    """A runner whose inputs and outputs are changed on their way."""

    on_feeds: Callable[[dict[str, Array]], None] = staticmethod(lambda feeds: None)
    on_outputs: Callable[[dict[str, Array]], None] = staticmethod(lambda found: None)

    def execute(self, feeds: dict[str, Array], sizes: dict[str, int]) -> dict[str, Array]:
        self.on_feeds(feeds)
        found = super().execute(feeds, sizes)
        self.on_outputs(found)
        return found


class FaultyEvaluated(Faulty, EvaluatedRunner):
    """The same for one that is evaluated."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong: in what a graph is given, in the graph, or in what it gives."""

    on_feeds: Callable[[dict[str, Array]], None] | None = None
    change: Callable[[ir.Model], None] = nothing
    on_outputs: Callable[[dict[str, Array]], None] | None = None

    def planted(self, export: Export, compute: Compute) -> GraphRunner:
        """The runner of an export with it."""
        runner = runner_of(export, Dialect.NATIVE, compute, self.change)
        evaluated = isinstance(runner, EvaluatedRunner)
        runner.__class__ = FaultyEvaluated if evaluated else Faulty
        for name in ("on_feeds", "on_outputs"):
            if getattr(self, name) is not None:
                setattr(runner, name, getattr(self, name))
        return runner


def all_visible(feeds: dict[str, Array]) -> None:
    """Each row sees each slot of the cache, those that nobody has written too."""
    for name in ("attention_mask", "sliding_attention_mask"):
        if name in feeds:
            feeds[name] = np.ones_like(feeds[name])


def one_less(feeds: dict[str, Array]) -> None:
    """No row sees the first of a sequence."""
    if "attention_mask" in feeds and feeds["attention_mask"][..., 0].any():
        feeds["attention_mask"] = feeds["attention_mask"].copy()
        feeds["attention_mask"][:, :, 1:, 0] = False


def a_position_further(feeds: dict[str, Array]) -> None:
    """The rotation of each row is that of the next one."""
    for name in ("rope_cos", "rope_sin"):
        if name in feeds:
            feeds[name] = np.roll(feeds[name], -1, axis=1)


def swapped_rows(found: dict[str, Array]) -> None:
    """Two rows of the logits, of seven or twelve."""
    found["logits"][:, [2, 3]] = found["logits"][:, [3, 2]]


def louder(found: dict[str, Array]) -> None:
    """The scale of lm_head is off by one hundredth."""
    found["logits"] *= np.float32(1.01)


def other_scale(model: ir.Model) -> None:
    """The queries' scale is off by a tenth in each layer."""
    for node in [n for n in model.graph if n.op_type == "Attention"]:
        (query,) = node.inputs[:1]
        assert query is not None
        dtype = query.dtype or ir.DataType.FLOAT
        factor = ir.Value(name=f"{node.name}/tenth", type=ir.TensorType(dtype))
        factor.const_value = ir.tensor(np.array(1.1, dtype.numpy()), name=factor.name)
        factor.shape = ir.Shape(())
        model.graph.register_initializer(factor)
        made = ir.node("Mul", [query, factor], name=f"{node.name}/off")
        made.outputs[0].type, made.outputs[0].shape = query.type, query.shape
        made.outputs[0].name = f"{node.name}/off:0"
        model.graph.insert_before(node, made)
        node.replace_input_with(0, made.outputs[0])


def a_layer_less(model: ir.Model) -> None:
    """The last sum of a layer leaves out what the layer adds: its MLP does nothing."""
    adds = [n for n in model.graph if n.op_type == "Add" and "layers.0" in (n.name or "")]
    assert adds
    stream = adds[-1].inputs[0]
    assert stream is not None
    adds[-1].outputs[0].replace_all_uses_with(stream)


FAULTS: dict[str, Fault] = {
    "mask not applied": Fault(on_feeds=all_visible),
    "first row unseen": Fault(on_feeds=one_less),
    "a position further": Fault(on_feeds=a_position_further),
    "MLP left out": Fault(change=a_layer_less),
    "attention scale off by 10 %": Fault(change=other_scale),
    "logits off by 1 %": Fault(on_outputs=louder),
    "two rows swapped": Fault(on_outputs=swapped_rows),
}
