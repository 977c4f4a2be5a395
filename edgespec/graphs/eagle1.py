"""The EAGLE-1 draft (arXiv 2401.15077): `fc` over embedding and hidden state side by side, and
ordinary decoder layers, of which the first has no norm before its attention.

It keeps a draft's contract: `base_hidden` is the base's state after its last norm, and what is
recycled is the draft's own output, which stands for the same; with a norm before its lm_head the
output before that norm, unless the draft says otherwise. Knows the tensors of both published
layouts and the canonical graph made of them. How drafts are searched stands in `runtime/drafters`.
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
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.draft import (
    EMBEDDING,
    OwnLayers,
    chosen_state,
    spelling_of,
    with_checkpoint,
)
from edgespec.graphs.layers import attention_layer, gather_rows, norm
from edgespec.graphs.linear import linear
from edgespec.methods.eagle1 import NAME, Eagle1Config

__all__ = ["GRAPHS", "NAME", "Eagle1Draft", "expected_tensors", "named_tensors"]

MAPS = ("d2t", "t2d")  # vocabulary maps: read by `checkpoint.d2t`, no part of the graph
TABLES = "rotary_emb.inv_freq"  # of old checkpoints: computed from config.json


def expected_tensors(config: Eagle1Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the draft's tensors."""
    layers, hidden = config.decoder.layers, config.decoder.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if config.fc_bias:
        tensors["fc.bias"] = (hidden,)
    for i, spec in enumerate(layers):
        tensors |= layer_tensors(spec, hidden, f"layers.{i}")
    if config.last_norm:
        tensors["norm.weight"] = (hidden,)
    if config.own_head:
        tensors["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.own_embedding:
        tensors[EMBEDDING] = (config.vocab_size, hidden)
    return tensors


def named_tensors(
    checkpoint: Checkpoint, config: Eagle1Config
) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint, and own name -> name on disk of each tensor of the graph, after a look at
    names and shapes.

    An embedding that the config does not count as the draft's own may be there. Raises
    CheckpointError for tensors that are missing, unknown or misshapen.
    """
    expected = expected_tensors(config)
    stored = {name: spelling_of(name, (), checkpoint) for name in expected}
    others = {
        name
        for name in checkpoint.tensors
        if name.removeprefix("model.") in (*MAPS, EMBEDDING) or name.endswith(TABLES)
    }
    there = {stored[name]: shape for name, shape in expected.items()}
    check_tensors(there, checkpoint, others, read_quantization(checkpoint))
    return checkpoint, stored


@dataclass(frozen=True)
class Eagle1Draft(OwnLayers):
    """The graph of an EAGLE-1 draft; without an lm_head of its own, that of `base` is in it."""

    config: Eagle1Config

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the draft's contract follows."""
        return self.recycling_shape(self.config.target_hidden_size)

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The stream [B, S, H]: fc over embedding and state, the embedding first."""
        state = chosen_state(b, inputs)
        wide = b.op(
            "Concat", inputs["inputs_embeds"], state, name="fuse/embedding_and_state", axis=-1
        )
        return linear(b, self.table, wide, "fc", "fuse/fc")

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """The residual stream [B, S, H] behind a layer, and its keys and values."""
        step, cache = step_inputs(inputs), layer_cache(inputs, index)
        layer, name = self.config.decoder.layers[index], f"layers.{index}"
        x, cache = attention_layer(b, self.table, layer, x, step, cache, name, name)
        return x, (cache.key, cache.value)

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, ir.Value]:
        """Logits [B, G, Vd] of the gathered rows, and the state [B, S, H] that the draft
        recycles."""
        spec, recycled = self.config.decoder.norm, x
        if self.config.norm_output:
            recycled = norm(b, self.table, spec, x, "norm", "norm")
        rows = gather_rows(b, recycled, inputs["gather_idx"])
        if self.config.last_norm and not self.config.norm_output:
            rows = norm(b, self.table, spec, rows, "norm", "norm")
        return linear(b, self.table, rows, "lm_head", "lm_head"), recycled


GRAPHS = with_checkpoint(Eagle1Config, Eagle1Draft, named_tensors)
