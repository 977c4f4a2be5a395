"""What every decoder is made of: RMSNorm, rotary attention over a preallocated cache, SwiGLU.

Knows the canonical operators (ONNX opset 24). Knows no family: names of weights come in as
arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.config import DecoderConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.linear import fp32, linear
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
    """The sizes of a graph of such layers; `others` are those that its layers do not tell."""
    return GraphShape(
        role,
        config.hidden_size,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.rope.rotary_dim,
        **others,
    )


def rms_norm(
    b: GraphBuilder,
    table: WeightTable,
    x: ir.Value,
    weight: str,
    eps: float,
    name: str,
    *,
    unit_offset: bool = False,
) -> ir.Value:
    """x / rms(x) * w over the last axis; with `unit_offset` w is stored as its distance from 1."""
    scale = fp32(b, table.value(b, f"{weight}.weight"), f"{name}/weight")
    if unit_offset:
        scale = b.op(
            "Add", scale, b.constant("one", np.array(1, np.float32)), name=f"{name}/weight/offset"
        )
    return b.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=eps, stash_type=1)


def norm(
    b: GraphBuilder, table: WeightTable, config: DecoderConfig, x: ir.Value, weight: str, name: str
) -> ir.Value:
    """RMSNorm as the model has it."""
    return rms_norm(
        b, table, x, weight, config.rms_norm_eps, name, unit_offset=config.unit_offset_norms
    )


def heads(b: GraphBuilder, x: ir.Value, num_heads: int, head_dim: int, name: str) -> ir.Value:
    """[B, S, N*D] -> [B, S, N, D]."""
    return b.op("Reshape", x, b.shape(0, 0, num_heads, head_dim), name=f"{name}/heads")


def rotated(
    b: GraphBuilder, config: DecoderConfig, x: ir.Value, step: StepInputs, name: str
) -> ir.Value:
    """[B, S, N, D] -> [B, N, S, D] with rotary embedding (rotate-half) over D, or over the head of
    it."""
    turned = b.op("Transpose", x, name=f"{name}/transpose", perm=(0, 2, 1, 3))
    width = config.rope.rotary_dim
    partial: dict[str, int] = {} if width == config.head_dim else {"rotary_embedding_dim": width}
    return b.op(
        "RotaryEmbedding",
        turned,
        step.rope_cos,
        step.rope_sin,
        name=f"{name}/rope",
        domain="",
        **partial,
    )


def attention(
    b: GraphBuilder,
    table: WeightTable,
    config: DecoderConfig,
    x: ir.Value,
    step: StepInputs,
    cache: LayerCache,
    weight: str,
    name: str,
) -> tuple[ir.Value, LayerCache]:
    """Grouped-query attention of x [B, S, in] over the cache with this call's rows written into it.

    Q carries the scale 1/sqrt(D) and Attention takes `scale=1.0`: TensorRT's importer would
    multiply the whole cache by sqrt(scale) otherwise. Returns ([B, S, H], the updated cache).
    """
    q = linear(b, table, x, f"{weight}.q_proj", f"{name}/q_proj")
    gate = None
    if config.gated_attention:
        both = heads(b, q, config.num_heads, 2 * config.head_dim, f"{name}/q")
        q, gate = b.split(both, (config.head_dim, config.head_dim), -1, f"{name}/q/gate")
    else:
        q = heads(b, q, config.num_heads, config.head_dim, f"{name}/q")
    k, v = (
        heads(
            b,
            linear(b, table, x, f"{weight}.{part}_proj", f"{name}/{part}_proj"),
            config.num_kv_heads,
            config.head_dim,
            f"{name}/{part}",
        )
        for part in ("k", "v")
    )
    if config.qk_norm:
        q = norm(b, table, config, q, f"{weight}.q_norm", f"{name}/q_norm")
        k = norm(b, table, config, k, f"{weight}.k_norm", f"{name}/k_norm")
    flat, cache = over_cache(b, config, q, k, v, step, step, cache, name)
    if gate is not None:
        wide = b.op(
            "Reshape",
            gate,
            b.shape(0, 0, config.num_heads * config.head_dim),
            name=f"{name}/gate/flat",
        )
        flat = b.op(
            "Mul", flat, b.op("Sigmoid", wide, name=f"{name}/gate/sigmoid"), name=f"{name}/gate"
        )
    return linear(b, table, flat, f"{weight}.o_proj", f"{name}/o_proj"), cache


def over_cache(
    b: GraphBuilder,
    config: DecoderConfig,
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
    scale = b.constant("attention_scale", np.array(1 / math.sqrt(config.head_dim), np.float32))
    q = b.op("Mul", rotated(b, config, q, step, f"{name}/q"), scale, name=f"{name}/q/scale")
    k = rotated(b, config, k, key_step, f"{name}/k")
    v = b.op("Transpose", v, name=f"{name}/v/transpose", perm=(0, 2, 1, 3))
    key = b.op(
        "TensorScatter",
        cache.key,
        k,
        step.write_indices,
        name=f"{name}/k/cache",
        axis=-2,
        mode="linear",
    )
    value = b.op(
        "TensorScatter",
        cache.value,
        v,
        step.write_indices,
        name=f"{name}/v/cache",
        axis=-2,
        mode="linear",
    )
    mixed = b.op(
        "Attention", q, key, value, step.attention_mask, name=f"{name}/attention", scale=1.0
    )
    turned = b.op("Transpose", mixed, name=f"{name}/out/transpose", perm=(0, 2, 1, 3))
    flat = b.op(
        "Reshape",
        turned,
        b.shape(0, 0, config.num_heads * config.head_dim),
        name=f"{name}/out/flat",
    )
    return flat, LayerCache(key, value)


def mlp(b: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str) -> ir.Value:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    gate = linear(b, table, x, f"{weight}.gate_proj", f"{name}/gate_proj")
    up = linear(b, table, x, f"{weight}.up_proj", f"{name}/up_proj")
    silu = b.op("Mul", gate, b.op("Sigmoid", gate, name=f"{name}/sigmoid"), name=f"{name}/silu")
    return linear(
        b,
        table,
        b.op("Mul", silu, up, name=f"{name}/mul"),
        f"{weight}.down_proj",
        f"{name}/down_proj",
    )


def decoder_layer(
    b: GraphBuilder,
    table: WeightTable,
    config: DecoderConfig,
    x: ir.Value,
    step: StepInputs,
    cache: LayerCache,
    weight: str,
    name: str,
) -> tuple[ir.Value, LayerCache]:
    """A pre-norm layer: attention and MLP, each on the normed stream and added to it."""
    normed = norm(b, table, config, x, f"{weight}.input_layernorm", f"{name}/input_norm")
    mixed, cache = attention(
        b, table, config, normed, step, cache, f"{weight}.self_attn", f"{name}/attn"
    )
    x = b.op("Add", x, mixed, name=f"{name}/attn_residual")
    return feed_forward(b, table, config, x, weight, name), cache


def feed_forward(
    b: GraphBuilder, table: WeightTable, config: DecoderConfig, x: ir.Value, weight: str, name: str
) -> ir.Value:
    normed = norm(
        b, table, config, x, f"{weight}.post_attention_layernorm", f"{name}/post_attention_norm"
    )
    return b.op(
        "Add", x, mlp(b, table, normed, f"{weight}.mlp", f"{name}/mlp"), name=f"{name}/mlp_residual"
    )


def gather_rows(b: GraphBuilder, x: ir.Value, gather_idx: ir.Value) -> ir.Value:
    """[B, S, H] and [B, G] -> [B, G, H]."""
    axis = b.constant("gather_axis", np.array([-1], np.int64))
    index = b.op("Unsqueeze", gather_idx, axis, name="head/gather_idx")
    return b.op("GatherND", x, index, name="head/gather", batch_dims=1)
