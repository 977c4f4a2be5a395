"""What any draft's graph is opened from, what it declares, and the lm_head it may share.

Knows that a draft has a checkpoint of its own or stands in its base's. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import onnx_ir as ir

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, tensor_names
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig
from edgespec.contract import GraphShape, Role
from edgespec.errors import PairingError
from edgespec.graphs.assembly import DecoderGraph, Inputs
from edgespec.graphs.builder import GraphBuilder, branch
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.layers import graph_shape
from edgespec.graphs.weights import WeightTable
from edgespec.methods import BaseSide, DraftSide
from edgespec.methods.pair_rules import head

EMBEDDING = "embed_tokens.weight"  # the own name of a draft's embedding, if it has one
HEAD = "lm_head.weight"

Config = TypeVar("Config", bound=DraftConfig)


class DraftGraph(DecoderGraph, Protocol):
    """A draft's graph. `layers` are those of the draft; `vocab_size` is that of its base."""

    @property
    def layers(self) -> DecoderConfig:
        """The decoder of the draft's own layers."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the base's vocabulary."""


@dataclass(frozen=True, slots=True)
class DraftSource:
    """What a draft's graph is opened from: its checkpoint and config, and the base's graph.

    `checkpoint` and `config` are None for a method whose weights are in the base's checkpoint,
    `base` is None where no base was given.
    """

    base: Decoder | None = None
    checkpoint: Checkpoint | None = None
    config: DraftConfig | None = None

    def draft(self) -> tuple[Checkpoint, DraftConfig]:
        """The draft's checkpoint and config, where the method has one."""
        assert self.checkpoint is not None
        assert self.config is not None
        return self.checkpoint, self.config

    def target(self) -> Decoder:
        """The base's graph, where the method needs one."""
        assert self.base is not None
        return self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGraphs:
    """What `graphs` knows of a method.

    `open` raises CheckpointError for tensors that are not those of the graph, UnsupportedModel for
    a form that the graph has not, and PairingError where the base's lm_head is needed and does not
    fit. `check` looks at names and shapes alone. `in_base` says whether a base's checkpoint seems
    to hold a draft of this method.
    """

    open: Callable[[DraftSource], DraftGraph]
    check: Callable[[Checkpoint, DraftConfig], None] | None = None
    in_base: Callable[[Checkpoint, ModelConfig], bool] | None = None


def with_checkpoint(
    kind: type[Config],
    graph: Callable[[Config, WeightTable], DraftGraph],
    named: Callable[[Checkpoint, Config], tuple[Checkpoint, dict[str, str]]],
) -> DraftGraphs:
    """The row of a method whose drafts have a checkpoint of their own and a config of one `kind`.

    `named` is the checkpoint, and own name -> name in there of each tensor of the graph, after a
    look at names and shapes; it raises what the row's `check` raises. A draft without an lm_head
    gets its base's.
    """

    def of_source(source: DraftSource) -> DraftGraph:
        checkpoint, config = source.draft()
        assert isinstance(config, kind)
        named_checkpoint, stored = named(checkpoint, config)
        shared, quantization = shared_head(config, source.base), read_quantization(named_checkpoint)
        return graph(config, WeightTable(named_checkpoint, stored, shared, quantization))

    def check(checkpoint: Checkpoint, config: DraftConfig) -> None:
        assert isinstance(config, kind)
        named(checkpoint, config)

    return DraftGraphs(open=of_source, check=check)


@dataclass(frozen=True)
class OwnLayers:
    """The part of a draft's graph that its config decides: decoder layers of its own."""

    config: DraftConfig
    table: WeightTable
    aux_layers: tuple[int, ...] = ()  # a draft emits no aux hidden states

    @property
    def layers(self) -> DecoderConfig:
        """The decoder of the draft's own layers."""
        return self.config.decoder

    @property
    def vocab_size(self) -> int:
        """Tokens of the base's vocabulary."""
        return self.config.vocab_size

    def recycling_shape(self, base_features: int) -> GraphShape:
        """The numbers from which the contract of a draft follows that recycles its own state;
        `base_features` is the width of what it reads of its base."""
        return graph_shape(
            self.layers,
            Role.DRAFT,
            vocab_size=self.config.draft_vocab_size,
            features=self.layers.hidden_size,
            base_features=base_features,
        )


def spelling_of(name: str, others: Iterable[str], checkpoint: Checkpoint) -> str:
    """The name on disk of the tensor `name`: that, or one of `others`, each of which may also stand
    under `model.`; `name` where there is none."""
    spellings = [name, *others]
    spellings += [f"model.{spelling}" for spelling in spellings]
    for spelling in spellings:
        if spelling in checkpoint.tensors:
            return spelling
    for spelling in spellings:
        if tensor_names(checkpoint, spelling.removesuffix(".weight")):
            return spelling
    return name


def shared_head(config: DraftConfig, base: Decoder | None) -> dict[str, WeightTable]:
    """The table that holds the base's lm_head, for a draft without one; else nothing.

    Raises PairingError where there is no base, or where its lm_head does not fit.
    """
    if config.own_head:
        return {}
    if base is None:
        message = "this draft has no lm_head of its own and shares its base's"
        raise PairingError(message, "Pass `base_model_dir` with the base that it was trained for.")
    sides = BaseSide.of_checkpoint(base.config), DraftSide.of_checkpoint(config)
    for mismatch in head(*sides):
        remedy = "Pass `base_model_dir` with the base that the draft was trained for."
        raise PairingError(mismatch.what, remedy)
    return {HEAD: base.table}


def own_embedding(graph: DraftGraph) -> tuple[Checkpoint, str] | None:
    """Checkpoint and stored name of the draft's own embedding; None: it shares the base's."""
    return graph.table.source(EMBEDDING) if graph.table.has(EMBEDDING) else None


def chosen_state(b: GraphBuilder, inputs: Inputs) -> ir.Value:
    """The state [B, S, H] of the base, or the draft's own last one of the same width: an explicit
    flag decides, never a shape."""
    sides = []
    for name in ("base_hidden", "draft_hidden"):
        value = b.op("Identity", inputs[name], name=f"fuse/{name}")
        sides.append(branch(name, [b.nodes.pop()], value))
    base, own = sides
    return b.op(
        "If", inputs["use_base_hidden"], name="fuse/choose", then_branch=base, else_branch=own
    )
