"""The table of methods whose drafts `train` makes, by the name of the row in METHODS. Imports no
torch."""

from __future__ import annotations

from edgespec.methods import dflash, eagle3, mtp
from edgespec.training import dflash_keys, eagle3_keys, mtp_keys
from edgespec.training.keys import Trainable

TRAINABLE: dict[str, Trainable] = {
    eagle3.NAME: eagle3_keys.TRAINABLE,
    dflash.NAME: dflash_keys.TRAINABLE,
    mtp.NAME: mtp_keys.TRAINABLE,
}
