"""Medusa (arXiv 2401.10774) on its way out: the state that a base emits, and the heads over it."""

from __future__ import annotations

from edgespec.export.component import Component
from edgespec.export.draft import draft_component, draft_notes, pair_config
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted, asked_for
from edgespec.methods.medusa import NAME, MedusaConfig, heads_in_words, spec_of

__all__ = ["COMPONENTS", "NAME"]

FINAL = Emitted(final=True, note="base of Medusa heads: it emits the state after its last norm")


def draft(request: ExportRequest) -> Component:
    """The component of the heads: of a checkpoint of their own, or of those beside their base."""
    config = request.drafted().config
    assert isinstance(config, MedusaConfig)
    first = f"Medusa, {config.layout} layout: {heads_in_words(config)}"
    if not config.own_head:
        first += "; each draws its token by the base's lm_head"
    notes = draft_notes(request, first, "none, the state after the last norm")
    return draft_component(
        request, "Medusa", pair_config(request, None), spec=spec_of(config), notes=tuple(notes)
    )


COMPONENTS = ComponentRow(
    emits=lambda request: FINAL, draft=draft, recorded=asked_for(NAME, "medusa_base")
)
