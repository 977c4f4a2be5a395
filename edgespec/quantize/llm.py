"""Quantizes a base checkpoint; `quantize_llm` is the order of the work.

Knows what is refused, what is written beside the weights, and what the manifest records.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, file_names, hashes, json_files, provenance
from edgespec.artifacts.manifest import (
    NOT_SIMULATED,
    QUANTIZE_KIND,
    QuantizeCalibration,
    QuantizeCheck,
    QuantizeManifest,
    QuantizeRequest,
    QuantizeSource,
    QuantizeVision,
)
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.finite import refuse_not_finite
from edgespec.checkpoint.tokenizer import refuse_growth
from edgespec.checkpoint.writing import TensorChunk, copied, write_model
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.progress import Progress
from edgespec.quantization.schemes import check_target, scheme_to_make
from edgespec.quantize import (
    calibration,
    layerwise,
    modelopt,
    stream,
    vision,
    vision_settings,
    work,
)
from edgespec.quantize import check as checking
from edgespec.quantize.base import EMBEDDING, Base, base_of
from edgespec.quantize.decoder import TorchDecoder
from edgespec.quantize.plan import (
    QuantizationPlan,
    matching,
    matrix,
    plan_base,
    quantized_bytes,
    refuse_full_disk,
    size_bytes,
)
from edgespec.quantize.vision import Scales, VisionPieces, VisionPlan

HF_QUANT_CONFIG = "hf_quant_config.json"
_WRITTEN_HERE = {
    file_names.CONFIG,
    file_names.MANIFEST,
    HF_QUANT_CONFIG,
    "model.safetensors.index.json",
}
_SIDE_FILE_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `edgespec quantize`. A size of None means the default of the device, a
    `quantization` of None that text is left as it is, which takes a `visual_quantization`.

    Raises UnsupportedModel for a format that `target`, if given, cannot run, and for flags that do
    not go together.
    """

    quantization: str | None
    lm_head_quantization: str | None = None
    fp8_cache: bool = False
    exclude: tuple[str, ...] = ()
    calib_data: str | None = None
    num_samples: int | None = None
    calib_seq_len: int | None = None
    device: str = "cpu"
    allow_pickle: bool = False
    target: str | None = None
    visual_quantization: str | None = None
    image_dataset: Path | None = None

    def __post_init__(self) -> None:
        self.refuse_contradictions()
        cache = "fp8" if self.fp8_cache else None
        asked = (
            self.quantization,
            self.lm_head_quantization,
            cache,
            self.visual_quantization,
        )
        for name in filter(None, asked if self.target else ()):
            check_target(scheme_to_make(name), str(self.target))

    def refuse_contradictions(self) -> None:
        """Raises UnsupportedModel for flags without the one that they belong to."""
        visual = self.visual_quantization
        if visual not in (None, "fp8"):
            raise UnsupportedModel(
                f"`visual_quantization` {visual}: image encoders are quantized to fp8 alone.",
                "Use `visual_quantization` fp8.",
            )
        if visual is None and self.image_dataset is not None:
            raise UnsupportedModel(
                "`image_dataset` without `visual_quantization`: text calibration needs no image.",
                "Add `visual_quantization` fp8, or omit `image_dataset`.",
            )
        if self.quantization is not None:
            return
        if visual is None:
            raise UnsupportedModel(
                "nothing is to be quantized.",
                "Give `quantization`, `visual_quantization` fp8, or both.",
            )
        texts = {
            "`calib_data`": self.calib_data,
            "`num_samples`": self.num_samples,
            "`calib_seq_len`": self.calib_seq_len,
        }
        if given := [flag for flag, value in texts.items() if value is not None]:
            raise UnsupportedModel(
                f"{given[0]} without `quantization`: text calibrates no image encoder.",
                "Add `quantization`, or omit it; `image_dataset` names the images.",
            )
        if self.lm_head_quantization or self.fp8_cache:
            part = "lm_head" if self.lm_head_quantization else "kv_cache"
            raise UnsupportedModel(
                f"`{part}_quantization` without `quantization`.", "Add `quantization`."
            )

    @property
    def samples(self) -> int:
        """The maximum number of calibration windows."""
        return self.num_samples or (16 if self.device == "cpu" else 512)

    @property
    def seq_len(self) -> int:
        """Tokens per calibration window."""
        return self.calib_seq_len or (256 if self.device == "cpu" else 512)

    @property
    def num_tokens(self) -> int:
        """Tokens of all calibration windows, and of the text that is held out for the check."""
        return self.samples * self.seq_len + calibration.MAX_HELD_OUT


