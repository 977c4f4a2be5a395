"""Block drafts: aux hidden states as context, and a block of masks drafted in one pass.

Knows the tensors of the draft and the canonical graph made of them. What a row of the block may see
is a matter of masks; how blocks become drafts stands in `runtime/drafters`. Each method's row has a
file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from edgespec.checkpoint.block_draft import IGNORED, expected_tensors, named_as_ours
from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import AttentionSpec
from edgespec.contract import GraphShape, Role
from edgespec.errors import UnsupportedModel
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.draft import OwnLayers, with_checkpoint
from edgespec.graphs.layers import (
    StepInputs,
    feed_forward,
    gather_rows,
    graph_shape,
    heads,
    norm,
    over_cache,
)
from edgespec.graphs.linear import float32_linear, linear
from edgespec.methods import METHODS
from edgespec.methods.block_draft import BlockDraftConfig


def named_tensors(
    checkpoint: Checkpoint, config: BlockDraftConfig
) -> tuple[Checkpoint, dict[str, str]]:
    """The draft under our own names, and own name -> that name of each tensor of the graph, which
    the arrays of its heads are not.

    Raises CheckpointError for tensors that are missing, unknown or misshapen, UnsupportedModel for
    a draft of more masks than the graph has.
    """
    check_masks(config)
    named, expected = named_as_ours(checkpoint, config), expected_tensors(config)
    check_tensors(expected | config.head_shapes, named, IGNORED, read_quantization(checkpoint))
    return named, {name: name for name in expected}


@dataclass(frozen=True)
class BlockDraft(OwnLayers):
    """The graph of a block draft; a draft without an lm_head shares that of `base`."""

    config: BlockDraftConfig

    @property
    def emits_states(self) -> bool:
        """Whether it also gives the states that its lm_head reads, of all rows of the block."""
        return bool(self.config.head_shapes)

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the draft's contract follows."""
        layer = self.config.decoder
        return graph_shape(
            layer,
            Role.DRAFT,
            vocab_size=self.config.draft_vocab_size,
            features=layer.hidden_size if self.emits_states else 0,
            base_features=len(self.config.aux_layer_ids) * self.config.target_hidden_size,
            block=True,
            sliding=has_two_masks(self.config),
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The embeddings [B, S, H] of the block as they are."""
        return inputs["inputs_embeds"]

    def context(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The context [B, L, H] of aux hidden states [B, L, k*Ht], the same for all layers.

        Aux hidden states of 2e4 and more are known: fc is never quantized.
        """
        key = "block_draft/context"
        if key not in b.shared:
            fused = float32_linear(b, self.table, inputs["target_hidden"], "fc", "context/fc")
            b.shared[key] = norm(
                b, self.table, self.config.decoder.norm, fused, "hidden_norm", "context/norm"
            )
        value: ir.Value = b.shared[key]
        return value

    def key_step(self, b: GraphBuilder, step: StepInputs, inputs: Inputs) -> StepInputs:
        """The call's inputs with the rotations of the context's rows and then of the block's."""
        key = "block_draft/key_step"
        if key not in b.shared:
            b.shared[key] = replace(
                step,
                rope_cos=b.op(
                    "Concat", inputs["context_cos"], step.rope_cos, name="context/cos", axis=1
                ),
                rope_sin=b.op(
                    "Concat", inputs["context_sin"], step.rope_sin, name="context/sin", axis=1
                ),
            )
        widened: StepInputs = b.shared[key]
        return widened

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """The stream [B, S, H] behind a pre-norm layer, and its keys and values: those of the
        context too. The input norm is for the block alone."""
        spec, table, name = self.config.decoder.layers[index], self.table, f"layers.{index}"
        attention = spec.mixer
        assert isinstance(attention, AttentionSpec)
        step, cache = step_inputs(inputs), layer_cache(inputs, index)
        key_step = self.key_step(b, step, inputs)
        if self.shape.sliding and self.config.windows[index] is not None:
            step = replace(step, attention_mask=inputs["sliding_attention_mask"])
        normed = norm(b, table, spec.norm, x, f"{name}.input_layernorm", f"{name}/input_norm")
        both = b.op(
            "Concat", self.context(b, inputs), normed, name=f"{name}/context_and_block", axis=1
        )

        def projected(part: str, x: ir.Value, count: int) -> ir.Value:
            weight, made = f"{name}.self_attn.{part}_proj", f"{name}/attn/{part}"
            flat = linear(b, table, x, weight, f"{made}_proj")
            return heads(b, flat, count, attention.head_dim, made)

        q = projected("q", normed, attention.num_heads)
        k, v = (projected(part, both, attention.num_kv_heads) for part in ("k", "v"))
        if attention.qk_norm:
            q = norm(b, table, spec.norm, q, f"{name}.self_attn.q_norm", f"{name}/attn/q_norm")
            k = norm(b, table, spec.norm, k, f"{name}.self_attn.k_norm", f"{name}/attn/k_norm")
        flat, cache = over_cache(b, attention, q, k, v, step, key_step, cache, f"{name}/attn")
        mixed = linear(b, table, flat, f"{name}.self_attn.o_proj", f"{name}/attn/o_proj")
        x = b.op("Add", x, mixed, name=f"{name}/attn_residual")
        return feed_forward(b, table, spec, x, name, name), (cache.key, cache.value)

    def head(
        self, b: GraphBuilder, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, ir.Value | None]:
        """Logits [B, G, Vd] of the gathered rows, and with `emits_states` the normed states of all
        rows [B, S, H]."""
        if self.emits_states:
            x = self.normed(b, x)
        rows = gather_rows(b, x, inputs["gather_idx"])
        if not self.emits_states:
            rows = self.normed(b, rows)
        logits = linear(b, self.table, rows, "lm_head", "lm_head")
        return logits, x if self.emits_states else None

    def normed(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        """Rows as the lm_head reads them."""
        return norm(b, self.table, self.config.decoder.norm, x, "norm", "norm")


def has_two_masks(config: BlockDraftConfig) -> bool:
    """Whether there are layers with a window beside layers without one."""
    return None in config.windows and any(window is not None for window in config.windows)


def check_masks(config: BlockDraftConfig) -> None:
    """UnsupportedModel for a draft that needs more than one mask for the layers without a window
    and one for those with: more would be another contract."""
    kinds = list(zip(config.windows, config.causal, strict=True))
    full, sliding = (
        {kind for kind in kinds if (kind[0] is None) is unbounded} for unbounded in (True, False)
    )
    if len(full) > 1 or len(sliding) > 1:
        layers = ", ".join(
            f"layer {i}: window {window}, causal {causal}"
            for i, (window, causal) in enumerate(kinds)
        )
        raise UnsupportedModel(
            f"layers of {METHODS[config.method].draft_title} that differ beyond having a window or"
            f" not ({layers})."
        )


GRAPHS = with_checkpoint(BlockDraftConfig, BlockDraft, named_tensors)
