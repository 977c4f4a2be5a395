"""What image encoders are made of: norms, attention over windows or over all patches, MLPs, and the
merger that makes rows of the language model.

Rows are patches of one image, [P, H]; images never see each other. Knows the canonical operators
and the values that describe an encoder. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.config import NormSpec, VisionConfig
from edgespec.config.values import VisionActivation
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.layers import norm as rms_norm
from edgespec.graphs.linear import fp32, linear
from edgespec.graphs.mlp import gelu_tanh, silu
from edgespec.graphs.weights import WeightTable


@dataclass(frozen=True, slots=True)
class AttentionGroups:
    """Which patches see each other in a layer, W groups of N of them, and their rotations."""

    rope_cos: ir.Value  # [W, N, head_dim/2]
    rope_sin: ir.Value
    index: ir.Value | None = None  # [W, N], the patch at each place; None: all, in their order
    used: ir.Value | None = None  # bool [W, N, 1]
    mask: ir.Value | None = None  # bool [W, 1, N, N]
    place: ir.Value | None = None  # [P], where each patch stands among the W * N places


def axes(b: GraphBuilder, *numbers: int) -> ir.Value:
    """The axes of an Unsqueeze or a Squeeze, or of a sum."""
    return b.constant(f"axes/{'x'.join(map(str, numbers))}", np.array(numbers, np.int64))


def full_groups(b: GraphBuilder, inputs: Mapping[str, ir.Value]) -> AttentionGroups:
    """Each patch sees all of them."""
    cos, sin = (
        b.op("Unsqueeze", inputs[name], axes(b, 0), name=f"all/{name}")
        for name in ("rope_cos", "rope_sin")
    )
    return AttentionGroups(cos, sin)


def window_groups(
    b: GraphBuilder, config: VisionConfig, inputs: Mapping[str, ir.Value]
) -> AttentionGroups:
    """Each patch sees its window."""
    index, used = inputs["window_index"], inputs["window_mask"]
    cos, sin = (
        b.op("Gather", inputs[name], index, name=f"windows/{name}", axis=0)
        for name in ("rope_cos", "rope_sin")
    )
    column = b.op("Unsqueeze", used, axes(b, -1), name="windows/used")
    seen = b.op("Unsqueeze", used, axes(b, 1, 2), name="windows/seen")
    by_query = b.shape(1, 1, config.window_side**2, 1)  # ONNX Runtime wants each query's row
    mask = b.op("Expand", seen, by_query, name="windows/mask")
    return AttentionGroups(cos, sin, index, column, mask, inputs["window_place"])


def block(
    b: GraphBuilder,
    table: WeightTable,
    config: VisionConfig,
    x: ir.Value,
    groups: AttentionGroups,
    weight: str,
    name: str,
) -> ir.Value:
    """One layer over x [P, H]: x + attention(norm(x)), then x + mlp(norm(x))."""
    normed = norm(b, table, config, x, f"{weight}.norm1", f"{name}/norm1")
    mixed = attention(b, table, config, normed, groups, f"{weight}.attn", f"{name}/attn")
    x = b.op("Add", x, mixed, name=f"{name}/attn_residual")
    normed = norm(b, table, config, x, f"{weight}.norm2", f"{name}/norm2")
    out = mlp(b, table, config, normed, f"{weight}.mlp", f"{name}/mlp")
    return b.op("Add", x, out, name=f"{name}/mlp_residual")


def norm(
    b: GraphBuilder, table: WeightTable, config: VisionConfig, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) of x over its last axis."""
    if config.norm == "rms":
        return rms_norm(b, table, NormSpec(config.norm_eps), x, weight, name)
    scale, bias = (
        fp32(b, table.value(b, f"{weight}.{kind}"), f"{name}/{kind}") for kind in ("weight", "bias")
    )
    return b.op(
        "LayerNormalization",
        x,
        scale,
        bias,
        name=name,
        axis=-1,
        epsilon=config.norm_eps,
        stash_type=1,
    )


