"""From a draft to its quantized directory, calibrated on the base's own hidden states.

Knows the order of the work, and no method: those stand in `table`. `fc` is never quantized, as in
TensorRT Edge-LLM: everything else is computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.artifacts import atomic
from edgespec.artifacts.manifest import QuantizeBase, QuantizeCheck
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.checkpoint.names import stored_name, text_stack
from edgespec.checkpoint.writing import (
    TensorChunk,
    array_piece,
    copied,
    to_numpy,
    to_torch,
    write_safetensors,
)
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import BuildError, PairingError, UnsupportedModel
from edgespec.methods import METHODS, BaseSide, DraftSide, mismatches, resolve_aux_layers
from edgespec.methods.draft_layers import base_keys
from edgespec.progress import Progress
from edgespec.quantize import calibration, modelopt, work
from edgespec.quantize import check as checking
from edgespec.quantize.base import EMBEDDING, HEAD, base_config, refuse_quantized
from edgespec.quantize.llm import (
    Options,
    Quantized,
    already_there,
    notes_of,
    prepare,
    read_all,
    request_of,
    tokenizer_of,
    write_manifest,
    write_sidecars,
)
from edgespec.quantize.plan import (
    QuantizationPlan,
    make_plan,
    quantized_bytes,
    refuse_full_disk,
    size_bytes,
)
from edgespec.quantize.row import CalibrationPair, QuantizeRow
from edgespec.quantize.table import QUANTIZABLE

SHARED_HEAD = f"{HEAD}.weight"


def quantize_draft(
    base_dir: str,
    draft_dir: str,
    out: Path,
    options: Options,
    progress: Progress,
    log: modelopt.Log,
) -> Quantized:
    """Write the quantized draft to `out`; nothing is left behind when it fails.

    Raises as `quantize_llm` does, and PairingError where base and draft do not belong together.
    """
    if options.fp8_cache:
        raise UnsupportedModel(
            "`kv_cache_quantization`: a draft's cache stays as it is.", "Leave the flag out."
        )
    refuse_overwriting(out, (base_dir, draft_dir, options.calib_data))
    job = open_job(base_dir, draft_dir, options, progress, log)
    texts = calibration.read_texts(options.calib_data, options.num_tokens)
    request = request_of(job.draft, options, texts, progress)
    made_with = QuantizeBase(
        name=job.base.path.resolve().name,
        identity=job.base.identity(progress),
        aux_layers=job.aux_layers,
    )
    request = replace(request, base=made_with)
    atomic.remove_dead(out.parent, out.name)
    if (there := already_there(out, request)) is not None:
        return there
    atomic.refuse_occupied(out)
    modelopt.check_installed()
    work.refuse_unfinished(out, request)
    refuse_full_disk(out, size_to_write(job))
    read_all(job.draft, progress)
    read_all(job.base, progress)
    prepare(options, progress, log, with_modelopt=True)
    seq_len = min(options.seq_len, job.model.max_position)
    windows = calibration.cut(texts, tokenizer_of(job.base, log), options.samples, seq_len)
    if not job.plan.streamed:
        calibration.refuse_too_few(windows, texts, options.num_samples)
    with atomic.staged_directory(out) as staging:
        report = write_draft(job, windows, staging, base_dir)
        checking.refuse_broken(report, job.plan)
        job.draft.check_unchanged()
        job.base.check_unchanged()
        manifest = write_manifest(staging, request, job.plan, windows, report)
    notes = [
        *notes_of(job.plan, windows, options, texts),
        f"fc is left as it is; made for {made_with.name}",
    ]
    if HEAD in job.plan.layers and SHARED_HEAD not in job.names:
        notes.append(
            "its lm_head is the base's, quantized: from here on the draft has an lm_head of its own"
        )
    return Quantized(out, manifest, tuple(notes))


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One resolved quantization. `named` is the draft under the names that will be written, `names`
    are own name -> that name of each tensor. `shared` is the shape [Vd, H] of the base's lm_head
    where the draft gets a quantized one."""

    base: Checkpoint
    model: ModelConfig
    draft: Checkpoint
    config: DraftConfig
    named: Checkpoint
    names: Mapping[str, str]
    shared: tuple[int, int] | None
    plan: QuantizationPlan
    aux_layers: tuple[int, ...]  # that the base emits for the draft
    options: Options
    progress: Progress
    log: modelopt.Log

    @property
    def row(self) -> QuantizeRow:
        """What is asked of the draft's method."""
        return QUANTIZABLE[self.config.method]


