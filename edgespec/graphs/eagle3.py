"""The EAGLE-3 draft (arXiv 2503.01840): aux hidden states fused by `fc`, and a first layer that
reads embedding and state side by side.

Knows the tensors of every published layout and the canonical graph made of them. How drafts are
searched stands in `runtime/drafters`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import layer_tensors
from edgespec.contract import GraphShape
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder, branch
from edgespec.graphs.draft import (
    EMBEDDING,
    OwnLayers,
    spelling_of,
    with_checkpoint,
)
from edgespec.graphs.layers import (
    LayerCache,
    StepInputs,
    attention_layer,
    feed_forward,
    gather_rows,
    norm,
    self_attention,
)
from edgespec.graphs.linear import linear
from edgespec.methods.eagle3 import NAME, Eagle3Config

__all__ = ["GRAPHS", "NAME", "Eagle3Draft", "expected_tensors", "named_tensors", "stored_names"]

MAPS = ("d2t", "t2d")  # vocabulary maps: read by `checkpoint.d2t`, no part of the graph


def expected_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Own name -> shape; own names are those of ModelOpt and speculators (`layers.0.*`)."""
    layer, hidden = config.decoder, config.decoder.hidden_size
    width = config.num_aux_layers * config.target_hidden_size
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    tensors["layers.0.hidden_norm.weight"] = (hidden,)
    for i, spec in enumerate(layer.layers):  # the first reads embedding and state side by side
        tensors |= layer_tensors(spec, hidden, f"layers.{i}", 2 * hidden if i == 0 else None)
    if config.norm_before_fc:
        tensors["input_norm.weight"] = (width,)
    if config.fc_norm:
        tensors |= {
            f"fc_norm.{i}.weight": (config.target_hidden_size,)
            for i in range(config.num_aux_layers)
        }
    if config.own_head:
        tensors["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.own_embedding:
        tensors[EMBEDDING] = (config.vocab_size, hidden)
    return tensors


def stored_names(expected: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> dict[str, str]:
    """Own name -> name on disk: the first layer may stand under `midlayer.`, everything under
    `model.`."""
    return {
        name: spelling_of(name, [name.replace("layers.0.", "midlayer.", 1)], checkpoint)
        for name in expected
    }


def named_tensors(
    checkpoint: Checkpoint, config: Eagle3Config
) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint, and own name -> name on disk of each tensor of the graph, after a look at
    names and shapes.

    Raises CheckpointError for tensors that are missing, unknown or misshapen.
    """
    expected = expected_tensors(config)
    stored = stored_names(expected, checkpoint)
    maps = {name for name in checkpoint.tensors if name.removeprefix("model.") in MAPS}
    there = {stored[name]: shape for name, shape in expected.items()}
    check_tensors(there, checkpoint, maps, read_quantization(checkpoint))
    return checkpoint, stored


@dataclass(frozen=True)
class Eagle3Draft(OwnLayers):
    """The graph of an EAGLE-3 draft; a draft without an lm_head shares that of `base`."""

    config: Eagle3Config

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the draft's contract follows."""
        return self.recycling_shape(self.config.num_aux_layers * self.config.target_hidden_size)

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The state [B, S, Hd]: fused aux hidden states, or the draft's own last state. An explicit
        flag decides, never a shape."""
        before = len(b.nodes)
        fused = self.fuse(b, inputs["base_hidden"])
        fuse_nodes, b.nodes[before:] = b.nodes[before:], []
        kept = b.op("Identity", inputs["draft_hidden"], name="fuse/draft")
        keep_nodes = [b.nodes.pop()]
        return b.op(
            "If",
            inputs["use_base_hidden"],
            name="fuse/choose",
            then_branch=branch("fuse_base", fuse_nodes, fused),
            else_branch=branch("keep_draft", keep_nodes, kept),
        )

    def fuse(self, b: GraphBuilder, hidden: ir.Value) -> ir.Value:
        """The fused states [B, S, Hd] of aux hidden states [B, S, k*Ht]."""
        spec = self.config.decoder.norm
        if self.config.norm_before_fc:
            hidden = norm(b, self.table, spec, hidden, "input_norm", "fuse/input_norm")
        if self.config.fc_norm:
            width = self.config.target_hidden_size
            slices = [
                b.op(
                    "Slice",
                    hidden,
                    b.shape(i * width),
                    b.shape((i + 1) * width),
                    b.shape(2),
                    name=f"fuse/tap.{i}",
                )
                for i in range(self.config.num_aux_layers)
            ]
            normed = [
                norm(b, self.table, spec, s, f"fc_norm.{i}", f"fuse/fc_norm.{i}")
                for i, s in enumerate(slices)
            ]
            hidden = b.op("Concat", *normed, name="fuse/taps", axis=-1)
        return linear(b, self.table, hidden, "fc", "fuse/fc")

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """The residual stream [B, S, H] behind a layer, and its keys and values."""
        step, cache = step_inputs(inputs), layer_cache(inputs, index)
        if index == 0:
            x, cache = self.first_layer(b, x, inputs["inputs_embeds"], step, cache)
        else:
            layer, name = self.config.decoder.layers[index], f"layers.{index}"
            x, cache = attention_layer(b, self.table, layer, x, step, cache, name, name)
        return x, (cache.key, cache.value)

    def first_layer(
        self,
        b: GraphBuilder,
        x: ir.Value,
        embeds: ir.Value,
        step: StepInputs,
        cache: LayerCache,
    ) -> tuple[ir.Value, LayerCache]:
        """The stream [B, S, Hd] behind attention over the normed embedding and the normed state,
        side by side, and the cache."""
        layer, name = self.config.decoder.layers[0], "layers.0"
        spec = layer.norm
        normed = norm(b, self.table, spec, embeds, f"{name}.input_layernorm", f"{name}/input_norm")
        state = norm(b, self.table, spec, x, f"{name}.hidden_norm", f"{name}/hidden_norm")
        wide = b.op("Concat", normed, state, name=f"{name}/embedding_and_state", axis=-1)
        mixed, cache = self_attention(
            b, self.table, layer, wide, step, cache, f"{name}.self_attn", f"{name}/attn"
        )
        residual = state if self.config.norm_before_residual else x
        x = b.op("Add", residual, mixed, name=f"{name}/attn_residual")
        return feed_forward(b, self.table, layer, x, name, name), cache

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, ir.Value]:
        """Logits [B, G, Vd] of the gathered rows, and the state [B, S, H] that the draft
        recycles."""
        spec = self.config.decoder.norm
        if self.config.norm_output:
            x = norm(b, self.table, spec, x, "norm", "norm")
            rows = gather_rows(b, x, inputs["gather_idx"])
        else:
            rows = norm(
                b, self.table, spec, gather_rows(b, x, inputs["gather_idx"]), "norm", "norm"
            )
        return linear(b, self.table, rows, "lm_head", "lm_head"), x


GRAPHS = with_checkpoint(Eagle3Config, Eagle3Draft, named_tensors)
