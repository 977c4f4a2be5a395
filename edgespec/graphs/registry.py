"""The table of drafts' graphs: one row per drafting method. Bases are all built by `decoder`."""

from __future__ import annotations

from edgespec.graphs import block_draft, draft_model, eagle1, eagle3, medusa, mtp
from edgespec.graphs.draft import DraftGraph, DraftGraphs, DraftSource
from edgespec.methods import dflash, dspark, jetspec

# By the name of the method's row in METHODS.
DRAFTS: dict[str, DraftGraphs] = {
    eagle1.NAME: eagle1.GRAPHS,
    eagle3.NAME: eagle3.GRAPHS,
    mtp.NAME: mtp.GRAPHS,
    dflash.NAME: block_draft.GRAPHS,
    jetspec.NAME: block_draft.GRAPHS,  # its masks are causal
    dspark.NAME: block_draft.GRAPHS,  # it gives its states to the heads beside it
    medusa.NAME: medusa.GRAPHS,
    draft_model.NAME: draft_model.GRAPHS,
}


def open_draft(method: str, source: DraftSource) -> DraftGraph:
    """The graph of a method's draft. Raises as `DraftGraphs.open` does."""
    return DRAFTS[method].open(source)
