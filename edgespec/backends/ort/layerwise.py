"""Runs a canonical graph layer by layer in float32, in the memory of one layer: the reference of
what quantization costs, and the inputs of each weight for calibration (GPTQ, arXiv 2210.17323).

The graph is cut where one value alone is passed on: the residual stream behind each attention and
each MLP. It is all that is needed to go on there. A quantized weight is what it dequantizes to.
Knows MatMuls and sessions; knows no family and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.hashes import contained
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.ort.experts import mixtures
from edgespec.backends.ort.matmul_nbits import MICROSOFT
from edgespec.backends.ort.quantized_values import (
    NUMPY,
    QuantizedValues,
    quantized_values,
    read_tensor,
)
from edgespec.backends.ort.session import NO_FALLBACK, session_options
from edgespec.backends.rewriting import required
from edgespec.contract import (
    INPUTS,
    KEEP_PRECISION,
    Kind,
    TensorSpec,
    graph_inputs,
    memory_inputs,
)
from edgespec.quantization.quantized_weight import dequantize
from edgespec.rope import RopeTable, rotations

Array = NDArray[Any]
Floats = NDArray[np.float32]
Feeds = Mapping[str, Array]
IR_VERSION = 11  # that of exports
PART_ELEMENTS = 1 << 24  # of an lm_head that are float32 at a time


@dataclass(frozen=True, slots=True, eq=False)
class StoredLinear:
    """The weight of a MatMul, as an export stores it. `name` is its own in the graph,
    `x` what it multiplies; `keeps_precision`: no build quantizes it. `share` is of an expert: what
    its rows are multiplied by, 0 where a router sent them to others."""

    name: str
    x: str
    keeps_precision: bool
    shape: tuple[int, int]  # [out, in]
    directory: Path
    quantized: QuantizedValues | None = None
    plain: ir.TensorProtocol | None = None
    transposed: bool = False  # whether `plain` is [out, in]
    share: str | None = None

    def reader(self) -> Callable[[int, int | None], Floats]:
        """`read`, which unpacks quantized values once for all calls."""
        if self.quantized is None:
            return self.read
        weight = self.quantized.read(self.directory)
        return lambda low, high: dequantize(weight, slice(low, high))

    def read(self, low: int = 0, high: int | None = None) -> Floats:
        """The weights of outputs `low` to `high` in float32: [high - low, in]. BundleError for a
        data file outside the export."""
        if self.quantized is not None:
            return self.reader()(low, high)
        stored = self.plain
        assert stored is not None
        if not isinstance(stored, ir.ExternalTensor):
            array = read_tensor(stored, self.directory)
        else:
            path = contained(self.directory, str(stored.location))
            dims, start = stored.shape.numpy(), stored.offset or 0
            array = np.memmap(path, NUMPY[stored.dtype], "r", start, dims)
        rows = array[low:high] if self.transposed else array.T[low:high]
        return np.ascontiguousarray(rows, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of the graph, which makes `output` of `x` [B, S, H] and of inputs of the call; its
    `linears` are inputs as well."""

    x: str
    output: str
    model: ir.Model | None  # None: `x` is the output
    linears: tuple[StoredLinear, ...]
    memory: Mapping[str, TensorSpec]  # what layers remember, by input
    directory: Path

    @property
    def num_weights(self) -> int:
        """The weights of its products."""
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)

    def run(
        self,
        x: Floats,
        feeds: Feeds,
        weights: Mapping[str, Floats] | None = None,
    ) -> Floats:
        """The piece's output for `x` and the call's inputs; `weights` [out, in] by name take the
        place of stored ones."""
        if self.model is None:
            return x
        return np.asarray(self.values([self.output], x, feeds, weights)[self.output], np.float32)

    def inputs(self, x: Floats, feeds: Feeds) -> dict[str, Floats]:
        """What products multiply, and the shares of experts, by the names of the values: rows
        [N, in] and [N, 1]."""
        read = [name for one in self.linears for name in (one.x, one.share) if name is not None]
        values = self.values(list(dict.fromkeys(read)), x, feeds)
        return {name: rows.reshape(-1, rows.shape[-1]) for name, rows in values.items()}

    def values(
        self,
        wanted: Sequence[str],
        x: Floats,
        feeds: Feeds,
        weights: Mapping[str, Floats] | None = None,
    ) -> dict[str, Array]:
        """Values of the piece by their names, some of which may be given."""
        if self.model is None:
            return {self.x: x}
        session = open_session(self.model, self.directory)
        inputs: dict[str, Array] = {self.x: x, **feeds}
        read = [value.name for value in session.get_inputs()]
        # A committed row of zeros changes nothing
        sizes = {"B": len(x), "C": x.shape[1], "P": 1}
        for name in self.memory.keys() & set(read):
            inputs[name] = np.zeros(self.memory[name].dims(**sizes), np.float32)
        for linear in self.linears:
            given = None if weights is None else weights.get(linear.name)
            inputs[weight_input(linear.name)] = linear.read() if given is None else given
        names = [name for name in wanted if name not in inputs]
        outputs = session.run(names, {name: inputs[name] for name in read})
        computed = dict(zip(names, outputs, strict=True))
        return {name: computed[name] if name in computed else inputs[name] for name in wanted}


