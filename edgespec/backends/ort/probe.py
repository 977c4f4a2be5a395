"""A run of a graph of a few nodes, to see what a kernel makes of it.

Knows ONNX Runtime's sessions. Knows no operator. ONNX is imported where a graph is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.ort.session import NO_FALLBACK, session_options
from edgespec.contract import OPSET

if TYPE_CHECKING:
    import onnx_ir as ir


def probe_graph(node: ir.Node, x: ir.Value, in_features: int, out_features: int) -> ir.Graph:
    """A graph of one node, [rows, in] -> [rows, out] in float32, for a probe of what it is lowered
    to."""
    import onnx_ir as ir

    from edgespec.backends.rewriting import name_outputs

    x.shape, x.type = ir.Shape((1, "rows", in_features)), ir.TensorType(ir.DataType.FLOAT)
    name_outputs([node])
    node.outputs[0].shape, node.outputs[0].type = ir.Shape((1, "rows", out_features)), x.type
    return ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": OPSET}, name="probe")


def run_probe(graph: ir.Graph, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The outputs [rows, out] that ONNX Runtime computes from x [rows, in]."""
    import onnx_ir as ir

    options = session_options()
    options.intra_op_num_threads = 1
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], **NO_FALLBACK
    )
    outputs: Any = session.run(None, {session.get_inputs()[0].name: x[None]})
    output: NDArray[np.float32] = outputs[0][0]
    return output
