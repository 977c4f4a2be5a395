"""Takes an engine over that another tool built from an emitted graph: opens it, proves it on the
golden outputs, installs it.

Knows the order of the work, as `build` does. Compiles nothing.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from edgespec.artifacts import json_files
from edgespec.artifacts.directories import DirectoryKind
from edgespec.artifacts.outputs import refuse_model_directory, refuse_overwriting
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import SILENT, Backend, Listeners
from edgespec.backends.build import Built, Proven, installed, prove, staging_directory
from edgespec.backends.capacity import check_capacity
from edgespec.backends.emitted import SCRIPT, EmittedGraph, open_emitted
from edgespec.backends.golden_file import read_golden
from edgespec.backends.registry import get_backend
from edgespec.contract import Limits
from edgespec.errors import BundleError


def import_engine(directory: Path, engine_dir: Path, progress: Listeners = SILENT) -> Built:
    """Install the engine that stands in a directory of --emit-onnx into `engine_dir`, with all that
    it needs there; nothing is left behind where it fails.

    BundleError where the engine is missing or damaged or another one, BuildError where it does not
    reproduce the golden outputs, EnvironmentProblem where this is not its device.
    """
    began = time.monotonic()
    refuse_overwriting(engine_dir, [directory])
    refuse_model_directory(
        engine_dir, "`engine_dir` is", "Choose another `engine_dir`.", but=(DirectoryKind.ENGINES,)
    )
    emitted = open_emitted(directory)
    onnx, config = emitted.onnx, emitted.config
    backend = get_backend(emitted.backend, f"the graph in {directory}")
    source = backend.engine_path(directory, onnx.role)
    if not source.is_file():
        message = f"{source} does not exist: no engine was built from the graph yet"
        raise BundleError(message, f"Build it on its device: sh {directory / SCRIPT}")
    check_capacity(
        config.component, config.limits, backend.memory(config), backend.total_memory_bytes()
    )
    engines.check_against_others(engine_dir, onnx)
    engines.remove_killed(engine_dir)
    engines.refuse_foreign(engine_dir, engines.names_to_write(onnx, backend.suffixes))
    with staging_directory(engine_dir, onnx.role) as staging:
        path = backend.engine_path(staging, onnx.role)
        shutil.copyfile(source, path)
        proven = proven_of(backend, emitted, path, progress)
        engines.copy_sidecars(onnx, staging)
        if onnx.golden is not None:  # the export itself is on another machine
            shutil.copyfile(onnx.golden, staging / engines.golden_name(onnx.role))
        json_files.write_json(staging / engines.CONFIGS[onnx.role], proven.config.to_dict())
        return installed(backend, onnx, proven, staging, engine_dir, began)


def proven_of(backend: Backend, emitted: EmittedGraph, path: Path, progress: Listeners) -> Proven:
    """An engine that was opened here, and compared with the golden outputs where there are any."""
    onnx, config = emitted.onnx, emitted.config
    if onnx.golden is not None:  # what is wrong there is not wrong with the engine
        read_golden(onnx.golden, config.component.graph, config.component.vocab_size)
    limits = Limits(max_batch_size=config.limits.max_batch_size)
    try:
        staged = backend.imported(path, config)
        if onnx.golden is None:
            backend.open_staged(staged, config.limits.max_kv_cache_capacity, 1).close()
        agreement, weights = prove(backend, onnx, staged, limits, progress)
    except BundleError as error:
        remedy = f"Build it again with the {backend.title} of this machine: sh {SCRIPT}"
        raise BundleError(error.what, remedy) from error
    own = replace(config, weights=weights, settings=staged.settings)
    return Proven(staged, own, agreement)
