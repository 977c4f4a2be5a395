"""DFlash (arXiv 2602.06036) on its way out: a base that is exported by its draft, and the draft."""

from __future__ import annotations

from typing import Any

from edgespec.export.component import Component
from edgespec.export.draft import (
    draft_component,
    draft_notes,
    hidden_states,
    pair_config,
    vocabulary_map,
)
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted
from edgespec.methods.dflash import NAME, THINKING, DFlashConfig, spec_of, write_spec
from edgespec.methods.dflash_variants import SECTION

__all__ = ["COMPONENTS", "NAME"]


def config_of(request: ExportRequest) -> DFlashConfig:
    """The config of the request's draft, a DFlash one."""
    config = request.drafted().config
    assert isinstance(config, DFlashConfig)
    return config


def emits(request: ExportRequest) -> Emitted:
    """The aux layers that the draft declares."""
    spec = spec_of(config_of(request), draft=False)
    note = f"aux layers: {hidden_states(spec.aux_layer_ids)}"
    return Emitted(aux_layers=spec.aux_layer_ids, spec=spec, note=note)


def draft(request: ExportRequest) -> Component:
    """The draft's component, with the mode of thinking that drafts of its base's family were
    trained in."""
    config, base = config_of(request), request.base
    thinking = THINKING.get(base.config.architecture) if base else None
    first = f"DFlash draft, {config.layout} layout: blocks of {config.block_size}"
    return draft_component(
        request,
        "DFlash",
        pair_config(request, config.aux_layer_ids, thinking),
        spec=spec_of(config, draft=True),
        d2t=vocabulary_map(request.drafted()),
        notes=tuple(draft_notes(request, first, hidden_states(config.aux_layer_ids))),
    )


def recorded(request: ExportRequest) -> dict[str, Any]:
    """The options that the manifest keeps: what the base emits, where a base of DFlash was asked
    for."""
    if request.options.base_for != NAME:
        return {}
    return {"dflash_base": write_spec(spec_of(config_of(request), draft=False))[SECTION]}


COMPONENTS = ComponentRow(emits=emits, draft=draft, base_needs_draft=True, recorded=recorded)
