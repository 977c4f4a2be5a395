"""What an engine may compute wrongly: switches of `Faults`, each a change of what a run reads or
gives. Knows names of the contract. Knows no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]  # of a run, by tensor
WRONG_SLOT = 20


def every_row_visible(feeds: Arrays) -> None:
    """The mask is not applied."""
    for name in feeds:
        if name.endswith("attention_mask"):
            feeds[name] = np.ones_like(feeds[name])


def a_row_further(feeds: Arrays) -> None:
    """Keys and values are written one slot behind their place."""
    if "write_indices" in feeds:
        feeds["write_indices"] = feeds["write_indices"] + 1


def next_rotation(feeds: Arrays) -> None:
    """Each row is rotated as the one behind it."""
    for name in feeds:
        if name.startswith("rope_"):
            feeds[name] = np.roll(feeds[name], -1, axis=1)


def presents(found: Arrays) -> list[NDArray[Any]]:
    return [array for name, array in found.items() if name.startswith("present_key")]


def one_more_row(found: Arrays) -> None:
    """A row that is of nobody's call is written."""
    for array in presents(found):
        array[:, :, WRONG_SLOT] = 0.5


def louder(found: Arrays) -> None:
    """The scale of lm_head is off by two hundredths."""
    found["logits"] = (found["logits"] * 1.02).astype(found["logits"].dtype)


def swapped_rows(found: Arrays) -> None:
    """The first row of logits stands where the last does, and the other way round."""
    found["logits"] = found["logits"][:, ::-1].copy()


def wrong_in_verification(found: Arrays) -> None:
    """Calls that give logits of four rows go wrong: those of one and of many rows do not."""
    if found["logits"].shape[1] == 4:
        found["logits"] = -found["logits"]


def not_a_number(found: Arrays) -> None:
    """One logit."""
    found["logits"].reshape(-1)[-1] = np.nan


Change = Callable[[Arrays], None]
READS: Mapping[str, Change] = {
    f.__name__: f for f in (every_row_visible, a_row_further, next_rotation)
}
GIVES: Mapping[str, Change] = {
    f.__name__: f for f in (one_more_row, louder, swapped_rows, wrong_in_verification, not_a_number)
}
