"""Measures TreeAttention beside ONNX Runtime's GroupQueryAttention, at the shape of Qwen3-0.6B.

    python scripts/measure_attention.py [--contexts 128 2048 8192] [--rows 1 4 8 16 60] [--runs 9]

One process, one thread, processor time, all of them alternating; of each the least of several runs,
in ms a layer. Layers have caches of their own, more than fit into the processor's. Up to 8 rows are
a chain, more of them a tree. Rotation is within TreeAttention, and not measured of the other.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from edgespec.backends.ort.contract import CACHE_TYPES, SCALE_BYTES
from edgespec.backends.ort.native.library import DOMAIN, kernels
from edgespec.backends.ort.tree_attention import OPERATORS

HEADS, KV_HEADS, DIM, LAYERS = 16, 8, 128, 4
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
Array = np.ndarray[Any, Any]


def session_of(op_type: str, domain: str, inputs: dict[str, Array], outputs: dict[str, Array]):  # type: ignore[no-untyped-def]
    """A session of one node, with inputs and outputs like these."""

    def values(of: dict[str, Array]) -> list[Any]:
        return [
            helper.make_tensor_value_info(
                name, TYPES[str(a.dtype)], [f"{name}{i}" for i in range(a.ndim)]
            )
            for name, a in of.items()
            if name
        ]

    form = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": DIM**-0.5}
    names = [name.strip() for name in inputs]
    node = helper.make_node(op_type, names, list(outputs), domain=domain, **form)
    given = {name: array for name, array in inputs.items() if name.strip()}
    graph = helper.make_graph([node], "one", values(given), values(outputs))
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(domain, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    kernels().register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class Contender:
    """An operator over caches of its own, one a layer, that are filled with random rows."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.cache = name, CACHE_TYPES.get(name, "float32")
        row = DIM + (SCALE_BYTES if self.cache == "int8" else 0)
        self.caches = [made((1, KV_HEADS, slots, row), self.cache) for _ in range(2 * LAYERS)]
        self.session: Any = None

    def fill(self, context: int) -> None:
        """Write the rows of a context; keys and values of all layers are those of one call."""
        if self.name == "gqa":
            rng = np.random.default_rng(0)
            for cache in self.caches:
                cache[:, :, :context] = rng.standard_normal((1, KV_HEADS, context, DIM))
            return
        for run in self.calls(0, rows=1, key_rows=context, length=context - 1):
            run()

    def calls(self, context: int, *, rows: int, key_rows: int, length: int) -> list[Any]:
        """A call for each layer, ready to run."""
        rng = np.random.default_rng(1)
        flat = {
            "q": rng.standard_normal((1, rows, HEADS * DIM)).astype(np.float32),
            "k": rng.standard_normal((1, key_rows, KV_HEADS * DIM)).astype(np.float32),
            "v": rng.standard_normal((1, key_rows, KV_HEADS * DIM)).astype(np.float32),
        }
        visible = tree(rows)
        out = np.empty_like(flat["q"])
        found = []
        for layer in range(LAYERS):
            keys, values = self.caches[2 * layer : 2 * layer + 2]
            past = {"past_key": keys, "past_value": values}
            written = {"out": out, "present_key": keys, "present_value": values}
            if self.name == "gqa":
                bias = np.full((1, 1, rows, context + rows), -np.inf, np.float32)
                bias[..., :context] = 0
                bias[0, 0, :, context:][visible[0]] = 0
                total = context + rows
                lengths = {
                    "seqlens_k": np.array([total - 1], np.int32),
                    "total": np.array(total, np.int32),
                }
                none = dict.fromkeys((" ", "  ", "   "), np.empty(0))
                inputs = {**flat, **past, **lengths, **none, "bias": bias}
                op_type, domain = "GroupQueryAttention", "com.microsoft"
            else:
                angles = rng.uniform(0, 6, (1, key_rows, DIM // 2))
                inputs = {
                    **flat,
                    **past,
                    "write_indices": np.array([context], np.int64),
                    "lengths": np.array([length], np.int64),
                    "visible": visible,
                    "first": np.zeros((1, rows), np.int64),
                    "cos": np.cos(angles).astype(np.float32),
                    "sin": np.sin(angles).astype(np.float32),
                }
                op_type, domain = OPERATORS[self.cache], DOMAIN
            if self.session is None:
                self.session = session_of(op_type, domain, inputs, written)
            found.append(bound(self.session, inputs, written))
        return found


def made(dims: tuple[int, ...], dtype: str) -> Array:
    """Zeros that begin at a cache line, as those of an engine."""
    count = int(np.prod(dims)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + count].view(dtype).reshape(dims)


def tree(rows: int) -> Array:
    """[1, rows, rows]: a chain, or a tree of which each node has four children."""
    visible = np.zeros((1, rows, rows), bool)
    for row in range(rows):
        if row:
            visible[0, row] = visible[0, row - 1 if rows <= 8 else (row - 1) // 4]
        visible[0, row, row] = True
    return visible


def bound(session: Any, inputs: dict[str, Array], outputs: dict[str, Array]) -> Any:
    """A run over these arrays, which it keeps."""
    binding = session.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, a in arrays.items():
            if name.strip():
                bind(name, "cpu", 0, a.dtype, list(a.shape), a.ctypes.data)
    return lambda held=(inputs, outputs): session.run_with_iobinding(binding)


def processor_s(runs: list[Any]) -> float:
    """Seconds of this thread."""
    began = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    for run in runs:
        run()
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - began


def main() -> None:
    """Print a line for each context and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 60])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--level", help="of instructions; the best one that is here")
    args = parser.parse_args()
    if args.level:
        kernels().use_level(args.level)
    slots = max(args.contexts) + max(args.rows)
    contenders = [Contender(name, slots) for name in ("gqa", *CACHE_TYPES)]
    for contender in contenders:
        contender.fill(max(args.contexts))
    print(f"level {kernels().level}; ms a layer, and times as fast as GroupQueryAttention")
    for context in args.contexts:
        for rows in args.rows:
            calls = {
                c.name: c.calls(context, rows=rows, key_rows=rows, length=context)
                for c in contenders
            }
            least = dict.fromkeys(calls, np.inf)
            for _ in range(args.runs):
                for name, runs in calls.items():
                    least[name] = min(least[name], 1e3 * processor_s(runs) / LAYERS)
            rest = "  ".join(
                f"{name} {ms:.3f} ({least['gqa'] / ms:.2f})"
                for name, ms in least.items()
                if name != "gqa"
            )
            print(f"context {context:5} rows {rows:3}  gqa {least['gqa']:.3f}  {rest}", flush=True)


if __name__ == "__main__":
    main()
