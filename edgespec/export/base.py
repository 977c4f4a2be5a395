"""The component of a base: a plain decoder, or one that emits what a method's drafts read.

Knows no method: what is emitted is a value.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.artifacts.component import ComponentConfig
from edgespec.checkpoint.names import EMBEDDING
from edgespec.contract import GraphShape
from edgespec.export.component import Component, rows_of
from edgespec.export.request import ExportBase, ExportRequest
from edgespec.export.row import Emitted
from edgespec.graphs.decoder import Decoder

LLM = "llm"
PLAIN = Emitted(note="plain decoder: it emits no hidden states")


def base_component(request: ExportRequest, emitted: Emitted) -> Component:
    """The base of a request, whose graph emits `emitted`."""
    base = request.target()
    graph = Decoder.open(
        base.checkpoint, base.config, emitted.aux_layers, emits_final=emitted.final
    )
    embedding = graph.table.source(EMBEDDING)
    notes = [emitted.note]
    if not base.config.eos_token_ids:
        notes.append("the checkpoint names no eos_token_id: answers end by length alone")
    return Component(
        directory=LLM,
        graph=graph,
        config=base_config(base, graph.shape, request.method, emitted),
        golden_rows=rows_of(*embedding),
        ropes=base.config.decoder.ropes,
        embedding=embedding,
        tied_head=base.config.tied_head,
        tokenizer=base.checkpoint,
        notes=tuple(notes),
    )


def base_config(
    base: ExportBase, shape: GraphShape, method: str | None, emitted: Emitted
) -> ComponentConfig:
    """config.json of a base for a method's drafts, or of a plain decoder."""
    model = base.config
    config = ComponentConfig.of_decoder(
        model.decoder,
        shape,
        model=model.architecture,
        method=method,
        vocab_size=model.vocab_size,
        identity="",  # write_component knows it, once the weights are read
    )
    return replace(
        config,
        max_position=model.max_position,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        quantized_from=base.origin.identity,
        spec=emitted.spec,
    )
