"""The table of what `export` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.export import dflash, draft_model, dspark, eagle1, eagle3, jetspec, medusa, mtp
from edgespec.export.row import ComponentRow

COMPONENTS: dict[str, ComponentRow] = {
    eagle1.NAME: eagle1.COMPONENTS,
    eagle3.NAME: eagle3.COMPONENTS,
    mtp.NAME: mtp.COMPONENTS,
    dflash.NAME: dflash.COMPONENTS,
    jetspec.NAME: jetspec.COMPONENTS,
    dspark.NAME: dspark.COMPONENTS,
    medusa.NAME: medusa.COMPONENTS,
    draft_model.NAME: draft_model.COMPONENTS,
}
