"""Llama, Mistral, Qwen2, Qwen3 and Qwen3.5: one decoder, told apart by biases, norms, gates and
kinds of layers.

Knows the tensors of these checkpoints and the canonical graph made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import DecoderConfig, ModelConfig
from edgespec.contract import GraphShape, Role, memory_inputs
from edgespec.graphs import delta_net
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.layers import decoder_layer, feed_forward, gather_rows, graph_shape, norm
from edgespec.graphs.linear import linear
from edgespec.graphs.weights import WeightTable

EMBEDDING = "model.embed_tokens.weight"
# where a model that also sees has its text part; elsewhere it is under `model.`
MULTIMODAL = "model.language_model."
NOT_TEXT = ("model.visual.", "mtp.")  # parts of such a checkpoint that its decoder does not need
IGNORED = (
    "rotary_emb.inv_freq",
    "self_attn.rotary_emb.inv_freq",
)  # buffers that old checkpoints carry


def is_recurrent(config: DecoderConfig, layer: int) -> bool:
    return bool(config.layer_kinds) and config.layer_kinds[layer] == "linear_attention"


def recurrent_tensors(config: DecoderConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a layer with a gated delta net."""
    ordinary = layer_tensors(config, prefix)
    kept = {name: shape for name, shape in ordinary.items() if ".self_attn." not in name}
    return kept | delta_net.tensors(config, f"{prefix}.linear_attn")


def layer_tensors(
    config: DecoderConfig, prefix: str, attention_in: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one ordinary layer's tensors; `attention_in` is the width that q, k and v
    read."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide = attention_in or hidden
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (2 * q if config.gated_attention else q, wide, config.qkv_bias),
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
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.decoder.num_layers):
        make = recurrent_tensors if is_recurrent(config.decoder, i) else layer_tensors
        tensors |= make(config.decoder, f"model.layers.{i}")
    if not config.tied_head:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def ignorable(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Tensors that may stand there and are not needed: rotary buffers, and the stored copy of a
    tied head."""
    names = {name for name in checkpoint.tensors if name.endswith(IGNORED)}
    if config.decoder.layer_kinds:
        names |= {name for name in checkpoint.tensors if name.startswith(NOT_TEXT)}
    return names | {"lm_head.weight"} if config.tied_head else names


def stored_name(name: str, checkpoint: Checkpoint) -> str:
    """Where the tensor of an own name, or a Linear, stands in a checkpoint."""
    multimodal = f"{MULTIMODAL}embed_tokens.weight" in checkpoint.tensors
    return (
        MULTIMODAL + name.removeprefix("model.")
        if multimodal and name.startswith("model.")
        else name
    )


@dataclass(frozen=True)
class Decoder:
    """The graph of a base. It decodes plainly; with `aux_layers`, or with `emits_final`, it
    verifies drafts and emits what they read: the residual stream at those places, or the state
    after the last norm (MTP).
    """

    config: ModelConfig
    table: WeightTable
    aux_layers: tuple[int, ...] = ()
    emits_final: bool = False

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        aux_layers: tuple[int, ...] = (),
        *,
        emits_final: bool = False,
    ) -> Decoder:
        expected, quantization = expected_tensors(config), read_quantization(checkpoint)
        stored = {name: stored_name(name, checkpoint) for name in expected}
        there = {stored[name]: shape for name, shape in expected.items()}
        check_tensors(there, checkpoint, ignorable(config, checkpoint), quantization)
        if config.tied_head:
            stored["lm_head.weight"] = stored[EMBEDDING]
        return cls(
            config,
            WeightTable(checkpoint, stored, quantization=quantization),
            aux_layers,
            emits_final,
        )

    @property
    def shape(self) -> GraphShape:
        decoder = self.config.decoder
        recurrent = tuple(i for i in range(decoder.num_layers) if is_recurrent(decoder, i))
        emitted = len(self.aux_layers) + self.emits_final
        return graph_shape(
            decoder,
            Role.BASE if emitted else Role.LLM,
            vocab_size=self.config.vocab_size,
            features=emitted * decoder.hidden_size,
            recurrent=delta_net.recurrent_shape(decoder.linear, recurrent)
            if decoder.linear
            else None,
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        return inputs["inputs_embeds"]

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        config, weight, name = self.config.decoder, f"model.layers.{index}", f"layers.{index}"
        if is_recurrent(config, index):
            return self.recurrent_layer(b, index, x, inputs, weight, name)
        step, cache = step_inputs(inputs), layer_cache(inputs, index)
        x, cache = decoder_layer(b, self.table, config, x, step, cache, weight, name)
        return x, (cache.key, cache.value)

    def recurrent_layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs, weight: str, name: str
    ) -> tuple[ir.Value, Memory]:
        config = self.config.decoder
        assert config.linear is not None
        memory = delta_net.LayerState(
            *(inputs[spec.name] for spec in memory_inputs(self.shape, index))
        )
        rows = delta_net.rows_of_call(b, inputs["tree_mask"], config.linear.conv_kernel)
        normed = norm(b, self.table, config, x, f"{weight}.input_layernorm", f"{name}/input_norm")
        mixed, left = delta_net.delta_net(
            b,
            self.table,
            config,
            normed,
            rows,
            memory,
            f"{weight}.linear_attn",
            f"{name}/linear_attn",
        )
        x = b.op("Add", x, mixed, name=f"{name}/linear_attn_residual")
        return feed_forward(b, self.table, config, x, weight, name), (
            left.conv,
            left.state,
            left.rows,
        )

    def head(
        self, b: GraphBuilder, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, ir.Value | None]:
        config = self.config.decoder
        if self.emits_final:
            x = norm(b, self.table, config, x, "model.norm", "norm")
            rows = gather_rows(b, x, inputs["gather_idx"])
        else:
            rows = norm(
                b, self.table, config, gather_rows(b, x, inputs["gather_idx"]), "model.norm", "norm"
            )
        return linear(b, self.table, rows, "lm_head", "lm_head"), x if self.emits_final else None
