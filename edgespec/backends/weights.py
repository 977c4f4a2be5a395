"""What the weights of an engine are, how its config records them, and how far its kernels may round.

Knows formats and promises. Knows no kernel and no layout: those are the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

KEPT = "as exported"
EXACT_BLOCK = 32  # the widest block of 4 bits whose kernel gives a row the same bits whatever stands beside it
BLOCKS = (EXACT_BLOCK, 128)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What `build` makes of the weights that MatMuls read: float32 as they are, or 4 or 8 bits in blocks along in.

    With `share_embedding` the codes of a tied head serve as the embedding as well.
    """

    scheme: Literal["fp32", "int4", "int8"] = "fp32"
    block: int = 128
    share_embedding: bool = True

    @property
    def bits(self) -> Literal[4, 8] | None:
        bits: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
        return bits.get(self.scheme)

    def to_dict(self) -> dict[str, Any]:
        if self.bits is None:
            return {"scheme": self.scheme, "method": KEPT}
        return {"scheme": self.scheme, "block": self.block, "method": "rtn"}


FP32 = WeightFormat()


def weights_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `weights` of an engine's config; an engine of an earlier version has those of its export, in float32."""
    found: dict[str, Any] = config.get("weights") or FP32.to_dict()
    return found


def rounding_of(config: Mapping[str, Any], float32: float) -> float:
    """How far apart two candidates may be, in nats, where kernels for one row and for many choose differently."""
    return float(weights_of(config).get("rounding", float32))


def why_not_exact(config: Mapping[str, Any]) -> str | None:
    """What keeps an engine's chains from being the same bits in every pass; None where nothing does."""
    weights = weights_of(config)
    if config["builder_config"]["max_batch_size"] > 1:
        return f"it was built for {config['builder_config']['max_batch_size']} sequences"
    if weights.get("emulated"):
        return f"its {weights['scheme']} is {weights['emulated']}"
    if weights["scheme"] == "fp32" or (weights["scheme"], weights.get("block")) == ("int4", EXACT_BLOCK):
        return None
    block = f" in blocks of {weights['block']}" if "block" in weights else ""
    return f"its weights are {weights['scheme']}{block}"
