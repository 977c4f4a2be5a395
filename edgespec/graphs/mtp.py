"""The head for multi-token prediction (MTP) of Qwen3.5: one decoder layer of full attention that is
used again for every step, over the base's last state and the next token's embedding.

It keeps a draft's contract, so that a tree search runs it as a chain: `base_hidden` is the base's
state after its last norm, and what is recycled is the head's own after its norm, of the same width.
Knows the tensors of the head, which stand in the base's checkpoint, and the canonical graph made of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.mtp import LAYER, ROOT, layer_config, mtp_head
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import DecoderConfig, ModelConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs import decoder
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.draft import HEAD, DraftGraphs, chosen_state
from edgespec.graphs.layers import attention_layer, gather_rows, graph_shape, norm
from edgespec.graphs.linear import linear
from edgespec.graphs.weights import WeightTable
from edgespec.methods.mtp import NAME

__all__ = ["GRAPHS", "NAME", "MtpDraft"]


@dataclass(frozen=True)
class MtpDraft:
    """The graph of a head. Embedding and lm_head are the base's; the graph holds the lm_head."""

    config: ModelConfig  # of the base
    table: WeightTable
    aux_layers: tuple[int, ...] = ()  # a draft emits its own state

    @classmethod
    def open(cls, base: decoder.Decoder) -> MtpDraft:
        """The head in the checkpoint of a base.

        Raises UnsupportedModel where the checkpoint has no head of this form, CheckpointError
        for a damaged one."""
        checkpoint, config = base.table.checkpoint, base.config
        own, quantization = mtp_head(checkpoint, config), read_quantization(checkpoint)
        expected = {
            base.table.stored[name]: shape for name, shape in expected_tensors(config).items()
        }
        others = {name for name in checkpoint.tensors if not name.startswith(ROOT)}
        check_tensors(expected | own, checkpoint, others, quantization)
        stored, shared = {name: name for name in own}, {HEAD: base.table}
        return cls(config, WeightTable(checkpoint, stored, shared, quantization))

    @property
    def layers(self) -> DecoderConfig:
        """The decoder of the head: one layer."""
        return layer_config(self.config)

    @property
    def vocab_size(self) -> int:
        """Tokens of the base's vocabulary."""
        return self.config.vocab_size

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the head's contract follows."""
        layer = layer_config(self.config)
        return graph_shape(
            layer,
            Role.DRAFT,
            vocab_size=self.config.vocab_size,
            features=layer.hidden_size,
            base_features=layer.hidden_size,
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The stream [B, S, H]: fc over embedding and state, each normed, the embedding first."""
        state = chosen_state(b, inputs)
        spec, given = self.config.decoder.norm, inputs["inputs_embeds"]
        embeds = norm(
            b, self.table, spec, given, "mtp.pre_fc_norm_embedding", "fuse/embedding_norm"
        )
        state = norm(b, self.table, spec, state, "mtp.pre_fc_norm_hidden", "fuse/state_norm")
        wide = b.op("Concat", embeds, state, name="fuse/embedding_and_state", axis=-1)
        return linear(b, self.table, wide, "mtp.fc", "fuse/fc")

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """The residual stream [B, S, H] behind the layer, and its keys and values."""
        step, cache = step_inputs(inputs), layer_cache(inputs, index)
        layer = layer_config(self.config).layers[index]
        x, cache = attention_layer(b, self.table, layer, x, step, cache, LAYER, f"layers.{index}")
        return x, (cache.key, cache.value)

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, ir.Value]:
        """Logits [B, G, V] of the gathered rows, and the normed state [B, S, H] that the head
        recycles."""
        x = norm(b, self.table, self.config.decoder.norm, x, "mtp.norm", "norm")
        return linear(
            b, self.table, gather_rows(b, x, inputs["gather_idx"]), "lm_head", "lm_head"
        ), x


def in_base(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether config.json or a tensor's name declares a head."""
    return bool(config.mtp_layers) or any(name.startswith(ROOT) for name in checkpoint.tensors)


GRAPHS = DraftGraphs(open=lambda source: MtpDraft.open(source.target()), in_base=in_base)
