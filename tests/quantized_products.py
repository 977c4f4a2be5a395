"""A graph of one quantized Linear of each scheme, as export writes it, lowered or not.

Knows weights and passes. Knows no parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends.ort.emulate import Emulation
from edgespec.backends.ort.quantized_values import quantized_values
from edgespec.backends.tensorrt.lowering import opset, precision, quantization
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import TensorSpec
from edgespec.export.writer import write_weights
from edgespec.graphs.builder import GraphBuilder, WeightPlan
from edgespec.graphs.linear import linear
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES
from tests.one_weight import NAME, table_of
from tests.tensorrt_operators import OUTPUT, evaluated

# Bases that ModelOpt quantized, of tests/modelopt_exports.py
EXPORTS = ("fp8", "int4_awq", "int8_sq", "nvfp4", "mxfp8", "w4a8_awq", "fp8_token", "mixed")
Array = NDArray[Any]

OUT, IN, ROWS = 48, 128, 7
STEP = 0.004  # of static activations
EXACT = 1e-5  # of the largest value
# In half precision a value between two quantized ones may fall to either side
HALVES: dict[Compute, float] = {"float16": 0.0025, "bfloat16": 0.02}


def weight(
    scheme: str,
    block: tuple[int, int],
    kind: str = "",
    shape: tuple[int, int] = (OUT, IN),
    scales_type: str = "float32",
    **more: Any,
) -> QuantizedWeight:
    """Random values [out, in] and scales of a scheme."""
    rng, dtype = np.random.default_rng(0), kind or SCHEMES[scheme].weight
    values = (
        rng.integers(-7, 8, shape) if dtype.startswith("int") else rng.standard_normal(shape) * 3
    ).astype(getattr(ml_dtypes, dtype, dtype))
    blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scales: Array = rng.uniform(0.01, 0.1, blocks).astype(scales_type)
    if scheme == "mxfp8":
        scales = np.exp2(rng.integers(-8, -2, blocks)).astype(ml_dtypes.float8_e8m0fnu)
    elif "nvfp4" in scheme:
        scales = rng.uniform(1, 400, blocks).astype(ml_dtypes.float8_e4m3fn)
        more["global_scale"] = 3e-4
    return QuantizedWeight(NAME, SCHEMES[scheme], values, scales, block, **more)


SMOOTH = np.random.default_rng(1).uniform(0.5, 2, IN).astype(np.float32)
WEIGHTS = {
    "fp8": weight("fp8", (OUT, IN), input_scale=STEP),
    "int8_sq": weight("int8_sq", (1, IN), input_scale=5 * STEP, pre_quant_scale=SMOOTH),
    "int4_awq": weight("int4_awq", (1, 32), pre_quant_scale=SMOOTH),
    "int4_wo": weight("int4_wo", (1, 128)),
    "int8_wo": weight("int8_wo", (1, IN)),
    "int8_wo-blocks": weight("int8_wo", (1, 32)),
    "fp8_block": weight("fp8_block", (16, 32)),
    "nvfp4": weight("nvfp4", (1, 16), input_scale=2e-3),
    "w4a16_nvfp4": weight("w4a16_nvfp4", (1, 16)),
    "mxfp8": weight("mxfp8", (1, 32)),
    "w4a8_awq": weight("w4a8_awq", (1, 32), input_scale=STEP, pre_quant_scale=SMOOTH),
    "fp8_token": weight("fp8_token", (1, IN)),
    "int8_token": weight("int8_token", (1, IN)),
    "q8_0": weight("q8_0", (1, 32), scales_type="float16"),
}
# TensorRT has no product for them: their activations are not rounded
NOT_ROUNDED = ("w4a8_awq", "fp8_token", "int8_token")


@dataclass
class Product:
    """A graph of one Linear, and where its weight stands."""

    model: ir.Model
    directory: Path

    @classmethod
    def of(cls, stored: QuantizedWeight, directory: Path) -> Product:
        plan = WeightPlan("data")
        b = GraphBuilder("graph", plan)
        outputs, inputs = stored.values.shape
        x = b.input(TensorSpec("x", "float32", ("B", "S", inputs)))
        y = linear(b, table_of(stored), x, NAME, "up")
        b.output(y, TensorSpec("y", "float32", ("B", "S", outputs)))
        write_weights(plan, directory / "data", lambda _: None)
        path = directory / file_names.MODEL
        ir.save(b.model(), path)
        return cls(ir.load(path), directory)

    def run(self, x: Array) -> Array:
        """The output in float32."""
        dtype = OUTPUT[int(self.model.graph.inputs[0].dtype or 1)]
        found: Array = evaluated(self.model, self.directory, {"x": x.astype(dtype)})["y"]
        return found.astype(np.float32)

    def emulate(self, *without: str) -> Product:
        """Round activations in standard operators, but those of the schemes `without`."""
        emulation = Emulation(self.model.graph)
        for node in [n for n in self.model.graph.all_nodes() if n.op_type == "MatMul"]:
            source = quantized_values(node)
            if source is not None and source.scheme.name not in without:
                emulation.round_input(node, source.scheme)
        return self

    def lower(self, compute: Compute, dialect: Dialect = Dialect.NATIVE) -> Product:
        """Only what makes quantized products, and then the types."""
        for value in (*self.model.graph.inputs, *self.model.graph.outputs):
            value.type = ir.TensorType(precision.TYPES[compute])
        for apply in (quantization.apply, precision.apply):
            apply(self.model, target(compute))
        if dialect is Dialect.PORTABLE:
            opset.apply(self.model, target(compute))
        return self


def target(compute: Compute, dialect: Dialect = Dialect.NATIVE) -> Target:
    return Target(dialect=dialect, compute=compute, capacity=32, max_rows=16)


def keep_static(product: Product) -> Product:
    """Without the rounding of static activations, where the lowering leaves it out."""
    for node in [n for n in product.model.graph if n.op_type == "QuantizeLinear"]:
        ((reader, _),) = node.outputs[0].uses()
        source = node.inputs[0]
        assert source is not None
        reader.outputs[0].replace_all_uses_with(source)
    return product
