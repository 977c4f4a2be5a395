"""What the config.json of an export says of its quantized weights, as one frozen value.

Knows the keys on disk, and writes what it reads. Knows no checkpoint and no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from edgespec.safe_read.fields import BundleFields


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeUse:
    """The Linears of one scheme in a graph; `blocks` are the block sizes that occur.

    `activations` is what becomes of them, `activations_in_graph` whether the graph itself rounds
    them or leaves it to the backend.
    """

    linears: int
    blocks: tuple[int, ...]
    activations: str
    activations_in_graph: bool

    @classmethod
    def read(cls, fields: BundleFields) -> Self:
        """From an entry of `schemes`. BundleError names a wrong key."""
        return cls(
            linears=fields.size("linears"),
            blocks=fields.counts("blocks"),
            activations=fields.required_text("activations"),
            activations_in_graph=fields.required_flag("activations_in_graph"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of an entry of `schemes`."""
        return {
            "linears": self.linears,
            "blocks": list(self.blocks),
            "activations": self.activations,
            "activations_in_graph": self.activations_in_graph,
        }


Schemes = Mapping[str, SchemeUse]


def read_schemes(fields: BundleFields) -> dict[str, SchemeUse]:
    """The uses of schemes by name. BundleError names a wrong key."""
    return {name: SchemeUse.read(fields.section(name)) for name in fields.raw}


def schemes_dict(schemes: Schemes) -> dict[str, Any]:
    """The keys of `schemes`."""
    return {name: use.to_dict() for name, use in schemes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """The scales of a quantized KV cache, (keys, values) per layer. They are recorded, and not
    applied."""

    type: str
    scales: tuple[tuple[float, float], ...]

    @classmethod
    def read(cls, fields: BundleFields) -> Self:
        """From the keys of `kv_cache`. BundleError names a wrong key."""
        pairs = fields.get("scales")
        if not isinstance(pairs, list) or not all(map(is_pair, pairs)):
            raise fields.wrong("scales", "a list of pairs of numbers")
        return cls(type=fields.required_text("type"), scales=tuple((k, v) for k, v in pairs))

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
class GraphQuantization:
    """The quantized weights of a graph.

    `layout` is that of the checkpoint, None where only a shared lm_head is quantized. `lm_head` is
    its scheme, None where it is not quantized. `unquantized` are the Linears in float, on disk
    "unquantised". `golden` says how the golden outputs were computed.
    """

    layout: str | None
    schemes: Schemes
    lm_head: str | None
    unquantized: tuple[str, ...]
    kv_cache: CacheScales | None
    golden: str

    @classmethod
    def read(cls, fields: BundleFields) -> Self:
        """From the `quantization` of config.json. BundleError names a wrong key."""
        cache = fields.optional_section("kv_cache")
        return cls(
            layout=fields.text("layout"),
            schemes=read_schemes(fields.section("schemes")),
            lm_head=fields.text("lm_head"),
            unquantized=fields.texts("unquantised"),
            kv_cache=CacheScales.read(cache) if cache.raw else None,
            golden=fields.required_text("golden"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `quantization` of config.json."""
        return {
            "layout": self.layout,
            "schemes": schemes_dict(self.schemes),
            "lm_head": self.lm_head,
            "unquantised": list(self.unquantized),
            "kv_cache": self.kv_cache.to_dict() if self.kv_cache else None,
            "golden": self.golden,
        }
