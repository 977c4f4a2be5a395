"""The same draft in several formats of weights: each beside the engines of a directory, in one that
is temporary.

Knows builds and links. How each is tuned is not known here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.backends import engine_dir as engines
from edgespec.backends.build import build, chosen_backend
from edgespec.backends.manifest import EngineManifest
from edgespec.contract import Limits, Role
from edgespec.errors import BundleError, OptionError
from edgespec.runtime.opening.tuned_plan import TunedPlan, belonging

WEIGHTS = "weights"  # the option of a backend that says how weights are kept


def check(engine_dir: Path, weights: Iterable[str]) -> str:
    """The backend of the base, which builds the drafts. Raises BundleError where there is no base,
    OptionError for formats that it does not have."""
    there = engines.finished_engines(engine_dir).engines
    base = there.get(Role.BASE) or there.get(Role.LLM)
    if base is None:
        raise BundleError(f"{engine_dir} has no base engine", "Build the base first.")
    backend = chosen_backend(base.backend)
    option = next((o for o in backend.options if o.name == WEIGHTS), None)
    if option is None:
        message = f"the backend {base.backend} has no formats of weights to choose from"
        raise OptionError(message, "Leave `draft_weights` out.")
    for name in weights:
        backend.parse_options({WEIGHTS: name})
    return base.backend


@contextmanager
def with_draft(engine_dir: Path, draft_onnx: Path, weights: str, backend: str) -> Iterator[Path]:
    """A temporary directory beside `engine_dir` with its base and the draft in a format of weights;
    it goes at the end. Raises what building raises, OutputError."""
    with (
        atomic.writing(engine_dir.parent),
        atomic.staging_in(engine_dir.parent, f"{engine_dir.name}.tune-{weights}") as staging,
    ):
        made = staging / "engines"  # the staging directory itself is locked
        made.mkdir()
        link_engines(engine_dir, made)
        build_draft(made, engine_dir, draft_onnx, weights, backend)
        yield made


def build_draft(target: Path, like: Path, draft_onnx: Path, weights: str, backend: str) -> None:
    """Build a draft into `target`, for as long sequences and as large trees as the engines of
    `like`. Raises what `build` raises."""
    options = chosen_backend(backend).parse_options({WEIGHTS: weights})
    build(draft_onnx, target, limits_like(like), backend=backend, options=options)


def limits_like(engine_dir: Path) -> Limits:
    """The limits of the engines that are there. Raises BundleError."""
    sizes: dict[str, Any] = {}
    for role in (Role.LLM, Role.BASE, Role.DRAFT):
        if role in engines.finished_engines(engine_dir).engines:
            own = asdict(engines.read_config(engine_dir, role).limits)
            sizes |= {name: value for name, value in own.items() if value is not None}
    return Limits(**sizes)


def link_engines(source: Path, target: Path) -> None:
    """The engines but for the draft's, as links to the same files, or copies where the file system
    has no links. Raises OSError."""
    manifest = EngineManifest.read(source).without(Role.DRAFT)
    for name in manifest.files:
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copy2(source / name, target / name)
    manifest.write(target)


def bound_again(engine_dir: Path, plan: TunedPlan) -> TunedPlan:
    """A plan that was found in a temporary directory, for the engines that were built of the same
    files. Raises BundleError."""
    with_draft = Role.DRAFT.value in plan.engines
    return replace(plan, **belonging(engine_dir, plan.role, with_draft=with_draft))
