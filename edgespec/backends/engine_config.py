"""The config.json of a built engine as one frozen value: its component, its limits, its weights.

Knows the keys on disk, which are TensorRT Edge-LLM's where it has them, and writes what it reads.
Knows no engine library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, cast

from edgespec.artifacts import json_files
from edgespec.artifacts.component import ComponentConfig
from edgespec.config.fields import is_int
from edgespec.contract import MAX_BATCH_SIZE, Limits, Role
from edgespec.quantization.schemes import SCHEMES
from edgespec.safe_read.fields import BundleFields
from edgespec.vision.component import VisionComponentConfig

FLOAT32: Final = "fp32"
BUILT_SCHEMES = ("int8", "int4")  # of weights that `build` rounds
RTN, LEAST_SQUARES, GPTQ = "rtn", "least squares", "gptq"  # how
HOW = {
    RTN: "rounded to nearest",
    LEAST_SQUARES: "with minimums, rounded by least squares",
    GPTQ: "with minimums, rounded by GPTQ on a text",
}
AS_EXPORTED = "as exported"
BUILD_AGAIN = "Build the engine again."
SETTINGS = "backend_config"
SMALLER, VARIANTS = "smaller_kv_cache_capacities", "smaller_backend_configs"
MAX_CAPACITY = 2**31 - 1  # tokens of a KV cache
NO_DRAFTS = 1  # nodes that an engine verifies which was not built for drafts
Value = TypeVar("Value")


class EngineFields(BundleFields):
    """A JSON object that `edgespec build` wrote."""

    remedy: ClassVar[str] = BUILD_AGAIN

    def optional(self, key: str, read: Callable[[str], Value]) -> Value | None:
        """What `read` makes of a key; None where it is missing or null."""
        return None if self.get(key) is None else read(key)

    def limit(self, key: str, most: int) -> int:
        """A size from 1 to `most` that a user asked for. BundleError for another value."""
        value = self.optional_limit(key, most)
        if value is None:
            raise self.missing(key)
        return value

    def optional_limit(self, key: str, most: int) -> int | None:
        """A size from 1 to `most`, or None where the key is missing or null. BundleError
        otherwise."""
        value = self.get(key)
        if value is None:
            return None
        if not is_int(value) or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return cast(int, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEmbedding:
    """Where the quantized values of a tied lm_head stand in an engine's data file, which serve as
    the embedding too. Offsets in bytes; `rows` tokens; `block` weights share a scale.
    `scales_offset` None: the scales stand among the values, as the engine's kernel packs them;
    `form` is what the backend says of these besides.
    """

    bits: int
    block: int
    rows: int
    offset: int
    scales_offset: int | None = None
    form: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, fields: EngineFields) -> SharedEmbedding:
        """The shared embedding of the keys of `weights.embedding`. BundleError names a wrong
        key."""
        return cls(
            bits=fields.size("bits"),
            block=fields.size("block"),
            rows=fields.size("rows"),
            offset=fields.offset("offset"),
            scales_offset=fields.optional("scales_offset", fields.offset),
            form=fields.optional("form", lambda key: fields.section(key).raw),
        )


HEAD_FILE = re.compile(r"lm_head\.[0-9a-f]{16}\.data")


def head_file(sha256: str) -> str:
    """The name of a file with an lm_head alone: engines that have the same one have one file."""
    return f"lm_head.{sha256[:16]}.data"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestWeight:
    """The lm_head of an engine, or the largest of its weights, as its kernel reads it: the
    initializer, and where its bytes stand in the data file. Two engines of a pair with the same one
    need it in memory once. An lm_head has a `file` of its own, which such engines have in common;
    None: it stands among the others.
    """

    name: str
    offset: int
    shape: tuple[int, ...]  # bytes
    sha256: str
    file: str | None = None

    @classmethod
    def read(cls, fields: BundleFields) -> LargestWeight:
        """The largest weight of the keys of `weights.largest`. BundleError names a wrong key."""
        sha256, file = fields.required_text("sha256"), fields.text("file")
        if file is not None and file != head_file(sha256):
            raise fields.wrong("file", f"{head_file(sha256)!r}, by its hash")
        return cls(
            name=fields.required_text("name"),
            offset=fields.offset("offset"),
            shape=fields.counts("shape"),
            sha256=sha256,
            file=file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """What the weights of an engine's matrix products are.

    `scheme` is a name of SCHEMES, "fp32", "int8" or "int4"; `method` how they were rounded. `block`
    weights share a scale; None: not in blocks, or in several sizes. `compute` is the type in which
    products are computed where it is not that of the scheme. `emulated` says so in words. `exact`:
    a row has the same bits in every call of at least two rows. `rounding` is the measured margin,
    in nats, within which calls of one row and of many may choose another token; None: float32, 0:
    `build` has proven that a row has the same bits in every call. `bits` is what a weight takes
    with its scales where weights differ in it, and `mix` says which weights got how many.
    """

    scheme: str
    block: int | None = None
    method: str
    compute: str | None = None
    emulated: str | None = None
    exact: bool
    embedding: SharedEmbedding | None = None
    largest: LargestWeight | None = None
    rounding: float | None = None
    bits: float | None = None
    mix: str | None = None

    @classmethod
    def read(cls, fields: EngineFields) -> EngineWeights:
        """The weights of the keys of `weights` in config.json. BundleError names a wrong key."""
        scheme, rounding = fields.required_text("scheme"), fields.get("rounding")
        known = {FLOAT32, *BUILT_SCHEMES, *SCHEMES}
        if not known.issuperset(scheme.split(", ")):  # an export may have several
            raise fields.wrong("scheme", "a scheme that this version knows")
        block = fields.optional("block", fields.count)
        return cls(
            scheme=scheme,
            method=fields.required_text("method"),
            exact=fields.flag("exact", exact_by_default(scheme, block)),
            block=block,
            compute=fields.text("compute"),
            emulated=fields.text("emulated"),
            rounding=rounding
            if rounding is None or is_zero(rounding)
            else fields.number("rounding"),
            embedding=fields.optional(
                "embedding", lambda key: SharedEmbedding.read(fields.section(key))
            ),
            largest=fields.optional("largest", lambda key: LargestWeight.read(fields.section(key))),
            bits=fields.optional("bits", fields.number),
            mix=fields.text("mix"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of `weights` in config.json, without those that have no value."""
        keys = asdict(self, dict_factory=without_none)
        if self.exact is exact_by_default(self.scheme, self.block):
            del keys["exact"]
        return keys

    @property
    def is_low_bit(self) -> bool:
        """Whether kernels read quantized values; others multiply dequantized ones in float32."""
        return self.scheme != FLOAT32 and "float32" not in (self.compute or "")

    @property
    def is_bitwise(self) -> bool:
        """Whether a row has the same bits in every call: alone, in a tree, in a batch."""
        return self.rounding == 0

    @property
    def is_quantized(self) -> bool:
        """Whether outputs differ from the exported graph's by more than the order of sums."""
        return self.rounding is not None and self.scheme != FLOAT32

    @property
    def products_text(self) -> str:
        """The scheme, block size and method of the weights, in one sentence."""
        assert self.scheme != FLOAT32
        block = "" if self.block is None else f" in blocks of {self.block}"
        method = HOW.get(self.method, self.method)
        mix = "" if self.mix is None else f", {self.mix}"
        return f"the weights of its matrix products are {self.scheme}{block}, {method}{mix}"

    @property
    def rounded_by(self) -> str:
        """What makes kernels for one row and for many round differently."""
        return self.scheme if self.scheme != FLOAT32 else "recurrent layers"

    @property
    def why_not_exact(self) -> str | None:
        """Why a row may have other bits beside others than alone; None where it has the same."""
        if self.emulated:
            return f"its {self.scheme} is {self.emulated}"
        if self.exact:
            return None
        block = "" if self.block is None else f" in blocks of {self.block}"
        return f"its weights are {self.scheme}{block}"


