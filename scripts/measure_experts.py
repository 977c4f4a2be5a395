"""Measures one layer of experts of Qwen3-30B-A3B's shape, by rows and by the experts that they touch.

    python scripts/measure_experts.py [--bits 4] [--block 128] [--rows 1 4 8 16 60] [--alone]
    python scripts/measure_experts.py --mix q4_k_m

Our own kernel, ONNX Runtime's QMoE (whose rounding of rows is another), and every expert for every
row by MatMulNBits, which is what an engine built with `--kernels onnxruntime` does. Of weights as
published files mix them: our own kernel, and every expert for every row by LowBitMatMul. One process,
one thread, processor time, alternating; the least and the median of several runs, each of other
rows with other experts, so that no expert is still in a cache. Rows choose their experts by
themselves (`--same`: all the same ones). About 1.4 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.backends.ort.experts import PARTS, ExpertsLayout, Part
from edgespec.backends.ort.low_bit_matmul import IN_BLOCKS, attributes
from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import DOMAIN, kernels
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
MICROSOFT = "com.microsoft"
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8}
Values = NDArray[np.int8]
Scales = NDArray[np.float32]


class Model:
    """A graph whose weights stand in a file beside it, which sessions map."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.with_suffix(".data").open("wb")
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []

    def node(
        self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **more: Any
    ) -> None:
        """Add a node."""
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **more))

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """Write a weight at the next page of the file."""
        offset = -(-self.data.tell() // 4096) * 4096
        self.data.seek(offset)
        self.data.write(np.ascontiguousarray(array).data)
        tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = TYPES[str(array.dtype)]
        about = {"location": Path(self.data.name).name, "offset": offset, "length": array.nbytes}
        for key, value in about.items():
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name

    def constant(self, name: str, number: int) -> str:
        """A whole number in the graph itself."""
        self.tensors.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
        return name

    def session(self, inputs: dict[str, tuple[str, int]], threads: int) -> ort.InferenceSession:
        """The open session: names of inputs with their types and widths."""
        self.data.close()
        info = helper.make_tensor_value_info
        given = [info(name, TYPES[kind], ["n", width]) for name, (kind, width) in inputs.items()]
        made = [info("y", TensorProto.FLOAT, ["n", HIDDEN])]
        graph = helper.make_graph(self.nodes, "experts", given, made, self.tensors)
        domains = (("", 24), (MICROSOFT, 1), (DOMAIN, 1))
        opsets = [helper.make_opsetid(d, v) for d, v in domains]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), self.path)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        kernels().register(options)
        return ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])


# Forms of gate and up, and of down
MIXES = {
    "q4_k_m": (WeightLayout(4, 32, 1, 1, "super_min", 8), WeightLayout(6, 16, 1, 1, "super", 16)),
    "nvfp4": (WeightLayout(4, 16, 1, 1, "float16", 1, "fp4"),) * 2,
}


