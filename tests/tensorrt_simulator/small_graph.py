"""The smallest graph that has what matters to a builder: a cache that is written, rows that vary.

Knows ONNX. Knows no library.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

SLOTS, MOST = 8, 4


def small_graph(
    *,
    slots: int | str = SLOTS,
    attention: str = "",
    extra: str = "",
    dtype: int = TensorProto.FLOAT,
    rows: int | None = None,
    heads: int = 1,
    width: int = 2,
) -> onnx.ModelProto:
    """A cache of `dtype` that is written, and a sum over its keys; `rows` is the type of what is
    written, where that is another. `attention` reads the cache by a mask: "bool", or "additive", in
    its type. `extra` is one more operator over the rows, whose output nobody reads."""
    mask = TensorProto.BOOL if attention == "bool" else dtype
    inputs = [
        helper.make_tensor_value_info("rows", rows or dtype, ["B", heads, "S", width]),
        helper.make_tensor_value_info("write_indices", TensorProto.INT64, ["B"]),
        helper.make_tensor_value_info("past_key_0", dtype, ["B", heads, slots, width]),
    ]
    outputs = [
        helper.make_tensor_value_info("present_key_0", dtype, ["B", heads, slots, width]),
        helper.make_tensor_value_info("sums", dtype, ["B", heads, 1, width]),
    ]
    scattered = ["past_key_0", "rows", "write_indices"]
    nodes = [
        helper.make_node("TensorScatter", scattered, ["present_key_0"], name="scatter", axis=-2),
        helper.make_node("ReduceSum", ["present_key_0", "axes"], ["sums"], name="sum"),
    ]
    if attention:
        inputs.append(helper.make_tensor_value_info("mask", mask, ["B", 1, "S", slots]))
        outputs.append(helper.make_tensor_value_info("attended", dtype, ["B", heads, "S", width]))
        read = ["rows", "present_key_0", "present_key_0", "mask"]
        made = helper.make_node("Attention", read, ["attended"], name="attention", scale=1.0)
        nodes.append(made)
    if extra:
        nodes.append(helper.make_node(extra, ["rows"], ["unused"], name="extra"))
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [2])
    graph = helper.make_graph(nodes, "g", inputs, outputs, [axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
