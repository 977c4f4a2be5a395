"""The config.json of a built engine as one frozen value: its component, its limits, its weights.

Knows the keys on disk, which are TensorRT Edge-LLM's where it has them, and writes what it reads.
Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.component import BundleFields, ComponentConfig
from edgespec.contract import Limits, Role

NO_DRAFTS = 1  # nodes that an engine verifies which was not built for drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEmbedding:
    """Where the quantized values of a tied lm_head stand in an engine's data file, which serve as
    the embedding too. Offsets in bytes; `rows` tokens; `block` weights share a scale.
    """

    bits: int
    block: int
    rows: int
    offset: int
    scales_offset: int

    @classmethod
    def read(cls, fields: BundleFields) -> SharedEmbedding:
        """From `weights.embedding`; BundleError names the key that is wrong."""
        return cls(
            bits=fields.size("bits"),
            block=fields.size("block"),
            rows=fields.size("rows"),
            offset=fields.count("offset"),
            scales_offset=fields.count("scales_offset"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """What the weights of an engine's matrix products are.

    `scheme` is a name of SCHEMES, "fp32", "int8" or "int4"; `method` how they were rounded. `block`
    weights share a scale; None: not in blocks, or in several sizes. `compute` is the type in which
    products are computed where it is not that of the scheme. `emulated` says so in words. `exact`:
    a row has the same bits in every call of at least two rows. `rounding` is the measured margin,
    in nats, within which calls of one row and of many may choose another token; None: float32.
    """

    scheme: str = "fp32"
    method: str = "as exported"
    block: int | None = None
    compute: str | None = None
    emulated: str | None = None
    exact: bool = False
    rounding: float | None = None
    embedding: SharedEmbedding | None = None

    @classmethod
    def read(cls, fields: BundleFields) -> EngineWeights:
        """From the `weights` of config.json; an engine without the key has float32 weights."""
        embedding = fields.get("embedding")
        rounding = fields.get("rounding")
        return cls(
            scheme=fields.required_text("scheme"),
            method=fields.required_text("method"),
            block=None if fields.get("block") is None else fields.count("block"),
            compute=fields.text("compute"),
            emulated=fields.text("emulated"),
            exact=fields.flag("exact", False),
            rounding=None if rounding is None else fields.number("rounding"),
            embedding=None
            if embedding is None
            else SharedEmbedding.read(fields.section("embedding")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json: those that say something."""
        keys = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine was built for, in sequences, tokens and nodes of a tree (the root included).

    A base and a plain engine verify trees, a draft makes them; the size that a role does not have
    is None.
    """

    max_batch_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_verify_tree_size: int | None = None
    max_draft_tree_size: int | None = None

    @classmethod
    def of(cls, limits: Limits, role: Role) -> EngineLimits:
        """Those of the flags that the role has."""
        draft = role is Role.DRAFT
        return cls(
            max_batch_size=limits.max_batch_size,
            max_input_len=limits.max_input_len,
            max_kv_cache_capacity=limits.max_kv_cache_capacity,
            max_verify_tree_size=None if draft else limits.max_verify_tree_size,
            max_draft_tree_size=limits.max_draft_tree_size if draft else None,
        )

    @classmethod
    def read(cls, fields: BundleFields) -> EngineLimits:
        """From `builder_config`; BundleError names the key that is wrong."""
        return cls(
            max_batch_size=fields.size("max_batch_size"),
            max_input_len=fields.size("max_input_len"),
            max_kv_cache_capacity=fields.size("max_kv_cache_capacity"),
            max_verify_tree_size=fields.optional_size("max_verify_tree_size"),
            max_draft_tree_size=fields.optional_size("max_draft_tree_size"),
        )

    @property
    def verify_tree_size(self) -> int:
        """Nodes that a pass verifies; 1 for an engine that was built without the limit."""
        return self.max_verify_tree_size or NO_DRAFTS

    def to_dict(self, role: Role) -> dict[str, Any]:
        """The keys of `builder_config`, TensorRT Edge-LLM's two flags among them."""
        keys = {name: value for name, value in asdict(self).items() if value is not None}
        return keys | {"spec_base": role is Role.BASE, "spec_draft": role is Role.DRAFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A built engine: what was exported, what it was built for, and what its weights became."""

    component: ComponentConfig
    limits: EngineLimits
    weights: EngineWeights

    @classmethod
    def read(cls, path: Path) -> EngineConfig:
        """From an engine's config.json; BundleError where it is none, naming the key."""
        return cls.from_dict(bundle.read_json(path), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> EngineConfig:
        """From the keys of an engine's config.json; `source` names the file in errors."""
        fields = BundleFields(raw, source)
        weights = fields.get("weights")
        return cls(
            component=ComponentConfig.from_dict(raw, source),
            limits=EngineLimits.read(fields.section("builder_config")),
            weights=EngineWeights()
            if weights is None
            else EngineWeights.read(fields.section("weights")),
        )

    @property
    def role(self) -> Role:
        return self.component.role

    def to_dict(self) -> dict[str, Any]:
        """The keys of an engine's config.json, in the order in which they are written."""
        return self.component.to_dict() | {
            "builder_config": self.limits.to_dict(self.role),
            "weights": self.weights.to_dict(),
        }
