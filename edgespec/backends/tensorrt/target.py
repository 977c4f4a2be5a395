"""What a canonical graph is lowered for: a dialect of ONNX, its compute type, its sizes.

Knows no version of TensorRT: which dialect a version takes stands in `versions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Compute = Literal["float32", "float16", "bfloat16"]


class Dialect(StrEnum):
    """The operators that a lowered graph is made of.

    PORTABLE: basic operators alone, for TensorRT 10.13 (JetPack 7.0 and 7.1). The cache is read and
    not written: a call's new keys and values are outputs of their own. NATIVE: RMSNormalization,
    RotaryEmbedding, TensorScatter and Attention, for TensorRT 10.15 and newer and for TensorRT-RTX.
    The cache is written in place where the engine says so.
    """

    PORTABLE = "portable"
    NATIVE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A dialect, the type of its products, of its hidden states and of its cache, and the sizes
    that are fixed in it.

    `capacity` is the slots of a lane's cache, `max_rows` the most tokens of a sequence in one call:
    what counts rows is unrolled for so many.
    """

    dialect: Dialect
    compute: Compute
    capacity: int
    max_rows: int
