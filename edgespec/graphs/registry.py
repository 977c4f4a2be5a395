"""The tables of graphs: one row per base architecture, one row per drafting method."""

from __future__ import annotations

from edgespec.graphs import dflash, eagle3, mtp
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.draft import DraftGraph, DraftGraphs, DraftSource

BASES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3_5ForCausalLM": Decoder,
    "Qwen3_5ForConditionalGeneration": Decoder,
}
# By the name of the method's row in METHODS.
DRAFTS: dict[str, DraftGraphs] = {
    eagle3.NAME: eagle3.GRAPHS,
    mtp.NAME: mtp.GRAPHS,
    dflash.NAME: dflash.GRAPHS,
}


def open_draft(method: str, source: DraftSource) -> DraftGraph:
    """The graph of a method's draft. Raises as `DraftGraphs.open` does."""
    return DRAFTS[method].open(source)