def without_none(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The keys that have a value, for `asdict`."""
    return {key: value for key, value in items if value is not None}


def is_zero(value: object) -> bool:
    """Whether a value of JSON is the number 0."""
    return value == 0 and isinstance(value, int | float) and not isinstance(value, bool)


def exact_by_default(scheme: str, block: int | None) -> bool:
    """The `exact` of weights that do not say: that of ONNX Runtime's kernels, whose engines leave
    it out where they have been exact from the first version on."""
    return scheme == FLOAT32 or (scheme, block) == ("int4", 32)


FP32_WEIGHTS = EngineWeights(scheme=FLOAT32, method=AS_EXPORTED, exact=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine was built for, in sequences, tokens and nodes of a tree (the root included).

    A base and a plain engine verify trees, a draft makes them; the size that a role does not have
    is None. With `smaller_kv_cache_capacities` there is an engine for each of them too.
    """

    max_batch_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_verify_tree_size: int | None = None
    max_draft_tree_size: int | None = None
    smaller_kv_cache_capacities: tuple[int, ...] = ()

    @classmethod
    def of(cls, limits: Limits, role: Role) -> EngineLimits:
        """The limits that apply to the role, out of those that the flags give."""
        draft = role is Role.DRAFT
        return cls(
            max_batch_size=limits.max_batch_size,
            max_input_len=limits.max_input_len,
            max_kv_cache_capacity=limits.max_kv_cache_capacity,
            max_verify_tree_size=None if draft else limits.max_verify_tree_size,
            max_draft_tree_size=limits.max_draft_tree_size if draft else None,
            smaller_kv_cache_capacities=limits.smaller_kv_cache_capacities,
        )

    @classmethod
    def read(cls, fields: EngineFields) -> EngineLimits:
        """The limits of the keys of `builder_config`. BundleError names a wrong key."""
        capacity = fields.limit("max_kv_cache_capacity", MAX_CAPACITY)
        largest_tree = max(capacity, Limits().max_verify_tree_size)  # as `build` allows
        return cls(
            max_batch_size=fields.limit("max_batch_size", MAX_BATCH_SIZE),
            max_input_len=fields.limit("max_input_len", capacity),
            max_kv_cache_capacity=capacity,
            max_verify_tree_size=fields.optional_limit("max_verify_tree_size", largest_tree),
            max_draft_tree_size=fields.optional_limit("max_draft_tree_size", largest_tree),
            smaller_kv_cache_capacities=read_smaller(fields, capacity),
        )

    @property
    def verify_tree_size(self) -> int:
        """Nodes that a pass verifies; 1 for an engine that was built without the limit."""
        return self.max_verify_tree_size or NO_DRAFTS

    @property
    def capacities(self) -> tuple[int, ...]:
        """The capacities of all engines, the largest last."""
        return (*self.smaller_kv_cache_capacities, self.max_kv_cache_capacity)

    def at(self, capacity: int) -> EngineLimits:
        """Those of the engine of one capacity."""
        return replace(
            self,
            max_kv_cache_capacity=capacity,
            max_input_len=min(self.max_input_len, capacity),
            smaller_kv_cache_capacities=(),
        )

    def to_dict(self, role: Role) -> dict[str, Any]:
        """The keys of `builder_config`, TensorRT Edge-LLM's two flags among them."""
        keys = asdict(self, dict_factory=without_none)
        smaller = list(keys.pop(SMALLER))
        keys |= {SMALLER: smaller} if smaller else {}
        return keys | {"spec_base": role is Role.BASE, "spec_draft": role is Role.DRAFT}


def read_smaller(fields: EngineFields, largest: int) -> tuple[int, ...]:
    """The capacities of smaller engines, of which most directories have none. BundleError unless
    they ascend, to below the largest one."""
    value = fields.get(SMALLER)
    if value is None:
        return ()
    known = isinstance(value, list) and all(is_int(item) for item in value)
    if not known or any(a >= b for a, b in pairwise([0, *value, largest])):
        raise fields.wrong(SMALLER, f"ascending whole numbers from 1 to {largest - 1}")
    return tuple(value)


class OwnLimits(Protocol):
    """What an engine was built for, as its role has it."""

    def to_dict(self, role: Role) -> dict[str, Any]:
        """The keys of `builder_config`."""


AnyComponent = TypeVar("AnyComponent", ComponentConfig, VisionComponentConfig)
AnyLimits = TypeVar("AnyLimits", bound=OwnLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltConfig(Generic[AnyComponent, AnyLimits]):
    """A built engine: what was exported, what it was built for, and what its weights became.

    `settings` is the backend's own, as JSON that it checks when it reads it; empty: it has none.
    """

    component: AnyComponent
    limits: AnyLimits
    weights: EngineWeights
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The config in an engine's config.json. BundleError names a wrong key."""
        return cls.from_dict(json_files.read_json(path), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> Self:
        """The config of the keys of config.json. BundleError names a wrong key of the file
        `source`."""
        raise NotImplementedError

    @property
    def role(self) -> Role:
        """The role of the engine's component."""
        return self.component.role

    def to_dict(self) -> dict[str, Any]:
        """The keys of an engine's config.json, in the order in which they are written."""
        keys = self.component.to_dict() | {
            "builder_config": self.limits.to_dict(self.role),
            "weights": self.weights.to_dict(),
        }
        return keys | ({SETTINGS: dict(self.settings)} if self.settings else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(BuiltConfig[ComponentConfig, EngineLimits]):
    """The engine of a decoder. `variants` are the settings of the engines of smaller capacities, by
    capacity. `variant` is the capacity of the engine that this is the config of, where it is such a
    smaller one."""

    variants: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    variant: int | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> Self:
        """The config of the keys of config.json. BundleError names a wrong key of the file
        `source`."""
        fields = EngineFields(raw, source)
        limits = EngineLimits.read(fields.section("builder_config"))
        return cls(
            component=ComponentConfig.from_fields(fields),
            limits=limits,
            weights=read_weights(fields),
            settings=fields.optional_section(SETTINGS).raw,
            variants=read_variants(fields, limits),
        )

    def at(self, capacity: int) -> EngineConfig:
        """That of the engine of one capacity alone."""
        limits = self.limits.at(capacity)
        if capacity == self.limits.max_kv_cache_capacity:
            return replace(self, limits=limits, variants={})
        settings = self.variants[capacity]
        return replace(self, limits=limits, settings=settings, variants={}, variant=capacity)

    @property
    def why_not_exact(self) -> str | None:
        """What keeps chains from being the same bits in every pass; None where nothing does."""
        if self.weights.is_bitwise:
            return None
        if self.limits.max_batch_size > 1:
            return f"it was built for {self.limits.max_batch_size} sequences"
        if self.component.graph.recurrent:
            return "its recurrent layers take in what was accepted at once"
        return self.weights.why_not_exact

    def rounding(self, unrounded: float) -> float:
        """How far apart, in nats, two candidates may be where kernels for one row and for many
        choose differently; `unrounded` for engines that were not measured."""
        return unrounded if self.weights.rounding is None else self.weights.rounding

    def to_dict(self) -> dict[str, Any]:
        """The keys of an engine's config.json, in the order in which they are written."""
        keys = BuiltConfig.to_dict(self)  # a class with slots is another than `super` knows
        variants = {str(capacity): dict(row) for capacity, row in self.variants.items()}
        return keys | ({VARIANTS: variants} if variants else {})


def read_variants(fields: EngineFields, limits: EngineLimits) -> Mapping[int, Mapping[str, Any]]:
    """The settings of the engines of smaller capacities. BundleError unless each has its own."""
    variants = fields.optional_section(VARIANTS)
    capacities = limits.smaller_kv_cache_capacities
    if set(variants.raw) != set(map(str, capacities)):
        named = ", ".join(map(str, capacities)) or "nothing"
        raise fields.wrong(VARIANTS, f"an object for each smaller capacity ({named})")
    return {capacity: variants.section(str(capacity)).raw for capacity in capacities}


def read_weights(fields: EngineFields) -> EngineWeights:
    """The `weights` of a config.json or of a manifest; engines of the first version, which had
    none, have float32 weights."""
    if fields.get("weights") is None:
        return FP32_WEIGHTS
    return EngineWeights.read(fields.section("weights"))
