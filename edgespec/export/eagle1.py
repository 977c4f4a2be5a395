"""EAGLE-1 (arXiv 2401.15077) on its way out: the state that a base emits, and the draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.checkpoint.names import EMBEDDING, stored_name, text_stack
from edgespec.export.component import Component
from edgespec.export.draft import draft_component, draft_notes, pair_config, vocabulary_map
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted, asked_for
from edgespec.methods.eagle1 import NAME

__all__ = ["COMPONENTS", "NAME"]

CHUNK_ROWS = 4096  # of two tables that are compared
OWN_EMBEDDING = "embed_tokens.weight"
FINAL = Emitted(final=True, note="base of an EAGLE-1 draft: it emits the state after its last norm")


def draft(request: ExportRequest) -> Component:
    """The draft's component. A draft's embedding that is the base's is left out."""
    shared = shares_embedding(request)
    if shared:
        opened = request.drafted()
        config = replace(opened.config, own_embedding=False)
        request = replace(request, draft=replace(opened, config=config))
    drafted = request.drafted()
    reduced = drafted.config.draft_vocab_size < drafted.config.vocab_size
    first = f"EAGLE-1 draft, {drafted.config.layout} layout"
    notes = [*draft_notes(request, first, "none, the state after the last norm")]
    if shared:
        notes.append("its embedding is the base's: it is not stored again")
    return draft_component(
        request,
        "Eagle1",
        pair_config(request, None),
        d2t=vocabulary_map(drafted) if reduced else None,
        notes=tuple(notes),
    )


def shares_embedding(request: ExportRequest) -> bool:
    """Whether the draft brings a copy of the base's embedding, as published drafts do: equal value
    for value."""
    draft, base = request.drafted(), request.base
    if base is None or not draft.config.own_embedding:
        return False
    own = next(name for name in draft.checkpoint.tensors if name.endswith(OWN_EMBEDDING))
    theirs = stored_name(EMBEDDING, text_stack(base.checkpoint))
    shape = draft.checkpoint.tensors[own].shape
    if base.checkpoint.tensors[theirs].shape != shape:
        return False
    for low in range(0, shape[0], CHUNK_ROWS):
        rows = (low, min(low + CHUNK_ROWS, shape[0]))
        mine = draft.checkpoint.read_rows(own, *rows).astype(np.float32)
        if not np.array_equal(mine, base.checkpoint.read_rows(theirs, *rows).astype(np.float32)):
            return False
    return True


COMPONENTS = ComponentRow(
    emits=lambda request: FINAL, draft=draft, recorded=asked_for(NAME, "eagle1_base")
)