def open_job(
    base_dir: str, draft_dir: str, options: Options, progress: Progress, log: modelopt.Log
) -> DraftJob:
    """Base and draft, and the plan for them. Raises what opening them raises, UnsupportedModel for
    a draft that is not quantized, and PairingError."""
    draft = open_checkpoint(draft_dir, allow_pickle=options.allow_pickle)
    refuse_quantized(draft)
    config = detect(draft)
    if isinstance(config, ModelConfig):
        raise UnsupportedModel(
            f"{draft.place} is a base model, not a draft.", "edgespec quantize llm takes it."
        )
    if config.method not in QUANTIZABLE:
        raise not_calibrated(draft, config)
    base = open_checkpoint(base_dir, allow_pickle=options.allow_pickle)
    model = base_config(base)
    check_pair(config, model, base)
    row, shared = QUANTIZABLE[config.method], shared_head_shape(config, options)
    aux_layers = () if row.reads_final else resolve_aux_layers(config, model.decoder.num_layers)
    named, names = row.names(draft, config)
    plan = plan_draft(named, names, shared, options)
    return DraftJob(
        base, model, draft, config, named, names, shared, plan, aux_layers, options, progress, log
    )


def write_draft(
    job: DraftJob, windows: calibration.Windows, staging: Path, base_dir: str
) -> QuantizeCheck:
    """Calibrate, pack and write the draft to `staging`, and compare what is written with it."""
    draft, named, names, progress = job.draft, job.named, job.names, job.progress
    progress.start("hidden states", len(windows.calibration) + len(windows.held_out))
    pairs, held_out = pairs_of(job, windows)
    weights = read_weights(named, job.base, names, job.config)
    packed, *settings = calibrated(job, weights, pairs)
    progress.start("export", size_to_write(job))
    pieces = written_pieces(named, names, job.plan, packed)
    write_safetensors(staging / "model.safetensors", pieces, progress.advance)
    beside, inside = (modelopt.renamed(part, partial(on_disk, names)) for part in settings)
    modelopt.leave_out((beside, inside), linears_beside(named, names))
    name = str(job.base.path.resolve()) if Path(base_dir).is_dir() else base_dir
    more = base_keys(draft.config, name)
    write_sidecars(draft, staging, beside, inside, more=more)
    return compare(job, weights, Checkpoint(staging), held_out)


def not_calibrated(draft: Checkpoint, config: DraftConfig) -> UnsupportedModel:
    """The error for a draft of a method without a row, with the way to smaller weights."""
    titles = ", ".join(METHODS[name].title for name in QUANTIZABLE)
    return UnsupportedModel(
        f"{draft.place} is {METHODS[config.method].draft_title}, which is not quantized here: data"
        f" calibrates the decoder layers of {titles} drafts alone.",
        "Export it as it is, and build it with `weights` int8 or int4, which needs no data.",
    )


def check_pair(config: DraftConfig, model: ModelConfig, base: Checkpoint) -> None:
    """Raises PairingError for the first mismatch."""
    sides = BaseSide.of_checkpoint(model, str(base.place)), DraftSide.of_checkpoint(config)
    for mismatch in mismatches(*sides):
        remedy = "Pass `base_model_dir` with the base that this draft was trained for."
        raise PairingError(mismatch.what, mismatch.remedy or remedy)


def shared_head_shape(config: DraftConfig, options: Options) -> tuple[int, int] | None:
    """The shape [Vd, H] of the base's lm_head where it is quantized for the draft, as TensorRT
    Edge-LLM does; None: it is not."""
    quantizes = QUANTIZABLE[config.method].quantizes_shared_head and options.lm_head_quantization
    if config.own_head or not quantizes:
        return None
    return config.draft_vocab_size, config.decoder.hidden_size


