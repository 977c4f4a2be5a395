"""What decoder layers are made of: RMSNorm, rotary attention over a preallocated cache, an MLP or
experts.

Knows the canonical operators (ONNX opset 24) and the values that describe a layer. Knows no family:
names of weights come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.config import AttentionSpec, DecoderConfig, LayerSpec, NormSpec
from edgespec.config.tensors import qkv_rows
from edgespec.contract import GraphShape, Role
from edgespec.errors import UnsupportedModel
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.experts import experts
from edgespec.graphs.linear import fp32, linear
from edgespec.graphs.mlp import mlp
from edgespec.graphs.weights import WeightTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The values that every layer of a call shares."""

    rope_cos: ir.Value  # [B, S, rotary/2]
    rope_sin: ir.Value
    attention_mask: ir.Value  # bool [B, 1, S, C]
    write_indices: ir.Value  # [B]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, [B, Hkv, C, D]."""

    key: ir.Value
    value: ir.Value


def graph_shape(config: DecoderConfig, role: Role, **others: Any) -> GraphShape:
    """The sizes of a graph of these layers; `others` are those that the layers do not have."""
    return GraphShape(
        role,
        config.hidden_size,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.rope.rotary_dim,
        **{"sliding": len(config.windows) > 1, "local_rotary_dim": local_rotary_dim(config)}
        | others,
    )


def local_rotary_dim(config: DecoderConfig) -> int:
    """The rotary size of the second rotary embedding; 0: all layers have the same."""
    return config.ropes[1].rotary_dim if len(config.ropes) > 1 else 0


def check_buildable(config: DecoderConfig, source: str) -> None:
    """Raises UnsupportedModel, beginning with `source`, for layers that no graph here computes."""
    _check_masks_and_ropes(config, source)
    for i, layer in enumerate(config.layers):
        reason = _not_buildable(config, layer)
        if reason is not None:
            raise UnsupportedModel(f"{source}: layer {i} has {reason}.")


def _check_masks_and_ropes(config: DecoderConfig, source: str) -> None:
    """A graph has two masks at most, of which one hides nothing, and two rotary tables."""
    windows = [window for window in config.windows if window is not None]
    if len(windows) > 1:
        raise UnsupportedModel(
            f"{source}: layers with windows of {', '.join(map(str, windows))} tokens; this version"
            " needs the same in all layers that have one."
        )
    if len(config.ropes) > 2:
        raise UnsupportedModel(
            f"{source}: {len(config.ropes)} rotary embeddings; this version takes two at most."
        )


def _not_buildable(config: DecoderConfig, layer: LayerSpec) -> str | None:
    if layer.mlp.experts is not None and (layer.mlp.bias or layer.mlp.fused_gate_up):
        return f"{layer.mlp.experts.count} experts with biases or fused projections, not built"
    if not isinstance(layer.mixer, AttentionSpec):
        return None if layer.mixer == config.linear else "linear attention of other sizes"
    if layer.mixer.gated and layer.mixer.fused_qkv:
        return "gates in a fused projection, which are not built"
    cache = (layer.mixer.num_kv_heads, layer.mixer.head_dim)
    if cache != (config.num_kv_heads, config.head_dim):
        return f"keys of {cache[0]} x {cache[1]}; this version needs the same in all layers"
    return None


def norm(
    b: GraphBuilder, table: WeightTable, spec: NormSpec, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """RMSNorm (arXiv 1910.07467): x / rms(x) * w over the last axis, or * (1 + w)."""
    scale = fp32(b, table.value(b, f"{weight}.weight"), f"{name}/weight")
    if spec.unit_offset:
        scale = b.op(
            "Add", scale, b.constant("one", np.array(1, np.float32)), name=f"{name}/weight/offset"
        )
    return b.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=spec.eps, stash_type=1)


