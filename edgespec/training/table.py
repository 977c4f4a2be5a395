"""The table of methods whose drafts `train` makes, by the name of the row in METHODS: the module
that has the row. Imports torch only when a row is asked for."""

from __future__ import annotations

from importlib import import_module

from edgespec.methods import dflash, eagle3
from edgespec.training.row import TrainRow

TRAINABLE = {
    eagle3.NAME: "edgespec.training.eagle3",
    dflash.NAME: "edgespec.training.block_draft",
}


def row_of(method: str) -> TrainRow:
    """What is asked of a method."""
    row = import_module(TRAINABLE[method]).ROW
    assert isinstance(row, TrainRow)
    return row
