"""A draft model (arXiv 2211.17192) on its way out: a whole model as a draft for another one.
Its base is exported as a plain decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgespec.checkpoint.names import EMBEDDING
from edgespec.checkpoint.vocabulary import Differences, compared_tokenizers
from edgespec.errors import counted
from edgespec.export.base import PLAIN
from edgespec.export.component import Component, rows_of
from edgespec.export.draft import draft_config, open_graph, pair_config
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted
from edgespec.methods.draft_model import NAME, DraftModelConfig, DraftModelSpec

__all__ = ["COMPONENTS", "NAME"]


def emits(request: ExportRequest) -> Emitted:
    """Nothing: a plain decoder verifies the drafts."""
    del request
    return PLAIN


def draft(request: ExportRequest) -> Component:
    """The draft's component, once its tokens were compared with the base's. Raises PairingError
    where they mean others."""
    base, drafted = request.target(), request.drafted()
    config = drafted.config
    assert isinstance(config, DraftModelConfig)
    compared = compared_tokenizers(base.checkpoint, drafted.checkpoint)
    graph, model = open_graph(request), config.model
    pair = replace(pair_config(request, None), base_name=base.checkpoint.place.name)
    spec = DraftModelSpec(max_position=model.max_position)
    embedding = graph.table.source(EMBEDDING)
    return Component(
        directory=NAME,
        graph=graph,
        config=draft_config(model.architecture, NAME, graph, pair, spec),
        golden_rows=rows_of(*embedding),
        ropes=graph.layers.ropes,
        embedding=embedding,
        tied_head=model.tied_head,
        notes=tuple(notes(base.checkpoint.place.name, compared)),
    )


def notes(base: str, compared: Differences | None) -> Iterator[str]:
    """What the user should know of the two vocabularies."""
    alike = "" if compared is None else f", {compared.both} ids compared"
    yield f"draft model for {base}: tokens mean the same in both{alike}"
    if compared is not None and compared.base_alone:
        count = counted(len(compared.base_alone), "token")
        yield f"the draft's tokenizer lacks {count} of the base, which are never drafted"


def recorded(request: ExportRequest) -> dict[str, Any]:
    """The options that the manifest keeps: whether a whole model was exported as a draft."""
    return {NAME: True} if request.method == NAME else {}


COMPONENTS = ComponentRow(emits=emits, draft=draft, recorded=recorded)
