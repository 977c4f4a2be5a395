"""Exports and engines of toys, made once per run for each content, whichever file and worker asks.

Knows what an export and an engine depend on: the bytes of the checkpoints, their directories' names
and the options. What is returned is only read; a test that changes a directory copies it first.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from edgespec.artifacts import file_names
from edgespec.backends.base import BuildOptions
from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.export.components import export as export_anew
from tests import shared

PER_RUN = ("command",)  # keys of a manifest that say how, and not what


def exported(model: Path, options: ExportOptions | None = None) -> Path:
    """What `export` writes for a checkpoint: the directory above its components."""
    options = options or ExportOptions()
    others = [options.base_model_dir, options.draft_dir]
    sources = [(Path(path).name, digest(Path(path))) for path in (str(model), *others) if path]
    asked = replace(options, base_model_dir=None, draft_dir=None)
    given = [bool(path) for path in others]
    return shared.made_once(
        ("export", sources, given, asked), lambda out: export_anew(str(model), out, options)
    )


def built(limits: Limits, *onnx_dirs: Path, options: BuildOptions | None = None) -> Path:
    """The directory of the engines of these components, built in this order."""

    def make(out: Path) -> None:
        for onnx_dir in onnx_dirs:
            build(onnx_dir, out, limits, options=options)

    return shared.made_once(
        ("engines", [digest(path) for path in onnx_dirs], limits, options), make
    )


def digest(directory: Path) -> str:
    """sha256 over the names and the bytes of all files."""
    found = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == file_names.MANIFEST:
            kept = {k: v for k, v in json.loads(data).items() if k not in PER_RUN}
            data = json.dumps(kept, sort_keys=True).encode()
        found.update(f"{path.relative_to(directory)}:{len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()
