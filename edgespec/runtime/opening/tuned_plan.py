"""The plan that `edgespec tune` found best for a directory's engines: the value, and tuned.json,
where it is kept beside them.

Knows plans, hashes and the device. How it was found is not known here. One that was found for other
engines or on another device is never used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, json_files
from edgespec.backends import engine_dir as engines
from edgespec.contract import DECODERS, Role
from edgespec.errors import BundleError, EdgeSpecError, command
from edgespec.runtime.costs.cost_profile import (
    device_of,
    differing,
    hashes_of,
    is_number,
    roles_of,
)
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.trees.static_tree import MAX_DEPTH, StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan

FILE = engines.TUNED
FORMAT = 1
MAX_BYTES = 2**20
TUNE_AGAIN = f"Tune again: {command('tune', 'ENGINES', prompts='FILE')}; or remove the file."
SIZES = ("top_k", "steps", "verify_size")
MAX_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPlan:
    """What drafts best here: `method` with `options` by `plan`; both None where drafts do not pay.

    `acceptance` [depth][rank] is how often a draft of that rank was accepted where its parent was,
    `prior` [depth] the same of any draft of the plan. `over_plain` is the speed that was measured,
    plain decoding being 1. `engines` are the hashes of the engines by role, `device` is what they
    ran on, `words` how the plan is shown.
    """

    role: Role
    method: str | None
    plan: DraftPlan | None
    options: Mapping[str, Any] = field(default_factory=dict)
    over_plain: float | None = None
    acceptance: tuple[tuple[float, ...], ...] = ()
    prior: tuple[float, ...] = ()
    words: str = ""
    engines: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The keys of tuned.json."""
        return {
            "format": FORMAT,
            "role": self.role.value,
            "method": self.method,
            "options": dict(self.options),
            "plan": None if self.plan is None else plan_to_dict(self.plan),
            "over_plain": self.over_plain,
            "acceptance": [[*rates] for rates in self.acceptance],
            "prior": [*self.prior],
            "words": self.words,
            "engines": dict(self.engines),
            "device": dict(self.device),
        }

    @property
    def line(self) -> str:
        """What `infer` says of it."""
        speed = "" if self.over_plain is None else f", {self.over_plain:.2f} x plain when measured"
        return f"tuned plan: {self.words}{speed}"


def plan_to_dict(plan: DraftPlan) -> dict[str, Any]:
    """A plan as JSON; `plan_of_dict` reads it."""
    content: dict[str, Any] = {name: getattr(plan, name) for name in SIZES}
    content["adaptive"] = plan.adaptive
    if isinstance(plan, StaticPlan):
        content["choices"] = [[*path] for path in plan.choices]
    if isinstance(plan, BlockPlan):
        content["first_slot"] = plan.first_slot
    return content


def plan_of_dict(raw: object) -> DraftPlan:
    """The plan of `plan_to_dict`. Raises ValueError for what is none, OptionError for choices that
    are no tree."""
    if not isinstance(raw, dict) or not isinstance(adaptive := raw["adaptive"], bool):
        raise ValueError("plan has no sizes")
    sizes = top_k, steps, verify_size = tuple(raw[name] for name in SIZES)
    if not all(isinstance(size, int) and is_number(size, 1, MAX_SIZE) for size in sizes):
        raise ValueError(f"{', '.join(SIZES)} are no sizes of a plan")
    if "choices" in raw:
        return replace(StaticPlan.of(raw["choices"]), adaptive=adaptive)
    if "first_slot" in raw:
        if raw["first_slot"] not in (0, 1):
            raise ValueError("first_slot is neither 0 nor 1")
        return BlockPlan(top_k, steps, verify_size, raw["first_slot"], adaptive=adaptive)
    return DraftPlan(top_k, steps, verify_size, adaptive=adaptive)


# ---- on disk


def write_tuned(engine_dir: Path, tuned: TunedPlan) -> None:
    """Keep a plan in its directory, in the place of another. Raises OutputError; the file is whole
    or as it was."""
    with atomic.writing(engine_dir / FILE), atomic.locked(engine_dir):
        json_files.write_json(engine_dir / FILE, tuned.to_dict())


