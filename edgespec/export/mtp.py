"""A head for multi-token prediction on its way out: it is exported beside its base."""

from __future__ import annotations

from edgespec.artifacts.component import PairConfig
from edgespec.checkpoint.mtp import refuse_other_forms
from edgespec.export.component import Component
from edgespec.export.draft import draft_component
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted, asked_for
from edgespec.methods.mtp import NAME

__all__ = ["COMPONENTS", "NAME"]

FINAL = Emitted(final=True, note="base of an MTP head: it emits the state after its last norm")


def draft(request: ExportRequest) -> Component:
    """The head's component, with the vocabulary, the embedding and the identity of its base."""
    base = request.target()
    pair = PairConfig(
        base_identity=None,  # write_component knows it, once the weights are read
        base_name=base.checkpoint.place.name,
        aux_layer_ids=None,
        num_aux_layers=1,
        target_hidden_size=base.config.decoder.hidden_size,
        own_embedding=False,
        base_quantized_from=base.origin.identity,
    )
    notes = ("MTP head: one layer, used again for each step",)
    return draft_component(request, "Mtp", pair, notes=notes)


COMPONENTS = ComponentRow(
    emits=lambda request: FINAL,
    draft=draft,
    check_base=refuse_other_forms,
    recorded=asked_for(NAME, "mtp"),
)
