"""The table of what `pairing` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.methods import dflash, jetspec
from edgespec.pairing import draft_model, dspark, eagle1, eagle3, medusa, mtp
from edgespec.pairing.block_draft import pairing_row
from edgespec.pairing.row import PairingRow

PAIRINGS: dict[str, PairingRow] = {
    eagle1.NAME: eagle1.PAIRING,
    eagle3.NAME: eagle3.PAIRING,
    dflash.NAME: pairing_row(),
    jetspec.NAME: pairing_row(),
    dspark.NAME: dspark.PAIRING,
    mtp.NAME: mtp.PAIRING,
    medusa.NAME: medusa.PAIRING,
    draft_model.NAME: draft_model.PAIRING,
}
