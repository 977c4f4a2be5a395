"""Llama, Mistral, Qwen2 and Qwen3: one dense decoder, told apart by biases, head norms and their configuration.

Knows the tensors of these checkpoints and the canonical graph made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import DecoderConfig, ModelConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs.assembly import Inputs, step_inputs
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.layers import LayerCache, decoder_layer, gather_rows, rms_norm
from edgespec.graphs.linear import linear
from edgespec.graphs.weights import WeightTable

EMBEDDING = "model.embed_tokens.weight"
IGNORED = ("rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq")  # buffers that old checkpoints carry


def layer_tensors(config: DecoderConfig, prefix: str, attention_in: int | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one ordinary layer's tensors; `attention_in` is the width that q, k and v read."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide = attention_in or hidden
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, wide, config.qkv_bias),
        "self_attn.k_proj": (kv, wide, config.qkv_bias),
        "self_attn.v_proj": (kv, wide, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in linears.items():
        tensors[f"{prefix}.{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{prefix}.{name}.bias"] = (rows,)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    return tensors | {f"{prefix}.{name}.weight": (width,) for name, width in norms.items()}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that a checkpoint of this configuration holds."""
    hidden = config.decoder.hidden_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.decoder.num_layers):
        tensors |= layer_tensors(config.decoder, f"model.layers.{i}")
    if not config.tied_head:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def ignorable(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Tensors that may stand there and are not needed: rotary buffers, and the stored copy of a tied head."""
    names = {name for name in checkpoint.tensors if name.endswith(IGNORED)}
    return names | {"lm_head.weight"} if config.tied_head else names


@dataclass(frozen=True)
class Decoder:
    """The graph of a dense base; with `taps` it verifies drafts, without it decodes plainly."""

    config: ModelConfig
    table: WeightTable
    taps: tuple[int, ...] = ()

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: ModelConfig, taps: tuple[int, ...] = ()) -> Decoder:
        expected, quantization = expected_tensors(config), read_quantization(checkpoint)
        check_tensors(expected, checkpoint, ignorable(config, checkpoint), quantization)
        stored = {name: name for name in expected}
        if config.tied_head:
            stored["lm_head.weight"] = EMBEDDING
        return cls(config, WeightTable(checkpoint, stored, quantization=quantization), taps)

    @property
    def shape(self) -> GraphShape:
        decoder = self.config.decoder
        return GraphShape(
            role=Role.BASE if self.taps else Role.LLM,
            hidden_size=decoder.hidden_size,
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            rotary_dim=decoder.rope.rotary_dim,
            vocab_size=self.config.vocab_size,
            features=len(self.taps) * decoder.hidden_size,
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        return inputs["inputs_embeds"]

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs, cache: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        step = step_inputs(inputs)
        return decoder_layer(
            b, self.table, self.config.decoder, x, step, cache, f"model.layers.{index}", f"layers.{index}"
        )

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, None]:
        rows = gather_rows(b, x, inputs["gather_idx"])
        normed = rms_norm(b, self.table, rows, "model.norm", self.config.decoder.rms_norm_eps, "norm")
        return linear(b, self.table, normed, "lm_head", "lm_head"), None
