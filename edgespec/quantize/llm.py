"""From a base checkpoint to its quantised directory: `quantize_llm` is the order of the work.

Knows what is refused, what is written beside the weights, and what the manifest records.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgespec import bundle
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.quantize import calibration, modelopt, stream
from edgespec.quantize import check as checking
from edgespec.quantize.plan import (
    HEAD,
    Plan,
    base_config,
    plan_base,
    refuse_full_disk,
    refuse_not_finite,
    size_bytes,
)
from edgespec.quantize.tensors import to_torch

HF_QUANT_CONFIG = "hf_quant_config.json"
_KEPT_APART = {bundle.CONFIG, bundle.MANIFEST, HF_QUANT_CONFIG, "model.safetensors.index.json"}
_TEXTS = {".json", ".jinja", ".model", ".txt"}


class Progress(Protocol):
    """Told how far the work is: `start` names a stage and its total."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `edgespec quantize`. Sizes of None: what suits the device."""

    quantization: str
    lm_head_quantization: str | None = None
    fp8_cache: bool = False
    exclude: tuple[str, ...] = ()
    calib_data: str | None = None
    num_samples: int | None = None
    calib_seq_len: int | None = None
    device: str = "cpu"
    allow_pickle: bool = False

    @property
    def samples(self) -> int:
        return self.num_samples or (16 if self.device == "cpu" else 512)

    @property
    def seq_len(self) -> int:
        return self.calib_seq_len or (256 if self.device == "cpu" else 512)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written. `report` is None where it was there already."""

    directory: Path
    manifest: dict[str, Any]
    notes: tuple[str, ...]


def quantize_llm(model_dir: str, out: Path, options: Options, progress: Progress, log: modelopt.Log) -> Quantized:
    """Write the quantised checkpoint to `out`; nothing is left behind when it fails.

    Raises CheckpointError, UnsupportedModel, RequestError, EnvironmentProblem or OutputError before any work, and
    BuildError where the result is broken.
    """
    checkpoint = open_checkpoint(model_dir, allow_pickle=options.allow_pickle)
    config = base_config(checkpoint)
    plan = plan_base(
        checkpoint, config, options.quantization, options.lm_head_quantization, options.exclude, options.fp8_cache
    )
    texts = calibration.read_texts(options.calib_data, options.samples)
    request = request_of(checkpoint, options, texts)
    if (there := already_there(out, request)) is not None:
        return there
    bundle.refuse_occupied(out)
    modelopt.check_installed()
    refuse_full_disk(out, size_bytes(checkpoint, plan))
    prepare(checkpoint, options, progress, log, with_modelopt=not plan.streamed)
    windows = calibration.cut(
        texts, tokenizer_of(checkpoint, log), options.samples, min(options.seq_len, config.max_position)
    )
    with bundle.staged_directory(out) as staging:
        if plan.streamed:
            settings = write_streamed(checkpoint, plan, staging, progress)
        else:
            settings = write_calibrated(checkpoint, plan, windows, options, staging, progress, log)
        write_sidecars(checkpoint, staging, *settings)
        progress.start("check", checking.num_steps(config.decoder.num_layers))
        with modelopt.captured(log):
            report = checking.compare(checkpoint, Checkpoint(staging), plan, windows.held_out, progress.advance)
        checking.refuse_broken(report, plan)
        manifest = write_manifest(staging, request, plan, windows, report.as_json())
    return Quantized(out, manifest, notes_of(plan, windows, options, texts))


def prepare(
    checkpoint: Checkpoint, options: Options, progress: Progress, log: modelopt.Log, *, with_modelopt: bool
) -> None:
    """What must be known before the first byte is written, and the imports."""
    progress.start("weights", sum(info.num_bytes for info in checkpoint.tensors.values()))
    refuse_not_finite(checkpoint, progress.advance)
    progress.start("import", 1)
    if with_modelopt:
        modelopt.start(log)
    modelopt.check_device(options.device)
    progress.advance(1)


def tokenizer_of(checkpoint: Checkpoint, log: modelopt.Log) -> Any:
    with modelopt.captured(log):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{checkpoint.path} has no tokenizer that can be read: {str(error).partition(chr(10))[0]}",
                "Put the model's tokenizer files beside its weights.",
            ) from error


# Weights


def write_streamed(
    checkpoint: Checkpoint, plan: Plan, staging: Path, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    progress.start("export", size_bytes(checkpoint, plan))
    return stream.write_mxfp8(checkpoint, plan, staging / "model.safetensors", progress.advance)


def write_calibrated(
    checkpoint: Checkpoint, plan: Plan, windows: calibration.Windows, options: Options, staging: Path,
    progress: Progress, log: modelopt.Log,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """ModelOpt's calibration and export; returns the settings it wrote, with what transformers dropped among them."""
    import torch

    progress.start("load", 1)
    model = load_model(checkpoint, options.device, log)
    progress.start("calibrate", modelopt.steps(plan, len(windows.calibration)))
    inputs = [torch.tensor([window], device=options.device) for window in windows.calibration]
    modelopt.calibrate(model, plan, inputs, run, progress.advance, log)
    progress.start("export", 1)
    dropped = dropped_names(checkpoint, model)
    modelopt.export(model, staging, {name: to_torch(checkpoint.read(name)) for name in dropped}, log)
    beside = json.loads((staging / HF_QUANT_CONFIG).read_text())
    inside = json.loads((staging / bundle.CONFIG).read_text())["quantization_config"]
    roots = sorted({f"{name.partition('.')[0]}*" for name in dropped})
    for names in (beside["quantization"].get("exclude_modules"), inside.get("ignore")):
        if names is not None:
            names += [root for root in roots if root not in names]
    return beside, inside


