"""From a checkpoint to exported directories: `export` resolves what is asked for, makes the
components and writes them.

Knows the order of the work. What is refused stands in `resolve`, what a method's component is in
`table`, how files are written in `component`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, file_names, hashes, json_files
from edgespec.artifacts.manifest import ExportManifest, ExportSource
from edgespec.artifacts.outputs import refuse_model_directory, refuse_overwriting
from edgespec.errors import BundleError
from edgespec.export.base import PLAIN, base_component
from edgespec.export.component import Component, Exported, write_component
from edgespec.export.options import ExportOptions
from edgespec.export.request import ExportRequest
from edgespec.export.resolve import resolve
from edgespec.export.table import COMPONENTS
from edgespec.export.vision import (
    VisionComponent,
    vision_component,
    vision_options,
    why_no_vision,
    write_vision,
)
from edgespec.methods import METHODS
from edgespec.progress import Progress, Silent

AnyComponent = Component | VisionComponent

__all__ = ["ExportOptions", "Exported", "export"]

logger = logging.getLogger(__name__)
THERE = "already there and unchanged: nothing was written"


def export(
    model: str, out: Path, options: ExportOptions, progress: Progress | None = None
) -> Exported:
    """Write the components of a checkpoint directory or hub id below OUT: all of them, or none.

    Raises CheckpointError, UnsupportedModel, PairingError, OverwriteError or OutputError before
    anything is written under its name.
    """
    refuse_overwriting(out, (model, options.draft_dir, options.base_model_dir))
    refuse_model_directory(out, "OUT is", "Name a directory outside of it.")
    request = resolve(model, options)
    logger.info("%s: %s", model, ", ".join(described(request)))
    components = {out / part.directory: part for part in components_of(request)}
    for target in components:
        atomic.remove_dead(target.parent, target.name)
    progress = progress or Silent()
    there = {
        target: already_there(target, request, recorded_options(request, part), progress)
        for target, part in components.items()
    }
    done = {target: exported for target, exported in there.items() if exported is not None}
    missing = [target for target in components if target not in done]
    request.hash_while_reading()
    with atomic.staged_directories(*missing) as stagings:
        for target, staging in zip(missing, stagings, strict=True):
            began = time.monotonic()
            with atomic.writing(target):  # which of them it is that has no room
                written = write(components[target], staging, request, progress)
            logger.info("%s: written in %.2f s", target, time.monotonic() - began)
            done[target] = replace(written, directory=target)
    first, *others = (done[target] for target in components)
    doubt = request.base.origin.doubt if request.base else None
    notes = (*first.notes, doubt) if doubt else first.notes
    if (why := why_no_vision(request)) is not None:
        notes = (*notes, why)
    return replace(first, notes=notes, beside=tuple(others))


def described(request: ExportRequest) -> list[str]:
    """What was opened, for the log: each checkpoint with what it was detected as."""
    parts = [
        f"exported for {METHODS[request.method].title if request.method else 'plain decoding'}"
    ]
    if request.base is not None:
        parts.append(f"base {request.base.checkpoint.place} ({request.base.config.architecture})")
    if request.draft is not None:
        config = request.draft.config
        parts.append(f"draft {request.draft.checkpoint.place} ({config.layout} layout)")
    return parts


def write(
    component: AnyComponent, staging: Path, request: ExportRequest, progress: Progress
) -> Exported:
    """Write the files of a component to `staging`."""
    recorded = recorded_options(request, component)
    if isinstance(component, VisionComponent):
        return write_vision(component, staging, request, recorded, progress)
    return write_component(component, staging, request, recorded, progress)


def components_of(request: ExportRequest) -> tuple[AnyComponent, ...]:
    """The components that a request asks for: a base, a draft, or a base and the draft in it; with
    a base its image encoder."""
    row = COMPONENTS[request.method] if request.method is not None else None
    if not request.writes_base:
        assert row is not None
        return (row.draft(request),)
    components: list[AnyComponent] = [base_component(request, row.emits(request) if row else PLAIN)]
    if row is not None and drafts_in_base(request):
        components.append(row.draft(request))
    visual = vision_component(request)
    return (*components, visual) if visual is not None else tuple(components)


def drafts_in_base(request: ExportRequest) -> bool:
    """Whether the draft of a request stands in the checkpoint of its base."""
    draft, base = request.draft, request.base
    if draft is not None and base is not None:
        return draft.checkpoint is base.checkpoint
    return METHODS[request.method or ""].weights_in == "base_checkpoint"


def recorded_options(request: ExportRequest, component: AnyComponent) -> dict[str, Any]:
    """The options of a request on which a component depends, as manifest.json keeps them."""
    if isinstance(component, VisionComponent):
        return vision_options(component, request)
    asked: dict[str, Any] = {}
    for row in COMPONENTS.values():
        asked |= row.recorded(request)
    return asked | {"aux_layers": request.options.aux_layers, "golden": request.options.golden}


def already_there(
    target: Path, request: ExportRequest, recorded: dict[str, Any], progress: Progress
) -> Exported | None:
    """The result of an earlier run of the same request, if it is complete and unchanged; else None.
    Raises BundleError for files that are not those of the manifest, and where the checkpoint is
    not, or no longer, the one that was exported."""
    if not (target / file_names.MANIFEST).is_file():
        return None
    if json_files.read_manifest(target).get("kind") != "export":
        return None
    manifest = ExportManifest.read(target)
    if not manifest.is_of(manifest.source, recorded):  # before all weights are read
        return None
    source = request.source(progress)
    if manifest.source != source:
        raise of_another(target, manifest.source, source)
    hashes.check_files(target, manifest.files)
    return Exported(target, manifest.role.value, manifest.files, (THERE,))


def of_another(target: Path, exported: ExportSource, asked: ExportSource) -> BundleError:
    """The error where OUT holds the export of another checkpoint, or of this one as it was."""
    message = f"{target} holds an export of {exported.name}"
    if exported.name == asked.name:
        message += ", and the checkpoint has changed since"
    return BundleError(message, "Choose another directory, or remove this one first.")