@dataclass(frozen=True, slots=True)
class Quantized:
    """The written directory, its manifest, and notes for the user."""

    directory: Path
    manifest: QuantizeManifest
    notes: tuple[str, ...]


def quantize_llm(
    model_dir: str, out: Path, options: Options, progress: Progress, log: modelopt.Log
) -> Quantized:
    """Writes the quantized checkpoint to `out`.

    A run that fails or is stopped leaves no `out`; its finished layers are kept for the next run.
    Raises CheckpointError, UnsupportedModel, RequestError, OverwriteError, EnvironmentProblem or
    OutputError before any work, and BuildError if the result is broken.
    """
    dataset = options.image_dataset
    refuse_overwriting(
        out, (model_dir, options.calib_data, None if dataset is None else str(dataset))
    )
    base = base_of(open_checkpoint(model_dir, allow_pickle=options.allow_pickle))
    vision_plan = VisionPlan.of(base, dataset) if options.visual_quantization else None
    if options.quantization is None:
        assert vision_plan is not None
        return quantize_vision(base, vision_plan, out, options, progress)
    plan = plan_base(
        base,
        options.quantization,
        options.lm_head_quantization,
        options.exclude,
        options.fp8_cache,
        vision_plan.layers.values() if vision_plan else (),
    )
    vision_plan = vision_plan.without(plan.left_out) if vision_plan else None
    texts = calibration.read_texts(options.calib_data, options.num_tokens)
    request = request_of(base.checkpoint, options, texts, progress, vision_plan)
    atomic.remove_dead(out.parent, out.name)
    if (there := already_there(out, request)) is not None:
        work.forget_finished(out, request)
        return there
    atomic.refuse_occupied(out)
    modelopt.check_installed()
    job = BaseJob(base, plan, out, options, texts, request, progress, log, vision_plan)
    if plan.streamed:
        work.refuse_unfinished(out, request)
        refuse_full_disk(out, size_bytes(base.checkpoint, plan, base.source_of))
        return run_job(job, None)
    with work.opened(out, request) as kept:
        result = run_job(job, kept)
        work.finish(kept.directory)
    return result


@dataclass(frozen=True, slots=True)
class BaseJob:
    """One resolved quantization."""

    base: Base
    plan: QuantizationPlan
    out: Path
    options: Options
    texts: calibration.CalibrationTexts
    request: QuantizeRequest
    progress: Progress
    log: modelopt.Log
    vision: VisionPlan | None = None


def run_job(job: BaseJob, kept: work.CalibrationWork | None) -> Quantized:
    """Calibrates, packs, writes and checks; `kept` is the work directory of a calibrated plan."""
    base, plan, options, progress = job.base, job.plan, job.options, job.progress
    read_all(base.checkpoint, progress)
    prepare(options, progress, job.log, with_modelopt=not plan.streamed)
    tokenizer = tokenizer_of(base.checkpoint, job.log)
    windows = calibration.cut(
        job.texts, tokenizer, options.samples, min(options.seq_len, base.max_position)
    )
    if kept is not None:
        calibration.refuse_too_few(windows, job.texts, options.num_samples)
        finished_bytes = sum(entry["bytes"] for entry in kept.entries.values())
        refuse_full_disk(job.out, calibrated_bytes(job, windows) - finished_bytes)
    # In minutes it shows what would be lost after hours of text
    scales = None if job.vision is None else calibrate_vision(job.vision, progress)
    settings = None if kept is None else calibrate(job, windows, kept)
    with atomic.staged_directory(job.out) as staging:
        if settings is None or kept is None:
            settings = write_streamed(job, staging, scales)
        else:
            merge(job, kept, staging, scales)
        if job.vision is not None:
            settings = vision_settings.joined(settings, plan, job.vision)
        write_sidecars(base.checkpoint, staging, *settings)
        progress.start("check", checking.num_steps(base))
        with modelopt.captured(job.log):
            report = checking.compare(
                base, Checkpoint(staging), plan, windows.held_out, progress.advance
            )
        checking.refuse_broken(report, plan)
        visual = check_vision(job.vision, scales, staging, progress)
        base.checkpoint.check_unchanged()
        manifest = write_manifest(staging, job.request, plan, windows, report, visual)
    notes = (*resumed_notes(base, kept), *notes_of(plan, windows, options, job.texts))
    if job.vision is not None:
        notes = (*notes, vision_note(job.vision))
    return Quantized(job.out, manifest, notes)


