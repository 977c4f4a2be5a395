"""The table of what `pairing` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.pairing import dflash, draft_model, eagle1, eagle3, medusa, mtp
from edgespec.pairing.row import PairingRow

PAIRINGS: dict[str, PairingRow] = {
    eagle1.NAME: eagle1.PAIRING,
    eagle3.NAME: eagle3.PAIRING,
    dflash.NAME: dflash.PAIRING,
    mtp.NAME: mtp.PAIRING,
    medusa.NAME: medusa.PAIRING,
    draft_model.NAME: draft_model.PAIRING,
}
