"""All that `edgespec verify` finds of an engine directory, and the report of it.

Knows what is checked, and what a report must not hold: paths of the machine. What is checked of one
engine stands in `backends.engine_check`, of its tokens in `token_check`.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.artifacts.provenance import installed_version
from edgespec.backends.engine_check import EngineCheck, check_engine, described
from edgespec.backends.engine_dir import finished_engines, open_engine, read_config
from edgespec.backends.findings import Finding, Outcome, failed, not_run
from edgespec.backends.onnx_dir import OnnxDir, open_onnx_dir
from edgespec.backends.registry import backend_of
from edgespec.contract import Role
from edgespec.errors import (
    BundleError,
    EngineMismatch,
    EnvironmentProblem,
    InternalError,
    MissingDependency,
)
from edgespec.prompts import RequestFile
from edgespec.runtime.checks.token_check import TOKENS, check_tokens
from edgespec.runtime.requests.memory import peak_bytes

FORMAT = 1
PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "pycuda")
OPENING = "opening"
TOGETHER = "all"  # the place of what concerns all engines
Began = Callable[[str], None]
NO_IMAGES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found of an engine directory; `hidden` are texts that a report must not hold, and
    what stands in their place."""

    engines: Sequence[EngineCheck]
    together: Sequence[Finding]
    peak_bytes: int
    hidden: Mapping[str, str]

    @property
    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Each finding with the role of its engine."""
        for engine in self.engines:
            yield from ((engine.role.value, finding) for finding in engine.findings)
        yield from ((TOGETHER, finding) for finding in self.together)

    def count(self, outcome: Outcome) -> int:
        """How many checks ended so."""
        return Counter(finding.outcome for _, finding in self.findings)[outcome]

    def to_dict(self) -> dict[str, Any]:
        """verify.json."""
        report = {
            "format": FORMAT,
            "kind": "verify",
            "edgespec": installed_version("edgespec"),
            "python": platform.python_version(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "packages": {name: installed_version(name) for name in PACKAGES},
            **{outcome.name.lower(): self.count(outcome) for outcome in Outcome},
            "engines": {engine.role.value: engine.to_dict() for engine in self.engines},
            "checks": [finding.to_dict() for finding in self.together],
            "process_peak_bytes": self.peak_bytes,
        }
        return dict(without(report, self.hidden))


def verify(
    engine_dir: Path,
    onnx_dirs: Sequence[Path],
    requests: RequestFile | None,
    began: Began = lambda message: None,
    images: Mapping[str, Any] = NO_IMAGES,
) -> Verification:
    """Check every engine of a directory, and what they say together. `began` is called with what is
    checked next. `images` are Engine's arguments that say what reads the images of requests.

    Raises BundleError where an engine or an export is damaged, PairingError, and EnvironmentProblem
    where this machine is another one or lacks a package.
    """
    roles = list(finished_engines(engine_dir).engines)
    exports = [open_onnx_dir(path) for path in onnx_dirs]
    check_exports(engine_dir, roles, exports)
    checks = []
    for role in roles:
        began(f"the {role.value} engine")
        checks.append(checked(engine_dir, role, exports))
    together = []
    if any(finding.check == OPENING for check in checks for finding in check.findings):
        together = [not_run(TOKENS, "not every engine can be opened")]
    elif set(roles) != {Role.DRAFT}:
        began("tokens with drafts and without")
        together = check_tokens(engine_dir, requests, images)
    return Verification(checks, together, peak_bytes(), hidden_paths(engine_dir, onnx_dirs))


def checked(engine_dir: Path, role: Role, exports: Sequence[OnnxDir]) -> EngineCheck:
    """All checks of one engine; one that cannot be opened though its files are whole has failed."""
    try:
        return check_engine(engine_dir, role, exports)
    except (MissingDependency, EngineMismatch):
        raise
    except (BundleError, EnvironmentProblem, InternalError) as error:
        config, entry = open_engine(engine_dir, role)
        finding = failed(OPENING, f"{error.what}. {error.remedy}")
        description = described(backend_of(engine_dir, role), config, entry, {})
        return EngineCheck(role=role, findings=[finding], description=description)


def hidden_paths(engine_dir: Path, onnx_dirs: Sequence[Path]) -> dict[str, str]:
    """The paths that are of this machine, and what stands in their place. A relative path of one
    name alone may be a word of any sentence, and says nothing of the machine."""
    given = {engine_dir: "ENGINE_DIR", **dict.fromkeys(onnx_dirs, "ONNX_DIR")}
    hidden = {str(path): name for path, name in given.items() if len(path.parts) > 1}
    hidden |= {str(path.absolute()): name for path, name in given.items()}
    hidden |= {str(path.resolve()): name for path, name in given.items()}
    home = os.path.expanduser("~")  # noqa: PTH111 - there may be none
    return hidden | ({} if home == "~" else {home: "~"})


def check_exports(engine_dir: Path, roles: Sequence[Role], exports: Sequence[OnnxDir]) -> None:
    """BundleError for an export of which no engine is there."""
    there = [read_config(engine_dir, role).component for role in roles]
    for onnx in exports:
        if onnx.config not in there:
            message = f"{engine_dir} has no engine of {onnx.path}"
            raise BundleError(message, "Give the exports that its engines were built from.")


def without(value: Any, hidden: Mapping[str, str]) -> Any:
    """A JSON value in whose texts what is hidden is replaced, the longest first."""
    if isinstance(value, str):
        for text in sorted(hidden, key=len, reverse=True):
            if len(text) > 1:  # "." and "/" are of no machine
                value = value.replace(text, hidden[text])
        return value
    if isinstance(value, Mapping):
        return {key: without(item, hidden) for key, item in value.items()}
    return [without(item, hidden) for item in value] if isinstance(value, list | tuple) else value
