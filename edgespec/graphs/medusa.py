"""Medusa heads (arXiv 2401.10774): residual blocks and a matrix of logits each, all over the same
hidden state of the base, the one that its lm_head reads.

The graph has no layers, no memory and no embedding: a row of `base_hidden` gives the logits of all
heads, side by side. Knows the tensors of the published layouts and the canonical graph made of
them. Which tree is made of the heads' tokens stands in `runtime/drafters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import logical_shapes, read_quantization
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig
from edgespec.contract import GraphShape, Role
from edgespec.graphs import decoder
from edgespec.graphs.assembly import Inputs, Memory
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.draft import DraftGraphs, DraftSource, shared_head
from edgespec.graphs.layers import gather_rows
from edgespec.graphs.linear import linear
from edgespec.graphs.weights import WeightTable
from edgespec.methods.medusa import NAME, MedusaConfig, is_head_tensor, parse_medusa_config

__all__ = ["GRAPHS", "NAME", "MedusaHeads", "heads_beside", "named_tensors"]


def block_name(head: int, block: int) -> str:
    """The own name of a residual block's Linear."""
    return f"heads.{head}.blocks.{block}"


def output_name(head: int) -> str:
    """The own name of the Linear that makes a head's logits."""
    return f"heads.{head}.lm_head"


