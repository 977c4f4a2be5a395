"""The table of drafts' graphs: one row per drafting method. Bases are all built by `decoder`."""

from __future__ import annotations

from edgespec.graphs import dflash, draft_model, dspark, eagle1, eagle3, jetspec, medusa, mtp
from edgespec.graphs.draft import DraftGraph, DraftGraphs, DraftSource

# By the name of the method's row in METHODS.
DRAFTS: dict[str, DraftGraphs] = {
    eagle1.NAME: eagle1.GRAPHS,
    eagle3.NAME: eagle3.GRAPHS,
    mtp.NAME: mtp.GRAPHS,
    dflash.NAME: dflash.GRAPHS,
    jetspec.NAME: jetspec.GRAPHS,
    dspark.NAME: dspark.GRAPHS,
    medusa.NAME: medusa.GRAPHS,
    draft_model.NAME: draft_model.GRAPHS,
}


def open_draft(method: str, source: DraftSource) -> DraftGraph:
    """The graph of a method's draft. Raises as `DraftGraphs.open` does."""
    return DRAFTS[method].open(source)