def attention(
    b: GraphBuilder,
    table: WeightTable,
    config: VisionConfig,
    x: ir.Value,
    groups: AttentionGroups,
    weight: str,
    name: str,
) -> ir.Value:
    """Attention of x [P, H] in both directions; q, k and v are rows of one product.

    Q carries the scale, as in decoders. Places of windows without a patch hold zeros, which no
    patch sees: a NaN there would outlive a weight of zero.
    """
    fused = linear(b, table, x, f"{weight}.qkv", f"{name}/qkv")
    if groups.index is None:
        rows = b.op("Unsqueeze", fused, axes(b, 0), name=f"{name}/rows")
    else:
        rows = b.op("Gather", fused, groups.index, name=f"{name}/rows", axis=0)
        zero = b.constant("zero", np.array(0, np.float32))
        rows = b.op("Where", groups.used, rows, zero, name=f"{name}/rows/used")
    q, k, v = b.split(rows, 3 * (config.hidden_size,), -1, f"{name}/parts")
    scale = np.array(config.head_dim**-0.5, np.float32)
    scale_value = b.constant(f"attention_scale/{float(scale):.9g}", scale)
    q = b.op("Mul", rotated(b, config, q, groups, f"{name}/q"), scale_value, name=f"{name}/q/scale")
    k = rotated(b, config, k, groups, f"{name}/k")
    v = by_head(b, config, v, f"{name}/v")
    mixed = b.op("Attention", q, k, v, groups.mask, name=f"{name}/attention", scale=1.0)
    by_row = b.op("Transpose", mixed, name=f"{name}/out/transpose", perm=(0, 2, 1, 3))
    flat = b.op("Reshape", by_row, b.shape(-1, config.hidden_size), name=f"{name}/out/flat")
    if groups.place is not None:
        flat = b.op("Gather", flat, groups.place, name=f"{name}/out/rows", axis=0)
    return linear(b, table, flat, f"{weight}.proj", f"{name}/proj")


def by_head(b: GraphBuilder, config: VisionConfig, x: ir.Value, name: str) -> ir.Value:
    """[W, N, heads*D] -> [W, heads, N, D]."""
    shape = b.shape(0, 0, config.num_heads, config.head_dim)
    heads = b.op("Reshape", x, shape, name=f"{name}/heads")
    return b.op("Transpose", heads, name=f"{name}/transpose", perm=(0, 2, 1, 3))


def rotated(
    b: GraphBuilder, config: VisionConfig, x: ir.Value, groups: AttentionGroups, name: str
) -> ir.Value:
    """The same with rotary embedding (rotate-half) over whole heads."""
    heads = by_head(b, config, x, name)
    return b.op("RotaryEmbedding", heads, groups.rope_cos, groups.rope_sin, name=f"{name}/rope")


def mlp(
    b: GraphBuilder, table: WeightTable, config: VisionConfig, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """down(activation(gate(x)) * up(x)), or fc2(activation(fc1(x))), of x [P, H]."""
    activation = ACTIVATIONS[config.activation]
    if not config.gated_mlp:
        inner = linear(b, table, x, f"{weight}.linear_fc1", f"{name}/fc1")
        return linear(b, table, activation(b, inner, name), f"{weight}.linear_fc2", f"{name}/fc2")
    gate, up = (
        linear(b, table, x, f"{weight}.{part}_proj", f"{name}/{part}_proj")
        for part in ("gate", "up")
    )
    inner = b.op("Mul", activation(b, gate, name), up, name=f"{name}/mul")
    return linear(b, table, inner, f"{weight}.down_proj", f"{name}/down_proj")


def merger(
    b: GraphBuilder,
    table: WeightTable,
    config: VisionConfig,
    x: ir.Value,
    weight: str,
    *,
    norm_merged: bool,
) -> ir.Value:
    """The rows [T, out_hidden] of x [P, H]: patches of a block side by side, through two Linears.
    The norm is over each patch, or with `norm_merged` over all patches of a block."""
    side_by_side = b.shape(-1, config.merged_size)
    if norm_merged:
        x = b.op("Reshape", x, side_by_side, name=f"{weight}/merged")
    x = norm(b, table, config, x, f"{weight}.norm", f"{weight}/norm")
    if not norm_merged:
        x = b.op("Reshape", x, side_by_side, name=f"{weight}/merged")
    inner = gelu(b, linear(b, table, x, f"{weight}.linear_fc1", f"{weight}/fc1"), weight)
    return linear(b, table, inner, f"{weight}.linear_fc2", f"{weight}/fc2")


def gelu(b: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """The GELU of x (arXiv 1606.08415)."""
    return b.op("Gelu", x, name=f"{name}/gelu", approximate="none")


ACTIVATIONS: Mapping[VisionActivation, Callable[[GraphBuilder, ir.Value, str], ir.Value]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}
