"""Builds the engine of an image encoder with any backend: checks, stages, proves on the golden
image, installs.

Knows the order of the work. How a graph is lowered stands in the backend.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.artifacts import file_names, json_files
from edgespec.artifacts.directories import Kind
from edgespec.artifacts.outputs import refuse_model_directory, refuse_overwriting
from edgespec.backends.base import Backend, BuildOptions, Progress, StagedEncoder
from edgespec.backends.build import SILENT, as_bundle_error, chosen_backend, products_text
from edgespec.backends.canonical_graph import check_canonical
from edgespec.backends.engine_config import FLOAT32, EngineWeights
from edgespec.backends.golden import Agreement
from edgespec.backends.manifest import EngineEntry
from edgespec.backends.registry import DEFAULT_BACKEND
from edgespec.backends.vision import engine_dir as engines
from edgespec.backends.vision.config import VisionEngineConfig, check_image_limits
from edgespec.backends.vision.golden import check_golden, read_golden
from edgespec.backends.vision.onnx_dir import VisionOnnxDir, open_visual_onnx_dir
from edgespec.errors import OptionError
from edgespec.vision.contract import ImageLimits, vision_contract

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """What `build_visual` made. `size_bytes` counts all its files, `seconds` the whole build.

    `golden_difference` is how far it is from the golden rows, relative to their largest value;
    None: there were none. `golden_cosine` is that of quantized weights.
    """

    engine: Path
    size_bytes: int
    golden_difference: float | None
    golden_cosine: float | None
    seconds: float
    weights: EngineWeights
    notes: tuple[str, ...] = ()
    unproven: str | None = None  # why it could not be run here, and was not compared


def build_visual(
    onnx_dir: Path,
    engine_dir: Path,
    limits: ImageLimits,
    *,
    backend: str = DEFAULT_BACKEND,
    options: BuildOptions | None = None,
    progress: Progress = SILENT,
) -> BuiltEncoder:
    """Build the engine of an exported image encoder into `engine_dir`/visual, or into `engine_dir`
    if that is its name; nothing is left behind when it fails.

    `options` None: the backend's defaults. Raises OptionError, BundleError, LimitError,
    OverwriteError, BuildError or OutputError.
    """
    began = time.monotonic()
    builder, onnx, target = checked(onnx_dir, engine_dir, limits, backend)
    options = checked_options(builder, options)
    with engines.staged(target) as staging:
        with as_bundle_error(onnx):
            path = staging / f"{engines.NAME}{builder.suffixes[0]}"
            staged = builder.stage_encoder(onnx, path, limits, options, progress)
        found = prove(builder, onnx, staged, progress)
        for name in file_names.PROCESSOR_FILES:
            if name in onnx.manifest.files:
                shutil.copyfile(onnx.path / name, staging / name)
        config = VisionEngineConfig(
            component=onnx.config, limits=limits, weights=staged.weights, settings=staged.settings
        )
        json_files.write_json(staging / file_names.CONFIG, config.to_dict())
        entry = engines.write_manifest(staging, entry_of(builder, onnx, staged, found))
    return BuiltEncoder(
        target / staged.engine.name,
        entry.size_bytes,
        entry.golden_difference,
        entry.golden_cosine,
        time.monotonic() - began,
        entry.weights,
        tuple(notes_of(onnx, staged)),
        staged.unproven,
    )


def plan_visual(
    onnx_dir: Path,
    engine_dir: Path,
    limits: ImageLimits,
    *,
    backend: str = DEFAULT_BACKEND,
    options: BuildOptions | None = None,
) -> tuple[str, ...]:
    """What `build_visual` would make of the same arguments, a line each, without building. Raises
    what it would raise before its work begins."""
    builder, onnx, target = checked(onnx_dir, engine_dir, limits, backend)
    with as_bundle_error(onnx):
        lines = builder.plan_encoder(onnx, limits, checked_options(builder, options))
    vision = onnx.config.vision
    one = f"{limits.min_image_tokens} to {limits.max_image_tokens_per_image}"
    return (
        f"{target}: an image encoder of {vision.num_layers} layers on {builder.title}",
        f"images of {one} tokens, {limits.max_image_tokens} in a request",
        *lines,
        *without_processor(onnx),
    )


def checked_options(backend: Backend, options: BuildOptions | None) -> BuildOptions:
    """The options of a build, its backend's defaults for None. OptionError for what only a language
    model can be asked for."""
    options = backend.parse_options({}) if options is None else options
    if backend.emit_dir(options) is not None:
        what = "--emit-onnx writes the graph of a language model, and this is an image encoder's"
        raise OptionError(what, "Leave it out, or build the image encoder on its device.")
    return options


def checked(
    onnx_dir: Path, engine_dir: Path, limits: ImageLimits, backend: str
) -> tuple[Backend, VisionOnnxDir, Path]:
    """The backend, the export and where its engine goes, checked with all that may be said of a
    build before its work begins."""
    builder, target = chosen_backend(backend), engines.visual_dir(engine_dir)
    check_image_limits(limits)
    refuse_overwriting(target.parent, [onnx_dir])
    refuse_model_directory(  # the engines of the language model may stand there
        target.parent, "--engine-dir is", "Choose another --engine-dir.", but=(Kind.ENGINES,)
    )
    onnx = open_visual_onnx_dir(onnx_dir)
    logger.info("%s: image encoder of %s, files as recorded", onnx_dir, onnx.config.model)
    builder.check_encoder()
    engines.refuse_foreign(target)
    vision = onnx.config.vision
    contract = vision_contract(vision)
    sizes = {"P": 4 * vision.merge_size**2, "W": 2, "T": 4}
    check_canonical(onnx.model, contract.inputs, contract.outputs, onnx.manifest.files, sizes)
    return builder, onnx, target


def prove(
    backend: Backend, onnx: VisionOnnxDir, staged: StagedEncoder, progress: Progress
) -> Agreement | None:
    """How a staged engine agrees with the golden image; None where there is none. BuildError where
    it computes something else."""
    if onnx.golden is None or staged.unproven:
        return None
    golden = read_golden(onnx.golden, onnx.config.vision)
    progress.prove(1)
    runner = backend.open_encoder(staged.engine, onnx.config.vision, staged.settings)
    try:
        found = check_golden(runner, onnx.config.vision, golden, staged.accuracy, backend.remedies)
    finally:
        runner.close()
    progress.advance(1)
    return found


def entry_of(
    backend: Backend, onnx: VisionOnnxDir, staged: StagedEncoder, found: Agreement | None
) -> EngineEntry:
    """The manifest entry of a proven engine, without its files."""
    return EngineEntry(
        backend=backend.name,
        fingerprint=staged.fingerprint or backend.fingerprint(),
        source=onnx.manifest.source.to_dict(),
        weights=staged.weights,
        golden_difference=found.difference if found else None,
        golden_cosine=found.cosine if found and staged.accuracy.min_cosine else None,
    )


def notes_of(onnx: VisionOnnxDir, staged: StagedEncoder) -> Iterator[str]:
    """What the user should know about this engine."""
    if staged.weights.scheme != FLOAT32:
        yield f"{products_text(staged.weights)}; images look a little different to the model"
    if staged.weights.emulated:
        yield f"{staged.weights.scheme} is {staged.weights.emulated}"
    yield from without_processor(onnx)


def without_processor(onnx: VisionOnnxDir) -> Iterator[str]:
    """A note where an export does not say how its images are prepared."""
    if not any(name in onnx.manifest.files for name in file_names.PROCESSOR_FILES):
        yield (
            f"{onnx.path} has no {file_names.PROCESSOR_FILES[0]}, and no image can be prepared: put"
            " it beside the checkpoint's config.json, then export and build again"
        )
