"""Sessions of one operator of our own, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import DOMAIN, kernels, why_missing

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}

Port = tuple[str, list[Any]]  # type and shape

compiled = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


def levels() -> tuple[str, ...]:
    """The levels of instructions to try; none where the kernels were not compiled."""
    return () if why_missing() else kernels().levels


def session_of(
    op_type: str,
    inputs: Mapping[str, Port | None],
    outputs: Mapping[str, Port | None],
    attributes: dict[str, Any],
    constants: dict[str, NDArray[Any]] | None = None,
    threads: int = 1,
    domain: str = DOMAIN,
) -> ort.InferenceSession:
    """A session of one node: names with types and shapes of what goes in and out, None for what is
    left out; constants are its last inputs."""
    constants = constants or {}
    names = [
        ["" if spec is None else name for name, spec in of.items()] for of in (inputs, outputs)
    ]
    node = helper.make_node(op_type, [*names[0], *constants], names[1], domain=domain, **attributes)
    values = [
        [
            helper.make_tensor_value_info(name, TYPES[spec[0]], spec[1])
            for name, spec in of.items()
            if spec is not None
        ]
        for of in (inputs, outputs)
    ]
    tensors = [
        helper.make_tensor(name, TYPES[str(a.dtype)], a.shape, a.tobytes(), raw=True)
        for name, a in constants.items()
    ]
    graph = helper.make_graph([node], "one", *values, tensors)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_cpu_mem_arena = False  # so that sanitizers see where an output ends
    kernels().register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def matmul_session(
    layout: WeightLayout, packed: NDArray[np.uint8], threads: int = 1, **attributes: Any
) -> ort.InferenceSession:
    """A session of one LowBitMatMul: x [rows, in] -> y [rows, out]."""
    sizes = {"K": layout.in_features, "N": [layout.out_features]}
    return session_of(
        "LowBitMatMul",
        {"x": ("float32", ["rows", layout.in_features])},
        {"y": ("float32", ["rows", layout.out_features])},
        {**sizes, **layout.attributes, **attributes},
        {"weight": packed},
        threads,
    )
