"""The table of methods whose drafts `train` makes, by the name of the row in METHODS. Of several
with one type of recipe, the first that claims a recipe trains it. Imports no torch."""

from __future__ import annotations

from edgespec.methods import dflash, dspark, eagle3, jetspec
from edgespec.training import dflash_keys, dspark_keys, eagle3_keys, jetspec_keys
from edgespec.training.keys import Trainable

TRAINABLE: dict[str, Trainable] = {
    eagle3.NAME: eagle3_keys.TRAINABLE,
    dspark.NAME: dspark_keys.TRAINABLE,
    jetspec.NAME: jetspec_keys.TRAINABLE,
    dflash.NAME: dflash_keys.TRAINABLE,
}