def load_model(checkpoint: Checkpoint, device: str, log: modelopt.Log) -> Any:
    with modelopt.captured(log):
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype="auto", trust_remote_code=False)
        return model.eval().to(device)


def run(model: Any, ids: Any) -> object:
    return model(input_ids=ids, use_cache=False)


def dropped_names(checkpoint: Checkpoint, model: Any) -> list[str]:
    """Tensors of the checkpoint that transformers does not load: `mtp.*`, say. A tied head is no loss."""
    known = {name.replace("._orig_mod", "") for name, _ in (*model.named_parameters(), *model.named_buffers())}
    known |= {f"{HEAD}.weight"} | {name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")}
    return [name for name in checkpoint.tensors if name not in known]


# What stands beside the weights


def write_sidecars(
    checkpoint: Checkpoint, staging: Path, beside: dict[str, Any], inside: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """The checkpoint's own config.json with the settings (and `more`) in it, hf_quant_config.json, tokenizer."""
    for path in side_files(checkpoint):
        shutil.copyfile(path, staging / path.name)
    bundle.write_json(staging / HF_QUANT_CONFIG, beside)
    bundle.write_json(staging / bundle.CONFIG, checkpoint.config | (more or {}) | {"quantization_config": inside})


def side_files(checkpoint: Checkpoint) -> list[Path]:
    """Small files that travel with the weights: tokenizer, templates, generation_config.json."""
    there = sorted(path for path in checkpoint.path.iterdir() if path.suffix in _TEXTS and path.is_file())
    return [path for path in there if path.name not in _KEPT_APART and not path.name.endswith(".index.json")]


def request_of(checkpoint: Checkpoint, options: Options, texts: calibration.Texts) -> dict[str, Any]:
    """What was asked for, as the manifest records it: the same request is not worked on twice."""
    digest = hashlib.sha256()
    for path in (checkpoint.path / bundle.CONFIG, *side_files(checkpoint)):
        digest.update(f"{path.name}:{bundle.sha256_file(path)}\n".encode())
    source = {"name": checkpoint.path.name, "identity": checkpoint.identity(), "texts": digest.hexdigest()}
    asked = {
        "quantization": options.quantization,
        "lm_head_quantization": options.lm_head_quantization,
        "kv_cache_quantization": "fp8" if options.fp8_cache else None,
        "exclude": list(options.exclude),
        "num_samples": options.samples,
        "calib_seq_len": options.seq_len,
        "calib_data": {"name": texts.name, "sha256": texts.sha256},
        "device": options.device,
    }
    return {"source": source, "options": asked}


def already_there(target: Path, request: dict[str, Any]) -> Quantized | None:
    """What an earlier run of the same request wrote, if all of it is still there and unchanged."""
    if not (target / bundle.MANIFEST).is_file():
        return None
    manifest = bundle.read_manifest(target)
    wanted = json.loads(json.dumps(request)) | {
        "kind": "quantize",
        "edgespec": bundle.installed_version("edgespec"),
    }
    if any(manifest.get(key) != value for key, value in wanted.items()):
        return None
    bundle.check_files(target, manifest.get("files"))
    return Quantized(target, manifest, ("already there and unchanged: nothing was written",))


def write_manifest(
    staging: Path, request: dict[str, Any], plan: Plan, windows: calibration.Windows, report: dict[str, Any]
) -> dict[str, Any]:
    packages = {name: bundle.installed_version(name) for name in ("nvidia-modelopt", "torch", "transformers")}
    origin = bundle.provenance()
    manifest = {
        "format": bundle.MANIFEST_FORMAT,
        "kind": "quantize",
        **request,
        **origin,
        "packages": origin["packages"] | packages,
        "calibrated": {
            "needed": not plan.streamed,
            "num_samples": 0 if plan.streamed else len(windows.calibration),
            "num_tokens": 0 if plan.streamed else sum(map(len, windows.calibration)),
        },
        "check": report,
        "files": bundle.file_entries(staging),
    }
    bundle.write_json(staging / bundle.MANIFEST, manifest)
    return manifest


def notes_of(plan: Plan, windows: calibration.Windows, options: Options, texts: calibration.Texts) -> tuple[str, ...]:
    if plan.streamed:
        notes = ["converted weight by weight: no calibration data is needed"]
    else:
        tokens = sum(map(len, windows.calibration))
        of = f"the {texts.name} text" if texts.name == "shipped" else texts.name
        notes = [f"calibrated with {len(windows.calibration)} samples, {tokens} tokens of {of}, on {options.device}"]
        if options.device == "cpu" and options.num_samples is None:
            notes.append("few samples by default on a CPU: --num-samples and --calib-seq-len take more")
    notes.append(checking.NOT_SIMULATED)
    return tuple(notes)


def refuse_tower(visual: str | None, checkpoint_name: str) -> None:
    """`--visual-quantization` belongs to vision-language models, which this version does not take yet."""
    if visual is not None:
        raise UnsupportedModel(
            f"--visual-quantization: {checkpoint_name} has no vision tower that this version takes.",
            "Leave the flag out for a text model.",
        )
