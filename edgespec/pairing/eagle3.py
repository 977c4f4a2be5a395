"""EAGLE-3 pairs: their checks, and the draft under teacher forcing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.config import DraftConfig
from edgespec.methods.eagle3 import NAME
from edgespec.pairing.common import common_checks
from edgespec.pairing.pair import Pair
from edgespec.pairing.row import PairingRow

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Forced, Ids

__all__ = ["NAME", "PAIRING"]


def stated_layers(config: DraftConfig) -> tuple[int, ...] | None:
    """The aux layers in the numbering of the draft's file; None: it names none."""
    ids = config.aux_layer_ids
    converted = config.aux_layer_convention == "output" or (
        config.aux_layer_convention == "hs" and config.layout == "modelopt"
    )
    return tuple(i - 1 for i in ids) if ids is not None and converted else ids


def force(pair: Pair, base: Decoder, tokens: Ids) -> Forced:
    """The draft over the tokens [T], all positions in one pass."""
    from edgespec.pairing.forcing import chain_forcing

    return chain_forcing(pair, base, tokens)


PAIRING = PairingRow(checks=common_checks(stated_layers), force=force)
