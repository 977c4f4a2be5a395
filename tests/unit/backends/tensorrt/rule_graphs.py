"""For each parser rule a smallest graph that breaks it, and one that keeps it.

The unit tests lint them; the tests with NVIDIA's wheels ask the real parser about the same graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, TensorProto

BYTES = {TensorProto.INT4: 0.5, TensorProto.FLOAT4E2M1: 0.5}


@dataclass(frozen=True)
class Weight:
    """An initializer all of whose bytes are the same."""

    dtype: int
    dims: tuple[int, ...]
    byte: int = 0


@dataclass(frozen=True)
class Pair:
    """A graph that breaks a rule and one that keeps it, in the text form of ONNX.

    `version` is one in which the rule holds. `rejects` says where NVIDIA's compiler was seen to
    reject the broken graph and to accept the other: parse, build, or nowhere (empty).
    """

    rule: str
    broken: str
    kept: str
    version: str = "11.4"
    rejects: str = "parse"
    weights: Mapping[str, Weight] = field(default_factory=dict)
    opset: int = 24  # of the broken graph
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # release -> `rejects` there

    def model(self, *, broken: bool) -> ModelProto:
        text, opset = (self.broken, self.opset) if broken else (self.kept, 24)
        head = f'<ir_version: 11, opset_import: ["" : {opset}, "trt" : 1, "com.microsoft" : 1]>'
        model = onnx.parser.parse_model(f"{head} {text}")
        read = {name for node in model.graph.node for name in node.input}
        for name, weight in self.weights.items():
            if name not in read:
                continue
            elements = float(np.prod(weight.dims))
            size = math.ceil(elements * BYTES.get(weight.dtype, itemsize(weight.dtype)))
            tensor = TensorProto(name=name, data_type=weight.dtype, dims=weight.dims)
            tensor.raw_data = bytes([weight.byte]) * size
            model.graph.initializer.append(tensor)
        return model


def itemsize(dtype: int) -> int:
    return onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize


def unary(op: str, dtype: str = "float", dims: str = "2,8", out: str = "") -> str:
    return f"g ({dtype}[{dims}] x) => ({out or dtype}[{dims}] y) {{ y = {op}(x) }}"


def attention(
    extra: str = "", attributes: str = "scale = 1.0", outputs: str = "y", dtype: str = "float16"
) -> str:
    """One Attention over 16 slots; `extra` is what follows q, k, v among its inputs."""
    made = ", ".join(
        f"{dtype}[1,2,N,16] {name}" if i == 0 else f"{dtype}[1,2,T{i},16] {name}"
        for i, name in enumerate(outputs.split(", "))
    )
    return (
        f"g ({dtype}[1,2,N,16] q, {dtype}[1,2,16,16] k, {dtype}[1,2,16,16] v,"
        f" {dtype}[1,1,N,16] mask, bool[1,1,N,16] seen, {dtype}[1,2,8,16] old, int64[1] valid)"
        f" => ({made}) {{ {outputs} = Attention <{attributes}> (q, k, v{extra}) }}"
    )


def scatter(
    slots: str = "64", dtype: str = "float16", attributes: str = 'axis = -2, mode = "linear"'
) -> str:
    return (
        f"g ({dtype}[1,2,{slots},16] past, {dtype}[1,2,N,16] rows, int64[1] at)"
        f" => ({dtype}[1,2,{slots},16] present)"
        f" {{ present = TensorScatter <{attributes}> (past, rows, at) }}"
    )


def dequantize(attributes: str, scale: str, more: str = "", out: str = "float") -> str:
    """A weight w [32, 8] that is dequantized by `scale`, and a product with it."""
    return (
        f"g ({out}[N,32] x) => ({out}[N,8] y) <{scale}> "
        f"{{ d = DequantizeLinear <{attributes}> (w, s{more}) y = MatMul(x, d) }}"
    )


def ones(dims: str, dtype: str = "float", name: str = "s") -> str:
    count = int(np.prod([int(n) for n in dims.split(",")])) if dims else 1
    shape = f"[{dims}]" if dims else ""
    return f"{dtype}{shape} {name} = {{{', '.join(['1.0'] * count)}}}"


INT8 = {"w": Weight(TensorProto.INT8, (32, 8), 1)}
INT4 = {"w": Weight(TensorProto.INT4, (32, 8), 0x11)}
FP8 = {"w": Weight(TensorProto.FLOAT8E4M3FN, (32, 8), 0x38)}

TWO_ATTENTIONS = (
    "g (bfloat16[1,2,N,64] q, bfloat16[1,2,256,64] k, bfloat16[1,2,256,64] v, bool[1,1,N,256] seen)"
    " => (bfloat16[1,2,N,64] y) {{ {mask}"
    " a = Attention <scale = 1.0> (q, k, v, {name})"
    " y = Attention <scale = 1.0> (a, k, v, {name}) }}"
)

IN_BRANCH = (
    "g (float16[1,2,N,16] x, bool c) => (float16[1,2,N,16] y) {{ y = If (c)"
    " <then_branch = t () => (float16[1,2,N,16] a) {{ a = {op} }},"
    " else_branch = e () => (float16[1,2,N,16] b) {{ b = Identity(x) }}> }}"
)
MXFP8 = (
    "g (float16[N,64] x) => (float16[N,64] y) {{ q, s = trt.TRT_MXFP8DynamicQuantize <axis = -1,"
    " block_size = {size}, output_dtype = 17> (x) y = trt.TRT_MXFP8DequantizeLinear <axis = -1,"
    " block_size = {size}, output_dtype = 10> (q, s) }}"
)

PAIRS = [
    Pair("opset", unary("Relu"), unary("Relu"), opset=8, rejects=""),
    Pair(
        "domain",
        "g (float[2,8] x) => (float[2,8] y) { y = com.microsoft.FastGelu(x) }",
        "g (float[2,8] x) => (float[2,8] y) { y = Gelu(x) }",
    ),
    Pair(
        "operator",
        "g (float[8,2] x, bool[8] c) => (float[M,2] y) { y = Compress <axis = 0> (x, c) }",
        "g (float[8,2] x, int64[3] c) => (float[3,2] y) { y = Gather <axis = 0> (x, c) }",
    ),
    Pair("operator", unary("Swish"), unary("Sigmoid"), version="10.16"),
    Pair("operator", attention(", mask"), unary("Relu"), version="10.13", rejects=""),
    Pair("operator-type", unary("Softmax", "int32"), unary("Softmax")),
    Pair(
        "mixed-types",
        "g (float16[2,8] x, float[2,8] z) => (float16[2,8] y) { y = Mul(x, z) }",
        "g (float16[2,8] x, float[2,8] z) => (float[2,8] y) { c = Cast <to = 1> (x) y = Mul(c, z) }",
    ),
    Pair(
        "attribute",
        "g (float[2,8] x) => (float[2,8] y) { y = Softmax <axis = -1, _note = 1> (x) }",
        "g (float[2,8] x) => (float[2,8] y) { y = Softmax <axis = -1> (x) }",
        rejects="",
    ),
    Pair(
        "output-count",
        "g (float[2,8] x, float[8] s) => (float[2,8] y, float[2,1] m)"
        " { y, m = LayerNormalization(x, s) }",
        "g (float[2,8] x, float[8] s) => (float[2,8] y) { y = LayerNormalization(x, s) }",
    ),
    Pair("attention-outputs", attention(", mask", outputs="y, pk, pv"), attention(", mask")),
    Pair("attention-inputs", attention(", mask, old, old"), attention(", mask")),
    Pair("attention-inputs", attention(", mask, , , valid"), attention(", mask"), rejects=""),
    Pair(
        "attention-attribute",
        attention(", mask", "scale = 1.0, softcap = 30.0"),
        attention(", mask"),
    ),
    Pair(
        "attention-attribute",
        attention(", mask", "scale = 1.0, softmax_precision = 1"),
        attention(", mask"),
    ),
    Pair(
        "attention-rank",
        "g (float16[1,N,32] q, float16[1,16,32] k, float16[1,16,32] v) => (float16[1,N,32] y)"
        " { y = Attention <scale = 1.0, q_num_heads = 2, kv_num_heads = 2> (q, k, v) }",
        attention(),
        rejects="",
    ),
    Pair(
        "attention-causal",
        attention(", mask", "scale = 1.0, is_causal = 1"),
        attention("", "scale = 1.0, is_causal = 1"),
    ),
    Pair(
        "attention-mask-type",
        attention(", m").replace("float16[1,1,N,16] mask", "float[1,1,N,16] m"),
        attention(", mask"),
        rejects="build",
    ),
    Pair("attention-scale", attention(", mask", "scale = 0.25"), attention(", mask"), rejects=""),
    Pair("attention-scale", attention(", mask", "is_causal = 0"), attention(", mask"), rejects=""),
    Pair(
        "attention-bool-mask",
        TWO_ATTENTIONS.format(mask="", name="seen"),
        TWO_ATTENTIONS.format(mask="mask = Where(seen, zero, low)", name="mask"),
        rejects="build",
        weights={
            "zero": Weight(TensorProto.BFLOAT16, (), 0),
            "low": Weight(TensorProto.BFLOAT16, (), 0xC6),
        },
    ),
    Pair("cache-length", scatter("C"), scatter()),
    Pair("cache-type", scatter(dtype="float8e4m3fn"), scatter()),
    Pair("cache-axis", scatter(attributes="axis = 1"), scatter()),
    Pair("cache-axis", scatter(attributes='axis = -2, mode = "circular"'), scatter()),
    Pair(
        "cache-input",
        "g (float16[1,2,64,16] x, float16[1,2,N,16] rows, int64[1] at) => (float16[1,2,64,16] present)"
        " { past = Neg(x) present = TensorScatter <axis = -2> (past, rows, at) }",
        scatter(),
        rejects="build",
    ),
    Pair(
        "cache-output",
        "g (float16[1,2,64,16] past, float16[1,2,N,16] rows, int64[1] at) => (float16[1,2,64,16] y)"
        " { present = TensorScatter <axis = -2> (past, rows, at) y = Neg(present) }",
        scatter(),
        rejects="build",
    ),
    Pair(
        "rotary-position",
        "g (float16[1,2,N,16] x, int32[1,N] p) => (float16[1,2,N,16] y)"
        " { y = RotaryEmbedding(x, c, c, p) }",
        "g (float16[1,2,N,16] x, int64[1,N] p) => (float16[1,2,N,16] y)"
        " { y = RotaryEmbedding(x, c, c, p) }",
        weights={"c": Weight(TensorProto.FLOAT16, (4, 8), 0x3C)},
        rejects="",
    ),
    Pair(
        "topk-count",
        "g (float[1,5000] x) => (float[1,K] y, int64[1,K] i) <int64[1] k = {3840}>"
        " { y, i = TopK <axis = -1> (x, k) }",
        "g (float[1,5000] x) => (float[1,K] y, int64[1,K] i) <int64[1] k = {3839}>"
        " { y, i = TopK <axis = -1> (x, k) }",
        rejects="",
    ),
    Pair(
        "topk-sorted",
        "g (float[1,50] x) => (float[1,K] y, int64[1,K] i) <int64[1] k = {5}>"
        " { y, i = TopK <axis = -1, sorted = 0> (x, k) }",
        "g (float[1,50] x) => (float[1,K] y, int64[1,K] i) <int64[1] k = {5}>"
        " { y, i = TopK <axis = -1> (x, k) }",
        rejects="",
    ),
    Pair("eyelike-static", unary("EyeLike", dims="N,N"), unary("EyeLike", dims="8,8")),
    Pair(
        "constant-input",
        "g (float[2,8] x, int64 axis) => (float[2,8] y) { y = CumSum(x, axis) }",
        "g (float[2,8] x) => (float[2,8] y) <int64 axis = {1}> { y = CumSum(x, axis) }",
        rejects="build",
    ),
    Pair(
        "constant-input",
        "g (float[2,8] x, int64[1] axes) => (float[R,S] y) { y = ReduceSum(x, axes) }",
        "g (float[2,8] x) => (float[2,1] y) <int64[1] axes = {1}> { y = ReduceSum(x, axes) }",
    ),
    Pair(
        "scatter-reduction",
        "g (float[8,2] x, int64[3,1] i, float[3,2] u) => (float[8,2] y)"
        ' { y = ScatterND <reduction = "add"> (x, i, u) }',
        "g (float[8,2] x, int64[3,1] i, float[3,2] u) => (float[8,2] y) { y = ScatterND(x, i, u) }",
    ),
    Pair(
        "loop-condition",
        "g (float[2,8] x, int64 n) => (float[2,8] y) { y = Loop (n, , x) <body = b (int64 i, bool c,"
        " float[2,8] a) => (bool d, float[2,8] z) { d = Identity(c) z = Add(a, a) }> }",
        "g (float[2,8] x, int64 n) => (float[2,8] y) <bool yes = {1}> { y = Loop (n, yes, x) <body = b"
        " (int64 i, bool c, float[2,8] a) => (bool d, float[2,8] z) { d = Identity(c) z = Add(a, a) }> }",
    ),
    Pair(
        "loop-shape",
        "g (float[2,8] x, int64 n) => (float[M,8] y) <bool yes = {1}> { y = Loop (n, yes, x) <body = b"
        " (int64 i, bool c, float[R,8] a) => (bool d, float[S,8] z)"
        " { d = Identity(c) z = Concat <axis = 0> (a, a) }> }",
        "g (float[2,8] x, int64 n) => (float[2,8] y) <bool yes = {1}> { y = Loop (n, yes, x) <body = b"
        " (int64 i, bool c, float[2,8] a) => (bool d, float[2,8] z) { d = Identity(c) z = Add(a, a) }> }",
        rejects="build",
    ),
    Pair(
        "if-rank",
        "g (float[2,8] x, bool c) => (float y) { y = If (c) <then_branch = t () => (float[2,8] a)"
        " { a = Neg(x) }, else_branch = e () => (float[16] b) { s = Constant <value_ints = [16]> ()"
        " b = Reshape(x, s) }> }",
        "g (float[2,8] x, bool c) => (float[2,8] y) { y = If (c) <then_branch = t () => (float[2,8] a)"
        " { a = Neg(x) }, else_branch = e () => (float[2,8] b) { b = Exp(x) }> }",
        rejects="build",
    ),
    Pair(
        "zero-point",
        dequantize("axis = 1", ones("8"), ", z"),
        dequantize("axis = 1", ones("8")),
        weights={**INT8, "z": Weight(TensorProto.INT8, (8,), 3)},
    ),
    Pair("node-form", unary("Neg").replace("Neg(x)", "Add(x)"), unary("Neg"), rejects=""),
    Pair(
        "node-form",
        dequantize("axis = 1", ones("8")).replace("(w, s)", "(w)"),
        dequantize("axis = 1", ones("8")),
        weights=INT8,
    ),
    *(
        Pair(
            "layer-name",
            dequantize("axis = 1", ones("8")).replace("d = Deq", f"[{name}] d = Deq"),
            dequantize("axis = 1", ones("8")).replace("y = Mat", f"[{name}] y = Mat"),
            weights=INT8,
        )
        for name in "ws"
    ),
    Pair(
        "layer-name",
        "g (float[N,32] x) => (float[N,8] y) <"
        + ones("8")
        + "> { [a] r = Relu(x) [a] d = DequantizeLinear <axis = 1> (w, s) y = MatMul(r, d) }",
        "g (float[N,32] x) => (float[N,8] y) <"
        + ones("8")
        + "> { [b] r = Relu(x) [a] d = DequantizeLinear <axis = 1> (w, s) [a] y = MatMul(r, d) }",
        weights=INT8,
    ),
    Pair(
        "quantized-type",
        dequantize("axis = 1", ones("8")).replace("(w, s", "(u, s"),
        dequantize("axis = 1", ones("8")),
        weights={**INT8, "u": Weight(TensorProto.UINT8, (32, 8), 1)},
    ),
    Pair(
        "scale-positive",
        dequantize("axis = 1", ones("8").replace("1.0", "-1.0")),
        dequantize("axis = 1", ones("8")),
        weights=INT8,
    ),
    Pair(
        "scale-shape",
        dequantize("axis = 0", ones("8")),
        dequantize("axis = 1", ones("8")),
        weights=INT8,
    ),
    Pair(
        "scale-shape",
        dequantize("axis = 0, block_size = 32", ones("8")),
        dequantize("axis = 0, block_size = 32", ones("1,8")),
        weights=INT4,
    ),
    Pair(
        "block-size",
        dequantize("axis = 0, block_size = 12", ones("2,8")),
        dequantize("axis = 0, block_size = 16", ones("2,8")),
        weights=INT4,
        rejects="",
    ),
    Pair(
        "scale-shape",
        dequantize("axis = 0, block_size = 16", ones("2,4")),
        dequantize("axis = 0, block_size = 16", ones("2,8")),
        weights=INT4,
    ),
    Pair(
        "block-axis",
        "g (float[N,4,8] x) => (float[N,4,8] y) <" + ones("2,2,8") + ">"
        " { d = DequantizeLinear <axis = 0, block_size = 16> (w, s) e = ReduceSum <keepdims = 0> (d) y = Add(x, e) }",
        "g (float[N,4,8] x) => (float[N,4,8] y) <" + ones("32,1,8") + ">"
        " { d = DequantizeLinear <axis = 1, block_size = 2> (w, s) e = ReduceSum <keepdims = 0> (d) y = Add(x, e) }",
        weights={"w": Weight(TensorProto.INT4, (32, 2, 8), 0x11)},
    ),
    Pair(
        "activation-scale",
        "g (float[N,8] x) => (float[N,8] y) <"
        + ones("8")
        + "> { q = QuantizeLinear <axis = 1, output_dtype = 17> (x, s)"
        " y = DequantizeLinear <axis = 1> (q, s) }",
        "g (float[N,8] x) => (float[N,8] y) <"
        + ones("")
        + "> { q = QuantizeLinear <output_dtype = 17> (x, s)"
        " y = DequantizeLinear (q, s) }",
        rejects="",
    ),
    Pair(
        "scale-type",
        "g (float16[N,8] x) => (float16[N,8] y) <" + ones("") + ">"
        " { q = QuantizeLinear <output_dtype = 17> (x, s) y = DequantizeLinear (q, h) }",
        "g (float16[N,8] x) => (float16[N,8] y) <" + ones("") + ">"
        " { q = QuantizeLinear <output_dtype = 17> (x, h) y = DequantizeLinear (q, h) }",
        weights={"h": Weight(TensorProto.FLOAT16, (), 0x3C)},
        rejects="",
    ),
    Pair(
        "shared-scale",
        "g (float[N,8] x) => (float[N,8] y) <"
        + ones("")
        + "> { a = DequantizeLinear (v, s) b = DequantizeLinear (w, s)"
        " p = MatMul(x, a) y = MatMul(p, b) }",
        "g (float[N,8] x) => (float[N,8] y) <"
        + ones("")
        + ", "
        + ones("", name="t")
        + "> { a = DequantizeLinear (v, s)"
        " b = DequantizeLinear (w, t) p = MatMul(x, a) y = MatMul(p, b) }",
        weights={
            "v": Weight(TensorProto.FLOAT8E4M3FN, (8, 8), 0x38),
            "w": Weight(TensorProto.FLOAT8E4M3FN, (8, 8), 0x38),
        },
        rejects="",
    ),
    Pair(
        "initializer-type",
        dequantize("axis = 0, block_size = 32, output_dtype = 1", "").replace("<> ", ""),
        "g (float[N,32] x) => (float[N,8] y) { d = trt.TRT_MXFP8DequantizeLinear <axis = 0, block_size = 32,"
        " output_dtype = 1> (w, u) y = MatMul(x, d) }",
        weights={
            **FP8,
            "s": Weight(TensorProto.FLOAT8E8M0, (1, 8), 127),
            "u": Weight(TensorProto.UINT8, (1, 8), 127),
        },
    ),
    Pair(
        "dynamic-quantize",
        "g (float16[N,32] x) => (float16[N,32] y) <"
        + ones("")
        + "> { q, s8 = trt.TRT_FP4DynamicQuantize <axis = -1,"
        " block_size = 32, scale_type = 17> (x, s) t = DequantizeLinear(s8, s)"
        " d = DequantizeLinear <axis = -1, block_size = 32> (q, t) y = Cast <to = 10> (d) }",
        "g (float16[N,32] x) => (float16[N,32] y) <"
        + ones("")
        + "> { q, s8 = trt.TRT_FP4DynamicQuantize <axis = -1,"
        " block_size = 16, scale_type = 17> (x, s) t = DequantizeLinear(s8, s)"
        " d = DequantizeLinear <axis = -1, block_size = 16> (q, t) y = Cast <to = 10> (d) }",
    ),
    Pair(
        "operator-type",
        "g (uint8[2,8] x) => (uint8[2,8] y) { y = Add(x, x) }",
        "g (uint8[2,8] x) => (float[2,8] y) { y = Cast <to = 1> (x) }",
    ),
    Pair(
        "rank",
        unary("Relu", dims="1,1,1,1,1,1,1,1,2"),
        unary("Relu", dims="1,1,1,1,1,1,1,2"),
    ),
    Pair(
        "types-and-shapes",
        "g (float[2,8] x, float[4,8] w) => (float[2,8] y) { y = MatMul(x, w) }",
        "g (float[2,4] x, float[4,8] w) => (float[2,8] y) { y = MatMul(x, w) }",
    ),
    Pair(
        "types-and-shapes",
        "g (int32[2,8] c, float[2,8] x) => (float[2,8] y) { y = Where(c, x, x) }",
        "g (bool[2,8] c, float[2,8] x) => (float[2,8] y) { y = Where(c, x, x) }",
    ),
    Pair(
        "axis",
        "g (float16[N,8] x, float16[8] s) => (float16[N,8] y) { y = RMSNormalization <axis = 7> (x, s) }",
        "g (float16[N,8] x, float16[8] s) => (float16[N,8] y) { y = RMSNormalization <axis = -1> (x, s) }",
    ),
    Pair(
        "attention-lengths",
        attention(", mask").replace("16,16] v", "32,16] v"),
        attention(", mask"),
    ),
    Pair(
        "rotary-rows",
        "g (float16[B,2,S,16] x, float16[3,S,8] c) => (float16[B,2,S,16] y) { y = RotaryEmbedding(x, c, c) }",
        "g (float16[B,2,S,16] x, float16[B,S,8] c) => (float16[B,2,S,16] y) { y = RotaryEmbedding(x, c, c) }",
    ),
    Pair(
        "cast-type",
        "g (float[2,8] x) => (float8e4m3fn[2,8] y) { y = Cast <to = 17> (x) }",
        "g (float[2,8] x) => (float16[2,8] y) { y = Cast <to = 10> (x) }",
        rejects="build",
    ),
    Pair(
        "attention-in-if",
        IN_BRANCH.format(op="Attention <scale = 1.0> (x, x, x)"),
        IN_BRANCH.format(op="Neg(x)"),
        rejects="build",
    ),
    Pair(
        "attention-heads",
        "g (float16[1,3,N,16] q, float16[1,2,16,16] k) => (float16[1,3,N,16] y)"
        " { y = Attention <scale = 1.0> (q, k, k) }",
        "g (float16[1,4,N,16] q, float16[1,2,16,16] k) => (float16[1,4,N,16] y)"
        " { y = Attention <scale = 1.0> (q, k, k) }",
    ),
    Pair(
        "attention-float32",
        attention(", mask", dtype="float"),
        attention(", mask"),
        rejects="build",
    ),
    Pair(
        "attention-float32",
        attention(", mask", dtype="float"),
        attention(", mask", "scale = 1.0, TRT_decomposable = 1", dtype="float"),
        rejects="build",
    ),
    Pair("control-flow", IN_BRANCH.format(op="Neg(x)"), unary("Neg"), rejects=""),
    Pair(
        "cache-rank",
        "g (float16[2,64,16] past, float16[2,N,16] rows, int64[2] at) => (float16[2,64,16] present)"
        " { present = TensorScatter <axis = -2> (past, rows, at) }",
        scatter(),
    ),
    Pair(
        "four-bit-count",
        "g (float[N,3] x) => (float[N,3] y) <"
        + ones("3")
        + "> { d = DequantizeLinear <axis = 1> (odd, s) y = MatMul(x, d) }",
        "g (float[N,4] x) => (float[N,4] y) <"
        + ones("4")
        + "> { d = DequantizeLinear <axis = 1> (even, s) y = MatMul(x, d) }",
        weights={
            "odd": Weight(TensorProto.INT4, (3, 3), 0x11),
            "even": Weight(TensorProto.INT4, (4, 4), 0x11),
        },
        rejects="",
        elsewhere={"rtx-1.5": "parse", "rtx-1.6": "parse"},
    ),
    Pair(
        "dynamic-quantize",
        "g (float16[N,32] x, float s) => (float16[N,32] y) { q, s8 = trt.TRT_FP4DynamicQuantize"
        " <axis = -1, block_size = 16, scale_type = 17> (x, s) t = DequantizeLinear(s8, s)"
        " d = DequantizeLinear <axis = -1, block_size = 16> (q, t) y = Cast <to = 10> (d) }",
        MXFP8.format(size=32),
    ),
    Pair("dynamic-quantize", MXFP8.format(size=16), MXFP8.format(size=32)),
    Pair("int64-io", unary("Neg", "int64"), unary("Neg", "int32"), rejects=""),
    Pair("bool-io", unary("Not", "bool"), unary("Neg", "int32"), rejects=""),
]


def with_external_weight(directory: Path, length: int) -> Path:
    """The path of a model whose weight of 64 bytes lies in a file of `length` bytes; 0: in none."""
    text = "g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }"
    model = Pair("external-data", text, text).model(broken=True)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(4, 4))
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.onnx.data"), ("offset", "0"), ("length", "64")):
        weight.external_data.add(key=key, value=value)
    model.graph.initializer.append(weight)
    directory.mkdir()
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    if length:
        (directory / "model.onnx.data").write_bytes(bytes(length))
    return directory / "model.onnx"
