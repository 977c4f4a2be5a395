"""Opens a piece of a canonical graph with ONNX Runtime, in little memory.

A product reads a stored weight in its own type, a few rows of it at a time: no weight stands in
memory in float32, or a second time transposed, as a whole. The rows of a weight are different
columns of the product, so no sum changes. Knows MatMuls and sessions; knows no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.graphs.assembly import Piece

# Of a weight, in float32 at a time: they stay in a cache of the CPU
CHUNK_ELEMENTS = 1 << 20
TILE_ROWS = 64
KERNELS = "com.microsoft"  # the domain of ONNX Runtime's own operators


def open_piece(piece: Piece, directory: Path) -> ort.InferenceSession:
    """Returns an ONNX Runtime session of a piece with its weights in `directory`, which are mapped.

    The piece's model is rewritten.
    """
    read_weights_in_chunks(piece.model)
    options = few_runs()
    options.log_severity_level = 4  # errors are raised; the log would print names as they are
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory)
    )
    data = ir.to_proto(piece.model).SerializeToString()
    return ort.InferenceSession(
        data, options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


def few_runs() -> ort.SessionOptions:
    """Options of a session that runs a few times: what pays off only over many runs is off."""
    options = ort.SessionOptions()
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
    """The weight [out, in] of a product that reads its transpose; None for another product."""
    transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    perm = transpose.attributes.get("perm")
    of_matrix = perm is not None and list(perm.as_ints()) == [1, 0]
    return transpose.inputs[0] if of_matrix else None


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
