"""The graph of an image encoder of any family: what its values say.

Knows the canonical graph that keeps `vision_contract`. Knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.vision import PATCHES, stored_vision_names, vision_quantization
from edgespec.config import VisionConfig
from edgespec.contract import Role
from edgespec.graphs.builder import GraphBuilder, WeightPlan
from edgespec.graphs.linear import fp32
from edgespec.graphs.vision_layers import axes, block, full_groups, merger, window_groups
from edgespec.graphs.weights import WeightTable
from edgespec.vision.contract import DEEPSTACK, EMBEDS, PIXELS, vision_contract

NAME = Role.VISUAL.value


@dataclass(frozen=True)
class VisionGraph:
    """The graph of an encoder over its checkpoint."""

    config: VisionConfig
    table: WeightTable

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: VisionConfig) -> VisionGraph:
        """Raises CheckpointError where the tensors are not those of the configuration."""
        stored = stored_vision_names(checkpoint, config)
        quantization = vision_quantization(checkpoint, config)
        return cls(config, WeightTable(checkpoint, stored, quantization=quantization))

    def build(self, plan: WeightPlan) -> ir.Model:
        """The canonical graph, which encodes one image a call."""
        config, table, contract = self.config, self.table, vision_contract(self.config)
        b = GraphBuilder(NAME, plan)
        inputs = {spec.name: b.input(spec) for spec in contract.inputs}
        x = self.embedded(b, inputs)
        full = full_groups(b, inputs)
        windowed = window_groups(b, config, inputs) if config.has_windows else full
        features: list[ir.Value] = []
        for i in range(config.num_layers):
            groups = full if i in config.full_attention_layers else windowed
            x = block(b, table, config, x, groups, f"blocks.{i}", f"layer{i}")
            if module := config.inner_mergers.get(i):
                features.append(merger(b, table, config, x, module, norm_merged=True))
        outputs = {EMBEDS: merger(b, table, config, x, "merger", norm_merged=False)}
        if features:
            outputs[DEEPSTACK] = b.op("Concat", *features, name="deepstack", axis=-1)
        for spec in contract.outputs:
            b.output(outputs[spec.name], spec)
        return b.model()

    def embedded(self, b: GraphBuilder, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """The stream [P, H] in front of the first layer. A convolution whose kernel is its stride
        is a product with the values of a patch."""
        config, table = self.config, self.table
        checkpoint, stored = table.source(PATCHES)
        info = replace(checkpoint.tensors[stored], shape=(config.hidden_size, config.patch_width))
        kernel = fp32(b, b.weight(b.plan.place(PATCHES, checkpoint, info), PATCHES), "patches/w")
        by_value = b.op("Transpose", kernel, name="patches/weight/t", perm=(1, 0))
        x = b.op("MatMul", inputs[PIXELS], by_value, name="patches")
        if config.patch_bias:
            bias = fp32(b, table.value(b, "patch_embed.proj.bias"), "patches/bias")
            x = b.op("Add", x, bias, name="patches/add_bias")
        if not config.position_grid:
            return x
        return b.op("Add", x, self.positions(b, inputs), name="positions/add")

    def positions(self, b: GraphBuilder, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """The learned positions [P, H], of four rows of their table each."""
        stored = self.table.value(b, "pos_embed.weight")
        corners = b.op("Gather", stored, inputs["position_index"], name="positions/rows", axis=0)
        weight = b.op("Unsqueeze", inputs["position_weight"], axes(b, -1), name="positions/weight")
        weighted = b.op("Mul", fp32(b, corners, "positions/rows"), weight, name="positions/mul")
        total = b.op("ReduceSum", weighted, axes(b, 0), name="positions/sum", keepdims=1)
        return b.op("Squeeze", total, axes(b, 0), name="positions")
