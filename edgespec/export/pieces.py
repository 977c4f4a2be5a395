"""Opens a piece of a canonical graph with ONNX Runtime, in little memory.

A product reads a stored weight in its own type, a few rows of it at a time: no weight stands in
memory in float32, or a second time transposed, as a whole. The rows of a weight are different
columns of the product, so no sum changes. Products with quantized weights, whose types ONNX Runtime
lacks in part, stand between sessions. Knows MatMuls and sessions; knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.contract import OPSET
from edgespec.export.stored_weights import StoredWeight, quantized_weight
from edgespec.graphs.assembly import GraphPart
from edgespec.graphs.builder import IR_VERSION

Array = NDArray[Any]
Values = dict[str, Array]  # of one pass, by name

# Of a weight, in float32 at a time: they stay in a cache of the CPU
CHUNK_ELEMENTS = 1 << 20
TILE_ROWS = 64
KERNELS = "com.microsoft"  # the domain of ONNX Runtime's own operators


@dataclass(frozen=True, slots=True)
class Product:
    """The product `y` [.., out] of `x` [.., in] and a quantized weight, by their names."""

    x: str
    weight: StoredWeight
    y: str

    def run(self, passes: Sequence[Values]) -> None:
        """Adds `y` to the values of each pass; a part of the weight is dequantized once for all."""
        inputs, outputs = self.weight.shape
        product = product_session(transposed=self.weight.rows_are_outputs)
        for values in passes:
            values[self.y] = np.empty((*values[self.x].shape[:-1], outputs), np.float32)
        for low, high in pairwise(chunk_ends(outputs, inputs)):
            part = self.weight.outputs(low, high)
            for values in passes:
                feeds = {"x": values[self.x], "weight": part}
                values[self.y][..., low:high] = product.run(None, feeds)[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """What can be computed of some products' outputs: a session (None: nothing is left to it), and
    the products that come next."""

    session: ort.InferenceSession | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    products: tuple[Product, ...]

    def run(self, values: Values) -> None:
        """Adds the session's outputs to the values of a pass."""
        if self.session is not None:
            feeds = {name: values[name] for name in self.inputs}
            outputs = self.session.run(self.outputs, feeds)
            values |= dict(zip(self.outputs, outputs, strict=True))


@dataclass(frozen=True, slots=True)
class OpenPiece:
    """A piece that runs: stages, one behind the other, which give `outputs`."""

    stages: tuple[Stage, ...]
    outputs: tuple[str, ...]

    def run(
        self,
        names: Sequence[str],
        passes: Sequence[Mapping[str, Array]],
        carry: Callable[[Values], Values] | None = None,
    ) -> list[list[Array]]:
        """The outputs `names` for the inputs of each pass, which may hold those of other pieces.

        `carry` makes inputs of a pass of what is computed so far of the one before it.
        """
        all_values = [dict(feeds) for feeds in passes]
        for stage in self.stages:
            for number, values in enumerate(all_values):
                if carry is not None and number:
                    values |= carry(all_values[number - 1])
                stage.run(values)
            for product in stage.products:
                product.run(all_values)
        return [[values[name] for name in names] for values in all_values]


def open_piece(piece: GraphPart, directory: Path) -> OpenPiece:
    """Returns a piece whose weights are in files in `directory`, which are mapped.

    The piece's model is rewritten.
    """
    read_weights_in_chunks(piece.model)
    outputs = tuple(str(value.name) for value in piece.model.graph.outputs)
    return OpenPiece(tuple(stages(piece.model, directory)), outputs)


def stages(model: ir.Model, directory: Path) -> Iterator[Stage]:
    """Yields the stages of a piece: a product with a quantized weight ends one."""
    graph = model.graph
    levels: dict[ir.Value, int] = {}  # the stage after which a value is there; others: the first
    products: dict[int, list[tuple[ir.Value, Product]]] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in read_by(node)), default=0)
        weight = None
        if node.op_type == "MatMul" and node.inputs[1] is not None:
            weight = quantized_weight(node.inputs[1], directory)
        if weight is not None:
            x, y = node.inputs[0], node.outputs[0]
            assert x is not None
            x.type = y.type = ir.TensorType(ir.DataType.FLOAT)
            product = Product(str(x.name), weight, str(y.name))
            products.setdefault(level, []).append((x, product))
            level += 1
        for value in node.outputs:
            levels[value] = level
    made = {product.y for nodes in products.values() for _, product in nodes}
    known = list(graph.inputs)
    for level in range(max((levels.get(value, 0) for value in graph.outputs), default=0) + 1):
        ending = products.get(level, [])
        wanted = [v for v in graph.outputs if levels.get(v, 0) == level]
        wanted += dict.fromkeys(x for x, _ in ending if x not in wanted)
        computed = [v for v in wanted if v not in known and v.name not in made]
        session = None
        if computed:
            part = ir.convenience.extract(graph, known, computed)
            part.inputs[:] = [value for value in part.inputs if value.uses()]
            session = open_session(ir.Model(part, ir_version=model.ir_version), directory)
        inputs = tuple(value.name for value in session.get_inputs()) if session else ()
        outputs = tuple(str(value.name) for value in computed)
        yield Stage(session, inputs, outputs, tuple(product for _, product in ending))
        known += [v for v in levels if v.name in made and levels[v] == level + 1]


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values that a node and those of its branches read."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from read_by(inner)


