"""How an engine's lm_head is packed where our own kernel reads it, as its config.json says it.

Knows the keys. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edgespec.backends.ort.low_bit_matmul import RowRounding
from edgespec.backends.ort.native.layout import BLOCK_SIZES, WeightLayout
from edgespec.safe_read.fields import BundleFields


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How an engine's lm_head is packed, and how its rows are rounded."""

    layout: WeightLayout
    rounding: RowRounding

    @classmethod
    def read(cls, fields: BundleFields) -> HeadForm:
        """The form of the keys of `head`. BundleError names a wrong key."""
        bits, block = fields.size("bits"), fields.size("block")
        if bits not in (4, 8):
            raise fields.wrong("bits", "4 or 8")
        if block not in BLOCK_SIZES:
            raise fields.wrong("block", f"one of {', '.join(map(str, BLOCK_SIZES))}")
        few: Literal[4, 8] = 4 if bits == 4 else 8
        scale = fields.get("activation_scale")
        return cls(
            WeightLayout(few, block, fields.size("in_features"), fields.size("out_features")),
            RowRounding(
                fields.flag("round_by_row", False),
                None if scale is None else np.float32(fields.number("activation_scale")),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of `head` in config.json."""
        layout, rounding = self.layout, self.rounding
        out: dict[str, Any] = {
            "bits": layout.bits,
            "block": layout.block,
            "in_features": layout.in_features,
            "out_features": layout.out_features,
        }
        if rounding.scale is not None:
            out["activation_scale"] = float(rounding.scale)
        elif rounding.by_row:
            out["round_by_row"] = True
        return out