@dataclass(frozen=True, slots=True, eq=False)
class HeadPieces:
    """What makes logits of the stream behind the last layer: a piece up to the lm_head, that, and
    what follows it, if anything does."""

    before: Piece
    linear: StoredLinear
    after: Piece | None

    def rows(self, x: Floats, feeds: Feeds) -> Floats:
        """The rows [B * S, H] that the lm_head multiplies."""
        rows = self.before.run(x, feeds)
        return np.reshape(rows, (-1, rows.shape[-1]))

    def logits(
        self, rows: Floats, read: Callable[[int, int | None], Floats] | None = None
    ) -> Floats:
        """The logits [N, V] of rows [N, H]; of the lm_head a part at a time is float32. `read`
        gives other weights than the stored ones."""
        outputs, inputs = self.linear.shape
        logits = np.empty((len(rows), outputs), np.float32)
        step = max(1, PART_ELEMENTS // inputs)
        read = read or self.linear.reader()
        for low in range(0, outputs, step):
            part = read(low, min(low + step, outputs))
            np.matmul(rows, part.T, out=logits[:, low : low + step])
        if self.after is None:
            return logits
        return np.asarray(self.after.run(logits[None], {})[0])


@dataclass(frozen=True, slots=True, eq=False)
class LayerwiseGraph:
    """A canonical graph in pieces, the order in which they run, and its head."""

    pieces: tuple[Piece, ...]
    head: HeadPieces

    @classmethod
    def open(cls, onnx: OnnxDir) -> LayerwiseGraph:
        """The graph of an export that is checked. ContractError for quantized weights in a form
        that this version does not read."""
        model = ir.load(onnx.model)
        graph = model.graph
        graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
        RemoveUnusedNodesPass()(model)
        shares = shares_of(graph)
        linears = {
            node: replace(linear, share=shares.get(node))
            for node, linear in take_weights(graph, onnx.path)
        }
        *inner, last = [node for node in graph if node in linears]
        start = next(value for value in graph.inputs if value.name == "inputs_embeds")
        pieces = []
        for end, nodes in cut(graph, start, set(inner)):
            pieces.append(made_piece(graph, onnx, start, end, [linears[n] for n in nodes]))
            start = end
        before = required(last.inputs[0])
        (product,), (logits,) = last.outputs, graph.outputs
        after = None
        if product is not logits:
            after = made_piece(graph, onnx, product, logits, [])
        head = made_piece(graph, onnx, start, before, [])
        return cls(tuple(pieces), HeadPieces(head, linears[last], after))

    @property
    def num_weights(self) -> int:
        """The weights of all products: as many multiplications a row takes."""
        out, width = self.head.linear.shape
        return sum(piece.num_weights for piece in self.pieces) + out * width


# ---- cutting


def shares_of(graph: ir.Graph) -> dict[ir.Node, str]:
    """What the rows of each expert are multiplied by, by the nodes of its products."""
    found: dict[ir.Node, str] = {}
    for mixture in mixtures(graph):
        for expert, scaled in zip(mixture.experts, mixture.total.inputs, strict=True):
            factor = required(scaled).producer()
            assert factor is not None
            share = required(factor.inputs[1])
            found |= dict.fromkeys(expert.products, str(share.name))
    return found


def take_weights(graph: ir.Graph, directory: Path) -> Iterator[tuple[ir.Node, StoredLinear]]:
    """Lets each MatMul with a stored weight read it as an input [out, in], and yields them."""
    for node in [node for node in graph if node.op_type == "MatMul" and not node.domain]:
        linear = stored_linear(node, directory)
        if linear is None:
            continue
        dims = ir.Shape(linear.shape)
        weight = ir.Value(
            name=weight_input(linear.name), shape=dims, type=ir.TensorType(ir.DataType.FLOAT)
        )
        graph.inputs.append(weight)
        node.replace_input_with(1, weight)
        node.op_type, node.domain = "FusedMatMul", MICROSOFT
        node.attributes["transB"] = ir.AttrInt64("transB", 1)
        yield node, linear
    graph.opset_imports[MICROSOFT] = 1


def weight_input(name: str) -> str:
    """The input by which a product reads its weight."""
    return f"{name}/float32"


def stored_linear(node: ir.Node, directory: Path) -> StoredLinear | None:
    """The stored weight of a MatMul; None for a product of two computed values."""
    x, weight = required(node.inputs[0]), required(node.inputs[1])
    keeps = KEEP_PRECISION in node.metadata_props
    quantized = quantized_values(node)
    if quantized is not None:
        name = str(quantized.nodes.values.name)
        return StoredLinear(name, str(x.name), keeps, quantized.shape, directory, quantized)
    transposed, maker = False, weight.producer()
    while maker is not None and maker.op_type in ("Cast", "Transpose"):
        transposed ^= maker.op_type == "Transpose"
        weight = required(maker.inputs[0])
        maker = weight.producer()
    stored = weight.const_value
    if stored is None or len(stored.shape) != 2:
        return None
    rows, columns = stored.shape.numpy()
    shape = (rows, columns) if transposed else (columns, rows)
    name = str(weight.name)
    return StoredLinear(
        name, str(x.name), keeps, shape, directory, plain=stored, transposed=transposed
    )


def cut(
    graph: ir.Graph, start: ir.Value, linears: set[ir.Node]
) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """Yields the values behind which nothing else is read that depends on `start`, each with the
    products, of `linears`, since the one before; none without a product."""
    last: dict[ir.Value, int] = {}
    nodes = list(graph)
    for number, node in enumerate(nodes):
        last |= dict.fromkeys(read_by(node), number)
    last |= dict.fromkeys(graph.outputs, len(nodes))
    depending, live, products, left = {start}, {start}, list[ir.Node](), len(linears)
    for number, node in enumerate(nodes):
        if not depending.isdisjoint(read_by(node)):
            depending.update(node.outputs)
            live.update(node.outputs)
        live = {value for value in live if last.get(value, -1) > number}
        if node in linears:
            products.append(node)
            left -= 1
        if len(live) == 1 and products:
            yield next(iter(live)), products
            products = []
            if not left:
                return


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values that a node and those of its branches read."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from read_by(inner)


def made_piece(
    graph: ir.Graph,
    onnx: OnnxDir,
    start: ir.Value,
    end: ir.Value,
    linears: Sequence[StoredLinear],
) -> Piece:
    """The part of the graph from one value to another, with the inputs of products as outputs."""
    name = str(start.name)
    seen = {read for linear in linears for read in (linear.x, linear.share)} - {name, None}
    wanted = [end, *(v for node in graph for v in node.outputs if v.name in seen)]
    known = dict.fromkeys([*graph.inputs, start])
    computed = [value for value in dict.fromkeys(wanted) if value not in known]
    model = None
    if computed:
        part = ir.convenience.extract(graph, list(known), computed)
        part.inputs[:] = [value for value in part.inputs if value.uses()]
        for value in (*part.inputs, *part.outputs):
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        model = ir.Model(part, ir_version=IR_VERSION)
    memory = {
        spec.name: spec
        for layer in range(onnx.config.graph.num_layers)
        for spec in memory_inputs(onnx.config.graph, layer)
    }
    return Piece(name, str(end.name), model, tuple(linears), memory, onnx.path)


# ---- running


def open_session(model: ir.Model, directory: Path) -> ort.InferenceSession:
    """A session of a piece, which runs once."""
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory)
    )
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], **NO_FALLBACK)


