"""The options of every session: what its threads do when there is nothing to do."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from edgespec.backends.ort.session import session_options

SIZE = 256
WINDOW_S = 0.02


def product() -> bytes:
    """A graph of one product, large enough for several threads."""
    a, b, c = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE, SIZE]) for name in "abc"
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "g", [a, b], [c])
    opset = [helper.make_opsetid("", 21)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opset, ir_version=10)
    return model.SerializeToString()


def test_threads_sleep_soon_after_a_call() -> None:
    options = session_options()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(product(), options, ["CPUExecutionProvider"])
    square = np.ones((SIZE, SIZE), np.float32)
    for _ in range(3):
        session.run(None, {"a": square, "b": square})
    others, began = time.process_time() - time.thread_time(), time.perf_counter()
    while time.perf_counter() < began + WINDOW_S:  # this thread alone is busy
        pass
    awake = time.process_time() - time.thread_time() - others
    assert awake < WINDOW_S / 4
