"""What an engine of TensorRT was built as, in its config.json: what a runner must know of it.

Knows the keys on disk, and writes what it reads. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from edgespec.backends.engine_config import EngineFields
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import Contract

# Names on disk, where they are others than here
KEYS = {"sm": "compute_capability", "capacity": "cache_slots"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Target):
    """What an engine's graph was lowered for, and its form. `capacity` are the slots of a lane's
    cache, more than its tokens; `sm` is the compute capability (times ten) that it is for."""

    library: str
    version: str
    sm: int
    decomposed_attention: bool
    profiles: tuple[Profile, ...]

    def to_dict(self) -> dict[str, Any]:
        """The keys of `backend_config`."""
        return {KEYS.get(name, name): value for name, value in asdict(self).items()}

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
    try:
        profiles = tuple(Profile.of(row["name"], row["shapes"]) for row in rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise fields.wrong("profiles", wanted) from error
    if not profiles or not all(fits(profile, ranks) for profile in profiles):
        raise fields.wrong("profiles", wanted)
    return profiles


def fits(profile: Profile, ranks: Mapping[str, int]) -> bool:
    """Whether a profile is of inputs of these ranks, with no shape smaller than the one before."""
    if not isinstance(profile.name, str) or not profile.shapes.keys() <= ranks.keys():
        return False
    return all(
        all(len(dims) == ranks[name] for dims in shapes)
        and all(type(size) is int for dims in shapes for size in dims)
        and all(1 <= a <= b <= c < 2**31 for a, b, c in zip(*shapes, strict=True))
        for name, shapes in profile.shapes.items()
    )