def read_tuned(engine_dir: Path) -> TunedPlan | None:
    """The plan of a directory; None where there is none. BundleError for a damaged file."""
    path = engine_dir / FILE
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_BYTES or not path.is_file():
            raise ValueError("it is no file of a plausible size")
        return tuned_of(json.loads(path.read_bytes()))
    except (OSError, LookupError, TypeError, ValueError, RecursionError, EdgeSpecError) as error:
        message = f"{path} is no tuned plan: {error!s:.200}"
        raise BundleError(message, TUNE_AGAIN) from None


def tuned_of(raw: object) -> TunedPlan:
    """The plan of a file's content. Raises KeyError, TypeError and ValueError for what is none, and
    what its parts raise."""
    if not isinstance(raw, dict) or raw["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    method, plan, over_plain, words = (raw[n] for n in ("method", "plan", "over_plain", "words"))
    if raw["role"] not in DECODERS:
        raise ValueError("it names no role")
    if (method is None) != (plan is None) or not (method is None or method in DRAFTERS):
        raise ValueError("it names no drafting method")
    bound = {name: raw[name] for name in ("options", "engines", "device")}
    if not all(isinstance(part, dict) for part in bound.values()):
        raise ValueError("options, engines and device are no objects")
    if over_plain is not None and not is_number(over_plain, 0, sys.float_info.max):
        raise ValueError("over_plain is no speed")
    if not isinstance(words, str) or len(words) > 200:
        raise ValueError("words is no short text")
    return TunedPlan(
        role=Role(raw["role"]),
        method=method,
        plan=None if plan is None else plan_of_dict(plan),
        over_plain=over_plain,
        acceptance=tuple(rates_of(depth) for depth in raw["acceptance"][:MAX_DEPTH]),
        prior=rates_of(raw["prior"]),
        words=words,
        **bound,
    )


def rates_of(raw: Sequence[object]) -> tuple[float, ...]:
    """A list of shares from 0 to 1. Raises ValueError."""
    if not all(is_number(rate, 0, 1) for rate in raw):
        raise ValueError("acceptance and prior have rates from 0 to 1")
    return tuple(raw)  # type: ignore[arg-type]


# ---- whether it fits


def belonging(engine_dir: Path, role: Role, *, with_draft: bool) -> dict[str, Any]:
    """What a plan is bound to: `engines` and `device`, as TunedPlan has them. Raises
    BundleError."""
    roles = roles_of(role, with_draft=with_draft)
    return {"engines": hashes_of(engine_dir, roles), "device": device_of(engine_dir, role)}


def is_of_engines(engine_dir: Path, tuned: TunedPlan) -> bool:
    """Whether the engines that a plan was tuned for are here as they were. Raises BundleError."""
    roles = roles_of(tuned.role, with_draft=Role.DRAFT.value in tuned.engines)
    return dict(tuned.engines) == hashes_of(engine_dir, roles) != {}


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The plan that fits; else None, and in `note` why one that is there does not, for the user."""

    tuned: TunedPlan | None = None
    note: str | None = None


def find_tuned(engine_dir: Path) -> FoundPlan:
    """The plan of a directory where it fits the engines and the device."""
    try:
        tuned = read_tuned(engine_dir)
        if tuned is not None and not is_of_engines(engine_dir, tuned):
            why = "the engines were built again after it was tuned"
            return FoundPlan(note=not_taken(engine_dir, why))
    except BundleError as error:
        return FoundPlan(note=f"{error.what}. {error.remedy}")
    if tuned is None or (here := device_of(engine_dir, tuned.role)) == dict(tuned.device):
        return FoundPlan(tuned)
    why = f"it was tuned on {differing(tuned.device, here)}"
    return FoundPlan(note=not_taken(engine_dir, why))


def not_taken(engine_dir: Path, why: str) -> str:
    """What is said of a plan that is there and does not fit."""
    return f"the tuned plan in {engine_dir / FILE} is not taken: {why}. {TUNE_AGAIN}"


def drop_stale_plan(engine_dir: Path) -> None:
    """Drop a plan that was tuned for engines that are no more, and a damaged file. Raises
    OutputError."""
    path = engine_dir / FILE
    if not path.exists():
        return
    try:
        tuned = read_tuned(engine_dir)
        keeps = tuned is not None and is_of_engines(engine_dir, tuned)
    except BundleError:
        keeps = False
    if not keeps:
        with atomic.writing(path), atomic.locked(engine_dir):
            path.unlink(missing_ok=True)
