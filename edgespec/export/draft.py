"""The component of a draft: its graph, its config.json and the rows of its golden inputs.

Knows what all methods share. What is one method's own stands in its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts.component import NO_SPEC, ComponentConfig, PairConfig
from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.names import EMBEDDING, stored_name, text_stack
from edgespec.export.component import Component, EmbeddingRows, Heads, rows_of
from edgespec.export.request import ExportDraft, ExportRequest
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.draft import DraftGraph, DraftSource, own_embedding
from edgespec.graphs.registry import open_draft
from edgespec.methods import METHODS, SpecConfig


def open_graph(request: ExportRequest) -> DraftGraph:
    """The graph of the request's draft. Raises as `DraftGraphs.open` does."""
    base, draft = request.base, request.draft
    shares = None
    if base is not None:
        shares = Decoder.open(base.checkpoint, base.config)
    assert request.method is not None
    if draft is None:
        return open_draft(request.method, DraftSource(shares))
    return open_draft(request.method, DraftSource(shares, draft.checkpoint, draft.config))


def draft_component(
    request: ExportRequest,
    model: str,
    pair: PairConfig,
    *,
    spec: SpecConfig = NO_SPEC,
    d2t: NDArray[np.int32] | None = None,
    heads: Heads | None = None,
    notes: tuple[str, ...] = (),
) -> Component:
    """The component of the request's draft; `model` is its name in config.json."""
    assert request.method is not None
    directory = METHODS[request.method].component
    assert directory is not None
    graph = open_graph(request)
    return Component(
        directory=directory,
        graph=graph,
        config=draft_config(model, request.method, graph, pair, spec),
        golden_rows=golden_rows(request, graph),
        ropes=graph.layers.ropes,
        embedding=own_embedding(graph),
        d2t=d2t,
        heads=heads or {},
        notes=notes,
    )


def draft_config(
    model: str,
    method: str,
    graph: DraftGraph,
    pair: PairConfig,
    spec: SpecConfig,
) -> ComponentConfig:
    """config.json of a draft; `pair` is what it asks of its base."""
    config = ComponentConfig.of_decoder(
        graph.layers,
        graph.shape,
        model=model,
        method=method,
        vocab_size=graph.vocab_size,
        identity="",  # write_component knows it, once the weights are read
    )
    return replace(config, draft_vocab_size=graph.shape.vocab_size, spec=spec, pair=pair)


def pair_config(
    request: ExportRequest,
    aux_layers: tuple[int, ...] | None,
    enable_thinking: bool | None = None,
) -> PairConfig:
    """What a draft with a checkpoint of its own asks of its base; None where it does not say."""
    base, config = request.base, request.drafted().config
    return PairConfig(
        base_identity=None,  # as the draft's own
        base_name=config.base_name,
        aux_layer_ids=aux_layers,
        num_aux_layers=config.num_aux_layers,
        target_hidden_size=config.target_hidden_size,
        own_embedding=config.own_embedding,
        base_quantized_from=base.origin.identity if base else None,
        num_target_layers=config.num_target_layers,
        enable_thinking=enable_thinking,
    )


def vocabulary_map(draft: ExportDraft) -> NDArray[np.int32] | None:
    """Offsets [draft_vocab_size] as they are stored; None where draft and base share the
    vocabulary."""
    offsets = read_d2t(draft.checkpoint, draft.config)
    return None if offsets is None else offsets.astype(np.int32)


def golden_rows(request: ExportRequest, graph: DraftGraph) -> EmbeddingRows:
    """Embedding rows of the golden inputs; made-up ones where the base's table is not at hand."""
    if own := own_embedding(graph):
        return rows_of(*own)
    if base := request.base:
        return rows_of(base.checkpoint, stored_name(EMBEDDING, text_stack(base.checkpoint)))
    width = graph.layers.hidden_size
    return lambda ids: np.stack(
        [np.random.default_rng(int(i)).standard_normal(width, np.float32) for i in ids]
    )


def draft_notes(request: ExportRequest, first: str, aux_layers: str) -> Iterator[str]:
    """Yields notes for the user: `first` says what the draft is, `aux_layers` what it reads."""
    yield first
    if name := request.drafted().config.base_name:
        yield f"its config.json names {name} as its base"
    yield f"aux layers: {aux_layers}"
    if request.base is None:
        yield (
            "no `base_model_dir`: the pairing is checked by its shapes at build, not by the base's"
            " identity"
        )


def hidden_states(layers: tuple[int, ...]) -> str:
    """The aux layers in words."""
    return f"hidden_states {', '.join(map(str, layers))}"
