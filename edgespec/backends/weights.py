"""What the weights of an engine are, how its config records them, and how far its kernels may
round.

Knows formats and promises. Knows no kernel and no layout: those are the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

KEPT = "as exported"
# the widest block of 4 bits whose kernel gives a row the same bits whatever stands beside it
EXACT_BLOCK = 32
BY_ROW = (
    0  # int8: a scale per row of activations and per channel of the weight, multiplied as integers
)
BLOCKS = (BY_ROW, EXACT_BLOCK, 128)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What `build` makes of the weights that MatMuls read: float32 as they are, or 4 or 8 bits in
    blocks along in.

    With `share_embedding` the codes of a tied head serve as the embedding as well.
    """

    scheme: Literal["fp32", "int4", "int8"] = "fp32"
    block: int = 128  # or BY_ROW
    share_embedding: bool = True

    def __post_init__(self) -> None:
        assert self.block != BY_ROW or self.scheme == "int8"

    @property
    def bits(self) -> Literal[4, 8] | None:
        bits: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
        return bits.get(self.scheme)

    @property
    def by_row(self) -> bool:
        """Whether products are of integers."""
        return self.block == BY_ROW

    def to_dict(self) -> dict[str, Any]:
        if self.bits is None:
            return {"scheme": self.scheme, "method": KEPT}
        if self.by_row:
            return {"scheme": self.scheme, "method": "rtn", "compute": "int8", "exact": True}
        return {"scheme": self.scheme, "block": self.block, "method": "rtn"}


FP32 = WeightFormat()


def weights_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `weights` of an engine's config; an engine of an earlier version has those of its export,
    in float32."""
    found: dict[str, Any] = config.get("weights") or FP32.to_dict()
    return found


def are_few_bits(weights: Mapping[str, Any]) -> bool:
    """Whether the kernels read 4 or 8 bits: all other weights are float32 when they are
    multiplied."""
    return weights["scheme"] != "fp32" and "float32" not in weights.get("compute", "")


def rounding_of(config: Mapping[str, Any], float32: float) -> float:
    """How far apart two candidates may be, in nats, where kernels for one row and for many choose
    differently."""
    return float(weights_of(config).get("rounding", float32))


def are_rounded(weights: Mapping[str, Any]) -> bool:
    """Whether an engine's outputs are compared by their direction: not so where only the order of
    sums differs."""
    return "rounding" in weights and weights["scheme"] != "fp32"


def rounds_by(weights: Mapping[str, Any]) -> str:
    """What makes kernels for one row and for many round differently."""
    return str(weights["scheme"]) if weights["scheme"] != "fp32" else "recurrent layers"


def why_not_exact(config: Mapping[str, Any]) -> str | None:
    """What keeps an engine's chains from being the same bits in every pass; None where nothing
    does."""
    if config["builder_config"]["max_batch_size"] > 1:
        return f"it was built for {config['builder_config']['max_batch_size']} sequences"
    if config["graph"].get("recurrent"):
        return "its recurrent layers take in what was accepted at once"
    return why_rows_differ(weights_of(config))


def why_rows_differ(weights: Mapping[str, Any]) -> str | None:
    """Why a row may have other bits beside others than alone; `exact` is told by the forms that its
    products have."""
    if weights.get("emulated"):
        return f"its {weights['scheme']} is {weights['emulated']}"
    known = weights["scheme"] == "fp32" or (weights["scheme"], weights.get("block")) == (
        "int4",
        EXACT_BLOCK,
    )
    if known or weights.get("exact"):
        return None
    block = f" in blocks of {weights['block']}" if "block" in weights else ""
    return f"its weights are {weights['scheme']}{block}"
