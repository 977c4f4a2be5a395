"""Pairs with DSpark (arXiv 2607.05147): what the probe asks of a draft includes its Markov head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.checkpoint.block_draft import named_as_ours
from edgespec.methods.dspark import NAME, DSparkConfig
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.pairing.block_draft import BlockForcing, pairing_row
from edgespec.pairing.block_draft import force as block_force
from edgespec.pairing.pair import Pair

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Array, Ids
    from edgespec.pairing.probe_text import ProbeText

__all__ = ["NAME", "PAIRING"]


def force(pair: Pair, base: Decoder, text: ProbeText) -> BlockForcing:
    """The draft over a text, a block at each of some positions."""
    checkpoint, config = pair.drafted()
    assert isinstance(config, DSparkConfig)
    forced, named = block_force(pair, base, text), named_as_ours(checkpoint, config)
    arrays = {name: named.read(name).astype(np.float32) for name in config.head_shapes}
    heads = DSparkHeads(config.heads, arrays, forced.ids)
    anchors = [text.tokens[positions] for positions in forced.positions_by_pass()]

    def correct(number: int, rows: Ids, logits: Array, states: Array | None) -> Array:
        """The logits of first slots [1, G, Vd], the Markov head's added."""
        asked = anchors[number % len(anchors)]
        corrected = logits.copy()
        for i, row in enumerate(rows[0]):
            block = int(row) // config.block_size
            state = None if states is None else states[0, row]
            walk = heads.walk(int(asked[block]), logits[0, i : i + 1], row_of(state))
            corrected[0, i] = walk.logits[0]
        return corrected

    return replace(forced, correct=correct)


def row_of(state: Any) -> Any:
    """One row [1, H] of a state [H]; None where there is none."""
    return None if state is None else state[None]


PAIRING = pairing_row(force)