# Image encoder


def quantize_vision(
    base: Base, plan: VisionPlan, out: Path, options: Options, progress: Progress
) -> Quantized:
    """Writes the checkpoint with its image encoder quantized and all else byte for byte."""
    plan = plan.without(matching(plan.layers.values(), options.exclude))
    request = request_of(base.checkpoint, options, None, progress, plan)
    atomic.remove_dead(out.parent, out.name)
    if (there := already_there(out, request)) is not None:
        return there
    atomic.refuse_occupied(out)
    work.refuse_unfinished(out, request)
    refuse_full_disk(out, sum(info.num_bytes for info in base.checkpoint.tensors.values()))
    read_all(base.checkpoint, progress)
    scales = calibrate_vision(plan, progress)
    with atomic.staged_directory(out) as staging:
        every = (copied(base.checkpoint, name) for name in base.checkpoint.tensors)
        pieces = list(VisionPieces(plan, scales)(every))
        progress.start("export", sum(piece.num_bytes for piece in pieces))
        write_model(staging, pieces, progress.advance)
        write_sidecars(base.checkpoint, staging, *vision_settings.of_vision(base, plan))
        visual = check_vision(plan, scales, staging, progress)
        base.checkpoint.check_unchanged()
        none_needed = QuantizeCalibration(needed=False, num_samples=0, num_tokens=0)
        files = hashes.file_entries(staging)
        manifest = QuantizeManifest.make(request, none_needed, None, files, visual)
        manifest.write(staging)
    return Quantized(out, manifest, (vision_note(plan), "text is left as it is"))


def calibrate_vision(plan: VisionPlan, progress: Progress) -> Scales:
    """Runs the images through the image encoder, whose weights stand in a temporary directory
    meanwhile."""
    refuse_full_disk(Path(tempfile.gettempdir()), plan.size_bytes)
    progress.start("calibrate image encoder", len(plan.images))
    return vision.calibrate(plan, progress.advance)


def check_vision(
    plan: VisionPlan | None, scales: Scales | None, staging: Path, progress: Progress
) -> QuantizeVision | None:
    """Compares the written image encoder with the original; None where it is not quantized."""
    if plan is None or scales is None:
        return None
    progress.start("check image encoder", len(scales.rows))
    return vision.compare(plan, scales, Checkpoint(staging), progress.advance)


def vision_note(plan: VisionPlan) -> str:
    """The note about the images for the user."""
    layers = f"{len(plan.layers)} Linears of the image encoder"
    return f"fp8 for {layers}, calibrated with {plan.images.title}"


def read_all(checkpoint: Checkpoint, progress: Progress) -> None:
    """Reads all weights. Raises CheckpointError for NaN or Inf."""
    progress.start("weights", sum(info.num_bytes for info in checkpoint.tensors.values()))
    refuse_not_finite(checkpoint, progress.advance)


def prepare(
    options: Options, progress: Progress, log: modelopt.Log, *, with_modelopt: bool
) -> None:
    """Imports ModelOpt and checks the device before anything is written.

    Raises EnvironmentProblem for a missing CUDA device or another version of ModelOpt.
    """
    progress.start("import", 1)
    if with_modelopt:
        modelopt.start(log)
    modelopt.check_device(options.device)
    progress.advance(1)


