"""What an engine of TensorRT was built as, in its config.json: what a runner must know of it.

Knows the keys on disk, and writes what it reads. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from edgespec.backends.engine_config import EngineFields
from edgespec.backends.tensorrt.profiles import Profile
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
            "profiles": [
                {
                    "name": profile.name,
                    "shapes": {
                        name: [list(dims) for dims in shapes]
                        for name, shapes in profile.shapes.items()
                    },
                }
                for profile in self.profiles
            ],
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
    rows = fields.get("profiles")
    wanted = "a list of profiles, each with three shapes an input"
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise fields.wrong("profiles", wanted)
    profiles = []
    for row in rows:
        name, shapes = row.get("name"), row.get("shapes")
        if not isinstance(name, str) or not isinstance(shapes, dict):
            raise fields.wrong("profiles", wanted)
        if not all(is_range(dims, ranks.get(key)) for key, dims in shapes.items()):
            raise fields.wrong("profiles", wanted)
        profiles.append(Profile(name, {key: ranges(dims) for key, dims in shapes.items()}))
    return tuple(profiles)


def is_range(value: object, rank: int | None) -> bool:
    """Whether a JSON value is three shapes of that rank, none smaller than the one before."""
    if rank is None or not isinstance(value, list) or len(value) != 3:
        return False
    if not all(isinstance(dims, list) and len(dims) == rank for dims in value):
        return False
    sizes = [size for dims in value for size in dims]
    if not all(type(size) is int and 1 <= size < 2**31 for size in sizes):
        return False
    return all(least <= often <= most for least, often, most in zip(*value, strict=True))


def ranges(
    value: list[list[int]],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Three shapes of such a value."""
    least, often, most = map(tuple, value)
    return least, often, most