class Weights:
    """Random experts, one at a time."""

    def __init__(self, forms: tuple[WeightLayout, WeightLayout]) -> None:
        up = replace(forms[0], in_features=HIDDEN, out_features=INNER)
        down = replace(forms[1], in_features=INNER, out_features=HIDDEN)
        self.bits, self.block = up.bits, up.block
        scales = np.random.default_rng(0).uniform(0.5, 1.5, EXPERTS * len(PARTS))
        own = tuple(scales.astype(np.float32).tolist()) if up.codebook else (1.0,)
        self.layout = ExpertsLayout(EXPERTS, up, down, own)

    def of(self, expert: int, part: str) -> tuple[Values, Scales]:
        """Values [out, in] and scales [out, blocks]."""
        layout = self.layout.down if part == "down" else self.layout.up
        random = np.random.default_rng([expert, len(part)])
        shape, half = (layout.out_features, layout.in_features), 1 << layout.bits - 1
        low = 0 if layout.has_minimums else -half
        values = random.integers(low, low + 2 * half, shape, np.int8)
        scales = random.uniform(0.5, 1.5, (shape[0], layout.num_blocks)) / (half * shape[1] ** 0.5)
        return values, scales.astype(np.float32)

    def quantized(self, expert: int, part: Part) -> QuantizedWeight:
        """A weight as it is packed."""
        layout = self.layout.layout(part, expert)
        scheme = SCHEMES[f"int{4 if layout.bits == 4 else 8}_wo"]
        values, scales = self.of(expert, part)
        weight = QuantizedWeight("weight", scheme, values, scales, (1, layout.block))
        if layout.scales == "float32":
            return weight
        random, width = np.random.default_rng([expert, len(part)]), layout.in_features
        if layout.codebook:
            codes = values.view(np.uint8) & np.uint8(0xF)
            weight = replace(weight, values=codes.view(ml_dtypes.float4_e2m1fn))
            halves = (scales * 20).astype(np.float16)
            return replace(weight, scales=halves, global_scale=2 * layout.global_scale)
        shape = len(values), layout.num_super_blocks
        factors = np.full(shape, 0.02 / (1 << layout.bits) / width**0.5, np.float16)
        low, size = (0 if layout.has_minimums else -100), scales.shape
        parts = random.integers(low, 64, size).astype(np.uint8 if low == 0 else np.int8)
        more: dict[str, Any] = {"super_block": layout.super_block, "super_scales": factors}
        if layout.has_minimums:
            values = values.astype(np.uint8)
            more |= {"minimums": parts[:, ::-1], "super_minimums": factors * np.float16(8)}
        return replace(weight, values=values, scales=parts, **more)

    def unsigned(self, values: Values) -> NDArray[np.uint8]:
        """Values as ONNX Runtime's operators have them, two of 4 bits in a byte."""
        found = (values.astype(np.int16) + 2 ** (self.bits - 1)).astype(np.uint8)
        return found if self.bits == 8 else found[:, 0::2] | (found[:, 1::2] << np.uint8(4))


def own(weights: Weights, path: Path, threads: int) -> ort.InferenceSession:
    """Our kernel."""
    layout, model = weights.layout, Model(path)
    packed = np.empty(layout.count * layout.expert_bytes, np.uint8)
    for e in range(EXPERTS):
        for part in PARTS:
            start, distance = layout.place(e, part)
            for i, panel in enumerate(layout.layout(part, e).pack(weights.quantized(e, part))):
                at = start + i * distance
                packed[at : at + panel.size] = panel.reshape(-1)
    name = model.weight("experts", packed.reshape(layout.shape))
    del packed
    more = {**layout.attributes, "activation": 0, "normalized": 1}
    model.node("Experts", ["x", "ids", "weights", name], ["y"], DOMAIN, **more)
    given = {"x": ("float32", HIDDEN), "ids": ("int64", CHOSEN), "weights": ("float32", CHOSEN)}
    return model.session(given, threads)


def every(weights: Weights, path: Path, threads: int) -> ort.InferenceSession:
    """Every expert for every row, by LowBitMatMul."""
    layout, model = weights.layout, Model(path)
    for e in range(EXPERTS):
        layouts = {part: layout.layout(part, e) for part in PARTS}
        names = {
            part: model.weight(f"{part}w{e}", layouts[part].pack(weights.quantized(e, part)))
            for part in PARTS
        }
        both = attributes([layouts["gate"], layouts["up"]], IN_BLOCKS)
        outputs = [f"gate{e}", f"up{e}"]
        model.node("LowBitMatMul", ["x", names["gate"], names["up"]], outputs, DOMAIN, **both)
        gated(model, e)
        more = attributes([layouts["down"]], IN_BLOCKS)
        model.node("LowBitMatMul", [f"inner{e}", names["down"]], [f"out{e}"], DOMAIN, **more)
        shared(model, e)
    model.node("Sum", [f"scaled{e}" for e in range(EXPERTS)], ["y"])
    return model.session({"x": ("float32", HIDDEN), "shares": ("float32", EXPERTS)}, threads)


