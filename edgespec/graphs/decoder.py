"""The graph of a base of any family: its layers are what their descriptions say.

Knows the tensors of a base and the canonical graph made of them. Knows no family: values say how
layers differ, and `MIXERS` builds what mixes tokens in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np
import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import EMBEDDING, expected_tensors, ignorable, stored_names
from edgespec.config import AttentionSpec, LinearAttentionConfig, ModelConfig
from edgespec.contract import GraphShape, Role, memory_inputs
from edgespec.graphs import delta_net
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.layers import (
    add_mixed,
    attention_layer,
    check_buildable,
    feed_forward,
    gather_rows,
    graph_shape,
    norm,
    optional_norm,
)
from edgespec.graphs.linear import linear
from edgespec.graphs.optional_inputs import OPTIONAL_INPUTS, sizes_of
from edgespec.graphs.weights import WeightTable


@dataclass(frozen=True)
class Decoder:
    """The graph of a base. It decodes plainly; with `aux_layers`, or with `emits_final`, it
    verifies drafts and emits what they read: the residual stream at those places, or the state
    after the last norm.
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
    ) -> Self:
        """The graph of a base over its checkpoint.

        Raises UnsupportedModel for layers that no graph computes, CheckpointError where the tensors
        are not those of the configuration.
        """
        check_buildable(config.decoder, str(checkpoint.place))
        expected, quantization = expected_tensors(config), read_quantization(checkpoint)
        stored = stored_names(expected, checkpoint)
        there = {stored[name]: shape for name, shape in expected.items()}
        check_tensors(there, checkpoint, ignorable(config, checkpoint), quantization)
        if config.tied_head:
            stored["lm_head.weight"] = stored[EMBEDDING]
        table = WeightTable(checkpoint, stored, quantization=quantization)
        return cls(config, table, aux_layers, emits_final)

    @property
    def shape(self) -> GraphShape:
        """The sizes that the graph's contract depends on."""
        decoder = self.config.decoder
        kinds = decoder.layer_kinds
        recurrent = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        emitted = len(self.aux_layers) + self.emits_final
        return graph_shape(
            decoder,
            Role.BASE if emitted else Role.LLM,
            vocab_size=self.config.vocab_size,
            features=emitted * decoder.hidden_size,
            recurrent=(
                delta_net.recurrent_shape(decoder.linear, recurrent) if decoder.linear else None
            ),
            sizes=sizes_of(self.config),
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The embeddings [B, S, H], scaled where the model does so: the shared embedding file is
        unscaled, as the checkpoint's and as drafts read it."""
        scale = self.config.decoder.embedding_scale
        if scale == 1.0:
            return inputs["inputs_embeds"]
        rounded = np.array(scale).astype(getattr(ml_dtypes, self.config.dtype, self.config.dtype))
        factor = b.constant("embedding_scale", rounded.astype(np.float32))
        return b.op("Mul", inputs["inputs_embeds"], factor, name="embedding/scaled")

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """Layer `index` over the stream [B, S, H], and what it leaves for later calls."""
        build = MIXERS[type(self.config.decoder.layers[index].mixer)]
        x, memory = build(self, b, index, x, inputs)
        for name, row in OPTIONAL_INPUTS.items():
            if name in inputs:
                x = row.behind_layer(b, self.config, index, x, inputs[name])
        return x, memory

    def head(
        self, b: GraphBuilder, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, ir.Value | None]:
        """Logits [B, G, V] of the gathered rows; with `emits_final`, the normed state of all."""
        spec = self.config.decoder.norm
        if self.emits_final:
            x = norm(b, self.table, spec, x, "model.norm", "norm")
            rows = gather_rows(b, x, inputs["gather_idx"])
        else:
            gathered = gather_rows(b, x, inputs["gather_idx"])
            rows = norm(b, self.table, spec, gathered, "model.norm", "norm")
        return linear(b, self.table, rows, "lm_head", "lm_head"), x if self.emits_final else None


# What mixes tokens, by the value that describes it


def layer_with_attention(
    graph: Decoder, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
) -> tuple[ir.Value, Memory]:
    """The stream [B, S, H] behind full or sliding attention over the cache, with the layer's own
    mask and rotations, and its keys and values."""
    layer = graph.config.decoder.layers[index]
    decoder, attention = graph.config.decoder, layer.mixer
    assert isinstance(attention, AttentionSpec)
    step = step_inputs(
        inputs,
        sliding=len(decoder.windows) > 1 and attention.window is not None,
        local=attention.rope != decoder.rope,
    )
    cache = layer_cache(inputs, index)
    weight, name = f"model.layers.{index}", f"layers.{index}"
    x, cache = attention_layer(b, graph.table, layer, x, step, cache, weight, name)
    return x, (cache.key, cache.value)


def layer_with_delta_net(
    graph: Decoder, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
) -> tuple[ir.Value, Memory]:
    """The stream [B, S, H] behind a gated delta net, and its state."""
    layer, table = graph.config.decoder.layers[index], graph.table
    linear_attention = layer.mixer
    assert isinstance(linear_attention, LinearAttentionConfig)
    weight, name = f"model.layers.{index}", f"layers.{index}"
    memory = delta_net.DeltaNetState(
        *(inputs[spec.name] for spec in memory_inputs(graph.shape, index))
    )
    rows = delta_net.rows_of_call(b, inputs["tree_mask"], linear_attention.conv_kernel)
    before = layer.norm_names.before_mixer
    normed = optional_norm(b, table, layer, x, before, weight, f"{name}/input_norm")
    mixed, left = delta_net.delta_net(
        b,
        table,
        linear_attention,
        layer.norm.eps,
        normed,
        rows,
        memory,
        f"{weight}.linear_attn",
        f"{name}/linear_attn",
    )
    x = add_mixed(b, table, layer, x, mixed, weight, f"{name}/linear_attn")
    return feed_forward(b, table, layer, x, weight, name), (left.conv, left.state, left.rows)


Mixer = Callable[[Decoder, GraphBuilder, int, ir.Value, Inputs], tuple[ir.Value, Memory]]
MIXERS: dict[type, Mixer] = {
    AttentionSpec: layer_with_attention,
    LinearAttentionConfig: layer_with_delta_net,
}