def open_session(model: ir.Model, directory: Path) -> ort.InferenceSession:
    """Returns a session of a model whose weights are in `directory`."""
    options = few_runs()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory)
    )
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(
        data, options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


@cache
def product_session(*, transposed: bool) -> ort.InferenceSession:
    """Returns a session that multiplies x [.., in] by a weight [in, out], or [out, in] if
    `transposed`."""
    x, weight, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "weight", "y")
    )
    node = ir.node("FusedMatMul", [x, weight], {"transB": int(transposed)}, domain=KERNELS)
    node.outputs[0].name, node.outputs[0].type = y.name, y.type
    opsets = {"": OPSET, KERNELS: 1}
    graph = ir.Graph([x, weight], node.outputs, nodes=[node], opset_imports=opsets, name="product")
    return open_session(ir.Model(graph, ir_version=IR_VERSION), Path())


def few_runs() -> ort.SessionOptions:
    """Options of a session that runs a few times: what pays off only over many runs is off."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised; the log would print names as they are
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def read_weights_in_chunks(model: ir.Model) -> None:
    """Lets each product with a weight [out, in] read the weight as it is stored, untransposed; one
    in a file a chunk of rows at a time."""
    graph = model.graph
    for node in [n for n in graph.all_nodes() if n.op_type == "MatMul" and not n.domain]:
        weight = transposed_weight(node)
        if weight is None:
            continue
        stored = stored_weight(weight)
        parts = [weight] if stored is None else chunks(graph, node, stored)
        products = [product(node, part, i) for i, part in enumerate(parts)]
        whole = products[0]
        if len(products) > 1:
            whole = before(node, "join", ir.node("Concat", products, {"axis": -1}))
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], [], [node.outputs[0]], [whole]
        )
    graph.opset_imports[KERNELS] = 1
    RemoveUnusedNodesPass()(model)


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """The weight [out, in] of a product that reads its transpose; None for another product, and for
    a weight that is dequantized."""
    transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    perm = transpose.attributes.get("perm")
    of_matrix = perm is not None and list(perm.as_ints()) == [1, 0]
    weight = transpose.inputs[0]
    maker = None if weight is None else weight.producer()
    quantized = maker is not None and maker.op_type == "DequantizeLinear"
    return weight if of_matrix and not quantized else None


def stored_weight(weight: ir.Value) -> ir.ExternalTensor | None:
    """The tensor in a file that a weight is, or is cast from; None where it is fed."""
    producer = weight.producer()
    if producer is not None and producer.op_type == "Cast":
        weight = producer.inputs[0] or weight
    tensor = weight.const_value
    return tensor if isinstance(tensor, ir.ExternalTensor) else None


def chunks(graph: ir.Graph, node: ir.Node, tensor: ir.ExternalTensor) -> Iterator[ir.Value]:
    """Yields the rows of a weight in float32, a chunk at a time: new initializers, and casts in
    front of `node`."""
    rows, width = tensor.shape.numpy()
    row_bytes = int(width * tensor.dtype.itemsize)
    for low, high in pairwise(chunk_ends(rows, width)):
        name = f"{node.name}/rows/{low}"
        offset, size = (tensor.offset or 0) + low * row_bytes, (high - low) * row_bytes
        shape = ir.Shape((high - low, width))
        part = ir.ExternalTensor(
            tensor.location, offset, size, tensor.dtype, shape=shape, name=name
        )
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=part)
        graph.register_initializer(value)
        if tensor.dtype != ir.DataType.FLOAT:
            cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
            value = before(node, f"rows/{low}/fp32", cast)
        yield value


def chunk_ends(rows: int, width: int) -> list[int]:
    """Where the chunks of a weight begin, and `rows`.

    All but the last are whole tiles of the kernels and the last is no shorter: a product with few
    columns takes another kernel, whose sums differ.
    """
    count = max(TILE_ROWS, CHUNK_ELEMENTS // width // TILE_ROWS * TILE_ROWS)
    return [*(range(0, rows - count + 1, count) or [0]), rows]


def product(node: ir.Node, weight: ir.Value, number: int) -> ir.Value:
    """The product of a node's rows with rows [n, in] of its weight, in front of the node."""
    new = ir.node("FusedMatMul", [node.inputs[0], weight], {"transB": 1}, domain=KERNELS)
    return before(node, f"product/{number}", new)


def before(node: ir.Node, label: str, new: ir.Node) -> ir.Value:
    """The output of a new node in front of another; its name begins with that one's."""
    assert node.graph is not None
    new.name = f"{node.name}/{label}"
    new.outputs[0].name = f"{new.name}:0"
    node.graph.insert_before(node, new)
    return new.outputs[0]