def gated(model: Model, e: int) -> None:
    """What down multiplies, of what gate and up give."""
    model.node("Sigmoid", [f"gate{e}"], [f"s{e}"])
    model.node("Mul", [f"gate{e}", f"s{e}"], [f"silu{e}"])
    model.node("Mul", [f"silu{e}", f"up{e}"], [f"inner{e}"])


def shared(model: Model, e: int) -> None:
    """What an expert adds to each row."""
    index = model.constant(f"i{e}", e)
    model.node("Gather", ["shares", index], [f"share{e}"], axis=-1)
    model.node("Mul", [f"out{e}", f"share{e}"], [f"scaled{e}"])


def dense(weights: Weights, path: Path, threads: int) -> ort.InferenceSession:
    """Every expert for every row, by MatMulNBits."""
    model, form = Model(path), {"bits": weights.bits, "block_size": weights.block}
    form["accuracy_level"] = 4
    blocks = (-1, weights.block * weights.bits // 8)
    for e in range(EXPERTS):
        (gate, gate_scales), (up, up_scales) = weights.of(e, "gate"), weights.of(e, "up")
        both = weights.unsigned(np.concatenate([gate, up])).reshape(2 * INNER, *blocks)
        names = [model.weight(f"gu{e}", both)]
        names += [model.weight(f"gus{e}", np.concatenate([gate_scales, up_scales]).reshape(-1))]
        down, down_scales = weights.of(e, "down")
        packed = weights.unsigned(down).reshape(HIDDEN, *blocks)
        others = [model.weight(f"d{e}", packed), model.weight(f"ds{e}", down_scales.reshape(-1))]
        wide = {"K": HIDDEN, "N": 2 * INNER, **form}
        model.node("MatMulNBits", ["x", *names], [f"both{e}"], MICROSOFT, **wide)
        model.node("Split", [f"both{e}"], [f"gate{e}", f"up{e}"], axis=-1, num_outputs=2)
        gated(model, e)
        narrow = {"K": INNER, "N": HIDDEN, **form}
        model.node("MatMulNBits", [f"inner{e}", *others], [f"out{e}"], MICROSOFT, **narrow)
        shared(model, e)
    model.node("Sum", [f"scaled{e}" for e in range(EXPERTS)], ["y"])
    return model.session({"x": ("float32", HIDDEN), "shares": ("float32", EXPERTS)}, threads)


def qmoe(weights: Weights, path: Path, threads: int) -> ort.InferenceSession:
    """ONNX Runtime's own mixture of experts: gate and up row by row in turn."""
    model = Model(path)
    bytes_of = weights.bits * HIDDEN // 8
    first = np.empty((EXPERTS, 2 * INNER, bytes_of), np.uint8)
    first_scales = np.empty((EXPERTS, 2 * INNER, HIDDEN // weights.block), np.float32)
    second = np.empty((EXPERTS, HIDDEN, weights.bits * INNER // 8), np.uint8)
    second_scales = np.empty((EXPERTS, HIDDEN, INNER // weights.block), np.float32)
    for e in range(EXPERTS):
        for p, part in enumerate(("gate", "up")):
            values, first_scales[e, p::2] = weights.of(e, part)
            first[e, p::2] = weights.unsigned(values)
        values, second_scales[e] = weights.of(e, "down")
        second[e] = weights.unsigned(values)
    names = [model.weight("w1", first), model.weight("s1", first_scales), ""]
    names += [model.weight("w2", second), model.weight("s2", second_scales)]
    del first, second
    model.node(
        "QMoE",
        ["x", "logits", *names],
        ["y"],
        MICROSOFT,
        k=CHOSEN,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=1,
        expert_weight_bits=weights.bits,
        block_size=weights.block,
    )
    return model.session({"x": ("float32", HIDDEN), "logits": ("float32", EXPERTS)}, threads)


def call_of(rows: int, seed: int, same: bool) -> tuple[dict[str, NDArray[Any]], int]:
    """What the sessions read of one call, and how many experts its rows touch."""
    random = np.random.default_rng([rows, seed])
    ids = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(rows)])
    if same:
        ids[:] = ids[0]
    chosen = random.uniform(0.5, 2, (rows, CHOSEN)).astype(np.float32)
    logits = np.full((rows, EXPERTS), -30, np.float32)
    np.put_along_axis(logits, ids, chosen, 1)
    exponents = np.exp(logits)
    shares = exponents / exponents.sum(1, keepdims=True)
    x = random.standard_normal((rows, HIDDEN)).astype(np.float32)
    weights = np.take_along_axis(shares, ids, 1)
    given = {"x": x, "ids": ids.astype(np.int64), "weights": weights, "logits": logits}
    given["shares"] = np.where(shares > 1e-6, shares, 0).astype(np.float32)
    return given, len(np.unique(ids))


def run(
    session: ort.InferenceSession, call: dict[str, Any], clock: Callable[[], int]
) -> tuple[float, Any]:
    """The time of one run in ms, and what it gives."""
    given = {value.name: call[value.name] for value in session.get_inputs()}
    began = clock()
    (y,) = session.run(None, given)
    return (clock() - began) / 1e6, y


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--mix", choices=MIXES, help="instead: as published files mix weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 60])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1, help="with more than one, wall time")
    parser.add_argument("--same", action="store_true", help="all rows choose the same experts")
    parser.add_argument("--alone", action="store_true", help="our own kernel alone")
    parser.add_argument("--level", help="of instructions")
    args = parser.parse_args()
    if args.level:
        kernels().use_level(args.level)
    clock = time.thread_time_ns if args.threads == 1 else time.perf_counter_ns
    plain = WeightLayout(4 if args.bits == 4 else 8, args.block, 1, 1)
    weights = Weights(MIXES.get(args.mix, (plain, plain)))
    forms = {"own": own, "every": every} if args.mix else {"own": own, "QMoE": qmoe, "dense": dense}
    if args.alone:
        forms = {"own": own}
    one_mb = weights.layout.expert_bytes / 1e6
    about = args.mix or f"{args.bits} bits, blocks of {args.block}"
    print(f"{kernels().level}, {about}: {one_mb:.2f} MB an expert")
    with tempfile.TemporaryDirectory() as directory:
        sessions = {
            name: make(weights, Path(directory) / f"{name}.onnx", args.threads)
            for name, make in forms.items()
        }
        for session in sessions.values():  # everything is mapped and made ready
            run(session, call_of(128, 0, same=False)[0], clock)
        first: dict[str, float] = {}
        for rows in args.rows:
            times: dict[str, list[float]] = {name: [] for name in sessions}
            touched: list[int] = []
            for seed in range(args.runs + 1):
                call, count = call_of(rows, seed, args.same)
                found = {name: run(session, call, clock) for name, session in sessions.items()}
                if seed == 0:
                    size = np.sqrt(np.mean(found["own"][1] ** 2))
                    for name, (_, y) in found.items():
                        error = np.sqrt(np.mean((y - found["own"][1]) ** 2)) / size
                        if not error < 0.05:
                            raise SystemExit(f"{name} differs from our kernel by {error:.3f}")
                    continue
                touched.append(count)
                for name, (ms, _) in found.items():
                    times[name].append(ms)
            line = f"{rows:3} rows, {np.mean(touched):5.1f} experts:"
            for name, all_ms in times.items():
                least, median = min(all_ms), float(np.median(all_ms))
                first.setdefault(name, least)
                line += (
                    f"  {name} {least:7.2f} ms ({median:7.2f}), t/t(1) {least / first[name]:5.2f};"
                )
                if name == "own":
                    line += f" {1e3 * least / np.mean(touched):5.1f} us an expert,"
                    line += f" {np.mean(touched) * one_mb / least:4.1f} GB/s;"
                else:
                    line += f" {least / min(times['own']):.1f} times ours;"
            print(line, flush=True)


if __name__ == "__main__":
    main()
