"""What an engine of TensorRT was built as, in its config.json: what a runner must know of it.

Knows the keys on disk, and writes what it reads. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from edgespec.backends.engine_config import EngineFields
from edgespec.backends.tensorrt.profiles import Profile, Shapes
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The form of an engine. `capacity` are the slots of a lane's cache, more than its tokens;
    `sm` is the compute capability (times ten) that it is for."""

    library: str
    version: str
    sm: int
    dialect: Dialect
    compute: Compute
    capacity: int
    max_rows: int
    decomposed_attention: bool
    profiles: tuple[Profile, ...]

    @property
    def target(self) -> Target:
        """What its graph was lowered for."""
        return Target(
            dialect=self.dialect,
            compute=self.compute,
            capacity=self.capacity,
            max_rows=self.max_rows,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of `backend_config`."""
        return {
            "library": self.library,
            "version": self.version,
            "compute_capability": self.sm,
            "dialect": self.dialect.value,
            "compute": self.compute,
            "cache_slots": self.capacity,
            "max_rows": self.max_rows,
            "decomposed_attention": self.decomposed_attention,
            "profiles": [asdict(profile) for profile in self.profiles],
        }

    @classmethod
    def read(cls, raw: Mapping[str, Any], contract: Contract, source: str) -> EngineSettings:
        """The settings of the keys of `backend_config`. `contract` is the canonical one, whose
        names profiles have. BundleError names a wrong key of the file `source`."""
        fields = EngineFields(raw, f"{source} (backend_config)")
        dialect, compute = fields.required_text("dialect"), fields.required_text("compute")
        if dialect not in tuple(Dialect):
            raise fields.wrong("dialect", f"one of {', '.join(Dialect)}")
        if compute not in get_args(Compute):
            raise fields.wrong("compute", f"one of {', '.join(get_args(Compute))}")
        return cls(
            library=fields.required_text("library"),
            version=fields.required_text("version"),
            sm=fields.size("compute_capability"),
            dialect=Dialect(dialect),
            compute=cast(Compute, compute),
            capacity=fields.size("cache_slots"),
            max_rows=fields.size("max_rows"),
            decomposed_attention=fields.required_flag("decomposed_attention"),
            profiles=read_profiles(fields, contract),
        )


def read_profiles(fields: EngineFields, contract: Contract) -> tuple[Profile, ...]:
    """The profiles of the key `profiles`. BundleError where they are not of the contract's
    inputs."""
    ranks = {spec.name: len(spec.shape) for spec in contract.inputs}
    try:
        rows = [Profile.of(row["name"], row["shapes"]) for row in cast(Any, fields.get("profiles"))]
    except (TypeError, KeyError, AttributeError):
        rows = []
    shapes = [(ranks.get(name), dims) for row in rows for name, dims in row.shapes.items()]
    known = all(isinstance(row.name, str) for row in rows)
    if not rows or not known or not all(is_range(rank, dims) for rank, dims in shapes):
        raise fields.wrong("profiles", "a list of profiles, each with three shapes an input")
    return tuple(rows)


def is_range(rank: int | None, shapes: Shapes) -> bool:
    """Whether these are three shapes of that rank, none smaller than the one before."""
    if [len(dims) for dims in shapes] != [rank] * 3:
        return False
    if not all(type(size) is int for dims in shapes for size in dims):
        return False
    columns = zip(*shapes, strict=True)
    return all(1 <= least <= often <= most < 2**31 for least, often, most in columns)
