"""What a drafting method is: one frozen row of columns, the same for every method.

Knows the columns. Knows no method, no files and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.config.fields import Fields
from edgespec.config.values import DraftConfig, ModelConfig, Shapes
from edgespec.families.base import GgufForm
from edgespec.methods.sides import PairRule

BaseOutput = Literal["nothing", "aux_hidden_states", "final_hidden_state"]
Proposal = Literal["chain", "tree", "block", "block chain"]
WeightsIn = Literal["draft_checkpoint", "base_checkpoint", "nowhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """What the config.json of an exported base or draft holds for one method alone.

    `aux_layer_ids` are hidden_states indices: those that a base emits, or that a block draft reads;
    empty where the method needs none.
    """

    aux_layer_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFormat:
    """How a draft checkpoint is detected and read.

    `matches_config` looks at config.json alone and is asked first. `matches_tensors` may call its
    second argument for the shapes by name, without a leading `model.`; it is asked once no config
    has decided. `parse(config, shapes, source)` raises CheckpointError or UnsupportedModel.
    """

    matches_config: Callable[[Mapping[str, Any]], bool]
    parse: Callable[[Mapping[str, Any], Shapes, str], DraftConfig]
    matches_tensors: Callable[[Mapping[str, Any], Callable[[], Shapes]], bool] = (
        lambda config, shapes: False
    )
    gguf: GgufForm | None = None  # None: llama.cpp has no such draft


AUX_LAYERS_OF_GGUF = "gguf_aux_layers"  # in a config.json that is made of metadata alone


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes that the shapes of a draft's small heads follow from: tokens of the base, tokens of
    the draft, and the width of its layers."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int


Rows = Iterable[tuple[str, str]]  # label and text of what `edgespec inspect` shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of METHODS. Tables of other packages map `name` to their own code.

    `name` is the `spec_decode_type` of config.json; `aliases` are other spellings that users type.
    `component` is the directory below OUT that `edgespec export` writes the draft to, None where
    there is nothing to export. `export_params` are those of `export` that make the base for this
    method, with their values, and `export_param` is the first.
    `tensors_in_base` are how the tensors of a draft begin that stands beside its base's, where the
    method's drafts may.
    `read_spec` and `write_spec` turn a config.json's keys into the method's SpecConfig and back:
    `read_spec` raises what its Fields raise. `min_draft_tree_size` are the nodes that one call of
    the draft makes at least. `default_layers` is what a draft reads that names no aux layers.
    `head_shapes` are the arrays of small heads that the drafter computes itself, by name: they
    stand beside the graph of a draft.
    `thinking` says whether published drafts were trained on answers with thinking, by the
    architecture of their base; it has none that they do not agree on.
    `of_model` takes a whole model for a draft of this method, by `draft_param` of export.
    `base_rows`, `config_rows` and `spec_rows` are what `edgespec inspect` shows of the method
    alone: of a base's checkpoint, of a draft's, and of an exported component.
    """

    name: str
    title: str  # as its paper has it
    draft_title: str  # with its article, as in "an X draft"
    aliases: tuple[str, ...] = ()
    weights_in: WeightsIn = "draft_checkpoint"
    base_output: BaseOutput = "nothing"
    export_params: Mapping[str, str | bool] = field(default_factory=dict)
    component: str | None = None
    takes_aux_layers: bool = False
    proposes: Proposal = "chain"
    needs_engine: bool = True
    lossless: bool = True
    tensors_in_base: tuple[str, ...] = ()
    format: DraftFormat | None = None
    of_model: Callable[[ModelConfig], DraftConfig] | None = None
    draft_param: str | None = None
    read_spec: Callable[[Fields], SpecConfig] = lambda fields: SpecConfig()
    write_spec: Callable[[SpecConfig], dict[str, Any]] = lambda spec: {}
    pair_rules: tuple[PairRule, ...] = ()
    min_draft_tree_size: Callable[[SpecConfig], int] = lambda spec: 1
    head_shapes: Callable[[SpecConfig, HeadSizes], Mapping[str, tuple[int, ...]]] = (
        lambda spec, sizes: {}
    )
    thinking: Mapping[str, bool] = field(default_factory=dict)
    default_layers: str = "the default aux layers"
    base_rows: Callable[[ModelConfig], Rows] = lambda config: ()
    config_rows: Callable[[DraftConfig], Rows] = lambda config: ()
    spec_rows: Callable[[SpecConfig], Rows] = lambda spec: ()

    @property
    def export_param(self) -> str | None:
        """The parameter of `export` that makes the base; None where there is none."""
        return next(iter(self.export_params), None)

    @property
    def reads_base(self) -> bool:
        """Whether its drafts read what the base's graph emits; those that do not draft for a plain
        engine too."""
        return self.base_output != "nothing"
