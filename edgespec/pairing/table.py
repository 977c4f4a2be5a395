"""The table of what `pairing` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.pairing import dflash, draft_model, dspark, eagle1, eagle3, jetspec, medusa, mtp
from edgespec.pairing.row import PairingRow

PAIRINGS: dict[str, PairingRow] = {
    eagle1.NAME: eagle1.PAIRING,
    eagle3.NAME: eagle3.PAIRING,
    dflash.NAME: dflash.PAIRING,
    jetspec.NAME: jetspec.PAIRING,
    dspark.NAME: dspark.PAIRING,
    mtp.NAME: mtp.PAIRING,
    medusa.NAME: medusa.PAIRING,
    draft_model.NAME: draft_model.PAIRING,
}
