"""What a call feeds to an input of its graph, as an array on the host.

Knows calls and kinds of inputs. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import OWN, Call
from edgespec.backends.host import gather_idx, stacked_states
from edgespec.backends.masks import tree_mask
from edgespec.contract import GraphInput, Kind

Read = Callable[[Call], NDArray[Any] | None]
# What follows from the rest of a call, by input
DERIVED: dict[str, Read] = {
    "write_indices": attrgetter("write_indices"),
    "gather_idx": gather_idx,
    "tree_mask": tree_mask,
    "use_base_hidden": lambda call: np.array("base_hidden" in call.extras),
}


def reader_of(row: GraphInput) -> Read:
    """What an input that is no mask reads in a call; None: nothing but its default."""
    name = row.name
    if name in DERIVED:
        return DERIVED[name]
    if name in OWN:
        return attrgetter(OWN[name])
    if row.kind is not Kind.STATES:
        return lambda call: call.array(name)
    return partial(stacked_of, name, in_context=row.dims[1] == "L")


def stacked_of(name: str, call: Call, *, in_context: bool) -> NDArray[Any] | None:
    """Hidden states of a call [B, S, width], or of its context [B, L, width]."""
    states = call.states(name)
    if states is None:
        return None
    return stacked_states(states, call.context_rows if in_context else call.rows)