def size_to_write(job: DraftJob) -> int:
    """An estimate of the bytes to write."""
    plan, names = job.plan, job.names
    own = replace(
        plan, layers={module: s for module, s in plan.layers.items() if f"{module}.weight" in names}
    )
    beside = replace(
        plan, layers={module: s for module, s in plan.layers.items() if module not in own.layers}
    )
    size = size_bytes(job.named, own, lambda module: stored(names, module))
    return size + (quantized_bytes(beside, {HEAD: job.shared}) if job.shared else 0)


def stored(names: Mapping[str, str], module: str) -> str:
    """The name on disk of a module, without `.weight`."""
    return names[f"{module}.weight"].removesuffix(".weight")


def plan_draft(
    draft: Checkpoint, names: Mapping[str, str], shared: tuple[int, int] | None, options: Options
) -> QuantizationPlan:
    """The plan for the Linears of the layers and, if asked for, the draft's own lm_head or the one
    that it shares. Raises UnsupportedModel where there is no lm_head to quantize."""
    shapes = {HEAD: shared} if shared else {}
    for own, name in names.items():
        shape = draft.tensors[name].shape
        module = own.removesuffix(".weight")
        if len(shape) == 2 and (
            module.endswith("_proj") or (module == HEAD and options.lm_head_quantization)
        ):
            shapes[module] = (shape[0], shape[1])
    if options.lm_head_quantization and HEAD not in shapes:
        raise UnsupportedModel(
            f"`lm_head_quantization`: {draft.place} has no lm_head of its own, it uses the base's.",
            "Leave the flag out, and quantize the base's lm_head with the base.",
        )
    assert options.quantization is not None, "the flag is required for drafts"
    plan = make_plan(shapes, options.quantization, options.lm_head_quantization, options.exclude)
    return QuantizationPlan(plan.layers, ("fc", *plan.left_out), plan.body, plan.head)


# Calibration


def embedding(draft: Checkpoint, base: Checkpoint, names: Mapping[str, str]) -> Any:
    """The embedding [V, H] as a torch tensor: the draft's own, or the base's."""
    own = names.get("embed_tokens.weight")
    return to_torch(draft.read(own) if own else base.read(of_base(base, f"{EMBEDDING}.weight")))


def linears_beside(draft: Checkpoint, names: Mapping[str, str]) -> list[str]:
    """The Linears of heads and the like, which the module does not have."""
    known = set(names.values())
    return [
        name.removesuffix(".weight")
        for name, tensor in draft.tensors.items()
        if name not in known and name.endswith(".weight") and len(tensor.shape) == 2
    ]


def of_base(base: Checkpoint, name: str) -> str:
    """The name on disk of a tensor of the base."""
    return stored_name(name, text_stack(base))


def pairs_of(
    job: DraftJob, windows: calibration.Windows
) -> tuple[list[CalibrationPair], list[CalibrationPair]]:
    """The pairs of hidden states and embeddings that the base feeds the draft: for calibration, and
    held out. The base is freed after that."""
    import torch

    from edgespec.modules.base_model import aux_hidden_states, final_hidden_state

    device, row = job.options.device, job.row
    table = embedding(job.named, job.base, job.names)
    model = load_model(job.base, device, job.log)

    def pairs(window: Sequence[int]) -> list[CalibrationPair]:
        ids = torch.tensor([window], device=device)
        with modelopt.captured(job.log):
            if row.reads_final:
                states = final_hidden_state(model, ids).cpu()
            else:
                states = aux_hidden_states(model, job.aux_layers, ids).cpu()
        job.progress.advance(1)
        return row.pairs(job.config, states, ids[0].cpu(), table)

    def all_of(several: Sequence[Sequence[int]]) -> list[CalibrationPair]:
        return [pair for window in several for pair in pairs(window)]

    return all_of(windows.calibration), all_of(windows.held_out)


def load_model(checkpoint: Checkpoint, device: str, log: modelopt.Log) -> Any:
    """A transformers model on `device`, in eval mode and the dtype of the checkpoint."""
    with modelopt.captured(log):
        from edgespec.modules.base_model import load_base

        return load_base(checkpoint.path, device)


