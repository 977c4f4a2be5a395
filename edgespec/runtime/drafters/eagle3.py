"""EAGLE-3's drafts (arXiv 2503.01840): trees and chains, in a vocabulary of the draft's own.

Knows the method's row. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import d2t_offsets
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.methods.eagle3 import NAME
from edgespec.runtime.drafters.decoding import (
    LAYERS_SCHEMA,
    Alias,
    DecodingType,
    read_layers,
)
from edgespec.runtime.drafters.eagle_options import TWO_ENGINES, EagleDecoding
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import TreeDrafter, cached_decoder, draft_sizes
from edgespec.runtime.plans.plan import TreeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(DrafterOptions):
    """EAGLE-3's options."""

    image_rows: bool = option(
        False,
        "Where a prompt has images, the draft reads their rows in place of the image token; drafts"
        " are trained in either way.",
    )


def open_drafter(sources: DrafterSources) -> TreeDrafter:
    """The drafter of a draft's engine; the vocabulary map stands beside it."""
    assert sources.draft is not None
    options = sources.options or Eagle3Options()
    assert isinstance(options, Eagle3Options)
    path, config = sources.engine_dir / file_names.D2T, sources.draft.config.component
    offsets = d2t_offsets(path, config, BUILD_AGAIN)
    decoder = cached_decoder(sources.draft)
    return TreeDrafter(decoder, offsets, image_rows=options.image_rows)


def limits(base: EngineConfig, draft: EngineConfig | None) -> TreeLimits:
    """The plans that the two engines were built for."""
    return TreeLimits(*draft_sizes(base, draft), static_trees=True)


ALIASES = (Alias("Eagle", "decoding_type Eagle is Eagle3, as in TensorRT-LLM; write Eagle3"),)
RELATIVES = (("P-EAGLE", "it drafts all positions in one pass, and there is no such graph here"),)


@dataclass(frozen=True, kw_only=True)
class Eagle3Decoding(EagleDecoding):
    """The keys of its decoding type."""

    eagle3_layers_to_capture: tuple[int, ...] | None = option(
        None,
        "The base's layers whose output the draft reads, counted from 0. run exports the base with"
        " them; infer and chat refuse others than the base was exported with.",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )
    eagle3_one_model: bool = option(True, "One program for base and draft.", unused=TWO_ENGINES)
    eagle3_model_arch: str | None = option(
        None, "The architecture of the draft.", unused="it is read from the draft's checkpoint"
    )

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The captured layers as hidden_states indices, which count the embedding as 0."""
        layers = self.eagle3_layers_to_capture
        return None if layers is None else tuple(layer + 1 for layer in layers)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    options=Eagle3Options,
    decoding=DecodingType(name="Eagle3", aliases=ALIASES, relatives=RELATIVES, keys=Eagle3Decoding),
)
__all__ = ["NAME", "ROW"]
