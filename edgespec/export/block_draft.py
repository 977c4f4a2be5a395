"""Block drafts on their way out: a base that is exported by its draft, and the draft.

Knows what all of them share; each method's row has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.export.component import Component, Heads
from edgespec.export.draft import (
    draft_component,
    draft_notes,
    hidden_states,
    pair_config,
    vocabulary_map,
)
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted
from edgespec.methods import METHODS, block_method
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.block_method import BlockSpec

SpecOf = Callable[..., BlockSpec]  # (config, *, draft)


def config_of(request: ExportRequest) -> BlockDraftConfig:
    """The config of the request's draft, a block draft."""
    config = request.drafted().config
    assert isinstance(config, BlockDraftConfig)
    return config


def component_row(
    name: str,
    spec_of: SpecOf = block_method.spec_of,
    heads: Callable[[ExportRequest], Heads] = lambda request: {},
) -> ComponentRow:
    """The row of a method of block drafts. `spec_of` is what config.json keeps of a draft, or of
    the base for it; `heads` are the arrays that stand beside the draft's graph."""

    def emits(request: ExportRequest) -> Emitted:
        """The aux layers that the draft declares."""
        spec = spec_of(config_of(request), draft=False)
        note = f"aux layers: {hidden_states(spec.aux_layer_ids)}"
        return Emitted(aux_layers=spec.aux_layer_ids, spec=spec, note=note)

    def draft(request: ExportRequest) -> Component:
        """The draft's component, with the mode of thinking that drafts of its base's family were
        trained in."""
        config, base, title = config_of(request), request.base, METHODS[name].title
        thinking = METHODS[name].thinking.get(base.config.architecture) if base else None
        first = f"{title} draft, {config.layout} layout: blocks of {config.block_size}"
        return draft_component(
            request,
            title,
            pair_config(request, config.aux_layer_ids, thinking),
            spec=spec_of(config, draft=True),
            d2t=vocabulary_map(request.drafted()),
            heads=heads(request),
            notes=tuple(draft_notes(request, first, hidden_states(config.aux_layer_ids))),
        )

    def recorded(request: ExportRequest) -> dict[str, Any]:
        """The options that the manifest keeps: what the base emits, where such a base was asked
        for."""
        if request.options.base_for != name:
            return {}
        spec = spec_of(config_of(request), draft=False)
        (kept,) = METHODS[name].write_spec(spec).values()
        return {f"{name}_base": kept}

    return ComponentRow(emits=emits, draft=draft, base_needs_draft=True, recorded=recorded)
