"""The table of what `export` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.export import draft_model, dspark, eagle1, eagle3, medusa, mtp
from edgespec.export.block_draft import component_row
from edgespec.export.row import ComponentRow
from edgespec.methods import dflash, jetspec

COMPONENTS: dict[str, ComponentRow] = {
    eagle1.NAME: eagle1.COMPONENTS,
    eagle3.NAME: eagle3.COMPONENTS,
    mtp.NAME: mtp.COMPONENTS,
    dflash.NAME: component_row(dflash.NAME),
    jetspec.NAME: component_row(jetspec.NAME),
    dspark.NAME: dspark.COMPONENTS,
    medusa.NAME: medusa.COMPONENTS,
    draft_model.NAME: draft_model.COMPONENTS,
}
