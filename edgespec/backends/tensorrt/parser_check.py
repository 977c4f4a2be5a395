"""Whether a release of TensorRT takes the graph of a directory: an export is lowered for it, any
other model.onnx is looked at as it is.

Knows directories and targets. The rules stand in `rules`, the rewrites in `lowering`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgespec.artifacts import file_names
from edgespec.artifacts.directories import DirectoryKind, kind_of, not_an_export
from edgespec.backends.onnx_dir import open_export
from edgespec.backends.tensorrt import lowered_files
from edgespec.backends.tensorrt.linter import LintReport, lint_file
from edgespec.backends.tensorrt.target import Target
from edgespec.backends.tensorrt.versions import Capabilities

# Sizes for which an export is lowered: rules ask that they are fixed, not what they are
CAPACITY, MAX_ROWS = 4096, 64


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in the graph of a directory; `target` is what it was lowered for, None where
    it was taken as it is."""

    report: LintReport
    target: Target | None


def check(directory: Path, version: Capabilities) -> Checked:
    """Look at the graph of a directory. BundleError where there is none, or where an export is
    damaged."""
    if kind_of(directory) is DirectoryKind.EXPORT:
        return check_export(directory, version)
    path = directory / file_names.MODEL
    if not path.is_file():
        raise not_an_export(directory, "tensorrt")
    return Checked(lint_file(path, version), None)


def check_export(directory: Path, version: Capabilities) -> Checked:
    """Lower the graph of an export for the release, and look at what comes out."""
    onnx = open_export(directory)
    model = ir.load(onnx.model)
    target = Target(
        dialect=version.dialect,
        compute=lowered_files.stored_compute(model),
        capacity=CAPACITY,
        max_rows=MAX_ROWS,
    )
    lowered = lowered_files.lowered_model(onnx, target, model)
    with tempfile.TemporaryDirectory(prefix="edgespec-check-") as place:
        path = lowered_files.write(lowered, onnx.path.absolute(), Path(place))
        return Checked(lint_file(path, version), target)
