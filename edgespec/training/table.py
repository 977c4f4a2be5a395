"""The table of methods whose drafts `train` makes, by the name of the row in METHODS. Of several
with one type of recipe, the first that claims a recipe trains it. Imports no torch."""

from __future__ import annotations

from edgespec.methods import dflash, eagle1, eagle3, medusa
from edgespec.training import dflash_keys, eagle1_keys, eagle3_keys, medusa_keys
from edgespec.training.keys import Trainable

TRAINABLE: dict[str, Trainable] = {
    eagle1.NAME: eagle1_keys.TRAINABLE,
    eagle3.NAME: eagle3_keys.TRAINABLE,
    dflash.NAME: dflash_keys.TRAINABLE,
    medusa.NAME: medusa_keys.TRAINABLE,
}
