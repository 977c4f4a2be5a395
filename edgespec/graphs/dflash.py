"""The DFlash block draft (arXiv 2602.06036): the base's taps as context, and a block of masks
drafted in one pass.

Knows the tensors of the draft and the canonical graph made of them. What a row of the block may see
is told by masks; how blocks become drafts stands in `runtime/drafters`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.dflash import IGNORED, expected_tensors, named_as_ours
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import AttentionSpec
from edgespec.contract import GraphShape, Role
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.graphs import decoder
from edgespec.graphs.assembly import Inputs, Memory, layer_cache, step_inputs
from edgespec.graphs.builder import GraphBuilder
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
from edgespec.graphs.weights import WeightTable
from edgespec.methods.dflash import DFlashConfig

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class DFlashDraft:
    """The graph of a DFlash draft; `base` lends the head where the draft has none."""

    config: DFlashConfig
    table: WeightTable
    aux_layers: tuple[int, ...] = ()  # a draft emits none

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, config: DFlashConfig, base: decoder.Decoder | None = None
    ) -> DFlashDraft:
        check_masks(config)
        named, quantization = named_as_ours(checkpoint, config), read_quantization(checkpoint)
        expected = expected_tensors(config)
        check_tensors(expected, named, IGNORED, quantization)
        borrowed = {} if config.own_head else {"lm_head.weight": borrowed_head(config, base)}
        return cls(
            config, WeightTable(named, {name: name for name in expected}, borrowed, quantization)
        )

    @property
    def shape(self) -> GraphShape:
        layer = self.config.decoder
        return graph_shape(
            layer,
            Role.DRAFT,
            vocab_size=self.config.draft_vocab_size,
            base_features=len(self.config.aux_layer_ids) * self.config.target_hidden_size,
            block=True,
            sliding=has_two_masks(self.config),
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        return inputs["inputs_embeds"]

    def context(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """[B, L, k*Ht] -> [B, L, H], the same for all layers. Taps of 2e4 and more are known: fc is
        never rounded."""
        key = "dflash/context"
        if key not in b.shared:
            fused = float32_linear(b, self.table, inputs["target_hidden"], "fc", "context/fc")
            b.shared[key] = norm(
                b, self.table, self.config.decoder.norm, fused, "hidden_norm", "context/norm"
            )
        value: ir.Value = b.shared[key]
        return value

    def key_step(self, b: GraphBuilder, step: StepInputs, inputs: Inputs) -> StepInputs:
        """The rotations of the context's rows and then of the block's."""
        key = "dflash/key_step"
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
        found: StepInputs = b.shared[key]
        return found

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """A pre-norm layer with the keys and values of the context too; its input norm is for the
        block alone."""
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

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, None]:
        rows = gather_rows(b, x, inputs["gather_idx"])
        rows = norm(b, self.table, self.config.decoder.norm, rows, "norm", "norm")
        return linear(b, self.table, rows, "lm_head", "lm_head"), None


def has_two_masks(config: DFlashConfig) -> bool:
    """Layers with a window beside layers without one."""
    return None in config.windows and any(window is not None for window in config.windows)


def check_masks(config: DFlashConfig) -> None:
    """One mask for the layers without a window and one for those with: more would be another
    contract."""
    kinds = list(zip(config.windows, config.causal, strict=True))
    full, sliding = (
        {kind for kind in kinds if (kind[0] is None) is whole} for whole in (True, False)
    )
    if len(full) > 1 or len(sliding) > 1:
        told = ", ".join(
            f"layer {i}: window {window}, causal {causal}"
            for i, (window, causal) in enumerate(kinds)
        )
        raise UnsupportedModel(
            f"layers of a DFlash draft that differ beyond having a window or not ({told})."
        )


def borrowed_head(config: DFlashConfig, base: decoder.Decoder | None) -> WeightTable:
    if base is None:
        what = "this draft has no lm_head of its own and borrows its base's"
        raise PairingError(what, "Pass --base-model-dir with the base that it was trained for.")
    wanted = (config.draft_vocab_size, config.decoder.hidden_size)
    there = (base.config.vocab_size, base.config.decoder.hidden_size)
    if wanted != there:
        what = f"this draft has no lm_head and needs one of shape {wanted}; the base's is {there}"
        raise PairingError(
            what, "Pass --base-model-dir with the base that the draft was trained for."
        )
    return base.table
