"""Opens a finished engine with the backend that built it: the table of backends.

Knows which module runs which engines; each is imported when one of its engines is opened.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec.backends import engine_dir as engines
from edgespec.backends.base import Runner
from edgespec.contract import Role
from edgespec.errors import BundleError

# Name in the manifest -> module with `open_engine(path, config, entry) -> Runner`.
BACKENDS = {"ort": "edgespec.backends.ort.runner"}
# The same -> module with `check(stored, name)`, which is imported without the engine's library.
FINGERPRINTS = {"ort": "edgespec.backends.ort.fingerprint"}


def open_runner(engine_dir: Path, role: Role) -> tuple[Runner, dict[str, Any]]:
    """A runner for a finished engine, and the engine's config; files are checked first.

    Raises BundleError, EngineMismatch or EnvironmentProblem.
    """
    config, entry = engines.open_engine(engine_dir, role)
    backend = entry.get("backend")
    if backend not in BACKENDS:
        what = f"the {role.value} engine in {engine_dir} was built for the backend {backend!r}"
        raise BundleError(
            what, f"This version runs: {', '.join(BACKENDS)}. Build the engine again."
        )
    runner: Runner = import_module(BACKENDS[backend]).open_engine(engine_dir, role, config, entry)
    return runner, config
