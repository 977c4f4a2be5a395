"""The table of what `pairing` knows of each method, by the name of its row in METHODS."""

from __future__ import annotations

from edgespec.pairing import dflash, dspark, eagle3, jetspec, mtp
from edgespec.pairing.row import PairingRow

PAIRINGS: dict[str, PairingRow] = {
    eagle3.NAME: eagle3.PAIRING,
    dflash.NAME: dflash.PAIRING,
    jetspec.NAME: jetspec.PAIRING,
    dspark.NAME: dspark.PAIRING,
    mtp.NAME: mtp.PAIRING,
}