def tokenizer_of(checkpoint: Checkpoint, log: modelopt.Log) -> Any:
    """Returns the tokenizer of transformers. Raises CheckpointError if it cannot be read, or makes
    texts many times longer."""
    refuse_growth(checkpoint)
    with modelopt.captured(log):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.place} cannot be read:"
                f" {str(error).partition(chr(10))[0]}",
                "Put the model's tokenizer files beside its weights.",
            ) from error


# Weights


def write_streamed(job: BaseJob, staging: Path, scales: Scales | None) -> modelopt.Settings:
    """Converts the weights one by one into `staging`. Returns the settings on disk."""
    job.progress.start("export", size_bytes(job.base.checkpoint, job.plan, job.base.source_of))

    def changed(pieces: Iterable[TensorChunk]) -> Iterable[TensorChunk]:
        return with_vision(job, scales, pieces)

    return stream.write_mxfp8(job.base, job.plan, staging, job.progress.advance, changed)


def with_vision(
    job: BaseJob, scales: Scales | None, pieces: Iterable[TensorChunk]
) -> Iterable[TensorChunk]:
    """The tensors to write, with the quantized ones of the image encoder."""
    if job.vision is None or scales is None:
        return pieces
    return VisionPieces(job.vision, scales)(pieces)


def calibrate(
    job: BaseJob, windows: calibration.Windows, kept: work.CalibrationWork
) -> modelopt.Settings:
    """Calibrates and packs the layers that `kept` does not have. Returns the settings on disk."""
    with modelopt.captured(job.log):
        decoder = TorchDecoder(job.base, device=job.options.device)
    settings = layerwise.settings_on_disk(decoder, job.plan, job.log)
    ids = layerwise.batches(windows.calibration)
    layerwise.Calibration(decoder, job.plan, ids, kept, job.progress, job.log).run()
    return settings


def merge(job: BaseJob, kept: work.CalibrationWork, staging: Path, scales: Scales | None) -> None:
    """Writes the finished parts and the unquantized tensors into `staging`."""
    paths = [kept.path(number) for number in sorted(kept.parts)]
    pieces = list(with_vision(job, scales, layerwise.merged(paths, job.base.checkpoint)))
    job.progress.start("export", sum(piece.num_bytes for piece in pieces))
    write_model(staging, pieces, job.progress.advance)


def calibrated_bytes(job: BaseJob, windows: calibration.Windows) -> int:
    """Returns the disk space of a calibrated run: the result, its parts, two layers' states."""
    base, plan = job.base, job.plan
    tensors = base.checkpoint.tensors
    shapes = {name: matrix(tensors[f"{base.source_of(name)}.weight"]) for name in plan.layers}
    width = tensors[f"{base.stored(EMBEDDING)}.weight"].shape[1]
    states = 2 * 4 * width * sum(map(len, windows.calibration))
    result = size_bytes(base.checkpoint, plan, base.source_of)
    return result + quantized_bytes(plan, shapes) + states


# Files beside the weights


