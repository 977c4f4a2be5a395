"""How an engine's lm_head is packed where our own kernel reads it, as its config.json says it.

Knows the keys. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from edgespec.backends.ort.low_bit_matmul import RowRounding
from edgespec.backends.ort.native.layout import (
    BLOCK_SIZES,
    CODEBOOKS,
    FACTORS,
    PARTS,
    Bits,
    WeightLayout,
)
from edgespec.safe_read.fields import BundleFields

FORM = ("scales", "super_block", "codebook", "global_scale")  # beside bits and block


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How an engine's lm_head is packed, and how its rows are rounded."""

    layout: WeightLayout
    rounding: RowRounding

    @classmethod
    def read(cls, fields: BundleFields) -> HeadForm:
        """The form of the keys of `head`. BundleError names a wrong key."""
        scale = fields.get("activation_scale")
        return cls(
            read_layout(fields, fields.size("in_features"), fields.size("out_features")),
            RowRounding(
                fields.flag("round_by_row", False),
                None if scale is None else np.float32(fields.number("activation_scale")),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of `head` in config.json."""
        layout, rounding = self.layout, self.rounding
        sizes = {"in_features": layout.in_features, "out_features": layout.out_features}
        out = layout_keys(layout) | sizes
        if rounding.scale is not None:
            out["activation_scale"] = float(rounding.scale)
        elif rounding.by_row:
            out["round_by_row"] = True
        return out


def layout_keys(layout: WeightLayout) -> dict[str, Any]:
    """What is said of a layout beside its sizes; scales in float32 are not mentioned."""
    usual = WeightLayout(layout.bits, layout.block, layout.in_features, layout.out_features)
    form = {
        key: getattr(layout, key) for key in FORM if getattr(layout, key) != getattr(usual, key)
    }
    return {"bits": layout.bits, "block": layout.block} | form


def read_layout(fields: BundleFields, in_features: int, out_features: int) -> WeightLayout:
    """The layout of the keys that `layout_keys` makes. BundleError names a wrong key."""
    bits = cast(Bits, one_of(fields, "bits", fields.size("bits"), get_args(Bits)))
    block = one_of(fields, "block", fields.size("block"), BLOCK_SIZES)
    scales = one_of(fields, "scales", fields.text("scales") or "float32", tuple(PARTS))
    codebook = one_of(fields, "codebook", fields.text("codebook") or "", ("", *CODEBOOKS))
    shared, factor = fields.size("super_block", 1), fields.number("global_scale", 1.0)
    if shared > 1 and scales not in FACTORS:
        raise fields.wrong("super_block", f"1 where scales are {scales}")
    if codebook and (bits != 4 or len(PARTS[scales]) > 1):
        raise fields.wrong("codebook", "of 4-bit values without minimums")
    return WeightLayout(
        bits,
        block,
        in_features,
        out_features,
        scales=scales,
        super_block=shared,
        codebook=codebook,
        global_scale=factor,
    )


def one_of(fields: BundleFields, key: str, value: Any, known: tuple[Any, ...]) -> Any:
    """The value of a key. BundleError where it is none of those known."""
    if value not in known:
        raise fields.wrong(key, f"one of {', '.join(repr(one) for one in known)}")
    return value
