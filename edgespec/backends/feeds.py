"""What a call feeds to an input of its graph, as an array on the host.

Knows calls and kinds of inputs. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Call
from edgespec.backends.host import gather_idx, stacked_states
from edgespec.backends.masks import tree_mask
from edgespec.contract import GraphInput, Kind

# What follows from the rest of a call, by input
DERIVED: dict[str, Callable[[Call], NDArray[Any]]] = {
    "write_indices": lambda call: call.write_indices,
    "gather_idx": gather_idx,
    "tree_mask": tree_mask,
    "use_base_hidden": lambda call: np.array("base_hidden" in call.extras),
}


def array_of(row: GraphInput, call: Call) -> NDArray[Any] | None:
    """What an input that is no mask reads in a call; None: nothing but its default."""
    if row.name in DERIVED:
        return DERIVED[row.name](call)
    if row.kind is not Kind.STATES:
        return call.array(row.name)
    states = call.states(row.name)
    rows = call.context_rows if row.dims[1] == "L" else call.rows
    return None if states is None else stacked_states(states, rows)