def causal_feeds(config: ComponentConfig, batch: int, rows: int, capacity: int) -> Feeds:
    """What a call over sequences from their beginning reads beside their embeddings: [batch, rows],
    all of which go through the head. `capacity` is that of the engine, by which some rotary tables
    go."""
    shape, order = config.graph, np.arange(rows)
    behind = order[:, None] - order
    windows = (None, config.sliding_window) if shape.sliding else (config.sliding_window,)
    tables = [RopeTable.of(rope, capacity) for rope in config.ropes]
    feeds: dict[str, Array] = dict(
        rotations(graph_inputs(shape), tables, {"S": np.tile(order, (batch, 1))})
    )
    masks = (row.name for row in graph_inputs(shape, Kind.MASK))
    for name, window in zip(masks, windows, strict=True):
        mask = (behind >= 0) & (behind < (window or rows))
        feeds[name] = np.ascontiguousarray(np.broadcast_to(mask, (batch, 1, rows, rows)))
    for row in graph_inputs(shape):
        if row.default is not None:
            dims = row.spec(shape).dims(B=batch, S=rows)
            feeds[row.name] = np.full(dims, row.default, np.float32)
    derived = {
        "write_indices": np.zeros(batch, np.int64),
        "gather_idx": np.tile(order, (batch, 1)),
        "tree_mask": np.ascontiguousarray(np.broadcast_to(behind >= 0, (batch, rows, rows))),
    }
    return feeds | {name: value for name, value in derived.items() if INPUTS[name].applies(shape)}
