"""The table of backends, and finished engines opened with the one that built them.

Adding a backend is a row here and a folder beside this file; test code and users may add rows of
their own. Each module is imported when one of its engines, or its options, are asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from edgespec.artifacts import hashes
from edgespec.backends.base import Backend, PairDevice, Runner, noop
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.engine_dir import STEMS, open_engine
from edgespec.backends.manifest import EngineManifest
from edgespec.contract import Role
from edgespec.errors import BundleError

# Name -> the backend, or "module:attribute" where it stands
BACKENDS: dict[str, Backend | str] = {
    "ort": "edgespec.backends.ort.backend:BACKEND",
    "tensorrt": "edgespec.backends.tensorrt.backend:BACKEND",
    "tensorrt-rtx": "edgespec.backends.tensorrt.backend:RTX_BACKEND",
}
DEFAULT_BACKEND = "ort"


def find_backend(name: str) -> Backend | None:
    """The backend of that name; None where this version has none."""
    row = BACKENDS.get(name)
    if not isinstance(row, str):
        return row
    module, _, attribute = row.partition(":")
    backend = getattr(import_module(module), attribute)
    assert isinstance(backend, Backend)
    return backend


def get_backend(name: str, where: str) -> Backend:
    """The backend of that name; BundleError where this version has none. `where` says what was
    built for it."""
    backend = find_backend(name)
    if backend is None:
        known = ", ".join(BACKENDS)
        message = f"{where} was built for the backend {name!r}"
        raise BundleError(message, f"This version runs: {known}. Build the engine again.")
    return backend


def engine_file_names() -> list[str]:
    """The names that files of engines may have, of all roles and backends; those that are opened
    come first."""
    suffixes = [backend.suffixes for backend in map(find_backend, BACKENDS) if backend is not None]
    opened = [f"{stem}{names[0]}" for names in suffixes for stem in STEMS.values()]
    others = [f"{stem}{name}" for names in suffixes for stem in STEMS.values() for name in names]
    return list(dict.fromkeys((*opened, *others)))


class Devices:
    """What the engines share that are open together: one device for each backend."""

    def __init__(self) -> None:
        self.by_backend: dict[str, PairDevice] = {}

    def of(self, backend: Backend) -> PairDevice:
        """The device of a backend, opened with its first engine. EnvironmentProblem where it cannot
        be."""
        if backend.name not in self.by_backend:
            self.by_backend[backend.name] = backend.open_device()
        return self.by_backend[backend.name]

    def close(self) -> None:
        """Say that no further engine will be opened; closing twice is harmless."""
        for device in self.by_backend.values():
            device.close()


def open_runner(
    engine_dir: Path, role: Role, devices: Devices | None = None, *, capacity: int | None = None
) -> tuple[Runner, EngineConfig]:
    """A runner of a finished engine, and the engine's config; files are checked first. Without
    `devices` it shares its device with no other engine. Of engines for several capacities that of
    `capacity` alone, or all behind one runner where it is None.

    Raises BundleError, EngineMismatch or EnvironmentProblem.
    """
    config, entry = open_engine(engine_dir, role)
    backend = get_backend(entry.backend, f"the {role.value} engine in {engine_dir}")
    backend.check_fingerprint(entry.fingerprint, f"the {role.value} engine in {engine_dir}")
    config = config if capacity is None else config.at(capacity)
    for variant in config.variants:
        path = backend.engine_path(engine_dir, role, variant)
        hashes.refuse_unlisted(engine_dir, entry.files, [path.name], ())
    shared = devices or Devices()
    closing = shared.close if devices is None else noop
    try:
        device = shared.of(backend)
        if config.variants:
            return backend.open_capacities(engine_dir, config, device, closing), config
        runner = backend.open(engine_dir, config, device)
    except BaseException:
        closing()
        raise
    closing()
    return runner, config


def backend_of(engine_dir: Path, role: Role) -> Backend:
    """The backend of a finished engine. BundleError where there is no such engine or backend."""
    entry = EngineManifest.read(engine_dir).engines.get(role)
    if entry is None:
        raise BundleError(f"{engine_dir} has no {role.value} engine", "Build it first.")
    return get_backend(entry.backend, f"the {role.value} engine in {engine_dir}")
