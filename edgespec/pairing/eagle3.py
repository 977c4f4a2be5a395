"""EAGLE-3 pairs: their checks, and the draft under teacher forcing."""

from __future__ import annotations

from edgespec.config import DraftConfig
from edgespec.methods.eagle3 import NAME
from edgespec.pairing.common import common_checks, force_chain
from edgespec.pairing.row import PairingRow

__all__ = ["NAME", "PAIRING"]


def stated_layers(config: DraftConfig) -> tuple[int, ...] | None:
    """The aux layers in the numbering of the draft's file; None: it names none."""
    ids = config.aux_layer_ids
    converted = config.aux_layer_convention == "output" or (
        config.aux_layer_convention == "hs" and config.layout == "modelopt"
    )
    return tuple(i - 1 for i in ids) if ids is not None and converted else ids


PAIRING = PairingRow(checks=common_checks(stated_layers), force=force_chain, image_rows=True)