def optional_norm(
    b: GraphBuilder,
    table: WeightTable,
    layer: LayerSpec,
    x: ir.Value,
    part: str | None,
    prefix: str,
    name: str,
) -> ir.Value:
    """x after the layer's norm `part` under `prefix`, or x itself where the layer has none
    there."""
    return x if part is None else norm(b, table, layer.norm, x, f"{prefix}.{part}", name)


def heads(b: GraphBuilder, x: ir.Value, num_heads: int, head_dim: int, name: str) -> ir.Value:
    """The heads [B, S, N, D] of x [B, S, N*D]."""
    return b.op("Reshape", x, b.shape(0, 0, num_heads, head_dim), name=f"{name}/heads")


def rotated(
    b: GraphBuilder, attention: AttentionSpec, x: ir.Value, step: StepInputs, name: str
) -> ir.Value:
    """[B, S, N, D] -> [B, N, S, D] with rotary embedding (rotate-half) over D, or over its first
    elements."""
    by_head = b.op("Transpose", x, name=f"{name}/transpose", perm=(0, 2, 1, 3))
    width = attention.rope.rotary_dim
    partial: dict[str, int] = {}
    if width != attention.head_dim:
        partial = {"rotary_embedding_dim": width}
    return b.op(
        "RotaryEmbedding",
        by_head,
        step.rope_cos,
        step.rope_sin,
        name=f"{name}/rope",
        domain="",
        **partial,
    )


def self_attention(
    b: GraphBuilder,
    table: WeightTable,
    layer: LayerSpec,
    x: ir.Value,
    step: StepInputs,
    cache: LayerCache,
    weight: str,
    name: str,
) -> tuple[ir.Value, LayerCache]:
    """Grouped-query attention of x [B, S, in] over the cache with this call's rows written into it.

    Q carries the scale and Attention takes `scale=1.0`: TensorRT's importer would multiply the
    whole cache by sqrt(scale) otherwise. Returns ([B, S, H], the updated cache).
    """
    attention = layer.mixer
    assert isinstance(attention, AttentionSpec)
    q, k, v, gate = projections(b, table, attention, x, weight, name)
    if attention.qk_norm:
        q = norm(b, table, layer.norm, q, f"{weight}.q_norm", f"{name}/q_norm")
        k = norm(b, table, layer.norm, k, f"{weight}.k_norm", f"{name}/k_norm")
    flat, cache = over_cache(b, attention, q, k, v, step, step, cache, name)
    if gate is not None:
        shape = b.shape(0, 0, attention.num_heads * attention.head_dim)
        wide = b.op("Reshape", gate, shape, name=f"{name}/gate/flat")
        flat = b.op(
            "Mul", flat, b.op("Sigmoid", wide, name=f"{name}/gate/sigmoid"), name=f"{name}/gate"
        )
    return linear(b, table, flat, f"{weight}.o_proj", f"{name}/o_proj"), cache


