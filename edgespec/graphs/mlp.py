"""The gated MLP of a layer, or of one expert of it.

Knows the value that describes it and the activations. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgespec.config import MlpSpec
from edgespec.config.values import Activation
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.linear import linear
from edgespec.graphs.weights import WeightTable


def mlp(
    b: GraphBuilder, table: WeightTable, spec: MlpSpec, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """The gated MLP of x [B, S, H] (arXiv 2002.05202): down(activation(gate(x)) * up(x))."""
    if spec.fused_gate_up:
        fused = linear(b, table, x, f"{weight}.gate_up_proj", f"{name}/gate_up_proj")
        gate, up = b.split(fused, 2 * (spec.intermediate_size,), -1, f"{name}/gate_up")
    else:
        gate, up = (
            linear(b, table, x, f"{weight}.{part}_proj", f"{name}/{part}_proj")
            for part in ("gate", "up")
        )
    inner = b.op("Mul", ACTIVATIONS[spec.activation](b, gate, name), up, name=f"{name}/mul")
    return linear(b, table, inner, f"{weight}.down_proj", f"{name}/down_proj")


def silu(b: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """The SiLU of x: x * sigmoid(x)."""
    return b.op("Mul", x, b.op("Sigmoid", x, name=f"{name}/sigmoid"), name=f"{name}/silu")


def gelu_tanh(b: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """The GELU of x by its tanh approximation (arXiv 1606.08415, section 2)."""
    return b.op("Gelu", x, name=f"{name}/gelu", approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[GraphBuilder, ir.Value, str], ir.Value]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
}
