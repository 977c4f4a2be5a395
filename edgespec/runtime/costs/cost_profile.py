"""What steps cost on this machine, as it was measured: the values, and cost_profile.json, where
they are kept beside the engines that they belong to.

Knows seconds, the engines' hashes and the device. How they are measured stands in `cost_measure`,
what follows from them in `cost_model`. A profile of other engines or of another device is never
used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from edgespec.artifacts import atomic, json_files
from edgespec.backends import engine_dir as engines
from edgespec.backends.machine import cores
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.registry import backend_of
from edgespec.config.fields import shortened
from edgespec.contract import DECODERS, Role
from edgespec.errors import BundleError, command

FILE = engines.COST_PROFILE
FORMAT = 1
MAX_BYTES = 4 * 2**20
MEASURE_AGAIN = f"Measure again: {command('bench', 'ENGINES', measure_costs=True)}, or build again."
# What a file may say: to the nanosecond, of a day at most, of no more rows than any cache has
MIN_SECONDS, MAX_SECONDS, MAX_COUNT = 1e-9, 86400.0, 2**31
WAITED = 0.1  # of the time without a core, from which a measurement is one of a busy machine
FALLS = 0.8  # more rows that take less than this share of what fewer take are noise
ONCE_MORE = 2  # measurements of a busy machine, one of them at a later start


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of something for each of `batch` sequences, behind `context` tokens each. Raises
    ValueError for figures that no machine has."""

    context: int
    batch: int
    seconds: float
    min_seconds: ClassVar[float] = MIN_SECONDS

    def __post_init__(self) -> None:
        for name in (column.name for column in fields(self)):
            value, is_seconds = getattr(self, name), name == "seconds"
            least, most = (self.min_seconds, MAX_SECONDS) if is_seconds else (0, MAX_COUNT)
            if not is_number(value, least, most) or not (is_seconds or isinstance(value, int)):
                raise ValueError(f"{name} is {shortened(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime(Time):
    """Of a step of the base over `rows` rows: the pass, the accept rule, the commit and the host's
    part, without any draft."""

    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeTime(Time):
    """In which a drafter proposes `levels` levels, of `top_k` nodes each: slots, where it drafts a
    block at once."""

    levels: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveTime(Time):
    """In which a drafter observes `rows` committed tokens, which may cost nothing."""

    rows: int
    min_seconds: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """The costs of one base, and of one drafting method beside it where `method` names one.

    `engines` are the hashes of the engines by role, `device` is what they were measured on.
    `waited` is how long threads of the process were ready and had no core meanwhile, in shares of
    the time that it took, and `attempts` how often it was measured because of that.
    """

    role: Role  # of the base
    base: tuple[PassTime, ...]
    method: str | None = None
    propose: tuple[ProposeTime, ...] = ()
    observe: tuple[ObserveTime, ...] = ()
    engines: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    waited: float = 0.0
    attempts: int = 1

    @classmethod
    def of(cls, raw: dict[str, Any]) -> CostProfile:
        """The profile of `to_dict`. Raises KeyError, TypeError or ValueError for what is none."""
        if raw["role"] not in DECODERS or not isinstance(raw["method"], str | None):
            raise ValueError("it names no role or no method")
        if not isinstance(raw["engines"], dict) or not isinstance(raw["device"], dict):
            raise ValueError("engines and device are no objects")
        times: dict[str, Any] = {
            name: tuple(kind(**time) for time in raw[name]) for name, kind in KINDS.items()
        }
        known = {name: raw[name] for name in ("waited", "attempts") if name in raw}  # of old files
        if not times["base"] or not all(is_number(value, 0, MAX_COUNT) for value in known.values()):
            raise ValueError("base is empty, or waited and attempts are no numbers")
        said = {name: raw[name] for name in ("method", "engines", "device")}
        return cls(role=Role(raw["role"]), **said, **known, **times)

    @property
    def busy(self) -> str | None:
        """Why these costs are not to be relied on, for the user; None where they are. What falls
        twice is how these kernels are."""
        if self.waited > WAITED:
            return (
                f"costs were measured on a busy machine: threads waited {self.waited:.2f} s of"
                " each second for a core"
            )
        return self.falling() if self.attempts < ONCE_MORE else None

    def falling(self) -> str | None:
        """The first step that takes less than one of fewer rows; None where none does."""
        steps = sorted(self.base, key=lambda time: (time.batch, time.context, time.rows))
        for few, more in pairwise(steps):
            alike = (few.batch, few.context) == (more.batch, more.context)
            if alike and more.seconds < FALLS * few.seconds:
                return (
                    f"costs were measured on a busy machine: {more.rows} rows took"
                    f" {more.seconds / few.seconds:.2f} times as long as {few.rows}"
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        """The keys of a profile in cost_profile.json."""
        return {
            "role": self.role.value,
            "method": self.method,
            "engines": dict(self.engines),
            "device": dict(self.device),
            "waited": self.waited,
            "attempts": self.attempts,
            **{name: [asdict(time) for time in getattr(self, name)] for name in KINDS},
        }


KINDS: Mapping[str, type[Any]] = {"base": PassTime, "propose": ProposeTime, "observe": ObserveTime}


# ---- what a profile is bound to


def device_of(engine_dir: Path, role: Role) -> dict[str, Any]:
    """The device and the threads by which costs change, as JSON."""
    # One that a user binds to fewer cores runs on fewer threads
    return {**backend_of(engine_dir, role).device(), "cores": cores()}


def hashes_of(engine_dir: Path, roles: Sequence[Role]) -> dict[str, str]:
    """A hash of all files of each engine, by its role; roles that are not there are left out.
    Raises BundleError."""
    engines = EngineManifest.read(engine_dir).engines
    return {role.value: hash_of(engines[role].files_dict()) for role in roles if role in engines}


def hash_of(files: Mapping[str, Any]) -> str:
    """One hash of several files, by their names and hashes."""
    lines = (f"{name} {entry['sha256']}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def roles_of(profile_role: Role, *, with_draft: bool) -> tuple[Role, ...]:
    """The engines that a profile depends on."""
    return (profile_role, Role.DRAFT) if with_draft else (profile_role,)


# ---- on disk


def write_profile(engine_dir: Path, profile: CostProfile) -> None:
    """Keep a profile in its directory, in the place of those of the same base; profiles of engines
    that are no more go. Raises OutputError; the file is whole or as it was."""
    with atomic.writing(engine_dir / FILE), atomic.locked(engine_dir):
        others = [p for p in current(engine_dir) if p.role is not profile.role]
        write_profiles(engine_dir, [*others, profile])


def drop_stale(engine_dir: Path) -> None:
    """Drop the profiles of engines that are no more, and a damaged file. Raises OutputError."""
    if not (engine_dir / FILE).exists():
        return
    with atomic.writing(engine_dir / FILE), atomic.locked(engine_dir):
        write_profiles(engine_dir, current(engine_dir))


def write_profiles(engine_dir: Path, profiles: Sequence[CostProfile]) -> None:
    """Keep these profiles and no others; no file where there are none. Raises OSError."""
    if not profiles:
        (engine_dir / FILE).unlink(missing_ok=True)
        return
    content = {"format": FORMAT, "profiles": [one.to_dict() for one in profiles]}
    json_files.write_json(engine_dir / FILE, content)


def current(engine_dir: Path) -> list[CostProfile]:
    """The profiles of a directory whose engines are still there; those of a damaged file are
    lost."""
    hashes = hashes_of(engine_dir, DECODERS)
    try:
        profiles = list(read_profiles(engine_dir))
    except BundleError:
        return []
    return [p for p in profiles if p.engines and p.engines.items() <= hashes.items()]


def read_profiles(engine_dir: Path) -> Iterator[CostProfile]:
    """All profiles of a directory; none where there is no file. BundleError for a damaged one."""
    path = engine_dir / FILE
    if not path.exists():
        return
    try:
        if path.stat().st_size > MAX_BYTES or not path.is_file():
            raise ValueError("it is no file of a plausible size")
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or not isinstance(content["profiles"], list):
            raise ValueError(f"its format is not {FORMAT}")
        yield from [CostProfile.of(raw) for raw in content["profiles"]]
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        message = f"{path} is no cost profile: {error!s:.200}"
        raise BundleError(message, MEASURE_AGAIN) from None


def is_number(value: object, least: float, most: float) -> bool:
    """Whether a value is a number from `least` to `most`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """The profile that fits; else None, and in `why` the reason, for the user. `stale`: there is
    one, and it does not fit."""

    profile: CostProfile | None
    why: str | None = None
    stale: bool = True


def find_profile(
    engine_dir: Path, role: Role, method: str | None, *, has_engine: bool
) -> StoredProfile:
    """The profile of a base and of what drafts beside it: of `method` itself, or for one that
    `has_engine` False the base's alone. One of other engines or of another device does not fit."""
    try:
        profiles = [profile for profile in read_profiles(engine_dir) if profile.role is role]
        own = [profile for profile in profiles if profile.method == method]
        matches = own or ([] if has_engine else profiles)
        if not matches:
            return StoredProfile(None, "what a step costs here was not measured", stale=False)
        hashes = hashes_of(engine_dir, roles_of(role, with_draft=has_engine))
        if any(matches[0].engines.get(name) != value for name, value in hashes.items()):
            return StoredProfile(
                None, "the engines were built again after their costs were measured"
            )
        if (here := device_of(engine_dir, role)) != dict(matches[0].device):
            return StoredProfile(
                None, f"the costs were measured on {differing(matches[0].device, here)}"
            )
    except BundleError as error:
        return StoredProfile(None, error.what)
    return StoredProfile(matches[0])


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which way a device is another one."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    name = names[0] if names else "device"
    return f"another device ({name} {before.get(name)!s:.60}, here {now.get(name)!s:.60})"