def write_sidecars(
    checkpoint: Checkpoint,
    staging: Path,
    beside: dict[str, Any],
    inside: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> None:
    """Writes config.json, hf_quant_config.json and the tokenizer files.

    `beside` is the content of hf_quant_config.json, `inside` the section `quantization_config` of
    config.json. `more` holds further keys of config.json.
    """
    for path in side_files(checkpoint):
        shutil.copyfile(path, staging / path.name)
    json_files.write_json(staging / HF_QUANT_CONFIG, beside)
    json_files.write_json(
        staging / file_names.CONFIG,
        checkpoint.config | (more or {}) | {"quantization_config": inside},
    )


def side_files(checkpoint: Checkpoint) -> list[Path]:
    """Returns the files to copy: tokenizer, chat template, generation_config.json."""
    return [
        path
        for path in sorted(checkpoint.path.iterdir())
        if path.suffix in _SIDE_FILE_SUFFIXES
        and path.is_file()
        and path.name not in _WRITTEN_HERE
        and not path.name.endswith(".index.json")
    ]


def request_of(
    checkpoint: Checkpoint,
    options: Options,
    texts: calibration.CalibrationTexts | None,
    progress: Progress,
    vision_plan: VisionPlan | None = None,
) -> QuantizeRequest:
    """Returns the request as the manifest records it: source and options.

    The same request is not run twice. Names are informative only: `QuantizeRequest.unnamed`
    drops them. Reads all images.
    """
    digest = hashlib.sha256()
    for path in (checkpoint.path / file_names.CONFIG, *side_files(checkpoint)):
        digest.update(f"{path.name}:{hashes.sha256_file(path)}\n".encode())
    source = QuantizeSource(
        name=checkpoint.path.resolve().name,
        identity=checkpoint.identity(progress),
        texts=digest.hexdigest(),
    )
    asked = {
        "quantization": options.quantization,
        "lm_head_quantization": options.lm_head_quantization,
        "kv_cache_quantization": "fp8" if options.fp8_cache else None,
        "exclude": list(options.exclude),
        "num_samples": options.samples,
        "calib_seq_len": options.seq_len,
        "calib_data": {"name": texts.name, "sha256": texts.sha256} if texts else None,
        "device": options.device,
    }
    if vision_plan is not None:
        images = vision_plan.images
        asked["visual_quantization"] = options.visual_quantization
        asked["image_dataset"] = {"name": images.name, "sha256": images.digest()}
    return QuantizeRequest(source, json.loads(json.dumps(asked)))


def already_there(target: Path, request: QuantizeRequest) -> Quantized | None:
    """Returns the result of an earlier run of the same request if it is complete and unchanged.

    Raises BundleError if a file of the result is damaged.
    """
    if not (target / file_names.MANIFEST).is_file():
        return None
    if json_files.read_manifest(target).get("kind") != QUANTIZE_KIND:
        return None
    manifest = QuantizeManifest.read(target)
    if manifest.edgespec != provenance.installed_version("edgespec"):
        return None
    if manifest.request.unnamed() != request.unnamed():
        return None
    hashes.check_files(target, manifest.files)
    return Quantized(target, manifest, ("already up to date: nothing was written",))


def write_manifest(
    staging: Path,
    request: QuantizeRequest,
    plan: QuantizationPlan,
    windows: calibration.Windows,
    check: QuantizeCheck,
    visual: QuantizeVision | None = None,
) -> QuantizeManifest:
    """Writes manifest.json into `staging` and returns its content."""
    if plan.streamed:
        calibrated = QuantizeCalibration(needed=False, num_samples=0, num_tokens=0)
    else:
        ids = windows.calibration
        calibrated = QuantizeCalibration(True, len(ids), sum(map(len, ids)))
    files = hashes.file_entries(staging)
    manifest = QuantizeManifest.make(request, calibrated, check, files, visual)
    manifest.write(staging)
    return manifest


def notes_of(
    plan: QuantizationPlan,
    windows: calibration.Windows,
    options: Options,
    texts: calibration.CalibrationTexts,
) -> tuple[str, ...]:
    """Returns the notes about the calibration for the user."""
    if plan.streamed:
        notes = ["converted weight by weight: no calibration data is needed"]
    else:
        used, tokens = len(windows.calibration), sum(map(len, windows.calibration))
        fewer = used < options.samples
        samples = calibration.samples_text(used) + (f" of {options.samples}" if fewer else "")
        notes = [
            f"calibrated with {samples}, {tokens} tokens of {texts.title}, on {options.device}"
        ]
        if fewer:
            notes.append(
                f"{texts.title} makes no more samples of {len(windows.calibration[0])} tokens: give"
                " more text to `calib_data` for a closer result"
            )
        elif options.device == "cpu" and options.num_samples is None:
            notes.append(
                "the CPU default is few samples; `num_samples` and `calib_seq_len` raise it"
            )
    notes.append(NOT_SIMULATED)
    return tuple(notes)


def resumed_notes(base: Base, kept: work.CalibrationWork | None) -> tuple[str, ...]:
    """Returns the notes about an earlier, unfinished run."""
    if kept is None:
        return ()
    notes = [kept.stale] if kept.stale else []
    if kept.resumed_at is not None:
        notes.append(f"resumed at {layerwise.part_label(kept.resumed_at, base.num_layers)}")
    return tuple(notes)