def projections(
    b: GraphBuilder,
    table: WeightTable,
    attention: AttentionSpec,
    x: ir.Value,
    weight: str,
    name: str,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
    """Queries [B, S, N, D], keys and values [B, S, Nkv, D], and the gates of the queries if there
    are any."""
    dim, counts = attention.head_dim, (attention.num_heads, *2 * (attention.num_kv_heads,))
    if attention.fused_qkv:
        fused = linear(b, table, x, f"{weight}.qkv_proj", f"{name}/qkv_proj")
        flat = b.split(fused, qkv_rows(attention), -1, f"{name}/qkv")
    else:
        flat = tuple(
            linear(b, table, x, f"{weight}.{part}_proj", f"{name}/{part}_proj") for part in "qkv"
        )
    gate = None
    if attention.gated:
        both = heads(b, flat[0], counts[0], 2 * dim, f"{name}/q")
        q, gate = b.split(both, (dim, dim), -1, f"{name}/q/gate")
    else:
        q = heads(b, flat[0], counts[0], dim, f"{name}/q")
    k, v = (heads(b, flat[i], counts[i], dim, f"{name}/{'qkv'[i]}") for i in (1, 2))
    return q, k, v, gate


def over_cache(
    b: GraphBuilder,
    attention: AttentionSpec,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    step: StepInputs,
    key_step: StepInputs,
    cache: LayerCache,
    name: str,
) -> tuple[ir.Value, LayerCache]:
    """Rotate q [B, S, N, D] and the keys, write the rows of k and v into the cache, and mix: [B, S,
    N*D].

    There may be more keys than queries: `key_step` has their rotations.
    """
    scale = b.constant(
        f"attention_scale/{attention.scale:.9g}", np.array(attention.scale, np.float32)
    )
    q = b.op("Mul", rotated(b, attention, q, step, f"{name}/q"), scale, name=f"{name}/q/scale")
    k = rotated(b, attention, k, key_step, f"{name}/k")
    v = b.op("Transpose", v, name=f"{name}/v/transpose", perm=(0, 2, 1, 3))

    def written(past: ir.Value, rows: ir.Value, part: str) -> ir.Value:
        at, called = step.write_indices, f"{name}/{part}/cache"
        return b.op("TensorScatter", past, rows, at, name=called, axis=-2, mode="linear")

    key, value = written(cache.key, k, "k"), written(cache.value, v, "v")
    mixed = b.op(
        "Attention", q, key, value, step.attention_mask, name=f"{name}/attention", scale=1.0
    )
    by_row = b.op("Transpose", mixed, name=f"{name}/out/transpose", perm=(0, 2, 1, 3))
    shape = b.shape(0, 0, attention.num_heads * attention.head_dim)
    return b.op("Reshape", by_row, shape, name=f"{name}/out/flat"), LayerCache(key, value)


def attention_layer(
    b: GraphBuilder,
    table: WeightTable,
    layer: LayerSpec,
    x: ir.Value,
    step: StepInputs,
    cache: LayerCache,
    weight: str,
    name: str,
) -> tuple[ir.Value, LayerCache]:
    """The stream x [B, S, H] with attention and MLP added, each with its norms, and the cache."""
    part = layer.norm_names.before_mixer
    normed = optional_norm(b, table, layer, x, part, weight, f"{name}/input_norm")
    mixed, cache = self_attention(
        b, table, layer, normed, step, cache, f"{weight}.self_attn", f"{name}/attn"
    )
    x = add_mixed(b, table, layer, x, mixed, weight, f"{name}/attn")
    return feed_forward(b, table, layer, x, weight, name), cache


def add_mixed(
    b: GraphBuilder,
    table: WeightTable,
    layer: LayerSpec,
    x: ir.Value,
    mixed: ir.Value,
    weight: str,
    name: str,
) -> ir.Value:
    """The stream with the mixer's output added, normed where the layer says so."""
    part = layer.norm_names.after_mixer
    mixed = optional_norm(b, table, layer, mixed, part, weight, f"{name}_output_norm")
    return b.op("Add", x, mixed, name=f"{name}_residual")


def feed_forward(
    b: GraphBuilder, table: WeightTable, layer: LayerSpec, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """The stream with the MLP added, with its norms."""
    names = layer.norm_names
    normed = optional_norm(
        b, table, layer, x, names.before_mlp, weight, f"{name}/post_attention_norm"
    )
    compute = mlp if layer.mlp.experts is None else experts
    out = compute(b, table, layer.mlp, normed, f"{weight}.mlp", f"{name}/mlp")
    out = optional_norm(b, table, layer, out, names.after_mlp, weight, f"{name}/mlp_output_norm")
    return b.op("Add", x, out, name=f"{name}/mlp_residual")


def gather_rows(b: GraphBuilder, x: ir.Value, gather_idx: ir.Value) -> ir.Value:
    """The rows [B, G, H] of x [B, S, H] at the indices [B, G]."""
    axis = b.constant("gather_axis", np.array([-1], np.int64))
    index = b.op("Unsqueeze", gather_idx, axis, name="head/gather_idx")
    return b.op("GatherND", x, index, name="head/gather", batch_dims=1)