def expected_tensors(config: MedusaConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Own name, name on disk and shape of each tensor."""
    width, start = config.decoder.hidden_size, config.prefix
    for i in range(config.num_heads):
        for j in range(config.num_blocks):
            yield f"{block_name(i, j)}.weight", f"{start}{i}.{j}.linear.weight", (width, width)
            yield f"{block_name(i, j)}.bias", f"{start}{i}.{j}.linear.bias", (width,)
        if config.own_head:
            shape = (config.draft_vocab_size, width)
            yield f"{output_name(i)}.weight", f"{start}{i}.{config.num_blocks}.weight", shape


def named_tensors(checkpoint: Checkpoint, config: MedusaConfig) -> dict[str, str]:
    """Own name -> name on disk of each tensor, after a look at names and shapes.

    Beside heads with a prefix there may be their base. Raises CheckpointError for tensors that are
    missing, unknown or misshapen.
    """
    stored, expected = {}, {}
    for own, name, shape in expected_tensors(config):
        stored[own] = name if name in checkpoint.tensors else under_model(name, checkpoint)
        expected[stored[own]] = shape
    others = set()
    if config.prefix:
        names = checkpoint.tensors
        others = {name for name in names if not is_head_tensor(name.removeprefix("model."))}
    check_tensors(expected, checkpoint, others, read_quantization(checkpoint))
    return stored


def under_model(name: str, checkpoint: Checkpoint) -> str:
    """The name with a leading `model.`, where the checkpoint has it so."""
    longer = f"model.{name}"
    return longer if longer in checkpoint.tensors else name


@dataclass(frozen=True)
class MedusaHeads:
    """The graph of a set of heads; without matrices of logits of their own, the lm_head of `base`
    is in it. `vocab_size` is that of the base."""

    config: MedusaConfig
    table: WeightTable
    num_heads: int
    vocab_size: int
    aux_layers: tuple[int, ...] = ()  # heads emit no state

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, config: MedusaConfig, base: decoder.Decoder | None = None
    ) -> MedusaHeads:
        """The heads in a checkpoint, checked. CheckpointError for wrong tensors, PairingError where
        they lack matrices of logits and there is no base."""
        stored, quantization = named_tensors(checkpoint, config), read_quantization(checkpoint)
        shared = shared_head(config, base)
        table = WeightTable(checkpoint, stored, shared, quantization)
        vocab_size = config.vocab_size if base is None else base.config.vocab_size
        return cls(config, table, config.num_heads, vocab_size)

    @property
    def layers(self) -> DecoderConfig:
        """A decoder without layers."""
        return self.config.decoder

    @property
    def shape(self) -> GraphShape:
        """The numbers from which the contract of the heads follows."""
        width = self.config.decoder.hidden_size
        return GraphShape(
            Role.DRAFT,
            hidden_size=width,
            num_layers=0,
            num_kv_heads=0,
            head_dim=0,
            rotary_dim=0,
            vocab_size=self.vocab_size,
            base_features=self.config.target_hidden_size,
            heads=self.num_heads,
        )

    def stem(self, b: GraphBuilder, inputs: Inputs) -> ir.Value:
        """The hidden state [B, S, H] as it is."""
        del b
        return inputs["base_hidden"]

    def layer(
        self, b: GraphBuilder, index: int, x: ir.Value, inputs: Inputs
    ) -> tuple[ir.Value, Memory]:
        """There are no layers."""
        raise AssertionError((b, index, x, inputs))

    def head(self, b: GraphBuilder, x: ir.Value, inputs: Inputs) -> tuple[ir.Value, None]:
        """Logits [B, S, heads*V] of all rows, or of those that `gather_idx` names."""
        if "gather_idx" in inputs:
            x = gather_rows(b, x, inputs["gather_idx"])
        states = [self.blocks(b, i, x) for i in range(self.num_heads)]
        if not self.config.own_head:
            return self.through_shared(b, states), None
        logits = [
            linear(b, self.table, state, output_name(i), f"heads.{i}/lm_head")
            for i, state in enumerate(states)
        ]
        if len(logits) == 1:
            return logits[0], None
        return b.op("Concat", *logits, name="heads/logits", axis=-1), None

    def blocks(self, b: GraphBuilder, head: int, x: ir.Value) -> ir.Value:
        """A head's state [B, S, H]: x + SiLU(W x + b), block after block."""
        for j in range(self.config.num_blocks):
            name = f"heads.{head}/blocks.{j}"
            y = linear(b, self.table, x, block_name(head, j), name)
            gate = b.op("Sigmoid", y, name=f"{name}/sigmoid")
            x = b.op("Add", x, b.op("Mul", y, gate, name=f"{name}/silu"), name=f"{name}/residual")
        return x

    def through_shared(self, b: GraphBuilder, states: list[ir.Value]) -> ir.Value:
        """Logits [B, S, heads*V] by the base's lm_head, which is read once for all heads."""
        width, count = self.config.decoder.hidden_size, len(states)
        wide = states[0] if count == 1 else b.op("Concat", *states, name="heads/states", axis=-1)
        rows = b.op("Reshape", wide, b.shape(0, -1, width), name="heads/rows")
        logits = linear(b, self.table, rows, "lm_head", "lm_head")
        shape = b.shape(0, -1, count * self.vocab_size)
        return b.op("Reshape", logits, shape, name="heads/logits")


def heads_beside(checkpoint: Checkpoint) -> MedusaConfig:
    """The heads in a merged checkpoint. Raises CheckpointError for damaged ones."""
    shapes = logical_shapes(checkpoint, read_quantization(checkpoint))
    return parse_medusa_config(checkpoint.config, shapes, checkpoint.config_source)


def in_base(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether heads stand beside the base's own tensors."""
    del config
    return any(is_head_tensor(name.removeprefix("model.")) for name in checkpoint.tensors)


def open_heads(source: DraftSource) -> MedusaHeads:
    """The graph of a set of heads with a checkpoint of its own, or of those beside their base."""
    if source.checkpoint is None:
        checkpoint = source.target().table.checkpoint
        return MedusaHeads.open(checkpoint, heads_beside(checkpoint), source.base)
    checkpoint, config = source.draft()
    return MedusaHeads.open(checkpoint, checked(config), source.base)


def checked(config: DraftConfig) -> MedusaConfig:
    """The config as one of heads."""
    assert isinstance(config, MedusaConfig)
    return config


def check(checkpoint: Checkpoint, config: DraftConfig) -> None:
    """Raises CheckpointError where names or shapes of the tensors are wrong."""
    named_tensors(checkpoint, checked(config))


GRAPHS = DraftGraphs(open=open_heads, check=check, in_base=in_base)
