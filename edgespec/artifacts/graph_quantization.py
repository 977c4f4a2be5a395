"""What the config.json of an export says of its quantized weights, as one frozen value.

Knows the keys on disk, and writes what it reads. Knows no checkpoint and no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeUse(Record):
    """The Linears of one scheme in a graph; `blocks` are the block sizes that occur.

    `activations` is what becomes of them, `activations_in_graph` whether the graph itself rounds
    them or leaves it to the backend.
    """

    linears: int
    blocks: tuple[int, ...]
    activations: str
    activations_in_graph: bool


Schemes = Mapping[str, SchemeUse]


def read_schemes(fields: BundleFields) -> dict[str, SchemeUse]:
    """The uses of schemes by name. BundleError names a wrong key."""
    return {name: SchemeUse.read(fields.section(name)) for name in fields.raw}


def schemes_dict(schemes: Schemes) -> dict[str, Any]:
    """The keys of `schemes`."""
    return {name: use.to_dict() for name, use in schemes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales(Record):
    """The scales of a quantized KV cache, (keys, values) per layer. They are recorded, and not
    applied."""

    type: str
    scales: tuple[tuple[float, float], ...]

    @classmethod
    def read(cls, keys: BundleFields) -> Self:
        """From the keys of `kv_cache`. BundleError names a wrong key."""
        pairs = keys.get("scales")
        if not isinstance(pairs, list) or not all(map(is_pair, pairs)):
            raise keys.wrong("scales", "a list of pairs of numbers")
        return cls(type=keys.required_text("type"), scales=tuple((k, v) for k, v in pairs))

    def to_dict(self) -> dict[str, Any]:
        """The keys of `kv_cache`."""
        return {
            "type": self.type,
            "scales": [list(pair) for pair in self.scales],
            "in_graph": False,
        }


def is_pair(value: object) -> bool:
    """Whether a JSON value is a list of two numbers."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphQuantization(Record):
    """The quantized weights of a graph.

    `layout` is that of the checkpoint, None where only a shared lm_head is quantized. `lm_head` is
    its scheme, None where it is not quantized. `unquantized` are the Linears in float, on disk
    "unquantised". `golden` says how the golden outputs were computed.
    """

    KEYS: ClassVar = {"unquantized": "unquantised"}

    layout: str | None
    schemes: Schemes
    lm_head: str | None
    unquantized: tuple[str, ...]
    kv_cache: CacheScales | None
    golden: str
