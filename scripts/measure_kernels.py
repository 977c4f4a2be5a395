"""Measures LowBitMatMul beside ONNX Runtime's MatMulNBits, on the products of Qwen3-0.6B's shape.

    python scripts/measure_kernels.py [--bits 4] [--block 128] [--layers 8] [--rows 1 2 4 8 ...]

One process, one thread, processor time, the two alternating; of each the least and the median of
several runs. The weights are larger than the caches: layers of the model (q, k and v as one
product, gate and up as one), or its head with --head.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import DOMAIN, kernels
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES

LAYER = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
HEAD = ((1024, 151936),)


def packed_for_nbits(bits: int, block: int, values: np.ndarray) -> np.ndarray:
    """Values [out, in] as MatMulNBits has them."""
    unsigned = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << np.uint8(4))
    return unsigned.reshape(len(values), -1, block * bits // 8)


class Products:
    """A session of products by many weights; `native` ones stand in a mapped file."""

    def __init__(self, args: argparse.Namespace, native: bool, directory: Path) -> None:
        name = "native" if native else "nbits"
        self.data = (directory / f"{name}.data").open("wb")
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        shapes = HEAD if args.head else LAYER * args.layers
        random = np.random.default_rng(0)
        for index, (width, out) in enumerate(shapes):
            values = random.integers(
                -(2 ** (args.bits - 1)), 2 ** (args.bits - 1), (out, width), np.int8
            )
            scales = random.uniform(0.001, 0.002, (out, -(-width // args.block))).astype(np.float32)
            form = {"K": width, "N": out, "bits": args.bits, "block_size": args.block}
            if native:
                layout = WeightLayout(args.bits, args.block, width, out)
                scheme = SCHEMES[f"int{args.bits}_wo"]
                weight = QuantizedWeight("weight", scheme, values, scales, (1, args.block))
                names = [self.store(f"w{index}", layout.pack(weight))]
                form = {"K": width, "N": [out], **layout.attributes}
                node, domain = "LowBitMatMul", DOMAIN
            else:
                packed = packed_for_nbits(args.bits, args.block, values)
                names = [
                    self.store(f"w{index}", packed),
                    self.store(f"s{index}", scales.reshape(-1)),
                ]
                node, form["accuracy_level"], domain = "MatMulNBits", 4, "com.microsoft"
            self.nodes.append(
                helper.make_node(node, [f"x{width}", *names], [f"y{index}"], domain=domain, **form)
            )
        self.data.close()
        self.widths = sorted({width for width, _ in shapes})
        info = helper.make_tensor_value_info
        inputs = [info(f"x{width}", TensorProto.FLOAT, ["n", width]) for width in self.widths]
        outputs = [
            info(f"y{i}", TensorProto.FLOAT, ["n", out]) for i, (_, out) in enumerate(shapes)
        ]
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.tensors)
        opsets = [
            helper.make_opsetid(d, v) for d, v in (("", 24), ("com.microsoft", 1), (DOMAIN, 1))
        ]
        path = directory / f"{name}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = args.threads, 3
        kernels().register(options)
        began = time.process_time()
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.load_s = time.process_time() - began
        self.num_bytes = path.with_suffix(".data").stat().st_size

    def store(self, name: str, array: np.ndarray) -> str:
        """Write a weight at the next page of the file."""
        offset = -(-self.data.tell() // 4096) * 4096
        self.data.seek(offset)
        self.data.write(array.data)
        tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = TensorProto.UINT8 if array.dtype == np.uint8 else TensorProto.FLOAT
        about = {"location": Path(self.data.name).name, "offset": offset, "length": array.nbytes}
        for key, value in about.items():
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name

    def bind(self, rows: int) -> None:
        """Rows in, and room for what comes out, kept from run to run: one for all products of a
        width, as an engine has it."""
        random = np.random.default_rng(1)
        self.binding, self.arrays = self.session.io_binding(), []
        for width in self.widths:
            x = random.standard_normal((rows, width)).astype(np.float32)
            self.arrays.append(x)
            self.binding.bind_input(f"x{width}", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        room: dict[int, np.ndarray] = {}
        for value in self.session.get_outputs():
            y = room.setdefault(value.shape[1], np.empty((rows, value.shape[1]), np.float32))
            self.binding.bind_output(value.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
        self.arrays += room.values()

    def run(self, clock: Any) -> float:
        """The time of one run, in ms."""
        began = clock()
        self.session.run_with_iobinding(self.binding)
        return (clock() - began) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 60, 256])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="with more than one, wall time")
    parser.add_argument("--level", help="of instructions")
    parser.add_argument("--alone", action="store_true", help="without MatMulNBits")
    args = parser.parse_args()
    if args.level:
        kernels().use_level(args.level)
    clock = time.thread_time_ns if args.threads == 1 else time.perf_counter_ns
    with tempfile.TemporaryDirectory() as directory:
        products = [
            Products(args, native, Path(directory))
            for native in ([True] if args.alone else [True, False])
        ]
        megabytes = " and ".join(f"{p.num_bytes / 1e6:.0f} MB" for p in products)
        print(
            f"{kernels().level}, {args.bits} bits, blocks of {args.block}: {megabytes};",
            "loaded in",
            *(f"{p.load_s:.2f} s" for p in products),
        )
        first: list[float] = []
        for rows in args.rows:
            for product in products:
                product.bind(rows)
                product.run(clock)
            times = np.array([[p.run(clock) for p in products] for _ in range(args.runs)])
            least, median = times.min(0), np.median(times, 0)
            first = first or list(least)
            speed = products[0].num_bytes / least[0] / 1e6
            line = f"{rows:4} rows: {least[0]:8.2f} ms ({median[0]:8.2f}), t/t(1) {least[0] / first[0]:5.2f}, {speed:5.1f} GB/s"
            if not args.alone:
                line += f";  MatMulNBits {least[1]:8.2f} ({median[1]:8.2f}), {least[1] / first[1]:5.2f};  {least[1] / least[0]:.2f} times as fast"
            print(line, flush=True)


if __name__ == "__main__":
    main()