def read_weights(
    draft: Checkpoint, base: Checkpoint, names: Mapping[str, str], config: DraftConfig
) -> dict[str, Any]:
    """Own name -> torch tensor in its own dtype; lm_head is the base's where the draft has none."""
    weights = {
        own: to_torch(draft.read(name))
        for own, name in names.items()
        if own != "embed_tokens.weight"
    }
    if not config.own_head:
        tied = of_base(base, f"{EMBEDDING}.weight")
        weights[SHARED_HEAD] = to_torch(
            base.read(SHARED_HEAD if SHARED_HEAD in base.tensors else tied)
        )
    return weights


def calibrated(
    job: DraftJob, weights: Mapping[str, Any], pairs: Sequence[CalibrationPair]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The packed tensors by their own names, and the two forms of the settings on disk. BuildError
    where ModelOpt fails."""
    plan, device, dtype = job.plan, job.options.device, weights["fc.weight"].dtype
    module = job.row.module(job.config).to(dtype).eval()
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    module.to(device)
    casts = job.row.casts_hidden_states
    inputs = [
        (states.to(device, dtype if casts else states.dtype), e.to(device, dtype))
        for states, e in pairs
    ]
    advance = job.progress.advance
    job.progress.start("calibrate", modelopt.steps(plan, len(inputs)))
    settings = modelopt.insert_quantizers(module, plan, plan.left_out, job.log)
    modelopt.calibrate(module, plan, inputs, lambda pair: module(*pair), advance, job.log)
    few = tuple(part[:2] for part in inputs[0])
    return modelopt.pack(module, lambda: module(*few), dtype, job.log), *settings


# What is written


def written_pieces(
    draft: Checkpoint, names: Mapping[str, str], plan: QuantizationPlan, packed: Mapping[str, Any]
) -> list[TensorChunk]:
    """The draft's tensors byte for byte; those of quantized Linears are replaced by their packed
    tensors."""
    modules = {names.get(f"{module}.weight", f"{module}.weight"): module for module in plan.layers}
    pieces = []
    for name in dict.fromkeys((*draft.tensors, *modules)):  # a shared lm_head is not there yet
        if name not in modules:
            pieces.append(copied(draft, name))
            continue
        module, prefix = modules[name], name.removesuffix("weight")
        parts = {
            own.removeprefix(f"{module}."): tensor
            for own, tensor in packed.items()
            if own.startswith(f"{module}.")
        }
        for part in ("weight", *sorted(parts.keys() - {"weight", "bias"})):
            pieces.append(array_piece(prefix + part, to_numpy(parts[part])))
    return pieces


def on_disk(names: Mapping[str, str], name: str) -> str:
    """The name on disk of one of our Linears; any other string as it is."""
    return stored(names, name) if f"{name}.weight" in names else name


# The check


def compare(
    job: DraftJob, weights: Mapping[str, Any], written: Checkpoint, pairs: Sequence[CalibrationPair]
) -> QuantizeCheck:
    """The report on the draft before and after, in float32, over the held-out pairs."""
    import torch

    with checking.read_back():
        quantization = read_quantization(written)
    assert quantization is not None
    job.progress.start("check", len(pairs))
    original = {name: tensor.float() for name, tensor in weights.items()}
    quantized, errors = dict(original), {}
    for module, scheme in job.plan.layers.items():
        with checking.read_back():
            weight = read_weight(written, quantization, on_disk(job.names, module))
        if weight is None or weight.scheme is not scheme:
            raise BuildError(f"{module} was not written as {scheme.name}.", "Please report this.")
        quantized[f"{module}.weight"], errors[module] = checking.effective_weight(
            weight, original[f"{module}.weight"]
        )
    for own, name in job.names.items():
        if own.removesuffix(".weight") not in job.plan.layers and own in original:
            assert np.array_equal(to_numpy(original[own]), written.read(name).astype(np.float32))
    before, after = (job.row.module(job.config).eval() for _ in range(2))
    before.load_state_dict(original)
    after.load_state_dict(quantized)
    sums = checking.Sums()
    with torch.no_grad():
        for states, embeds in pairs:
            given = states.float(), embeds.float()
            sums.add(before(*given), after(*given))
            job.progress.advance(1)
    return sums.report(errors)
